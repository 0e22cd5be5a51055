"""train.py on one process: the schedule, the data's order, resuming, evaluation, and what stops a run."""
import importlib.util
import json
import math
import os
import re
import signal
import sys
import time
import types

import numpy as np
import pytest
import torch
from conftest import evaluations, log_lines, losses, same_state, tiny_run

import checkpoint
import configurator
import hf
import plan
import train
from data import dataset, shards
from model import GPT, GPTConfig


def options(*argv):
    return configurator.configure(train.__file__, argv, model_fields=True)


# ----------------------------------------------------------------------------------------------------------------------
# pure functions

def test_case_29_learning_rate_at_the_corners():
    c = options("--max_iters=100", "--warmup_iters=10", "--learning_rate=1e-2", "--min_lr=1e-3")
    rates = [train.lr_at(step, c) for step in range(100)]
    assert rates[0] > 0 and rates[10] == max(rates) == 1e-2 and rates[99] == 1e-3 == min(rates[10:])
    assert all(a < b for a, b in zip(rates[:10], rates[1:11])) and all(a > b for a, b in zip(rates[10:99], rates[11:]))
    assert rates[54] == pytest.approx((1e-2 + 1e-3) / 2, rel=0.02)  # half-way down the cosine
    assert train.lr_at(1000, c) == 1e-3


@pytest.mark.parametrize("warmup, decay, iters", [
    (10, 10, 10), (20, 10, 10), (0, 0, 10), (0, 1, 10), (0, 0, 1), (0, 0, 0), (9, 0, 10), (10, 11, 20), (0, 0, 2)])
def test_case_06_degenerate_schedules_are_finite_and_in_range(warmup, decay, iters):
    c = options(f"--warmup_iters={warmup}", f"--lr_decay_iters={decay}", f"--max_iters={iters}")
    for step in range(iters + 15):
        assert 0 < train.lr_at(step, c) <= c.learning_rate


def test_accumulation_is_derived():
    assert train.accumulation_steps(16, 4, 1) == 4 and train.accumulation_steps(16, 4, 4) == 1


@pytest.mark.parametrize("sizes, words", [
    ((10, 4, 1), ["10", "4", "8 and 12", "--batch_size=2"]), ((6, 4, 2), ["= 8", "are: 8;", "--batch_size=3"]), ((3, 2, 2), ["are: 4."])])
def test_case_30_a_global_batch_that_does_not_divide_names_what_would(sizes, words):
    with pytest.raises(ValueError) as caught:
        train.accumulation_steps(*sizes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_peaks_are_of_the_device_and_unknown_ones_have_none():
    assert plan.peak_flops("NVIDIA H200", "bfloat16") == 989e12 != plan.peak_flops("NVIDIA H20", "bfloat16")
    assert plan.peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12 and plan.peak_flops("NVIDIA H100 PCIe", "float16") == 756e12
    assert plan.peak_flops("NVIDIA H200", "float32") is None and plan.peak_flops("x86_64", "bfloat16") is None


# ----------------------------------------------------------------------------------------------------------------------
# a run

def test_case_20_and_29_a_short_run_makes_every_update_and_leaves_a_checkpoint(tiny, tmp_path, monkeypatch):
    updates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: updates.append(self.param_groups[0]["lr"]) or step(self, *args))
    train.main([*tiny, "--max_iters=10", "--eval_interval=1000"])
    assert len(updates) == 10 and updates[2] == 1e-2 and updates[9] == pytest.approx(6e-5)
    out = tmp_path / "out"
    first, *lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert first["config"]["max_iters"] == 10 and first["config"]["n_kv_head"] == 2
    assert first["versions"]["torch"] == torch.__version__ and first["n_params"] > 0
    assert [line["lr"] for line in lines if "lr" in line] == updates
    assert lines[1].keys() == {"step", "train_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu"}
    assert lines[1]["tokens"] == 32 and lines[1]["mfu"] is None
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10]
    assert lines[-1]["val_bpb"] == pytest.approx(lines[-1]["val_loss"] / math.log(2))  # a byte a token in this corpus
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    model, saved = checkpoint.load_run(out)
    assert saved["step"] == 10 and saved["best_val_loss"] == lines[-1]["val_loss"] and saved["data"]["tokenizer"]["kind"] == "char"


