"""Mixture-of-Depths Attention: the operator in both forms, and the paper's parameter and FLOP counts."""
import math
from functools import cache

import pytest
import torch
from tiny import close, tiny, tokens
from torch.autograd import gradcheck

import model as definitions
from model import GPT, GPTConfig, KVCache, joint_attention, moda_attention


def inputs(B=2, H=4, G=2, T=7, D=6, L=3, dtype=torch.float64, seed=0, scale=1.0):
    """q, k, v, depth keys [L,...], depth values [L,...], and an output gradient."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v, kd, vd, do = make(B, H, T, D), make(B, G, T, D), make(B, G, T, D), make(L, B, G, T, D), make(L, B, G, T, D), make(B, H, T, D)
    return [x.requires_grad_() for x in (scale * q, scale * k, v, scale * kd, vd)], do


def joint(q, k, v, kd, vd):
    return joint_attention(q, k, v, list(zip(kd, vd)))


def literal(q, k, v, kd, vd):
    """The equation token by token and head by head: one softmax over the visible sequence and the token's own slots."""
    B, H, T, D = q.shape
    out, first = torch.empty_like(q), k.shape[2] - T
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for i in range(T):
                keys = [*k[b, g, :first + i + 1], *kd[:, b, g, i]]
                values = [*v[b, g, :first + i + 1], *vd[:, b, g, i]]
                p = torch.softmax(torch.stack([q[b, h, i] @ key for key in keys]) / math.sqrt(D), 0)
                out[b, h, i] = sum(weight * value for weight, value in zip(p, values))
    return out


HEADS = [(4, 2), (4, 4), (3, 1), (1, 1)]


@pytest.mark.parametrize("H, G", HEADS)
def test_definition_is_the_equation(H, G):
    tensors = [x.detach() for x in inputs(H=H, G=G, T=5)[0]]
    close(moda_attention(*tensors), literal(*tensors), 1e-12)
    q, k, v, kd, vd = tensors  # the last two positions as queries against all five
    close(moda_attention(q[:, :, 3:], k, v, kd[..., 3:, :], vd[..., 3:, :]), literal(*tensors)[:, :, 3:], 1e-12)


@pytest.mark.parametrize("H, G", HEADS)
@pytest.mark.parametrize("T, D, L", [(7, 6, 3), (1, 4, 1), (2, 2, 5), (33, 8, 2)])
def test_joint_form_equals_the_definition(H, G, T, D, L):
    tensors, do = inputs(H=H, G=G, T=T, D=D, L=L)
    expected, found = moda_attention(*tensors), joint(*tensors)
    close(found, expected, 1e-12)
    for a, b in zip(torch.autograd.grad(found, tensors, do), torch.autograd.grad(expected, tensors, do)):
        close(a, b, 1e-11)


def test_joint_form_in_any_memory_layout():
    """Last axis not dense, strides of zero, heads interleaved with tokens."""
    (q, k, v, kd, vd), do = inputs()
    dense = [x.detach() for x in (q, k, v, kd, vd)]
    for layout in (lambda x: x.mT.contiguous().mT, lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3), lambda x: x[..., :1].expand(x.shape)):
        tensors = [layout(x).requires_grad_() for x in dense]
        do_in_layout = layout(do)
        expected = moda_attention(*tensors)
        close(joint(*tensors), expected, 1e-12)
        for a, b in zip(torch.autograd.grad(joint(*tensors), tensors, do_in_layout), torch.autograd.grad(expected, tensors, do_in_layout)):
            close(a, b, 1e-11)


@pytest.mark.parametrize("H, G, L", [(2, 1, 2), (2, 2, 1)])
def test_joint_form_by_finite_differences(H, G, L):
    assert gradcheck(joint, inputs(B=1, H=H, G=G, T=3, D=2, L=L)[0])


def test_without_slots_it_is_attention():
    (q, k, v, *_), do = inputs(L=0)
    for start in (0, 4, 6):  # as many queries as keys, some, one
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, start:], k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=torch.ones(7, 7, dtype=torch.bool).tril()[start:])
        close(joint_attention(q[:, :, start:], k, v, []), expected, 1e-12)
        close(moda_attention(q[:, :, start:], k, v, [], []), expected, 1e-12)
        for a, b in zip(torch.autograd.grad(joint_attention(q[:, :, start:], k, v, []), (q, k, v), do[:, :, start:]),
                        torch.autograd.grad(expected, (q, k, v), do[:, :, start:])):
            close(a, b, 1e-12)


def test_slots_that_score_nothing_change_nothing():
    (q, k, v, kd, vd), _ = inputs(H=1, G=1)
    away = -1e4 * q.detach() / q.detach().square().sum(-1, keepdim=True).sqrt()
    expected = joint_attention(q, k, v, [])
    close(joint(q, k, v, away.expand(3, -1, -1, -1, -1).contiguous(), 100 * vd), expected, 1e-12)
    assert (joint(q, k, v, kd, vd) - expected).abs().max() > 0.1


@pytest.mark.parametrize("operator", [moda_attention, joint], ids=["definition", "joint"])
def test_large_logits_do_not_overflow(operator):
    """Queries and keys 8 times as large, so scores 64 times: a softmax without its maximum subtracted overflows float32."""
    (tensors, do), (exact, _) = inputs(D=32, dtype=torch.float32, scale=8.0), inputs(D=32, scale=8.0)
    assert (tensors[0].detach() @ tensors[1].detach().repeat_interleave(2, 1).mT).max() / math.sqrt(32) > 100
    o, expected = operator(*tensors), moda_attention(*exact)
    close(o.double(), expected, 2e-4)
    for a, b in zip(torch.autograd.grad(o, tensors, do), torch.autograd.grad(expected, exact, do.double())):
        close(a.double(), b, 2e-3)


