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

# Launch settings of _token_kernel on an H200. tile: numbers of a weight matrix in a tile; hold: tiles of that size that are read before waiting;
# block, splits: as BLOCK and SPLITS, which are those of the kernel in the recorded graph.
SETTINGS = dict(warps=8, tile=16384, hold=3, prefetch=True, block=64, splits=8)
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
# As many programs as the GPU has multiprocessors stay for the whole token. Each has its own rows of every matrix, and five times a layer each needs what
# the others have computed. A layer's weights at full bandwidth take five microseconds, so these five ways from program to program are what limits,
# and there is no barrier on them: a number travels as a word that holds its tag besides it, written at once and read until the tag is the awaited one.
# That costs one way to the L2 cache and one back, where a barrier costs a fence, an atomic, a poll and then a load. The tag is the layer's, counted
# on over all tokens. No word is overwritten too early: a program that reads one writes, in the same step of the layer, something that the word's next
# writer waits for, if only through others; therefore programs without rows in a step read nothing there.
#
# What does not depend on other programs is read before waiting: weights into registers, and those of the step after into L2. A tile of weights is
# [rows, parts, columns of a part], so that each row lies within one warp, and its sum needs no shared memory.

@triton.constexpr_function
def _parts(K):
    """(columns of a part, parts as a power of 2, of these in the first tile, in the second) for rows of K numbers."""
    width = min(256, triton.next_power_of_2(K))
    parts = (K + width - 1) // width
    first = triton.next_power_of_2(parts + 1) // 2
    return width, triton.next_power_of_2(parts), first, triton.next_power_of_2(parts - first) if parts > first else 0


# PTX: read again until every word has its tag; after seconds of that, trap instead of waiting for ever
_AGAIN = tl.constexpr("add.u32 tries, tries, 1; setp.gt.u32 go, tries, 4000000; @go trap; setp.ne.b32 go, left, 0; @go bra AGAIN;")


@triton.constexpr_function
def _receive(loads, pointers, pack):
    """
    PTX that reads words until all have their tags: see `_received`. A load is (pointer, offset in bytes, bytes of a word, n): it is made where the last
    operand is above n, and everywhere with n = -1; elsewhere its number is 0.
    """
    out, tag = len(loads) * pack, (len(loads) + pointers) * pack
    wide = [load[2] == 8 for load in loads for _ in range(pack)]
    which = [load[3] for load in loads for _ in range(pack)]
    at = [f"[${out + load[0] * pack + e}+{load[1]}]" for load in loads for e in range(pack)]
    body = [f".reg .pred go, on<{out}>; .reg .b32 left, tries; .reg .b64 w<{out}>; .reg .b32 u<{out}>, v<{out}>, t<{out}>;", "mov.b32 tries, 0;"]
    asked = [i for i in range(out) if which[i] >= 0]
    body += [f"setp.gt.s32 on{i}, ${tag + 2 * pack + i % pack}, {which[i]}; " + (f"mov.b64 w{i}, {{0, ${tag}}};" if wide[i] else f"mov.b32 u{i}, ${tag + pack};") for i in asked]
    body += ["AGAIN:", "mov.b32 left, 0;"]
    body += [(f"@on{i} " if i in asked else "") + (f"ld.relaxed.gpu.global.b64 w{i}, {at[i]};" if wide[i] else f"ld.relaxed.gpu.global.b32 u{i}, {at[i]};") for i in range(out)]
    body += [(f"mov.b64 {{v{i}, t{i}}}, w{i}; xor.b32 t{i}, t{i}, ${tag};" if wide[i] else
              f"and.b32 v{i}, u{i}, 0xffff0000; and.b32 t{i}, u{i}, 0xffff; xor.b32 t{i}, t{i}, ${tag + pack};") + f" or.b32 left, left, t{i};" for i in range(out)]
    return "{" + "\n".join(body + [_AGAIN.value] + [f"mov.b32 ${i}, v{i};" for i in range(out)]) + "}"


