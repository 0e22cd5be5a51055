"""
A decoder-only language model in which information can cross the depth in several ways. Everything is in this file.

Two independent axes, any pair of which runs, looped or not:
* connector: how the residual stream is carried from one sub-layer to the next (residual, DenseFormer, AttnRes, mHC);
* depth: what attention reads of earlier layers (nothing, Depth-Attention, Mixture-of-Depths Attention).

Shapes in comments: B batch, T tokens, C n_embd, H query heads, G key/value heads, D head_dim, V vocabulary, M virtual layers.
The functions here are the definition. On CUDA the same functions run as Triton kernels (kernels.py) where Triton is installed.
"""
import math
import os
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # targets with this id do not count in the loss


@dataclass
class GPTConfig:
    n_layer: int = 12  # layers with parameters of their own
    n_head: int = 12  # query heads
    n_kv_head: int = 0  # key/value heads, each shared by n_head/n_kv_head query heads (GQA); 0 = n_head
    n_embd: int = 768  # width of the residual stream
    head_dim: int = 0  # width of a head; 0 = n_embd/n_head
    n_inner: int = 0  # hidden width of SwiGLU; 0 = 8/3 n_embd rounded up to a multiple of 64
    block_size: int = 1024  # longest context, in tokens
    vocab_size: int = 50304  # rows of the embedding and of the head
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # epsilon of every RMSNorm
    init_std: float = 0.02  # standard deviation of every matrix at initialisation
    embed_init_std: float = 0.0  # that of the embedding; 0 = init_std. At 0.02 the first layers drown it, at 0.5 they do not
    qk_norm: str = "head"  # RMSNorm of queries and keys: head (one over head_dim), full (OLMo2: over the whole projection), none
    k_norm_after_rope: bool = False  # False = norm, then RoPE (Qwen3); True = keys are rotated first (the Depth-Attention reference)
    norm_order: str = "pre"  # pre = x + F(norm(x)); post = x + norm(F(x)) (OLMo2)
    tie_embeddings: bool = False  # the head uses the embedding's matrix
    connector: str = "residual"  # residual stream across depth: residual, denseformer, attnres, mhc
    depth: str = "none"  # what attention reads across depth: none, depth_attention, moda
    depth_stride: int = 0  # Depth-Attention: every such virtual layer, from layer 0, is a source; 0 = half of n_layer, at least 1
    depth_recent_window: int = 0  # Depth-Attention: the last so many virtual layers are sources as well
    moda_ffn_kv: bool = True  # MoDA: every layer but the last also projects its FFN's input to a depth key and value
    denseformer_dilation: int = 1  # DenseFormer: average every such earlier layer
    denseformer_period: int = 1  # DenseFormer: average after every such layer
    attnres_block_size: int = 12  # AttnRes: sub-layers between two sources (attention and MLP count one each)
    attnres_recency_bias_init: float = 3.0  # AttnRes snapshots: initial bias of the current stream's score
    attnres_sources: str = "snapshots"  # AttnRes: snapshots (of the stream; the reference) or block_sums (Attention Residuals paper)
    mhc_num_streams: int = 4  # mHC: parallel residual streams; more than 4 run without kernels
    mhc_sinkhorn_iters: int = 20  # mHC: Sinkhorn iterations, each rows then columns
    mhc_alpha_init: float = 0.01  # mHC: initial weight of the input-dependent part of each map
    n_loop: int = 1  # times that the layers between prelude and coda are run
    n_prelude: int = 0  # first layers, run once
    n_coda: int = 0  # last layers, run once

    def __post_init__(self):
        for field in fields(self):
            if field.type is float and type(getattr(self, field.name)) is int:
                setattr(self, field.name, float(getattr(self, field.name)))
            self._require(field.name, type(getattr(self, field.name)) is field.type, f"must be of type {field.type.__name__}")
        choices = dict(qk_norm=("head", "full", "none"), norm_order=("pre", "post"), connector=tuple(CONNECTORS), depth=tuple(DEPTHS),
                       attnres_sources=("snapshots", "block_sums"))
        for name, allowed in choices.items():
            self._require(name, getattr(self, name) in allowed, f"must be one of {', '.join(allowed)}")
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "denseformer_dilation", "denseformer_period", "attnres_block_size",
                     "mhc_num_streams", "mhc_sinkhorn_iters", "n_loop"):
            self._require(name, getattr(self, name) >= 1, "must be at least 1")
        for name in ("n_kv_head", "head_dim", "n_inner", "depth_stride", "depth_recent_window", "n_prelude", "n_coda", "embed_init_std"):
            self._require(name, getattr(self, name) >= 0, "must not be negative")
        for name in ("rope_theta", "norm_eps", "init_std"):
            self._require(name, getattr(self, name) > 0, "must be positive")
        self._require("embed_init_std", not (self.embed_init_std and self.tie_embeddings), "needs tie_embeddings=False, since it would be the head's as well")
        self.n_kv_head = self.n_kv_head or self.n_head
        self._require("n_kv_head", self.n_head % self.n_kv_head == 0, f"must divide n_head={self.n_head}")
        if not self.head_dim:
            self._require("n_embd", self.n_embd % self.n_head == 0, f"must be a multiple of n_head={self.n_head}, or head_dim must be given")
            self.head_dim = self.n_embd // self.n_head
        self._require("head_dim", self.head_dim % 2 == 0, "must be even, since RoPE rotates pairs")
        self.n_inner = self.n_inner or 64 * math.ceil(8 * self.n_embd / 3 / 64)
        self.depth_stride = self.depth_stride or max(1, self.n_layer // 2)
        self._require("k_norm_after_rope", not (self.k_norm_after_rope and self.qk_norm == "full"), "needs qk_norm=head or none")
        self._require("n_prelude", self.n_prelude + self.n_coda < self.n_layer,
                      f"plus n_coda={self.n_coda} must be smaller than n_layer={self.n_layer}")

    def _require(self, name, ok, rule):
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)!r} {rule}")

    @property
    def virtual_layers(self):
        """The physical layer that each virtual layer runs, in order: prelude, the middle n_loop times, coda. Its length is M."""
        layers = list(range(self.n_layer))
        middle = layers[self.n_prelude:self.n_layer - self.n_coda]
        return layers[:self.n_prelude] + middle * self.n_loop + layers[self.n_layer - self.n_coda:]


