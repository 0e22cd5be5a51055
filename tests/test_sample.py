"""sample.py: prompts, windows, and what is drawn."""
import subprocess
import sys
import types

import pytest
import torch
from conftest import tiny_run

import checkpoint
import hf
import sample
import train
from configurator import ROOT, configure
from data.tokenizer import ByteTokenizer
from model import GPT, GPTConfig


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run on the 10 symbols a..j."""
    out = tmp_path_factory.mktemp("run")
    train.main([*tiny_run(corpus, out), "--max_iters=3"])
    return out


@pytest.fixture
def draw(run, capsys):
    """The texts that a command line prints."""
    def call(*argv):
        sample.main([f"--out_dir={run}", "--device=cpu", "--max_new_tokens=20", *argv])
        return capsys.readouterr().out.split("\n" + "-" * 80 + "\n")[:-1]
    return call


def test_continues_the_prompt(draw):
    texts = draw("--start=abc", "--num_samples=2", "--max_new_tokens=5")
    assert len(texts) == 2 and all(text.startswith("abc") and len(text) == 8 and set(text) <= set("abcdefghij") for text in texts)
    assert draw("--start=abc", "--max_new_tokens=0", "--num_samples=1") == ["abc"]


def test_case_34_a_character_that_is_not_in_the_vocabulary_is_named(run, refused):
    assert "'z'" in refused(sample.main, [f"--out_dir={run}", "--device=cpu", "--start=abz"])


def test_case_34_empty_and_one_token_prompts(draw, run, tmp_path):
    assert [len(text) for text in draw("--max_new_tokens=7")] == [7, 7, 7]  # from end-of-text, which is not printed
    assert [len(text) for text in draw("--start=a", "--max_new_tokens=7")] == [8, 8, 8]
    (tmp_path / "prompt.txt").write_text("abc")
    assert draw(f"--start=FILE:{tmp_path / 'prompt.txt'}", "--max_new_tokens=1", "--num_samples=1")[0].startswith("abc")


def test_case_34_an_empty_prompt_starts_from_end_of_text(tmp_path):
    assert sample.prompt_ids("", ByteTokenizer()) == [256] and sample.prompt_ids("a", ByteTokenizer()) == [97]
    (tmp_path / "empty.txt").write_text("")
    assert sample.prompt_ids(f"FILE:{tmp_path / 'empty.txt'}", ByteTokenizer()) == [256]


def test_a_text_ends_at_end_of_text():
    drawn = torch.tensor([[97, 98, 256, 256, 256], [97, 99, 100, 101, 102]])
    model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=257), generate=lambda *args, **options: drawn)
    c = configure(sample.__file__, ["--start=a", "--num_samples=2"])
    assert list(sample.texts(c, model, ByteTokenizer(), torch.device("cpu"))) == ["ab", "acdef"]


@pytest.mark.parametrize("prompt, new", [(40, 3), (10, 20), (16, 1), (1, 40)])
def test_case_35_beyond_the_block_cached_and_uncached_tokens_agree(run, prompt, new):
    model, _ = checkpoint.load_run(run)  # block_size 16
    ids = torch.arange(prompt)[None] * 3 % 10
    a, b = (model.generate(ids, new, temperature=0, use_cache=cache) for cache in (True, False))
    assert torch.equal(a, b) and a.shape == (1, prompt + new)


def test_case_36_top_k_zero_and_above_the_vocabulary_are_off(draw):
    same = draw("--start=a", "--top_k=0", "--seed=3")
    assert draw("--start=a", "--top_k=10", "--seed=3") == draw("--start=a", "--top_k=99999", "--seed=3") == same
    assert draw("--start=a", "--top_k=1", "--num_samples=1") == draw("--start=a", "--temperature=0", "--num_samples=1")  # argmax


def test_case_36_the_same_seed_draws_the_same_texts(draw):
    assert draw("--start=a", "--seed=1") == draw("--start=a", "--seed=1") != draw("--start=a", "--seed=2")


def test_case_36_samples_from_uniform_logits_differ():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=257)).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    c = configure(sample.__file__, ["--start=a", "--num_samples=16", "--max_new_tokens=1"])
    assert len(set(sample.texts(c, model, ByteTokenizer(), torch.device("cpu")))) >= 4


@pytest.mark.parametrize("option", [
    "--temperature=-1", "--top_k=-1", "--top_p=0", "--top_p=1.5", "--num_samples=0", "--seed=99999999999999999999", "--max_new_tokens=-1", "--which=worst", "--dtype=float16",
    "--device=cuda:9", "--start=FILE:/nowhere/prompt.txt", "--out_dir=/nowhere", "--init_from=/nowhere", "--max_tokens=3"])
def test_case_36_bad_options_are_clean_errors(run, refused, option):
    message = refused(sample.main, [f"--out_dir={run}", "--device=cpu", option])
    assert option.split("=")[0] in message or option.split("=")[1].removeprefix("FILE:") in message, message


def test_a_prompt_file_that_is_no_text_is_named(run, refused, tmp_path):
    (tmp_path / "prompt.txt").write_bytes("é".encode("latin-1"))
    assert f"{tmp_path}/prompt.txt is not UTF-8" in refused(sample.main, [f"--out_dir={run}", "--device=cpu", f"--start=FILE:{tmp_path}/prompt.txt"])


def test_a_run_without_a_tokenizer_says_so(corpus, own_corpus, tmp_path, refused):
    train.shards.write_json(own_corpus / "meta.json", {"vocab_size": 10})
    train.main([*tiny_run(own_corpus, tmp_path / "out"), "--max_iters=1", "--sample_tokens=3"])
    assert "comes without a tokenizer" in refused(sample.main, [f"--out_dir={tmp_path / 'out'}", "--device=cpu"])


def test_a_hugging_face_folder_gives_the_same_texts(tmp_path, capfd, refused):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=257))
    hf.export(model, tmp_path / "folder", tokenizer=ByteTokenizer())
    sample.main([f"--init_from={tmp_path / 'folder'}", "--device=cpu", "--start=def", "--temperature=0", "--max_new_tokens=6", "--num_samples=1"])
    ids = model.generate(torch.tensor([list(b"def")]), 6, temperature=0, stop_token=256)[0].tolist()
    assert capfd.readouterr().out.startswith(ByteTokenizer().decode(ids))
    (tmp_path / "folder" / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(sample.main, [f"--init_from={tmp_path / 'folder'}", "--device=cpu"])


def test_case_07_and_20_the_script_runs_from_any_directory(run, tmp_path):
    argv = [f"--out_dir={run}", "--device=cpu", "--start=ab", "--num_samples=1", "--max_new_tokens=2"]
    result = subprocess.run([sys.executable, ROOT / "sample.py", *argv], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stdout.startswith("ab"), result.stderr
