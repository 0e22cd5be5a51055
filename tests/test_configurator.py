"""Options: defaults <- config file <- command line, and what a user's mistake gets."""
import subprocess
import sys

import pytest

import configurator
import train
from configurator import ROOT, Config, configure

SCRIPT = '''"""A script."""
import os

# ------------------------------------------------------
# run
out_dir = "out"  # where to write
start = ""  # text to begin with
# numbers
batch_size = 8  # sequences
learning_rate = 6e-4  # peak
compile = True  # compile the model
# ------------------------------------------------------
LIMIT = 3  # not an option: upper case
unexplained = 4

def f():
    inner = 1  # not an option: not at top level
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def refusal(script):
    """The sentence with which a command line is refused."""
    def call(*argv):
        with pytest.raises(SystemExit) as caught:
            configure(script, argv)
        assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
        return caught.value.code
    return call


def test_options_are_read_from_the_source_and_never_imported(script):
    options = configurator.read_options(script)
    assert [(o.name, o.default, o.meaning, o.section) for o in options] == [
        ("out_dir", "out", "where to write", "run"), ("start", "", "text to begin with", "run"), ("batch_size", 8, "sequences", "numbers"),
        ("learning_rate", 6e-4, "peak", "numbers"), ("compile", True, "compile the model", "numbers")]


def test_command_line_overrides_config_file_overrides_default(script, tmp_path):
    (tmp_path / "c.py").write_text("_twice = 2 * 8\nbatch_size = _twice\nlearning_rate = 1\n")
    c = configure(script, [str(tmp_path / "c.py"), "--learning_rate=3e-4"])
    assert c == Config(out_dir="out", start="", batch_size=16, learning_rate=3e-4, compile=True, given={"batch_size", "learning_rate"})
    assert c.as_dict().keys() == {"out_dir", "start", "batch_size", "learning_rate", "compile"}


def test_case_01_an_int_is_taken_for_a_float_and_a_float_refused_for_an_int(script, refusal):
    c = configure(script, ["--learning_rate=1"])
    assert c.learning_rate == 1.0 and type(c.learning_rate) is float
    message = refusal("--batch_size=1.5")
    assert "--batch_size=1.5" in message and "an int" in message and "a float" in message
    for bad in ("--batch_size=", "--batch_size=many", "--batch_size=1e3", "--learning_rate=fast", "--learning_rate=nan", "--learning_rate=inf",
                "--learning_rate="):
        assert bad.split("=")[0] in refusal(bad)


@pytest.mark.parametrize("word", ["false", "False", "0", "no", "off", "NO"])
def test_case_02_words_that_switch_off(script, word):
    assert configure(script, [f"--compile={word}"]).compile is False


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on"])
def test_case_02_words_that_switch_on(script, word):
    assert configure(script, [f"--compile={word}"]).compile is True


def test_case_02_other_words_are_refused(refusal):
    assert "--compile=maybe" in refusal("--compile=maybe") and "true" in refusal("--compile=maybe")
    assert "--compile" in refusal("--compile=2")


def test_case_03_everything_after_the_first_equals_sign_is_the_value(script):
    assert configure(script, ["--out_dir=lr=3e-4"]).out_dir == "lr=3e-4"


def test_case_04_help_prints_every_option_with_default_and_meaning(script, capsys):
    for argv in (["--help"], ["-h"], ["--batch_size=2", "--help"]):
        with pytest.raises(SystemExit) as caught:
            configure(script, argv)
        assert caught.value.code == 0
        printed = capsys.readouterr().out
        for option in configurator.read_options(script):
            assert any(f"--{option.name}={option.default}" in line and option.meaning in line for line in printed.splitlines())


def test_case_04_help_of_train_lists_the_model_too(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    printed = capsys.readouterr().out
    for name in ("learning_rate", "global_batch_size", "depth_stride", "mhc_num_streams", "n_loop"):
        assert f"--{name}=" in printed
    assert printed.count("--block_size=") == 1  # train.py's default stands for the model's


def test_case_04_space_instead_of_equals_sign(refusal):
    assert "--batch_size=5" in refusal("--batch_size", "5")
    assert "--batch_size=" in refusal("--batch_size")


def test_case_04_stray_words(refusal, tmp_path):
    assert "'5'" in refusal("5") and "neither" in refusal("5")
    assert "config/quickstart.py" in refusal("quickstart") and "config/quickstart.py" in refusal("config/quikstart.py")
    (tmp_path / "a.py").write_text("")
    assert "one config file" in refusal(str(tmp_path / "a.py"), str(tmp_path / "a.py"))


@pytest.mark.parametrize("typo, meant", [
    ("--learningrate=1", "learning_rate"), ("--lerning_rate=1", "learning_rate"), ("--batchsize=2", "batch_size"), ("--outdir=x", "out_dir"),
    ("-batch_size=2", "batch_size"), ("--no-compile", "compile"), ("--batch=2", "batch_size")])
def test_case_04_unknown_options_are_refused_with_the_nearest_name(refusal, typo, meant):
    assert typo.split("=")[0] in refusal(typo) and f"--{meant}" in refusal(typo)


@pytest.mark.parametrize("line, words", [
    ("lerning_rate = 1e-3", ["lerning_rate", "learning_rate"]),
    ("batch_size = 1.5", ["batch_size", "1.5", "an int", "a float"]),
    ("batch_size = True", ["batch_size", "a bool"]),
    ("batch_size = '8'", ["batch_size", "a string"]),
    ("compile = 'no'", ["compile", "a bool"]),
    ("out_dir = 2024", ["out_dir", "quotes"]),
    ("batch_size = None", ["batch_size", "None"]),
    ("x = 1 +", ["line 1", "SyntaxError"]),
    ("out_dir = 'a'\nbatch_size = width", ["line 2", "width"]),
])
def test_case_04_mistakes_inside_a_config_file(refusal, tmp_path, line, words):
    (tmp_path / "c.py").write_text(line)
    message = refusal(str(tmp_path / "c.py"))
    assert "c.py" in message and all(word in message for word in words), message


def test_case_05_strings_that_look_like_numbers_stay_strings(script):
    c = configure(script, ["--out_dir=2024", "--start=123"])
    assert (c.out_dir, c.start) == ("2024", "123")
    assert configure(script, ["--start=True"]).start == "True" and configure(script, ["--start="]).start == ""


def test_case_07_paths_of_the_repository_work_from_any_directory(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = configure(ROOT / "train.py", ["config/depth_410m.py"], model_fields=True)
    assert (c.n_layer, c.depth, c.depth_stride) == (32, "depth_attention", 16)
    (tmp_path / "mine.py").write_text("batch_size = 3\n")
    assert configure(script, ["mine.py"]).batch_size == 3
    assert configurator.find("data") == ROOT / "data" and configurator.find("elsewhere") == ROOT / "elsewhere"
    (tmp_path / "elsewhere").mkdir()
    assert configurator.find("elsewhere") == tmp_path / "elsewhere"


def test_operands_are_the_scripts_own(script):
    assert configure(script, ["a", "--batch_size=2", "b"], operands="RUN ...").operands == ["a", "b"]


def test_mistakes_end_a_process_with_one_line_on_stderr_and_no_traceback():
    result = subprocess.run([sys.executable, "-c", "import configurator; configurator.configure('train.py', ['--max_itres=5'])"],
                            capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert "--max_itres" in result.stderr and "--max_iters" in result.stderr


def test_the_option_table_of_a_script_or_a_usage_line():
    call = lambda *argv: subprocess.run([sys.executable, "configurator.py", *argv], capture_output=True, text=True, cwd=ROOT)
    assert "| `batch_size` | `8` |" in call("eval.py").stdout
    wrong = call("--help")
    assert wrong.returncode == 1 and wrong.stderr.startswith("usage: python configurator.py") and len(wrong.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "config").glob("*.py")))
def test_every_config_is_understood_and_gives_a_model(name):
    c = configure(ROOT / "train.py", [f"config/{name}"], model_fields=True)
    train.validate(c)
    train.GPTConfig(**{field: getattr(c, field) for field in train.MODEL_FIELDS if field != "vocab_size"}, vocab_size=c.vocab_size or 256)
    assert c.out_dir == f"out/{name[:-3]}"
    assert name == "quickstart.py" or c.min_lr == pytest.approx(0.1 * c.learning_rate)  # the quickstart is no recipe: its rates were tried out
    for world_size in (1, 8) if c.max_iters > 10_000 else (1,):
        train.accumulation_steps(c.global_batch_size, c.batch_size, world_size)


def test_case_39_the_readmes_option_table_is_the_code():
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    missing = [row for row in configurator.table(configurator.options_of(ROOT / "train.py", model_fields=True)) if row not in readme]
    assert not missing, "these rows of `python configurator.py train.py` are not in README.md:\n" + "\n".join(missing)