def test_micro_steps_add_up_to_the_mean(tiny, tmp_path):
    """Case 28 on one rank: a global batch of 8 gives the same losses and weights in 1, 2 or 4 micro-steps."""
    runs = {}
    for size in (8, 4, 2):
        train.main([*tiny, f"--out_dir={tmp_path / str(size)}", f"--batch_size={size}", "--global_batch_size=8"])
        runs[size] = losses(tmp_path / str(size))
    for size in (4, 2):
        assert runs[size] == pytest.approx(runs[8], abs=1e-5)


def test_recomputing_layers_changes_nothing(tiny, tmp_path):
    looped = ["--n_loop=3", "--depth=depth_attention", "--connector=attnres", "--max_iters=3"]
    for again in (False, True):
        train.main([*tiny, *looped, f"--grad_checkpoint={again}", f"--out_dir={tmp_path / str(again)}"])
    assert losses(tmp_path / "True") == losses(tmp_path / "False")
    assert same_state(tmp_path / "True" / "ckpt_last.pt", tmp_path / "False" / "ckpt_last.pt")


def test_case_28_micro_losses_are_averaged():
    class Batches:
        def next_batch(self, step, micro_step):
            return torch.tensor((1.0, 2.0, 3.0, 6.0)[micro_step]), None
    weight = torch.ones((), requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = train.accumulate_gradients(lambda x, y: (None, weight * x), Batches(), 0, 4, torch.enable_grad(), scaler)
    assert loss == 3.0 and weight.grad == 3.0


# ----------------------------------------------------------------------------------------------------------------------
# resuming: the corpus has 224 windows, so an epoch is 7 steps of 32

LONG = ["--batch_size=8", "--global_batch_size=32", "--lr_decay_iters=9", "--max_iters=9"]


@pytest.mark.parametrize("cuts", [(3,), (6,), (7,), (4, 5)])
def test_case_18_a_resumed_run_equals_the_straight_one_bit_for_bit(tiny, tmp_path, straight, cuts):
    out = tmp_path / "out"
    for start, end in zip((0, *cuts), (*cuts, 9)):
        train.main([*tiny, *LONG, f"--max_iters={end}", f"--init_from={'resume' if start else 'scratch'}"])
    assert losses(out) == losses(straight)
    assert same_state(out / "ckpt_last.pt", straight / "ckpt_last.pt")
    common = evaluations(straight).keys()
    assert {step: loss for step, loss in evaluations(out).items() if step in common} == evaluations(straight)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """The run that was never cut."""
    out = tmp_path_factory.mktemp("straight")
    train.main([*tiny_run(corpus, out), *LONG])
    return out


def test_resuming_takes_what_is_not_given_from_the_run(tiny, tmp_path, capsys):
    train.main(tiny)
    train.main([f"--out_dir={tmp_path / 'out'}", "--init_from=resume", "--max_iters=8"])
    assert sorted(losses(tmp_path / "out")) == list(range(1, 9))
    assert "max_iters 6 -> 8" in capsys.readouterr().out


def test_a_run_from_before_an_option_was_there_resumes_with_its_default(tiny, tmp_path, refused):
    train.main([*tiny, "--max_iters=2"])
    path = tmp_path / "out/ckpt_last.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["n_coda"], state["config"]["cuda_graph"]
    torch.save(state, path)
    again = [f"--out_dir={tmp_path / 'out'}", "--init_from=resume", "--max_iters=3"]
    assert "n_coda is 0 in the checkpoint, 1 now" in refused(train.main, [*again, "--n_loop=2", "--n_coda=1"])
    train.main(again)
    assert torch.load(path, weights_only=True)["step"] == 3


@pytest.mark.parametrize("other", ["--block_size=8", "--n_layer=3", "--connector=mhc", "--depth=depth_attention", "--n_loop=2", "--n_embd=32",
                                   "--norm_eps=1e-6", "--vocab_size=12"])
def test_case_24_another_model_is_not_resumed(refused, finished, other):
    message = refused(train.main, [f"--out_dir={finished}", "--init_from=resume", other])
    assert other[2:].split("=")[0] in message and "in the checkpoint" in message and str(finished) in message


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train.main([*tiny_run(corpus, out), "--max_iters=2"])
    return out


def test_case_24_other_settings_are_one_loud_line(finished, capsys):
    train.main([f"--out_dir={finished}", "--init_from=resume", "--seed=5", "--learning_rate=1e-3", "--eval_only=True"])
    assert "OTHER SETTINGS than before: learning_rate 0.01 -> 0.001; seed 1337 -> 5." in capsys.readouterr().out


def test_a_run_beyond_max_iters_is_not_resumed(finished, refused):
    assert "2 steps already, more than --max_iters=1" in refused(train.main, [f"--out_dir={finished}", "--init_from=resume", "--max_iters=1"])


def test_case_25_nothing_to_resume(tiny, tmp_path, refused):
    assert "no checkpoint" in refused(train.main, [*tiny, "--init_from=resume"])
    (tmp_path / "out").mkdir()
    assert "holds no .pt file" in refused(train.main, [*tiny, "--init_from=resume"])
    train.main([*tiny, "--init_from=auto"])  # which starts from scratch here, and resumes the second time
    train.main([*tiny, "--init_from=auto", "--max_iters=7"])
    assert sorted(losses(tmp_path / "out")) == list(range(1, 8))


def test_a_hugging_face_folder_is_trained_further(tiny, tmp_path, corpus, refused):
    torch.manual_seed(5)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=12))
    hf.export(model, tmp_path / "folder")
    train.main([*tiny[3:], f"--init_from={tmp_path / 'folder'}"])
    out, split, stop = tmp_path / "out", shards.open_split(corpus, "val"), types.SimpleNamespace(caught="")
    c = options("--block_size=16", "--device=cpu")
    expected = train.evaluate(model, split, c, train.Ranks(c), torch.no_grad(), stop)
    assert evaluations(out)[0] == pytest.approx(expected, abs=1e-6) and evaluations(out)[6] < expected
    config = checkpoint.load(out / "ckpt_last.pt")["config"]
    assert (config["n_layer"], config["vocab_size"], config["block_size"]) == (1, 12, 16)
    hf.export(GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=9)), tmp_path / "small")
    message = refused(train.main, [*tiny[3:], f"--init_from={tmp_path / 'small'}"])
    assert "9" in message and "10" in message


