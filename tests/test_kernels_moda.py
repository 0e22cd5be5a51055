"""
The kernels of MoDA, AttnRes and DenseFormer against float64 PyTorch. Without a GPU they run in Triton's interpreter. Uninitialised memory is
filled with NaN, so an element that a kernel forgets to write fails its test.
"""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    import kernels
except ImportError:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def error(x, reference):
    assert x.shape == reference.shape
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def randn(*shape, layout="training", dtype=torch.float32, scale=1.0):
    """Random [B, heads, T, D]: a transposed view of [B, T, heads, D] memory ('training'), contiguous ('heads') or a slice of wider rows ('slice')."""
    B, heads, T, D = shape
    if layout == "heads":
        x = torch.randn(B, heads, T, D)
    elif layout == "slice":
        x = torch.randn(B, T, heads + 2, D)[:, :, 1:-1].transpose(1, 2)
    else:
        x = torch.randn(B, T, heads, D).transpose(1, 2)
    return (x * scale).to(DEVICE, dtype)


def reference(q, k, v, depth_k, depth_v):
    """(o, lse) of MoDA's one softmax, with scores of all pairs; without k, the depth slots alone."""
    group = q.shape[1] // depth_k[0].shape[1] if len(depth_k) else q.shape[1] // k.shape[1]
    def heads(x):
        return x.repeat_interleave(group, dim=1)
    q = q * q.shape[-1] ** -0.5
    scores = [(q * heads(key)).sum(-1, keepdim=True) for key in depth_k]
    if k is not None:
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        scores.insert(0, (q @ heads(k).mT).masked_fill(~causal, float("-inf")))
    scores = torch.cat(scores, -1)
    p = scores.softmax(-1)
    o = 0 if k is None else p[..., :q.shape[2]] @ heads(v)
    for l, value in enumerate(depth_v):
        o = o + p[..., l - len(depth_v), None] * heads(value)
    return o, scores.logsumexp(-1)


