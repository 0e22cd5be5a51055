"""bench.py at tiny sizes: what is measured, that nothing wrong is timed, and the plan's memory against the tensors that autograd saves."""
import functools
import gc
import inspect
import json
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import bench
import configurator
import model as definitions
import plan
from model import GPT, GPTConfig

TINY = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=64, block_size=16, vocab_size=64, mhc_sinkhorn_iters=2)
CPU = torch.device("cpu")
BATCHES = bench.BATCHES


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    monkeypatch.setattr(bench, "BATCHES", 1)  # takes the time of a test; what the others are for is tested below


def run(tmp_path, *argv):
    bench.main(["--device=cpu", f"--json={tmp_path / 'figures.json'}", *argv])
    return json.loads((tmp_path / "figures.json").read_text())


# ----------------------------------------------------------------------------------------------------------------------
# what is measured

def test_every_method_is_trained_in_turn_and_reported(tmp_path, capsys):
    methods = "vanilla,depth_attention:depth_stride=1,mhc:mhc_num_streams=2,moda,looped:n_loop=3"
    found = run(tmp_path, f"--methods={methods}", "--steps=4")
    assert [row["method"] for row in found["rows"]] == methods.split(",")
    for row in found["rows"]:
        assert row["tokens/s"] == pytest.approx(1000 * 4 * 16 / row["ms a step"]) and row["first step s"] > 0
        assert row["from %"] <= row["overhead %"] <= row["to %"]
        assert row["MFU %"] is None and row["peak GB"] is None  # not known on a CPU
    assert found["rows"][0]["overhead %"] == 0
    assert found["command"].startswith("python bench.py --device=cpu") and found["versions"]["torch"] == torch.__version__ and found["device"]
    assert found["attention"] == "math"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-6:]] == ["method", *methods.split(",")]


def test_contenders_share_weights_and_optimizer_state():
    first = bench.build("vanilla", GPTConfig(**TINY), bench.contextlib.nullcontext(), CPU, None)
    x, y = bench.random_batches(1, 2, GPTConfig(**TINY), CPU)[0]
    first.step(x, y)
    moda = bench.build("moda", GPTConfig(**TINY, depth="moda"), bench.contextlib.nullcontext(), CPU, first)
    shared, own = dict(first.model.named_parameters()), dict(moda.model.named_parameters())
    assert all(own[name] is p for name, p in shared.items()) and set(own) - set(shared) == {n for n in own if "ffn_kv" in n}
    before, steps = first.model.embed.weight.clone(), first.optimizer.state[first.model.embed.weight]["step"].clone()
    moda.step(x, y)
    assert not torch.equal(first.model.embed.weight, before) and first.optimizer.state[first.model.embed.weight]["step"] == steps + 1
    other = bench.build("wider", GPTConfig(**TINY | dict(n_inner=96)), bench.contextlib.nullcontext(), CPU, first)
    assert other.model.layers[0].mlp.down.weight is not first.model.layers[0].mlp.down.weight and other.model.norm.weight is first.model.norm.weight


def test_a_method_has_the_fields_of_its_own_config_at_a_named_shape():
    c = configurator.configure(bench.__file__, ["--shape=410m", "--methods=vanilla,depth_attention,depth_attention:depth_stride=4,moda,looped", "--device=cpu"], operands="x")
    name, file, fields, batch = bench.read_shape(c, CPU)
    configs = dict(bench.list_methods(c, name, file, fields))
    assert batch == 16 and configs["vanilla"].n_layer == 32 and configs["vanilla"].depth == "none"
    assert configs["depth_attention"].depth_stride == 16 and configs["depth_attention:depth_stride=4"].depth_stride == 4
    assert configs["moda"].n_inner == configs["vanilla"].n_inner and configs["moda"].depth == "moda"
    assert configs["looped"].n_layer == 16 and configs["looped"].n_loop == 2