def test_a_new_run_moves_an_old_one_aside(tiny, tmp_path):
    for seed in (1, 2, 3):
        train.main([*tiny, "--max_iters=1", f"--seed={seed}"])
    out = tmp_path / "out"
    seeds = [checkpoint.load(path / "ckpt_last.pt")["config"]["seed"] for path in (out / "earlier_1", out / "earlier_2", out)]
    assert seeds == [1, 2, 3] and len(log_lines(out / "earlier_1", "train_loss")) == 1


def test_numbered_checkpoints(tiny, tmp_path):
    train.main([*tiny, "--eval_interval=100", "--keep_interval=2", "--keep_count=2", "--save_interval=1"])
    assert [path.name for path in checkpoint.numbered(tmp_path / "out")] == ["ckpt_00000004.pt", "ckpt_00000006.pt"]


# ----------------------------------------------------------------------------------------------------------------------
# evaluation

def test_case_13_validation_is_the_token_weighted_mean_over_the_whole_split(tiny, tmp_path, corpus):
    train.main([*tiny, "--batch_size=2"])
    found = evaluations(tmp_path / "out")[6]
    model, _ = checkpoint.load_run(tmp_path / "out", "last")
    split = shards.open_split(corpus, "val")  # 400 tokens: 24 windows of 16 targets, which neither 5 nor 7 divides
    per_window = [model(x[None], y[None])[1].item() for x, y in zip(*split.windows(range(split.n_windows(16)), 16))]
    assert len(per_window) == 24 and found == pytest.approx(sum(per_window) / 24, abs=1e-6)
    stop = types.SimpleNamespace(caught="")
    for size in (1, 5, 7, 24, 100):
        c = options(f"--batch_size={size}", "--block_size=16")
        assert train.evaluate(model, split, c, train.Ranks(options("--device=cpu")), torch.no_grad(), stop) == pytest.approx(found, abs=1e-6)


