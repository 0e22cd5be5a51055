"""
All methods at one shape (config/compare), on the same tokens, and the table of what came out:

    python compare.py                  # every run that is missing, one a GPU at a time; called again after a stop it goes on
    python compare.py --seconds=1200   # as many of them as can end in that time, those that matter most first
    python compare.py --table          # the README's table, from the logs in results/compare

The runs depend on each other: vanilla is trained at each learning rate, all methods at the one that was best for it, vanilla and Depth-Attention also
from other seeds, which shows how large a difference must be to mean something, and then each method at vanilla's second best rate, since one rate may
favour one method. What a run has learnt is a copy of its log, results/compare/METHOD_lrRATE_seedN.jsonl; such a run is done and never made again.
"""
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import configurator
from data import shards

# ----------------------------------------------------------------------------------------------------------------------
# what is compared
methods = "vanilla,depth_attention,denseformer,attnres,moda,mhc,depth_attention_dense,looped_vanilla,looped_depth_attention"  # files of config/compare; vanilla comes first
learning_rates = "1e-3,2e-3,4e-3,5e-4"  # peak rates to try on vanilla; the first is the one expected to win
seeds = 3  # seeds of vanilla and of Depth-Attention
max_iters = 0  # steps of every run; 0 = as config/compare/base.py says
data_dir = "data/pycode"  # folder of the shards
options = ""  # further options of train.py for every run, separated by blanks
# how the runs are made
out_dir = "out/compare"  # folder of the runs' folders (relative to the working directory)
results = "results/compare"  # folder of the finished runs' logs (relative to the repository's root)
gpus = 0  # runs at a time, one a GPU; 0 = as many as there are GPUs, one on a machine without
seconds = 0  # time for all; what cannot end in it is not begun; 0 = no limit
cut = False  # begin it all the same: it is stopped and saved when the time is over, and the next call continues it
table = False  # train nothing, print the tables
# ----------------------------------------------------------------------------------------------------------------------

CONTROL = {"looped_depth_attention": "looped_vanilla"}  # what a method is compared with, if not with vanilla
VARIANTS = ("depth_attention_dense", "looped_vanilla", "looped_depth_attention")  # come after the methods themselves
SPREAD = ("vanilla", "depth_attention")  # the methods that are trained from several seeds
COST = {"denseformer": 1.2, "attnres": 1.2, "moda": 1.5, "mhc": 1.6}  # time of a run over vanilla's, as long as none of its own has been measured
TITLES = {"vanilla": "vanilla", "depth_attention": "Depth-Attention, stride 12", "depth_attention_dense": "Depth-Attention, stride 6", "denseformer": "DenseFormer",
          "attnres": "AttnRes", "moda": "MoDA", "mhc": "mHC, 4 streams", "looped_vanilla": "12 layers run twice", "looped_depth_attention": "the same with Depth-Attention"}
OWN = ("out_dir", "init_from", "data_dir", "learning_rate", "min_lr", "seed", "max_iters")  # options of train.py that belong to a run's name and place
STOP_SECONDS = 20  # before the end of the time, when runs are told to save themselves


class Run(NamedTuple):
    """One training: method (a file of config/compare), peak learning rate and seed."""
    method: str
    lr: float
    seed: int

    @property
    def name(self):
        return f"{self.method}_lr{self.lr:g}_seed{self.seed}"

    def __str__(self):
        return f"{self.method}, learning rate {self.lr:g}, seed {self.seed}"


# ----------------------------------------------------------------------------------------------------------------------
# what is known so far

def read_run(path):
    """
    What a log says: method, lr, seed, max_iters, finished; val_loss and val_bpb of the last evaluation (None before the first); params; tokens; tokens_per_s,
    the median over its train lines; and, where compare.py added them as a last line, seconds (of all its processes) and peak_gb.
    """
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    header = lines[0]
    train, val = ([line for line in lines if key in line] for key in ("train_loss", "val_loss"))
    extra = lines[-1] if "seconds" in lines[-1] else {}
    c = header["config"]
    return {"method": Path(path).stem.rsplit("_lr", 1)[0], "lr": c["learning_rate"], "seed": c["seed"], "max_iters": c["max_iters"],
            "finished": bool(val) and val[-1]["step"] == c["max_iters"], "val_loss": val[-1]["val_loss"] if val else None,
            "val_bpb": val[-1].get("val_bpb") if val else None, "params": header["n_params"], "tokens": train[-1]["tokens"] if train else 0,
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in train) if train else None,
            "seconds": extra.get("seconds"), "peak_gb": extra.get("peak_gb"), "device": header["device"], "versions": header["versions"]}


