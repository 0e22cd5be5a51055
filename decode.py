"""
Generation on a GPU: what `GPT.generate` runs there once the prompt is read.

A token reads every weight once and does little with it, so memory bandwidth is the bound, and whatever the GPU waits for otherwise is lost: launches,
the CPU, the way from one layer to the next. Nothing is copied to the CPU between tokens. A token's logits come in one of two ways:

* every model: model.py's own forward pass, recorded once as a CUDA graph and replayed for each token. The position is a number in the GPU's memory,
  and attention is a kernel that reads as much of the cache as is filled, so that one graph serves all lengths;
* the plain residual stream, with or without Depth-Attention, one sequence: all layers in a single launch, `_token_kernel`.
"""
import types
import weakref

import torch
import triton
import triton.language as tl

import kernels
from kernels import _ceil_div, _finish, _pointer, _power_of_2
from model import KVCache, window_start

# Launch settings of _token_kernel, the best on an H200. tile: numbers of a weight matrix that a program holds at a time.
SETTINGS = dict(warps=8, tile=16384, stages=3, prefetch=True)
BLOCK = 32  # cached tokens that a program reads at a time
SPLITS = 8  # parts of the cache that different programs read, for each KV head
SOURCES = 16  # most sources of Depth-Attention that a program holds at once
LOOK = 16  # tokens between two looks at whether all rows have ended, which make the CPU wait for the GPU


# ----------------------------------------------------------------------------------------------------------------------
# attention of one token over a cache, each part of the cache by another program
#
# A KV head's GROUP queries (GROUP_: as a power of 2) share what is read. Queries and keys are kept as the halves that RoPE turns, as in kernels.py.

