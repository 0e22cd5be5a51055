"""
What the tests share: a synthetic corpus, a tiny model, train.py called in this process, and train.py on several ranks.

Ranks are forked from a server that has imported PyTorch once, which makes a multi-process test cost about a second.
"""
import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import socket
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads only wait for each other

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: here, before any test does

import checkpoint
import train
from data import shards

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError, AttributeError):  # Triton is optional, and another version may have other insides
        import triton.language as tl
        from triton.runtime import interpreter
        patch = interpreter._patch_lang

        def patch_once(fn):
            """A launch puts the interpreter's functions into Triton's modules, and every call of a device function does so again: a third of the time."""
            modules = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
            return patch(fn) if any(tl.core.is_builtin(module.load) for module in modules) else None
        interpreter._patch_lang = patch_once


def write_corpus(folder, train_tokens=3600, val_tokens=400):
    """A walk over 10 symbols in which the next symbol is 0, 1 or 2 further on: something to learn, and nothing to download."""
    walk = np.cumsum(np.random.default_rng(0).integers(0, 3, train_tokens + val_tokens)) % 10
    shards.write_shard(folder / "train_000000.bin", walk[:train_tokens])
    shards.write_shard(folder / "val_000000.bin", walk[train_tokens:])
    meta = {"vocab_size": 10, "tokenizer": {"kind": "char", "chars": list("abcdefghij")}, "bytes": {"train": train_tokens, "val": val_tokens}}
    shards.write_json(folder / "meta.json", meta)
    return folder


def tiny_run(data_dir, out_dir):
    """Arguments of a run that takes half a second."""
    return ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2", "--device=cpu", "--dtype=float32", "--compile=False",
            "--max_iters=6", "--eval_interval=3", "--log_interval=1", "--warmup_iters=2", "--learning_rate=1e-2",
            f"--data_dir={data_dir}", f"--out_dir={out_dir}"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The corpus' folder, for tests that only read it."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def own_corpus(corpus, tmp_path):
    """A copy of the corpus' folder, for tests that damage it."""
    return shutil.copytree(corpus, tmp_path / "corpus")


@pytest.fixture
def tiny(corpus, tmp_path):
    """Arguments of a run into tmp_path/out; arguments after them override them."""
    return tiny_run(corpus, tmp_path / "out")


@pytest.fixture
def refused(capfd):
    """refused(main, argv) calls a script's main, checks that it ends with a clean error, and returns the error's sentence."""
    def call(main, argv):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        message = caught.value.code
        assert isinstance(message, str) and message.startswith("error: ") and len(message.splitlines()) == 1, message
        assert len(message.split()) >= 5 and "Traceback" not in capfd.readouterr().err
        return message
    return call


def log_lines(out_dir, key):
    """The lines of a run's log.jsonl that have a key."""
    return [line for line in map(json.loads, (out_dir / "log.jsonl").read_text().splitlines()) if key in line]


def losses(out_dir):
    """{step: train loss} of a run, each step once."""
    lines = log_lines(out_dir, "train_loss")
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["train_loss"] for line in lines}


def evaluations(out_dir):
    return {line["step"]: line["val_loss"] for line in log_lines(out_dir, "val_loss")}


def same_state(a, b):
    """Whether two checkpoints hold the same weights, optimizer state, step and best loss, bit for bit."""
    a, b = (checkpoint.load(path) for path in (a, b))
    def equal(x, y):
        if isinstance(x, torch.Tensor):
            return torch.equal(x, y)
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(equal(x[key], y[key]) for key in x)
        return all(map(equal, x, y)) and len(x) == len(y) if isinstance(x, (list, tuple)) else x == y
    return all(equal(a[key], b[key]) for key in ("model", "optimizer", "step", "best_val_loss", "rng"))


# ----------------------------------------------------------------------------------------------------------------------
# several ranks

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["train", "torch._dynamo", "torch.distributed.optim"])  # PyTorch imports the last two on first use, in seconds
# Where the server finds train.py: not every version of Python gives it this process's sys.path.
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(train.__file__), *filter(None, [os.environ.get("PYTHONPATH")])])


def _rank(rank, world_size, port, argv, before, output):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    if before:
        before(rank)
    if argv:
        train.main(argv)


def run_ranks(folder, world_size, argv, before=None, timeout=60):
    """
    Runs train.main(argv) on several processes, after before(rank) in each of them (which may be all if argv is None). Returns their exit codes and
    what they printed, which goes to files in the folder. One that does not end within `timeout` seconds is a failure; no process is left behind.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outputs = [folder / f"rank{rank}.txt" for rank in range(world_size)]
    processes = [server.Process(target=_rank, args=(rank, world_size, port, argv, before, output)) for rank, output in enumerate(outputs)]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, f"{len(hung)} of {world_size} ranks did not end: {[output.read_text() for output in outputs]}"
    return [process.exitcode for process in processes], [output.read_text() for output in outputs]


@pytest.fixture
def ranks(tmp_path):
    """run_ranks with tmp_path as the folder."""
    return functools.partial(run_ranks, tmp_path)