def test_evaluation_leaves_training_untouched(tiny, tmp_path):
    for interval in (1, 1000):
        train.main([*tiny, f"--out_dir={tmp_path / str(interval)}", f"--eval_interval={interval}"])
    assert losses(tmp_path / "1") == losses(tmp_path / "1000") and len(evaluations(tmp_path / "1")) == 7
    a, b = (checkpoint.load(tmp_path / str(interval) / "ckpt_last.pt") for interval in (1, 1000))
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"]) and torch.equal(a["rng"]["torch"], b["rng"]["torch"])


def test_eval_only_prints_and_writes_nothing(finished, tiny, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    train.main([f"--out_dir={finished}", "--init_from=resume", "--eval_only=True"])
    assert f"step 2: val_loss {evaluations(finished)[2]:.6f}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    train.main([*tiny, "--eval_only=True"])
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# what stops a run

def at_step(monkeypatch, step, action):
    """Calls the action in the middle of the update that follows `step` updates."""
    lr_at = train.lr_at
    monkeypatch.setattr(train, "lr_at", lambda now, c: (action() if now == step else None, lr_at(now, c))[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_case_26_a_signal_ends_the_run_within_the_step_and_it_resumes(tiny, tmp_path, straight, monkeypatch, number):
    long = [*tiny, *LONG]
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), number))
        train.main(long)
    assert checkpoint.load(tmp_path / "out" / "ckpt_last.pt")["step"] == 5 and max(losses(tmp_path / "out")) == 5
    assert signal.getsignal(number) == handler
    train.main([*long, "--init_from=resume"])
    assert losses(tmp_path / "out") == losses(straight) and evaluations(tmp_path / "out") == evaluations(straight)
    assert same_state(tmp_path / "out" / "ckpt_last.pt", straight / "ckpt_last.pt")


def test_case_26_a_signal_during_evaluation(tiny, tmp_path, straight, monkeypatch):
    long = [*tiny, *LONG]
    seen = []
    with monkeypatch.context() as patch:
        eval_windows, windows = shards.eval_windows, shards.TokenSplit.windows
        patch.setattr(shards, "eval_windows", lambda *args: seen.append("evaluation") or eval_windows(*args))

        def read(self, *args):
            if seen.count("evaluation") == 2 and "val" in str(self.paths[0]):
                seen.append("read")
                if seen.count("read") == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            return windows(self, *args)
        patch.setattr(shards.TokenSplit, "windows", read)
        train.main(long)
    assert seen.count("read") == 2  # not one batch more
    assert checkpoint.load(tmp_path / "out" / "ckpt_last.pt")["step"] == 3 and list(evaluations(tmp_path / "out")) == [0]
    train.main([*long, "--init_from=resume"])
    assert losses(tmp_path / "out") == losses(straight) and evaluations(tmp_path / "out") == evaluations(straight)
    for name in ("ckpt_last.pt", "ckpt_best.pt"):
        assert same_state(tmp_path / "out" / name, straight / name)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_update(tiny, tmp_path, monkeypatch, refused, what):
    forward = GPT.forward
    calls = []

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.inf

    def poisoned(self, idx, targets=None, **kwargs):
        logits, loss = forward(self, idx, targets, **kwargs)
        if self.training and targets is not None:
            calls.append(1)
            if len(calls) == 5:
                loss = loss * math.nan if what == "loss" else Explode.apply(loss)
        return logits, loss
    monkeypatch.setattr(GPT, "forward", poisoned)
    message = refused(train.main, [*tiny, "--save_interval=2"])
    assert f"step 5: the {what} is not finite" in message and "ckpt_last.pt" in message and "--learning_rate" in message
    saved = checkpoint.load(tmp_path / "out" / "ckpt_last.pt")
    assert saved["step"] == 4 and max(losses(tmp_path / "out")) == 4 and len(calls) == 5