@triton.jit
def _part(position, split, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """The cached tokens [first, end) that a split reads, and the number of splits that read any (at least 1)."""
    each = BLOCK * tl.maximum(1, tl.cdiv(position, BLOCK * SPLITS))
    return split * each, tl.minimum(split * each + each, position), tl.maximum(1, tl.cdiv(position, each))


@triton.jit
def _cached(k, v, first, end, D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr, BLOCK: tl.constexpr):
    """Keys, as halves [BLOCK, D/2], and values [BLOCK, D] of the cached tokens from `first` on; zeros from `end` on."""
    token = first + tl.arange(0, BLOCK)[:, None]
    half, whole = tl.arange(0, HALF_)[None, :], tl.arange(0, D_)[None, :]
    here = (token < end) & (half < D // 2)
    a = tl.load(k + token * D + half, mask=here, other=0.0)
    b = tl.load(k + token * D + half + D // 2, mask=here, other=0.0)
    return a, b, tl.load(v + token * D + whole, mask=(token < end) & (whole < D), other=0.0)


@triton.jit
def _over_cache(qa, qb, top, total, o, ka, kb, values, k, v, first, end, scale,
                D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr, BLOCK: tl.constexpr):
    """Goes on with a softmax (its maximum, its sum, its weighted values) over the cached tokens [first, end), whose first block is read already."""
    for at in range(first, end, BLOCK):
        next_a, next_b, next_values = _cached(k, v, at + BLOCK, end, D, HALF_, D_, BLOCK)
        score = tl.sum(qa[:, None, :] * ka.to(tl.float32)[None, :, :] + qb[:, None, :] * kb.to(tl.float32)[None, :, :], 2) * scale
        score = tl.where((at + tl.arange(0, BLOCK) < end)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        old, p = tl.exp(top - new_top), tl.exp(score - new_top[:, None])
        total = total * old + tl.sum(p, 1)
        o = o * old[:, None] + tl.sum(p[:, :, None] * values.to(tl.float32)[None, :, :], 1)
        top, ka, kb, values = new_top, next_a, next_b, next_values
    return top, total, o


@triton.jit
def _store_part(part, lse, split, group, top, total, o, members, H: tl.constexpr, GROUP: tl.constexpr, GROUP_: tl.constexpr, D: tl.constexpr, D_: tl.constexpr):
    """A split's output [SPLITS, rows of H, D] and its log-sum-exp, -inf where it read nothing."""
    member, cols = tl.arange(0, GROUP_), tl.arange(0, D_)[None, :]
    head = split * H + group * GROUP + member
    some = total > 0
    tl.store(lse + head, tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=member < members)
    tl.store(part + head[:, None] * D + cols, o / tl.where(some, total, 1.0)[:, None], mask=(member < members)[:, None] & (cols < D))


@triton.jit
def _attend_kernel(q, k, v, cache_k, cache_v, position, part, lse, max_len, scale, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUP_: tl.constexpr,
                   D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """One new token a sequence: writes its key and value into the cache at `position` and attends to all up to it. A row is a sequence's KV head."""
    row, split, now = tl.program_id(0), tl.program_id(1), tl.load(position).to(tl.int32)
    first, end, _ = _part(now, split, BLOCK, SPLITS)
    cache_k += row.to(tl.int64) * max_len * D
    cache_v += row.to(tl.int64) * max_len * D
    ka, kb, values = _cached(cache_k, cache_v, first, end, D, HALF_, D_, BLOCK)
    half, cols, member = tl.arange(0, HALF_), tl.arange(0, D_), tl.arange(0, GROUP_)
    q += (row * GROUP + member)[:, None] * D + half[None, :]
    q_mask = (member < GROUP)[:, None] & (half < D // 2)[None, :]
    qa, qb = tl.load(q, mask=q_mask, other=0.0).to(tl.float32), tl.load(q + D // 2, mask=q_mask, other=0.0).to(tl.float32)
    new_a, new_b, new_v = _cached(k + row * D, v + row * D, 0, 1, D, HALF_, D_, 1)
    own = split == 0  # this split has the new token besides its part
    write = tl.where(own, D, 0)
    tl.store(cache_k + now * D + half[None, :], new_a, mask=(half < write // 2)[None, :])
    tl.store(cache_k + now * D + half[None, :] + D // 2, new_b, mask=(half < write // 2)[None, :])
    tl.store(cache_v + now * D + cols[None, :], new_v, mask=(cols < write)[None, :])
    score = tl.sum(qa * new_a.to(tl.float32) + qb * new_b.to(tl.float32), 1) * scale
    top, total = score + tl.where(own, 0.0, float("-inf")), tl.full([GROUP_], 1.0, tl.float32) * tl.where(own, 1.0, 0.0)
    o = total[:, None] * new_v.to(tl.float32)
    top, total, o = _over_cache(qa, qb, top, total, o, ka, kb, values, cache_k, cache_v, first, end, scale, D, HALF_, D_, BLOCK)
    _store_part(part, lse, split, row, top, total, o, GROUP, ROWS * GROUP, GROUP, GROUP_, D, D_)


@triton.jit
def _join_kernel(part, lse, depth_o, depth_lse, out, ROWS: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, SPLITS: tl.constexpr):
    """The splits' outputs weighted by their shares of the softmax, together with that of MoDA's depth slots if there are any. A row is a head."""
    row, split, cols = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, D_)
    score = tl.load(lse + split * ROWS + row)
    o = tl.load(part + (split * ROWS + row)[:, None] * D + cols[None, :], mask=(cols < D)[None, :], other=0.0)
    top = tl.max(score, 0)
    if depth_o is not None:
        depth_score = tl.load(depth_lse + row)
        top = tl.maximum(top, depth_score)
    p = tl.exp(score - top)
    total, o = tl.sum(p, 0), tl.sum(p[:, None] * o, 0)
    if depth_o is not None:
        p = tl.exp(depth_score - top)
        total, o = total + p, o + p * tl.load(depth_o + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(out + row * D + cols, (o / total).to(out.dtype.element_ty), mask=cols < D)


def _head_shapes(H, G, D):
    return dict(GROUP=H // G, GROUP_=_power_of_2(H // G), D=D, HALF_=_power_of_2(D // 2), D_=_power_of_2(D), BLOCK=BLOCK, SPLITS=SPLITS)


class Slot:
    """A layer's place in the cache when its length is known to the GPU alone; stands in for model.KVSlot in a forward pass of one token."""

    def __init__(self, k, v, position):
        self.k, self.v, self.position = k, v, position  # k, v [B,G,max_len,D]; position [1], the new token's

    def attend(self, q, k, v, slots):
        """As KVSlot.attend for one token: q [B,H,1,D]; k, v [B,G,1,D]; MoDA's slots."""
        (B, H, _, D), (G, max_len) = q.shape, self.k.shape[1:3]
        q, k, v = (x.contiguous() for x in (q, k, v))
        part, lse = q.new_empty(SPLITS, B * H, D, dtype=torch.float32), q.new_empty(SPLITS, B * H, dtype=torch.float32)
        shapes = _head_shapes(H, G, D)
        _attend_kernel[(B * G, SPLITS)](q, k, v, self.k, self.v, self.position, part, lse, max_len, D**-0.5, ROWS=B * G, **shapes, num_warps=8)
        depth_o = depth_lse = None
        if slots:
            pairs = [(s.k.transpose(1, 2), s.v.transpose(1, 2)) if isinstance(s, kernels.Slot) else s for s in slots]
            depth_o, depth_lse = (x.contiguous() for x in kernels.moda_depth(q, *zip(*pairs)))
        out = torch.empty_like(q)
        _join_kernel[(B * H,)](part, lse, depth_o, depth_lse, out, ROWS=B * H, D=D, D_=shapes["D_"], SPLITS=SPLITS, num_warps=1)
        return out


# ----------------------------------------------------------------------------------------------------------------------
# all layers of one token in one launch
#
# As many programs as the GPU has multiprocessors stay for the whole token. Each has its own rows of every matrix, and all wait for each other wherever
# one needs what others have computed: five times a layer. A wait costs about a microsecond, and a layer's weights at full bandwidth only five, so
# memory must not rest meanwhile: before a program waits, it asks for the weights that it needs behind the wait, the first tile into its registers
# and those of the step after into the L2 cache. What programs hand to each other is small, stays in L2 and is read there (.cg), never from a stale L1.

@triton.jit
def _announce(counter, GRID: tl.constexpr):
    """This program has stored what the others wait for."""
    if GRID > 1:
        tl.debug_barrier()  # all of its threads have
        tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _wait(counter, target, GRID: tl.constexpr):
    """Until there have been `target` announcements."""
    if GRID > 1:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < target:
            pass
        tl.debug_barrier()


@triton.jit
def _prefetch(weight, row, N: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, LINES: tl.constexpr, ON: tl.constexpr):
    """Asks for EACH rows of a matrix [N, K], from `row` on, without waiting for them: they come into the L2 cache, in lines of 128 bytes."""
    if ON:
        line = (weight + row * K).to(tl.int64) + tl.arange(0, LINES) * 128
        line = tl.minimum(line, (weight + tl.minimum(row + EACH, N) * K).to(tl.int64) - 1)
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _tile(weight, row, end, K: tl.constexpr, R: tl.constexpr, K_: tl.constexpr):
    """Rows row..row+R of a matrix [*, K]; zeros from the row `end` on."""
    r, cols = tl.arange(0, R)[:, None], tl.arange(0, K_)[None, :]
    return tl.load(weight + row.to(tl.int64) * K + (r * K + cols), mask=(row + r < end) & (cols < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def _times(tile, x):
    return tl.sum(tile.to(tl.float32) * x[None, :], 1)


@triton.jit
def _weights_of_norm(weight, C: tl.constexpr, C_: tl.constexpr):
    cols = tl.arange(0, C_)
    return tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def _normed(stream, weight, eps, C: tl.constexpr, C_: tl.constexpr):
    """The RMSNorm of the residual stream, weight already read."""
    cols = tl.arange(0, C_)
    x = tl.load(stream + cols, mask=cols < C, other=0.0, cache_modifier=".cg")
    return x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight


@triton.jit
def _project(stream, norm, weight, out, eps, counter, target, N: tl.constexpr, C: tl.constexpr, C_: tl.constexpr, R: tl.constexpr, GRID: tl.constexpr):
    """out [N] = W norm(x)."""
    EACH: tl.constexpr = (N + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, N)
    tile, norm_weight = _tile(weight, start, end, C, R, C_), _weights_of_norm(norm, C, C_)
    _wait(counter, target, GRID)
    x = _normed(stream, norm_weight, eps, C, C_)
    for i in tl.static_range(0, EACH, R):
        this, row = tile, start + i + tl.arange(0, R)
        if i + R < EACH:
            tile = _tile(weight, start + i + R, end, C, R, C_)
        tl.store(out + row, _times(this, x), mask=row < end)
    _announce(counter, GRID)


@triton.jit
def _halves(pointer, weight_a, weight_b, c, s, eps, D: tl.constexpr, HALF_: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr):
    """A head of qkv, finished: its halves [D/2]. A vector this short lies in every warp, and its sums need no shared memory."""
    half = tl.arange(0, HALF_)
    a = tl.load(pointer + half, mask=half < D // 2, other=0.0, cache_modifier=".cg")
    b = tl.load(pointer + half + D // 2, mask=half < D // 2, other=0.0, cache_modifier=".cg")
    return _finish(a, b, weight_a, weight_b, c, s, eps, D, NORM, True, NORM_LAST)


@triton.jit
def _source(k, v, layer, index, write, position, D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr):
    """(index, key's halves, value) of another layer for this token, from its place in the cache; zeros where `write` is 0 or the index is -1, no layer."""
    half, cols, some = tl.arange(0, HALF_), tl.arange(0, D_), tl.where(index >= 0, write, 0)
    place = index.to(tl.int64) * layer + position * D
    a = tl.load(k + place + half, mask=half < some // 2, other=0.0, cache_modifier=".cg")
    b = tl.load(k + place + half + D // 2, mask=half < some // 2, other=0.0, cache_modifier=".cg")
    return index, a, b, tl.load(v + place + cols, mask=cols < some, other=0.0, cache_modifier=".cg")


@triton.jit
def _attend(m, qkv, q_norm, k_norm, cos, sin, sources, cache, part, lse, position, max_len, eps, scale, counter, target, H: tl.constexpr, G: tl.constexpr,
            GROUP: tl.constexpr, GROUP_: tl.constexpr, D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr, N_: tl.constexpr, NORM: tl.constexpr,
            NORM_LAST: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, GRID: tl.constexpr):
    """
    Finishes the queries and the new key, mixes the new value over depth, writes both into the cache and attends: each KV head's parts of the cache
    by different programs. All that does not depend on this layer's qkv is read before the wait.
    """
    half, cols, member = tl.arange(0, HALF_), tl.arange(0, D_), tl.arange(0, GROUP_)[:, None]
    HALF: tl.constexpr = D // 2
    in_half, layer = half < HALF, max_len.to(tl.int64) * (2 * G * D)
    for i in tl.static_range(0, G * SPLITS, GRID):
        unit = tl.program_id(0) + i
        group, split = unit % G, unit // G
        own = split == 0  # this one has the new token besides its part
        write = tl.where(own, D, 0)
        first, end, _ = _part(position, split, BLOCK, SPLITS)
        rows = cache + group * max_len.to(tl.int64) * D  # this head's in layer 0
        k, v = rows + m * layer, rows + m * layer + layer // 2
        ka, kb, values = _cached(k, v, first, tl.where(split < SPLITS, end, 0), D, HALF_, D_, BLOCK)
        c, s = tl.load(cos + position * HALF + half, mask=in_half, other=0.0), tl.load(sin + position * HALF + half, mask=in_half, other=0.0)
        qwa, qwb, kwa, kwb = 1.0, 1.0, 1.0, 1.0
        if NORM:
            qwa, qwb = tl.load(q_norm + half, mask=in_half, other=0.0).to(tl.float32), tl.load(q_norm + half + HALF, mask=in_half, other=0.0).to(tl.float32)
            kwa, kwb = tl.load(k_norm + half, mask=in_half, other=0.0).to(tl.float32), tl.load(k_norm + half + HALF, mask=in_half, other=0.0).to(tl.float32)
        read = ()  # what Depth-Attention reads of earlier layers, which have written it in their turn
        for j in tl.static_range(N_):
            read = read + (_source(rows, rows + layer // 2, layer, tl.load(sources + m * N_ + j), write, position, D, HALF_, D_),)
        if i == 0:
            _wait(counter, target, GRID)
        q, here = qkv + (group * GROUP + member) * D + half[None, :], (member < GROUP) & in_half[None, :]
        qa, qb = tl.load(q, mask=here, other=0.0, cache_modifier=".cg"), tl.load(q + HALF, mask=here, other=0.0, cache_modifier=".cg")
        new_v = tl.load(qkv + (H + G + group) * D + cols, mask=cols < D, other=0.0, cache_modifier=".cg")
        new_a, new_b = _halves(qkv + (H + group) * D, kwa, kwb, c, s, eps, D, HALF_, NORM, NORM_LAST)
        if N_ > 0:  # the softmax over depth of model.depth_mix, source by source
            mean_a, mean_b = tl.zeros_like(new_a), tl.zeros_like(new_b)
            for j in tl.static_range(GROUP):
                a, b = _halves(qkv + (group * GROUP + j) * D, qwa, qwb, c, s, eps, D, HALF_, NORM, False)
                mean_a, mean_b = mean_a + a * (scale / GROUP), mean_b + b * (scale / GROUP)
            best, mass = tl.sum(mean_a * new_a + mean_b * new_b, 0), 1.0
            for j in tl.static_range(N_):
                index, a, b, value = read[j]
                score = tl.sum(mean_a * a.to(tl.float32) + mean_b * b.to(tl.float32), 0) + tl.where(index >= 0, 0.0, float("-inf"))
                better = tl.maximum(best, score)
                old, p = tl.exp(best - better), tl.exp(score - better)
                mass, new_v, best = mass * old + p, new_v * old + value.to(tl.float32) * p, better
            new_v = new_v / mass
        qa, qb = _finish(qa, qb, qwa, qwb, c[None, :], s[None, :], eps, D, NORM, True, False)
        tl.store(k + position * D + half, new_a.to(k.dtype.element_ty), mask=half < write // 2)
        tl.store(k + position * D + half + HALF, new_b.to(k.dtype.element_ty), mask=half < write // 2)
        tl.store(v + position * D + cols, new_v.to(k.dtype.element_ty), mask=cols < write)
        score = tl.sum(qa * new_a[None, :] + qb * new_b[None, :], 1) * scale
        top, total = score + tl.where(own, 0.0, float("-inf")), tl.full([GROUP_], 1.0, tl.float32) * tl.where(own, 1.0, 0.0)
        top, total, o = _over_cache(qa, qb, top, total, total[:, None] * new_v[None, :], ka, kb, values, k, v, first, tl.where(split < SPLITS, end, 0), scale,
                                    D, HALF_, D_, BLOCK)
        _store_part(part, lse, split, group, top, total, o, tl.where(split < SPLITS, GROUP, 0), H, GROUP, GROUP_, D, D_)
    _announce(counter, GRID)


@triton.jit
def _joined(part, lse, position, H: tl.constexpr, H_: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Attention's output [H_ D], from that of its splits."""
    _, _, n = _part(position, 0, BLOCK, SPLITS)
    split, head, cols = tl.arange(0, SPLITS)[:, None], tl.arange(0, H_)[None, :], tl.arange(0, D)[None, None, :]
    here = (split < n) & (head < H)
    o = tl.load(part + (split * H + head)[:, :, None] * D + cols, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
    score = tl.load(lse + split * H + head, mask=here, other=float("-inf"), cache_modifier=".cg")
    p = tl.exp(score - tl.maximum(tl.max(score, 0), -1e30)[None, :])  # heads behind the last have no score
    p = p / tl.maximum(tl.sum(p, 0), 1e-30)[None, :]
    return tl.reshape(tl.sum(p[:, :, None] * o, 0), (H_ * D,))


@triton.jit
def _add(tile, weight, x, stream, counter, N: tl.constexpr, K: tl.constexpr, K_: tl.constexpr, R: tl.constexpr, GRID: tl.constexpr):
    """stream [N] += W x, the first tile of this program's rows of W already read."""
    EACH: tl.constexpr = (N + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, N)
    for i in tl.static_range(0, EACH, R):
        this, row = tile, start + i + tl.arange(0, R)
        if i + R < EACH:
            tile = _tile(weight, start + i + R, end, K, R, K_)
        old = tl.load(stream + row, mask=row < end, other=0.0, cache_modifier=".cg")
        tl.store(stream + row, old + _times(this, x), mask=row < end)
    _announce(counter, GRID)


@triton.jit
def _gate_up(stream, norm, weight, hidden, eps, counter, target, I: tl.constexpr, C: tl.constexpr, C_: tl.constexpr, R: tl.constexpr, GRID: tl.constexpr):
    """hidden [I] = silu(gate) up of the MLP's input norm(x)."""
    EACH: tl.constexpr = (I + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, I)
    gate, up, norm_weight = _tile(weight, start, end, C, R, C_), _tile(weight + I * C, start, end, C, R, C_), _weights_of_norm(norm, C, C_)
    _wait(counter, target, GRID)
    x = _normed(stream, norm_weight, eps, C, C_)
    for i in tl.static_range(0, EACH, R):
        this_gate, this_up, row = gate, up, start + i + tl.arange(0, R)
        if i + R < EACH:
            gate, up = _tile(weight, start + i + R, end, C, R, C_), _tile(weight + I * C, start + i + R, end, C, R, C_)
        g, u = tl.split(tl.sum(tl.join(this_gate.to(tl.float32) * x[None, :], this_up.to(tl.float32) * x[None, :]), 1))  # one reduction for both
        tl.store(hidden + row, (g / (1 + tl.exp(-g)) * u).to(hidden.dtype.element_ty), mask=row < end)
    _announce(counter, GRID)


@triton.jit(do_not_specialize=["token", "position", "n_layers", "max_len", "V"])
def _token_kernel(token, position, table, sources, n_layers, embed, head, cos, sin, cache, max_len, stream, qkv, part, lse, hidden, logits, last_norm, counter, eps, V,
                  C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, GROUP_: tl.constexpr,
                  D: tl.constexpr, HALF_: tl.constexpr, D_: tl.constexpr, C_: tl.constexpr, O_: tl.constexpr, I_: tl.constexpr, N_: tl.constexpr,
                  NORM: tl.constexpr, NORM_LAST: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, R_QKV: tl.constexpr, R_OUT: tl.constexpr,
                  R_UP: tl.constexpr, R_DOWN: tl.constexpr, R_HEAD: tl.constexpr, LINES_QKV: tl.constexpr, LINES_OUT: tl.constexpr,
                  LINES_UP: tl.constexpr, LINES_DOWN: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, GRID: tl.constexpr):
    QKV: tl.constexpr = (H + 2 * G) * D
    EACH_QKV: tl.constexpr = (QKV + GRID - 1) // GRID
    EACH_C: tl.constexpr = (C + GRID - 1) // GRID
    EACH_I: tl.constexpr = (I + GRID - 1) // GRID
    me = tl.program_id(0)
    own = me * EACH_C
    own_end = tl.minimum(own + EACH_C, C)
    cols = tl.arange(0, C_)
    x = tl.load(embed + tl.load(token) * C + cols, mask=cols < C, other=0.0)
    tl.store(stream + cols, x.to(tl.float32), mask=cols < C)  # by every program, so that none has to wait for it
    tl.debug_barrier()
    target = 0
    for m in range(n_layers):
        row = table + m * 8
        attn_norm, mlp_norm, q_norm, k_norm = _pointer(row, 0, last_norm, 16), _pointer(row, 5, last_norm, 16), _pointer(row, 2, last_norm, 16), _pointer(row, 3, last_norm, 16)
        qkv_weight, out, gate_up, down = _pointer(row, 1, embed, 16), _pointer(row, 4, embed, 16), _pointer(row, 6, embed, 16), _pointer(row, 7, embed, 16)
        next_weight = _pointer(row, 9, embed, 16)  # the next layer's qkv, or the head
        _prefetch(out, own, C, H * D, EACH_C, LINES_OUT, PREFETCH)
        _project(stream, attn_norm, qkv_weight, qkv, eps, counter, target, QKV, C, C_, R_QKV, GRID)
        _prefetch(gate_up, me * EACH_I, 2 * I, C, EACH_I, LINES_UP, PREFETCH)
        _prefetch(gate_up, me * EACH_I + I, 2 * I, C, EACH_I, LINES_UP, PREFETCH)
        _attend(m, qkv, q_norm, k_norm, cos, sin, sources, cache, part, lse, position, max_len, eps, D ** -0.5, counter, target + GRID, H, G, GROUP, GROUP_,
                D, HALF_, D_, N_, NORM, NORM_LAST, BLOCK, SPLITS, GRID)
        tile = _tile(out, own, own_end, H * D, R_OUT, O_)
        _prefetch(down, own, C, I, EACH_C, LINES_DOWN, PREFETCH)
        _wait(counter, target + 2 * GRID, GRID)
        _add(tile, out, _joined(part, lse, position, H, O_ // D, D, BLOCK, SPLITS), stream, counter, C, H * D, O_, R_OUT, GRID)
        _prefetch(next_weight, me * EACH_QKV, QKV, C, EACH_QKV, LINES_QKV, PREFETCH)
        _gate_up(stream, mlp_norm, gate_up, hidden, eps, counter, target + 3 * GRID, I, C, C_, R_UP, GRID)
        tile, inner = _tile(down, own, own_end, I, R_DOWN, I_), tl.arange(0, I_)
        _wait(counter, target + 4 * GRID, GRID)
        h = tl.load(hidden + inner, mask=inner < I, other=0.0, cache_modifier=".cg").to(tl.float32)
        _add(tile, down, h, stream, counter, C, I, I_, R_DOWN, GRID)
        target += 5 * GRID
    norm_weight = _weights_of_norm(last_norm, C, C_)
    _wait(counter, target, GRID)
    x = _normed(stream, norm_weight, eps, C, C_)
    each = tl.cdiv(V, GRID)
    end = tl.minimum(me * each + each, V)
    for i in tl.range(0, each, R_HEAD, num_stages=STAGES):
        r = me * each + i + tl.arange(0, R_HEAD)
        tl.store(logits + r, _times(_tile(head, me * each + i, end, C, R_HEAD, C_), x), mask=r < end)
    if GRID > 1:  # whoever comes last leaves the counters as the next launch wants them: by then nobody waits any more
        if tl.atomic_add(counter + 1, 1, sem="acq_rel", scope="gpu") == GRID - 1:
            tl.store(counter, 0)
            tl.store(counter + 1, 0)


class Token:
    """The launch of `_token_kernel` for a model, its weights (a dict by name) and its cache [M,2,1,G,max_len,D]. Called with a token [1], it gives [1,V]."""

    def __init__(self, model, weights, cache, programs, **settings):
        c, tune = model.config, SETTINGS | settings
        M, G, H, D = len(model.order), c.n_kv_head, c.n_head, c.head_dim
        device, self.weights, self.cache, self.programs = cache.device, weights, cache, programs  # the table holds addresses only, so the weights are kept here
        parts = ("attn_norm", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.out", "mlp_norm", "mlp.gate_up", "mlp.down")
        find = lambda l: [weights[name].data_ptr() if (name := f"layers.{l}.{part}.weight") in weights else 0 for part in parts]
        self.embed, self.norm, self.head = weights["embed.weight"], weights["norm.weight"], weights["embed.weight" if model.lm_head is None else "lm_head.weight"]
        rows = [find(l) for l in model.order]
        qkv = (H + 2 * G) * D
        rows.append([0, self.head.data_ptr() if c.vocab_size >= qkv else rows[-1][1], *[0] * 6])  # what is prefetched behind the last layer
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        candidates = getattr(model.depth, "candidates", [[]] * M)
        n = max(map(len, candidates))
        self.sources = torch.tensor([s + [-1] * (n - len(s)) for s in candidates], dtype=torch.int32, device=device) if n else None
        self.cos, self.sin = model.cos, model.sin
        wide = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)
        self.stream, self.qkv, self.part, self.lse, self.logits = wide(c.n_embd), wide(qkv), wide(SPLITS, H, D), wide(SPLITS, H), wide(1, c.vocab_size)
        self.hidden = cache.new_empty(c.n_inner)
        self.counter = torch.zeros(2, dtype=torch.int32, device=device)

        C_, O_, I_ = _power_of_2(c.n_embd), _power_of_2(H) * D, _power_of_2(c.n_inner)
        rows_of = lambda n, width, tiles=1: max(1, min(_power_of_2(_ceil_div(n, programs)), tune["tile"] // (tiles * width)))
        lines = lambda n, k: _power_of_2(_ceil_div(_ceil_div(n, programs) * k * cache.element_size(), 128))
        self.shapes = _head_shapes(H, G, D) | dict(
            C=c.n_embd, H=H, G=G, I=c.n_inner, C_=C_, O_=O_, I_=I_, N_=n, NORM=c.qk_norm == "head", NORM_LAST=c.k_norm_after_rope,
            R_QKV=rows_of(qkv, C_), R_OUT=rows_of(c.n_embd, O_), R_UP=rows_of(c.n_inner, C_, 2), R_DOWN=rows_of(c.n_embd, I_), R_HEAD=max(1, tune["tile"] // C_),
            LINES_QKV=lines(qkv, c.n_embd), LINES_OUT=lines(c.n_embd, H * D), LINES_UP=lines(c.n_inner, c.n_embd), LINES_DOWN=lines(c.n_embd, c.n_inner),
            STAGES=tune["stages"], PREFETCH=tune["prefetch"] and programs > 1, GRID=programs)
        self.options = dict(num_warps=tune["warps"], launch_cooperative_grid=True) if programs > 1 else {}  # cooperative: all programs run at once, or an error
        self.eps, self.layers, self.max_len, self.vocab_size = c.norm_eps, M, cache.shape[4], c.vocab_size

    def __call__(self, token, position):
        _token_kernel[(self.programs,)](token, position, self.table, self.sources, self.layers, self.embed, self.head, self.cos, self.sin, self.cache, self.max_len,
                                        self.stream, self.qkv, self.part, self.lse, self.hidden, self.logits, self.norm, self.counter, self.eps, self.vocab_size,
                                        **self.shapes, **self.options)
        return self.logits


def one_launch(model, batch):
    """Whether `_token_kernel` computes this model's tokens."""
    c = model.config
    sources = max(map(len, getattr(model.depth, "candidates", [[]])))
    return (batch == 1 and sources <= SOURCES and c.connector == "residual" and c.depth in ("none", "depth_attention") and c.norm_order == "pre" and c.qk_norm != "full"
            and c.head_dim == _power_of_2(c.head_dim) and max(c.n_embd, c.n_head * c.head_dim, c.n_inner) <= SETTINGS["tile"])


# ----------------------------------------------------------------------------------------------------------------------
# generation

class Decoder:
    """
    A model's cache for `batch` sequences of up to max_len tokens, its weights in the dtype of the matmuls, and what gives a token's logits. Keeps no
    reference to the model, so that both can be freed together.
    """

    def __init__(self, model, batch, max_len, dtype):
        c, device = model.config, model.embed.weight.device
        self.batch, self.max_len, self.dtype, self.places = batch, max_len, dtype, addresses(model)
        self.cache = torch.zeros(len(model.order), 2, batch, c.n_kv_head, max_len, c.head_dim, device=device, dtype=dtype)
        self.weights = {name: p.detach().to(dtype) if is_matrix(name, p) else p.detach() for name, p in model.named_parameters()}
        self.length, self.graph = 0, None
        self.token, self.position = torch.zeros(batch, 1, device=device, dtype=torch.int64), torch.zeros(1, device=device, dtype=torch.int64)
        self.launch = Token(model, self.weights, self.cache, programs_of(device)) if one_launch(model, batch) else None

    def fits(self, model, batch, max_len, dtype):
        return (self.batch, self.dtype, self.places) == (batch, dtype, addresses(model)) and self.max_len >= max_len

    def refresh(self, model):
        """Copies the parameters anew, which may have been trained since."""
        pairs = [(self.weights[name], p.detach()) for name, p in model.named_parameters() if self.weights[name].data_ptr() != p.data_ptr()]
        if pairs:
            torch._foreach_copy_(*map(list, zip(*pairs)))

    def read(self, model, idx):
        """The logits [B,V] behind the tokens idx [B,T], from which the cache starts anew."""
        cache = KVCache(model.config, self.max_len)
        for slot, (k, v) in zip(cache.slots, self.cache):
            slot.k, slot.v = k, v
        logits = model(idx, cache=cache, last_only=True)[0][:, -1]
        self.length = cache.length
        self.position.fill_(self.length)
        return logits

    def step(self, model, token):
        """The logits [B,V] behind one more token [B]."""
        self.length += 1
        if self.launch:
            return self.launch(token, self.length - 1)
        self.token.copy_(token[:, None])
        if not token.is_cuda:
            return self.forward(model)
        if self.graph is None:
            self.capture(model)
        self.graph.replay()
        return self.logits

    def forward(self, model):
        """One token through model.py's layers. To them it stands at 0 of RoPE's tables, which are one row here: that of its position."""
        tables = {name: getattr(model, name).index_select(0, self.position) for name in ("cos", "sin")}
        cache = types.SimpleNamespace(length=0, slots=[Slot(k, v, self.position) for k, v in self.cache])
        logits = torch.func.functional_call(model, self.weights | tables, (self.token,), {"cache": cache})[0][:, -1]
        self.position += 1
        return logits

    def capture(self, model):
        """Records `forward`. It runs a few times before, which compiles kernels and leaves entries behind the cache's end: they are overwritten."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.forward(model)
                self.position -= 1
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.forward(model)


def is_matrix(name, p):
    """Whether a parameter is one that the matmuls read, and autocast would cast for each of them."""
    return p.ndim == 2 and name.startswith(("embed.", "layers.", "lm_head."))


def addresses(model):
    return tuple(p.data_ptr() for p in model.parameters())


def programs_of(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_decoders = weakref.WeakKeyDictionary()  # the last one of each model: its graph and its weights serve the next call


def decoder_for(model, batch, max_len):
    device = model.embed.weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.embed.weight.dtype
    decoder = _decoders.get(model)
    if decoder and decoder.fits(model, batch, max_len, dtype):
        decoder.refresh(model)
        return decoder
    _decoders.pop(model, None)
    decoder = None  # before the next one asks for memory
    _decoders[model] = Decoder(model, batch, min(model.config.block_size, 256 * _ceil_div(max_len, 256)), dtype)
    return _decoders[model]


@torch.no_grad()
def generate(model, idx, max_new_tokens, draw, stop_token=None):
    """GPT.generate for a model on a GPU. draw: logits [B,V] -> tokens [B], all on the GPU. Whether all rows have ended is looked up seldom."""
    (B, T), block = idx.shape, model.config.block_size
    out = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)
    done, begin, end = torch.zeros(B, dtype=torch.bool, device=idx.device), None, T
    decoder = decoder_for(model, B, min(block, T + max_new_tokens))
    while end < T + max_new_tokens:
        start = window_start(end, block)
        logits = decoder.read(model, out[:, start:end]) if start != begin else decoder.step(model, out[:, end - 1])
        token, begin = draw(logits), start
        if stop_token is not None:
            token = token.where(~done, stop_token)
            done |= token == stop_token
        out[:, end] = token
        end += 1
        if stop_token is not None and (end - T) % LOOK == 0 and done.all():
            break
    if stop_token is not None:
        ended = (out[:, T:end] == stop_token).cumsum(1).bool().all(0).tolist()
        end = T + ended.index(True) + 1 if True in ended else end
    return out[:, :end]
