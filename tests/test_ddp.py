"""Training on several ranks: gloo on the CPU, two to four processes."""
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import evaluations, losses, run_ranks, same_state, tiny_run
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import checkpoint
import configurator
import train
from data import shards
from model import CONNECTORS, DEPTHS, GPT, GPTConfig

# 8 sequences a step; 224 windows in the corpus.
WIDE = ["--global_batch_size=8", "--max_iters=6"]


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The run that one process makes."""
    out = tmp_path_factory.mktemp("alone")
    train.main([*tiny_run(corpus, out), *WIDE])
    return out


def close(a, b, tolerance=1e-5):
    return a.keys() == b.keys() and all(abs(a[step] - b[step]) < tolerance for step in a)


# ----------------------------------------------------------------------------------------------------------------------
# the same run on any number of ranks

def report_evaluation(rank):
    """Has each rank print how many windows it evaluates, and how often gradients are sent round."""
    windows, wrap = shards.TokenSplit.windows, train.wrap

    def counted(self, indices, block_size):
        if "val" in str(self.paths[0]):
            print("evaluated", len(indices))
        return windows(self, indices, block_size)

    def hooked(*args):
        ddp = wrap(*args)
        ddp.register_comm_hook(None, lambda state, bucket: print("sent") or allreduce_hook(None, bucket))
        return ddp
    shards.TokenSplit.windows, train.wrap = counted, hooked


@pytest.fixture(scope="module")
def pair(corpus, tmp_path_factory):
    """(folder, what the ranks printed) of the run that two processes make."""
    folder = tmp_path_factory.mktemp("pair")
    codes, printed = run_ranks(folder, 2, [*tiny_run(corpus, folder / "out"), *WIDE], before=report_evaluation)
    assert codes == [0, 0], printed
    return folder / "out", printed


def test_cases_13_and_28_two_ranks_make_the_run_of_one(pair, alone):
    out, printed = pair
    assert close(losses(out), losses(alone)) and close(evaluations(out), evaluations(alone), 1e-6)
    assert [text.count("evaluated 2\n") for text in printed] == [18, 18]  # 24 windows in 3 evaluations, 2 at a time, half of them on each rank
    assert [text.count("sent\n") for text in printed] == [6, 6]  # once a step of two micro-steps, not once a micro-step
    assert "step 6/6" in printed[0] and "step" not in printed[1]  # rank 0 alone speaks


def test_case_19_saved_on_two_ranks_and_resumed_on_one_two_or_four(tiny, tmp_path, ranks, alone, pair):
    half = [*tiny, *WIDE, "--lr_decay_iters=6", "--max_iters=3"]
    assert ranks(2, half)[0] == [0, 0]
    for world_size in (1, 2, 4):
        out = tmp_path / f"on{world_size}"
        out.mkdir()
        for name in ("ckpt_last.pt", "log.jsonl"):
            (out / name).write_bytes((tmp_path / "out" / name).read_bytes())
        codes, printed = ranks(world_size, [*tiny, *WIDE, f"--out_dir={out}", "--init_from=auto"])
        assert codes == [0] * world_size, printed
        assert close(losses(out), losses(alone))
    assert same_state(tmp_path / "on2" / "ckpt_last.pt", pair[0] / "ckpt_last.pt")  # on as many ranks even bit for bit


def test_zero1_changes_nothing_and_its_checkpoints_fit_any_run(tiny, tmp_path, ranks, pair):
    first = [*tiny, *WIDE, "--lr_decay_iters=6", "--zero1=True"]
    assert ranks(2, [*first, "--max_iters=3"])[0] == [0, 0]
    codes, printed = ranks(2, [*first, "--init_from=resume"])
    assert codes == [0, 0], printed
    assert losses(tmp_path / "out") == losses(pair[0])
    a, b = (checkpoint.load(out / "ckpt_last.pt") for out in (tmp_path / "out", pair[0]))
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in b["model"])
    assert all(torch.equal(a["optimizer"]["state"][i][name], value) for i, state in b["optimizer"]["state"].items() for name, value in state.items())
    continued = {}
    for world_size, zero1 in (1, False), (4, True):  # one process without --zero1; four, each with a quarter
        out = tmp_path / f"on{world_size}"
        shutil.copytree(tmp_path / "out", out)
        argv = [*tiny, *WIDE, "--lr_decay_iters=6", f"--out_dir={out}", "--init_from=auto", "--max_iters=8", f"--zero1={zero1}"]
        codes, printed = ranks(world_size, argv)
        assert codes == [0] * world_size, printed
        continued[world_size] = losses(out)
    assert sorted(continued[1]) == list(range(1, 9)) and close(continued[4], continued[1], 1e-6)
    a, b = (checkpoint.load(tmp_path / f"on{world_size}" / "ckpt_last.pt")["model"] for world_size in continued)
    assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)


def constant_data(rank):
    shards.batch_at = lambda *args, batch_size, block_size, **others: (torch.full((batch_size, block_size), rank),) * 2


def test_case_28_different_data_on_each_rank_reports_the_mean_loss(tiny, tmp_path, ranks):
    codes, printed = ranks(2, [*tiny, "--max_iters=1"], before=constant_data)
    assert codes == [0, 0], printed
    torch.manual_seed(1337)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=10))
    each = [model(x, x)[1].item() for x in (torch.zeros(2, 16).long(), torch.ones(2, 16).long())]
    assert each[0] != pytest.approx(each[1], abs=1e-3) and losses(tmp_path / "out")[1] == pytest.approx(sum(each) / 2, abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# gradients

def gradients_agree(rank):
    """
    Every connector and depth method, looped on four ranks: loss and gradients over ranks and micro-steps equal those of the whole batch in one
    process, on four ranks also when each layer is computed again in the backward pass. In float64, so that nothing but the order of sums can differ.
    """
    torch.set_default_dtype(torch.float64)
    c = configurator.configure(train.__file__, ["--device=cpu", "--compile=False"], model_fields=True)
    world = train.Ranks(c)
    torch.manual_seed(0)
    x, y = torch.randint(0, 10, (2, 8, 8))
    micro_steps, scaler = (1, 2), torch.amp.GradScaler("cpu", enabled=False)

    class Batches:
        def next_batch(self, step, micro_step):
            return tuple(t.view(micro_steps[step], world.world_size, -1, 8)[micro_step, rank] for t in (x, y))
    n_loop = 2 if world.world_size == 4 else 1
    for connector, depth in itertools.product(CONNECTORS, DEPTHS):
        torch.manual_seed(1)
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, block_size=8, vocab_size=10, init_std=0.2, connector=connector, depth=depth,
                              depth_stride=1, n_loop=n_loop, n_prelude=n_loop // 2, mhc_num_streams=2, mhc_sinkhorn_iters=3))
        expected = model(x, y)[1]
        expected.backward()
        whole = {name: p.grad.clone() for name, p in model.named_parameters()}
        ddp = train.wrap(model, c, world)
        for step in range(2):  # DDP complains in a step about parameters that took no part in the one before
            model.grad_checkpoint = world.world_size == 4 and step == 1
            model.zero_grad()
            loss = train.accumulate_gradients(ddp, Batches(), step, micro_steps[step], torch.enable_grad(), scaler)
            differences = {name: (p.grad - whole[name]).abs().max().item() for name, p in model.named_parameters()}
            differences["loss"] = abs(world.sum(loss) / world.world_size - expected).item()
            worst = max(differences, key=differences.get)
            assert differences[worst] <= 1e-6, (connector, depth, n_loop, step, worst, differences[worst])
        print("agrees", connector, depth, n_loop, differences[worst])
    world.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_case_27_gradients_over_ranks_and_micro_steps_are_those_of_one_process(ranks, world_size):
    codes, printed = ranks(world_size, None, before=gradients_agree, timeout=100)
    assert codes == [0] * world_size, printed
    assert printed[1].count("agrees") == len(CONNECTORS) * len(DEPTHS) == 12


# ----------------------------------------------------------------------------------------------------------------------
# trouble on one rank

def terminate_rank_1(rank):
    lr_at = train.lr_at
    train.lr_at = lambda step, c: (os.kill(os.getpid(), signal.SIGTERM) if step == 2 and rank == 1 else None, lr_at(step, c))[1]


def test_case_26_a_signal_to_one_rank_of_two_stops_both_in_that_step(tiny, tmp_path, ranks, alone):
    codes, printed = ranks(2, [*tiny, *WIDE, "--eval_interval=6"], before=terminate_rank_1)
    assert codes == [0, 0], printed
    assert checkpoint.load(tmp_path / "out" / "ckpt_last.pt")["step"] == 3 and "after step 3" in printed[0]
    assert ranks(2, [*tiny, *WIDE, "--init_from=resume"])[0] == [0, 0]
    assert close(losses(tmp_path / "out"), losses(alone))


def kill_rank_1(rank):
    lr_at = train.lr_at
    train.lr_at = lambda step, c: (os.kill(os.getpid(), signal.SIGKILL) if step == 4 and rank == 1 else None, lr_at(step, c))[1]


def test_a_rank_that_dies_ends_the_other_with_a_message(tiny, tmp_path, ranks):
    begin = time.monotonic()
    codes, printed = ranks(2, [*tiny, *WIDE], before=kill_rank_1)
    assert codes == [1, -signal.SIGKILL] and time.monotonic() - begin < 30
    last = printed[0].splitlines()[-1]
    assert last.startswith("error: rank 0 has lost another process") and "--init_from=auto" in last
    assert checkpoint.load(tmp_path / "out" / "ckpt_last.pt")["step"] == 3


def poison_rank_1(rank):
    forward, calls = GPT.forward, []

    def poisoned(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        calls.append(self.training)
        return logits, loss * float("nan") if rank == 1 and sum(calls) == 6 else loss
    GPT.forward = poisoned


def test_a_loss_that_is_not_finite_on_one_rank_stops_both_before_the_update(tiny, tmp_path, ranks):
    codes, printed = ranks(2, [*tiny, *WIDE, "--save_interval=1"], before=poison_rank_1)  # the sixth micro-step: the second of step 3
    assert codes == [1, 1], printed
    assert all("error: step 3: the loss is not finite" in text.splitlines()[-1] for text in printed), printed
    assert checkpoint.load(tmp_path / "out" / "ckpt_last.pt")["step"] == 2


def fill_the_disk(rank):
    def full(path, state):
        raise checkpoint.CheckpointError(f"could not write {path} (No space left on device).")
    checkpoint.save = full


def test_a_full_disk_ends_all_ranks(tiny, ranks):
    codes, printed = ranks(2, [*tiny, *WIDE], before=fill_the_disk)
    assert codes == [1, 1] and all("No space left" in text.splitlines()[-1] for text in printed), printed


def delay_rank_0(rank):
    if rank == 0:
        start_log = checkpoint.start_log
        checkpoint.start_log = lambda *args: (time.sleep(2), start_log(*args))[1]


def test_case_22_a_slow_rank_0_and_a_fresh_folder(tiny, tmp_path, ranks):
    codes, printed = ranks(2, [*tiny, f"--out_dir={tmp_path / 'a' / 'b'}", "--max_iters=1"], before=delay_rank_0)
    assert codes == [0, 0], printed
    assert losses(tmp_path / "a" / "b").keys() == {1}


def test_case_14_fewer_windows_than_ranks_is_a_clean_error_on_all(tiny, own_corpus, tmp_path, ranks):
    shards.write_shard(own_corpus / "train_000000.bin", [1] * 17)
    codes, printed = ranks(2, [*tiny, f"--data_dir={own_corpus}"])
    assert codes == [1, 1] and all("2 windows" in text.splitlines()[-1] and text.startswith("error:") for text in printed), printed
    assert not (tmp_path / "out").exists()


def test_case_30_names_the_number_of_processes(tiny, ranks):
    codes, printed = ranks(2, [*tiny, "--global_batch_size=6"])
    assert codes == [1, 1] and all("2 processes = 4" in text and "4 and 8" in text for text in printed), printed


def test_case_31_torchrun_on_two_cpu_processes_trains(tiny, tmp_path, alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train.__file__, *tiny, *WIDE, "--device="]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr
    assert close(losses(tmp_path / "out"), losses(alone)) and "2 processes" in result.stdout