def test_weights_that_are_not_finite_are_never_saved(tiny, tmp_path, refused):
    wild = ["--learning_rate=1e37", "--warmup_iters=0", "--weight_decay=30", "--init_std=30"]
    message = refused(train.main, [*tiny, *wild, "--eval_interval=1000", "--save_interval=1"])
    assert "step 1" in message and "not finite" in message and "there is no checkpoint yet" in message
    assert not list((tmp_path / "out").glob("*.pt"))


def test_a_full_disk_ends_the_run_with_a_sentence(tiny, tmp_path, monkeypatch, refused):
    def full(path, state):
        raise checkpoint.CheckpointError(f"could not write {path} (No space left on device): the checkpoint that was there is untouched.")
    monkeypatch.setattr(checkpoint, "save", full)
    assert "No space left" in refused(train.main, tiny)


def test_case_32_a_failing_compiler_is_answered_with_the_switch(tiny, monkeypatch, refused):
    def broken(graph, inputs):
        raise RuntimeError("the compiler is broken")

    def compile_blocks(self):
        for layer in self.layers:
            layer.mlp.forward = torch.compile(layer.mlp.forward, backend=broken)
    monkeypatch.setattr(GPT, "compile_blocks", compile_blocks)
    message = refused(train.main, [*tiny, "--compile=True"])
    assert "--compile=False" in message and "the compiler is broken" in message


def test_out_of_memory_is_answered_with_what_helps(tiny, monkeypatch, refused):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    monkeypatch.setattr(train, "accumulate_gradients", full)
    assert "--batch_size=2" in refused(train.main, tiny)


# ----------------------------------------------------------------------------------------------------------------------
# bad input: each is refused before anything is written

def damage(corpus, kind):
    if kind == "empty shard":
        (corpus / "train_000000.bin").write_bytes(b"")
    if kind == "odd shard":
        with open(corpus / "train_000000.bin", "ab") as file:
            file.write(b"x")
    if kind == "short shard":
        os.truncate(corpus / "train_000000.bin", 2000)
    if kind == "wrong magic":
        with open(corpus / "val_000000.bin", "r+b") as file:
            file.write((20240521).to_bytes(4, "little"))
    if kind == "short val":
        shards.write_shard(corpus / "val_000000.bin", [1] * 16)
    if kind == "no shards":
        (corpus / "train_000000.bin").unlink()
    if kind == "no vocabulary":
        shards.write_json(corpus / "meta.json", {})
    if kind == "broken meta":
        (corpus / "meta.json").write_text("{")
    if kind == "stale meta":
        shards.write_json(corpus / "meta.json", {"vocab_size": 7})
    if kind == "one window":
        shards.write_shard(corpus / "train_000000.bin", [1] * 17)