def gradients(function, inputs, do):
    """(output, gradients of the inputs). Inputs keep their memory layout."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = function(*inputs)
    return output, torch.autograd.grad(output, inputs, do.to(output.dtype))


def moda(L, kernel):
    def function(q, k, v, *slots):
        return kernel(q, k, v, slots[:L], slots[L:])
    return function


def joint_reference(*args):
    return reference(*args)[0]


@pytest.mark.parametrize("B, T, G, group, D, L, layout", [
    (2, 5, 2, 4, 32, 3, "training"),
    (1, 7, 3, 2, 64, 9, "training"),
    (1, 3, 1, 1, 128, 1, "heads"),
    (1, 3, 2, 8, 64, 5, "slice"),
    (1, 1, 2, 3, 40, 2, "heads"),
    (1, 5, 2, 2, 32, 0, "slice"),
])
def test_moda_forward_and_backward(B, T, G, group, D, L, layout):
    torch.manual_seed(0)
    inputs = [randn(B, heads, T, D, layout=layout) for heads in [group * G] + [G] * (2 + 2 * L)]
    do = randn(B, group * G, T, D)
    o, grads = gradients(moda(L, kernels.moda_attention), inputs, do)
    o64, grads64 = gradients(moda(L, joint_reference), [x.double() for x in inputs], do)
    assert error(o, o64) < 2e-6
    for grad, grad64 in zip(grads, grads64, strict=True):
        # one key and one token: a softmax over one entry, whose score has no gradient
        assert error(grad, grad64) < 2e-6 or grad64.norm() < 1e-12 and grad.norm() < 1e-5


@pytest.mark.parametrize("slots, rows_a_warp, stages", [(16, 2, 1), (16, 1, 2), (32, 1, 1)])
def test_moda_is_the_same_with_any_tiling(monkeypatch, slots, rows_a_warp, stages):
    torch.manual_seed(1)
    T, G, D, L = 3, 2, 32, 18
    monkeypatch.setitem(kernels.SETTINGS, "moda_forward", (2, rows_a_warp, slots, stages, None))
    monkeypatch.setitem(kernels.SETTINGS, "moda_backward", (2, rows_a_warp, slots, stages, None))
    inputs = [randn(1, heads, T, D) for heads in [2 * G] + [G] * (2 + 2 * L)]
    do = randn(1, 2 * G, T, D)
    o, grads = gradients(moda(L, kernels.moda_attention), inputs, do)
    o64, grads64 = gradients(moda(L, joint_reference), [x.double() for x in inputs], do)
    assert max(error(x, y) for x, y in zip((o, *grads), (o64, *grads64), strict=True)) < 2e-6


def test_moda_takes_stacked_slots_and_any_layout_of_the_gradient():
    torch.manual_seed(2)
    q, k, v = randn(1, 4, 3, 32), randn(1, 2, 3, 32), randn(1, 2, 3, 32)
    depth_k, depth_v = torch.randn(2, 2, 1, 2, 3, 32, device=DEVICE)  # [L, B, G, T, D] each
    do = torch.randn(1, 4, 3, 32, device=DEVICE)
    o, grads = gradients(kernels.moda_attention, [q, k, v, depth_k, depth_v], do)
    o64, grads64 = gradients(joint_reference, [x.double() for x in (q, k, v, depth_k, depth_v)], do)
    assert max(error(x, y) for x, y in zip((o, *grads), (o64, *grads64), strict=True)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16])  # the interpreter cannot multiply bfloat16 matrices
def test_moda_in_half_precision_is_as_good_as_plain_half_precision(dtype):
    torch.manual_seed(3)
    T, G, group, D, L = 5, 2, 4, 64, 6
    inputs = [randn(1, heads, T, D, dtype=dtype) for heads in [group * G] + [G] * (2 + 2 * L)]
    do = randn(1, group * G, T, D, dtype=dtype)
    exact = gradients(moda(L, joint_reference), [x.double() for x in inputs], do)
    plain, fused = gradients(moda(L, joint_reference), inputs, do), gradients(moda(L, kernels.moda_attention), inputs, do)
    for x, y, z in zip((fused[0], *fused[1]), (plain[0], *plain[1]), (exact[0], *exact[1]), strict=True):
        assert x.dtype == dtype and error(x, z) < 1.5 * error(y, z) + 1e-4


@pytest.mark.parametrize("scale", [8.0, 64.0])
def test_moda_large_logits(scale):
    torch.manual_seed(4)
    T, G, D, L = 5, 2, 32, 3
    inputs = [randn(1, 2 * G, T, D, scale=scale)] + [randn(1, G, T, D) for _ in range(2 + 2 * L)]
    do = randn(1, 2 * G, T, D)
    o, grads = gradients(moda(L, kernels.moda_attention), inputs, do)
    o64, grads64 = gradients(moda(L, joint_reference), [x.double() for x in inputs], do)
    assert error(o, o64) < 2e-5
    for grad, grad64 in zip(grads, grads64, strict=True):  # where the softmax is all but one-hot, what is left of a gradient is rounding
        assert (grad - grad64).abs().max() < 1e-4 and grad.isfinite().all()


@pytest.mark.parametrize("T", [1, 3])
def test_moda_with_a_cache(T):
    """The last T of S positions, as a forward pass over all of them has it."""
    torch.manual_seed(10)
    S, G, D, L = 6, 2, 32, 3
    q, k, v, *slots = [randn(1, heads, S, D) for heads in [2 * G] + [G] * (2 + 2 * L)]
    do = randn(1, 2 * G, T, D)
    def last(x):
        return x[:, :, S - T:]
    def function(q, k, v, *slots):
        return kernels.moda_attention(q, k, v, slots[:L], slots[L:])
    def whole(q, k, v, *slots):
        q, *slots = [torch.cat((torch.zeros_like(k[:, :1, :S - T]).expand(-1, x.shape[1], -1, -1), x), 2) for x in (q, *slots)]
        return last(joint_reference(q, k, v, slots[:L], slots[L:]))
    inputs = [last(q), k, v, *map(last, slots)]
    o, grads = gradients(function, inputs, do)
    o64, grads64 = gradients(whole, [x.double() for x in inputs], do)
    assert max(error(x, y) for x, y in zip((o, *grads), (o64, *grads64), strict=True)) < 2e-6


def test_moda_depth_alone():
    torch.manual_seed(5)
    q, slots = randn(2, 8, 3, 32, layout="slice"), [randn(2, 2, 3, 32) for _ in range(10)]
    o, lse = kernels.moda_depth(q, slots[:5], slots[5:])
    o64, lse64 = reference(q.double(), None, None, [x.double() for x in slots[:5]], [x.double() for x in slots[5:]])
    assert error(o, o64) < 1e-6 and error(lse, lse64) < 1e-6 and lse.dtype == torch.float32


class Layers(torch.nn.Module):
    """Three layers of MoDA with the FFN's slots, in which readers either add gradients in place (slots) or leave them to autograd (tensors)."""

    def __init__(self, C=32, G=1, D=32):
        super().__init__()
        self.G, self.D = G, D
        self.projections = torch.nn.ModuleList(torch.nn.Linear(C, (2 + 2 * 2) * G * D, bias=False) for _ in range(3))
        self.out = torch.nn.ModuleList(torch.nn.Linear(2 * G * D, C, bias=False) for _ in range(3))

    def forward(self, x, attention, in_place):
        past = []
        for projection, out in zip(self.projections, self.out, strict=True):
            heads = projection(x).unflatten(-1, (-1, self.D)).transpose(1, 2)
            q, k, v, ffn_k, ffn_v = heads.split([2 * self.G] + [self.G] * 4, dim=1)
            keys, values = [s[0] for s in past], [s[1] for s in past]
            if in_place:
                keys, values = [slot for *_, slot in past], ()
                k, v, slot = kernels.publish(k, v)
                past += [(k, v, slot), kernels.publish(ffn_k, ffn_v)]
            else:
                past += [(k, v), (ffn_k, ffn_v)]
            x = x + out(attention(q, k, v, keys, values).transpose(1, 2).flatten(2))
        return x