@pytest.mark.parametrize("argv, words", [
    (["--methods=vanila"], "vanilla"), (["--methods=vanilla:depth_strid=3"], "depth_stride"), (["--methods=vanilla:n_layer=many"], "n_layer"),
    (["--methods=depth_attention:n_head=3"], "n_kv_head"), (["--shape=7t"], "410m"), (["--peer=gpt5"], "hf_llama"), (["--dtype=float8"], "bfloat16"),
    (["--decode", "--profile"], "one table"), (["--stepz=3"], "--steps"), (["--decode", "--new_tokens=16"], "room"), (["--decode", "--prompt_tokens=0"], "--prompt_tokens=0"), (["--json=no/such/x.json"], "no folder"),
    (["--plan", "--world_size=0"], "--world_size=0"), (["--plan", "--mfu=0"], "--mfu=0"), (["--steps=-1"], "--steps=-1"),
    (["--only=swiglu"], "--only=swiglu chooses among the kernels and needs --kernels")])
def test_a_mistake_ends_in_one_sentence(refused, argv, words):
    assert words in refused(bench.main, ["--device=cpu", *argv])


def test_kernels_are_not_timed_where_they_cannot_run(refused, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a GPU" in refused(bench.main, ["--device=cpu", "--kernels"])


def test_some_of_the_kernels(tmp_path, refused, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert [row["kernel"] for row in run(tmp_path, "--kernels", "--shape=tiny", "--only=swig,rms_n")["rows"]] == ["rms_norm", "swiglu"]
    cases = bench.all_cases(GPTConfig(**TINY), CPU, torch.float32)  # of MoDA's settings --kernels times the whole operator alone
    assert {entry for case in cases for entry in case.settings} == {entry for entry in pytest.importorskip("kernels").SETTINGS if "moda" not in entry}
    assert "--only=conv" in refused(bench.main, ["--device=cpu", "--kernels", "--shape=tiny", "--only=conv"])


# ----------------------------------------------------------------------------------------------------------------------
# correct before fast

@pytest.fixture
def kernels(monkeypatch):
    """kernels.py, which model.py takes for whatever is not float64, as on CUDA."""
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(definitions, "fused", lambda x: kernels if definitions.use_kernels and x.dtype != torch.float64 else None)
    return kernels


def test_a_wrong_gradient_of_a_kernel_is_found(kernels, monkeypatch):
    config = GPTConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=8, n_inner=8, block_size=4, vocab_size=8)
    check = functools.partial(bench.check, "vanilla", config, bench.contextlib.nullcontext(), torch.float32, CPU)
    assert check() < 1e-5
    right = kernels._swiglu_backward
    monkeypatch.setattr(kernels, "_swiglu_backward", lambda *args: 1.02 * right(*args))
    with pytest.raises(ValueError, match=r"^vanilla is wrong against float64 \(seed \d+\): the gradient is .* away.*not timed"):
        check()
    monkeypatch.setattr(kernels, "_swiglu_backward", lambda *args: float("nan") * right(*args))
    with pytest.raises(ValueError, match="nan %"):
        check()


@pytest.fixture
def rounded_elsewhere(monkeypatch):
    """The path that is timed rounds after the norm's weight instead of before it: another bfloat16 than the definitions', as good as theirs."""
    right = definitions.RMSNorm.forward

    def forward(self, x):
        return definitions.rms_norm(x.float(), self.weight, self.eps).type_as(x) if definitions.use_kernels and x.dtype == torch.bfloat16 else right(self, x)
    monkeypatch.setattr(definitions.RMSNorm, "forward", forward)


def check_in_bfloat16(monkeypatch, connector, seed):
    monkeypatch.setattr(bench, "BATCHES", BATCHES)
    monkeypatch.setattr(torch, "seed", lambda: seed)
    return bench.check(connector, GPTConfig(**TINY, connector=connector), torch.autocast("cpu", torch.bfloat16), torch.bfloat16, CPU)


@pytest.mark.parametrize("seed", [4, 14])
def test_the_luck_of_rounding_refuses_no_method(rounded_elsewhere, monkeypatch, seed):
    """With one batch of these seeds mHC's few numbers are three times as far away as the definitions', which happen to be near."""
    assert check_in_bfloat16(monkeypatch, "mhc", seed) < 0.05


def test_a_wrong_gradient_of_few_numbers_is_found(rounded_elsewhere, monkeypatch):
    right = definitions.MHC.finish

    def finish(self, state, norm):
        r = self.reduce_logits
        r = 1.5 * r - 0.5 * r.detach() if definitions.use_kernels and r.dtype == torch.float32 else r
        return right(types.SimpleNamespace(reduce_logits=r, split=self.split), state, norm)
    monkeypatch.setattr(definitions.MHC, "finish", finish)
    with pytest.raises(ValueError, match="that of connector.reduce_logits is"):
        check_in_bfloat16(monkeypatch, "mhc", 0)


def test_a_source_without_its_gradient_is_found(rounded_elsewhere, monkeypatch):
    right = definitions.Aggregator.forward

    def forward(self, sources):
        timed = definitions.use_kernels and sources[0].dtype == torch.bfloat16
        return right(self, [sources[0].detach(), *sources[1:]] if timed else sources)
    assert check_in_bfloat16(monkeypatch, "attnres", 0) < 0.05
    monkeypatch.setattr(definitions.Aggregator, "forward", forward)
    with pytest.raises(ValueError, match="attnres is wrong against float64"):
        check_in_bfloat16(monkeypatch, "attnres", 0)


@pytest.mark.parametrize("n_embd", [32, 512])
def test_the_check_scores_attnres_sources_alike_at_any_width(n_embd):
    """Scores of about 1: softmaxes that neither ignore a source nor are so sharp that bfloat16 takes their gradient away."""
    torch.manual_seed(0)
    model = GPT(bench.reduced(GPTConfig(**TINY | dict(n_embd=n_embd), connector="attnres")))
    bench.perturb(model)
    site, sources = model.connector.sites[1], torch.randn(3, 100, n_embd)
    scores = sources @ (site.pseudo_query * site.norm.weight)
    assert 0.5 < scores.std() < 2 and 0.4 < site.recency_bias < 1.6


def test_a_wrong_method_is_not_timed_and_the_others_are(tmp_path, monkeypatch):
    def wrong(label, *args, **options):
        if label == "vanilla":
            raise ValueError("vanilla is wrong.")
        return 0.0
    monkeypatch.setattr(bench, "check", wrong)
    with pytest.raises(SystemExit, match="^error: vanilla is wrong.$"):
        run(tmp_path, "--steps=2")
    depth, vanilla = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert depth["method"] == "depth_attention" and depth["tokens/s"] > 0 and vanilla == {"method": "vanilla", "tokens/s": None}


def test_wrong_decoding_is_refused(monkeypatch):
    check = functools.partial(bench.check_decoding, "depth_attention", GPTConfig(**TINY | dict(block_size=48), depth="depth_attention"))
    check(bench.contextlib.nullcontext(), CPU)
    check(torch.autocast("cpu", torch.bfloat16), CPU)
    right = definitions.KVSlot.append
    monkeypatch.setattr(definitions.KVSlot, "append", lambda self, k, v: right(self, k, v.flip(1)))
    with pytest.raises(ValueError, match="generation gives a token whose logit is"):
        check(bench.contextlib.nullcontext(), CPU)


def test_a_wrong_kernel_is_refused(monkeypatch):
    kernels = pytest.importorskip("kernels")
    case = next(case for case in bench.elementwise_cases(GPTConfig(**TINY), CPU, torch.float32) if case.name == "rms_norm")
    assert bench.check_case(case, torch.float32) < 1e-5
    row = bench.kernel_row(case, 1, 4, torch.float32, 1e9, CPU)
    assert row["tokens"] == 4 and row["floor"] == pytest.approx(1000 * 4 * 2 * 32 * 4 / 1e9) and row["% of its speed"] == pytest.approx(100 * row["floor"] / row["forward ms"])
    right = kernels._rms_norm_backward
    monkeypatch.setattr(kernels, "_rms_norm_backward", lambda *args: (right(*args)[0], 1.1 * right(*args)[1]))
    with pytest.raises(ValueError, match="rms_norm is wrong"):
        bench.check_case(case, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# generation, profile

def test_decoding_counts_the_bytes_of_a_token(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)  # without transformers
    found = run(tmp_path, "--decode", "--new_tokens=4", "--batch_size=2")
    assert [(row["method"], row["batch"]) for row in found["rows"]] == [(m, b) for b in (1, 2) for m in ("vanilla", "depth_attention")]
    assert all(row["tokens/s"] > 0 and row["of the bound %"] > 0 for row in found["rows"])
    model = GPT(GPTConfig(**TINY, n_loop=2))
    layer = 32 * (4 + 2 * 2) * 8 + 32 * 32 + 3 * 32 * 64 + 2 * 32 + 2 * 8
    assert bench.bytes_per_token(model, 5, 10, 2) == 2 * (2 * 2 * layer + 32 + 64 * 32 + 5 * 10 * 2 * 2 * 2 * 16)


def test_profile_adds_up(tmp_path):
    rows = run(tmp_path, "--profile", "--methods=vanilla")["rows"]
    kinds = {row["kernels"]: row["ms a step"] for row in rows if row["method"]}
    assert {"matmul", "attention", "the rest", "all"} <= set(kinds)
    assert sum(ms for kind, ms in kinds.items() if kind != "all") == pytest.approx(kinds["all"])


@pytest.mark.parametrize("kernel, kind", [
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTT", "matmul"), ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"), ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer and clipping"), ("_swiglu_backward_kernel", "our elementwise kernels"),
    ("_moda_forward_kernel", "attention"), ("triton_poi_fused_add_3", "compiled elementwise"), ("Memcpy DtoD (Device -> Device)", "copies and fills"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "the rest")])
def test_kinds_of_kernels(kernel, kind):
    assert bench.kind_of(kernel) == kind


# ----------------------------------------------------------------------------------------------------------------------
# the plan

WIDE = dict(n_layer=4, n_head=16, n_kv_head=4, n_embd=1024, head_dim=64, n_inner=2816, block_size=512, vocab_size=50304, depth_stride=3, attnres_block_size=3)
PLANNED = [dict(), dict(norm_order="post"), dict(qk_norm="full", norm_order="post"), dict(tie_embeddings=True), dict(depth="depth_attention"),
           dict(depth="depth_attention", depth_stride=1, n_loop=2), dict(depth="moda"), dict(depth="moda", moda_ffn_kv=False, norm_order="post"),
           dict(connector="denseformer"), dict(connector="denseformer", denseformer_period=3, denseformer_dilation=2), dict(connector="attnres"),
           dict(connector="attnres", attnres_sources="block_sums", norm_order="post"), dict(connector="denseformer", depth="moda", n_loop=2, n_prelude=1, n_coda=1),
           dict(connector="mhc"), dict(connector="mhc", mhc_num_streams=2, norm_order="post")]


class Flash(torch.autograd.Function):
    """Keeps what a flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v):
        o, lse = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, o, lse)
        return o


@pytest.fixture
def kernels_without_launches(monkeypatch):
    """model.py on fake tensors with kernels.py in force, as on CUDA: the launchers give tensors of the right shapes."""
    kernels = pytest.importorskip("kernels")
    for name, function in vars(kernels).copy().items():
        launcher = getattr(function, "__wrapped__", None)
        if inspect.isfunction(function) and launcher and "launch" in inspect.signature(launcher).parameters:
            monkeypatch.setattr(kernels, name, functools.partial(lambda launcher, *args: launcher(*args, False), launcher))
    monkeypatch.setattr(definitions, "fused", lambda x: kernels)
    monkeypatch.setattr(definitions, "attention", Flash.apply)


def saved_bytes(config, batch_size):
    """Bytes of the distinct memory that a forward pass leaves for the backward pass, without parameters, their casts and the head's gradient."""
    with FakeTensorMode():
        model = GPT(config)
        own = {id_of(p) for p in model.parameters()}
        kept = {}
        idx = torch.zeros(batch_size, config.block_size, dtype=torch.int64)

        def pack(x):
            kept[id_of(x)] = x.untyped_storage()  # held, so that no later one can get its place
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            loss = model(idx, idx)[1]
    assert loss.requires_grad
    casts = 2 * sum(p.numel() for module in (model.layers, model.connector) for p in module.parameters() if p.ndim == 2)
    return sum(storage.nbytes() for key, storage in kept.items() if key not in own) - casts - 4 * model.head_weight.numel()


def id_of(x):
    return x.untyped_storage()._cdata


@pytest.mark.parametrize("options", PLANNED, ids=str)
def test_planned_activations_are_what_autograd_saves(options, kernels_without_launches):
    config = GPTConfig(**WIDE | options)
    planned = plan.activations(plan.skeleton(config), 2 * config.block_size)
    assert sum(planned.values()) == pytest.approx(saved_bytes(config, 2), rel=0.02)


def alive():
    """The memory of all fake tensors that Python holds."""
    return {id_of(x): x.untyped_storage() for x in gc.get_objects() if type(x) is FakeTensor and x.is_floating_point()}


@pytest.mark.parametrize("options", [dict(depth="depth_attention"), dict(depth="moda", connector="attnres"), dict(connector="denseformer")], ids=str)
def test_planned_activations_with_grad_checkpoint(options, kernels_without_launches):
    """What the layers leave is held by checkpoint() itself, in part outside of autograd: all tensors that are alive after the forward pass are counted."""
    config = GPTConfig(**WIDE | options)
    gc.collect()
    with FakeTensorMode():
        before = alive()
        model = GPT(config)
        model.grad_checkpoint = True
        own = before.keys() | {id_of(x) for x in (*model.parameters(), *model.buffers())}
        kept, idx = {}, torch.zeros(2, config.block_size, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.update({id_of(x): x.untyped_storage()}) or x, lambda x: x), torch.autocast("cpu", torch.bfloat16):
            loss = model(idx, idx)[1]
        kept |= alive()
    assert loss.requires_grad
    found = sum(storage.nbytes() for key, storage in kept.items() if key not in own) - 4 * model.head_weight.numel()
    planned = plan.activations(model, 2 * config.block_size, grad_checkpoint=True)
    assert planned.pop("one layer, computed again") > 0
    assert sum(planned.values()) == pytest.approx(found, rel=0.1)


def test_planned_memory_follows_the_run():
    model = plan.skeleton(GPTConfig(**WIDE))
    n, alone = model.num_params(), plan.peak_memory(model, 8)
    assert alone["parameters"] == 4 * n and alone["AdamW's moments"] == 8 * n
    spread = plan.peak_memory(model, 8, world_size=4, zero1=True)
    assert spread["AdamW's moments"] == 2 * n and spread["gradients"] == 4 * n  # DDP keeps them in its buckets
    assert plan.peak_memory(model, 8, micro_steps=2) == plan.peak_memory(model, 8, world_size=2)
    small = plan.peak_memory(plan.skeleton(GPTConfig(**WIDE | dict(vocab_size=512))), 1)
    n -= 2 * (50304 - 512) * 1024
    assert small["gradients"] == 4 * n and "MLPs" not in small  # with a small batch the peak is at the end of the backward pass
    assert sum(plan.peak_memory(model, 64, grad_checkpoint=True).values()) < 0.6 * sum(plan.peak_memory(model, 64).values())


@pytest.mark.parametrize("options", [dict(), dict(world_size=8, zero1=True), dict(grad_checkpoint=True)], ids=str)
def test_the_largest_batch_fits_and_one_more_does_not(options):
    model, limit = plan.skeleton(GPTConfig(**WIDE)), 20e9
    batch = plan.largest_batch(model, limit, **options)
    assert sum(plan.peak_memory(model, batch, **options).values()) <= limit < sum(plan.peak_memory(model, batch + 1, **options).values())
    assert plan.largest_batch(model, 1e9, **options) == 0


def test_plan_of_a_config_file(tmp_path):
    found = run(tmp_path, "config/depth_3b.py", "--plan", "--gpu=NVIDIA H100 80GB HBM3", "--mfu=0.5", "--world_size=32")
    parts = {row["memory"]: row["depth_3b GB"] for row in found["rows"]}
    assert parts["parameters"] == pytest.approx(2.747998208 * 4) and parts["peak"] == pytest.approx(sum(parts.values()) / 2)
    assert "32 x NVIDIA H100" in found["title"] and "8 micro-batches of 4 x 2048 tokens" in found["title"]  # 1024 sequences a step
    speed = 0.5 * 989e12 * 32 / (6 * 2.644975616e9 + 12 * 48 * 2048 * 2048)
    days = 12500 * 1024 * 2048 / speed / 86400
    assert f"{speed:,.0f} tokens/s; 26.2B tokens take {days:.3g} days" in found["notes"][-1]
    notes = run(tmp_path, "config/depth_3b.py", "--plan", "--gpu=GTX 960")["notes"]  # nothing is promised of a GPU whose peak is not known
    assert "GTX 960 is not known" in notes[-1] and "tokens/s" not in " ".join(notes)


# ----------------------------------------------------------------------------------------------------------------------
# slow: other software

@pytest.mark.slow
def test_peer_of_the_same_shape(tmp_path):
    pytest.importorskip("transformers")
    config = GPTConfig(**TINY, qk_norm="none")
    ours, llama = GPT(config), bench.hf_llama(config)
    assert sorted(p.numel() for p in llama.parameters() if p.ndim == 1) == sorted(p.numel() for p in ours.parameters() if p.ndim == 1)
    assert sum(p.numel() for p in llama.parameters()) == ours.num_params()
    peer, = bench.build_peer(config, bench.contextlib.nullcontext(), CPU, compiled=False)
    assert peer.flops == ours.mfu_flops_per_token(config.block_size)
    assert [row["method"] for row in run(tmp_path, "--methods=vanilla", "--peer=hf_llama", "--steps=2")["rows"]] == ["vanilla", "hf_llama eager"]
    assert [row["method"] for row in run(tmp_path, "--decode", "--methods=vanilla", "--new_tokens=4")["rows"]] == ["vanilla", "hf_llama"]


def test_the_compiled_peer_attends_without_a_mask():
    """With one SDPA would run none of its fast kernels, and the comparison would flatter us."""
    pytest.importorskip("transformers")
    llama, idx, calls = bench.hf_llama(GPTConfig(**TINY)), torch.arange(16)[None], []

    def backend(traced, example_inputs):
        calls.extend(node for node in traced.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return traced.forward
    compiled = torch.compile(llama, backend=backend)(input_ids=idx, labels=idx, use_cache=False).loss
    assert len(calls) == TINY["n_layer"] and all(call.kwargs["attn_mask"] is None and call.kwargs["is_causal"] for call in calls)
    torch.testing.assert_close(compiled, llama(input_ids=idx, labels=idx, use_cache=False).loss)
    llama.set_attn_implementation("eager")
    torch.testing.assert_close(compiled, llama(input_ids=idx, labels=idx, use_cache=False).loss)



@pytest.mark.slow
def test_cold_start_is_measured_in_a_process_of_its_own(tmp_path):
    row, = run(tmp_path, "--cold", "--methods=vanilla", "--steps=2")["rows"]
    assert row["cold first step s"] > 0
