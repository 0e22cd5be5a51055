"""The decoder by property: configuration, layers, loss, depth mixing, optimizer groups, FLOPs, precision."""
import copy
import io
import math
import re
import weakref
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import close, config, gradients, name, tiny, tokens
from torch._dynamo.testing import CompileCounter
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as definitions
from model import CONNECTORS, DEPTHS, GPT, IGNORE, GPTConfig, LinearCrossEntropy, apply_rope, attention, depth_mix, rms_norm

ALL = [dict(connector=connector, depth=depth) for connector in CONNECTORS for depth in DEPTHS]

# ----------------------------------------------------------------------------------------------------------------------
# configuration


@pytest.mark.parametrize("options, message", [
    *((dict([(field, 0)]), f"{field}=0 must be at least 1") for field in
      ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "denseformer_dilation", "denseformer_period", "attnres_block_size", "mhc_num_streams",
       "mhc_sinkhorn_iters", "n_loop")),
    *((dict([(field, -1)]), f"{field}=-1 must not be negative") for field in
      ("n_kv_head", "head_dim", "n_inner", "depth_stride", "depth_recent_window", "n_prelude", "n_coda")),
    (dict(n_layer=2.0), "n_layer=2.0 must be of type int"),
    (dict(n_layer="2"), "n_layer='2' must be of type int"),
    (dict(n_head=True), "n_head=True must be of type int"),
    (dict(n_kv_head=None), "n_kv_head=None must be of type int"),
    (dict(norm_eps="1e-5"), "norm_eps='1e-5' must be of type float"),
    (dict(tie_embeddings=1), "tie_embeddings=1 must be of type bool"),
    (dict(rope_theta=0.0), "rope_theta=0.0 must be positive"),
    (dict(norm_eps=-1e-5), "norm_eps=-1e-05 must be positive"),
    (dict(init_std=0.0), "init_std=0.0 must be positive"),
    (dict(embed_init_std=-0.5), "embed_init_std=-0.5 must not be negative"),
    (dict(embed_init_std=0.5, tie_embeddings=True), "embed_init_std=0.5 needs tie_embeddings=False"),
    (dict(rope_theta=math.nan), "rope_theta=nan must be positive"),
    (dict(qk_norm="heads"), "qk_norm='heads' must be one of head, full, none"),
    (dict(norm_order="mid"), "norm_order='mid' must be one of pre, post"),
    (dict(connector="residul"), "connector='residul' must be one of residual, denseformer, attnres, mhc"),
    (dict(depth="depth"), "depth='depth' must be one of none, depth_attention, moda"),
    (dict(attnres_sources="sums"), "attnres_sources='sums' must be one of snapshots, block_sums"),
    (dict(n_head=4, n_kv_head=3), "n_kv_head=3 must divide n_head=4"),
    (dict(n_head=2, n_kv_head=4), "n_kv_head=4 must divide n_head=2"),
    (dict(n_embd=10, n_head=4), "n_embd=10 must be a multiple of n_head=4, or head_dim must be given"),
    (dict(head_dim=5), "head_dim=5 must be even, since RoPE rotates pairs"),
    (dict(n_embd=12, n_head=4), "head_dim=3 must be even"),
    (dict(qk_norm="full", k_norm_after_rope=True), "k_norm_after_rope=True needs qk_norm=head or none"),
    (dict(n_layer=4, n_prelude=2, n_coda=2), "n_prelude=2 plus n_coda=2 must be smaller than n_layer=4"),
])
def test_bad_values_are_named_with_the_rule(options, message):
    with pytest.raises(ValueError) as caught:
        GPTConfig(**options)
    assert str(caught.value).startswith(message)


def test_defaults_are_resolved():
    c = GPTConfig()
    assert (c.n_kv_head, c.head_dim, c.n_inner, c.depth_stride) == (12, 64, 2048, 6)
    c = GPTConfig(n_layer=1, n_head=6, n_embd=100, head_dim=8, n_kv_head=2)
    assert (c.n_kv_head, c.head_dim, c.n_inner, c.depth_stride) == (2, 8, 320, 1)  # 8/3 x 100 = 266.7
    assert GPTConfig(n_embd=96, n_head=1).n_inner == 256  # 8/3 x 96 is a multiple of 64 itself
    assert GPTConfig(n_layer=7).depth_stride == 3 and GPTConfig(n_layer=6, n_loop=4).depth_stride == 3
    assert GPTConfig(**asdict(c)) == c
    assert repr(GPTConfig(rope_theta=500000).rope_theta) == "500000.0"