def test_prefill_in_chunks_and_decoding():
    (q, k, v, kd, vd), _ = inputs(T=9)
    expected = joint(q, k, v, kd, vd)
    for chunk in (1, 4, 9):
        pieces = []
        for start in range(0, 9, chunk):
            rows = slice(start, start + chunk)
            pieces.append(joint(q[:, :, rows], k[:, :, :start + chunk], v[:, :, :start + chunk], kd[..., rows, :], vd[..., rows, :]))
        close(torch.cat(pieces, 2), expected, 1e-12)


def test_joint_form_holds_no_scores_of_all_pairs():
    """What the joint form saves for backward grows with T, not with its square."""
    def saved(operator, T):
        tensors, sizes = inputs(B=1, H=2, G=1, T=T, D=4)[0], []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            operator(*tensors)
        return sum(sizes)
    assert saved(joint, 128) == 2 * saved(joint, 64)
    assert saved(moda_attention, 128) > 3 * saved(moda_attention, 64)


def test_the_operator_of_the_cpu_is_left_to_the_cpu(monkeypatch):
    monkeypatch.setattr(definitions, "_JointAttention", None)
    (q, k, v, kd, vd), _ = inputs()
    assert joint(*(x.to("meta") for x in (q, k, v, kd, vd))).shape == q.shape


def test_slot_keys_are_the_finished_ones(monkeypatch):
    """A layer's first slots are the very keys and values that earlier layers attended with; FFN slots come right after their layer's."""
    model, seen, joint_form = tiny(depth="moda"), [], definitions.joint_attention
    monkeypatch.setattr(definitions, "joint_attention", lambda q, k, v, slots: (seen.append((k, v, list(slots))), joint_form(q, k, v, slots))[1])
    idx = tokens(model)
    model(idx)
    (k0, v0, _), (k1, v1, slots), (_, _, last) = seen
    assert all(torch.equal(a, b) for a, b in zip((k0, v0, k1, v1), (*last[0], *last[2]))) and len(slots) == 2 and len(last) == 4
    layer, rope = model.layers[1], (model.cos[:8], model.sin[:8])
    inputs_of_mlp = []
    layer.mlp.register_forward_pre_hook(lambda _, args: inputs_of_mlp.append(args[0]))
    model(idx)
    k = layer.ffn_kv.kv(inputs_of_mlp[0])[..., :12].unflatten(-1, (2, 6)).transpose(1, 2)
    v = layer.ffn_kv.kv(inputs_of_mlp[0])[..., 12:].unflatten(-1, (2, 6)).transpose(1, 2)
    close(last[3][0], definitions.apply_rope(layer.ffn_kv.k_norm(k), *rope), 1e-12)
    close(last[3][1], v, 1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# the paper's accounts (arXiv 2603.15619)

PAPER_700M = dict(n_layer=36, n_head=16, n_kv_head=8, n_embd=1024, head_dim=64, n_inner=4096, vocab_size=100278, tie_embeddings=True, qk_norm="full",
                  norm_order="post", rope_theta=5e5, block_size=4096)


@cache
def on_meta(**options):
    with torch.device("meta"):
        return GPT(GPTConfig(**PAPER_700M | options))


def forward_teraflops(model):
    """One sequence of 4,096 tokens forward: 2 a weight and token, and attention over all pairs, masked or not. Softmaxes are not in it."""
    return 4096 * model.flops_per_token(4096) / 3 / 1e12


def test_table_3_parameters():
    baseline, reuse, full = on_meta(), on_meta(depth="moda", moda_ffn_kv=False), on_meta(depth="moda")
    assert round(baseline.num_params() / 1e6, 1) == 669.0
    assert round(on_meta(n_layer=38).num_params() / 1e6, 1) == 700.5
    assert reuse.num_params() == baseline.num_params()
    extra, norms = full.num_params() - baseline.num_params(), 35 * 512  # norms: of the FFN's keys
    assert extra == 35 * 2 * 1024 * 512 + norms and round(extra / 1e6, 1) == 36.7


def test_table_3_flops():
    baseline, reuse, full = (forward_teraflops(on_meta(**options)) for options in (dict(), dict(depth="moda", moda_ffn_kv=False), dict(depth="moda")))
    assert round(baseline, 2) == 7.95  # the paper prints 8.01, 0.8 % more: softmaxes and elementwise work
    assert round(reuse - baseline, 4) == 0.0106  # slots: the paper's +0.01
    assert round(full - reuse, 2) == 0.31 and round(full - reuse - (reuse - baseline), 3) == 0.301  # as many slots again, and their projections


def test_table_1():
    """MoDA's row, for G = H/Hk query heads a KV head of width d: parameters 2 G L Hk^2 d^2, cache 2 L Hk d, decoding FLOPs 2 G L^2 Hk d + 2 G L Hk d."""
    L, H, Hk, d = 36, 16, 8, 64
    G, model = H // Hk, on_meta(depth="moda", qk_norm="none")
    parameters = model.num_params() - on_meta(qk_norm="none").num_params()
    assert parameters * L == 2 * G * L * Hk**2 * d**2 * (L - 1)  # the row counts the last layer's projection, which nothing would read
    cached = tiny(depth="moda")
    kv = KVCache(cached.config, 5)
    with torch.no_grad():
        cached(tokens(cached, batch=1, length=5), cache=kv)
    assert sum(slot.k.numel() + slot.v.numel() for slot in kv.slots) == 5 * 2 * 3 * 2 * 6
    reading = on_meta(depth="moda", moda_ffn_kv=False).flops(1)["depth"] // 3
    assert reading == 2 * G * L**2 * Hk * d + 2 * G * L * Hk * d - 4 * L * H * d  # without a layer's own pair, which is in the sequence part here