def read_results(folder):
    """{Run: read_run} of the logs in the folder. Raises ValueError for one that is not whole: only finished ones are put there."""
    found = {}
    for path in sorted(Path(folder).glob("*_lr*_seed*.jsonl")):
        try:
            r = read_run(path)
        except (ValueError, LookupError, TypeError):
            r = {"finished": False}
        if not r["finished"]:
            raise ValueError(f"{path} is empty, damaged or cut, not the whole log of a run; delete it, and python compare.py makes that run again.")
        found[Run(r["method"], r["lr"], r["seed"])] = r
    return found


def plan(methods, rates, seeds, done, failed=()):
    """
    The runs in order of worth, as far as they can be named: which they are depends on what the `done` ones ({Run: read_run}) gave. First vanilla at every
    rate, with one run of Depth-Attention at the expected one, so that two GPUs have work; then the methods at vanilla's best; the second seed; the
    variants; the methods at vanilla's second best rate; the other seeds; the variants at that rate. A rate at which vanilla `failed` is none for the others.
    """
    first = [Run("vanilla", lr, 1) for lr in rates] + [Run("depth_attention", rates[0], 1)] * ("depth_attention" in methods)
    sweep = {run.lr: done[run]["val_loss"] for run in first[:len(rates)] if run in done}
    if not sweep or any(run not in done and run not in failed for run in first[:len(rates)]):
        return first
    ranked = sorted(sweep, key=sweep.get)
    main, variants = [method for method in methods if method not in VARIANTS], [method for method in methods if method in VARIANTS]
    repeated = [Run(method, ranked[0], seed) for seed in range(2, seeds + 1) for method in SPREAD if method in methods]
    wanted = [*first, *(Run(method, ranked[0], 1) for method in main), *repeated[:len(SPREAD)], *(Run(method, ranked[0], 1) for method in variants)]
    again = [[Run(method, lr, 1) for lr in ranked[1:2] for method in group] for group in (main, variants)]
    return list(dict.fromkeys([*wanted, *again[0], *repeated[len(SPREAD):], *again[1]]))


def note_data(c):
    """
    Keeps what the runs read as data.json among the results: {"tokens": {"train", "val"}, and vocab_size, bytes, made_with as meta.json says}. Raises ValueError
    if runs that are there already read something else.
    """
    folder, file = configurator.find(c.data_dir), configurator.ROOT / c.results / "data.json"
    meta = shards.load_meta(folder)
    data = {"tokens": {split: shards.open_split(folder, split).n_tokens for split in ("train", "val")}, **{key: meta.get(key) for key in ("vocab_size", "bytes", "made_with")}}
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != data:
        raise ValueError(f"{file} says that the runs in its folder read other data than {folder} holds; give another --results and --out_dir, or the same data.")
    configurator.make_folder("results", file.parent)
    shards.write_json(file, data)


def expected_seconds(run, done):
    """How long a run will take, from those that are done; None if none tells."""
    own = [r["seconds"] for other, r in done.items() if other.method == run.method and r["seconds"]]
    control = [r["seconds"] for other, r in done.items() if other.method == "vanilla" and r["seconds"]]
    return statistics.median(own) if own else statistics.median(control) * COST.get(run.method, 1.1) if control else None


# ----------------------------------------------------------------------------------------------------------------------
# making the runs

def train_here(folder, argv):
    """What a run's process does: train.py's main, then the GPU memory that it took at most, as a line of folder/processes.jsonl."""
    import torch

    import train
    train.main(argv)
    if torch.cuda.is_available():
        add_line(folder, {"peak_gb": torch.cuda.max_memory_allocated() / 1e9})