def test_state_dict_has_these_keys_and_shapes():
    H, G, D, C, I, V = 4, 2, 6, 10, 14, 23
    layer = {"attn_norm.weight": (C,), "attn.qkv.weight": ((H + 2 * G) * D, C), "attn.q_norm.weight": (D,), "attn.k_norm.weight": (D,),
             "attn.out.weight": (C, H * D), "mlp_norm.weight": (C,), "mlp.gate_up.weight": (2 * I, C), "mlp.down.weight": (C, I)}
    expected = {"embed.weight": (V, C), "norm.weight": (C,), "lm_head.weight": (V, C)} | {f"layers.{l}.{key}": shape for l in range(3) for key, shape in layer.items()}

    def shapes(**options):
        return {key: tuple(value.shape) for key, value in GPT(config(**options)).state_dict().items()}
    assert shapes() == shapes(depth="depth_attention") == expected
    assert shapes(tie_embeddings=True) == {key: shape for key, shape in expected.items() if key != "lm_head.weight"}
    assert shapes(qk_norm="none") == {key: shape for key, shape in expected.items() if "q_norm" not in key and "k_norm" not in key}
    full = shapes(qk_norm="full")
    assert full["layers.1.attn.q_norm.weight"] == (H * D,) and full["layers.1.attn.k_norm.weight"] == (G * D,)
    added = {key: shape for key, shape in shapes(depth="moda").items() if key not in expected}
    assert added == {f"layers.{l}.ffn_kv.{key}": shape for l in (0, 1) for key, shape in {"kv.weight": (2 * G * D, C), "k_norm.weight": (D,)}.items()}
    added = {key: shape for key, shape in shapes(connector="mhc", mhc_num_streams=3).items() if key not in expected}
    site = {"pre_logits": (3,), "post_logits": (3,), "residual_logits": (3, 3), "alpha_pre": (), "alpha_post": (), "alpha_res": (), "norm.weight": (3 * C,),
            "projection.weight": (15, 3 * C)}
    assert added == {"connector.reduce_logits": (3,)} | {f"connector.sites.{s}.{key}": shape for s in range(6) for key, shape in site.items()}
    added = {key: shape for key, shape in shapes(connector="attnres").items() if key not in expected}
    assert added == {f"connector.{s}.{key}": shape for s in [f"sites.{i}" for i in range(6)] + ["final"]
                     for key, shape in {"pseudo_query": (C,), "norm.weight": (C,), "recency_bias": ()}.items()}


def test_the_embedding_alone_may_start_larger():
    models = []
    for options in (dict(), dict(embed_init_std=0.5)):
        torch.manual_seed(0)
        models.append(GPT(GPTConfig(n_layer=2, n_head=4, n_embd=128, vocab_size=1000, block_size=8, **options)).state_dict())
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value * 25 if key == "embed.weight" else value)


def test_initial_values():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=128, vocab_size=1000, block_size=8, init_std=0.05))
    for key, value in model.state_dict().items():
        if value.ndim == 2:
            assert abs(value.std() / 0.05 - 1) < 0.03 and abs(value.mean()) < 0.002, key
        else:
            assert torch.equal(value, torch.ones_like(value)), key
    idx = tokens(model)
    assert abs(GPT(config(init_std=1e-3, vocab_size=23))(idx % 23, idx % 23)[1].item() - math.log(23)) < 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# layers


@pytest.mark.parametrize("options", ALL, ids=name)
def test_no_token_sees_the_future(options):
    model = tiny(**options)
    idx = tokens(model, batch=1)
    changed = idx.clone()
    changed[0, 5] = (idx[0, 5] + 1) % 23
    with torch.no_grad():
        before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax((0, 2)).min() > 1e-6  # and every later one sees it