def test_moda_slots_give_autograds_gradients():
    torch.manual_seed(6)
    layers, x = Layers().to(DEVICE), torch.randn(1, 3, 32, device=DEVICE)
    def run(layers, x, *how):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(layers(x, *how).square().sum(), [x, *layers.parameters()])
    plain = run(layers, x, kernels.moda_attention, False)
    in_place = run(layers, x, kernels.moda_attention, True)
    exact = run(layers.double(), x.double(), joint_reference, False)
    assert max(error(a, b) for a, b in zip(plain, exact, strict=True)) < 2e-6
    assert max(error(a, b) for a, b in zip(in_place, exact, strict=True)) < 2e-6


def test_moda_refuses_what_it_cannot_compute():
    x = torch.randn(1, 3, 4, 32, device=DEVICE)
    with pytest.raises(ValueError, match="H a multiple of G"):
        kernels.moda_attention(x[:, :2], x, x, [], [])
    with pytest.raises(ValueError, match="D a multiple of 8"):
        kernels.moda_attention(*[x[..., :28]] * 3, [], [])
    with pytest.raises(ValueError, match="one value for each key"):
        kernels.moda_attention(x, x, x, [x, x], [x])
    with pytest.raises(ValueError, match="the same batch"):
        kernels.moda_attention(x, x, x, [x[:, :2]], [x[:, :2]])


def attnres_reference(query, bias, eps, sources):
    scores = [(s * query).sum(-1) * torch.rsqrt(s.square().mean(-1) + eps) for s in sources]
    if bias is not None:
        scores[-1] = scores[-1] + bias
    return sum(a.unsqueeze(-1) * s for a, s in zip(torch.stack(scores).softmax(0), sources, strict=True))