@triton.constexpr_function
def _receive_heads(queries, D, threads):
    """PTX that reads the words of queries, a key and a value, each by one thread, and gives all threads their numbers (as halves) through shared memory."""
    words, outputs = (queries + 2) * D, 2 * queries + 4
    each, q = -(-words // threads), outputs
    k, half, tag = q + 1, q + 2, q + 3
    body = [f".shared .align 16 .b32 heads[{words}]; .reg .pred on<{each}>, go; .reg .b64 w<{each}>, a<{each}>, o;",
            f".reg .b32 id, i<{each}>, left, tries, base, at, v<{each}>, t<{each}>;", "mov.u32 id, %tid.x; mov.u32 base, heads; mov.b32 tries, 0;"]
    for j in range(each):
        body += [f"add.u32 i{j}, id, {j * threads}; setp.lt.u32 on{j}, i{j}, {words}; mov.b64 w{j}, {{0, ${tag}}}; setp.lt.u32 go, i{j}, {queries * D};",
                 f"selp.b64 o, ${q}, ${k}, go; selp.b32 left, 0, {queries * D}, go; sub.u32 left, i{j}, left; mad.wide.u32 a{j}, left, 8, o;"]
    body += ["AGAIN:", "mov.b32 left, 0;"]
    body += [f"@on{j} ld.relaxed.gpu.global.b64 w{j}, [a{j}];" for j in range(each)]
    body += [f"mov.b64 {{v{j}, t{j}}}, w{j}; xor.b32 t{j}, t{j}, ${tag}; or.b32 left, left, t{j};" for j in range(each)]
    body += [_AGAIN.value] + [f"mad.lo.u32 at, i{j}, 4, base; @on{j} st.shared.b32 [at], v{j};" for j in range(each)]
    body += ["bar.sync 0;", f"mad.lo.u32 at, ${half}, 4, base;"] + [f"ld.shared.b32 ${n}, [at+{2 * D * n}];" for n in range(outputs)]
    return "{" + "\n".join(body) + "}"


@triton.constexpr_function
def _constraints(outputs, pointers, pack):
    return ",".join(["=r"] * (outputs * pack) + ["l"] * (pointers * pack) + ["r"] * (3 * pack))


@triton.constexpr_function
def _constraints_heads(outputs):
    return ",".join(["=r"] * outputs + ["l", "l", "r", "r"])


@triton.constexpr_function
def _plain(size, masked):
    return [(0, 0, size, 0 if masked else -1)]


@triton.constexpr_function
def _four(size, H, D, copies):
    """Of four splits, a word of the output and one of the log-sum-exp."""
    return [(0, s * H * D * size, size, s) for s in range(4)] + [(1, s * H * 8 * copies, 8, s) for s in range(4)]


@triton.constexpr_function
def _copies(D):
    """Copies of a log-sum-exp, so that not all programs poll the same word; at most a warp's worth, since one warp stores them."""
    return min(32, D // 2)


@triton.constexpr_function
def _pack(numbers, threads):
    """Numbers that a thread reads at once."""
    return max(1, min(16, numbers // threads))


@triton.constexpr_function
def _store(size, once):
    only = ".reg .b32 id; mov.u32 id, %tid.x; setp.lt.and.u32 on, id, 32, on; " if once else ""
    return f"{{.reg .pred on; setp.ne.b32 on, $3, 0; {only}@on st.relaxed.gpu.global.b{8 * size} [$1], $2; mov.b32 $0, 0;}}"


@triton.constexpr_function
def _load(kind):
    """PTX that reads a number as float32."""
    return {"fp32": "ld.global.b32 $0, [$1];", "bf16": "{.reg .b16 h, z; mov.b16 z, 0; ld.global.b16 h, [$1]; mov.b32 $0, {z, h};}",
            "fp16": "{.reg .b16 h; ld.global.b16 h, [$1]; cvt.f32.f16 $0, h;}"}[kind]


@triton.jit
def _small(tag):
    return 1 + tag % 65535  # of words of 4 bytes


@triton.jit
def _send(words, place, value, tag, mask, GRID: tl.constexpr, ALIKE: tl.constexpr = False):
    """
    Stores numbers as words: float32 and its tag in 8 bytes, or bfloat16 and its tag in 4. A store of that size arrives whole. ALIKE: all warps have all
    the numbers, and one stores them.
    """
    SIZE: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // 8
    if words.dtype.element_ty == tl.int64:
        word = (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (tag.to(tl.int64) << 32)
    else:
        word = (value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | _small(tag)
    if GRID == 1:
        tl.store(words + place, word, mask=mask)
    else:  # not tl.store, for which numbers would first be spread over the threads in order, through shared memory
        tl.inline_asm_elementwise(_store(SIZE, ALIKE), "=r,l,l,r" if SIZE == 8 else "=r,l,r,r", [(words + place).to(tl.int64), word, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _number(words, mask):
    """The numbers in words that have long been there."""
    word = tl.load(words, mask=mask, other=0, cache_modifier=".cg")
    if words.dtype.element_ty == tl.int64:
        return (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _received(words, K: tl.constexpr, tag, THREADS: tl.constexpr, GRID: tl.constexpr):
    """K numbers, once all are there, as [parts, columns], zeros behind the last."""
    WIDTH: tl.constexpr = _parts(K)[0]
    PARTS: tl.constexpr = _parts(K)[1]
    SIZE: tl.constexpr = words.dtype.element_ty.primitive_bitwidth // 8
    PACK: tl.constexpr = _pack(PARTS * WIDTH, THREADS)
    cols = tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    MASKED: tl.constexpr = PARTS * WIDTH > K  # all programs asking for the last word over and over would be slow
    place = words + tl.minimum(cols, K - 1)
    if GRID == 1:
        x = _number(place, cols < K)
    else:
        x, turn = tl.zeros([PARTS, WIDTH], tl.float32), 0
        while turn < 1:  # only so that Triton does not read a second time what it wants in another layout
            x = tl.inline_asm_elementwise(_receive(_plain(SIZE, MASKED), 1, PACK), _constraints(1, 1, PACK), [place, tag, _small(tag), (cols < K).to(tl.int32)],
                                          dtype=tl.float32, is_pure=False, pack=PACK)
            turn += 1
    return x


@triton.jit
def _prefetch(weight, row, rows, N: tl.constexpr, K: tl.constexpr, ON: tl.constexpr):
    """Asks for rows of a matrix [N, K], from `row` on, without waiting for them: they come into the L2 cache. One thread asks for all."""
    SIZE: tl.constexpr = K * weight.dtype.element_ty.primitive_bitwidth // 8
    if ON and SIZE % 16 == 0:  # else a row may begin where no such request can
        size = tl.maximum(tl.minimum(row + rows, N) - row, 0) * SIZE
        tl.inline_asm_elementwise("{.reg .pred one; .reg .b32 id; mov.u32 id, %tid.x; setp.eq.u32 one, id, 0; setp.ne.and.b32 one, $2, 0, one; "
                                  "@one cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}", "=r,l,r", [weight + row.to(tl.int64) * K, size],
                                  dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _prefetch_cache(m, cache, position, max_len, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, ON: tl.constexpr):
    """Asks for the part of a layer's cache that this program will read, where that is more than the block that it reads before waiting."""
    head, split = tl.program_id(0) % H, tl.program_id(0) // H
    first, end, n = _part(position, split, BLOCK, SPLITS)
    rows = tl.where((head % (H // G) == 0) & (split < n) & (end > first + BLOCK), end - first, 0)  # one for all heads that share it
    k = cache + (m * (2 * G) + head // (H // G)).to(tl.int64) * max_len * D
    _prefetch(k, first, rows, 2**30, D, ON)
    _prefetch(k + max_len.to(tl.int64) * (G * D), first, rows, 2**30, D, ON)


@triton.jit
def _some(weight, row, end, K: tl.constexpr, R: tl.constexpr, FROM: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    r, part, col = tl.arange(0, R)[:, None, None], tl.arange(0, PARTS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    col = (part + FROM) * WIDTH + col
    return tl.load(weight + row.to(tl.int64) * K + (r * K + col), mask=(row + r < end) & (col < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def _tile(weight, row, end, K: tl.constexpr, R: tl.constexpr):
    """Rows row..row+R of a matrix [*, K] as one or two tiles [R, parts, columns]; zeros from the row `end` on."""
    WIDTH: tl.constexpr = _parts(K)[0]
    FIRST: tl.constexpr = _parts(K)[2]
    SECOND: tl.constexpr = _parts(K)[3]
    if SECOND > 0:
        return _some(weight, row, end, K, R, 0, FIRST, WIDTH), _some(weight, row, end, K, R, FIRST, SECOND, WIDTH)
    else:
        return (_some(weight, row, end, K, R, 0, FIRST, WIDTH),)


@triton.jit
def _halved(x):
    """[parts, columns] -> its first and its second half of the parts."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def _as_tiles(x, K: tl.constexpr):
    """[parts, columns] cut as `_tile` cuts rows."""
    SECOND: tl.constexpr = _parts(K)[3]
    if SECOND > 0:
        first, second = _halved(x)
        for _halving in tl.static_range(8):
            if second.shape[0] > SECOND:
                second, _ = _halved(second)
        return first, second
    else:
        return (x,)


@triton.jit
def _times(tiles, x):
    """[R]: the tiles' rows times x."""
    y = tl.sum(tiles[0].to(tl.float32) * x[0].to(tl.float32)[None, :, :], 1)
    if len(tiles) > 1:
        y += tl.sum(tiles[1].to(tl.float32) * x[1].to(tl.float32)[None, :, :], 1)
    return tl.sum(y, 1)


@triton.jit
def _norm_weight(weight, C: tl.constexpr, GRID: tl.constexpr):
    KIND: tl.constexpr = weight.dtype.element_ty.name
    cols = tl.arange(0, _parts(C)[1])[:, None] * _parts(C)[0] + tl.arange(0, _parts(C)[0])[None, :]
    if GRID == 1:
        return tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    else:  # in the layout of what `_received` gives
        return tl.inline_asm_elementwise(_load(KIND), "=r,l", [(weight + tl.minimum(cols, C - 1)).to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _rounded(x, like):
    """What all threads read from shared memory, in half the bytes where the matmuls of model.py round it as well."""
    return x.to(tl.bfloat16) if like.dtype.element_ty == tl.bfloat16 else x


@triton.jit
def _weighted(outer, norm_weight, like, eps, tag, C: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """The residual stream times the norm's weights, as tiles, and the factor that is missing to RMSNorm."""
    x = _received(outer, C, tag, THREADS, GRID)
    return _as_tiles(_rounded(x * norm_weight, like), C), tl.rsqrt(tl.sum(tl.sum(x * x, 0), 0) / C + eps)


@triton.jit
def _project(outer, norm, weight, qkv, eps, tag, N: tl.constexpr, C: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
             R: tl.constexpr, HOLD: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """qkv = W norm(x), written as [G, GROUP queries, a key and a value, D]."""
    EACH: tl.constexpr = (N + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, N)
    if start < N:
        tiles, norm_weight = (), _norm_weight(norm, C, GRID)
        for i in tl.static_range(0, EACH, R):
            if i < HOLD * R:
                tiles = tiles + (_tile(weight, start + i, end, C, R),)
        x, factor = _weighted(outer, norm_weight, weight, eps, tag, C, THREADS, GRID)
        for i in tl.static_range(0, EACH, R):
            if i + HOLD * R < EACH:
                tiles = tiles + (_tile(weight, start + i + HOLD * R, end, C, R),)
            row = start + i + tl.arange(0, R)
            head = row // D
            rest = head - G * GROUP  # a key's or a value's, from 0 on
            head = tl.where(rest < 0, head // GROUP * (GROUP + 2) + head % GROUP, rest % G * (GROUP + 2) + GROUP + rest // G)
            _send(qkv, head * D + row % D, _times(tiles[i // R], x) * factor, tag, row < end, GRID)


@triton.jit
def _halves(k, v, at, end, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values, each as halves [BLOCK, D/2], of the cached tokens from `at` on; zeros from `end` on."""
    token, half = at + tl.arange(0, BLOCK)[:, None], tl.arange(0, D // 2)[None, :]
    place, here = token * D + half, token < end
    return (tl.load(k + place, mask=here, other=0.0), tl.load(k + place + D // 2, mask=here, other=0.0),
            tl.load(v + place, mask=here, other=0.0), tl.load(v + place + D // 2, mask=here, other=0.0))


@triton.jit
def _new_heads(q_at, k_at, half, tag, QUERIES: tl.constexpr, D: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """The new token's queries, key and value, once all are there, each as two halves of float32."""
    HALF: tl.constexpr = D // 2
    if GRID > 1:
        x, turn = (tl.zeros([HALF], tl.float32),) * (2 * QUERIES + 4), 0
        while turn < 1:  # as in _received
            x = tl.inline_asm_elementwise(_receive_heads(QUERIES, D, THREADS), _constraints_heads(2 * QUERIES + 4),
                                          [(q_at - half).to(tl.int64), (k_at - half).to(tl.int64), half, tag], dtype=(tl.float32,) * (2 * QUERIES + 4), is_pure=False, pack=1)
            turn += 1
    else:
        x = ()
        for j in tl.static_range(2 * QUERIES):
            x = x + (_number(q_at + j * HALF, half < HALF),)
        for j in tl.static_range(4):
            x = x + (_number(k_at + j * HALF, half < HALF),)
    return x


@triton.jit
def _sources(rows, sources, m, layer, position, own, N_: tl.constexpr, D: tl.constexpr):
    """Of each source of layer m its number, -1 for none, and the halves of its key and value at the token's position."""
    HALF: tl.constexpr = D // 2
    half, read = tl.arange(0, HALF), ()
    for j in tl.static_range(N_):
        index = tl.load(sources + m * N_ + j)
        place, here = rows + index.to(tl.int64) * layer + position * D + half, half < tl.where(own & (index >= 0), HALF, 0)
        read = read + ((index, tl.load(place, mask=here, other=0.0, cache_modifier=".cg"), tl.load(place + HALF, mask=here, other=0.0, cache_modifier=".cg"),
                        tl.load(place + layer // 2, mask=here, other=0.0, cache_modifier=".cg"),
                        tl.load(place + layer // 2 + HALF, mask=here, other=0.0, cache_modifier=".cg")),)
    return read


@triton.jit
def _mixed(mean_a, mean_b, ka, kb, va, vb, read, N_: tl.constexpr):
    """The value of model.depth_mix: the softmax over depth of the mean query, which is scaled, with the own key and the sources'."""
    best = tl.sum(mean_a * ka + mean_b * kb, 0)
    scores, top_score = (best,), best
    for j in tl.static_range(N_):  # all the sums first: they do not wait for each other
        index, a, b, ua, ub = read[j]
        depth_score = tl.sum(mean_a * a.to(tl.float32) + mean_b * b.to(tl.float32), 0)
        scores = scores + (tl.where(index >= 0, depth_score, float("-inf")),)
        top_score = tl.maximum(top_score, scores[j + 1])
    mass = tl.exp(best - top_score)
    va, vb = va * mass, vb * mass
    for j in tl.static_range(N_):
        index, a, b, ua, ub = read[j]
        e = tl.exp(scores[j + 1] - top_score)
        mass, va, vb = mass + e, va + ua.to(tl.float32) * e, vb + ub.to(tl.float32) * e
    return va / mass, vb / mass


@triton.jit
def _attention_to_part(qa, qb, k, v, tiles, new_score, new_va, new_vb, first, end, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """Attention to the cache from `first` to `end`, whose first tiles are there, and to the new token: (halves of the output, log-sum-exp)."""
    # a softmax for each place in the block, so that nothing crosses warps before the end
    ka, kb, va, vb = tiles
    top, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    oa, ob = tl.zeros([BLOCK, D // 2], tl.float32), tl.zeros([BLOCK, D // 2], tl.float32)
    for t in range(first, end, BLOCK):
        next_ka, next_kb, next_va, next_vb = _halves(k, v, t + BLOCK, end, D, BLOCK)
        score = tl.sum(qa[None, :] * ka.to(tl.float32) + qb[None, :] * kb.to(tl.float32), 1) * scale
        new_top = tl.maximum(top, tl.where(t + tl.arange(0, BLOCK) < end, score, -1e30))
        old, p = tl.exp(top - new_top), tl.where(t + tl.arange(0, BLOCK) < end, tl.exp(score - new_top), 0.0)
        total = total * old + p
        oa, ob = oa * old[:, None] + p[:, None] * va.to(tl.float32), ob * old[:, None] + p[:, None] * vb.to(tl.float32)
        top, ka, kb, va, vb = new_top, next_ka, next_kb, next_va, next_vb
    best = tl.maximum(tl.max(top, 0), new_score)
    share = tl.exp(top - best)
    oa, ob = tl.split(tl.sum(tl.join(oa * share[:, None], ob * share[:, None]), 0))  # one reduction for both
    p = tl.exp(new_score - best)
    total, oa, ob = tl.sum(total * share, 0) + p, oa + p * new_va, ob + p * new_vb
    return oa / total, ob / total, best + tl.log(total)


@triton.jit
def _attend(m, qkv, q_norm, k_norm, cos, sin, sources, cache, part, lse, position, max_len, eps, scale, tag, H: tl.constexpr, G: tl.constexpr,
            GROUP: tl.constexpr, D: tl.constexpr, N_: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, BLOCK: tl.constexpr,
            SPLITS: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """
    Attention of a head to one part of the cache. A head's first part has the new token besides: its program finishes the key, mixes the value over depth
    and writes both into the cache. All heads that share them write the same, so that a program reads, as sources in later layers, what it has
    written itself.
    """
    HALF: tl.constexpr = D // 2
    half, layer = tl.arange(0, HALF), max_len.to(tl.int64) * (2 * G * D)
    for i in tl.static_range(0, H * SPLITS, GRID):
        unit = tl.program_id(0) + i
        head, split = unit % H, unit // H
        group = head // GROUP
        own = split == 0
        first, end, n = _part(position, split, BLOCK, SPLITS)
        if split < n:
            rows = cache + group * max_len.to(tl.int64) * D  # this head's in layer 0
            k, v = rows + m * layer, rows + m * layer + layer // 2
            tiles = _halves(k, v, first, end, D, BLOCK)
            c, s = tl.load(cos + position * HALF + half), tl.load(sin + position * HALF + half)
            qwa, qwb, kwa, kwb = 1.0, 1.0, 1.0, 1.0
            if NORM:
                qwa, qwb = tl.load(q_norm + half).to(tl.float32), tl.load(q_norm + half + HALF).to(tl.float32)
                kwa, kwb = tl.load(k_norm + half).to(tl.float32), tl.load(k_norm + half + HALF).to(tl.float32)
            read = _sources(rows, sources, m, layer, position, own, N_, D)
            QUERIES: tl.constexpr = GROUP if N_ > 0 else 1  # Depth-Attention takes the mean of the group's
            at = qkv + group * ((GROUP + 2) * D) + half
            x = _new_heads(at if N_ > 0 else at + head % GROUP * D, at + GROUP * D, half, tag, QUERIES, D, THREADS, GRID)
            new_ka, new_kb = _finish(x[2 * QUERIES], x[2 * QUERIES + 1], kwa, kwb, c, s, eps, D, NORM, True, NORM_LAST)
            new_va, new_vb = x[2 * QUERIES + 2], x[2 * QUERIES + 3]
            qa, qb = _finish(x[0], x[1], qwa, qwb, c, s, eps, D, NORM, True, False)
            if N_ > 0:
                mean_a, mean_b = qa, qb
                for j in tl.static_range(1, GROUP):
                    a, b = _finish(x[2 * j], x[2 * j + 1], qwa, qwb, c, s, eps, D, NORM, True, False)
                    mean_a, mean_b = mean_a + a, mean_b + b
                    qa, qb = tl.where(head % GROUP == j, a, qa), tl.where(head % GROUP == j, b, qb)
                new_va, new_vb = _mixed(mean_a * (scale / GROUP), mean_b * (scale / GROUP), new_ka, new_kb, new_va, new_vb, read, N_)
            new_score = tl.where(own, tl.sum(qa * new_ka + qb * new_kb, 0) * scale, float("-inf"))
            oa, ob, sums = _attention_to_part(qa, qb, k, v, tiles, new_score, new_va, new_vb, first, end, scale, D, BLOCK)
            place, copies = (split * H + head) * D + half, tl.arange(0, _copies(D))
            ALIKE: tl.constexpr = D <= 256  # up to there the warps divide the block's rows among them, and each has the sums of all
            _send(part, place, oa, tag, half < HALF, GRID, ALIKE)
            _send(part, place + HALF, ob, tag, half < HALF, GRID, ALIKE)
            _send(lse, (split * H + head) * _copies(D) + copies, sums, tag, copies < _copies(D), GRID, True)
            write, place = half < tl.where(own, HALF, 0), position * D + half
            tl.store(k + place, new_ka.to(k.dtype.element_ty), mask=write)
            tl.store(k + place + HALF, new_kb.to(k.dtype.element_ty), mask=write)
            tl.store(v + place, new_va.to(k.dtype.element_ty), mask=write)
            tl.store(v + place + HALF, new_vb.to(k.dtype.element_ty), mask=write)


@triton.jit
def _joined(part, lse, position, tag, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """Attention's output as [parts, columns], from that of its splits, four at a time."""
    WIDTH: tl.constexpr = _parts(H * D)[0]
    PARTS: tl.constexpr = _parts(H * D)[1]
    SIZE: tl.constexpr = part.dtype.element_ty.primitive_bitwidth // 8
    PACK: tl.constexpr = min(4, _pack(PARTS * WIDTH, THREADS))
    _, _, n = _part(position, 0, BLOCK, SPLITS)
    cols = tl.arange(0, PARTS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = tl.minimum(cols, H * D - 1)
    top, total, o = tl.full([PARTS, WIDTH], float("-inf"), tl.float32), tl.zeros([PARTS, WIDTH], tl.float32), tl.zeros([PARTS, WIDTH], tl.float32)
    COPIES: tl.constexpr = _copies(D)
    mine = place // D * COPIES + tl.program_id(0) % COPIES
    for first in range(0, n, 4):
        o_at, lse_at, left = part + first * (H * D) + place, lse + first * (H * COPIES) + mine, n - first
        if GRID > 1:
            x = tl.inline_asm_elementwise(_receive(_four(SIZE, H, D, COPIES), 2, PACK), _constraints(8, 2, PACK),
                                          [o_at.to(tl.int64), lse_at.to(tl.int64), tag, _small(tag), tl.where(cols < H * D, left, 0)], dtype=(tl.float32,) * 8, is_pure=False, pack=PACK)
        else:
            x = ()
            for s in tl.static_range(4):
                x = x + (_number(o_at + s * (H * D), cols < tl.where(s < left, H * D, 0)),)
            for s in tl.static_range(4):
                x = x + (_number(lse_at + s * (H * COPIES), cols < tl.where(s < left, H * D, 0)),)
        new_top = top
        for s in tl.static_range(4):
            new_top = tl.maximum(new_top, tl.where(s < left, x[4 + s], float("-inf")))
        old = tl.exp(top - new_top)
        total, o, top = total * old, o * old, new_top
        for s in tl.static_range(4):
            p = tl.where(s < left, tl.exp(x[4 + s] - new_top), 0.0)
            total, o = total + p, o + p * x[s]
    return tl.where(cols < H * D, o / total, 0.0)


@triton.jit
def _rows(weight, old, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, HOLD: tl.constexpr, GRID: tl.constexpr):
    """The first tiles of this program's rows, and the numbers of `old`, which it has written itself, that they will be added to."""
    EACH: tl.constexpr = (N + GRID - 1) // GRID
    start, tiles, numbers = tl.program_id(0) * EACH, (), ()
    end = tl.minimum(start + EACH, N)
    for i in tl.static_range(0, EACH, R):
        row = start + i + tl.arange(0, R)
        numbers = numbers + (_number(old + row, row < end),)
        if i < HOLD * R:
            tiles = tiles + (_tile(weight, start + i, end, K, R),)
    return tiles, numbers


@triton.jit
def _add(tiles, weight, x, numbers, new, tag, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, HOLD: tl.constexpr, GRID: tl.constexpr):
    """new [N] = old numbers + W x, this program's rows, of which `_rows` has read what it gives."""
    EACH: tl.constexpr = (N + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, N)
    for i in tl.static_range(0, EACH, R):
        if i + HOLD * R < EACH:
            tiles = tiles + (_tile(weight, start + i + HOLD * R, end, K, R),)
        row = start + i + tl.arange(0, R)
        _send(new, row, numbers[i // R] + _times(tiles[i // R], x), tag, row < end, GRID)


@triton.jit
def _gate_up(outer, norm, weight, hidden, eps, tag, I: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HOLD: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    """hidden [I] = silu(gate) up of the MLP's input norm(x)."""
    EACH: tl.constexpr = (I + GRID - 1) // GRID
    start = tl.program_id(0) * EACH
    end = tl.minimum(start + EACH, I)
    if start < I:
        gate, up, norm_weight = (), (), _norm_weight(norm, C, GRID)
        for i in tl.static_range(0, EACH, R):
            if i < HOLD * R:
                gate, up = gate + (_tile(weight, start + i, end, C, R),), up + (_tile(weight + I * C, start + i, end, C, R),)
        x, factor = _weighted(outer, norm_weight, weight, eps, tag, C, THREADS, GRID)
        for i in tl.static_range(0, EACH, R):
            if i + HOLD * R < EACH:
                gate, up = gate + (_tile(weight, start + i + HOLD * R, end, C, R),), up + (_tile(weight + I * C, start + i + HOLD * R, end, C, R),)
            g, u, row = _times(gate[i // R], x) * factor, _times(up[i // R], x) * factor, start + i + tl.arange(0, R)
            _send(hidden, row, g / (1 + tl.exp(-g)) * u, tag, row < end, GRID)


@triton.jit(do_not_specialize=["token", "position", "first_tag", "n_layers", "max_len", "V"])
def _token_kernel(token, position, first_tag, table, sources, n_layers, embed, head, cos, sin, cache, max_len, outer, middle, qkv, part, lse, hidden, logits, last_norm, eps, V,
                  C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N_: tl.constexpr,
                  NORM: tl.constexpr, NORM_LAST: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, R_QKV: tl.constexpr, R_OUT: tl.constexpr,
                  R_UP: tl.constexpr, R_DOWN: tl.constexpr, R_HEAD: tl.constexpr, HOLD_QKV: tl.constexpr, HOLD_OUT: tl.constexpr, HOLD_UP: tl.constexpr,
                  HOLD_DOWN: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, GRID: tl.constexpr):
    QKV: tl.constexpr = (H + 2 * G) * D
    EACH_QKV: tl.constexpr = (QKV + GRID - 1) // GRID
    EACH_C: tl.constexpr = (C + GRID - 1) // GRID
    EACH_I: tl.constexpr = (I + GRID - 1) // GRID
    OWN: tl.constexpr = 1 if GRID == 1 else 128  # the first numbers of the residual stream are stored by their owners
    me = tl.program_id(0)
    for i in tl.static_range(0, EACH_C, OWN):
        r = i + tl.arange(0, OWN)
        here = (r < EACH_C) & (me * EACH_C + r < C)
        x = tl.load(embed + tl.load(token) * C + me * EACH_C + r, mask=here, other=0.0)
        _send(outer, me * EACH_C + r, x.to(tl.float32), first_tag, here, GRID)
    for m in range(n_layers):
        tag, row = first_tag + m, table + m * 8
        attn_norm, mlp_norm, q_norm, k_norm = _pointer(row, 0, last_norm, 16), _pointer(row, 5, last_norm, 16), _pointer(row, 2, last_norm, 16), _pointer(row, 3, last_norm, 16)
        qkv_weight, out, gate_up, down = _pointer(row, 1, embed, 16), _pointer(row, 4, embed, 16), _pointer(row, 6, embed, 16), _pointer(row, 7, embed, 16)
        next_weight = _pointer(row, 9, embed, 16)  # the next layer's qkv, or the head
        _prefetch(out, me * EACH_C, EACH_C, C, H * D, PREFETCH)
        _prefetch_cache(m, cache, position, max_len, H, G, D, BLOCK, SPLITS, PREFETCH)
        _prefetch(gate_up, me * EACH_I, EACH_I, I, C, PREFETCH)
        _project(outer, attn_norm, qkv_weight, qkv, eps, tag, QKV, C, G, GROUP, D, R_QKV, HOLD_QKV, THREADS, GRID)
        _prefetch(gate_up, me * EACH_I + I, EACH_I, 2 * I, C, PREFETCH)
        _attend(m, qkv, q_norm, k_norm, cos, sin, sources, cache, part, lse, position, max_len, eps, D ** -0.5, tag, H, G, GROUP, D, N_, NORM, NORM_LAST,
                BLOCK, SPLITS, THREADS, GRID)
        _prefetch(down, me * EACH_C, EACH_C, C, I, PREFETCH)
        if GRID > 1:
            tl.debug_barrier()  # what this program has written, other threads of it read now: the residual outer, sources
        if me * EACH_C < C:
            tiles, numbers = _rows(out, outer, C, H * D, R_OUT, HOLD_OUT, GRID)
            o = _as_tiles(_rounded(_joined(part, lse, position, tag, H, D, BLOCK, SPLITS, THREADS, GRID), out), H * D)
            _add(tiles, out, o, numbers, middle, tag, C, H * D, R_OUT, HOLD_OUT, GRID)
        _prefetch(next_weight, me * EACH_QKV, EACH_QKV, QKV, C, PREFETCH)
        _gate_up(middle, mlp_norm, gate_up, hidden, eps, tag, I, C, R_UP, HOLD_UP, THREADS, GRID)
        if GRID > 1:
            tl.debug_barrier()
        if me * EACH_C < C:
            tiles, numbers = _rows(down, middle, C, I, R_DOWN, HOLD_DOWN, GRID)
            h = _as_tiles(_rounded(_received(hidden, I, tag, THREADS, GRID), down), I)
            _add(tiles, down, h, numbers, outer, tag + 1, C, I, R_DOWN, HOLD_DOWN, GRID)
    each = tl.cdiv(V, GRID)
    start, end = me * each, tl.minimum(me * each + each, V)
    norm_weight, tile, next_tile = _norm_weight(last_norm, C, GRID), _tile(head, start, end, C, R_HEAD), _tile(head, start + R_HEAD, end, C, R_HEAD)
    x, factor = _weighted(outer, norm_weight, head, eps, first_tag + n_layers, C, THREADS, GRID)
    for i in tl.range(0, each, R_HEAD, num_stages=1):  # two tiles ahead in registers
        after, row = _tile(head, start + i + 2 * R_HEAD, end, C, R_HEAD), start + i + tl.arange(0, R_HEAD)
        tl.store(logits + row, _times(tile, x) * factor, mask=row < end)
        tile, next_tile = next_tile, after


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
        splits = tune["splits"] if programs == 1 else max(1, min(tune["splits"], programs // H))  # a unit of attention for each program
        small = torch.int32 if cache.dtype == torch.bfloat16 else torch.int64
        sizes = dict(outer=c.n_embd, middle=c.n_embd, qkv=qkv, part=(splits, H, D), lse=(splits, H, _copies(D)), hidden=c.n_inner)  # what programs send each other
        self.words = {name: torch.zeros(size, dtype=small if name in ("part", "hidden") else torch.int64, device=device) for name, size in sizes.items()}
        self.logits = torch.empty(1, c.vocab_size, dtype=torch.float32, device=device)
        self.tag, self.last, self.each = 1, -1, 0  # of the next token, and of the last one its position and the blocks of a split

        wide = lambda k: _power_of_2(k) if k <= 256 else 256 * (_parts(k)[2] + _parts(k)[3])
        # rows of a matrix in a tile, one for each warp where the program has as many; and its tiles that are held at once
        rows_of = lambda n, k, tiles: max(1, min(_power_of_2(_ceil_div(n, programs)), max(tune["warps"], _power_of_2(tune["tile"] // (tiles * wide(k)) + 1) // 2)))
        matrices = dict(QKV=(qkv, c.n_embd, 1), OUT=(c.n_embd, H * D, 1), UP=(c.n_inner, c.n_embd, 2), DOWN=(c.n_embd, c.n_inner, 1))
        tiles = {f"R_{name}": rows_of(*shape) for name, shape in matrices.items()}
        tiles |= {f"HOLD_{name}": max(1, tune["hold"] * tune["tile"] // (tiles[f"R_{name}"] * wide(k) * n)) for name, (_, k, n) in matrices.items()}
        self.shapes = dict(
            C=c.n_embd, H=H, G=G, I=c.n_inner, GROUP=H // G, D=D, N_=n, NORM=c.qk_norm == "head", NORM_LAST=c.k_norm_after_rope, BLOCK=tune["block"], SPLITS=splits,
            R_HEAD=_power_of_2(tune["tile"] // wide(c.n_embd) + 1) // 2 or 1, **tiles, PREFETCH=tune["prefetch"] and programs > 1, THREADS=32 * tune["warps"], GRID=programs)
        self.options = dict(num_warps=tune["warps"], launch_cooperative_grid=True) if programs > 1 else {}  # cooperative: all programs run at once, or an error
        self.eps, self.layers, self.max_len, self.vocab_size = c.norm_eps, M, cache.shape[4], c.vocab_size

    def __call__(self, token, position):
        each = _ceil_div(position, self.shapes["BLOCK"] * self.shapes["SPLITS"])  # blocks of a split
        if position < self.last or each != self.each or self.tag > 2**30:  # fewer splits now: the rest keep old tags, and those of 4 bytes come again
            for words in self.words.values():
                words.zero_()
            self.tag %= 2**30
        _token_kernel[(self.programs,)](token, position, self.tag, self.table, self.sources, self.layers, self.embed, self.head, self.cos, self.sin, self.cache, self.max_len,
                                        **self.words, logits=self.logits, last_norm=self.norm, eps=self.eps, V=self.vocab_size, **self.shapes, **self.options)
        self.last, self.each, self.tag = position, each, self.tag + self.layers + 1
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