def test_rope_keeps_lengths_and_makes_scores_relative():
    model = tiny()
    q, k = torch.randn(2, 16, 6, dtype=torch.float64)
    cos, sin = model.cos, model.sin
    turned = apply_rope(q, cos, sin)
    close(turned.norm(dim=-1), q.norm(dim=-1), 1e-6)
    assert torch.equal(turned[0], q[0])
    scores = apply_rope(q[:1].expand(16, -1), cos, sin) @ apply_rope(k[:1].expand(16, -1), cos, sin).T
    for offset in range(-15, 16):
        diagonal = scores.diagonal(offset)
        close(diagonal, diagonal[:1].expand_as(diagonal), 1e-5)
    angle = 3 * 10000 ** (-2 / 6)  # position 3, second of three pairs
    close(turned[3, [1, 4]], torch.stack([q[3, 1] * math.cos(angle) - q[3, 4] * math.sin(angle), q[3, 4] * math.cos(angle) + q[3, 1] * math.sin(angle)]), 1e-6)


def test_rms_norm_in_float32_whatever_comes_in():
    x, w = torch.randn(5, 64) * 1000, torch.randn(64)
    close(rms_norm(x.double(), w.double(), 0.1), x.double() / (x.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * w.double(), 1e-12)
    half = x.to(torch.bfloat16)
    exact = rms_norm(half.double(), torch.ones(64, dtype=torch.float64), 1e-5)
    found = rms_norm(half, torch.ones(64), 1e-5)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.to(torch.bfloat16))


@pytest.mark.parametrize("H, G", [(4, 2), (3, 3), (6, 1)])
def test_query_heads_read_the_kv_head_of_their_group(H, G):
    q, k, v = torch.randn(2, H, 5, 4), torch.randn(2, G, 7, 4), torch.randn(2, G, 7, 4)
    for T, S in ((5, 7), (5, 5), (1, 7)):
        o = attention(q[:, :, :T], k[:, :, :S], v[:, :, :S])
        for h in range(H):
            g = h * G // H
            scores = (q[:, h, :T] @ k[:, g, :S].mT / 2).masked_fill(torch.ones(T, S).tril(S - T) == 0, -math.inf)
            close(o[:, h], scores.softmax(-1) @ v[:, g, :S], 1e-5)


@pytest.mark.parametrize("qk_norm, after", [("head", False), ("head", True), ("full", False), ("none", False), ("none", True)])
def test_order_of_key_norm_and_rope(qk_norm, after):
    model = tiny(qk_norm=qk_norm, k_norm_after_rope=after)
    attn, x, rope = model.layers[0].attn, torch.randn(2, 8, 10, dtype=torch.float64), (model.cos[:8], model.sin[:8])
    split = lambda x: x.unflatten(-1, (-1, 6)).transpose(1, 2)
    q, k, v = (x @ attn.qkv.weight.T).split([24, 12, 12], -1)
    norm = lambda x, weight: weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if qk_norm == "full":
        q, k = split(norm(q, attn.q_norm.weight)), split(norm(k, attn.k_norm.weight))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    elif qk_norm == "none":
        q, k = apply_rope(split(q), *rope), apply_rope(split(k), *rope)
    else:
        q = apply_rope(norm(split(q), attn.q_norm.weight), *rope)
        k = norm(apply_rope(split(k), *rope), attn.k_norm.weight) if after else apply_rope(norm(split(k), attn.k_norm.weight), *rope)
    for found, expected in zip(attn.heads(x, rope), (q, k, split(v))):
        close(found, expected, 1e-12)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_where_the_norms_are(order):
    model = tiny(norm_order=order)
    idx = tokens(model)
    x, rope, swiglu = model.embed(idx), (model.cos[:8], model.sin[:8]), lambda mlp, x: F.linear(F.silu(F.linear(x, mlp.gate_up.weight[:14])) * F.linear(x, mlp.gate_up.weight[14:]), mlp.down.weight)
    for layer in model.layers:
        if order == "pre":
            x = x + layer.attn(layer.attn_norm(x), rope)[0]
            x = x + swiglu(layer.mlp, layer.mlp_norm(x))
        else:
            x = x + layer.attn_norm(layer.attn(x, rope)[0])
            x = x + layer.mlp_norm(swiglu(layer.mlp, x))
    close(model(idx)[0], F.linear(model.norm(x), model.lm_head.weight), 1e-11)