@pytest.mark.parametrize("n, shape, biased", [(1, (3, 32), True), (2, (2, 3, 40), False), (5, (1, 7, 64), True)])
def test_attnres_mix(n, shape, biased):
    torch.manual_seed(7)
    inputs = [torch.randn(shape, device=DEVICE) for _ in range(n)] + [torch.randn(shape[-1], device=DEVICE)] + [torch.tensor(3.0, device=DEVICE)] * biased
    def split(x):
        return x[:n], x[n], x[n + 1] if biased else None
    do = torch.randn(shape, device=DEVICE)
    def fused(*x):
        sources, query, bias = split(x)
        return kernels.attnres_mix(sources, query, 1e-3, bias)
    def exact(*x):
        sources, query, bias = split(x)
        return attnres_reference(query, bias, 1e-3, sources)
    out, grads = gradients(fused, inputs, do)
    out64, grads64 = gradients(exact, [x.double() for x in inputs], do)
    assert error(out, out64) < 2e-6
    for grad, grad64 in zip(grads, grads64, strict=True):
        assert error(grad, grad64) < 5e-6 or grad64.norm() < 1e-12 and grad.norm() < 1e-4  # one source: its score has no gradient


def test_states_give_autograds_gradients():
    """Layers that read all earlier states, as tensors and as states into whose buffers the gradients are added."""
    torch.manual_seed(9)
    weights = [torch.randn(32, 32, device=DEVICE) / 6 for _ in range(3)]
    reads = [torch.randn(32, device=DEVICE) / 4 for _ in range(3)]
    x = torch.randn(3, 32, device=DEVICE)

    def run(dtype, in_place):
        leaves = [t.to(dtype).requires_grad_() for t in (x, *weights, *reads)]
        h, parameters, past = leaves[0], leaves[1:4], leaves[4:]
        history = []
        for weight, read in zip(parameters, past, strict=True):
            state = h
            if in_place:
                h, state = kernels.keep(h)
            sources = history + [h]
            if dtype == torch.float64:
                y = attnres_reference(read, None, 1e-6, sources)
            else:
                y = kernels.attnres_mix(sources, read, 1e-6)
            history.append(state)
            h = h + torch.tanh(y @ weight)
        return torch.autograd.grad(h.square().sum(), leaves)

    exact = run(torch.float64, False)
    for in_place in (False, True):
        for grad, grad64 in zip(run(torch.float32, in_place), exact, strict=True):
            assert error(grad, grad64) < 5e-6 or grad64.norm() < 1e-12 and grad.norm() < 1e-4  # one source: no gradient for its read


@pytest.mark.parametrize("dilation, period", [(1, 1), (2, 2)])
def test_averages_gather_the_gradients_of_all_readers(dilation, period):
    """DenseFormer's recurrence on a toy stream, its weights packed in one vector."""
    torch.manual_seed(11)
    lengths = [t // dilation + 1 if t % period == 0 else 0 for t in range(1, 5)]
    weights, x = [torch.randn(32, 32, device=DEVICE) / 6 for _ in lengths], torch.randn(3, 32, device=DEVICE)
    alpha = torch.randn(sum(lengths), device=DEVICE)

    def run(dtype, fused):
        leaves = [t.to(dtype).requires_grad_() for t in (x, alpha, *weights)]
        y, alphas, layers = leaves[0], leaves[1], leaves[2:]
        y, source = kernels.average_source(y, alphas) if fused else (y, y)
        history, first = [source], 0
        for t, (n, w) in enumerate(zip(lengths, layers, strict=True), 1):
            y = y + torch.tanh(y @ w)
            y, source = kernels.average_source(y, alphas) if fused else (y, y)
            history.append(source)
            if n:
                sources = history[t % dilation::dilation]
                y = kernels.average(sources, first) if fused else sum(a * s for a, s in zip(alphas[first:first + n], sources, strict=True))
                first += n
        loss = y.square().sum()
        return [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]

    first, second = run(torch.float32, True)
    for a, b, c in zip(first, second, run(torch.float64, False)[0], strict=True):
        assert error(a, c) < 5e-6 and torch.equal(a, b)


def test_connectors_refuse_sources_that_do_not_match():
    x = torch.randn(3, 32, device=DEVICE)
    with pytest.raises(ValueError, match="one shape"):
        kernels.attnres_mix([x, x[:2]], x[0], 1e-6)
    with pytest.raises(ValueError, match="a weight for each"):
        kernels.average([kernels.average_source(x, x[0])[1]] * 2, 31)