def add_line(folder, line):
    with open(Path(folder) / "processes.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def start(c, run, gpu):
    """Starts a run's process on GPU number `gpu` (None: wherever train.py finds a device). Its output goes to console.txt in its folder."""
    folder = Path(c.out_dir).resolve() / run.name
    folder.mkdir(parents=True, exist_ok=True)
    argv = [f"config/compare/{run.method}.py", f"--out_dir={folder}", "--init_from=auto", f"--data_dir={configurator.find(c.data_dir)}",
            f"--learning_rate={run.lr}", f"--min_lr={run.lr / 10}", f"--seed={run.seed}", *[f"--max_iters={c.max_iters}"] * bool(c.max_iters), *c.options.split()]
    environment = dict(os.environ)
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    with open(folder / "console.txt", "a", encoding="utf-8") as console:
        code = "import sys, compare; compare.train_here(sys.argv[1], sys.argv[2:])"
        return subprocess.Popen([sys.executable, "-c", code, folder, *argv], cwd=configurator.ROOT, env=environment, stdout=console, stderr=subprocess.STDOUT)


def finish(c, run, process, began):
    """After a run's process has ended: its time is noted and, if the run is complete, its log goes to the results. Returns read_run or None."""
    folder = Path(c.out_dir) / run.name
    add_line(folder, {"seconds": time.monotonic() - began})
    log = folder / "log.jsonl"
    if process.returncode or not log.exists() or not read_run(log)["finished"]:
        return None
    noted = [json.loads(line) for line in (folder / "processes.jsonl").read_text(encoding="utf-8").splitlines()]
    last = {"seconds": round(sum(line.get("seconds", 0) for line in noted), 2), "peak_gb": max((line["peak_gb"] for line in noted if "peak_gb" in line), default=None)}
    target = configurator.ROOT / c.results / f"{run.name}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    shards.write_atomically(target, lambda file: file.write((log.read_text(encoding="utf-8") + json.dumps(last) + "\n").encode()))
    return read_run(target)


def report(run, process, result, c):
    """Prints what became of a run."""
    if result:
        bits = f", {result['val_bpb']:.4f} bits per byte" if result["val_bpb"] else ""
        print(f"{run}: validation loss {result['val_loss']:.4f}{bits}, {result['tokens_per_s']:,.0f} tokens/s, {result['seconds']:.0f} s", flush=True)
    elif process.returncode in (0, -signal.SIGTERM):
        print(f"{run}: stopped and saved; the same command continues it.", flush=True)
    else:
        text = (Path(c.out_dir) / run.name / "console.txt").read_text(encoding="utf-8").strip()
        print(f"{run} FAILED with exit code {process.returncode}: {text.splitlines()[-1] if text else 'it printed nothing'}", flush=True)


def train_all(c, methods, rates):
    """Makes the runs of the plan that are not done, several at a time. Returns those that failed."""
    import torch  # here, so that the tables do not need it
    slots = list(range(c.gpus or max(1, torch.cuda.device_count())))
    on_gpus, end = torch.cuda.is_available(), time.monotonic() + (c.seconds or math.inf) - STOP_SECONDS
    running, failed, done = {}, [], read_results(configurator.ROOT / c.results)  # running: slot -> (run, process, time of its start)
    check_steps(c, done, c.max_iters or configurator.configure(configurator.ROOT / "train.py", ["config/compare/base.py"], model_fields=True).max_iters)
    try:
        while time.monotonic() < end:
            for slot in [slot for slot, (_, process, _) in running.items() if process.poll() is not None]:
                run, process, began = running.pop(slot)
                result = finish(c, run, process, began)
                report(run, process, result, c)
                done |= {run: result} if result else {}
                failed += [] if result else [run]
            busy = [run for run, *_ in running.values()]
            waiting = [run for run in plan(methods, rates, c.seeds, done, failed) if run not in done and run not in busy and run not in failed]
            possible = [run for run in waiting if can_end(c, run, done, end - time.monotonic())]
            for slot, run in zip([slot for slot in slots if slot not in running], possible, strict=False):
                running[slot] = run, start(c, run, slot if on_gpus else None), time.monotonic()
            if not running:
                break
            time.sleep(0.2)
    finally:  # the time is over, or Ctrl-C
        for _, process, _ in running.values():
            process.terminate()
        for run, process, began in running.values():
            process.wait()
            report(run, process, finish(c, run, process, began), c)
    done = read_results(configurator.ROOT / c.results)
    left = [run.name for run in plan(methods, rates, c.seeds, done, failed) if run not in done]
    print(f"{len(done)} runs are done" + (f"; the next would be {', '.join(left[:4])} and so on, {len(left)} as far as is known." if left else ", which is all."), flush=True)
    return failed


def can_end(c, run, done, left):
    """Whether a run may begin with `left` seconds: it is expected to end in them or, if it may be cut, to get anywhere."""
    expected = expected_seconds(run, done)
    return left > STOP_SECONDS if c.cut or expected is None else left > expected


def check_steps(c, done, steps):
    """Raises ValueError if runs of another length than `steps` are among the results: they must not stand in one table."""
    for run, result in done.items():
        if result["max_iters"] != steps:
            why = f"--max_iters={steps} was given" if c.max_iters else f"the others have {steps}"
            raise ValueError(f"{c.results} holds {run.name}, a run of {result['max_iters']} steps, but {why}; give another --results and --out_dir, or that --max_iters.")


# ----------------------------------------------------------------------------------------------------------------------
# tables

def groups_of(done):
    """{method: {learning rate: [read_run of each seed]}}."""
    groups = {}
    for run, result in done.items():
        groups.setdefault(run.method, {}).setdefault(run.lr, []).append(result)
    return groups


def spread_of(groups):
    """Standard deviation of the validation loss between seeds, pooled over all (method, rate) that have several. (None, 0) if none has; else (it, freedoms)."""
    losses = [[r["val_loss"] for r in runs] for rates in groups.values() for runs in rates.values() if len(runs) > 1]
    freedoms = sum(len(group) - 1 for group in losses)
    return (math.sqrt(sum((len(group) - 1) * statistics.variance(group) for group in losses) / freedoms), freedoms) if losses else (None, 0)


def mean(runs, key="val_loss"):
    return statistics.fmean(r[key] for r in runs)


def best_rate(rates):
    return min(rates, key=lambda lr: mean(rates[lr]))


def verdict(own, control, spread):
    """
    The difference of two groups of runs in words. It is a tie if it is at most 2 standard deviations of what seeds alone would make of it:
    2 s sqrt(1/n + 1/m) for means of n and m runs with the pooled deviation s.
    """
    difference = mean(own) - mean(control)
    if spread is None:
        return f"{difference:+.4f}"
    return f"{difference:+.4f}" + " (tie)" * (abs(difference) <= 2 * spread * math.sqrt(1 / len(own) + 1 / len(control)))


def table_lines(done, methods, data=None):
    """The two tables and what must be said of them, as lines of Markdown. `done`: {Run: read_run}; methods in the table's order; data: what data.json says or None."""
    groups = groups_of(done)
    spread, freedoms = spread_of(groups)
    lines = ["| method | validation loss | bits per byte | against its control | parameters | tokens/s | time against vanilla | peak memory |", "|---|---|---|---|---|---|---|---|"]
    speed = {method: max(r["tokens_per_s"] for runs in rates.values() for r in runs) for method, rates in groups.items()}
    for method in filter(groups.__contains__, methods):
        runs, control = groups[method][best_rate(groups[method])], CONTROL.get(method, "vanilla")
        loss = f"{mean(runs):.4f}" + (f" ± {statistics.stdev(r['val_loss'] for r in runs):.4f}, {len(runs)} seeds" if len(runs) > 1 else "")
        bits = f"{mean(runs, 'val_bpb'):.4f}" if runs[0]["val_bpb"] else ""
        against = verdict(runs, groups[control][best_rate(groups[control])], spread) if method != control and control in groups else ""
        slower = f"{100 * (speed['vanilla'] / speed[method] - 1):+.1f} %" if method != "vanilla" and "vanilla" in speed else ""
        memory = f"{max(r['peak_gb'] for r in runs if r['peak_gb']):.1f} GB" if any(r["peak_gb"] for r in runs) else ""
        lines.append(f"| {TITLES.get(method, method)} | {loss} | {bits} | {against} | {runs[0]['params'] / 1e6:.1f} M | {speed[method]:,.0f} | {slower} | {memory} |")
    rates = sorted({run.lr for run in done})
    lines += ["", "| validation loss at peak learning rate | " + " | ".join(f"{lr:g}" for lr in rates) + " |", "|---" * (1 + len(rates)) + "|"]
    for method in filter(groups.__contains__, methods):
        cells = [f"{mean(groups[method][lr]):.4f}" if lr in groups[method] else "" for lr in rates]
        best = rates.index(best_rate(groups[method]))
        cells[best] = f"**{cells[best]}**"
        lines.append(f"| {TITLES.get(method, method)} | {' | '.join(cells)} |")
    return [*lines, "", *notes(done, spread, freedoms, data)]


def notes(done, spread, freedoms, data=None):
    """What the tables' numbers mean and rest on, as sentences."""
    some = next(iter(done.values()))
    told = f"{len(done)} runs of {some['max_iters']:,} steps, {some['tokens'] / 1e6:.1f}M tokens each, on one {some['device']} each (torch {some['versions']['torch']})"
    spent = sum(r["seconds"] or 0 for r in done.values())
    sentences = [told + (f"; {spent / 60:.0f} minutes of it in all." if spent else ".") + " Every method stands with the best of its learning rates "
                 "and the speed of its fastest run, since other work on a machine slows a run and nothing speeds one up."]
    if data:
        tokens = data["tokens"]
        sentences += [f"The data hold {tokens['train'] / 1e6:.1f}M tokens, of which a run reads {some['tokens'] / tokens['train']:.2f} epochs, and {tokens['val'] / 1e6:.2f}M for validation."]
    if spread is None:
        return [*sentences, "No method has several seeds at one rate, so nothing is known of the spread and no difference can be called one."]
    return [*sentences, f"Between seeds the loss has a standard deviation of {spread:.4f} ({freedoms} degrees of freedom); a difference of at most 2 standard deviations "
                        "of what seeds alone make of it is called a tie."]


# ----------------------------------------------------------------------------------------------------------------------

def read_options(c):
    """(methods, learning rates). Raises ValueError for options that cannot work, naming option, value and rule."""
    require = functools.partial(configurator.require, c)
    names = [name.strip() for name in c.methods.split(",")]
    there = sorted(path.stem for path in (configurator.ROOT / "config/compare").glob("*.py") if path.stem != "base")
    require("methods", set(names) <= set(there) and names[0] == "vanilla", f"must begin with vanilla and name files of config/compare: {', '.join(there)}")
    try:
        rates = [float(rate) for rate in c.learning_rates.split(",")]
    except ValueError:
        rates = []
    require("learning_rates", rates and all(0 < rate < math.inf for rate in rates), "must be positive numbers separated by commas")
    taken = [option for option in c.options.split() if option.lstrip("-").partition("=")[0] in OWN]
    require("options", not taken, f"must leave {' and '.join(taken)} away, which compare.py sets itself for every run")
    require("seeds", c.seeds >= 1, "must be at least 1")
    for name in ("max_iters", "gpus", "seconds"):
        require(name, getattr(c, name) >= 0, "must not be negative")
    return names, rates


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    c = configurator.configure(__file__, ["--table=True" if argument == "--table" else argument for argument in argv])
    with configurator.clean_errors():
        methods, rates = read_options(c)
        if c.table:
            done = read_results(configurator.ROOT / c.results)
            if not done:
                raise ValueError(f"{configurator.ROOT / c.results} holds no log of a finished run yet; python compare.py --results={c.results} makes some.")
            check_steps(c, done, c.max_iters or next(iter(done.values()))["max_iters"])
            file = configurator.ROOT / c.results / "data.json"
            return print("\n".join(table_lines(done, methods, json.loads(file.read_text(encoding="utf-8")) if file.exists() else None)))
        note_data(c)
        configurator.make_folder("out_dir", c.out_dir)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: stopped by SIGTERM; the same command goes on."))
        try:
            failed = train_all(c, methods, rates)
        except KeyboardInterrupt:
            raise SystemExit("error: stopped by Ctrl-C; the same command goes on.") from None
    if failed:
        raise SystemExit(f"error: {len(failed)} runs failed: {', '.join(run.name for run in failed)}; the last lines of their console.txt say why.")


if __name__ == "__main__":
    main()