# ----------------------------------------------------------------------------------------------------------------------
# functions that a Triton kernel may stand in for

use_kernels = True  # False keeps the definitions below in force on CUDA as well (bench.py compares the two)


_loaded = {}  # a dict and not lru_cache, which torch.compile warns of where it traces `fused`


def _load_kernels():
    if "kernels" not in _loaded:
        try:
            import kernels
        except ImportError:
            kernels = None
        _loaded["kernels"] = kernels
    return _loaded["kernels"]


def fused(x):
    """The kernels module if `x` is a CUDA tensor of a dtype that it computes in and Triton is installed, else None."""
    return _load_kernels() if use_kernels and x.is_cuda and x.dtype != torch.float64 else None


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, statistics in float32 (Zhang & Sennrich, 2019)."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x) * weight.type_as(x)


def apply_rope(x, cos, sin):
    """Rotary position embedding of x [..., T, D], pairs (i, i + D/2) turned by the angles of cos, sin [T, D/2] (Su et al., 2021)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def swiglu(gate_up):
    """silu(gate) * up for gate_up [..., 2I] = [gate | up] (Shazeer, 2020)."""
    if kernels := fused(gate_up):
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def depth_mix(q, k, v, source_k, source_v):
    """
    Depth-Attention's mixed value (arXiv 2606.05014), for each token and KV head on its own:

        m = sum_j a_j m_j + a_self v,    a = softmax over (sources j, self) of <qbar, k_j> / sqrt(D)

    where qbar is the mean of the finished query heads of the KV head's group, k_j the finished key and m_j the mixed value of source
    layer j at the same token. q [B,H,T,D]; k, v [B,G,T,D]; sources a list of N tensors [B,G,T,D] or one tensor [N,B,G,T,D].
    Returns [B,G,T,D]. Nothing is detached: gradients reach the earlier layers' keys and values.
    """
    qbar = q.unflatten(1, (k.shape[1], -1)).mean(2)
    keys, values = torch.stack([*source_k, k]), torch.stack([*source_v, v])  # [N+1,B,G,T,D]
    scores = (qbar * keys).sum(-1) / math.sqrt(q.shape[-1])
    a = torch.softmax(scores, dim=0, dtype=_wide(scores)).type_as(v)
    return (a.unsqueeze(-1) * values).sum(0).type_as(v)  # CUDA autocast sums in float32


def moda_attention(q, k, v, depth_k, depth_v):
    """
    Mixture-of-Depths Attention (arXiv 2603.15619): one softmax over the causal sequence keys and the token's own depth keys.

        o_i = ( sum_{j<=i} exp(s q_i.k_j) v_j + sum_l exp(s q_i.kd_il) vd_il ) / Z_i,    s = 1/sqrt(D)

    q [B,H,T,D]; k, v [B,G,S,D] whose last T positions are the queries'; depth_k, depth_v [L,B,G,T,D] or lists of L tensors.
    Returns o [B,H,T,D]. This is the equation as it reads, with scores of all pairs; `joint_attention` is what the model runs.
    """
    B, H, T, D = q.shape
    G, S, L = k.shape[1], k.shape[2], len(depth_k)
    q = q.view(B, G, H // G, T, D) / math.sqrt(D)
    causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    a = (q @ k.unsqueeze(2).mT).masked_fill(~causal, float("-inf"))  # [B,G,H/G,T,S]
    b = torch.stack([(q * kd.unsqueeze(2)).sum(-1) for kd in depth_k], -1) if L else a[..., :0]  # [B,G,H/G,T,L]
    p = torch.softmax(torch.cat((a, b), -1), -1, dtype=_wide(a)).type_as(v)
    o = p[..., :S] @ v.unsqueeze(2)
    for l in range(L):
        o = o + p[..., S + l, None] * depth_v[l].unsqueeze(2)
    return o.reshape(B, H, T, D)


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# attention over the sequence

@lru_cache
def attention_backend(device_type, dtype, head_dim):
    """
    The attention that runs for such tensors: 'flash_attn_4', 'flash_attn_3', 'flash_attn_2' (the package of that name), 'cudnn', 'flash'
    (PyTorch's SDPA with that backend first) or 'math' (SDPA on a CPU). Prints its choice once for each kind of tensor on CUDA.
    """
    if device_type != "cuda":
        return "math"
    hopper = torch.cuda.get_device_capability()[0] >= 9
    name = "cudnn" if hopper else "flash"
    if dtype in (torch.bfloat16, torch.float16) and (kernels := _load_kernels()):
        name = kernels.flash_attn_version(head_dim) or name
    if os.environ.get("RANK", "0") == "0":
        print(f"attention: {name} for {str(dtype).removeprefix('torch.')}, head_dim {head_dim}")
    return name


def attention(q, k, v):
    """
    Causal grouped-query attention. q [B,H,T,D]; k, v [B,G,S,D], S >= T, the queries standing at the last T of the S positions.
    Query head h reads KV head h // (H/G). Returns [B,H,T,D].
    """
    T, S = q.shape[2], k.shape[2]
    backend = attention_backend(q.device.type, q.dtype, q.shape[-1])
    if backend.startswith("flash_attn") and T == S:
        return _load_kernels().flash_attention(q, k, v)
    first = [SDPBackend.CUDNN_ATTENTION] if backend == "cudnn" else []
    mask = None if T in (1, S) else torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    gqa = q.shape[1] != k.shape[1]
    if backend == "math":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S, enable_gqa=gqa)
    with sdpa_kernel(first + [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S, enable_gqa=gqa)


class _JointAttention(torch.autograd.Function):
    """
    moda_attention without scores of all pairs: flash attention for the sequence, a pass over the depth slots, and a merge of the two
    by their log-sum-exp. Exact in backward as well: a flash backward that is given the JOINT output and log-sum-exp returns the
    sequence part of the joint gradient, since all it needs of the rest is the normaliser and delta = <dO, O>.
    """

    @staticmethod
    def forward(ctx, q, k, v, *slots):  # slots: L depth keys, then L depth values, each [B,G,T,D]
        q = q.contiguous()  # called by its own name, the CPU flash attention reads a last axis that is not dense wrongly, without a word
        o_seq, lse_seq = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, *_repeat(q, k, v), 0.0, True)
        b, values = _depth_scores(q, slots)
        lse = torch.logaddexp(lse_seq, b.logsumexp(0))
        o = o_seq * (lse_seq - lse).exp().unsqueeze(-1).type_as(q)
        for l, value in enumerate(values):
            o = o + (b[l] - lse).exp().unsqueeze(-1).type_as(q) * value
        ctx.save_for_backward(q, k, v, o, lse, *slots)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, *slots = ctx.saved_tensors
        G, s = k.shape[1], 1 / math.sqrt(q.shape[-1])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, *_repeat(q, k, v), o, lse, 0.0, True)
        pool = lambda x: x.unflatten(1, (G, -1)).sum(2)  # over the query heads that share a KV head
        b, values = _depth_scores(q, slots)
        delta, keys = (do * o).sum(-1), slots[:len(values)]
        d_keys, d_values = [], []
        for l, value in enumerate(values):
            r = (b[l] - lse).exp().type_as(q)  # this slot's share of the softmax
            dt = s * r * ((do * value).sum(-1) - delta)
            dq = dq + dt.unsqueeze(-1) * _repeat(q, keys[l])[0]
            d_keys.append(pool(dt.unsqueeze(-1) * q))
            d_values.append(pool(r.unsqueeze(-1) * do))
        return dq, pool(dk), pool(dv), *d_keys, *d_values


def _repeat(q, *kv):
    """Each KV head once for every query head that reads it: [B,G,T,D] -> [B,H,T,D]."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in kv]


def _depth_scores(q, slots):
    """Scores [L,B,H,T] of q against the depth keys (in float32 or wider) and the depth values, repeated to H heads."""
    keys, values = slots[:len(slots) // 2], slots[len(slots) // 2:]
    scores = torch.stack([(q * _repeat(q, key)[0]).sum(-1) for key in keys]) / math.sqrt(q.shape[-1])
    return scores.to(_wide(q)), [_repeat(q, value)[0] for value in values]


def joint_attention(q, k, v, slots=()):
    """`moda_attention` over slots = L sources of `publish`, in the form that training uses: memory linear in T. Plain attention if L = 0."""
    if not slots:
        return attention(q, k, v)
    if kernels := fused(q):
        return kernels.moda_attention(q, k, v, slots)
    depth_k, depth_v = zip(*slots)
    if q.device.type != "cpu" or q.shape[2] != k.shape[2]:  # decoding: a few new tokens against a cache
        return moda_attention(q, k, v, depth_k, depth_v)
    return _JointAttention.apply(q, k, v, *depth_k, *depth_v)


# ----------------------------------------------------------------------------------------------------------------------
# layers

class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        if kernels := fused(x):
            return kernels.rms_norm(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x, u):
        """x + u and its norm: one pass over memory where the kernel runs."""
        if kernels := fused(x):
            return kernels.add_rms_norm(x, u, self.weight, self.eps)
        x = x + u
        return x, self(x)


class NoNorm(nn.Module):
    """Stands where the other norm_order has its norm."""

    def forward(self, x):
        return x

    def add(self, x, u):
        x = x + u
        return x, x


class Linear(nn.Linear):
    """x W^T. In mixed precision the gradient of the float32 weight comes out of its matmul in float32, where kernels run: autocast rounds it first."""

    def forward(self, x):
        mixed = x.dtype in (torch.bfloat16, torch.float16) and self.weight.dtype == torch.float32
        kernels = fused(x) if mixed else None
        return kernels.linear(x, self.weight) if kernels else super().forward(x)


class Attention(nn.Module):
    """Grouped-query attention with RoPE and query/key norm; it can read earlier layers in the two ways that `forward` describes."""

    def __init__(self, config):
        super().__init__()
        self.H, self.G, self.D = config.n_head, config.n_kv_head, config.head_dim
        self.qk_norm, self.k_norm_after_rope = config.qk_norm, config.k_norm_after_rope
        self.qkv = Linear(config.n_embd, (self.H + 2 * self.G) * self.D, bias=False)
        self.out = Linear(self.H * self.D, config.n_embd, bias=False)
        self.q_norm = self.k_norm = None
        if self.qk_norm != "none":
            per_head = self.qk_norm == "head"
            self.q_norm = RMSNorm(self.D if per_head else self.H * self.D, config.norm_eps)
            self.k_norm = RMSNorm(self.D if per_head else self.G * self.D, config.norm_eps)

    def heads(self, x, rope, mix=()):
        """x [B,T,C] -> finished queries [B,H,T,D], finished keys [B,G,T,D] and values [B,G,T,D], mixed over the sources `mix`."""
        qkv, (cos, sin), kernels = self.qkv(x), rope, fused(x)
        if kernels and self.qk_norm != "full":
            q_weight, k_weight, eps = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps) if self.q_norm else (None, None, 0.0)
            return kernels.attention_inputs(qkv, q_weight, k_weight, cos, sin, self.H, self.G, eps, self.k_norm_after_rope, mix)
        q, k, v = qkv.split([self.H * self.D, self.G * self.D, self.G * self.D], dim=-1)
        q = finish_heads(q, self.q_norm, self.D, cos, sin)
        k = finish_heads(k, self.k_norm, self.D, cos, sin, self.k_norm_after_rope)
        v = v.unflatten(-1, (self.G, self.D)).transpose(1, 2)
        if mix:
            v = kernels.depth_mix(q, k, v, mix) if kernels else depth_mix(q, k, v, *zip(*mix))
        return q, k, v

    def forward(self, x, rope, mix=(), slots=(), share=False, cache=None):
        """
        x [B,T,C] -> the output [B,T,C] and, if later layers `share` them, this layer's finished (keys, values), each [B,G,T,D].
        mix: (keys, mixed values) of earlier layers that Depth-Attention mixes into this layer's value before anything attends to it.
        slots: (keys, values) of earlier producers at the same token, which join the softmax (MoDA).
        cache: this layer's KV slot when decoding; it receives the finished keys and the mixed values.
        """
        q, k, v = self.heads(x, rope, mix)
        k, v, source = publish(k, v) if share else (k, v, None)
        o = cache.attend(q, k, v, slots) if cache else joint_attention(q, k, v, slots)
        return self.out(o.transpose(1, 2).flatten(2)), source


def publish(k, v):
    """
    (k, v, source): a layer's finished keys and values, for its own attention and for later layers to read. Where the kernels run, `source`
    collects the readers' gradients in place; elsewhere it is the pair (k, v).
    """
    kernels = fused(k)
    return kernels.publish(k, v) if kernels else (k, v, (k, v))


def finish_heads(x, norm, head_dim, cos, sin, norm_after_rope=False):
    """x [B,T,h*D] -> [B,h,T,D], normed (over each head, or over all of x where the norm is as wide as that) and rotated."""
    full = norm is not None and norm.weight.numel() != head_dim
    if full:
        x = norm(x)
    x = x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    if norm is None or full:
        return apply_rope(x, cos, sin)
    return norm(apply_rope(x, cos, sin)) if norm_after_rope else apply_rope(norm(x), cos, sin)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_up = Linear(config.n_embd, 2 * config.n_inner, bias=False)
        self.down = Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(swiglu(self.gate_up(x)))


class FFNKV(nn.Module):
    """MoDA's extra depth slot: a key and a value projected from the FFN's input, the key normed and rotated like a sequence key."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.kv = Linear(config.n_embd, 2 * config.n_kv_head * config.head_dim, bias=False)
        width = {"head": config.head_dim, "full": config.n_kv_head * config.head_dim, "none": 0}[config.qk_norm]
        self.k_norm = RMSNorm(width, config.norm_eps) if width else None
        self.k_norm_after_rope = config.k_norm_after_rope

    def forward(self, x, rope):
        k, v = self.kv(x).chunk(2, dim=-1)
        k = finish_heads(k, self.k_norm, self.head_dim, *rope, self.k_norm_after_rope)
        return publish(k, v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))[2]


# ----------------------------------------------------------------------------------------------------------------------
# the depth axis: what attention reads of earlier virtual layers. `past` holds what earlier virtual layers left in this forward pass.

class NoDepth:
    """Attention reads its own layer only."""
    ffn_kv = False

    def __init__(self, config):
        pass

    def reads(self, m, past):
        return {}

    def keep(self, m, past, kv, ffn_kv):
        pass


class DepthAttention(NoDepth):
    """
    Depth-Attention (arXiv 2606.05014). Virtual layer m reads C(m) = {j < m : j mod stride = 0} and {j : m - recent_window <= j < m}:
    their finished keys and mixed values at the same token. See `depth_mix`.
    """

    def __init__(self, config):
        s, w = config.depth_stride, config.depth_recent_window
        self.candidates = [[j for j in range(m) if j % s == 0 or j >= m - w] for m in range(len(config.virtual_layers))]
        self.read_later = {j for c in self.candidates for j in c}

    def reads(self, m, past):
        return {"mix": [past[j] for j in self.candidates[m]], "share": m in self.read_later}

    def keep(self, m, past, kv, ffn_kv):
        past[m] = kv


class MoDA(NoDepth):
    """
    Mixture-of-Depths Attention (arXiv 2603.15619). A layer's softmax runs over its sequence keys and over the depth slots of all
    earlier producers at the same token: the keys and values of every earlier attention and, with moda_ffn_kv, of every earlier FFN.
    """

    def __init__(self, config):
        self.ffn_kv = config.moda_ffn_kv

    def reads(self, m, past):
        return {"slots": list(past.values()), "share": True}

    def keep(self, m, past, kv, ffn_kv):
        past[m, "attention"] = kv
        if ffn_kv:
            past[m, "ffn"] = ffn_kv


DEPTHS = {"none": NoDepth, "depth_attention": DepthAttention, "moda": MoDA}


# ----------------------------------------------------------------------------------------------------------------------
# the connector axis: how the residual stream is carried

class Residual(nn.Module):
    """
    x <- x + F(x) (He et al., 2016), and the interface of every connector. A connector wraps each sub-layer F:

        state = start(x)                         x: the embedding [B,T,C]
        h, carry = read(state, site, norm)       h = norm(what F reads); carry: what write needs besides F's output
        state = write(carry, u, site)            u = F's output [B,T,C]
        state = end_layer(state, m)              after virtual layer m
        x = finish(state, norm)                  h of the model's last norm

    `site` is the connector's own module for this sub-layer, sites[2*layer] for attention and sites[2*layer + 1] for the MLP, or None.
    The state here is (x, u, memory): u is the last sub-layer's output, not yet added, so that adding and norming are one pass.
    """

    def __init__(self, config):
        super().__init__()
        self.sites = [None] * (2 * config.n_layer)

    def start(self, x):
        return x, None, None

    def read(self, state, site, norm):
        x, u, memory = state
        x, h = (x, norm(x)) if u is None else norm.add(x, u)
        return h, (x, memory)

    def write(self, carry, u, site):
        x, memory = carry
        return x, u, memory

    def end_layer(self, state, m):
        return state

    def finish(self, state, norm):
        return self.read(state, None, norm)[0]

    def flops(self, config):
        """Forward FLOPs a token of the connector, as (matmuls, elementwise)."""
        return 0, 0


class DenseFormer(Residual):
    """
    Depth-weighted averaging (Pagliardini et al., arXiv 2402.02622). With X_0 the embedding and X_t = Layer_{t-1}(Y_{t-1}):

        Y_t = sum_m alpha_t[m] X_{(t mod k) + m k}  if t is a multiple of the period p, else X_t;    k the dilation, Y_0 = X_0

    The last coefficient belongs to X_t. They start as 0, ..., 0, 1: the plain Transformer. One row a virtual depth, packed in `alpha`.
    """

    def __init__(self, config):
        super().__init__(config)
        self.dilation, self.period = config.denseformer_dilation, config.denseformer_period
        self.lengths = [t // self.dilation + 1 if t % self.period == 0 else 0 for t in range(1, len(config.virtual_layers) + 1)]
        rows = [F.one_hot(torch.tensor(n - 1), n).float() for n in self.lengths if n]
        self.alpha = nn.Parameter(torch.cat(rows) if rows else torch.zeros(0), requires_grad=bool(rows))

    def start(self, x):
        x, source = self.source(x)
        return x, None, [source]

    def end_layer(self, state, m):
        x, u, history = state
        x, source = self.source(x + u)
        history, t, n, first = history + [source], m + 1, self.lengths[m], sum(self.lengths[:m])
        if n:
            sources, kernels = history[t % self.dilation::self.dilation], fused(x)
            x = kernels.average(sources, first) if kernels else weighted_sum(sources, self.alpha[first:first + n])
        return x, None, history

    def source(self, x):
        """(x, source): the stream and what averages read of it, which gathers their gradients in one pass where the kernels run."""
        kernels = fused(x)
        return kernels.average_source(x, self.alpha) if kernels else (x, x)

    def flops(self, config):
        return 0, 2 * config.n_embd * sum(self.lengths)


def weighted_sum(sources, weights):
    """sum_i weights[i] * sources[i] for n tensors of one shape and n weights, numbers or tensors [..., 1]."""
    return sum(w.type_as(x) * x for w, x in zip(weights, sources))


class AttnRes(Residual):
    """
    Block Attention Residuals (arXiv 2603.15031): what a sub-layer reads is a softmax over depth of earlier states s_1..s_n, scored by
    a learned pseudo-query: z_i = <q, RMS_w(s_i)>, h = sum_i softmax(z)_i s_i. One such aggregator a sub-layer and one at the end.

    sources='snapshots' is the Depth-Attention repository's baseline: an ordinary residual stream x <- x + F(h); the s_i are the embedding,
    a snapshot of x after every layer by which block_size sub-layers have passed, and x itself, whose score has a learned bias.
    sources='block_sums' is the paper: no stream; the s_i are the embedding, the sum of the sub-layer outputs of each finished block, and
    the running sum of the current block. Block size 1 is full AttnRes.
    The state is (x, sources, c): x the stream or running sum (None at the start of a block), c the sub-layers since the last commit.
    """

    def __init__(self, config):
        super().__init__(config)
        self.block_size, self.snapshots = config.attnres_block_size, config.attnres_sources == "snapshots"
        self.sites = nn.ModuleList(Aggregator(config, self.snapshots) for _ in range(2 * config.n_layer))
        self.final = Aggregator(config, self.snapshots)

    def start(self, x):
        x, source = keep(x)
        return x if self.snapshots else None, [source], 0

    def read(self, state, site, norm):
        x, sources, c = state
        return norm(site(sources if x is None else sources + [x])), state

    def write(self, carry, u, site):
        x, sources, c = carry
        x, c = u if x is None else x + u, c + 1
        return self.commit(x, sources, c) if not self.snapshots else (x, sources, c)

    def end_layer(self, state, m):
        return self.commit(*state) if self.snapshots else state

    def commit(self, x, sources, c):
        """The state with x among the sources if its block is full."""
        if c < self.block_size:
            return x, sources, c
        x, source = keep(x)
        return x if self.snapshots else None, sources + [source], 0

    def finish(self, state, norm):
        return self.read(state, self.final, norm)[0]

    def flops(self, config):
        reads, sources, c, running = 0, 1, 0, self.snapshots
        for sub_layer in range(2 * len(config.virtual_layers)):
            reads, c, running = reads + sources + running, c + 1, True
            if c >= self.block_size and (sub_layer % 2 or not self.snapshots):
                sources, c, running = sources + 1, 0, self.snapshots
        reads += sources + running
        return 0, 6 * config.n_embd * reads  # per source: mean square, dot, weighted sum


def keep(x):
    """(x, source): the stream and what aggregators read of it; like `publish`, for a state [B,T,C]."""
    kernels = fused(x)
    return kernels.keep(x) if kernels else (x, x)


class Aggregator(nn.Module):
    def __init__(self, config, bias):
        super().__init__()
        self.pseudo_query = nn.Parameter(torch.zeros(config.n_embd))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.recency_bias = nn.Parameter(torch.tensor(config.attnres_recency_bias_init)) if bias else None

    def forward(self, sources):
        """n sources of `keep`, the current state [B,T,C] last -> their mix [B,T,C]."""
        query = self.pseudo_query * self.norm.weight
        if kernels := fused(query):
            return kernels.attnres_mix(sources, query, self.norm.eps, self.recency_bias)
        scores = []
        for s in sources:
            wide = s.to(_wide(s))
            scores.append((wide * query).sum(-1) * torch.rsqrt(wide.square().mean(-1) + self.norm.eps))
        if self.recency_bias is not None:
            scores[-1] = scores[-1] + self.recency_bias
        a = torch.softmax(torch.stack(scores), 0)
        return sum(a_i.unsqueeze(-1).type_as(s) * s for a_i, s in zip(a, sources))


class MHC(Residual):
    """
    Manifold-constrained hyper-connections (arXiv 2512.24880, in the form of the Depth-Attention repository's baseline): n streams X_i,

        h = sum_j pre[j] X_j,    X_i <- sum_j res[i,j] X_j + post[i] F(h)

    with maps of the token's own streams (see HyperConnection); `res` is made doubly stochastic by Sinkhorn. The streams start as copies of
    the embedding and are read out by a learned softmax. The state is (streams [B,T,n,C], u, maps): u is the last sub-layer's output, not yet
    written by its maps [B,T,n+n*n] = post | res, so that writing and the next reading are one step.
    """

    def __init__(self, config):
        super().__init__(config)
        self.n = config.mhc_num_streams
        self.sites = nn.ModuleList(HyperConnection(config) for _ in range(2 * config.n_layer))
        self.reduce_logits = nn.Parameter(torch.zeros(self.n))

    def start(self, x):
        return x.unsqueeze(2).expand(-1, -1, self.n, -1), None, None

    def read(self, state, site, norm):
        streams, u, maps = state
        if (kernels := fused(streams)) and self.n <= kernels.MOST_STREAMS:
            weight, eps = (norm.weight, norm.eps) if isinstance(norm, RMSNorm) else (None, 0.0)
            streams, h, maps = kernels.hyper_connection(streams, u, maps, site.projection.weight, site.norm.weight, site.logits(), site.iters, site.norm.eps, weight, eps)
            return h, (streams, maps)
        if u is not None:
            post, res = self.split(maps)
            streams = torch.stack([mixed(streams, res[:, :, i], u, post[..., i]) for i in range(self.n)], 2)
        pre, maps = site(streams).split([self.n, self.n + self.n**2], dim=-1)
        return norm(mixed(streams, pre)), (streams, maps)

    def write(self, carry, u, site):
        streams, maps = carry
        return streams, u, maps

    def split(self, maps):
        """maps [B,T,n+n*n] -> post [B,T,n], res [B,T,n,n]."""
        post, res = maps.split([self.n, self.n**2], dim=-1)
        return post, res.unflatten(-1, (self.n, self.n))

    def finish(self, state, norm):
        """Reads all streams by the softmax r, in one step with the last write: sum_i r[i] X_i is linear in the old streams and u."""
        streams, u, maps = state
        post, res = self.split(maps)
        r = torch.softmax(self.reduce_logits, 0)
        return norm(mixed(streams, (r.unsqueeze(-1) * res).sum(-2), u, (r * post).sum(-1)))

    def flops(self, config):
        n, C, M = self.n, config.n_embd, len(config.virtual_layers)
        matmul = 2 * n * C * (n * n + 2 * n)
        return 2 * M * matmul, 2 * M * (2 * n * C * (n + 3) + 4 * config.mhc_sinkhorn_iters * n * n) + 2 * n * C


def mixed(streams, weights, u=None, u_weight=None):
    """sum_j weights[..., j] streams[..., j, :], plus u_weight u: streams [B,T,n,C], weights [B,T,n], u [B,T,C], u_weight [B,T] -> [B,T,C]."""
    total = weighted_sum(streams.unbind(2), weights.unsqueeze(-1).unbind(2))
    return total if u is None else total + u_weight.unsqueeze(-1).type_as(u) * u


class HyperConnection(nn.Module):
    """
    mHC's maps for one sub-layer: from z = [X_1; ...; X_n] (width nC), y = W RMS(z), and in float32
        pre = sigmoid(alpha_pre y_pre + b_pre),    post = 2 sigmoid(alpha_post y_post + b_post),    res = Sinkhorn(alpha_res y_res + b_res).
    """

    def __init__(self, config):
        super().__init__()
        n, self.iters = config.mhc_num_streams, config.mhc_sinkhorn_iters
        self.n = n
        share = min(max(1 / n, 1e-6), 1 - 1e-6)
        self.pre_logits = nn.Parameter(torch.full((n,), math.log(share / (1 - share))))
        self.post_logits = nn.Parameter(torch.zeros(n))
        off = math.log(0.01 / (n - 1)) if n > 1 else 0.0
        self.residual_logits = nn.Parameter(torch.full((n, n), off).fill_diagonal_(math.log(0.99) if n > 1 else 0.0))
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            self.register_parameter(name, nn.Parameter(torch.tensor(float(config.mhc_alpha_init))))
        self.norm = RMSNorm(n * config.n_embd, config.norm_eps)
        self.projection = nn.Linear(n * config.n_embd, n * n + 2 * n, bias=False)

    def logits(self):
        return self.pre_logits, self.post_logits, self.residual_logits, self.alpha_pre, self.alpha_post, self.alpha_res

    def forward(self, streams):
        """streams [B,T,n,C] -> maps [B,T,n+n+n*n] = pre | post | res, in float32 or wider."""
        n = self.n
        y = self.projection(self.norm(streams.flatten(2)))
        y_pre, y_post, y_res = y.to(_wide(y)).split([n, n, n * n], dim=-1)
        pre = torch.sigmoid(self.alpha_pre * y_pre + self.pre_logits)
        post = 2 * torch.sigmoid(self.alpha_post * y_post + self.post_logits)
        res = sinkhorn((self.alpha_res * y_res).unflatten(-1, (n, n)) + self.residual_logits, self.iters)
        return torch.cat((pre, post, res.flatten(-2)), dim=-1)


def sinkhorn(logits, iters):
    """exp(logits) [..., n, n] with rows, then columns, normalised `iters` times: columns sum to 1, rows nearly (Sinkhorn & Knopp, 1967)."""
    m = torch.exp(logits - logits.amax((-2, -1), keepdim=True)).clamp_min(1e-12)
    for _ in range(iters):
        m = m / m.sum(-1, keepdim=True).clamp_min(1e-12)
        m = m / m.sum(-2, keepdim=True).clamp_min(1e-12)
    return m


CONNECTORS = {"residual": Residual, "denseformer": DenseFormer, "attnres": AttnRes, "mhc": MHC}


# ----------------------------------------------------------------------------------------------------------------------
# the model

class Block(nn.Module):
    """One layer: attention, then MLP, each wrapped by the connector."""

    def __init__(self, config, ffn_kv):
        super().__init__()
        self.attn_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)
        self.ffn_kv = FFNKV(config) if ffn_kv else None
        self.pre_norm, self.no_norm = config.norm_order == "pre", NoNorm()

    def forward(self, state, connector, sites, rope, reads, cache=None):
        """state -> the state after the layer, and what later layers may read: its keys and values, and those of its FFN's input, or None."""
        before, after = self.order(self.attn_norm)
        h, carry = connector.read(state, sites[0], before)
        u, kv = self.attn(h, rope, **reads, cache=cache)
        state = connector.write(carry, after(u), sites[0])

        before, after = self.order(self.mlp_norm)
        h, carry = connector.read(state, sites[1], before)
        ffn_kv = self.ffn_kv(h, rope) if self.ffn_kv else None
        return connector.write(carry, after(self.mlp(h)), sites[1]), kv, ffn_kv

    def order(self, norm):
        return (norm, self.no_norm) if self.pre_norm else (self.no_norm, norm)


class KVCache:
    """
    Keys and values of a generation: one slot a virtual layer, each [B,G,max_len,D] and allocated when first written. With
    Depth-Attention the values are the MIXED ones, so that no earlier token's value ever has to be mixed again.
    """

    def __init__(self, config, max_len):
        self.length = 0  # tokens in the cache
        self.max_len = max_len
        self.slots = [KVSlot(self) for _ in config.virtual_layers]


class KVSlot:
    def __init__(self, cache):
        self.cache, self.k, self.v = cache, None, None

    def attend(self, q, k, v, slots=()):
        """Attention of new tokens, `joint_attention`'s arguments, over the cache's tokens and each other."""
        return joint_attention(q, *self.append(k, v), slots)

    def append(self, k, v):
        """Writes k, v [B,G,T,D] behind the cache's tokens; returns all keys and values so far."""
        start, end = self.cache.length, self.cache.length + k.shape[2]
        if end > self.cache.max_len:
            raise ValueError(f"{end} tokens do not fit into a KV cache of {self.cache.max_len}; make it longer or crop the input")
        if self.k is not None and len(self.k) != len(k):
            raise ValueError(f"a KV cache of {len(self.k)} sequences cannot continue {len(k)}; make a new one")
        if self.k is None:
            shape = (k.shape[0], k.shape[1], self.cache.max_len, k.shape[3])
            self.k, self.v = k.new_empty(shape), v.new_empty(shape)
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]


class LinearCrossEntropy(torch.autograd.Function):
    """
    Mean cross entropy of x W^T [N,V] against targets, with the logits of only some rows alive at a time. The gradient is computed along
    with the loss, so that backward neither recomputes nor stores logits.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, training=True):  # training=False: the loss alone, at a third of the work
        w, n = weight.to(x.dtype), (targets != IGNORE).sum().clamp(min=1)
        rows = max(16, (2**29 if x.is_cuda else 2**24) // w.shape[0])
        dx, dw = (torch.empty_like(x), torch.zeros_like(weight)) if training else (None, None)
        total, kernels = x.new_zeros((), dtype=_wide(x)), fused(x)
        for i in range(0, x.shape[0], rows):
            part, target = x[i:i + rows], targets[i:i + rows]
            logits = part @ w.T
            losses, d = cross_entropy(logits, target)  # d overwrites the logits where the kernel runs
            total += losses.sum()
            if training:
                dx[i:i + rows] = d @ w
                dw = kernels.weight_gradient(d, part, dw) if kernels else dw.add_(d.T @ part)
            del logits, d  # before the next chunk's logits are made
        ctx.save_for_backward(dx, dw, n)
        return total / n

    @staticmethod
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        return dx * (grad / n).type_as(dx), dw * (grad / n).type_as(dw), None, None


def cross_entropy(logits, targets):
    """Losses [N] in float32 and d losses / d logits [N,V] in the logits' dtype; both zero where the target is IGNORE."""
    if kernels := fused(logits):
        return kernels.cross_entropy_(logits, targets, IGNORE), logits
    d = torch.log_softmax(logits, -1, dtype=_wide(logits))
    valid = targets != IGNORE
    index = targets.where(valid, 0).unsqueeze(-1)
    losses = -d.gather(-1, index).squeeze(-1) * valid
    d = d.exp_().scatter_add_(-1, index, -torch.ones_like(index, dtype=d.dtype)).mul_(valid.unsqueeze(-1))
    return losses, d.type_as(logits)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.order = config.virtual_layers
        self.depth = DEPTHS[config.depth](config)
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Block(config, self.depth.ffn_kv and l < config.n_layer - 1) for l in range(config.n_layer))
        self.connector = CONNECTORS[config.connector](config)
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.grad_checkpoint = False  # True: keep only each layer's input and compute the layer again in backward
        angles = torch.arange(config.block_size).double()[:, None] * config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=module is self.embed and config.embed_init_std or config.init_std)

    @classmethod
    def from_pretrained(cls, path_or_repo_id, **overrides):
        """A model from a Hugging Face folder or Hub id; `overrides` replace fields of its configuration. See hf.load."""
        import hf  # an arrow that points back, as decode's in `generate`: the public name lives here, the format's knowledge there
        return hf.load(path_or_repo_id, **overrides)

    @property
    def head_weight(self):
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """
        idx [B,T] int64 -> (logits, loss). Without targets: logits [B,T,V], or [B,1,V] with last_only, and None. With targets [B,T]
        (IGNORE = does not count): None and the mean cross entropy in nats. `cache`: a KVCache that holds the tokens before idx.
        """
        start = cache.length if cache else 0
        T = idx.shape[1]
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets of shape {tuple(targets.shape)} do not fit idx of shape {tuple(idx.shape)}; give one target for each token")
        if start + T > self.config.block_size:
            raise ValueError(f"a context of {start + T} tokens is longer than block_size={self.config.block_size}; crop it or raise block_size")
        x = self.embed(idx)
        if torch.is_autocast_enabled(x.device.type):  # the residual stream is carried in the dtype of the matmuls
            x = x.to(torch.get_autocast_dtype(x.device.type))
        rope = self.cos[start:start + T], self.sin[start:start + T]
        state, past = self.connector.start(x), {}
        for m, l in enumerate(self.order):
            args = (state, self.connector, self.connector.sites[2 * l:2 * l + 2], rope, self.depth.reads(m, past))
            if self.grad_checkpoint and torch.is_grad_enabled() and cache is None:
                state, kv, ffn_kv = checkpoint(self.layers[l], *args, use_reentrant=False)
            else:
                state, kv, ffn_kv = self.layers[l](*args, cache=cache and cache.slots[m])
            self.depth.keep(m, past, kv, ffn_kv)
            state = self.connector.end_layer(state, m)
        if cache:
            cache.length += T
        x = self.connector.finish(state, self.norm)
        if targets is not None:
            return None, LinearCrossEntropy.apply(x.flatten(0, 1), self.head_weight, targets.flatten(), torch.is_grad_enabled())
        return F.linear(x[:, -1:] if last_only else x, self.head_weight), None

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, use_cache=True, generator=None, stop_token=None):
        """
        Continues idx [B,T>=1] by max_new_tokens and returns all of it. temperature 0 = argmax; top_k 0 or None = off; stop_token ends a row
        (it is repeated behind its first occurrence) and generation once every row has ended. Beyond block_size the model sees the window
        that starts at `window_start`, the same with and without the cache. What is written here runs on CPUs; see decode.py for GPUs.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature} must not be negative; 0 takes the most likely token")
        if top_k is not None and top_k < 0:
            raise ValueError(f"top_k={top_k} must not be negative; 0 keeps every token")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must be above 0 and at most 1; 1 keeps every token")
        if not idx.shape[1]:
            raise ValueError("generate needs at least one token to continue; start from the tokenizer's end-of-text token")
        draw = lambda logits: sample(logits.float(), temperature, top_k, top_p, generator)
        if use_cache and fused(self.embed.weight):
            import decode
            return decode.generate(self, idx, max_new_tokens, draw, stop_token)
        done = torch.zeros(idx.shape[0], dtype=torch.bool, device=idx.device)
        cache, begin = None, 0
        for _ in range(max_new_tokens):
            start = window_start(idx.shape[1], self.config.block_size)
            if use_cache and (cache is None or start != begin):  # the window has moved: its tokens see another past, so all are run again
                cache, begin = KVCache(self.config, min(self.config.block_size, idx.shape[1] - start + max_new_tokens)), start
            new = idx[:, start + (cache.length if cache else 0):]
            logits = self(new, cache=cache, last_only=True)[0][:, -1]
            token = draw(logits)
            if stop_token is not None:
                token = token.where(~done, stop_token)
                done |= token == stop_token
            idx = torch.cat((idx, token[:, None]), dim=1)
            if stop_token is not None and done.all():
                break
        return idx

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW in two groups: everything decays (embedding and head included, as in the recipes) but norms and biases."""
        norms = {id(m.weight) for m in self.modules() if isinstance(m, RMSNorm)}
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        plain = [p for n, p in named if id(p) in norms or "bias" in n]
        decayed = [p for n, p in named if not (id(p) in norms or "bias" in n)]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=device_type in ("cpu", "cuda"))

    def num_params(self, embedding=True):
        """Number of parameters, with or without the input embedding (which is kept where it is also the head)."""
        n = sum(p.numel() for p in self.parameters())
        return n if embedding or self.lm_head is None else n - self.embed.weight.numel()

    def flops(self, seq_len):
        """
        FLOPs a token of one training step (forward and backward = 3 x forward) on sequences of seq_len, by part: 'matmul' (linear layers and
        the connector's projections), 'attention' (scores and weighted values of all pairs, masked or not), 'depth' (the depth method's
        reading), 'connector' (its elementwise work). Norms, RoPE, activations and softmaxes are not counted.
        """
        c, M = self.config, len(self.order)
        per_layer = [sum(p.numel() for n, p in layer.named_parameters() if p.ndim == 2) for layer in self.layers]
        matmul, elementwise = self.connector.flops(c)
        matmul += 2 * (sum(per_layer[l] for l in self.order) + self.head_weight.numel())
        reads = 0
        if c.depth == "depth_attention":  # a score and a weighted value a source and KV head, the layer itself included
            reads = c.n_kv_head * sum(len(candidates) + 1 for candidates in self.depth.candidates if candidates)
        if c.depth == "moda":  # the same a slot and query head
            slots = 0
            for l in self.order:
                reads, slots = reads + c.n_head * slots, slots + 1 + (self.layers[l].ffn_kv is not None)
        forward = {"matmul": matmul, "attention": 4 * M * c.n_head * c.head_dim * seq_len, "depth": 4 * c.head_dim * reads, "connector": elementwise}
        return {part: 3 * n for part, n in forward.items()}

    def flops_per_token(self, seq_len):
        """Training FLOPs a token, every method's own extra work included: the sum of `flops`."""
        return sum(self.flops(seq_len).values())

    def mfu_flops_per_token(self, seq_len):
        """The convention of MFU: 6 N + 12 L H D T, with N the parameters used a token without the input embedding (PaLM, appendix B)."""
        c = self.config
        per_layer = [sum(p.numel() for p in layer.parameters()) for layer in self.layers]
        n = self.num_params(embedding=False) + sum(per_layer[l] for l in self.order) - sum(per_layer)
        return 6 * n + 12 * len(self.order) * c.n_head * c.head_dim * seq_len

    def compile_blocks(self, **options):
        """torch.compile for the MLPs, once for all layers, where no Triton kernels run: the MLP looks the same whatever the connector and depth method."""
        for layer in self.layers if not fused(self.embed.weight) else ():
            layer.mlp.compile(**options)


def window_start(length, block_size):
    """
    First token of the window in which the token after `length` tokens is predicted: 0 while all of them fit; then the window moves on by half
    a block at a time, so that a cache is filled again only once in half a block.
    """
    half = max(1, block_size // 2)
    return max(0, half * math.ceil((length - block_size) / half))


def sample(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token [B] a row of logits [B,V]: argmax at temperature 0, else from the top_k most likely and the nucleus of mass top_p."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0: no temperature is too small
    if top_k and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if top_p is not None and top_p < 1:
        p, order = torch.softmax(logits, -1).sort(descending=True)
        outside = (p.cumsum(-1) - p) >= top_p  # a token is kept while the mass before it is below top_p: at least one is
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    p = torch.softmax(logits, -1)
    return (p / torch.empty_like(p).exponential_(generator=generator)).argmax(-1)  # what torch.multinomial draws, which also makes the CPU wait