# What is typed, and words that the answer must have.
BAD_INPUTS = """
    --device=cuda           -> --device=cuda cpu
    --device=gpu            -> --device=gpu cuda
    --device=mps            -> --device=mps cpu
    --device=meta           -> --device=meta cpu
    --seed=99999999999999999999 -> --seed=9999 64 bits
    --out_dir=/dev/null/run -> --out_dir=/dev/null/run written
    --out_dir=              -> --out_dir= folder
    --vocab_size=100000000000000    -> --vocab_size=100000000000000 memory smaller
    --n_inner=99999999999999999999  -> --n_inner=99999999999999999999 memory smaller
    --dtype=fp16            -> --dtype=fp16 bfloat16
    --dtype=float16         -> --dtype=float16 cpu
    --grad_bf16=True        -> --grad_bf16 cpu
    --compile=maybe         -> --compile=maybe true
    --batch_size=0          -> --batch_size=0 at least 1
    --batch_size=1.5        -> --batch_size=1.5 int float
    --block_size=0          -> --block_size=0 at least 1
    --block_size=1000       -> 1,001 400 --block_size
    --global_batch_size=5   -> --global_batch_size=5 4 6
    --global_batch_size=-2  -> --global_batch_size=-2 negative
    --max_iters=-1          -> --max_iters=-1 negative
    --eval_interval=0       -> --eval_interval=0 at least 1
    --log_interval=0        -> --log_interval=0 at least 1
    --eval_tokens=-1        -> --eval_tokens=-1 negative
    --learning_rate=-1      -> --learning_rate=-1 negative
    --learning_rate=nan     -> --learning_rate=nan finite
    --min_lr=1              -> --min_lr=1 --learning_rate=0.01
    --warmup_iters=-1       -> --warmup_iters=-1 negative
    --beta2=1               -> --beta2=1 below 1
    --grad_clip=-1          -> --grad_clip=-1 negative
    --n_layer=0             -> n_layer=0 at least 1
    --n_head=3              -> n_embd=16 n_head=3
    --n_kv_head=3           -> n_kv_head=3 n_head=2
    --head_dim=3            -> head_dim=3 even
    --n_prelude=2           -> n_prelude=2 n_layer=2
    --connector=resnet      -> connector resnet mhc
    --depth=deep            -> depth deep moda
    --qk_norm=all           -> qk_norm all full
    --vocab_size=5          -> 5 10 meta.json
    --vocab_size=-1         -> --vocab_size=-1 negative
    --init_from=nowhere     -> nowhere folder
    --init_from=resume      -> no checkpoint ckpt_last.pt
    --data_dir=nowhere      -> nowhere --data_dir
    --max_itres=5           -> --max_itres --max_iters
    --max_iters 5           -> --max_iters=5 equals
    5                       -> '5' neither
    config/quickstrat.py    -> config/quickstrat.py config/quickstart.py
"""


@pytest.mark.parametrize("case", [" ".join(line.split()) for line in BAD_INPUTS.strip().splitlines()])
def test_cases_06_24_30_31_bad_options_are_refused_and_nothing_is_written(tiny, tmp_path, refused, case):
    argv, words = case.split(" -> ")
    message = refused(train.main, [*tiny, *argv.split()])
    assert all(word in message for word in words.split()), message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind, words", [
    ("empty shard", ["train_000000.bin", "0 bytes"]), ("odd shard", ["train_000000.bin", "even"]), ("short shard", ["3,600", "488"]),
    ("wrong magic", ["val_000000.bin", "20240520", "20240521"]), ("short val", ["val_000000.bin", "17", "16"]), ("no shards", ["train*.bin"]),
    ("no vocabulary", ["--vocab_size"]), ("broken meta", ["meta.json"]), ("stale meta", ["9", "7", "meta.json"])])
def test_cases_09_10_11_bad_data_is_refused_and_nothing_is_written(tiny, own_corpus, tmp_path, refused, kind, words):
    damage(own_corpus, kind)
    message = refused(train.main, [*tiny, f"--data_dir={own_corpus}"])
    assert all(word in message for word in words), message
    assert not (tmp_path / "out").exists()


def test_case_14_one_window_and_many_epochs(tiny, own_corpus, tmp_path):
    damage(own_corpus, "one window")
    train.main([*tiny, f"--data_dir={own_corpus}"])
    assert sorted(losses(tmp_path / "out")) == list(range(1, 7))


