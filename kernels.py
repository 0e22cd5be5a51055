"""Optional Triton kernels: fused forms of the elementwise work of model.py, each with its own backward.

Nothing here is needed on CPU. Every public function computes what its docstring's equation says, with float32 arithmetic inside and one
rounding at the end, for bfloat16, float16 and float32. All of these kernels are bound by memory, so each reads its inputs once and writes
its outputs once. Eager code calls them directly; torch.compile sees each one as a single operator and keeps its graph whole.

A tensor written [B, H, T, D] is in training a transposed view of contiguous [B, T, H, D] memory, the layout that a matmul leaves behind.
"""
import functools
import importlib
import math
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# Launch settings: (warps a program, elements a thread holds of one tile[, programs a multiprocessor in kernels that loop over tiles[, tiles in
# flight or, for heads and MoDA, registers a thread at most]]). mHC's tiles, but for mhc_read's, are a few columns of all streams: (warps, elements, columns of a tile,
# tiles in flight[, programs a multiprocessor]). 8 elements of bfloat16 are one 16-byte access. The values are the best of what was tried on an H200.
SETTINGS = {
    "rms_norm_forward": (2, 16),
    "rms_norm_backward": (2, 16, 4, 3),
    "swiglu": (4, 8),
    "heads_forward": (1, 4),
    "heads_backward": (1, 4, 16, 128),
    "heads_backward_mix": (2, 2, 16, None),
    "cross_entropy": (32, 8),
    "moda_forward": (2, 1, 16, 2, None),
    "moda_backward": (2, 1, 16, 2, 168),
    "attnres_forward": (1, 32, 3),
    "attnres_backward": (1, 32, 8, 3),
    "average": (8, 8, 1),
    "average_backward": (8, 8, 1),
    "mhc_write": (8, 8, 32, 3),
    "mhc_read": (2, 16),
    "mhc_dots_backward": (4, 8, 64, 3),
    "mhc_read_backward": (4, 16, 64, 3, 3),
    "mhc_write_backward": (4, 8, 64, 3),
}


# ---------------------------------------------------------------------------------------------------------------------------------------
# Shared by all kernels

def _operator(*mutates):
    """Decorator: one operator to torch.compile, which neither traces into the launcher nor breaks its graph there. Eager calls skip the
    dispatcher, whose Python side costs more than a launch. A launcher's last argument says whether to launch: shapes alone are wanted
    while a graph is traced."""
    def wrap(launcher):
        op = torch.library.custom_op(f"depth_kernels::{launcher.__name__.lstrip('_')}", launcher, mutates_args=mutates)
        op.register_fake(lambda *args: launcher(*args[:-1], False))

        @functools.wraps(launcher)
        def call(*args):
            return op(*args, True) if torch.compiler.is_compiling() else launcher(*args, True)
        return call
    return wrap


