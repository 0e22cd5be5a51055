"""Checkpoints: whole or not there, readable without pickle's powers, named as the plain model is."""
import fcntl
import math
import os
import resource
import signal

import pytest
import torch

import checkpoint
from checkpoint import CheckpointError
from model import GPT, GPTConfig


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=10))
    config = {"out_dir": "out", "learning_rate": 1e-3, **vars(model.config)}
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": {}, "step": 7, "best_val_loss": math.inf, "config": config,
            "rng": {"torch": torch.get_rng_state(), "cuda": None}, "data": {"vocab_size": 10, "tokenizer": None, "bytes": None}}


def test_round_trip_needs_weights_only(state, tmp_path):
    checkpoint.save(tmp_path / "new" / "ckpt_last.pt", state)
    assert os.listdir(tmp_path / "new") == ["ckpt_last.pt"]
    raw = torch.load(tmp_path / "new" / "ckpt_last.pt", weights_only=True)
    assert tuple(raw) == checkpoint.KEYS
    loaded = checkpoint.load(tmp_path / "new" / "ckpt_last.pt")
    assert loaded["step"] == 7 and loaded["config"] == state["config"]
    assert all(torch.equal(loaded["model"][key], value) for key, value in state["model"].items())


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_case_23_prefixes_of_wrappers_are_dropped(state, tmp_path, prefix):
    plain = state["model"]
    state["model"] = {prefix + key.replace("layers.0.", "layers.0._orig_mod."): value for key, value in plain.items()}
    checkpoint.save(tmp_path / "ckpt_last.pt", state)
    model, _ = checkpoint.load_run(tmp_path)
    assert model.state_dict().keys() == plain.keys() and all(torch.equal(value, plain[key]) for key, value in model.state_dict().items())


def test_weights_that_do_not_fit_are_named(state, tmp_path):
    state["config"]["n_embd"] = 32
    checkpoint.save(tmp_path / "ckpt_last.pt", state)
    with pytest.raises(CheckpointError, match=r"embed.weight \(model \(10, 32\), file \(10, 16\)\)"):
        checkpoint.load_run(tmp_path)
    state["config"]["n_embd"], state["model"]["extra"] = 16, torch.zeros(1)
    checkpoint.save(tmp_path / "ckpt_last.pt", state)
    with pytest.raises(CheckpointError, match="extra .model lacks it"):
        checkpoint.load_run(tmp_path)


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_case_21_a_truncated_file_is_a_clean_error(state, tmp_path, share):
    path = tmp_path / "ckpt_last.pt"
    checkpoint.save(path, state)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(CheckpointError, match="ckpt_last.pt is not a whole checkpoint"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", [b"not a zip", b"\x80\x04K\x01."])
def test_foreign_files_are_clean_errors(tmp_path, content):
    (tmp_path / "ckpt_last.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        checkpoint.load(tmp_path / "ckpt_last.pt")
    torch.save({"model": {}}, tmp_path / "ckpt_last.pt")
    with pytest.raises(CheckpointError, match="lacks optimizer"):
        checkpoint.load(tmp_path / "ckpt_last.pt")


@pytest.mark.parametrize("key", sorted(checkpoint.KEYS))
def test_damaged_entries_are_clean_errors(state, tmp_path, key):
    checkpoint.save(tmp_path / "ckpt_last.pt", state | {key: None})
    with pytest.raises(CheckpointError, match=f"damaged: its '{key}' is a NoneType, not a"):
        checkpoint.load_run(tmp_path)


def test_an_absent_checkpoint_says_what_is_there(state, tmp_path):
    with pytest.raises(CheckpointError, match="no .pt file"):
        checkpoint.load(tmp_path / "ckpt_last.pt")
    checkpoint.save(tmp_path / "ckpt_best.pt", state)
    with pytest.raises(CheckpointError, match="holds ckpt_best.pt"):
        checkpoint.load(tmp_path / "ckpt_last.pt")


def test_case_21_the_writer_dies_after_half_the_bytes(state, tmp_path):
    path = tmp_path / "ckpt_last.pt"
    checkpoint.save(path, state)
    half = path.stat().st_size // 2
    child = os.fork()
    if child == 0:  # dies inside its write: past the limit the kernel sends SIGXFSZ, whose default is death
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))
        checkpoint.save(path, state | {"step": 8})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and (tmp_path / "ckpt_last.pt.tmp").stat().st_size == half
    assert checkpoint.load(path)["step"] == 7
    checkpoint.save(path, state | {"step": 9})  # the leftover is in nobody's way
    assert checkpoint.load(path)["step"] == 9 and os.listdir(tmp_path) == ["ckpt_last.pt"]


def test_case_21_a_full_disk_leaves_the_old_checkpoint_and_says_so(state, tmp_path):
    path = tmp_path / "ckpt_last.pt"
    checkpoint.save(path, state)
    half = path.stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write itself fails then, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))
    try:
        with pytest.raises(CheckpointError, match="could not write .*File too large.*the checkpoint that was there is untouched"):
            checkpoint.save(path, state | {"step": 8})
        with pytest.raises(CheckpointError, match="no checkpoint of that name existed before"):
            checkpoint.save(tmp_path / "ckpt_best.pt", state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoint.load(path)["step"] == 7 and os.listdir(tmp_path) == ["ckpt_last.pt"]


@pytest.mark.parametrize("links", [True, False])
def test_retention_keeps_the_newest_numbered_checkpoints(state, tmp_path, links, monkeypatch):
    if not links:
        def no_links(*paths):
            raise OSError("no hard links here")
        monkeypatch.setattr(os, "link", no_links)
    for step in (5, 10, 15):
        checkpoint.save(tmp_path / "ckpt_last.pt", state | {"step": step})
        checkpoint.keep(tmp_path, step, count=2)
    assert sorted(os.listdir(tmp_path)) == ["ckpt_00000010.pt", "ckpt_00000015.pt", "ckpt_last.pt"]
    assert checkpoint.load(tmp_path / "ckpt_00000010.pt")["step"] == 10
    checkpoint.keep(tmp_path, 20, count=0)
    assert len(checkpoint.numbered(tmp_path)) == 3


def test_a_folder_belongs_to_one_process_at_a_time(state, tmp_path):
    checkpoint.save(tmp_path / "ckpt_last.pt", state)
    other = os.open(tmp_path, os.O_RDONLY)  # its own lock, as another process would have it
    try:
        checkpoint.start_log(tmp_path, {"config": {}}, step=7)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        checkpoint.unlock()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for step in (None, 7):
            with pytest.raises(CheckpointError, match="another process is training"):
                checkpoint.start_log(tmp_path, {"config": {}}, step)
    finally:
        os.close(other)
    assert sorted(os.listdir(tmp_path)) == ["ckpt_last.pt", "log.jsonl"]


def test_load_run_prefers_the_best_and_falls_back_to_the_last(state, tmp_path):
    checkpoint.save(tmp_path / "ckpt_last.pt", state)
    assert checkpoint.load_run(tmp_path)[1]["step"] == 7
    checkpoint.save(tmp_path / "ckpt_best.pt", state | {"step": 5})
    assert checkpoint.load_run(tmp_path)[1]["step"] == 5 and checkpoint.load_run(tmp_path, "last")[1]["step"] == 7
