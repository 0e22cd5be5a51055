"""
graphs.py on a CPU, where a stand-in takes the place of the CUDA graph: it runs the recorded function again, reads the recorded inputs and writes into
the memory that recording left behind. Everything around it is what runs on a GPU.
"""
import contextlib
import functools
import types

import pytest
import torch
from conftest import evaluations, losses, same_state
from tiny import tiny as tiny_model, tokens

import bench
import graphs
import model as definitions
import train
from model import GPTConfig

CPU = torch.device("cpu")


@pytest.fixture
def recordings(monkeypatch):
    """The stand-in, allowed on CPUs; a list of what was recorded, each the number of its replays."""
    made = []

    def record(self):
        adding = bool(self.recorded)
        before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        loss = self.gradients(self.x, self.y)
        for p, grad in zip(self.parameters, before, strict=True):  # a recording runs nothing: what it has not written holds anything
            if p.grad is not None:
                p.grad.copy_(grad) if adding else p.grad.fill_(float("nan"))
        kept, number = [p.grad for p in self.parameters], len(made)
        loss.fill_(float("nan"))
        made.append(0)

        def replay():
            made[number] += 1
            for p in self.parameters:
                p.grad = p.grad if adding else None
            loss.copy_(self.gradients(self.x, self.y))
            for p, grad in zip(self.parameters, kept, strict=True):
                if grad is not None and not adding:
                    grad.copy_(p.grad)
                p.grad = grad
        return replay, loss
    monkeypatch.setattr(graphs.GraphedGradients, "record", record)
    for module in (train, bench):
        monkeypatch.setattr(module, "reason_against", lambda *args, **options: "")
    return made


@pytest.mark.parametrize("options, word", [
    (dict(), ""), (dict(world_size=2), "2 processes"), (dict(grad_checkpoint=True), "grad_checkpoint"), (dict(dtype="float16"), "float16")])
def test_reasons_against(options, word):
    reason = graphs.reason_against(types.SimpleNamespace(type="cuda"), **options)
    assert word in reason and bool(word) == bool(reason)


def test_it_stays_off_on_a_cpu_and_says_so(tiny, tmp_path, capsys):
    train.main([*tiny, "--cuda_graph=True", "--max_iters=1"])
    assert "--cuda_graph stays off: the device is cpu." in capsys.readouterr().out


@pytest.mark.parametrize("connector", definitions.CONNECTORS)
@pytest.mark.parametrize("depth", definitions.DEPTHS)
def test_gradients_are_those_of_the_function(recordings, connector, depth):
    model = tiny_model(connector=connector, depth=depth)
    gradients = functools.partial(train.micro_step_gradients, model, 2, torch.enable_grad(), torch.amp.GradScaler("cpu", enabled=False))
    graphed = graphs.GraphedGradients(gradients, model.parameters())
    for step in range(graphs.EAGER_STEPS + 3):
        found = []
        for call in (gradients, graphed):
            model.zero_grad(set_to_none=True)
            total = 0
            for i in range(2):
                idx = tokens(model, seed=2 * step + i)
                total = total + call(idx, idx.roll(-1), *[i == 0] * (call is graphed))
            found.append([total, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
    assert recordings == [3, 3]


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_a_run_is_the_same_bit_for_bit_evaluated_saved_and_resumed_in_between(recordings, tiny, tmp_path, micro_steps):
    argv = [*tiny, f"--global_batch_size={2 * micro_steps}", "--max_iters=14", "--eval_interval=5", "--connector=attnres", "--depth=depth_attention"]
    train.main([*argv, f"--out_dir={tmp_path / 'eager'}"])
    assert not recordings
    out = tmp_path / "graph"
    train.main([*argv, "--cuda_graph=True", f"--out_dir={out}", "--max_iters=8", "--lr_decay_iters=14"])
    train.main([f"--out_dir={out}", "--init_from=resume", "--max_iters=14"])
    steps = 8 - graphs.EAGER_STEPS, 14 - 8 - graphs.EAGER_STEPS  # replayed before and after resuming
    assert recordings == [n for replayed in steps for n in ([replayed] if micro_steps == 1 else [replayed, 3 * replayed])]
    assert losses(out) == losses(tmp_path / "eager")
    assert evaluations(out).items() >= evaluations(tmp_path / "eager").items()
    assert same_state(out / "ckpt_last.pt", tmp_path / "eager" / "ckpt_last.pt")


def test_a_loss_that_is_not_finite_still_ends_the_run(recordings, tiny, tmp_path, refused):
    assert "is not finite" in refused(train.main, [*tiny, "--cuda_graph=True", "--learning_rate=1e30", "--grad_clip=0", "--max_iters=30", "--warmup_iters=0",
                                                   "--eval_interval=100"])


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_failed_recording_names_the_switch_and_want_of_memory_is_told_as_such(monkeypatch, at_the_end):
    graphed = graphs.GraphedGradients(lambda x, y: x.sum(), [])
    monkeypatch.setattr(graphs, "EAGER_STEPS", 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    @contextlib.contextmanager
    def recording(*args, **options):
        try:
            yield
        finally:
            if at_the_end:
                raise RuntimeError("operation not permitted when stream is capturing\nSecond line.")
    monkeypatch.setattr(torch.cuda, "graph", recording)

    def fail(error):
        def gradients(x, y):
            raise error
        graphed.gradients = gradients
        graphed(torch.ones(2), torch.ones(2), True)
    with pytest.raises(SystemExit, match="^error: .*--cuda_graph=False.*not permitted when stream is capturing$"):
        fail(RuntimeError("not permitted when stream is capturing"))
    with pytest.raises(torch.OutOfMemoryError, match="no 4 GB"):
        fail(torch.OutOfMemoryError("no 4 GB"))


def test_no_weight_in_half_precision_outlives_its_backward():
    """Or a recording would read the one of the last eager step for ever."""
    kernels = pytest.importorskip("kernels")
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(6, 8, requires_grad=True)
    loss = kernels.linear(x, weight).float().sum()
    assert weight.last_cast[1]() is not None
    loss.backward()
    assert weight.last_cast[1]() is None


def test_bench_shows_both(recordings, monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "tiny", dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=16, vocab_size=64))
    c = types.SimpleNamespace(cuda_graph=True, compile=False, peer="", grad_checkpoint=False, given=set(), dtype="float32", device="cpu")
    listed = [("vanilla", GPTConfig(**bench.SHAPES["tiny"])), ("moda", GPTConfig(**bench.SHAPES["tiny"], depth="moda"))]
    contenders, failed, batches = bench.assemble(c, listed, 2, CPU, bench.contextlib.nullcontext())
    assert [x.name for x in contenders] == ["vanilla", "vanilla, graph", "moda", "moda, graph"] and not failed and recordings == [3, 3]
    x, y = batches[0]
    for eager, graph in zip(contenders[::2], contenders[1::2], strict=True):
        before = {name: p.detach().clone() for name, p in eager.model.named_parameters()}
        a = [value.item() for value in eager.gradients(x, y)]
        eager.optimizer.zero_grad(set_to_none=True)
        b = [value.item() for value in graph.gradients(x, y)]
        eager.optimizer.zero_grad(set_to_none=True)
        assert a == b and all(torch.equal(before[name], p) for name, p in graph.model.named_parameters()) and not graph.turns
    graph.graphed = lambda x, y, first: graph.backward(2 * x % 64, y)
    with pytest.raises(ValueError, match="moda, graph leaves a gradient"):
        bench.check_replay(eager, graph, x, y)
