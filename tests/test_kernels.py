"""
The kernels against their definitions in model.py, computed in float64: outputs and gradients of every public function. Without a GPU they
run in Triton's interpreter. Uninitialised memory is filled with NaN, so an element that a kernel forgets to write fails its test.
"""
import importlib
import sys
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    import kernels
except ImportError:
    pytest.skip("Triton is not installed", allow_module_level=True)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}  # relative, in the Euclidean norm: rounding of the outputs


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.manual_seed(0)
    torch.set_deterministic_debug_mode("error")
    assert torch.zeros(1).new_empty(3).isnan().all() and torch.empty_like(torch.zeros(3)).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def leaf(*shape, dtype=torch.float32, at=0.0):
    return (at + torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()


def heads(B, h, T, D, dtype=torch.float32):
    """[B,h,T,D] in the training layout: a view of [B,T,h,D] memory."""
    return leaf(B, T, h, D, dtype=dtype).detach().transpose(1, 2).requires_grad_()


def check(fused, definition, leaves, tolerance):
    """Outputs and gradients of both functions of the same leaves; the definition in float64."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = fused(*leaves), definition(*wide)
    if isinstance(found, torch.Tensor):
        found, expected = (found,), (expected,)
    seeds = [torch.randn_like(x) for x in found]
    found_grads = torch.autograd.grad(found, leaves, seeds)
    expected_grads = torch.autograd.grad(expected, wide, [s.double() for s in seeds])
    for a, b in zip((*found, *found_grads), (*expected, *expected_grads), strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm()  # false for NaN
    for a, b in zip(found_grads, leaves, strict=True):
        assert a.dtype == b.dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("C", [24, 64])
def test_rms_norm(C, dtype):
    x, u, w = leaf(3, 5, 2 * C, dtype=dtype), leaf(3, 5, C, dtype=dtype), leaf(C, at=1.0)
    check(lambda x, w: kernels.rms_norm(x[..., C:], w, 1e-5), lambda x, w: model.rms_norm(x[..., C:], w, 1e-5), [x, w], TOLERANCE[dtype])

    check(lambda x, u, w: kernels.add_rms_norm(x[..., :C], u, w, 1e-5), lambda x, u, w: (x[..., :C] + u, model.rms_norm(x[..., :C] + u, w, 1e-5)),
          [x, u, w], 2 * TOLERANCE[dtype])


def test_add_rms_norm_when_one_output_is_not_used():
    x, u, w = leaf(4, 24), leaf(4, 24), leaf(24, at=1.0)
    check(lambda x, u: kernels.add_rms_norm(x, u, w, 1e-5)[0], lambda x, u: x + u, [x, u], 2e-6)
    check(lambda *leaves: kernels.add_rms_norm(*leaves, 1e-5)[1], lambda x, u, w: model.rms_norm(x + u, w, 1e-5), [x, u, w], 2e-6)


def test_rms_norm_with_more_tiles_than_programs(monkeypatch):
    monkeypatch.setitem(kernels.SETTINGS, "rms_norm_backward", (1, 1, 1, 1))  # tiles of one row, two programs in the interpreter
    check(lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: model.rms_norm(x, w, 1e-5), [leaf(7, 24), leaf(24, at=1.0)], 2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(dtype, monkeypatch):
    monkeypatch.setitem(kernels.SETTINGS, "swiglu", (1, 1))  # 32 columns a program: two blocks a row, one of them ragged
    check(kernels.swiglu, model.swiglu, [leaf(2, 3, 88, dtype=dtype)], TOLERANCE[dtype])
    check(lambda x: kernels.swiglu(x[:, ::2]), lambda x: model.swiglu(x[:, ::2]), [leaf(2, 3, 88, dtype=dtype)], TOLERANCE[dtype])


def defined_attention_inputs(qkv, q_weight, k_weight, cos, sin, H, G, eps, k_norm_last, source_k, source_v):
    """What kernels.attention_inputs computes, in the functions of model.py."""
    D = 2 * cos.shape[1]
    q, k, v = qkv.unflatten(-1, (-1, D)).transpose(1, 2).split([H, G, G], dim=1)
    if q_weight is not None:
        q = model.rms_norm(q, q_weight, eps)
    if k_weight is not None and not k_norm_last:
        k = model.rms_norm(k, k_weight, eps)
    q, k = model.apply_rope(q, cos, sin), model.apply_rope(k, cos, sin)
    if k_weight is not None and k_norm_last:
        k = model.rms_norm(k, k_weight, eps)
    return q, k, model.depth_mix(q, k, v, source_k, source_v)


# query heads, KV heads, head_dim, T, sources, k norm after RoPE, weights of q and k
@pytest.mark.parametrize("H, G, D, T, N, last, normed, dtype", [
    (2, 2, 32, 3, 0, False, (True, True), torch.float32),
    (8, 1, 12, 5, 0, True, (True, True), torch.bfloat16),
    (4, 1, 64, 3, 1, False, (True, True), torch.bfloat16),
    (6, 3, 12, 5, 2, True, (True, True), torch.float32),
    (3, 1, 80, 3, 3, True, (False, False), torch.float16),
    (2, 2, 12, 1, 4, False, (False, True), torch.float32),
    (2, 1, 128, 2, 0, False, (True, False), torch.float32),
])
def test_attention_inputs(H, G, D, T, N, last, normed, dtype):
    angles = torch.randn(T, D // 2, device=DEVICE)
    weights = [leaf(D, at=1.0) for wanted in normed if wanted]
    sources = [heads(2, G, T, D, dtype) for _ in range(2 * N)]

    def call(function, qkv, *rest):
        cos, sin = (x if function is kernels.attention_inputs else x.double() for x in (angles.cos(), angles.sin()))
        rest = list(rest)
        q_weight, k_weight = [rest.pop(0) if wanted else None for wanted in normed]
        return function(qkv, q_weight, k_weight, cos, sin, H, G, 1e-5, last, rest[:N], rest[N:])
    check(lambda *x: call(kernels.attention_inputs, *x), lambda *x: call(defined_attention_inputs, *x),
          [leaf(2, T, (H + 2 * G) * D, dtype=dtype), *weights, *sources], 2 * TOLERANCE[dtype])


def test_value_without_sources_is_a_view():
    qkv, angles = leaf(1, 3, 4 * 8), torch.zeros(3, 4, device=DEVICE)
    v = kernels.attention_inputs(qkv, None, None, angles.cos(), angles.sin(), 2, 1, 0.0)[2]
    assert v.data_ptr() == qkv[..., 24:].data_ptr()


@pytest.mark.parametrize("H, G, D, T, N, dtype", [
    (2, 2, 32, 3, 1, torch.bfloat16), (4, 1, 12, 3, 9, torch.float32), (4, 2, 96, 3, 2, torch.float16), (4, 1, 64, 3, 4, torch.bfloat16)])
def test_depth_mix(H, G, D, T, N, dtype):
    leaves = [heads(2, h, T, D, dtype) for h in (H, G, G)] + [heads(2, G, T, D, dtype) for _ in range(2 * N)]
    check(lambda q, k, v, *s: kernels.depth_mix(q, k, v, s[:N], s[N:]), lambda q, k, v, *s: model.depth_mix(q, k, v, s[:N], s[N:]), leaves,
          2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_keeps_its_weights_gradient_in_float32(dtype):
    x, weight = leaf(2, 5, 16, dtype=dtype), leaf(24, 16)
    y = kernels.linear(x, weight)
    seed = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, weight), seed)
    wide, rounded = x.detach().double(), weight.detach().to(dtype).double()
    assert dw.dtype == torch.float32 and dx.dtype == y.dtype == dtype
    assert (y - wide @ rounded.T).norm() <= TOLERANCE[dtype] * y.double().norm()
    assert (dx - seed.double() @ rounded).norm() <= TOLERANCE[dtype] * dx.double().norm()
    exact = seed.double().flatten(0, 1).T @ wide.flatten(0, 1)
    assert (dw - exact).norm() <= 1e-6 * exact.norm()  # a gradient rounded to 16 bits on its way would miss this
    into = torch.ones(24, 16, device=DEVICE)
    summed = kernels.weight_gradient(seed.flatten(0, 1), x.detach().flatten(0, 1), into)
    assert summed is into and (into - 1 - exact).norm() <= 1e-6 * exact.norm()


def test_depth_mix_without_sources_is_the_value():
    q, k, v = (heads(1, h, 3, 8) for h in (2, 1, 1))
    assert kernels.depth_mix(q, k, v, []) is v and torch.equal(model.depth_mix(q, k, v, [], []), v)


def test_depth_mix_with_stacked_sources_and_other_strides(monkeypatch):
    monkeypatch.setitem(kernels.SETTINGS, "heads_forward", (1, 1))
    monkeypatch.setitem(kernels.SETTINGS, "heads_backward", (1, 1, 1, None))  # four rows a tile, and more tiles than programs
    B, H, G, T, D, N = 2, 4, 2, 5, 12, 3
    leaves = [leaf(B, H, T, D), leaf(B, G, D, T), leaf(B, T, G, 2 * D), leaf(N, B, G, T, D), leaf(N, B, T, G, D)]

    def call(function, q, k, v, source_k, source_v):
        return function(q, k.mT, v.transpose(1, 2)[..., D:], source_k, source_v.transpose(2, 3))
    check(lambda *x: call(kernels.depth_mix, *x), lambda *x: call(model.depth_mix, *x), leaves, 2e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("table_is_there", [False, True])
def test_a_cuda_graph_keeps_what_its_kernels_read(table_is_there):
    inputs = [heads(2, h, 5, 16).detach() for h in (4, 2, 2, *[2] * 6)]

    def mix(function):
        q, k, v, *sources = inputs
        return function(q, k, v, sources[:3], sources[3:])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream if table_is_there else torch.cuda.Stream()):
        mix(kernels.depth_mix)
    with torch.cuda.graph(graph, stream=stream):
        found = mix(kernels.depth_mix)
    kernels._tables.clear()
    taken = [torch.full((64,), -1, device=DEVICE) for _ in range(100)]  # whatever memory was given back
    for x in inputs:
        x.normal_()
    graph.replay()
    expected = mix(model.depth_mix)
    assert len(taken) == 100 and (found - expected).norm() <= 1e-5 * expected.norm()


def layers(x, weights, slots, mix, recompute=False):
    """Four layers on x [B,T,C] in which layers 0 and 1 are read by later ones, 2 by none; every output reaches the next layer."""
    past = []

    def layer(x, w, m):
        q, k, v = (x @ w).unflatten(-1, (4, 8)).transpose(1, 2).split([2, 1, 1], dim=1)
        sources = past[:m] if m < 3 else past[:2]
        if slots:
            v = mix(q, k, v, sources)
            k, v, kv = kernels.publish(k, v)
        else:
            v = mix(q, k, v, [s[0] for s in sources], [s[1] for s in sources])
            kv = k, v
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + o.transpose(1, 2).flatten(2), kv
    for m, w in enumerate(weights):
        x, kv = checkpoint(layer, x, w, m, use_reentrant=False) if recompute else layer(x, w, m)
        past.append(kv)
    return x


@pytest.mark.parametrize("recompute", [False, True])
def test_slots_collect_the_gradients_of_all_readers(recompute):
    x, weights = leaf(1, 3, 16), [(leaf(16, 32) / 4).detach().requires_grad_() for _ in range(4)]
    expected = layers(x.double(), [w.double() for w in weights], False, model.depth_mix)
    found = layers(x, weights, True, kernels.depth_mix, recompute)
    seed = torch.randn_like(found)
    expected_grads = torch.autograd.grad(expected, [x, *weights], seed.double())
    for _ in range(1 if recompute else 2):  # a second backward through the same graph has to start from empty buffers
        found_grads = torch.autograd.grad(found, [x, *weights], seed, retain_graph=not recompute)
        for a, b in zip((found, *found_grads), (expected, *expected_grads), strict=True):
            assert (a - b).norm() <= 1e-5 * b.norm()


def test_slot_buffers_are_released_and_shared():
    q, k, v = (heads(1, h, 3, 8) for h in (2, 1, 1))
    k1, v1, slot = kernels.publish(k, v)
    mixed = [kernels.depth_mix(q, k1, v1, [slot]) for _ in range(2)]
    torch.autograd.grad(mixed[0].sum(), q, retain_graph=True)
    buffer = slot.grads[0]
    torch.autograd.grad(mixed[1].sum(), q, retain_graph=True)
    assert buffer is slot.grads[0] and slot.grads[1] is not None
    torch.autograd.grad(k1.sum() + v1.sum(), [k, v])
    assert slot.grads == [None, None]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_cross_entropy(dtype, monkeypatch):
    monkeypatch.setitem(kernels.SETTINGS, "cross_entropy", (1, 8))  # 256 columns a step: two steps, one of them ragged
    logits = (5 * torch.randn(6, 304, device=DEVICE)).to(dtype)[:, :301]
    targets = torch.tensor([0, 300, -100, 7, 301, 8], device=DEVICE)
    expected_losses, expected = model.cross_entropy(logits.double(), targets.clamp(max=300))
    losses = kernels.cross_entropy_(logits, targets)
    ok = [0, 1, 2, 3, 5]
    assert losses.dtype == torch.float32 and losses[4].isnan() and losses[2] == 0 and (logits[2] == 0).all()
    assert (losses - expected_losses)[ok].norm() <= 2e-6 * expected_losses[ok].norm()
    assert (logits - expected)[ok].norm() <= TOLERANCE[dtype] * expected[ok].norm()


def test_torch_compile_keeps_the_graph_whole():
    angles, w = torch.randn(3, 4, device=DEVICE), [leaf(8, at=1.0) for _ in range(2)]

    def step(x, u, weight, *sources):
        s, y = kernels.add_rms_norm(x, u, weight, 1e-5)
        q, k, v = kernels.attention_inputs(y, *w, angles.cos(), angles.sin(), 2, 1, 1e-5, True, sources[:1], sources[1:])
        return (kernels.swiglu(kernels.rms_norm(s, weight, 1e-5)), kernels.depth_mix(q, k, v, sources[:1], sources[1:]))
    leaves = [leaf(1, 3, 32), leaf(1, 3, 32), leaf(32, at=1.0), heads(1, 1, 3, 8), heads(1, 1, 3, 8)]
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    seeds = [torch.randn_like(x) for x in step(*leaves)]
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves, seeds), torch.autograd.grad(step(*leaves), leaves, seeds), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def connection(n, C, dtype, first=False, norm=True, spread=1.0):
    """Leaves of kernels.hyper_connection: streams, u, maps, projection, scale, biases, alphas and h's norm weight; those that are not there are None."""
    E, tokens = n * (n + 2), (2, 9)
    leaves = [leaf(*tokens, n, C, dtype=dtype), leaf(*tokens, C, dtype=dtype), leaf(*tokens, E - n, at=0.5), (leaf(E, n * C) / (n * C)**0.5).detach().requires_grad_(),
              leaf(n * C, at=1.0), leaf(n), leaf(n), (spread * leaf(n, n)).detach().requires_grad_(), leaf(), leaf(), leaf(), leaf(C, at=1.0)]
    return [None if first and i in (1, 2) or not norm and i == 11 else x for i, x in enumerate(leaves)]


def connect(leaves, there, iters):
    """(the kernels' function, the definition) of those of `leaves` that are there."""
    def spread_out(given):
        given = iter(given)
        x = [next(given) if wanted else None for wanted in there]
        return x[:3], x[3], x[4], x[5:11], x[11]

    def fused(*given):
        state, projection, scale, logits, weight = spread_out(given)
        return kernels.hyper_connection(*state, projection, scale, logits, iters, 1e-5, weight, 1e-6)

    def definition(*given):
        (x, u, maps), projection, scale, (pre_bias, post_bias, res_bias, alpha_pre, alpha_post, alpha_res), weight = spread_out(given)
        n = x.shape[-2]
        if u is not None:
            x = maps[..., n:].unflatten(-1, (n, n)) @ x + maps[..., :n, None] * u.unsqueeze(-2)
        pre, post, res = (model.rms_norm(x.flatten(-2), scale, 1e-5) @ projection.T).split([n, n, n * n], -1)
        h = (torch.sigmoid(alpha_pre * pre + pre_bias).unsqueeze(-2) @ x).squeeze(-2)
        res = model.sinkhorn((alpha_res * res).unflatten(-1, (n, n)) + res_bias, iters)
        return x, h if weight is None else model.rms_norm(h, weight, 1e-6), torch.cat((2 * torch.sigmoid(alpha_post * post + post_bias), res.flatten(-2)), -1)
    return fused, definition


# streams, width, dtype, first sub-layer (nothing to write), with a norm, Sinkhorn iterations; the interpreter cannot multiply bfloat16 matrices
@pytest.mark.parametrize("n, C, dtype, first, norm, iters", [
    (4, 48, torch.float32, False, True, 20), (3, 80, torch.float32, False, True, 3), (2, 16, torch.float32, False, False, 1), (4, 32, torch.float32, True, True, 5),
    (4, 48, torch.float16, False, True, 20), (4, 80, torch.bfloat16 if DEVICE == "cuda" else torch.float16, True, False, 2)])
def test_hyper_connection(n, C, dtype, first, norm, iters):
    leaves = connection(n, C, dtype, first, norm)
    given = [x for x in leaves if x is not None]
    check(*connect(given, [x is not None for x in leaves], iters), given, 8 * TOLERANCE[dtype] if dtype != torch.float32 else 2e-5)


def test_hyper_connection_with_one_stream():
    """Its res is 1: exactly no gradient for that bias and alpha."""
    leaves = connection(1, 32, torch.float32, norm=False)[:11]
    fused, definition = connect(leaves, [True] * 11 + [False], 20)
    free = [x for i, x in enumerate(leaves) if i not in (7, 10)]
    check(lambda *x: fused(*x[:7], leaves[7], *x[7:9], leaves[10]), lambda *x: definition(*x[:7], leaves[7].double(), *x[7:9], leaves[10].double()), free, 2e-5)
    maps = fused(*leaves)[2]
    assert (maps[..., 1] == 1).all()
    assert not any(g.any() for g in torch.autograd.grad(maps[..., 1].sum(), [leaves[7], leaves[10]]))


def test_hyper_connection_with_tensors_that_are_views():
    leaves = [x if x.ndim < 2 else torch.stack([x, x + 1], -1).detach()[..., 0].requires_grad_() for x in connection(2, 16, torch.float32)]
    check(*connect(leaves, [True] * 12, 3), leaves, 2e-5)


def test_hyper_connection_refuses_what_does_not_fit():
    streams, u, maps, projection, scale, *logits, weight = connection(2, 16, torch.float32)
    with pytest.raises(ValueError, match=r"\[2, 8, 6\], \[8, 32\]\] were given; expected"):
        kernels.hyper_connection(streams, u, maps[:, :8], projection, scale, logits, 3, 1e-5, weight)
    with pytest.raises(ValueError, match="n at most 4"):
        kernels.hyper_connection(streams.repeat(1, 1, 3, 1), None, None, projection, scale, logits, 3, 1e-5, weight)


def test_hyper_connection_where_exp_is_clamped():
    leaves = connection(3, 32, torch.float32, spread=40.0)
    fused, definition = connect(leaves, [True] * 12, 3)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = fused(*leaves)[2], definition(*wide)[2]
    seed = torch.randn_like(found)
    a, = torch.autograd.grad(found, leaves[7], seed)
    b, = torch.autograd.grad(expected, wide[7], seed.double())
    assert (found - expected).norm() <= 1e-4 * expected.norm() and (a - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("options, recompute", [(dict(mhc_num_streams=3), False), (dict(norm_order="post"), True), (dict(n_loop=2), True)], ids=str)
def test_a_model_of_hyper_connections_runs_on_the_kernels(options, recompute, monkeypatch):
    config = model.GPTConfig(**dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, n_inner=24, block_size=4, vocab_size=40, connector="mhc", mhc_num_streams=2,
                                    mhc_sinkhorn_iters=3, mhc_alpha_init=0.5, init_std=0.3) | options)
    gpt = model.GPT(config).to(DEVICE)
    gpt.grad_checkpoint = recompute
    idx, targets = torch.randint(40, (2, 1, 4), device=DEVICE)
    results = []
    for used in (None, kernels):
        monkeypatch.setattr(model, "fused", lambda x, used=used: used)
        loss = gpt(idx, targets)[1]
        loss.backward()
        results.append([loss.detach()] + [p.grad.clone() for p in gpt.parameters()])
        gpt.zero_grad()
    largest = max(b.norm() for b in results[0])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm() + 1e-6 * largest  # the norm behind it takes nearly all from the gradient of pre


def test_more_streams_than_the_kernels_take_run_the_definitions(monkeypatch):
    monkeypatch.setattr(model, "fused", lambda x: kernels)
    monkeypatch.setattr(kernels, "hyper_connection", None)
    gpt = model.GPT(model.GPTConfig(n_layer=1, n_head=1, n_kv_head=1, n_embd=16, n_inner=16, block_size=4, vocab_size=40, connector="mhc",
                                    mhc_num_streams=kernels.MOST_STREAMS + 1)).to(DEVICE)
    assert gpt(*torch.randint(40, (2, 1, 4), device=DEVICE))[1].isfinite()


@pytest.mark.parametrize("depth", ["none", "depth_attention"])
def test_the_model_runs_on_the_kernels(depth, monkeypatch):
    config = model.GPTConfig(n_layer=3, n_head=2, n_kv_head=1, n_embd=16, n_inner=24, block_size=4, vocab_size=40, depth=depth, depth_stride=1)
    gpt = model.GPT(config).to(DEVICE)
    idx, targets = torch.randint(40, (2, 1, 4), device=DEVICE)
    results = []
    for used in (None, kernels):
        monkeypatch.setattr(model, "fused", lambda x, used=used: used)
        loss = gpt(idx, targets)[1]
        results.append([loss, *torch.autograd.grad(loss, list(gpt.parameters()))])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_errors_say_what_was_expected():
    q, k, v = (heads(1, h, 3, 8) for h in (2, 1, 1))
    with pytest.raises(ValueError, match="2 source keys but 1 source values"):
        kernels.depth_mix(q, k, v, [k, k], [v])
    with pytest.raises(ValueError, match=r"\[1, 1, 3, 6\].*sources must have the same"):
        kernels.depth_mix(q, k, v, [k[..., :6]], [v[..., :6]])
    with pytest.raises(ValueError, match="torch.bfloat16 does not go with"):
        kernels.depth_mix(q, k, v, [k.bfloat16()], [v.bfloat16()])
    with pytest.raises(ValueError, match="even"):
        kernels.depth_mix(q[..., :7], k[..., :7], v[..., :7], [])
    with pytest.raises(ValueError, match=r"expected qkv \[B, T"):
        kernels.attention_inputs(leaf(1, 3, 32), None, None, torch.ones(3, 3), torch.ones(3, 3), 2, 1, 0.0)
    with pytest.raises(ValueError, match=r"targets \[3\] were given"):
        kernels.cross_entropy_(torch.randn(2, 8), torch.zeros(3, dtype=torch.long))


def test_a_broken_flash_attn_is_said(tmp_path, monkeypatch):
    """Without one nothing is said; one that lacks a part of its own is named with the reason."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    find = kernels._flash_attn.__wrapped__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find() == (None, None, None)
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    for file in ("__init__.py", "cute/__init__.py"):
        (tmp_path / "flash_attn" / file).touch()
    (tmp_path / "flash_attn/cute/interface.py").write_text("import a_part_that_is_missing")
    importlib.invalidate_caches()
    with pytest.warns(UserWarning, match="flash-attn 4 is installed but cannot be imported, .* No module named 'a_part_that_is_missing'"):
        assert find() == (None, None, None)
    (tmp_path / "flash_attn/cute/interface.py").write_text("")
    sys.modules.pop("flash_attn.cute.interface", None)
    with pytest.warns(UserWarning, match="cannot import name '_flash_attn_bwd'"):
        assert find() == (None, None, None)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        sys.modules.pop(name, None)