def test_opening_26_billion_tokens_reads_few_of_them(tmp_path, monkeypatch):
    first, tokens = tmp_path / "train_000000.bin", 100_000_000
    first.write_bytes(np.array([shards.MAGIC, shards.VERSION, tokens] + [0] * 253, "<i4").tobytes())
    os.truncate(first, shards.HEADER_BYTES + 2 * tokens)  # zeros that take no room on the disk
    for index in range(1, 260):
        os.link(first, shards.shard_path(tmp_path, "train", index))
    shards.write_shard(tmp_path / "val_000000.bin", [1] * 5000)
    read, count = shards.TokenSplit.read, []
    monkeypatch.setattr(shards.TokenSplit, "read", lambda self, shard, start, n: count.append(n) or read(self, shard, start, n))
    train_split, _, data = dataset.open_checked(tmp_path, 2048, 50304, 8)
    assert train_split.n_tokens == 26_000_000_000 and data["vocab_size"] == 50304
    assert max(count) <= 2**20 and sum(count) <= 2**24 + 5000  # 2 MB at a time, 34 MB in all
    x, _ = shards.batch_at(train_split, 12_345, 1, rank=7, world_size=8, batch_size=4, global_batch_size=1024, block_size=2048, seed=1)
    assert x.shape == (4, 2048)


def test_waiting_for_data_is_measured_and_told(tiny, corpus, monkeypatch, capsys):
    train.main(tiny)
    assert 0 <= float(re.search(r"Waiting for data took ([\d.]+) % of the steps' time", capsys.readouterr().out)[1]) < 100
    read = shards.batch_at
    monkeypatch.setattr(shards, "batch_at", lambda *args, **more: (time.sleep(0.3), read(*args, **more))[1])
    numbers = dict(rank=0, world_size=1, batch_size=2, global_batch_size=2, block_size=16, seed=1)
    with shards.Prefetcher(shards.open_split(corpus, "train"), 1, **numbers) as batches:
        batches.next_batch(0, 0)
        first = batches.waited
        batches.ahead[1, 0].result()  # a long step
        batches.next_batch(1, 0)
    assert first >= 0.3 > batches.waited - first


def test_the_data_set_of_the_standard_library_prepares_itself(tiny, corpus, tmp_path, monkeypatch, capfd, refused):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(dataset, "STDLIB", folder)
    (folder / "prepare.py").write_text("raise SystemExit('no room')")
    argv = [*tiny, f"--data_dir={folder}", "--max_iters=1"]
    assert "prepare.py failed" in refused(train.main, argv)
    (folder / "prepare.py").write_text(f"import os, shutil; shutil.copytree({str(corpus)!r}, os.path.dirname(__file__), dirs_exist_ok=True)")
    train.main(argv)
    assert "running its prepare.py once" in capfd.readouterr().out and len(losses(tmp_path / "out")) == 1
    train.main(argv)
    assert "prepare.py" not in capfd.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases

@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that records what it is given."""
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None)
    fake.runs, fake.key = [], "key"
    fake.login = lambda prompt, verify: bool(fake.key)
    fake.Settings = lambda **settings: settings

    def init(**settings):
        fake.runs.append(settings | {"lines": []})
        return types.SimpleNamespace(log=lambda line, step: fake.runs[-1]["lines"].append((step, line)))
    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return fake


def test_wandb_gets_the_log_and_a_resumed_run_continues_its_curve(tiny, tmp_path, wandb):
    train.main([*tiny, "--wandb_log=True", "--max_iters=3"])
    train.main([*tiny, "--wandb_log=True", "--init_from=resume"])
    first, second = wandb.runs
    assert first["id"] == second["id"] != "" and second["resume"] == "allow"
    assert first["mode"] == "online" and first["config"]["config"]["n_layer"] == 2
    assert [step for step, line in first["lines"] + second["lines"] if "train_loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("trouble", ["absent", "not logged in", "fails"])
def test_case_33_trouble_with_wandb_costs_one_warning(tiny, tmp_path, wandb, monkeypatch, capfd, trouble):
    if trouble == "absent":
        monkeypatch.setitem(sys.modules, "wandb", None)
    if trouble == "not logged in":
        wandb.key = ""
    if trouble == "fails":
        def init(**settings):
            raise RuntimeError("no network")
        wandb.init = init
    train.main([*tiny, "--wandb_log=True"])
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "wandb" in warnings[0] and len(losses(tmp_path / "out")) == 6
    if trouble == "not logged in":
        assert wandb.runs[0]["mode"] == "offline"