@functools.lru_cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _ceil_div(a, b):
    return -(-a // b)


def _power_of_2(n):
    """The smallest that is not less than n."""
    return 1 << (n - 1).bit_length()


def _tile(name, width):
    """(rows of a [rows, width] tile, warps) for one program, from SETTINGS; a wide row takes more warps, not more registers."""
    warps, elements = SETTINGS[name][:2]
    warps = min(32, max(warps, width // (32 * elements)))
    return max(1, warps * 32 * elements // width), warps


def _dense(x):
    """x with adjacent elements along its last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x):
    """A contiguous tensor of x's shape and dtype; new_empty(x.shape) takes the CPU three times as long."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _matrix(x):
    """(x or a copy of it, elements from one row to the next) of x [..., C] as rows of C adjacent elements. What is contiguous is that without a view."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = _dense(x.reshape(-1, x.shape[-1]))
    return x, x.stride(0)


@triton.jit
def _column_sums_kernel(x, out, n_rows, C, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, n_rows, ROWS):
        rows = first + tl.arange(0, ROWS)
        acc += tl.load(x + rows[:, None] * C + cols[None, :], mask=(rows < n_rows)[:, None] & (cols < C)[None, :], other=0.0)
    tl.store(out + cols, tl.sum(acc, 0), mask=cols < C)


def _column_sums(x, launch):
    """Sum over the first axis of the float32 [programs, ...] that a kernel's programs leave; torch.sum takes three times as long on these shapes."""
    programs, *shape = x.shape
    out = x.new_empty(*shape) if programs else x.new_zeros(*shape)
    if launch and programs:
        columns = out.numel()
        _column_sums_kernel[(_ceil_div(columns, 8),)](x, out, programs, columns, 256, 8, num_warps=8)
    return out


# ---------------------------------------------------------------------------------------------------------------------------------------
# RMSNorm, alone and after a residual addition

@triton.jit
def _rms_norm_forward_kernel(x, u, weight, s, y, n_rows, x_stride, u_stride, eps,
                             C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < n_rows) & (cols < C)
    a = tl.load(x + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if u is not None:
        a += tl.load(u + rows * u_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total = a.to(s.dtype.element_ty)
        tl.store(s + rows * C + cols, total, mask=mask)
        a = total.to(tl.float32)            # normalise what the next layer will see, and what the backward pass will read
    a *= tl.rsqrt(tl.sum(a * a, 1) / C + eps)[:, None]
    w = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    tl.store(y + rows * C + cols, (a * w).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(s, ds, dy, weight, dx, dw, n_rows, s_stride, ds_stride, dy_stride, eps,
                              C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    cols = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    dw_tile = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):      # the next tiles' loads run ahead
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (rows < n_rows) & (cols < C)
        a = tl.load(s + rows * s_stride + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(a * a, 1) / C + eps)[:, None]
        a *= rstd
        dw_tile += g * a
        g *= w
        g = rstd * (g - a * (tl.sum(g * a, 1) / C)[:, None])
        if ds is not None:
            g += tl.load(ds + rows * ds_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + rows * C + cols, g.to(dx.dtype.element_ty), mask=mask)
    cols = tl.arange(0, BLOCK)
    tl.store(dw + tl.program_id(0) * C + cols, tl.sum(dw_tile, 0), mask=cols < C)


@_operator()
def _rms_norm_forward(x: Tensor, u: Optional[Tensor], weight: Tensor, eps: float, launch: bool) -> tuple[Tensor, Tensor]:
    y = _empty_like(x)
    s = x.new_empty(0) if u is None else _empty_like(x)
    if launch:
        C = x.shape[-1]
        block, n_rows = _power_of_2(C), x.numel() // C
        (x, x_stride), (u, u_stride) = _matrix(x), (None, 0) if u is None else _matrix(u)
        rows, warps = _tile("rms_norm_forward", block)
        _rms_norm_forward_kernel[(_ceil_div(n_rows, rows),)](x, u, weight, s, y, n_rows, x_stride, u_stride, eps, C, block, rows, num_warps=warps)
    return s, y


@_operator()
def _rms_norm_backward(s: Tensor, ds: Optional[Tensor], dy: Tensor, weight: Tensor, eps: float, launch: bool) -> tuple[Tensor, Tensor]:
    dx, C = _empty_like(s), s.shape[-1]
    block, n_rows = _power_of_2(C), s.numel() // C
    rows, warps = _tile("rms_norm_backward", block)
    programs = min(_ceil_div(n_rows, rows), _multiprocessors(s.device) * SETTINGS["rms_norm_backward"][2])
    dw = torch.empty(programs, C, device=s.device, dtype=torch.float32)
    if launch:
        (s, s_stride), (ds, ds_stride), (dy, dy_stride) = _matrix(s), (None, 0) if ds is None else _matrix(ds), _matrix(dy)
        _rms_norm_backward_kernel[(programs,)](s, ds, dy, weight, dx, dw, n_rows, s_stride, ds_stride, dy_stride, eps, C, block, rows,
                                               SETTINGS["rms_norm_backward"][3], num_warps=warps)
    return dx, _column_sums(dw, launch)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, weight, eps):
        s, y = _rms_norm_forward(x, u, weight, eps)
        ctx.save_for_backward(x if u is None else s, weight)
        ctx.eps, ctx.add = eps, u is not None
        ctx.set_materialize_grads(False)    # the last norm of a model gets no gradient for s: nothing to read there
        return (s, y) if ctx.add else y

    @staticmethod
    def backward(ctx, *grads):
        s, weight = ctx.saved_tensors
        ds, dy = grads if ctx.add else (None, grads[0])
        if dy is None:
            return ds, ds, None, None
        dx, dw = _rms_norm_backward(s, ds, dy, weight, ctx.eps)
        return dx, dx if ctx.add else None, dw.to(weight.dtype), None


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis. x [..., C], weight [C] (float32) -> [..., C] in x's dtype."""
    return _RMSNorm.apply(x, None, weight, eps)


def add_rms_norm(x, u, weight, eps):
    """s = x + u rounded to x's dtype, and y = rms_norm(s, weight, eps), in one pass. x, u [..., C] -> (s, y). x and u get one gradient tensor."""
    return _RMSNorm.apply(x, u, weight, eps)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Linear layers of mixed precision

def weight_gradient(dy, x, into=None):
    """dy^T x of dy [n, O] and x [n, I] in float32 [O, I], added to `into` if it is given. The matmul sums in float32 in any case and stores that sum:
    no rounding to the dtype of dy, and no pass that casts it back."""
    if not dy.is_cuda or dy.dtype == torch.float32:
        product = dy.float().T @ x.float()
        return product if into is None else into.add_(product)
    if into is None:
        return torch.mm(dy.T, x, out_dtype=torch.float32)
    return torch.addmm(into, dy.T, x, out_dtype=torch.float32, out=into)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        w = _cast(weight, x.dtype)
        ctx.save_for_backward(x, w)
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dy @ w if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None


def _cast(weight, dtype):
    """weight in another dtype, where no gradient is asked for: the same tensor as before while the backward pass of an earlier call, as in a looped model, still keeps it."""
    of, kept = getattr(weight, "last_cast", (None, None))
    w = kept() if of == (weight._version, dtype) else None
    if w is None:
        w = weight.to(dtype)
        weight.last_cast = (weight._version, dtype), weakref.ref(w)
    return w


def linear(x, weight):
    """x weight^T of x [..., I] in bfloat16 or float16 and weight [O, I] in float32, whose gradient is float32 as well -> [..., O] in x's dtype."""
    return _Linear.apply(x, weight)


# ---------------------------------------------------------------------------------------------------------------------------------------
# SwiGLU

@triton.jit
def _swiglu_forward_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_A_ROW: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS_A_ROW).to(tl.int64)
    cols = tl.program_id(0) % BLOCKS_A_ROW * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * I) + cols, mask=cols < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + cols, mask=cols < I, other=0.0).to(tl.float32)
    tl.store(out + row * I + cols, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=cols < I)


@triton.jit
def _swiglu_backward_kernel(gate_up, dout, grad, I: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_A_ROW: tl.constexpr):
    row = (tl.program_id(0) // BLOCKS_A_ROW).to(tl.int64)
    cols = tl.program_id(0) % BLOCKS_A_ROW * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * (2 * I) + cols, mask=cols < I, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * I) + I + cols, mask=cols < I, other=0.0).to(tl.float32)
    d = tl.load(dout + row * I + cols, mask=cols < I, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(grad + row * (2 * I) + cols, (d * up * (sigmoid + silu * (1 - sigmoid))).to(grad.dtype.element_ty), mask=cols < I)
    tl.store(grad + row * (2 * I) + I + cols, (d * silu).to(grad.dtype.element_ty), mask=cols < I)


@_operator()
def _swiglu_forward(gate_up: Tensor, launch: bool) -> Tensor:
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if launch:
        warps, elements = SETTINGS["swiglu"]
        blocks = _ceil_div(inner, warps * 32 * elements)
        _swiglu_forward_kernel[(out.numel() // inner * blocks,)](gate_up.contiguous(), out, inner, warps * 32 * elements, blocks, num_warps=warps)
    return out


@_operator()
def _swiglu_backward(gate_up: Tensor, dout: Tensor, launch: bool) -> Tensor:
    inner = gate_up.shape[-1] // 2
    grad = _empty_like(gate_up)
    if launch:
        warps, elements = SETTINGS["swiglu"]
        blocks = _ceil_div(inner, warps * 32 * elements)
        _swiglu_backward_kernel[(dout.numel() // inner * blocks,)](
            gate_up.contiguous(), dout.contiguous(), grad, inner, warps * 32 * elements, blocks, num_warps=warps)
    return grad


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return _swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx, dout):
        return _swiglu_backward(ctx.saved_tensors[0], dout)


def swiglu(gate_up):
    """silu(gate) * up of gate_up [..., 2I] = gate | up -> [..., I]. The backward pass writes the gradient of gate_up in place, joined."""
    return _SwiGLU.apply(gate_up)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Queries, keys and values of attention: head RMSNorm, RoPE and the Depth-Attention mix (arXiv 2606.05014) in one pass
#
# A program works on ROWS (token, KV head) pairs, neighbours in memory, each with its GROUP query heads, one after the other.
# A head vector is kept as its two halves, because RoPE turns dimension i together with dimension i + D/2: all tiles are [ROWS, D/2], so that
# what belongs together lies in one thread.
# Sources come as a device table of addresses, so one compiled kernel serves any number of them, wherever they lie.

@triton.jit
def _read(pointer, offsets, mask, HALF: tl.constexpr):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32), tl.load(pointer + offsets + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, offsets, a, b, mask, HALF: tl.constexpr):
    tl.store(pointer + offsets, a.to(pointer.dtype.element_ty), mask=mask)
    tl.store(pointer + offsets + HALF, b.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _pointer(table, index, like, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(table + index).to(tl.pointer_type(like.dtype.element_ty)), ALIGN)


@triton.jit
def _angles(cos, sin, offsets, mask):
    return tl.load(cos + offsets, mask=mask, other=0.0).to(tl.float32), tl.load(sin + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rstd(a, b, D: tl.constexpr, eps):
    return tl.rsqrt(tl.sum(a * a + b * b, -1, keep_dims=True) / D + eps)


@triton.jit
def _finish(a, b, wa, wb, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, NORM_LAST: tl.constexpr):
    """RMSNorm and RoPE of head vectors, in either order."""
    if ROPE and NORM_LAST:
        a, b = _rotate(a, b, cos, sin)
    if NORM:
        rstd = _rstd(a, b, D, eps)
        a, b = a * rstd * wa, b * rstd * wb
    if ROPE and not NORM_LAST:
        a, b = _rotate(a, b, cos, sin)
    return a, b


@triton.jit
def _finish_backward(a, b, da, db, wa, wb, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, NORM_LAST: tl.constexpr):
    """Gradient of the raw head vector (a, b), and this vector's share of the gradient of the norm's weight."""
    dwa, dwb = da, db
    if ROPE and NORM_LAST:
        a, b = _rotate(a, b, cos, sin)
    if ROPE and not NORM_LAST:
        da, db = _rotate(da, db, cos, -sin)
    if NORM:
        rstd = _rstd(a, b, D, eps)
        a, b = a * rstd, b * rstd
        dwa, dwb = da * a, db * b
        da, db = da * wa, db * wb
        along = tl.sum(da * a + db * b, -1, keep_dims=True) / D
        da, db = rstd * (da - a * along), rstd * (db - b * along)
    if ROPE and NORM_LAST:
        da, db = _rotate(da, db, cos, -sin)
    return da, db, dwa, dwb


@triton.jit
def _place(strides, batch, head, t, cols):
    return (batch * strides[0] + head * strides[1] + t * strides[2])[:, None] + cols


@triton.jit(do_not_specialize=["n_sources"])
def _heads_forward_kernel(q, k, v, q_strides, k_strides, v_strides, q_weight, k_weight, cos, sin, q_out, k_out, mixed, lse, table, n_sources,
                          T, eps, scale, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
                          ROWS: tl.constexpr, K_NORM_LAST: tl.constexpr, ALIGN: tl.constexpr):
    ROPE: tl.constexpr = cos is not None
    Q_NORM: tl.constexpr = q_weight is not None
    K_NORM: tl.constexpr = k_weight is not None
    HALF: tl.constexpr = D // 2
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, group = (rows // G).to(tl.int64), rows % G
    cols = tl.arange(0, BLOCK)[None, :]
    here = rows < T * G
    mask = here[:, None] & (cols < HALF)
    place = batch * T * G + rows                    # of the pair in contiguous [B, T, G] memory
    row = (place * D)[:, None] + cols
    c, s, qwa, qwb, kwa, kwb = 1.0, 0.0, 1.0, 1.0, 1.0, 1.0
    # loaded first: then Triton brings these to the layout of the heads, and not all heads to theirs, through shared memory
    if ROPE:
        c, s = _angles(cos, sin, t[:, None] * HALF + cols, mask)
    if Q_NORM:
        qwa, qwb = _read(q_weight, cols, cols < HALF, HALF)
    if K_NORM:
        kwa, kwb = _read(k_weight, cols, cols < HALF, HALF)
    # all loads before the first store: a store could change what a later load reads, so no load moves over one
    queries = ()
    for m in tl.static_range(GROUP):
        queries = queries + (_read(q, _place(q_strides, batch, group * GROUP + m, t, cols), mask, HALF),)
    ka, kb = _read(k, _place(k_strides, batch, group, t, cols), mask, HALF)
    if table is not None:
        ma, mb = _read(v, _place(v_strides, batch, group, t, cols), mask, HALF)
    ka, kb = _finish(ka, kb, kwa, kwb, c, s, eps, D, K_NORM, ROPE, K_NORM_LAST)
    mean_a, mean_b = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    finished = ()
    for m in tl.static_range(GROUP):
        qa, qb = _finish(queries[m][0], queries[m][1], qwa, qwb, c, s, eps, D, Q_NORM, ROPE, False)
        mean_a, mean_b = mean_a + qa, mean_b + qb
        finished = finished + ((qa.to(q.dtype.element_ty), qb.to(q.dtype.element_ty)),)
    if table is not None:
        # online softmax over depth; the layer's own entry comes first, so the running maximum is always a real score
        mean_a, mean_b = mean_a * (scale / GROUP), mean_b * (scale / GROUP)
        top = tl.sum(mean_a * ka + mean_b * kb, 1)
        total = tl.full([ROWS], 1.0, tl.float32)
        for first in range(0, n_sources, 2):
            for i in tl.static_range(2):            # the loads of two sources are in flight together; the table is padded to an even number
                j = first + i
                present = (rows < tl.where(j < n_sources, T * G, 0))[:, None] & (cols < HALF)
                sa, sb = _read(_pointer(table, 2 * j, k, ALIGN), row, present, HALF)
                ua, ub = _read(_pointer(table, 2 * j + 1, v, ALIGN), row, present, HALF)
                score = tl.where(j < n_sources, tl.sum(mean_a * sa + mean_b * sb, 1), float("-inf"))
                new_top = tl.maximum(top, score)
                old, new = tl.exp(top - new_top), tl.exp(score - new_top)
                total = total * old + new
                ma, mb = ma * old[:, None] + ua * new[:, None], mb * old[:, None] + ub * new[:, None]
                top = new_top
        _write(mixed, row, ma / total[:, None], mb / total[:, None], mask, HALF)
        tl.store(lse + place, top + tl.log(total), mask=here)
    if ROPE:
        q_row = (place * (GROUP * D))[:, None] + cols
        for m in tl.static_range(GROUP):
            _write(q_out, q_row + m * D, finished[m][0], finished[m][1], mask, HALF)
        _write(k_out, row, ka, kb, mask, HALF)


@triton.jit
def _depth_mix_gradients(mean_a, mean_b, fa, fb, va, vb, ma, mb, dka, dkb, dva, dvb, log_total, row, mask, table, n_sources, k, v, rows, n_rows, cols, scale,
                         HALF: tl.constexpr, ALIGN: tl.constexpr):
    """The gradients of the mean query, of the own key, added to dk, and of the own value, given the mixed value m and its gradient dv; adds those of the
    sources to what lies in their buffers."""
    centre = tl.sum(dva * ma + dvb * mb, 1)     # sum_j alpha_j <dv, m_j>, the softmax backward's mean
    alpha = tl.exp(tl.sum(mean_a * fa + mean_b * fb, 1) * scale - log_total)
    own = alpha[:, None]
    ds = (alpha * (tl.sum(dva * va + dvb * vb, 1) - centre) * scale)[:, None]
    dka, dkb = dka + ds * mean_a, dkb + ds * mean_b
    dmean_a, dmean_b = ds * fa, ds * fb
    for j in range(0, n_sources):
        sa, sb = _read(_pointer(table, 5 * j, k, ALIGN), row, mask, HALF)
        ua, ub = _read(_pointer(table, 5 * j + 1, v, ALIGN), row, mask, HALF)
        grad_k, grad_v = _pointer(table, 5 * j + 2, k, ALIGN), _pointer(table, 5 * j + 3, v, ALIGN)
        filled = (rows < tl.where(tl.load(table + 5 * j + 4) != 0, n_rows, 0))[:, None] & (cols < HALF)
        gka, gkb = _read(grad_k, row, filled, HALF)     # what earlier readers left there; not read when there were none
        gva, gvb = _read(grad_v, row, filled, HALF)
        alpha = tl.exp(tl.sum(mean_a * sa + mean_b * sb, 1) * scale - log_total)
        ds = (alpha * (tl.sum(dva * ua + dvb * ub, 1) - centre) * scale)[:, None]
        dmean_a, dmean_b = dmean_a + ds * sa, dmean_b + ds * sb
        _write(grad_k, row, gka + ds * mean_a, gkb + ds * mean_b, mask, HALF)
        _write(grad_v, row, gva + alpha[:, None] * dva, gvb + alpha[:, None] * dvb, mask, HALF)
    return dmean_a, dmean_b, dka, dkb, dva * own, dvb * own


@triton.jit(do_not_specialize=["n_sources"])
def _heads_backward_kernel(q, k, v, q_strides, k_strides, v_strides, q_weight, k_weight, cos, sin, dq, dk, dv, dq_strides, dk_strides, dv_strides,
                           mixed, lse, grad, dw, table, n_sources, n_tiles, T, eps, scale, G: tl.constexpr, GROUP: tl.constexpr,
                           D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, K_NORM_LAST: tl.constexpr, ALIGN: tl.constexpr):
    ROPE: tl.constexpr = cos is not None
    Q_NORM: tl.constexpr = q_weight is not None
    K_NORM: tl.constexpr = k_weight is not None
    MIX: tl.constexpr = table is not None
    HALF: tl.constexpr = D // 2
    cols = tl.arange(0, BLOCK)[None, :]
    qwa, qwb, kwa, kwb = 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        qwa, qwb = _read(q_weight, cols, cols < HALF, HALF)
    if K_NORM:
        kwa, kwb = _read(k_weight, cols, cols < HALF, HALF)
    dqwa = tl.zeros([ROWS, BLOCK], tl.float32)
    dqwb = tl.zeros([ROWS, BLOCK], tl.float32)
    dkwa = tl.zeros([ROWS, BLOCK], tl.float32)
    dkwb = tl.zeros([ROWS, BLOCK], tl.float32)
    tiles_a_batch = tl.cdiv(T * G, ROWS)
    for tile in range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        batch = (tile // tiles_a_batch).to(tl.int64)
        rows = tile % tiles_a_batch * ROWS + tl.arange(0, ROWS)
        t, group = (rows // G).to(tl.int64), rows % G
        here = rows < T * G
        mask = here[:, None] & (cols < HALF)
        place = batch * T * G + rows
        row = (place * D)[:, None] + cols
        out = grad + ((batch * T + t) * ((GROUP + 2) * G * D))[:, None] + cols
        # all loads before the first store, as in the forward kernel
        c, s = 1.0, 0.0
        if ROPE:
            c, s = _angles(cos, sin, t[:, None] * HALF + cols, mask)
        q_at, dq_at = _place(q_strides, batch, group * GROUP, t, cols), _place(dq_strides, batch, group * GROUP, t, cols)
        queries, dqueries = (), ()
        for m in tl.static_range(GROUP):
            queries = queries + (_read(q, q_at + m * q_strides[1], mask, HALF),)
            if ROPE:
                dqueries = dqueries + (_read(dq, dq_at + m * dq_strides[1], mask, HALF),)
        ka, kb = _read(k, _place(k_strides, batch, group, t, cols), mask, HALF)
        dva, dvb = _read(dv, _place(dv_strides, batch, group, t, cols), mask, HALF)
        if ROPE:
            dka, dkb = _read(dk, _place(dk_strides, batch, group, t, cols), mask, HALF)
        else:
            dka, dkb = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
        dmean_a, dmean_b = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
        if MIX:
            va, vb = _read(v, _place(v_strides, batch, group, t, cols), mask, HALF)
            ma, mb = _read(mixed, row, mask, HALF)
            log_total = tl.load(lse + place, mask=here, other=0.0)
            mean_a, mean_b = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
            for m in tl.static_range(GROUP):
                na, nb = _finish(queries[m][0], queries[m][1], qwa, qwb, c, s, eps, D, Q_NORM, ROPE, False)
                mean_a, mean_b = mean_a + na / GROUP, mean_b + nb / GROUP
            fa, fb = _finish(ka, kb, kwa, kwb, c, s, eps, D, K_NORM, ROPE, K_NORM_LAST)
            dmean_a, dmean_b, dka, dkb, dva, dvb = _depth_mix_gradients(mean_a, mean_b, fa, fb, va, vb, ma, mb, dka, dkb, dva, dvb, log_total, row, mask, table,
                                                                        n_sources, k, v, rows, T * G, cols, scale, HALF, ALIGN)
            dmean_a, dmean_b = dmean_a / GROUP, dmean_b / GROUP
        for m in tl.static_range(GROUP):
            dqa, dqb = dmean_a, dmean_b
            if ROPE:
                dqa, dqb = dqa + dqueries[m][0], dqb + dqueries[m][1]
            dqa, dqb, dwa, dwb = _finish_backward(queries[m][0], queries[m][1], dqa, dqb, qwa, qwb, c, s, eps, D, Q_NORM, ROPE, False)
            dqwa, dqwb = dqwa + dwa, dqwb + dwb
            _write(out, (group * GROUP + m)[:, None] * D, dqa, dqb, mask, HALF)
        dka, dkb, dwa, dwb = _finish_backward(ka, kb, dka, dkb, kwa, kwb, c, s, eps, D, K_NORM, ROPE, K_NORM_LAST)
        dkwa, dkwb = dkwa + dwa, dkwb + dwb
        _write(out, (GROUP * G + group)[:, None] * D, dka, dkb, mask, HALF)
        _write(out, ((GROUP + 1) * G + group)[:, None] * D, dva, dvb, mask, HALF)
    if Q_NORM or K_NORM:
        cols = tl.arange(0, BLOCK)
        dw += tl.program_id(0) * (2 * D)
        _write(dw, cols, tl.sum(dqwa, 0), tl.sum(dqwb, 0), cols < HALF, HALF)
        _write(dw + D, cols, tl.sum(dkwa, 0), tl.sum(dkwb, 0), cols < HALF, HALF)


_NUMBERS = 64                               # that one launch carries
_SHIFT = tl.constexpr(2**62 + 1)            # makes a number a 64-bit argument with nothing for Triton to specialize on: neither 1 nor a multiple of 16
_tables, _tables_of_graphs = {}, []


@triton.jit
def _fill_kernel(table, numbers, N: tl.constexpr):
    for i in tl.static_range(N):
        tl.store(table + i, numbers[i] - _SHIFT)


def _on_device(numbers, device):
    """A tuple of integers as a tensor. They travel as arguments of launches: nothing waits for them, and a CUDA graph keeps them."""
    table = torch.empty(_ceil_div(len(numbers), _NUMBERS) * _NUMBERS, device=device, dtype=torch.int64)
    numbers = [x + _SHIFT.value for x in numbers] + [_SHIFT.value] * (len(table) - len(numbers))
    for i in range(0, len(table), _NUMBERS):
        _fill_kernel[(1,)](table[i:], tuple(numbers[i:i + _NUMBERS]), _NUMBERS, num_warps=1)
    return table


def _source_table(device, *columns):
    """(table, alignment of all addresses in bytes) for columns of tensors or integers, one entry a source; behind it at least one entry of zeros if
    their number is odd. The allocator hands out the same addresses step after step, so nearly every call finds its table made."""
    columns = [[x.data_ptr() if isinstance(x, Tensor) else x for x in column] for column in columns]
    numbers = tuple(x for source in zip(*columns, strict=True) for x in source) + (0,) * (len(columns) * (len(columns[0]) % 2))
    align = math.gcd(16, *(x for column in columns[:4] for x in column))
    if device.type != "cuda":
        return _on_device(numbers, device), align
    # the stream is part of the key: its work alone is ordered after the launches and, once the table is dropped, before the reuse of its memory
    key, capturing = (numbers, device, torch._C._cuda_getCurrentRawStream(device.index)), torch.cuda.is_current_stream_capturing()
    table = _tables.get(key)
    if table is None:
        table = _on_device(numbers, device)
        if not capturing:       # what is captured does not exist before the graph is replayed
            if len(_tables) >= 4096:
                _tables.clear()
            _tables[key] = table
    elif capturing:
        _tables_of_graphs.append(table)         # a graph reads it whenever it is replayed
    return table, align


def _heads_shapes(q, k, name):
    (B, H, T, D), G = q.shape, k.shape[1]
    block = _power_of_2(D // 2)
    rows, warps = _tile(name, block * max(1, _power_of_2(H // G) // 4))     # SETTINGS are for up to 4 query heads in a group; more would not fit registers
    return B, H, T, D, G, _ceil_div(T * G, rows), dict(G=G, GROUP=H // G, D=D, BLOCK=block, ROWS=rows, num_warps=warps)


@_operator()
def _heads_forward(q: Tensor, k: Tensor, v: Tensor, q_weight: Optional[Tensor], k_weight: Optional[Tensor], cos: Optional[Tensor],
                   sin: Optional[Tensor], eps: float, k_norm_last: bool, source_k: list[Tensor], source_v: list[Tensor],
                   launch: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finished q and k (empty without cos), mixed v (empty without sources), all in [B, T, heads, D] memory; log-sum-exp of the depth scores."""
    B, H, T, D, G, tiles, shapes = _heads_shapes(q, k, "heads_forward")
    rope, mix = cos is not None, len(source_k) > 0
    q_out = q.new_empty(B, T, H, D) if rope else q.new_empty(0)
    k_out = k.new_empty(B, T, G, D) if rope else k.new_empty(0)
    mixed = v.new_empty(B, T, G, D) if mix else v.new_empty(0)
    lse = torch.empty(*(B, T, G) if mix else (0,), device=q.device, dtype=torch.float32)
    if launch:
        table, align = _source_table(q.device, source_k, source_v) if mix else (None, 16)
        _heads_forward_kernel[(tiles, B)](
            q, k, v, q.stride()[:3], k.stride()[:3], v.stride()[:3], q_weight, k_weight, cos, sin, q_out, k_out, mixed, lse, table,
            len(source_k), T, eps, D ** -0.5, **shapes, K_NORM_LAST=k_norm_last, ALIGN=align)
    return q_out, k_out, mixed, lse


@_operator("grad_k", "grad_v")
def _heads_backward(q: Tensor, k: Tensor, v: Tensor, q_weight: Optional[Tensor], k_weight: Optional[Tensor], cos: Optional[Tensor],
                    sin: Optional[Tensor], eps: float, k_norm_last: bool, dq: Optional[Tensor], dk: Optional[Tensor], dv: Tensor,
                    mixed: Tensor, lse: Tensor, source_k: list[Tensor], source_v: list[Tensor], grad_k: list[Tensor], grad_v: list[Tensor],
                    filled: list[int], launch: bool) -> tuple[Tensor, Tensor]:
    """Gradient of q | k | v [B, T, H + 2G, D] and of the two norms' weights [2, D]; the sources' gradients are stored in grad_k and grad_v,
    or added there where `filled`. dq and dk are None without cos."""
    name = "heads_backward_mix" if source_k and cos is not None else "heads_backward"
    B, H, T, D, G, tiles, shapes = _heads_shapes(q, k, name)
    *_, programs, registers = SETTINGS[name]
    programs = min(tiles * B, _multiprocessors(q.device) * programs)
    norm = q_weight is not None or k_weight is not None
    grad = q.new_empty(B, T, H + 2 * G, D)
    dw = torch.empty(programs if norm else 0, 2, D, device=q.device, dtype=torch.float32)
    if launch:
        dq, dk, dv = (x if x is None else _dense(x) for x in (dq, dk, dv))
        strides = [x.stride()[:3] for x in (q, k, v, dv if dq is None else dq, dv if dk is None else dk, dv)]
        table, align = _source_table(q.device, source_k, source_v, grad_k, grad_v, filled) if source_k else (None, 16)
        _heads_backward_kernel[(programs,)](
            q, k, v, *strides[:3], q_weight, k_weight, cos, sin, dq, dk, dv, *strides[3:], mixed, lse, grad, dw, table, len(source_k),
            tiles * B, T, eps, D ** -0.5, **shapes, K_NORM_LAST=k_norm_last, ALIGN=align, maxnreg=registers)
    return grad, _column_sums(dw, launch)


@dataclass
class Slot:
    """Keys and mixed values that later layers read, and one pair of buffers into which all those readers add their gradients.

    Autograd would give every reader tensors of its own and then add them up, three passes over memory a reader; a reader here adds in
    place, in its one backward kernel. A reader hands autograd no gradient for k and v, but they are its inputs: that is why the backward
    of `publish`, which picks the buffers up, runs after all readers' and runs even where nothing else reads k and v (MoDA's FFN slots).
    For eager code; compiled code passes plain tensors."""
    k: Tensor                                                       # [B, T, G, D] contiguous
    v: Tensor
    grads: list = field(default_factory=lambda: [None, None])       # of k and v; a buffer exists from the first reader's backward on


class _Publish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, grads):
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dk, dv):
        total = []
        for own, read in zip((dk, dv), ctx.grads, strict=True):
            read = read if read is None else read.transpose(1, 2)
            total.append(read if own is None else own if read is None else read.add_(own))
        ctx.grads[:] = None, None
        return *total, None


def publish(k, v):
    """(k, v, slot) of finished keys and mixed values [B, G, T, D]. The layer's own attention has to use the k and v returned here; later layers
    pass the slot as a source. Backward: the gradient of k and v plus what the slot's readers have added."""
    grads = [None, None]
    k, v = _Publish.apply(k, v, grads)
    return k, v, Slot(_rows(k), _rows(v), grads)


def _rows(x):
    """[B, G, T, D] -> contiguous [B, T, G, D]: a view of tensors in the training layout, else a copy."""
    return x.transpose(1, 2).contiguous()


def _sources(source_k, source_v, k, v):
    """(tensors: all keys, then all values, as contiguous [B, T, G, D]; the slots' gradient buffers or None). Sources: slots or tensor pairs."""
    source_k = list(source_k)
    if source_k and isinstance(source_k[0], Slot):
        tensors, grads = [s.k for s in source_k] + [s.v for s in source_k], [s.grads for s in source_k]
    else:
        tensors, grads = [_rows(x) for x in (*source_k, *source_v)], None
        if len(tensors) != 2 * len(source_k):
            raise ValueError(f"{len(source_k)} source keys but {len(tensors) - len(source_k)} source values were given; give one value for each key")
    B, G, T, D = k.shape
    for x, own in zip(tensors, [k] * len(source_k) + [v] * len(source_k), strict=True):
        if x.shape != (B, T, G, D) or x.dtype != own.dtype:
            raise ValueError(f"a source of shape [B, G, T, D] = {list(x.transpose(1, 2).shape)} and {x.dtype} does not go with keys and values of "
                             f"shape {list(k.shape)} and {own.dtype}; sources must have the same")
    return tensors, grads


def _slot_buffers(grads, slots):
    """(buffers for the gradients of all keys, then all values; whether a slot's hold gradients of other readers), given the slots' `grads`."""
    n, filled = len(grads), [int(pair[0] is not None) for pair in grads]
    for pair, k, v in zip(grads, slots[:n], slots[n:], strict=True):
        if pair[0] is None:
            pair[:] = torch.empty_like(k), torch.empty_like(v)
    return [pair[0] for pair in grads] + [pair[1] for pair in grads], filled


def _mix_backward(ctx, q, k, v, norms, dq, dk, dv, mixed, lse, sources):
    """(gradient of q | k | v, of the norms' weights, of the sources as ordinary autograd wants them)."""
    n = len(sources) // 2
    grads, filled = ([torch.empty_like(x) for x in sources], [0] * n) if ctx.grads is None else _slot_buffers(ctx.grads, sources)
    grad, dw = _heads_backward(q, k, v, *norms, dq, dk, dv, mixed, lse, list(sources[:n]), list(sources[n:]), grads[:n], grads[n:], filled)
    return grad, dw, grads if ctx.grads is None else [None] * (2 * n)


class _AttentionInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, heads, eps, k_norm_last, grads, *sources):
        q, k, v = _split_heads(qkv, *heads)
        n = len(sources) // 2
        q_out, k_out, mixed, lse = _heads_forward(q, k, v, q_weight, k_weight, cos, sin, eps, k_norm_last, list(sources[:n]), list(sources[n:]))
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin, mixed, lse, *sources)
        ctx.heads, ctx.eps, ctx.k_norm_last, ctx.grads = heads, eps, k_norm_last, grads
        return q_out.transpose(1, 2), k_out.transpose(1, 2), mixed.transpose(1, 2) if sources else v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, q_weight, k_weight, cos, sin, mixed, lse, *sources = ctx.saved_tensors
        norms = q_weight, k_weight, cos, sin, ctx.eps, ctx.k_norm_last
        grad, dw, dsources = _mix_backward(ctx, *_split_heads(qkv, *ctx.heads), norms, dq, dk, dv, mixed, lse, sources)
        dq_weight, dk_weight = (None if w is None else dw[i].to(w.dtype) for i, w in enumerate((q_weight, k_weight)))
        return grad.view(qkv.shape), dq_weight, dk_weight, *[None] * 6, *dsources


class _DepthMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, grads, *sources):
        n = len(sources) // 2
        *_, mixed, lse = _heads_forward(q, k, v, None, None, None, None, 0.0, False, list(sources[:n]), list(sources[n:]))
        ctx.save_for_backward(q, k, v, mixed, lse, *sources)
        ctx.grads = grads
        return mixed.transpose(1, 2)

    @staticmethod
    def backward(ctx, dv):
        q, k, v, mixed, lse, *sources = ctx.saved_tensors
        grad, _, dsources = _mix_backward(ctx, q, k, v, (None, None, None, None, 0.0, False), None, None, dv, mixed, lse, sources)
        return *(x.transpose(1, 2) for x in grad.split([q.shape[1], k.shape[1], k.shape[1]], dim=2)), None, *dsources


def _split_heads(qkv, n_head, n_kv_head):
    """[B, T, (H + 2G) D] -> views q [B, H, T, D], k and v [B, G, T, D]."""
    heads = qkv.view(*qkv.shape[:2], n_head + 2 * n_kv_head, -1).transpose(1, 2)
    return heads.split_with_sizes([n_head, n_kv_head, n_kv_head], dim=1)


def attention_inputs(qkv, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps, k_norm_after_rope=False, source_k=(), source_v=()):
    """Queries, keys and values as attention wants them, in one pass over qkv [B, T, (H + 2G) D] = q heads | k heads | v heads.

    q: RMSNorm over each head with q_weight [D] (None: no norm), then RoPE of halves by cos, sin [T, D/2]. k: the same with k_weight, or RoPE
    first with k_norm_after_rope. v: as it is (a view of qkv) or, given sources, mixed as `depth_mix` says.
    Sources: N slots from `publish` as source_k, or N keys and N values [B, G, T, D]. Returns q [B, H, T, D], k and v [B, G, T, D]."""
    T, D = qkv.shape[1], qkv.shape[2] // (n_head + 2 * n_kv_head)
    if qkv.shape[2] != (n_head + 2 * n_kv_head) * D or D % 2 or cos.shape != (T, D // 2) or sin.shape != cos.shape:
        raise ValueError(f"qkv {list(qkv.shape)} with {n_head} query and {n_kv_head} KV heads does not go with cos {list(cos.shape)} and sin "
                         f"{list(sin.shape)}; expected qkv [B, T, (n_head + 2 n_kv_head) D] with an even D, and cos and sin [T, D/2]")
    qkv, sources, grads = qkv.contiguous(), [], None
    if len(source_k) or len(source_v):
        _, k, v = _split_heads(qkv, n_head, n_kv_head)
        sources, grads = _sources(source_k, source_v, k, v)
    return _AttentionInputs.apply(qkv, q_weight, k_weight, cos.contiguous(), sin.contiguous(), (n_head, n_kv_head), eps, k_norm_after_rope,
                                  grads, *sources)


def depth_mix(q, k, v, source_k, source_v=()):
    """Depth-Attention's mixed value (arXiv 2606.05014): sum_j a_j m_j + a_self v with a = softmax over (sources j, self) of <qbar, k_j> / sqrt(D)
    and qbar the mean query of the KV head's group. q [B, H, T, D], k and v [B, G, T, D], any strides; D even. Sources: N slots from `publish`
    as source_k, or N keys k_j and N values m_j [B, G, T, D] (lists, or stacked tensors). Sources that are not in the training layout are copied.
    Returns [B, G, T, D]."""
    if q.shape[-1] % 2:
        raise ValueError(f"head_dim is {q.shape[-1]}; depth_mix works on halves of heads and needs an even one")
    sources, grads = _sources(source_k, source_v, k, v)
    return _DepthMix.apply(_dense(q), _dense(k), _dense(v), grads, *sources) if sources else v


# ---------------------------------------------------------------------------------------------------------------------------------------
# Cross entropy

@triton.jit
def _cross_entropy_kernel(logits, targets, loss, V, stride, ignore_index, LANES: tl.constexpr):
    """One row: the log-sum-exp online, then the gradient over the logits, which the second read finds in cache. A thread keeps the running
    maximum of its own columns, so the only exchange between threads is the one at the end."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    known = (target >= 0) & (target < V)
    target_logit = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32)     # an impossible target shows up as a NaN loss
    cols = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([LANES], -1e30, tl.float32)       # finite: a lane may see no column at all
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, V, 8 * LANES):
        x = tl.load(logits + start + cols, mask=start + cols < V, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top[:, None]), 1)
        top = new_top
    row_top = tl.max(top, 0)
    lse = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    ignored = target == ignore_index
    tl.store(loss + row, tl.where(ignored, 0.0, lse - target_logit))
    lse = tl.where(ignored, float("inf"), lse)      # exp(x - inf) = 0: a row of zeros
    for start in range(0, V, 8 * LANES):
        x = tl.load(logits + start + cols, mask=start + cols < V, other=0.0).to(tl.float32)
        tl.store(logits + start + cols, tl.exp(x - lse).to(logits.dtype.element_ty), mask=start + cols < V)
    tl.debug_barrier()                              # the target's entry is written again, after all threads' writes
    tl.store(logits + target, (tl.exp(target_logit - lse) - 1.0).to(logits.dtype.element_ty), mask=known & (target != ignore_index))


@_operator("logits")
def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, launch: bool) -> Tensor:
    loss = torch.empty(logits.shape[0], device=logits.device, dtype=torch.float32)
    if launch:
        warps, elements = SETTINGS["cross_entropy"]
        _cross_entropy_kernel[(logits.shape[0],)](logits, targets, loss, logits.shape[1], logits.stride(0), ignore_index,
                                                  warps * 32 * elements // 8, num_warps=warps)
    return loss


def cross_entropy_(logits, targets, ignore_index=-100):
    """Cross entropy of each row in nats, float32 [N], of logits [N, V] against targets [N]; 0 where the target is ignore_index, NaN where it is no
    column. Overwrites the logits with the gradient of the rows' sum, softmax - onehot (zero rows where ignored): the caller's backward
    uses that, autograd sees nothing here."""
    if logits.ndim != 2 or logits.stride(1) != 1 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} with strides {logits.stride()} and targets {list(targets.shape)} were given; "
                         f"expected logits [N, V] with adjacent columns and targets [N]")
    return _cross_entropy(logits, targets.contiguous(), ignore_index)


# ---------------------------------------------------------------------------------------------------------------------------------------
# The flash-attn packages

@functools.lru_cache
def _flash_attn():
    """(name, forward, backward) of the newest flash-attn package that is installed and runs on this GPU, else (None, None, None). The two
    functions are flash-attn 4's own; versions 2 and 3 bring their autograd with them: forward is their public function, backward None.
    Warns of one that is there and cannot be imported."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    try:
        if hopper:
            from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
            return 'flash_attn_4', _flash_attn_fwd, _flash_attn_bwd
    except (ImportError, OSError, AttributeError) as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")):  # else it is not there
            warnings.warn(f"flash-attn 4 is installed but cannot be imported, so another attention runs: {type(error).__name__}: {error}", stacklevel=2)
    for name, module in ('flash_attn_3', 'flash_attn_interface'), ('flash_attn_2', 'flash_attn'):
        try:
            function = importlib.import_module(module).flash_attn_func
            if hopper or name == 'flash_attn_2':
                return name, function, None
        except (ImportError, AttributeError):
            pass
    return None, None, None


def flash_attn_version(head_dim):
    """'flash_attn_4', 'flash_attn_3' or 'flash_attn_2': the flash-attn package that `flash_attention` uses for such heads; None without one."""
    name = _flash_attn()[0]
    return name if name and head_dim % 8 == 0 and head_dim <= (128 if name == 'flash_attn_4' else 256) else None


@_operator()
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, launch: bool) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, G, D] -> output [B, T, H, D], log-sum-exp [B, H, T]."""
    if not launch:
        return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return _flash_attn()[1](q, k, v, causal=True, return_lse=True)[:2]


@_operator()
def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, launch: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not launch:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    return _flash_attn()[2](q, k, v, o, do, lse, causal=True)[:3]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        o, lse = _flash_forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        return _flash_backward(do.contiguous(), q, k, v, o, lse)


def flash_attention(q, k, v):
    """Causal attention by the package that `flash_attn_version` names. q [B, H, T, D], k and v [B, G, T, D], half precision -> [B, H, T, D]."""
    name, function, _ = _flash_attn()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (_FlashAttention.apply(q, k, v) if name == 'flash_attn_4' else function(q, k, v, causal=True)).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Mixture-of-Depths Attention (arXiv 2603.15619): a pass over the depth slots, joined to a flash attention over the sequence
#
# A row is a (token, KV head) pair, numbered as [B, T, G] memory is laid out, so that a row's key in any slot lies at row * D. A program takes
# neighbouring rows through all slots. Its matrix products are batched over rows: one row's GROUP query heads against SLOTS slots of its own,
# so that no product is masked away, and one warp owns one row, so that the softmax needs no exchange between warps. GROUP is padded to the
# 16 rows of the tensor cores' instruction, which they can spare here: the time goes into reading the slots.

@triton.jit
def _slots(table, slot, live, offset, ENTRIES: tl.constexpr, like, ALIGN: tl.constexpr):
    """Pointers [ROWS, SLOTS, D] into the slots whose addresses stand in one column of the table."""
    address = tl.load(table + slot * ENTRIES, mask=live, other=0)
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), ALIGN)[None, :, None] + offset


@triton.jit
def _rows_and_heads(n_rows, T, G: tl.constexpr, GROUP: tl.constexpr, GROUP_: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows: number and validity [ROWS, 1], batch and time [ROWS, 1], query heads and validity [ROWS, GROUP_], columns [1, 1, D_]."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    i = tl.arange(0, GROUP_)[None, :]
    head = row % G * GROUP + i
    return row, row < n_rows, row // G // T, row // G % T, head, (row < n_rows) & (i < GROUP), tl.arange(0, D_)[None, None, :]


@triton.jit
def _vectors(strides, batch, head, t, cols):
    """Offsets [ROWS, GROUP_, D_] of head vectors in a tensor [B, H, T, D]."""
    return (batch * strides[0] + head * strides[1] + t * strides[2])[:, :, None] + cols


@triton.jit(do_not_specialize=["n_slots"])
def _moda_forward_kernel(q, q_strides, o, o_strides, lse, lse_strides, table, n_slots, n_rows, T, scale, G: tl.constexpr, GROUP: tl.constexpr,
                         GROUP_: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
                         JOINT: tl.constexpr, ALIGN: tl.constexpr):
    row, valid, batch, t, head, head_valid, cols = _rows_and_heads(n_rows, T, G, GROUP, GROUP_, D, D_, ROWS)
    mask = head_valid[:, :, None] & (cols < D)
    query = tl.load(q + _vectors(q_strides, batch, head, t, cols), mask=mask, other=0.0)
    o += _vectors(o_strides, batch, head, t, cols)
    lse += batch * lse_strides[0] + head * lse_strides[1] + t
    LOG2E: tl.constexpr = 1.4426950408889634
    if JOINT:       # the sequence part, which o and lse hold, is the first entry of the online softmax
        top = tl.load(lse, mask=head_valid, other=0.0) * LOG2E
        total = tl.full([ROWS, GROUP_], 1.0, tl.float32)
        acc = tl.load(o, mask=mask, other=0.0).to(tl.float32)
    else:
        top = tl.full([ROWS, GROUP_], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, GROUP_], tl.float32)
        acc = tl.zeros([ROWS, GROUP_, D_], tl.float32)
    for first in tl.range(0, n_slots, SLOTS, num_stages=STAGES):
        slot = first + tl.arange(0, SLOTS)
        live = slot < n_slots
        kv_mask = (valid & live[None, :])[:, :, None] & (cols < D)
        k = tl.load(_slots(table, slot, live, row[:, :, None] * D + cols, 2, q, ALIGN), mask=kv_mask, other=0.0)
        v = tl.load(_slots(table + 1, slot, live, row[:, :, None] * D + cols, 2, q, ALIGN), mask=kv_mask, other=0.0)
        score = tl.dot(query, tl.permute(k, (0, 2, 1)), input_precision="tf32x3") * (scale * LOG2E)
        score = tl.where(live[None, None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 2))
        old, p = tl.exp2(top - new_top), tl.exp2(score - new_top[:, :, None])
        total = total * old + tl.sum(p, 2)
        acc = tl.dot(p.to(v.dtype), v, acc * old[:, :, None], input_precision="tf32x3")
        top = new_top
    tl.store(o, (acc / total[:, :, None]).to(o.dtype.element_ty), mask=mask)
    tl.store(lse, (top + tl.log2(total)) / LOG2E, mask=head_valid)


@triton.jit(do_not_specialize=["n_slots"])
def _moda_backward_kernel(q, q_strides, o, o_strides, do, do_strides, lse, lse_strides, dq, dq_strides, table, n_slots, n_rows, T, scale,
                          G: tl.constexpr, GROUP: tl.constexpr, GROUP_: tl.constexpr, D: tl.constexpr, D_: tl.constexpr, ROWS: tl.constexpr,
                          SLOTS: tl.constexpr, STAGES: tl.constexpr, FILLED: tl.constexpr, ALIGN: tl.constexpr):
    row, valid, batch, t, head, head_valid, cols = _rows_and_heads(n_rows, T, G, GROUP, GROUP_, D, D_, ROWS)
    mask = head_valid[:, :, None] & (cols < D)
    query = tl.load(q + _vectors(q_strides, batch, head, t, cols), mask=mask, other=0.0)
    grad = tl.load(do + _vectors(do_strides, batch, head, t, cols), mask=mask, other=0.0)
    out = tl.load(o + _vectors(o_strides, batch, head, t, cols), mask=mask, other=0.0)
    LOG2E: tl.constexpr = 1.4426950408889634
    log_total = tl.load(lse + batch * lse_strides[0] + head * lse_strides[1] + t, mask=head_valid, other=0.0) * LOG2E
    centre = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 2)        # sum over the joint softmax of p <do, v>
    acc = tl.zeros([ROWS, GROUP_, D_], tl.float32)
    for first in tl.range(0, n_slots, SLOTS, num_stages=STAGES):
        slot = first + tl.arange(0, SLOTS)
        live = slot < n_slots
        kv_mask = (valid & live[None, :])[:, :, None] & (cols < D)
        k = tl.load(_slots(table, slot, live, row[:, :, None] * D + cols, 5, q, ALIGN), mask=kv_mask, other=0.0)
        v = tl.load(_slots(table + 1, slot, live, row[:, :, None] * D + cols, 5, q, ALIGN), mask=kv_mask, other=0.0)
        score = tl.dot(query, tl.permute(k, (0, 2, 1)), input_precision="tf32x3") * (scale * LOG2E)
        p = tl.where(live[None, None, :], tl.exp2(score - log_total[:, :, None]), 0.0)
        dp = tl.dot(grad, tl.permute(v, (0, 2, 1)), input_precision="tf32x3")
        ds = (p * (dp - centre[:, :, None]) * scale).to(query.dtype)
        dv = tl.dot(tl.permute(p.to(query.dtype), (0, 2, 1)), grad, input_precision="tf32x3")
        dk = tl.dot(tl.permute(ds, (0, 2, 1)), query, input_precision="tf32x3")
        acc = tl.dot(ds, k, acc, input_precision="tf32x3")
        dk_pointer = _slots(table + 2, slot, live, row[:, :, None] * D + cols, 5, q, ALIGN)
        dv_pointer = _slots(table + 3, slot, live, row[:, :, None] * D + cols, 5, q, ALIGN)
        if FILLED:          # some slots hold gradients of later layers already
            filled = kv_mask & (tl.load(table + slot * 5 + 4, mask=live, other=0) != 0)[None, :, None]
            dk += tl.load(dk_pointer, mask=filled, other=0.0).to(tl.float32)
            dv += tl.load(dv_pointer, mask=filled, other=0.0).to(tl.float32)
        tl.store(dk_pointer, dk.to(query.dtype), mask=kv_mask)
        tl.store(dv_pointer, dv.to(query.dtype), mask=kv_mask)
    dq += _vectors(dq_strides, batch, head, t, cols)
    acc += tl.load(dq, mask=mask, other=0.0).to(tl.float32)         # the sequence part
    tl.store(dq, acc.to(query.dtype), mask=mask)


def _moda_shapes(q, G, name):
    B, H, T, D = q.shape
    warps, rows_a_warp, slots, stages, registers = SETTINGS[name]
    group, width = max(16, _power_of_2(H // G)), max(16, _power_of_2(D))
    # a row's share of shared memory grows with these; in float32 the matrix products split every operand in two
    room = max(1, 2**15 // (group * width * q.element_size() * (2 if q.dtype == torch.float32 else 1)))
    rows = min(warps * rows_a_warp, room)
    shapes = dict(G=G, GROUP=H // G, GROUP_=group, D=D, D_=width, ROWS=rows, SLOTS=slots, STAGES=stages, num_warps=min(warps, rows),
                  maxnreg=registers if group * width * q.element_size() <= 2048 else None)
    return (_ceil_div(B * T * G, rows),), B * T * G, T, D ** -0.5, shapes


def _launch_moda_forward(q, G, o, lse, slot_k, slot_v, joint):
    """Joins the slots' part to the o and lse of another part of the softmax, in place, or fills o and lse with the slots' part alone."""
    grid, n_rows, T, scale, shapes = _moda_shapes(q, G, "moda_forward")
    table, align = _source_table(q.device, slot_k, slot_v)
    _moda_forward_kernel[grid](q, q.stride()[:3], o, o.stride()[:3], lse, lse.stride()[:2], table, len(slot_k), n_rows, T, scale,
                               JOINT=joint, ALIGN=align, **shapes)


def _launch_moda_backward(q, G, o, do, lse, dq, slot_k, slot_v, grad_k, grad_v, filled):
    """Gradients of the slots, stored in grad_k and grad_v or added there where `filled`; that of q is added to dq."""
    grid, n_rows, T, scale, shapes = _moda_shapes(q, G, "moda_backward")
    table, align = _source_table(q.device, slot_k, slot_v, grad_k, grad_v, filled)
    _moda_backward_kernel[grid](q, q.stride()[:3], o, o.stride()[:3], do, do.stride()[:3], lse, lse.stride()[:2], dq, dq.stride()[:3], table,
                                len(slot_k), n_rows, T, scale, FILLED=any(filled), ALIGN=align, **shapes)


# Attention over the sequence with its log-sum-exp, and the backward pass as a function of output and log-sum-exp. Given those of the JOINT
# softmax, the backward of any flash attention returns exactly the sequence's part of the joint gradient: all that it needs of the other part
# is the normaliser and <do, o>.

def _sequence_backend(q, k):
    """The attention over the sequence that `moda_attention` uses where it is not told one."""
    D = q.shape[-1]
    if q.device.type != "cuda" or q.dtype == torch.float32 and q.shape[2] != k.shape[2]:
        return "math"
    if q.shape[2] != k.shape[2]:        # a cache: one query is behind all keys, and more than one need a mask that only "math" has
        return "flash" if q.shape[2] == 1 else "math"
    if q.dtype == torch.float32:
        return "efficient"
    if flash_attn_version(D) == "flash_attn_4":
        return "flash_attn_4"
    return "cudnn" if torch.cuda.get_device_capability()[0] >= 9 and D <= 128 else "flash"


_cudnn_lse_axes = 3     # cuDNN's log-sum-exp is [B, H, T] or [B, H, T, 1], by PyTorch's version


def _sequence_forward(q, k, v, backend):
    """Causal attention of the last T of S positions: o [B, H, T, D] in [B, T, H, D] memory, as q is, and lse [B, H, T], float32 and contiguous."""
    global _cudnn_lse_axes
    if backend == "flash_attn_4":
        o, lse, *_ = _flash_attn()[1](q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True, return_lse=True)
        return o.transpose(1, 2), lse
    if backend == "cudnn":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
        _cudnn_lse_axes = lse.ndim
    elif backend == "flash":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, q.shape[2] > 1)
    elif backend == "efficient":
        o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, *_repeat(q, k, v), None, True, 0.0, True)
        lse = lse[..., :q.shape[2]]
    else:
        scores = _causal_scores(q, k)
        lse = scores.logsumexp(-1)
        o = _by_group(lambda p, v: p @ v, (scores - lse.unsqueeze(-1)).exp(), v.float()).to(q.dtype)
    return _rows(o).transpose(1, 2), lse.reshape(q.shape[:3]).contiguous()


def _sequence_backward(do, q, k, v, o, lse, backend):
    """Gradients of q, k and v in [B, T, heads, D] memory."""
    none, T = q.new_empty(0, dtype=torch.int64), q.shape[2]     # no dropout, so no random state
    if backend == "flash_attn_4":
        dq, dk, dv = (x.transpose(1, 2) for x in _flash_attn()[2](*(x.transpose(1, 2) for x in (q, k, v, o, do)), lse, causal=True)[:3])
    elif backend == "cudnn":
        lse = lse.unsqueeze(-1) if _cudnn_lse_axes == 4 else lse
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, o, lse, none, none, None, None, None, T, T, 0.0, True)
    elif backend == "flash":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(do, q, k, v, o, lse, None, None, T, k.shape[2], 0.0, T > 1, none, none)
    elif backend == "efficient":
        lse = torch.nn.functional.pad(lse, (0, -T % 32), value=float("inf"))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            do, q, *_repeat(q, k, v), None, o, lse, none, none, 0.0, [True, True, True, False], True)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    else:
        do, o, q32, k32, v32 = (x.float() for x in (do, o, q, k, v))
        p = (_causal_scores(q, k) - lse.unsqueeze(-1)).exp()
        ds = p * (_by_group(lambda g, v: g @ v.mT, do, v32) - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq = _by_group(lambda s, k: s @ k, ds, k32)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (ds.mT @ q32, p.mT @ do))
    return tuple(_rows(x.to(q.dtype)).transpose(1, 2) for x in (dq, dk, dv))


def _repeat(q, *kv):
    """[B, G, T, D] -> [B, H, T, D], each KV head once for every query head that reads it."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in kv]


def _by_group(function, x, y):
    """function of x [B, H, ...] and y [B, G, ...], in which each KV head of y serves H / G heads of x; nothing is repeated in memory."""
    return function(x.unflatten(1, (y.shape[1], -1)), y.unsqueeze(2)).flatten(1, 2)


def _causal_scores(q, k):
    """Scores [B, H, T, S] in float32, -inf where a key is later than the query."""
    scores = _by_group(lambda q, k: q @ k.mT, q.float(), k.float()) * q.shape[-1] ** -0.5
    T, S = scores.shape[-2:]
    return scores.masked_fill(~torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T), float("-inf"))


def _heads_like(x, heads):
    B, _, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


@_operator()
def _moda_forward(q: Tensor, k: Tensor, v: Tensor, slot_k: list[Tensor], slot_v: list[Tensor], backend: str, launch: bool) -> tuple[Tensor, Tensor]:
    if not launch:
        return _heads_like(q, q.shape[1]), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    o, lse = _sequence_forward(q, k, v, backend or _sequence_backend(q, k))
    if slot_k:
        _launch_moda_forward(q, k.shape[1], o, lse, slot_k, slot_v, True)
    return o, lse


@_operator("grad_k", "grad_v")
def _moda_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, slot_k: list[Tensor], slot_v: list[Tensor],
                   grad_k: list[Tensor], grad_v: list[Tensor], filled: list[int], backend: str, launch: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not launch:
        return _heads_like(q, q.shape[1]), _heads_like(k, k.shape[1]), _heads_like(v, v.shape[1])
    dq, dk, dv = _sequence_backward(do, q, k, v, o, lse, backend or _sequence_backend(q, k))
    if slot_k:
        _launch_moda_backward(q, k.shape[1], o, do, lse, dq, slot_k, slot_v, grad_k, grad_v, filled)
    return dq, dk, dv


class _MoDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, backend, grads, *depth):      # depth: all keys, then all values, as `_slot_rows` takes them
        slots = _slot_rows(depth, k[:, :, :q.shape[2]], grads is not None)
        n = len(slots) // 2
        o, lse = _moda_forward(q, k, v, list(slots[:n]), list(slots[n:]), backend)
        ctx.save_for_backward(q, k, v, o, lse, *slots)
        ctx.backend, ctx.grads, ctx.stacked = backend, grads, len(depth) > 0 and depth[0].ndim == 5
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, *slots = ctx.saved_tensors
        n = len(slots) // 2
        if ctx.grads is not None:
            grads, filled = _slot_buffers(ctx.grads, slots)
            whole = [None] * (2 * n)
        else:       # one allocation: a hundred tensors and their views would cost the host more time than the kernel takes
            B, G, _, D = k.shape
            whole = k.new_empty(2, n, B, q.shape[2], G, D).transpose(3, 4)
            grads, filled = list(whole.flatten(0, 1).unbind(0)), [0] * n
            whole = whole.unbind(0) if ctx.stacked else grads
        dq, dk, dv = _moda_backward(_training_layout(do), q, k, v, o, lse, slots[:n], slots[n:], grads[:n], grads[n:], filled, ctx.backend)
        return dq, dk, dv, None, None, *whole


def _slot_rows(depth, k, laid_out=False):
    """Tensors in the training layout, of which the kernels take the addresses: all keys, then all values, of 2 L tensors shaped as k [B, G, T, D]
    or of two [L, B, G, T, D]. laid_out: they are contiguous [B, T, G, D] already."""
    B, G, T, D = k.shape
    shape, strides = (B, T, G, D) if laid_out else (B, G, T, D), (T * G * D, D, G * D, 1)
    for x in depth:
        if x.shape[-4:] != shape or x.dtype != k.dtype:
            raise ValueError(f"a depth slot of shape {list(x.shape)} and {x.dtype} was given for keys [B, G, T, D] = {list(k.shape)} and {k.dtype}; "
                             f"expected a slot or tensor of the same batch, heads, tokens and head_dim (or L tensors stacked), and of the same dtype")
    if depth and depth[0].ndim == 5:
        depth = [row for x in depth for row in x.unbind(0)]
    return depth if laid_out else [x if x.stride() == strides else _training_layout(x) for x in depth]


def _training_layout(x):
    """x [B, H, T, D] as a transposed view of contiguous [B, T, H, D] memory."""
    return _rows(x).transpose(1, 2)


def moda_attention(q, k, v, depth_k, depth_v=(), backend=""):
    """Mixture-of-Depths Attention (arXiv 2603.15619): one softmax over the causal sequence and the token's own depth slots,

        o_i = (sum_{j<=i} exp(s q_i.k_j) v_j + sum_l exp(s q_i.kd_il) vd_il) / Z_i,    s = 1 / sqrt(D).

    q [B, H, T, D], k and v [B, G, S, D] whose last T positions are the queries'; D a multiple of 8. Depth: L slots from `publish` as depth_k, or
    L keys and L values [B, G, T, D] (lists, or stacked tensors; those that are not in the training layout are copied). Returns [B, H, T, D].
    backend: attention over the sequence, "flash_attn_4", "cudnn" or "flash" ("" chooses); bfloat16 and float16 only."""
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if D % 8 or H % G or S < T or k.shape != (B, G, S, D) or v.shape != k.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype} and v {list(v.shape)} {v.dtype} were given; expected q [B, H, T, D] "
                         f"and k, v [B, G, S, D] of one dtype, with H a multiple of G, D a multiple of 8 and S not less than T")
    depth, grads = _depth(depth_k, depth_v)
    return _MoDA.apply(_training_layout(q), _dense(k), _dense(v), backend, grads, *depth)


def _depth(depth_k, depth_v):
    """(tensors, the slots' gradient buffers or None) of slots, of lists of tensors, or of two stacked tensors."""
    if isinstance(depth_k, Tensor):
        return (depth_k, depth_v) if len(depth_k) else (), None
    if len(depth_k) and isinstance(depth_k[0], Slot):
        return [s.k for s in depth_k] + [s.v for s in depth_k], [s.grads for s in depth_k]
    if len(depth_k) != len(depth_v):
        raise ValueError(f"{len(depth_k)} depth keys but {len(depth_v)} depth values were given; give one value for each key")
    return [*depth_k, *depth_v], None


def moda_depth(q, depth_k, depth_v):
    """The depth slots' part alone: (o [B, H, T, D], log-sum-exp [B, H, T] in float32) of each token's queries over its own L > 0 slots.
    Arguments as in `moda_attention`, but no slots from `publish`. No gradient."""
    k = depth_k[0]
    slots = _slot_rows(_depth(depth_k, depth_v)[0], k)
    n, q = len(slots) // 2, _dense(q)
    o, lse = _heads_like(q, q.shape[1]), torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    _launch_moda_forward(q, k.shape[1], o, lse, slots[:n], slots[n:], False)
    return o, lse


# ---------------------------------------------------------------------------------------------------------------------------------------
# Connectors that read many states [..., C] of the residual stream: a softmax over depth (AttnRes) and a weighted sum (DenseFormer)

@dataclass
class State:
    """A state of the residual stream that later layers read, and the buffer into which those readers add their gradients, as in `Slot`."""
    x: Tensor                                                   # [..., C], contiguous
    grads: list = field(default_factory=lambda: [None])


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grads):
        ctx.grads = grads
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, own):
        read = ctx.grads[0]
        ctx.grads[0] = None
        return own if read is None else read if own is None else read.add_(own), None


def keep(x):
    """(x, state) of a state [..., C] of the residual stream. The stream goes on with the x returned here; later readers take the state.
    Backward: the gradient of x plus what the state's readers have added."""
    grads = [None]
    x = _Keep.apply(x.contiguous(), grads)
    return x, State(x, grads)


def _states(sources):
    """(tensors, their gradient buffers or None) of States and tensors [..., C]."""
    tensors = [s.x if isinstance(s, State) else s.contiguous() for s in sources]
    if any(x.shape != tensors[0].shape or x.dtype != tensors[0].dtype for x in tensors):
        raise ValueError(f"sources of {[(list(x.shape), str(x.dtype)) for x in tensors]} were given; expected states or tensors of one shape [..., C] and "
                         f"one dtype")
    return tensors, [s.grads if isinstance(s, State) else None for s in sources]


def _state_buffers(grads, sources):
    """(buffers for the gradients of the sources, whether each holds gradients of other readers, what autograd is to be given)."""
    filled = [int(g is not None and g[0] is not None) for g in grads]
    buffers = [g[0] if full else torch.empty_like(x) for g, full, x in zip(grads, filled, sources, strict=True)]
    for g, buffer in zip(grads, buffers, strict=True):
        if g is not None:
            g[0] = buffer
    return buffers, filled, [buffer if g is None else None for g, buffer in zip(grads, buffers, strict=True)]


def _where_filled(grads, filled):
    return [x.data_ptr() * f for x, f in zip(grads, filled, strict=True)]


@triton.jit(do_not_specialize=["n_sources"])
def _attnres_forward_kernel(table, n_sources, query, bias, out, lse, n_rows, eps, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                            STAGES: tl.constexpr, ALIGN: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    place, mask = rows[:, None] * C + cols, (rows < n_rows)[:, None] & (cols < C)
    w = tl.load(query + cols, mask=cols < C, other=0.0).to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, n_sources, num_stages=STAGES):
        s = tl.load(_pointer(table, i, out, ALIGN) + place, mask=mask, other=0.0).to(tl.float32)
        score = tl.sum(s * w, 1) * tl.rsqrt(tl.sum(s * s, 1) / C + eps)
        if bias is not None:
            score += tl.where(i == n_sources - 1, tl.load(bias).to(tl.float32), 0.0)
        new_top = tl.maximum(top, score)
        old, new = tl.exp(top - new_top), tl.exp(score - new_top)
        total = total * old + new
        acc = acc * old[:, None] + s * new[:, None]
        top = new_top
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + rows, top + tl.log(total), mask=rows < n_rows)


@triton.jit(do_not_specialize=["n_sources"])
def _attnres_backward_kernel(table, n_sources, query, bias, out, dout, lse, dw, dbias, n_rows, eps, C: tl.constexpr, BLOCK: tl.constexpr,
                             ROWS: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr):
    cols = tl.arange(0, BLOCK)[None, :]
    w = tl.load(query + cols, mask=cols < C, other=0.0).to(tl.float32)
    dw_tile = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias_tile = tl.zeros([ROWS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        place, mask = rows[:, None] * C + cols, (rows < n_rows)[:, None] & (cols < C)
        g = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        centre = tl.sum(g * tl.load(out + place, mask=mask, other=0.0).to(tl.float32), 1)
        log_total = tl.load(lse + rows, mask=rows < n_rows, other=0.0)
        others = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, n_sources, num_stages=STAGES):
            s = tl.load(_pointer(table, 3 * i, out, ALIGN) + place, mask=mask, other=0.0).to(tl.float32)
            ds = _pointer(table, 3 * i + 1, out, ALIGN) + place
            filled = tl.where(tl.load(table + 3 * i + 2) != 0, n_rows, 0)       # what earlier readers left there; not read when there were none
            before = tl.load(ds, mask=mask & (rows < filled)[:, None], other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(s * s, 1) / C + eps)
            score = tl.sum(s * w, 1) * rstd
            last = tl.where(i == n_sources - 1, 1.0, 0.0)
            a = tl.exp(score + last * tl.load(bias).to(tl.float32) - log_total) if bias is not None else tl.exp(score - log_total)
            dscore = a * (tl.sum(g * s, 1) - centre)
            # they add up to 0: for a last source near the rounded `out` the rest is exact where the difference is not
            dscore = tl.where(rows < n_rows, tl.where((i == n_sources - 1) & (a > 0.5), -others, dscore), 0.0)
            others += dscore
            along = dscore * score * rstd * rstd / C        # of d score / d s = rstd w - score rstd^2 / C s
            scaled = (dscore * rstd)[:, None]
            tl.store(ds, (before + a[:, None] * g + scaled * w - along[:, None] * s).to(out.dtype.element_ty), mask=mask)
            dw_tile += scaled * s
            dbias_tile += last * dscore
    cols = tl.arange(0, BLOCK)
    tl.store(dw + tl.program_id(0) * C + cols, tl.sum(dw_tile, 0), mask=cols < C)
    if bias is not None:
        tl.store(dbias + tl.program_id(0), tl.sum(dbias_tile, 0))


def _attnres_shapes(x, name):
    C, stages = x.shape[-1], SETTINGS[name][-1]
    block = _power_of_2(C)
    rows, warps = _tile(name, block)
    return x.numel() // C, dict(C=C, BLOCK=block, ROWS=rows, STAGES=stages, num_warps=warps)


@_operator()
def _attnres_forward(sources: list[Tensor], query: Tensor, bias: Optional[Tensor], eps: float, launch: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(sources[-1])
    n_rows, shapes = _attnres_shapes(out, "attnres_forward")
    lse = torch.empty(n_rows, device=out.device, dtype=torch.float32)
    if launch:
        table, align = _source_table(out.device, sources)
        _attnres_forward_kernel[(_ceil_div(n_rows, shapes["ROWS"]),)](table, len(sources), query, bias, out, lse, n_rows, eps, ALIGN=align, **shapes)
    return out, lse


@_operator("grads")
def _attnres_backward(sources: list[Tensor], query: Tensor, bias: Optional[Tensor], eps: float, out: Tensor, lse: Tensor, dout: Tensor,
                      grads: list[Tensor], filled: list[int], launch: bool) -> tuple[Tensor, Tensor]:
    """Gradients of query [C] and of the bias (empty without one), in float32; the sources' are stored in grads, or added there where `filled`."""
    n_rows, shapes = _attnres_shapes(out, "attnres_backward")
    programs = min(_ceil_div(n_rows, shapes["ROWS"]), _multiprocessors(out.device) * SETTINGS["attnres_backward"][2])
    dw = torch.empty(programs, out.shape[-1], device=out.device, dtype=torch.float32)
    dbias = torch.empty(programs if bias is not None else 0, device=out.device, dtype=torch.float32)
    if launch:
        table, align = _source_table(out.device, sources, grads, _where_filled(grads, filled))
        _attnres_backward_kernel[(programs,)](table, len(sources), query, bias, out, dout.contiguous(), lse, dw, dbias, n_rows, eps, ALIGN=align, **shapes)
    return _column_sums(dw, launch), dbias if bias is None else dbias.sum()


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, bias, eps, grads, *sources):
        out, lse = _attnres_forward(list(sources), query, bias, eps)
        ctx.save_for_backward(query, bias, out, lse, *sources)
        ctx.eps, ctx.grads = eps, grads
        return out

    @staticmethod
    def backward(ctx, dout):
        query, bias, out, lse, *sources = ctx.saved_tensors
        buffers, filled, grads = _state_buffers(ctx.grads, sources)
        dquery, dbias = _attnres_backward(sources, query, bias, ctx.eps, out, lse, dout, buffers, filled)
        return dquery.to(query.dtype), None if bias is None else dbias.to(bias.dtype).view(bias.shape), None, None, *grads


def attnres_mix(sources, query, eps, bias=None):
    """Softmax over depth of n sources s_i [..., C] (arXiv 2603.15031): sum_i a_i s_i with a = softmax_i(<query, s_i> / sqrt(mean(s_i^2) + eps)), the
    last score plus `bias` (a tensor of one element, or None). query [C]: the pseudo-query times the key norm's weight. Sources: tensors, or
    states from `keep`. Returns [..., C]."""
    tensors, grads = _states(sources)
    return _AttnRes.apply(query, bias, eps, grads, *tensors)


@triton.jit(do_not_specialize=["n_sources"])
def _average_kernel(table, n_sources, weights, out, n_elements, BLOCK: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, n_sources, num_stages=STAGES):
        s = tl.load(_pointer(table, i, out, ALIGN) + place, mask=place < n_elements, other=0.0).to(tl.float32)
        acc += tl.load(weights + i).to(tl.float32) * s
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=place < n_elements)


@_operator()
def _average_forward(sources: list[Tensor], weights: Tensor, launch: bool) -> Tensor:
    out = torch.empty_like(sources[-1])
    if launch:
        warps, elements, stages = SETTINGS["average"]
        block = warps * 32 * elements
        table, align = _source_table(out.device, sources)
        _average_kernel[(_ceil_div(out.numel(), block),)](
            table, len(sources), weights.contiguous(), out, out.numel(), block, stages, align, num_warps=warps)
    return out


# DenseFormer's averages t = 1..M all read the embedding X_0 and every earlier layer's output. With gradients added reader by reader, each of
# the M^2 / 2 reads of forward costs three passes over memory in backward. Here a reader's backward only notes its gradient dY_t with the
# source, and the source's own backward, which comes last, gathers dX_j = sum_t alpha_t[j] dY_t and every d alpha_t[j] = <dY_t, X_j> at once:
# one pass a read.

@dataclass
class AverageSource:
    """A state of the residual stream that `average` reads, and its readers' gradients with the places of their weights for it."""
    x: Tensor                                                   # [..., C], contiguous
    weights: Tensor
    readers: list = field(default_factory=list)


@triton.jit(do_not_specialize=["n_readers"])
def _average_backward_kernel(table, n_readers, weights, x, own, dx, dots, n_elements, BLOCK: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n_elements
    s = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    if own is not None:
        acc += tl.load(own + place, mask=mask, other=0.0).to(tl.float32)
    for i in tl.range(0, n_readers, num_stages=STAGES):
        g = tl.load(_pointer(table, 2 * i, x, ALIGN) + place, mask=mask, other=0.0).to(tl.float32)
        acc += tl.load(weights + tl.load(table + 2 * i + 1) // 16).to(tl.float32) * g
        tl.store(dots + i * tl.num_programs(0) + tl.program_id(0), tl.sum(g * s, 0))
    tl.store(dx + place, acc.to(dx.dtype.element_ty), mask=mask)


@_operator()
def _average_backward(x: Tensor, weights: Tensor, own: Optional[Tensor], readers: list[Tensor], places: list[int], launch: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of all weights (float32) from those of the sums that read x, each with its weight's place among the weights."""
    dx, dweights = torch.empty_like(x), torch.zeros(weights.shape, device=x.device, dtype=torch.float32)
    if launch:
        warps, elements, stages = SETTINGS["average_backward"]
        block = warps * 32 * elements
        programs = _ceil_div(x.numel(), block)
        dots = torch.empty(len(readers), programs, device=x.device, dtype=torch.float32)
        table, align = _source_table(x.device, readers, [16 * place for place in places])   # 16: the table's numbers are aligned as addresses are
        _average_backward_kernel[(programs,)](table, len(readers), weights, x, own, dx, dots, x.numel(), block, stages, align, num_warps=warps)
        dweights.index_copy_(0, table[1:2 * len(readers):2] // 16, dots.sum(1))
    return dx, dweights


class _AverageSource(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, readers):
        ctx.save_for_backward(x, weights)
        ctx.readers = readers
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, own):
        x, weights = ctx.saved_tensors
        if not ctx.readers:
            return own, None, None
        grads, places = zip(*ctx.readers, strict=True)
        dx, dweights = _average_backward(x, weights, own if own is None else own.contiguous(), list(grads), list(places))
        ctx.readers.clear()
        return dx, dweights.to(weights.dtype), None


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, first, sources, *tensors):
        ctx.first, ctx.readers = first, [s.readers for s in sources]
        return _average_forward(list(tensors), weights[first:first + len(tensors)])

    @staticmethod
    def backward(ctx, dout):
        dout = dout.contiguous()
        for i, readers in enumerate(ctx.readers):
            readers.append((dout, ctx.first + i))
        return None, None, None, *[None] * len(ctx.readers)


def average_source(x, weights):
    """(x, source) of a state [..., C] of the residual stream that averages with these weights (a vector) read. The stream goes on with the x returned
    here. Backward: the gradient of x, with what its readers give, and the readers' gradients of their weights for x."""
    readers, x = [], x.contiguous()
    x = _AverageSource.apply(x, weights, readers)
    return x, AverageSource(x, weights, readers)


def average(sources, first):
    """sum_i weights[first + i] s_i of n sources from `average_source`, all with the same weights: DenseFormer's depth-weighted average (arXiv 2402.02622).
    Each source reads its own gradient's parts in one pass, whatever the number of averages that it is in. Returns [..., C]."""
    weights, x = sources[-1].weights, sources[-1].x
    if any(s.weights is not weights or s.x.shape != x.shape or s.x.dtype != x.dtype for s in sources) or not 0 <= first <= len(weights) - len(sources):
        raise ValueError(f"{len(sources)} sources of {[list(s.x.shape) for s in sources]} from {first} of {len(weights)} weights were given; expected "
                         f"sources of one shape, dtype and vector of weights, and a weight for each")
    return _Average.apply(weights.detach(), first, sources, *[s.x for s in sources])


# ---------------------------------------------------------------------------------------------------------------------------------------
# Hyper-connections (mHC, arXiv 2512.24880): n streams X [tokens, n, C], which one sub-layer writes and the next one reads
#
# A token's maps are E = n + n + n*n numbers: pre | post | res. In tensors of [tokens, C], forward moves 3n + 2: `write` reads the streams and u, writes the
# streams and projects them while it has them; `read` mixes and norms them. Backward, in these passes, moves 7n + 6: `dots` takes the products of the streams and the
# gradient of h that the maps' gradients need, `maps_backward` has one thread a token, `read_backward` gives the whole gradient of the streams and, since its
# programs own columns, keeps the projection's in registers, and `write_backward` takes the streams' gradient to the old streams, u and the old maps.

MOST_STREAMS = 4  # maps of n streams are n*(n+2) numbers, each a variable of its own: for more than 24 the compiler takes minutes


@triton.jit
def _mhc_site_kernel(projection, scale, pre, post, res, alpha_pre, alpha_post, alpha_res, weight, affine, K, n: tl.constexpr, BLOCK: tl.constexpr):
    """The projection with the norm's scale in it, and alpha and bias of each map's logits, side by side."""
    m, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(projection + m * K + cols, mask=cols < K, other=0.0).to(tl.float32) * tl.load(scale + cols, mask=cols < K, other=0.0)
    tl.store(weight + m * K + cols, w.to(weight.dtype.element_ty), mask=cols < K)
    if tl.program_id(1) == 0:
        bias, alpha = res + (m - 2 * n), alpha_res
        if m < n:
            bias, alpha = pre + m, alpha_pre
        elif m < 2 * n:
            bias, alpha = post + (m - n), alpha_post
        tl.store(affine + m, tl.load(alpha))
        tl.store(affine + tl.num_programs(0) + m, tl.load(bias))


@triton.jit
def _mhc_entries(table, rows, n_rows, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """COUNT entries of each row of [tokens, WIDTH], each a vector."""
    out = ()
    for m in tl.static_range(COUNT):
        out = out + (tl.load(table + rows.to(tl.int64) * WIDTH + (FIRST + m), mask=rows < n_rows, other=0.0),)
    return out


@triton.jit
def _mhc_streams(x, place, mask, n: tl.constexpr, C: tl.constexpr):
    out = ()
    for j in tl.static_range(n):
        out = out + (tl.load(x + place + j * C, mask=mask, other=0.0),)
    return out


@triton.jit
def _mhc_logits(y, affine, rows, n_rows, FIRST: tl.constexpr, COUNT: tl.constexpr, E: tl.constexpr):
    values, out = _mhc_entries(y, rows, n_rows, FIRST, COUNT, E), ()
    for m in tl.static_range(COUNT):
        out = out + (tl.load(affine + FIRST + m) * values[m] + tl.load(affine + E + FIRST + m),)
    return out


@triton.jit
def _mhc_exp(logits, COUNT: tl.constexpr):
    top, out = logits[0], ()
    for m in tl.static_range(1, COUNT):
        top = tl.maximum(top, logits[m])
    for m in tl.static_range(COUNT):
        out = out + (tl.maximum(tl.exp(logits[m] - top), 1e-12),)
    return out


@triton.jit
def _mhc_inverse_sums(k, x, ACROSS: tl.constexpr, ALONG: tl.constexpr, n: tl.constexpr):
    """1 / sum_j k[i,j] x[j] of each i: k's strides say whether i are rows (ACROSS = n, ALONG = 1) or columns."""
    out = ()
    for i in tl.static_range(n):
        total = k[i * ACROSS] * x[0]
        for j in tl.static_range(1, n):
            total += k[i * ACROSS + j * ALONG] * x[j]
        out = out + (1.0 / total,)
    return out


@triton.jit
def _mhc_ones(like, n: tl.constexpr):
    out = ()
    for _ in tl.static_range(n):
        out = out + (like * 0.0 + 1.0,)
    return out


@triton.jit
def _mhc_write_kernel(x, u, maps, weight, affine, out, y, rstd, pre, new_maps, n_rows, iters, eps, n: tl.constexpr, C: tl.constexpr, E_: tl.constexpr,
                      BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """out = res x + post u (x itself without u), and the maps of the next sub-layer; y and rstd for their backward pass."""
    E: tl.constexpr = n * (n + 2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, E_)
    if u is not None:
        post, res = _mhc_entries(maps, rows, n_rows, 0, n, E - n), _mhc_entries(maps, rows, n_rows, n, n * n, E - n)
    acc, square = (), tl.zeros([ROWS, BLOCK], tl.float32)
    for _ in tl.static_range(n):        # one sum a stream: chained, each product would want another layout of it
        acc = acc + (tl.zeros([ROWS, E_], tl.float32),)
    for start in tl.range(0, C, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)
        mask, place = (rows < n_rows)[:, None] & (cols < C)[None, :], rows.to(tl.int64)[:, None] * (n * C) + cols[None, :]
        streams = _mhc_streams(x, place, mask, n, C)
        w = _mhc_streams(weight, m[:, None] * (n * C) + cols[None, :], (m < E)[:, None] & (cols < C)[None, :], n, C)
        if u is not None:
            added = tl.load(u + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        sums = ()
        for i in tl.static_range(n):
            new = streams[i]
            if u is not None:
                total = post[i][:, None] * added
                for j in tl.static_range(n):
                    total += res[i * n + j][:, None] * streams[j].to(tl.float32)
                new = tl.where(mask, total, 0.0).to(out.dtype.element_ty)
                tl.store(out + place + i * C, new, mask=mask)
            square += new.to(tl.float32) * new.to(tl.float32)
            sums = sums + (tl.dot(new, tl.trans(w[i]), acc[i], input_precision="tf32x3"),)
        acc = sums
    inverse = tl.rsqrt(tl.sum(square, 1) / (n * C) + eps)
    tl.store(rstd + rows, inverse, mask=rows < n_rows)
    projected = acc[0]
    for i in tl.static_range(1, n):
        projected += acc[i]
    tl.store(y + rows.to(tl.int64)[:, None] * E + m[None, :], projected * inverse[:, None], mask=(rows < n_rows)[:, None] & (m < E)[None, :])
    tl.debug_barrier()      # y is read back with all entries of a token in one thread
    gates = _mhc_logits(y, affine, rows, n_rows, 0, 2 * n, E)
    k = _mhc_exp(_mhc_logits(y, affine, rows, n_rows, 2 * n, n * n, E), n * n)
    a, b = _mhc_ones(k[0], n), _mhc_ones(k[0], n)       # Sinkhorn: rows, then columns of a[i] k[i,j] b[j] are brought to sums of 1
    for _ in range(iters):
        a = _mhc_inverse_sums(k, b, n, 1, n)
        b = _mhc_inverse_sums(k, a, 1, n, n)
    new_maps += rows.to(tl.int64) * (E - n)
    for i in tl.static_range(n):
        tl.store(pre + rows * n + i, tl.sigmoid(gates[i]), mask=rows < n_rows)
        tl.store(new_maps + i, 2 * tl.sigmoid(gates[n + i]), mask=rows < n_rows)
        for j in tl.static_range(n):
            tl.store(new_maps + (n + i * n + j), a[i] * k[i * n + j] * b[j], mask=rows < n_rows)


@triton.jit
def _mhc_read_kernel(x, pre, weight, h, n_rows, eps, n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """h = RMSNorm(sum_j pre[j] x[j]); without a weight the sum itself."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask, place = (rows < n_rows)[:, None] & (cols < C), rows.to(tl.int64)[:, None] * (n * C) + cols
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(n):
        share = tl.load(pre + rows * n + j, mask=rows < n_rows, other=0.0)
        total += share[:, None] * tl.load(x + place + j * C, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        total *= tl.rsqrt(tl.sum(total * total, 1) / C + eps)[:, None]
        total *= tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
    tl.store(h + rows.to(tl.int64)[:, None] * C + cols, total.to(h.dtype.element_ty), mask=mask)


@triton.jit
def _mhc_dots_kernel(x, pre, weight, dh, dots, out, n_rows, n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """<weight dh, x[j]> and <sum_i pre[i] x[i], x[j]> of each stream j: all that the gradients of pre and of h's norm need."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pre, sums = _mhc_entries(pre, rows, n_rows, 0, n, n), ()
    for _ in tl.static_range(2 * n):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)
    for start in tl.range(0, C, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)[None, :]
        mask, place = (rows < n_rows)[:, None] & (cols < C), rows.to(tl.int64)[:, None]
        streams = _mhc_streams(x, place * (n * C) + cols, mask, n, C)
        g = tl.load(dh + place * C + cols, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            g *= tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)
        mixed = pre[0][:, None] * streams[0].to(tl.float32)
        for j in tl.static_range(1, n):
            mixed += pre[j][:, None] * streams[j].to(tl.float32)
        tl.store(out + place * C + cols, mixed.to(out.dtype.element_ty), mask=mask)
        new = ()
        for j in tl.static_range(n):
            new = new + (sums[j] + g * streams[j].to(tl.float32),)
        for j in tl.static_range(n):
            new = new + (sums[n + j] + mixed * streams[j].to(tl.float32),)
        sums = new
    for j in tl.static_range(2 * n):
        tl.store(dots + rows * (2 * n) + j, tl.sum(sums[j], 1), mask=rows < n_rows)


@triton.jit
def _mhc_emit(m, g, y, rstd, affine, dy, sums, rows, n_rows, E: tl.constexpr):
    """Leaves what the gradient g of the m-th logit gives: the gradient of y over the streams' norm, that of the bias. Returns g y."""
    place = rows.to(tl.int64) * E + m
    value = tl.load(y + place, mask=rows < n_rows, other=0.0)
    tl.store(sums + m, tl.sum(g, 0))
    tl.store(dy + place, (g * tl.load(affine + m) * rstd).to(dy.dtype.element_ty), mask=rows < n_rows)
    return g * value


@triton.jit
def _mhc_sinkhorn_backward(k, grads, history, rows, n_threads, iters, n: tl.constexpr):
    """From the gradient of Sinkhorn's result, a[i] k[i,j] b[j], to that of log k: g. The iterations once more, then their way back in terms of
    g, ga = d / d log a and gb = d / d log b, which stay of the size of the result."""
    nothing = k[0] * 0.0
    b = _mhc_ones(k[0], n)
    a = b
    for t in range(iters):
        for j in tl.static_range(n):
            tl.store(history + (t * n + j) * n_threads + rows, b[j])
        a = _mhc_inverse_sums(k, b, n, 1, n)
        b = _mhc_inverse_sums(k, a, 1, n, n)
    tl.debug_barrier()
    g, ga, gb = (), (), ()
    for i in tl.static_range(n):
        total = nothing
        for j in tl.static_range(n):
            g = g + (grads[i * n + j] * a[i] * k[i * n + j] * b[j],)
            total += g[i * n + j]
        ga = ga + (total,)
    for j in tl.static_range(n):
        total = nothing
        for i in tl.static_range(n):
            total += g[i * n + j]
        gb = gb + (total,)
    for back in range(iters):
        before = ()
        for j in tl.static_range(n):
            before = before + (tl.load(history + ((iters - 1 - back) * n + j) * n_threads + rows),)
        a = _mhc_inverse_sums(k, before, n, 1, n)
        new, new_a, new_b = (), (), ()
        for i in tl.static_range(n):                # b[j] = 1 / sum_i a[i] k[i,j]
            total = ga[i]
            for j in tl.static_range(n):
                step = a[i] * k[i * n + j] * b[j] * gb[j]
                new = new + (g[i * n + j] - step,)
                total -= step
            new_a = new_a + (total,)
        g, new = new, ()
        for _ in tl.static_range(n):
            new_b = new_b + (nothing,)
        for i in tl.static_range(n):                # a[i] = 1 / sum_j k[i,j] before[j]
            after = ()
            for j in tl.static_range(n):
                step = a[i] * k[i * n + j] * before[j] * new_a[i]
                new = new + (g[i * n + j] - step,)
                after = after + (new_b[j] - step,)
            new_b = after
        g, gb, b, ga = new, new_b, before, ()
        for _ in tl.static_range(n):
            ga = ga + (nothing,)
    return g


@triton.jit
def _mhc_maps_backward_kernel(dots, dmaps, y, pre, maps, rstd, affine, dy, scalars, sums, history, n_rows, iters, eps, n: tl.constexpr, C: tl.constexpr,
                              NORM: tl.constexpr, BLOCK: tl.constexpr):
    """One thread a token: from the gradients of the maps to those of y, divided by the streams' norm."""
    E: tl.constexpr = n * (n + 2)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here, n_threads = rows < n_rows, tl.num_programs(0) * BLOCK
    pre, post, d = _mhc_entries(pre, rows, n_rows, 0, n, n), _mhc_entries(maps, rows, n_rows, 0, n, E - n), _mhc_entries(dots, rows, n_rows, 0, 2 * n, 2 * n)
    grads = _mhc_entries(dmaps, rows, n_rows, 0, E - n, E - n)
    inverse = tl.load(rstd + rows, mask=here, other=0.0)
    read, towards = inverse * 0.0 + 1.0, inverse * 0.0      # dpre[j] = read <w dh, x[j]> - towards <mix, x[j]>
    if NORM:
        for j in tl.static_range(n):
            towards += pre[j] * d[j]
        square = pre[0] * d[n]
        for j in tl.static_range(1, n):
            square += pre[j] * d[n + j]
        read = tl.rsqrt(square / C + eps)
        towards *= read * read * read / C
    sums += tl.program_id(0) * (E + 3)
    of_pre, of_post, of_res = inverse * 0.0, inverse * 0.0, inverse * 0.0       # <gradient of the logits, y>: what alpha gets
    for j in tl.static_range(n):
        of_pre += _mhc_emit(j, (read * d[j] - towards * d[n + j]) * pre[j] * (1 - pre[j]), y, inverse, affine, dy, sums, rows, n_rows, E)
        of_post += _mhc_emit(n + j, grads[j] * post[j] * (1 - post[j] / 2), y, inverse, affine, dy, sums, rows, n_rows, E)
    logits, of_maps = _mhc_logits(y, affine, rows, n_rows, 2 * n, n * n, E), ()
    for i in tl.static_range(n * n):
        of_maps = of_maps + (grads[n + i],)
    k = _mhc_exp(logits, n * n)
    g = _mhc_sinkhorn_backward(k, of_maps, history, rows, n_threads, iters, n)
    clamped, highest = inverse * 0.0, inverse * 0.0     # what the shift by the maximum takes back: zero but for the clamps
    for i in tl.static_range(n * n):
        clamped += tl.where(k[i] > 1e-12, g[i], 0.0)
        highest += tl.where(k[i] >= 1.0, 1.0, 0.0)
    for i in tl.static_range(n * n):
        final = tl.where(k[i] > 1e-12, g[i], 0.0) - tl.where(k[i] >= 1.0, clamped / highest, 0.0)
        of_res += _mhc_emit(2 * n + i, final, y, inverse, affine, dy, sums, rows, n_rows, E)
    tl.store(sums + E, tl.sum(of_pre, 0))
    tl.store(sums + E + 1, tl.sum(of_post, 0))
    tl.store(sums + E + 2, tl.sum(of_res, 0))
    along = tl.load(affine) * of_pre + tl.load(affine + n) * of_post + tl.load(affine + 2 * n) * of_res
    tl.store(scalars + rows * 3, read, mask=here)
    tl.store(scalars + rows * 3 + 1, towards, mask=here)
    tl.store(scalars + rows * 3 + 2, along * inverse * inverse / (n * C), mask=here)


@triton.jit
def _mhc_read_backward_kernel(x, mixed, pre, dout, dh, norm_weight, weight, dy, scalars, dx, dweight, n_rows, n: tl.constexpr, C: tl.constexpr,
                              E_: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):
    """The whole gradient of the streams x, that of the projection and of h's norm. A program owns columns of one stream, whose part of the projection's
    gradient stays in registers; the programs of the other streams, side by side, find what they share in cache."""
    E: tl.constexpr = n * (n + 2)
    stream, block, split, splits = tl.program_id(0) % n, tl.program_id(0) // n, tl.program_id(1), tl.num_programs(1)
    cols, m = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E_)
    w_mask, w_place = (m < E)[:, None] & (cols < C)[None, :], m[:, None] * (n * C) + stream * C + cols[None, :]
    w = tl.load(weight + w_place, mask=w_mask, other=0.0)
    dw, d_norm = tl.zeros([E_, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    if norm_weight is not None:
        scale = tl.load(norm_weight + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
    for tile in tl.range(split, tl.cdiv(n_rows, ROWS), splits, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        here, row = rows < n_rows, rows.to(tl.int64)[:, None]
        mask, place = here[:, None] & (cols < C)[None, :], row * (n * C) + stream * C + cols[None, :]
        old, grad = tl.load(x + place, mask=mask, other=0.0), tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dh + row * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        h = tl.load(mixed + row * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dy + row * E + m[None, :], mask=here[:, None] & (m < E)[None, :], other=0.0)
        factors, share = _mhc_entries(scalars, rows, n_rows, 0, 3, 3), tl.load(pre + rows * n + stream, mask=here, other=0.0)
        g *= factors[0][:, None]
        if norm_weight is not None:
            d_norm += g * h
            g = g * scale - h * factors[1][:, None]
        total = tl.dot(d, w, input_precision="tf32x3") + grad + share[:, None] * g - factors[2][:, None] * old.to(tl.float32)
        tl.store(dx + place, total.to(dx.dtype.element_ty), mask=mask)
        dw = tl.dot(tl.trans(d), old, dw, input_precision="tf32x3")
    dweight += split * ((n * E + 1) * C)        # of each split: [E, n, C], then [C]
    tl.store(dweight + w_place, dw, mask=w_mask)
    if norm_weight is not None:
        tl.store(dweight + n * E * C + cols, tl.sum(d_norm, 0), mask=cols < tl.where(stream == 0, C, 0))


@triton.jit
def _mhc_write_backward_kernel(x, u, maps, dout, dx, du, dmaps, n_rows, n: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                               STAGES: tl.constexpr):
    """Gradients of x, u and the maps of out = res x + post u."""
    E: tl.constexpr = n * (n + 1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here, row = rows < n_rows, rows.to(tl.int64)[:, None]
    post, res, dots = _mhc_entries(maps, rows, n_rows, 0, n, E), _mhc_entries(maps, rows, n_rows, n, n * n, E), ()
    for _ in tl.static_range(E):
        dots = dots + (tl.zeros([ROWS], tl.float32),)
    for start in tl.range(0, C, BLOCK, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK)[None, :]
        mask, place = here[:, None] & (cols < C), row * (n * C) + cols
        streams, grads = _mhc_streams(x, place, mask, n, C), _mhc_streams(dout, place, mask, n, C)
        written = tl.load(u + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        total, more = post[0][:, None] * grads[0].to(tl.float32), ()
        for i in tl.static_range(1, n):
            total += post[i][:, None] * grads[i].to(tl.float32)
        tl.store(du + row * C + cols, total.to(du.dtype.element_ty), mask=mask)
        for j in tl.static_range(n):
            total = res[j][:, None] * grads[0].to(tl.float32)
            for i in tl.static_range(1, n):
                total += res[i * n + j][:, None] * grads[i].to(tl.float32)
            tl.store(dx + place + j * C, total.to(dx.dtype.element_ty), mask=mask)
        for i in tl.static_range(n):
            more = more + (dots[i] + tl.sum(grads[i].to(tl.float32) * written, 1),)
        for i in tl.static_range(n):
            for j in tl.static_range(n):
                more = more + (dots[n + i * n + j] + tl.sum(grads[i].to(tl.float32) * streams[j].to(tl.float32), 1),)
        dots = more
    for i in tl.static_range(E):
        tl.store(dmaps + rows.to(tl.int64) * E + i, dots[i], mask=here)


@triton.jit
def _mhc_sums_kernel(dweight, splits, projection, scale, dprojection, dscale, d_norm, sums, programs, small, n: tl.constexpr, C: tl.constexpr,
                     E_: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Adds up what the splits and programs have left, and takes the norm's scale out of the projection."""
    E: tl.constexpr = n * (n + 2)
    blocks: tl.constexpr = (n * C + BLOCK - 1) // BLOCK
    if tl.program_id(0) < blocks:
        cols, m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, E_)[:, None]
        place, mask = m * (n * C) + cols[None, :], (m < E) & (cols < n * C)[None, :]
        acc, own = tl.zeros([E_, BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for _ in tl.range(splits, num_stages=4):
            acc += tl.load(dweight + place, mask=mask, other=0.0)
            if NORM:
                own += tl.load(dweight + n * E * C + cols, mask=cols < C, other=0.0)
            dweight += (n * E + 1) * C
        tl.store(dprojection + place, acc * tl.load(scale + cols, mask=cols < n * C, other=0.0)[None, :], mask=mask)
        tl.store(dscale + cols, tl.sum(acc * tl.load(projection + place, mask=mask, other=0.0), 0), mask=cols < n * C)
        if NORM:
            tl.store(d_norm + cols, own, mask=cols < C)
    else:
        column = (tl.program_id(0) - blocks) * 8 + tl.arange(0, 8)
        total = tl.zeros([256, 8], tl.float32)
        for first in range(0, programs, 256):
            row = first + tl.arange(0, 256)
            total += tl.load(sums + row[:, None] * (E + 3) + column[None, :], mask=(row < programs)[:, None] & (column < E + 3)[None, :], other=0.0)
        tl.store(small + column, tl.sum(total, 0), mask=column < E + 3)


def _mhc_shapes(x, name):
    """Shapes of a kernel that goes through streams [..., n, C] in tiles of a few columns; of float32 two are in flight, so that they fit into 99 KB."""
    n, C = x.shape[-2:]
    _, _, columns, stages, *_ = SETTINGS[name]
    block = max(16, min(columns, _power_of_2(C)))
    rows, warps = _tile(name, block)
    return dict(n=n, C=C, BLOCK=block, ROWS=max(16, rows), STAGES=stages if x.element_size() == 2 else 2, num_warps=warps)


@_operator()
def _mhc_forward(x: Tensor, u: Optional[Tensor], maps: Optional[Tensor], projection: Tensor, scale: Tensor, pre: Tensor, post: Tensor, res: Tensor,
                 alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, norm_weight: Optional[Tensor], iters: int, eps: float, norm_eps: float,
                 launch: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The new streams (empty without u: x is what they are), h, the new maps; pre, y, the streams' inverse norms, the weight, the alphas and biases."""
    (*shape, n, C), E = x.shape, len(projection)
    tokens, floats = x.numel() // (n * C), functools.partial(torch.empty, device=x.device, dtype=torch.float32)
    out, h = x.new_empty(0) if u is None else torch.empty_like(x), x.new_empty(*shape, C)
    new_maps, share, y, rstd, affine, weight = floats(*shape, E - n), floats(tokens, n), floats(tokens, E), floats(tokens), floats(2, E), x.new_empty(E, n * C)
    if launch:
        _mhc_site_kernel[(E, _ceil_div(n * C, 1024))](projection, scale, pre, post, res, alpha_pre, alpha_post, alpha_res, weight, affine, n * C, n, 1024)
        shapes = _mhc_shapes(x, "mhc_write")
        _mhc_write_kernel[(_ceil_div(tokens, shapes["ROWS"]),)](x, u, maps, weight, affine, out, y, rstd, share, new_maps, tokens, iters, eps,
                                                                E_=max(16, _power_of_2(E)), **shapes)
        rows, warps = _tile("mhc_read", _power_of_2(C))
        _mhc_read_kernel[(_ceil_div(tokens, rows),)](x if u is None else out, share, norm_weight, h, tokens, norm_eps, n, C, _power_of_2(C), rows, num_warps=warps)
    return out, h, new_maps, share, y, rstd, weight, affine


@_operator()
def _mhc_read_backward(x: Tensor, dout: Tensor, dh: Tensor, dmaps: Tensor, maps: Tensor, pre: Tensor, y: Tensor, rstd: Tensor, weight: Tensor, affine: Tensor,
                       projection: Tensor, scale: Tensor, norm_weight: Optional[Tensor], iters: int, norm_eps: float,
                       launch: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the streams, projection, scale, h's norm (empty without one) and, [E + 3], of biases and alphas."""
    (n, C), E, norm = x.shape[-2:], len(projection), norm_weight is not None
    tokens, floats = x.numel() // (n * C), functools.partial(torch.empty, device=x.device, dtype=torch.float32)
    dx, dprojection, dscale, d_norm, small = torch.empty_like(x), torch.empty_like(projection), torch.empty_like(scale), floats(C if norm else 0), floats(E + 3)
    if launch:
        a_program = 32      # tokens, one a thread
        programs, shapes, E_ = _ceil_div(tokens, a_program), _mhc_shapes(x, "mhc_dots_backward"), max(16, _power_of_2(E))
        dots, mixed, dy, scalars, sums = floats(tokens, 2 * n), x.new_empty(tokens, C), x.new_empty(tokens, E), floats(tokens, 3), floats(programs, E + 3)
        _mhc_dots_kernel[(_ceil_div(tokens, shapes["ROWS"]),)](x, pre, norm_weight, dh, dots, mixed, tokens, **shapes)
        _mhc_maps_backward_kernel[(programs,)](dots, dmaps, y, pre, maps, rstd, affine, dy, scalars, sums, floats(iters, n, a_program * programs), tokens, iters, norm_eps,
                                               n, C, norm, a_program, num_warps=1)
        shapes = _mhc_shapes(x, "mhc_read_backward")
        blocks = n * _ceil_div(C, shapes["BLOCK"])
        splits = max(1, min(_ceil_div(tokens, shapes["ROWS"]), _multiprocessors(x.device) * SETTINGS["mhc_read_backward"][4] // blocks))
        dweight = floats(splits, n * E + 1, C)
        _mhc_read_backward_kernel[(blocks, splits)](x, mixed, pre, dout, dh, norm_weight, weight, dy, scalars, dx, dweight, tokens, E_=E_, **shapes)
        _mhc_sums_kernel[(_ceil_div(n * C, 32) + _ceil_div(E + 3, 8),)](dweight, splits, projection, scale, dprojection, dscale, d_norm, sums, programs, small,
                                                                       n, C, E_, 32, norm, num_warps=8)
    return dx, dprojection, dscale, d_norm, small


@_operator()
def _mhc_write_backward(x: Tensor, u: Tensor, maps: Tensor, dout: Tensor, launch: bool) -> tuple[Tensor, Tensor, Tensor]:
    dx, du, dmaps, shapes = torch.empty_like(x), torch.empty_like(u), torch.empty_like(maps), _mhc_shapes(x, "mhc_write_backward")
    if launch:
        tokens = u.numel() // u.shape[-1]
        _mhc_write_backward_kernel[(_ceil_div(tokens, shapes["ROWS"]),)](x, u, maps, dout, dx, du, dmaps, tokens, **shapes)
    return dx, du, dmaps


class _HyperConnection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, old_maps, norm_weight, iters, eps, norm_eps, projection, scale, *logits):
        out, h, maps, *kept = _mhc_forward(x, u, old_maps, projection, scale, *logits, norm_weight, iters, eps, norm_eps)
        out = x.view_as(x) if u is None else out
        ctx.save_for_backward(x, u, old_maps, out, maps, *kept, projection, scale, norm_weight)
        ctx.iters, ctx.norm_eps = iters, norm_eps
        return out, h, maps

    @staticmethod
    def backward(ctx, dout, dh, dmaps):
        x, u, old_maps, out, *kept = ctx.saved_tensors
        n = x.shape[-2]
        dx, dprojection, dscale, d_norm, small = _mhc_read_backward(out, dout.contiguous(), dh.contiguous(), dmaps.contiguous(), *kept, ctx.iters, ctx.norm_eps)
        dx, du, d_old_maps = (dx, None, None) if u is None else _mhc_write_backward(x, u, old_maps, dx)
        pre, post, res, *alphas = small.split_with_sizes([n, n, n * n, 1, 1, 1])
        return (dx, du, d_old_maps, None if kept[-1] is None else d_norm, None, None, None, dprojection, dscale,
                pre, post, res.view(n, n), *(alpha.view(()) for alpha in alphas))


def hyper_connection(streams, u, maps, projection, scale, logits, iters, eps, norm_weight=None, norm_eps=0.0):
    """What lies between two sub-layers of mHC: writes the first one's output u [..., C] to the streams [..., n, C] by its maps,

        X_i <- sum_j res[i,j] X_j + post[i] u        (u and maps None: the streams stay as they are)

    takes the second one's maps from them and reads its input. With E = n + n + n*n, y = projection [E, nC] RMS(vec X) with the norm's scale [nC], and in float32
    pre = sigmoid(alpha y + bias), post = 2 sigmoid(...), res = Sinkhorn(...) of `iters` iterations. logits: the biases of pre [n], post [n], res [n, n], then
    their alphas, one number each. h = RMSNorm(sum_j pre[j] X_j) with norm_weight [C], or the sum itself. All parameters in float32.
    Returns (streams, h [..., C], maps [..., n + n*n] in float32: post | res), of which the next call takes the first and the last.
    Raises ValueError for more than MOST_STREAMS streams and for shapes that do not fit."""
    *tokens, n, C = streams.shape
    given = [list(x.shape) for x in (streams, u, maps, projection) if x is not None]
    if n > MOST_STREAMS or given[1:] != ([] if u is None else [[*tokens, C], [*tokens, n + n * n]]) + [[n * (n + 2), n * C]]:
        raise ValueError(f"streams, u, maps and projection of {given} were given; expected [..., n, C] with n at most {MOST_STREAMS}, [..., C], [..., n + n*n] and [n*(n+2), n*C]")
    streams, u, maps, norm_weight, *learned = (x if x is None else x.contiguous() for x in (streams, u, maps, norm_weight, projection, scale, *logits))
    return _HyperConnection.apply(streams, u, maps, norm_weight, iters, eps, norm_eps, *learned)
