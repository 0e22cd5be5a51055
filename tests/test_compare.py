"""compare.py: which runs it makes in which order, what it does about stops and failures, and what its tables say of logs."""
import json
import statistics
import subprocess
from pathlib import Path

import pytest

import compare
import configurator
from compare import Run

ROOT = Path(__file__).resolve().parent.parent
LOGS = sorted((ROOT / "results/compare").glob("*_lr*_seed*.jsonl"))
METHODS = ["vanilla", "depth_attention", "moda"]


def result(loss, **fields):
    return {"val_loss": loss, "val_bpb": loss / 2, "params": 2_000_000, "tokens": 1_000_000, "tokens_per_s": 100.0, "seconds": 50.0, "peak_gb": 1.5, "max_iters": 10,
            "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}} | fields


def write_log(folder, run, loss, steps=10, last=None, **extra):
    """A log of train.py: `last` steps of `steps` (all of them if None), and compare.py's line if `extra` has anything."""
    folder.mkdir(parents=True, exist_ok=True)
    last = steps if last is None else last
    lines = [{"config": {"learning_rate": run.lr, "seed": run.seed, "max_iters": steps}, "n_params": 7, "device": "cpu", "versions": {"torch": "2"}}]
    lines += [{"step": step, "train_loss": loss, "tokens": 8 * step, "tokens_per_s": 100 * step} for step in range(1, last + 1)]
    lines += [{"step": last, "val_loss": loss, "val_bpb": loss / 2}]
    path = folder / f"{run.name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines + [extra] * bool(extra)))
    return path


# ----------------------------------------------------------------------------------------------------------------------
# the plan

def test_configs_differ_in_the_method_alone():
    def settings(path):
        return configurator.configure(ROOT / "train.py", [str(path)], model_fields=True).as_dict()
    vanilla, names = settings(ROOT / "config/compare/vanilla.py"), configurator.configure(ROOT / "compare.py", []).methods.split(",")
    assert sorted(names + ["base"]) == sorted(path.stem for path in (ROOT / "config/compare").glob("*.py"))
    for name in names:
        differ = {key for key, value in settings(ROOT / f"config/compare/{name}.py").items() if value != vanilla[key]} - {"out_dir"}
        own = ("depth", "moda", "denseformer", "attnres", "mhc", "connector") + ("n_layer", "n_loop") * name.startswith("looped")
        assert all(key.startswith(own) for key in differ) and (differ or name == "vanilla"), (name, differ)
        assert name in compare.TITLES


def test_vanilla_chooses_the_rate_of_the_others():
    done = {}
    assert compare.plan(METHODS, [1.0, 2.0, 3.0], 3, done) == [Run("vanilla", 1.0, 1), Run("vanilla", 2.0, 1), Run("vanilla", 3.0, 1), Run("depth_attention", 1.0, 1)]
    done |= {Run("vanilla", lr, 1): result(loss) for lr, loss in ((1.0, 5.0), (2.0, 4.0))}
    assert len(compare.plan(METHODS, [1.0, 2.0, 3.0], 3, done)) == 4  # one rate is not known yet
    done[Run("vanilla", 3.0, 1)] = result(4.5)
    assert compare.plan(METHODS, [1.0, 2.0, 3.0], 3, done)[4:] == [
        Run("depth_attention", 2.0, 1), Run("moda", 2.0, 1), Run("vanilla", 2.0, 2), Run("depth_attention", 2.0, 2),
        Run("depth_attention", 3.0, 1), Run("moda", 3.0, 1), Run("vanilla", 2.0, 3), Run("depth_attention", 2.0, 3)]
    with_variant = compare.plan([*METHODS, "looped_vanilla"], [1.0, 2.0, 3.0], 3, done)
    assert [run for run in with_variant if run.method != "looped_vanilla"] == compare.plan(METHODS, [1.0, 2.0, 3.0], 3, done)
    assert [with_variant[place] for place in (8, 13)] == [Run("looped_vanilla", 2.0, 1), Run("looped_vanilla", 3.0, 1)] and len(with_variant) == 14


def test_a_rate_at_which_vanilla_fails_is_none_for_the_others():
    done, diverged = {Run("vanilla", 1.0, 1): result(5.0)}, Run("vanilla", 2.0, 1)
    assert len(compare.plan(METHODS, [1.0, 2.0], 1, done)) == 3
    assert compare.plan(METHODS, [1.0, 2.0], 1, done, [diverged])[3:] == [Run("moda", 1.0, 1)]
    assert compare.plan(METHODS, [1.0, 2.0], 1, {}, [diverged, Run("vanilla", 1.0, 1)]) == [Run("vanilla", 1.0, 1), diverged, Run("depth_attention", 1.0, 1)]


def test_expected_seconds_come_from_the_method_else_from_vanilla():
    run = Run("mhc", 1.0, 1)
    assert compare.expected_seconds(run, {}) is None
    done = {Run("vanilla", lr, 1): result(5.0, seconds=seconds) for lr, seconds in ((1.0, 40.0), (2.0, 60.0))}
    expected = compare.expected_seconds(run, done)
    assert expected == 50 * compare.COST["mhc"]
    assert compare.expected_seconds(run, done | {Run("mhc", 2.0, 1): result(5.0, seconds=70.0)}) == 70
    options = configurator.configure(ROOT / "compare.py", [])
    assert not compare.can_end(options, run, done, expected - 10) and compare.can_end(options, run, done, expected + 1) and compare.can_end(options, run, {}, 90)
    assert compare.can_end(configurator.configure(ROOT / "compare.py", ["--cut=True"]), run, done, expected - 10)


# ----------------------------------------------------------------------------------------------------------------------
# making the runs, with processes that only pretend to train

@pytest.fixture
def launch(corpus, tmp_path, monkeypatch):
    """launch(pretend, *argv) calls compare.main with `pretend`(run) -> (loss, steps of 10 that are made, shell command) in place of training; returns the runs begun."""
    def call(pretend, *argv):
        begun = []

        def start(c, run, gpu):
            begun.append(run)
            loss, steps, command = pretend(run)
            folder = tmp_path / "runs" / run.name
            write_log(folder, run, loss, last=steps).rename(folder / "log.jsonl")
            (folder / "console.txt").write_text("begins\nends so")
            return subprocess.Popen(["sh", "-c", command])
        monkeypatch.setattr(compare, "start", start)
        monkeypatch.setattr(compare.time, "sleep", lambda seconds, wait=compare.time.sleep: wait(seconds / 10))
        compare.main([f"--data_dir={corpus}", f"--out_dir={tmp_path / 'runs'}", f"--results={tmp_path / 'results'}", "--learning_rates=2,1", "--seeds=1", "--max_iters=10",
                      "--methods=vanilla,moda,mhc", *argv])
        return begun
    return call


def test_runs_what_is_missing_and_nothing_twice(launch, tmp_path, capsys):
    write_log(tmp_path / "results", Run("vanilla", 1.0, 1), 3.0)
    begun = launch(lambda run: (4.0, 10, "exit 0"))
    assert begun == [Run("vanilla", 2.0, 1), Run("moda", 1.0, 1), Run("mhc", 1.0, 1), Run("moda", 2.0, 1), Run("mhc", 2.0, 1)]
    kept = [json.loads(line) for line in (tmp_path / "results/mhc_lr2_seed1.jsonl").read_text().splitlines()]
    assert kept[-1]["seconds"] > 0 and len(kept) == 13
    assert "moda, learning rate 1, seed 1: validation loss 4.0000, 2.0000 bits per byte, 550 tokens/s" in capsys.readouterr().out
    assert launch(lambda run: (4.0, 10, "exit 0")) == []
    assert "6 runs are done, which is all." in capsys.readouterr().out


def test_a_failure_does_not_hold_up_the_others(launch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: 2 runs failed: moda_lr2_seed1, moda_lr1_seed1; "):
        launch(lambda run: (4.0, 5, "exit 3") if run.method == "moda" else (4.0, 10, "exit 0"), "--gpus=2")
    assert "moda, learning rate 2, seed 1 FAILED with exit code 3: ends so" in capsys.readouterr().out
    assert sorted(path.stem for path in (tmp_path / "results").glob("*.jsonl")) == ["mhc_lr1_seed1", "mhc_lr2_seed1", "vanilla_lr1_seed1", "vanilla_lr2_seed1"]
    assert launch(lambda run: (4.0, 10, "exit 0")) == [Run("moda", 2.0, 1), Run("moda", 1.0, 1)]  # a new call tries again


def test_what_is_cut_is_continued(launch, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "STOP_SECONDS", 0)
    begun = launch(lambda run: (4.0, 10, "exit 0") if run.lr == 2 else (4.0, 5, "trap 'exit 0' TERM; sleep 30 & wait"), "--seconds=1")
    assert begun == [Run("vanilla", 2.0, 1), Run("vanilla", 1.0, 1)]
    assert "vanilla, learning rate 1, seed 1: stopped and saved" in capsys.readouterr().out
    assert [path.stem for path in (tmp_path / "results").glob("*.jsonl")] == ["vanilla_lr2_seed1"]
    assert launch(lambda run: (4.0, 10, "exit 0"))[0] == Run("vanilla", 1.0, 1)
    last = json.loads((tmp_path / "results/vanilla_lr1_seed1.jsonl").read_text().splitlines()[-1])
    assert last["seconds"] >= 0.3  # of both processes: the second alone takes a tenth of that


def test_ctrl_c_ends_with_a_sentence_and_saves(launch, monkeypatch, capsys):
    def sleep(seconds):
        raise KeyboardInterrupt
    monkeypatch.setattr(compare.time, "sleep", sleep)
    with pytest.raises(SystemExit, match="error: stopped by Ctrl-C; the same command goes on."):
        launch(lambda run: (4.0, 5, "exec sleep 30"))
    assert "vanilla, learning rate 2, seed 1: stopped and saved; the same command continues it." in capsys.readouterr().out


def test_what_cannot_end_in_time_is_not_begun(launch, tmp_path):
    for lr in (1.0, 2.0):
        write_log(tmp_path / "results", Run("vanilla", lr, 1), 3.0, seconds=100.0)
    assert launch(lambda run: (4.0, 10, "exit 0"), "--seconds=175") == [Run("moda", 2.0, 1), Run("moda", 1.0, 1)]  # 150 s are expected of MoDA, 200 of mHC


def test_trains_for_real(corpus, tmp_path, capsys):
    tiny = "--n_layer=2 --n_embd=16 --n_head=2 --n_kv_head=1 --n_inner=32 --head_dim=8 --block_size=16 --batch_size=2 --global_batch_size=2 --device=cpu --dtype=float32"
    argv = ["--methods=vanilla", "--learning_rates=1e-2", "--seeds=1", "--max_iters=4", f"--data_dir={corpus}", f"--out_dir={tmp_path / 'runs'}",
            f"--results={tmp_path / 'results'}", f"--options={tiny} --log_interval=2 --eval_tokens=64"]
    compare.main(argv)
    found = compare.read_run(tmp_path / "results/vanilla_lr0.01_seed1.jsonl")
    assert found["finished"] and found["tokens"] == 128 and found["seconds"] > 0.5
    config = json.loads((tmp_path / "results/vanilla_lr0.01_seed1.jsonl").read_text().splitlines()[0])["config"]
    assert (config["learning_rate"], config["min_lr"], config["max_iters"], config["n_layer"], config["data_dir"]) == (1e-2, 1e-3, 4, 2, str(corpus))
    capsys.readouterr()
    compare.main(["--table", *argv])
    printed = capsys.readouterr().out
    assert f"| vanilla | {found['val_loss']:.4f} | {found['val_bpb']:.4f} |" in printed
    assert "a run reads 0.04 epochs" in printed  # 128 of 3600 tokens


# ----------------------------------------------------------------------------------------------------------------------
# the tables

def test_ties_are_what_seeds_alone_can_do():
    done = {Run("vanilla", 1.0, seed): result(loss) for seed, loss in ((1, 3.00), (2, 3.02), (3, 3.04))}
    done |= {Run("depth_attention", 1.0, seed): result(loss) for seed, loss in ((1, 2.90), (2, 2.94))}
    groups = compare.groups_of(done)
    spread, freedoms = compare.spread_of(groups)
    assert freedoms == 3 and spread == pytest.approx(((2 * statistics.variance([3.0, 3.02, 3.04]) + statistics.variance([2.9, 2.94])) / 3) ** 0.5)
    control, limit = groups["vanilla"][1.0], 2 * spread * (1 + 1 / 3) ** 0.5
    assert compare.verdict([result(3.02 + 1.01 * limit)], control, spread) == f"{1.01 * limit:+.4f}"
    assert compare.verdict([result(3.02 - 0.99 * limit)], control, spread) == f"{-0.99 * limit:+.4f} (tie)"
    assert compare.spread_of(compare.groups_of({Run("vanilla", 1.0, 1): result(3.0), Run("vanilla", 2.0, 1): result(3.1)})) == (None, 0)


def test_table():
    done = {Run("vanilla", 1.0, 1): result(3.0), Run("vanilla", 1.0, 2): result(3.01), Run("vanilla", 2.0, 1): result(3.2), Run("moda", 1.0, 1): result(2.8, tokens_per_s=80.0),
            Run("moda", 2.0, 1): result(2.7, tokens_per_s=80.0, peak_gb=2.5), Run("looped_vanilla", 1.0, 1): result(3.3), Run("looped_depth_attention", 1.0, 1): result(3.301)}
    lines = compare.table_lines(done, ["vanilla", "moda", "looped_vanilla", "looped_depth_attention"])
    assert lines[2:6] == ["| vanilla | 3.0050 ± 0.0071, 2 seeds | 1.5025 |  | 2.0 M | 100 |  | 1.5 GB |", "| MoDA | 2.7000 | 1.3500 | -0.3050 | 2.0 M | 80 | +25.0 % | 2.5 GB |",
                          "| 12 layers run twice | 3.3000 | 1.6500 | +0.2950 | 2.0 M | 100 | +0.0 % | 1.5 GB |",
                          "| the same with Depth-Attention | 3.3010 | 1.6505 | +0.0010 (tie) | 2.0 M | 100 | +0.0 % | 1.5 GB |"]
    assert lines[7:11] == ["| validation loss at peak learning rate | 1 | 2 |", "|---|---|---|", "| vanilla | **3.0050** | 3.2000 |", "| MoDA | 2.8000 | **2.7000** |"]
    assert lines[-2].startswith("7 runs of 10 steps, 1.0M tokens each, on one NVIDIA H200 each (torch 2.11.0); 6 minutes of it in all.")
    assert "0.0071 (1 degrees of freedom)" in lines[-1]


@pytest.mark.skipif(not LOGS, reason="results/compare holds no logs")
@pytest.mark.parametrize("folder", ["compare", "compare_embed"])
def test_the_readme_has_the_table_of_the_committed_logs(folder):
    methods = configurator.configure(ROOT / "compare.py", []).methods.split(",")
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    lines = compare.table_lines(compare.read_results(ROOT / "results" / folder), methods)
    rates = lines.index("")  # the second table, which is not printed where there is one rate
    wanted = lines if folder == "compare" else lines[:rates]
    missing = [line for line in wanted if line.startswith("| ") and line not in readme]
    assert not missing, f"`python compare.py --table --results=results/{folder}` prints lines that README.md lacks:\n" + "\n".join(missing)


def test_mistakes_are_said(refused, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the default --out_dir is made
    write_log(tmp_path / "held", Run("vanilla", 1.0, 1), 3.0)
    for lr, steps in ((1.0, 10), (2.0, 20)):
        write_log(tmp_path / "mixed", Run("vanilla", lr, 1), 3.0, steps=steps)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/data.json").write_text('{"tokens": {"train": 1, "val": 1}}')
    whole = write_log(tmp_path / "cut", Run("vanilla", 1.0, 1), 3.0)
    lines = whole.read_text().splitlines(keepends=True)
    for text in ("", lines[0], "".join(lines[:6]), "".join(lines)[:-20], "5\n"):
        whole.write_text(text)
        assert f"{whole} is empty, damaged or cut" in refused(compare.main, ["--table", f"--results={whole.parent}"])
    for argv, sentence in ((["--methods=moda"], "must begin with vanilla"), (["--methods=vanilla,magic"], "--methods=vanilla,magic must begin"), (["--learning_rates=1,x"], "must be positive numbers"),
                           (["--learning_rates=0"], "must be positive numbers"), (["--seeds=0"], "--seeds=0 must be at least 1"), (["--gpus=-1"], "--gpus=-1 must not be negative"),
                           (["--table", f"--results={tmp_path}"], "holds no log of a finished run yet"), ([f"--data_dir={tmp_path}"], "expected token shards"),
                           ([f"--data_dir={corpus}", f"--results={tmp_path / 'held'}", "--max_iters=11"], "a run of 10 steps, but --max_iters=11 was given"),
                           ([f"--data_dir={corpus}", f"--results={tmp_path / 'held'}"], "a run of 10 steps, but the others have 1000"),
                           (["--table", f"--results={tmp_path / 'held'}", "--max_iters=11"], "a run of 10 steps, but --max_iters=11 was given"),
                           (["--table", f"--results={tmp_path / 'mixed'}"], "vanilla_lr2_seed1, a run of 20 steps, but the others have 10"),
                           ([f"--data_dir={corpus}", f"--results={__file__}/x"], "cannot be made (Not a directory); give a folder"),
                           ([f"--data_dir={corpus}", f"--results={tmp_path / 'fresh'}", f"--out_dir={__file__}"], f"--out_dir={__file__} cannot be made (File exists)"),
                           (["--options=--dtype=float32 --seed=7"], "must leave --seed=7 away"),
                           ([f"--data_dir={corpus}", f"--results={tmp_path / 'other'}"], "read other data than")):
        assert sentence in refused(compare.main, argv)