def test_tied_head_is_the_embedding():
    model = tiny(tie_embeddings=True)
    idx = tokens(model)
    untied = tiny()
    untied.load_state_dict(model.state_dict() | {"lm_head.weight": model.embed.weight})
    close(model(idx)[0], untied(idx)[0], 1e-12)
    assert model.num_params() == model.num_params(embedding=False) == untied.num_params(embedding=False) == untied.num_params() - 23 * 10
    tied, parts = gradients(model, idx, idx)[1], gradients(untied, idx, idx)[1]
    close(tied["embed.weight"], parts["embed.weight"] + parts["lm_head.weight"], 1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Depth-Attention's mixing


def depth_inputs(N, H=4, G=2, T=3, D=6, B=2):
    make = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(N)
    return make(B, H, T, D), make(B, G, T, D), make(B, G, T, D), make(N, B, G, T, D), make(N, B, G, T, D)


def literal_mix(q, k, v, source_k, source_v):
    """The equation for one token and one KV head at a time, in numpy."""
    q, k, v, source_k, source_v = (x.detach().numpy() for x in (q, k, v, source_k, source_v))
    mixed = np.empty_like(v)
    for b, g, t in np.ndindex(*k.shape[:3]):
        group = q.shape[1] // k.shape[1]
        qbar = sum(q[b, h, t] for h in range(g * group, (g + 1) * group)) / group
        keys, values = [*source_k[:, b, g, t], k[b, g, t]], [*source_v[:, b, g, t], v[b, g, t]]
        weights = np.exp([qbar @ key / math.sqrt(k.shape[3]) for key in keys])
        mixed[b, g, t] = sum(w * value for w, value in zip(weights / weights.sum(), values))
    return torch.from_numpy(mixed)


@pytest.mark.parametrize("H, G", [(4, 2), (3, 3), (3, 1)])
@pytest.mark.parametrize("N", [1, 4])
def test_depth_mix_is_the_equation(N, H, G):
    q, k, v, source_k, source_v = depth_inputs(N, H, G)
    expected = literal_mix(q, k, v, source_k, source_v)
    close(depth_mix(q, k, v, source_k, source_v), expected, 1e-12)
    assert torch.equal(depth_mix(q, k, v, list(source_k), list(source_v)), depth_mix(q, k, v, source_k, source_v))


def test_depth_mix_averages():
    """Weights are positive and sum to one: equal values stay, and with keys orthogonal to the query all count the same."""
    q, k, v, source_k, source_v = depth_inputs(3)
    close(depth_mix(q, k, v, source_k, v.expand(3, -1, -1, -1, -1)), v, 1e-12)
    close(depth_mix(0 * q, k, v, source_k, source_v), (source_v.sum(0) + v) / 4, 1e-12)
    high = torch.cat((source_v, v.unsqueeze(0))).amax(0)
    assert (depth_mix(q, k, v, source_k, source_v) <= high + 1e-12).all()


def test_depth_mix_gradients_reach_everything():
    tensors = depth_inputs(2, T=2, D=2, B=1)
    assert gradcheck(depth_mix, tensors)
    assert all(gradient.abs().min() > 0 for gradient in torch.autograd.grad(depth_mix(*tensors).square().sum(), tensors))


def test_values_are_mixed_recursively():
    """Layer 0 stays as it is; each later layer mixes earlier MIXED values into its own, and attention and the cache see the result."""
    model, plain, seen = tiny(depth="depth_attention", depth_stride=1), tiny(), []
    plain.load_state_dict(model.state_dict())
    for l, layer in enumerate(model.layers):
        layer.attn.register_forward_pre_hook(lambda module, args, l=l: seen.append((plain.layers[l].attn.heads(args[0], args[1]), module)))
    cache = definitions.KVCache(model.config, 8)
    with torch.no_grad():
        model(tokens(model), cache=cache)
    keys, values = [], []
    for (q, k, v), slot in zip([heads for heads, _ in seen], cache.slots):
        mixed = literal_mix(q, k, v, torch.stack(keys), torch.stack(values)) if keys else v
        close(slot.k, k, 1e-12)
        close(slot.v, mixed, 1e-12)
        keys.append(k), values.append(mixed)
    assert (values[2] - seen[2][0][2]).abs().max() > 0.1


# ----------------------------------------------------------------------------------------------------------------------
# the loss


def loss_inputs(N, C, V, dtype, ignored=0):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(N, C, generator=generator, dtype=dtype), torch.randn(V, C, generator=generator, dtype=dtype)
    targets = torch.randint(V, (N,), generator=generator)
    targets[torch.randperm(N, generator=generator)[:ignored]] = IGNORE
    return x.requires_grad_(), w.requires_grad_(), targets


@pytest.mark.parametrize("ignored", [0, 1, 25, 29])
def test_loss_is_the_mean_cross_entropy(ignored):
    x, w, targets = loss_inputs(30, 5, 7, torch.float64, ignored)
    for scale in (1.0, -2.5):
        found, expected = scale * LinearCrossEntropy.apply(x, w, targets), scale * F.cross_entropy(x @ w.T, targets, ignore_index=IGNORE)
        close(found, expected, 1e-12)
        for a, b in zip(torch.autograd.grad(found, (x, w)), torch.autograd.grad(expected, (x, w))):
            close(a, b, 1e-12)


def test_loss_by_finite_differences():
    x, w, targets = loss_inputs(6, 3, 4, torch.float64, ignored=2)
    assert gradcheck(lambda x, w: LinearCrossEntropy.apply(x, w, targets), (x, w))
    assert gradcheck(lambda x: LinearCrossEntropy.apply(x, w.detach(), targets), (x,))
    assert gradcheck(lambda w: LinearCrossEntropy.apply(x.detach(), w, targets), (w,))


def test_loss_without_any_target_is_zero():
    x, w, targets = loss_inputs(6, 3, 4, torch.float64, ignored=6)
    loss = LinearCrossEntropy.apply(x, w, targets)
    assert loss == 0 and not any(gradient.any() for gradient in torch.autograd.grad(loss, (x, w)))


def test_loss_holds_the_logits_of_few_rows_at_a_time(monkeypatch):
    """A vocabulary for which a chunk has 16 rows: 24 rows in two chunks, each gone before the next is made."""
    x, w, targets = loss_inputs(24, 2, 2**20, torch.float32, ignored=5)
    rows, alive, cross_entropy = [], [], definitions.cross_entropy

    def recorded(logits, target):
        rows.append(logits.shape[0])
        assert logits.shape == (len(target), 2**20) and not any(reference() is not None for reference in alive[:-1])
        losses, d = cross_entropy(logits, target)
        alive.append(weakref.ref(d))
        return losses, d

    monkeypatch.setattr(definitions, "cross_entropy", recorded)
    loss = LinearCrossEntropy.apply(x, w, targets)
    assert rows == [16, 8] and not any(reference() is not None for reference in alive)
    dx, dw = torch.autograd.grad(loss, (x, w))
    expected = F.cross_entropy(x @ w.T, targets, ignore_index=IGNORE)
    close(loss, expected, 1e-5)
    for found, gradient in zip((dx, dw), torch.autograd.grad(expected, (x, w))):
        close(found, gradient, 1e-3)  # sums over a million terms in float32
        assert gradient.abs().max() > 0.05


def test_loss_of_the_model_counts_targets_that_count():
    model = tiny()
    idx, targets = tokens(model), tokens(model, seed=2)
    targets[0, 2:], targets[1, 7] = IGNORE, IGNORE
    logits, none = model(idx)
    assert none is None and logits.shape == (2, 8, 23)
    nothing, loss = model(idx, targets)
    assert nothing is None
    close(loss, -logits.log_softmax(-1)[targets != IGNORE].gather(1, targets[targets != IGNORE][:, None]).mean(), 1e-12)


def test_targets_of_another_shape_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match=r"targets of shape \(2, 7\) do not fit idx of shape \(2, 8\)"):
        model(tokens(model), tokens(model)[:, 1:])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_does_a_third_of_the_work_at_the_head(mode):
    model = tiny()
    idx = tokens(model)
    with mode(), FlopCounterMode(display=False) as loss_only:
        evaluated = model(idx, idx)[1]
    with mode(), FlopCounterMode(display=False) as logits_only:
        model(idx)
    assert loss_only.get_total_flops() == logits_only.get_total_flops()
    close(evaluated, model(idx, idx)[1].detach(), 1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# optimizer groups


def test_weight_decay_groups():
    """All matrices, embeddings and heads decay, and so do the connectors' parameters but AttnRes' bias; norms never do."""
    decayed = {"residual": set(), "denseformer": {"alpha"}, "attnres": {"pseudo_query"},
               "mhc": {"pre_logits", "post_logits", "residual_logits", "alpha_pre", "alpha_post", "alpha_res", "projection.weight", "reduce_logits"}}
    for connector, of_connector in decayed.items():
        for depth in DEPTHS:
            model = GPT(config(connector=connector, depth=depth))
            optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
            names = {id(p): n for n, p in model.named_parameters()}
            found = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
            assert sorted(found[0.1] + found[0.0]) == sorted(names.values())
            assert {n for n in found[0.1] if not n.startswith("connector.")} == {n for n, p in model.named_parameters() if not n.startswith("connector.") and p.ndim == 2}
            assert {re.sub(r"connector\.(sites\.\d+\.|final\.)?", "", n) for n in found[0.1] if n.startswith("connector.")} == of_connector
            assert all(n.endswith(("norm.weight", "recency_bias")) for n in found[0.0])
            assert {"embed.weight", "lm_head.weight"} <= set(found[0.1])
            assert optimizer.defaults["betas"] == (0.9, 0.95) and optimizer.defaults["lr"] == 1e-3 and optimizer.defaults["eps"] == 1e-8


def test_a_step_of_no_gradient_shrinks_what_decays_only():
    model = tiny(connector="attnres")
    before = copy.deepcopy(model.state_dict())
    optimizer = model.configure_optimizers(0.5, 0.1, (0.9, 0.95), "cpu")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, value in model.state_dict().items():
        factor = 1.0 if "norm" in key or "bias" in key else 0.95
        close(value, factor * before[key], 1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# FLOPs


def counted(model, monkeypatch):
    """FLOPs of matrix products of one training step, as PyTorch counts them. Attention runs as plain matrix products for that."""
    monkeypatch.setattr(definitions, "joint_attention", lambda q, k, v, slots: definitions.moda_attention(q, k, v, *(zip(*slots) if slots else ([], []))))
    idx = tokens(model, batch=2, length=16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("options", ALL + [dict(n_loop=3, tie_embeddings=True), dict(n_loop=2, n_layer=4, n_prelude=1, n_coda=1, connector="mhc", depth="moda"),
                                           dict(depth="moda", moda_ffn_kv=False, qk_norm="full")], ids=name)
def test_flops_are_those_that_pytorch_counts(options, monkeypatch):
    model = tiny(**dict(n_layer=2) | options, dtype=torch.float32)
    parts = model.flops(16)
    assert abs(counted(model, monkeypatch) / (2 * 16 * (parts["matmul"] + parts["attention"])) - 1) < 0.02
    assert (parts["depth"] > 0) == (model.config.depth != "none") and (parts["connector"] > 0) == (model.config.connector != "residual")
    assert model.flops_per_token(16) == sum(parts.values())


def test_sdpa_is_counted_the_same(monkeypatch):
    model = tiny(dtype=torch.float32)
    idx = tokens(model, batch=2, length=16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == 2 * 16 * model.flops_per_token(16)


def test_flops_by_hand(monkeypatch):
    """GQA, heads of 6 where width/heads is 3, three loops: 2 layers run 6 times."""
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=12, head_dim=6, n_inner=20, vocab_size=11, block_size=16, n_loop=3))
    layer = 12 * 24 + 2 * 12 * 12 + 24 * 12 + 3 * 12 * 20  # queries, keys and values, output, SwiGLU
    matmul = 6 * (6 * layer + 11 * 12)
    attention = 3 * 6 * (2 * 2 * 4 * 6 * 16)  # scores and values, 2 FLOPs a multiply-add, 4 heads of 6, against 16 tokens
    assert model.flops(16) == {"matmul": matmul, "attention": attention, "depth": 0, "connector": 0}
    assert model.flops_per_token(16) == matmul + attention
    assert abs(counted(model, monkeypatch) / (2 * 16 * (matmul + attention)) - 1) < 0.02
    weights = 6 * (layer + 12 + 12 + 6 + 6) + 12 + 11 * 12  # with norms; a layer counts each time that it is used, the embedding never
    assert model.mfu_flops_per_token(16) == 6 * weights + 12 * 6 * (4 * 6) * 16


def test_mfu_convention():
    model = GPT(config())
    assert model.mfu_flops_per_token(16) == 6 * (model.num_params() - 23 * 10) + 12 * 3 * 4 * 6 * 16
    tied = GPT(config(tie_embeddings=True))  # the matrix is used as the head
    assert tied.mfu_flops_per_token(16) == model.mfu_flops_per_token(16)


def test_depth_and_connector_flops_by_hand():
    def part(name, **options):
        return GPT(config(n_layer=4, **options)).flops(16)[name] / 3
    # stride 2: layers 0..3 read 0, 1, 1, 2 sources and, where there is one, their own; 2 KV heads, a score and a weighted value of 6 each
    assert part("depth", depth="depth_attention") == (2 + 2 + 3) * 2 * (2 * 6 + 2 * 6)
    assert part("depth", depth="moda") == (0 + 2 + 4 + 6) * 4 * (2 * 6 + 2 * 6)
    # dilation 2: depths 1..4 average 1, 2, 2, 3 states of width 10
    assert part("connector", connector="denseformer") == (1 + 2 + 2 + 3) * 2 * 10
    # 3 streams, 8 sub-layers: mean square, read, residual map (3 x 3), write; Sinkhorn on 3 x 3; the read-out
    assert part("connector", connector="mhc", mhc_num_streams=3) == 8 * (2 * 30 + 2 * 30 + 2 * 90 + 2 * 30 + 2 * 2 * 2 * 9) + 2 * 30
    assert part("matmul", connector="mhc", mhc_num_streams=3) - part("matmul") == 8 * 2 * 30 * 15


# ----------------------------------------------------------------------------------------------------------------------
# precision, copies, devices


@pytest.mark.parametrize("options", ALL, ids=name)
def test_autocast_gives_float32_gradients_close_to_exact_ones(options):
    model = tiny(dtype=torch.float32, init_std=0.2, **options)
    idx = tokens(model)
    loss, exact = gradients(model, idx, idx)
    model.zero_grad()
    streams = []
    model.norm.register_forward_hook(lambda module, args, output: streams.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(idx, idx)[1]
        assert model(idx)[0].dtype == torch.bfloat16
    assert streams == [torch.bfloat16] * 2  # the residual stream is as narrow as the matrix products
    rounded.backward()
    assert rounded.dtype == torch.float32 and abs(rounded.item() - loss.item()) < 0.05
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    flat = lambda tensors: torch.cat([tensors[n].flatten() for n in exact])
    assert (flat(found) - flat(exact)).norm() < 0.2 * flat(exact).norm()


@pytest.mark.parametrize("options", ALL, ids=name)
def test_bfloat16_model(options):
    model = tiny(dtype=torch.bfloat16, **options)
    idx = tokens(model)
    loss, found = gradients(model, idx, idx)
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found.values())
    assert model.generate(idx, 3, temperature=0).shape == (2, 11)


@pytest.mark.parametrize("options", ALL, ids=name)
def test_one_token_of_one_sequence(options):
    model = tiny(**options)
    idx = tokens(model, batch=1, length=1)
    loss, found = gradients(model, idx, idx)
    with torch.inference_mode():
        close(model(idx, idx)[1], loss, 1e-12)
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("options", ALL, ids=name)
def test_copies_and_the_meta_device(options):
    model = tiny(**options)
    idx, file = tokens(model), io.BytesIO()
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        assert torch.equal(twin(idx)[0], model(idx)[0])
        for p in model.parameters():
            p.mul_(0)
        assert twin(idx)[0].any()  # and has its own memory
        file.seek(0)
        model.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(twin(idx)[0], model(idx)[0])
    with torch.device("meta"):
        empty = GPT(model.config)
    assert empty.num_params() == model.num_params() and empty.flops(8) == model.flops(8)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_compiled_blocks_compute_the_same(connector):
    """A handful of graphs whatever the number of layers: what grows with depth is not compiled."""
    torch._dynamo.reset()
    model = tiny(connector=connector, depth="depth_attention", n_layer=2, n_loop=3, attnres_block_size=2, mhc_num_streams=2, mhc_sinkhorn_iters=1, dtype=torch.float32)
    idx = tokens(model)
    loss, exact = gradients(model, idx, idx)
    counter = CompileCounter()
    model.compile_blocks(backend=counter)
    compiled, found = gradients(model, idx, idx)
    close(compiled, loss, 1e-6)
    for key in exact:
        close(found[key], exact[key], 1e-5)
    assert 1 <= counter.frame_count <= 5
    assert model.state_dict().keys() == GPT(model.config).state_dict().keys()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = twin(idx)[0]
        for p in model.layers.parameters():
            p.mul_(0)
        assert torch.equal(twin(idx)[0], before)
