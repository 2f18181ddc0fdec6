"""Triton kernels for the gradients of RMSNorm and LayerNorm; ``rows_backward.py`` says which when.

Tensors that a call has not may be the constant None. With ``n`` the normalised row and ``h`` the
incoming gradient times the weight, a row's gradient is ``scale * (h - n * mean(h * n))``, and less
``scale * mean(h)`` where rows are centred. Arithmetic is in float32 and rounds once, at the store.
Offsets within a tile are 32-bit; where a tile begins is 64-bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.norm.kernels.access_triton import inverse_root, load, store

__all__ = ["add_up", "column_sums", "row_backward", "rows_backward", "stream_rows_backward"]


@triton.jit
def _gradients(
    grads, values, scales, eps, inside, N: tl.constexpr, PADDED: tl.constexpr, CENTRED: tl.constexpr
):
    """Of a tile of whole rows: their gradients, what the weight's gradient sums, their means (where
    they are centred) and factors."""
    values, grads = values.to(tl.float32), grads.to(tl.float32)
    if CENTRED:
        mean = tl.sum(values, axis=1) * (1.0 / N)
        values -= mean[:, None]
        if PADDED:
            values = tl.where(inside, values, 0.0)
    scale = inverse_root(tl.sum(values * values, axis=1), eps, N)
    if not CENTRED:
        mean = scale  # stands for none
    normal = values * scale[:, None]
    scaled = grads
    if scales is not None:
        scaled = grads * scales.to(tl.float32)
    result = scaled - normal * (tl.sum(scaled * normal, axis=1) * (1.0 / N))[:, None]
    if CENTRED:
        result -= (tl.sum(scaled, axis=1) * (1.0 / N))[:, None]
    return result * scale[:, None], grads * normal, mean, scale


@triton.jit
def rows_backward(
    grad,
    x,
    weight,
    added,  # a gradient that reaches the row by another way
    grad_x,
    weight_sums,  # [programs, N]: each program's share of the weight's gradient
    bias_sums,
    rows,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,  # N rounded up to a power of two
    TILE: tl.constexpr,  # rows held at a time
    VECTOR: tl.constexpr,  # elements read at once: every row begins at a multiple of them
    CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,  # may be launched before the stream's previous kernel has ended
):
    """Program p takes tiles p, p + programs, and so on, reading one while it works on one."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    PADDED: tl.constexpr = N != BLOCK
    MASKED: tl.constexpr = PADDED or TILE != 1
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    lanes = tl.arange(0, TILE)[:, None]
    inside = cols < N
    offsets = lanes * N + cols
    begin = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0).to(tl.int64) * TILE
    mask = inside & (begin + lanes < rows)

    values = load(x + begin * N, offsets, mask, MASKED, "")
    grads = load(grad + begin * N, offsets, mask, MASKED, "")
    others = grads  # stands for none: None cannot be carried from turn to turn
    if added is not None:
        others = load(added + begin * N, offsets, mask, MASKED, "")
    scales = None
    if weight is not None:
        scales = load(weight, cols + lanes * 0, inside, PADDED, "")
    weight_sum = tl.zeros([TILE, BLOCK], tl.float32)
    bias_sum = tl.zeros([TILE, BLOCK], tl.float32)

    for first in range(begin, rows, step):
        ahead = first + step
        mask_ahead = inside & (ahead + lanes < rows)
        values_ahead = load(x + ahead * N, offsets, mask_ahead, True, "")
        grads_ahead = load(grad + ahead * N, offsets, mask_ahead, True, "")
        others_ahead = grads_ahead
        if added is not None:
            others_ahead = load(added + ahead * N, offsets, mask_ahead, True, "")
        mask = inside & (first + lanes < rows)
        result, product, _, _ = _gradients(grads, values, scales, eps, inside, N, PADDED, CENTRED)
        if grad_x is not None:
            if added is not None:
                result += others.to(tl.float32)
            store(grad_x + first * N, offsets, result, mask, MASKED)
        if weight_sums is not None:
            if TILE != 1:  # without eps, a row that is not there would be 0 times infinity
                product = tl.where(mask, product, 0.0)
            weight_sum += product
        if bias_sums is not None:
            bias_sum += grads.to(tl.float32)
        values, grads, others = values_ahead, grads_ahead, others_ahead

    share = tl.program_id(0).to(tl.int64) * N
    if weight_sums is not None:
        store(weight_sums + share, cols, tl.sum(weight_sum, axis=0)[None, :], inside, PADDED)
    if bias_sums is not None:
        store(bias_sums + share, cols, tl.sum(bias_sum, axis=0)[None, :], inside, PADDED)


@triton.jit
def row_backward(
    grad,
    x,
    weight,
    added,
    grad_x,
    means,  # [rows]: what column_sums needs to know of each row
    scales,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row per program, read once: too long to hold the weight's gradient beside it."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    PADDED: tl.constexpr = N != BLOCK
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    inside = cols < N
    row = tl.program_id(0).to(tl.int64)
    here = row * N
    values = load(x + here, cols, inside, PADDED, "")
    grads = load(grad + here, cols, inside, PADDED, "")
    weights = None
    if weight is not None:
        weights = load(weight, cols, inside, PADDED, "")
    result, _, mean, scale = _gradients(grads, values, weights, eps, inside, N, PADDED, CENTRED)
    one = row + tl.arange(0, 1)
    if scales is not None:
        tl.store(scales + one, scale)
        if CENTRED:
            tl.store(means + one, mean)
    if grad_x is not None:
        if added is not None:
            result += load(added + here, cols, inside, PADDED, "").to(tl.float32)
        store(grad_x + here, cols, result, inside, PADDED)


@triton.jit
def _add_up(sums, result, cols, programs, N: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr):
    inside = cols < N
    total = tl.zeros([DEPTH, COLS], tl.float32)
    for first in range(0, programs, DEPTH):
        program = first + tl.arange(0, DEPTH)[:, None]
        place = program.to(tl.int64) * N + cols
        total += tl.load(sums + place, mask=(program < programs) & inside, other=0.0)
    values = tl.sum(total, axis=0)[None, :].to(result.dtype.element_ty)
    tl.store(result + cols, values, mask=inside)


@triton.jit
def add_up(
    weight_sums,
    bias_sums,
    grad_weight,
    grad_bias,
    programs,
    N: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The sums of all programs' shares, in one order."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    cols = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    if weight_sums is not None:
        _add_up(weight_sums, grad_weight, cols, programs, N, COLS, DEPTH)
    if bias_sums is not None:
        _add_up(bias_sums, grad_bias, cols, programs, N, COLS, DEPTH)


@triton.jit
def _chunk(grad, x, weight, mean, cols, inside, MASKED: tl.constexpr, CENTRED: tl.constexpr):
    """A chunk's values less ``mean``, and its scaled gradients."""
    values = load(x, cols, inside, MASKED, "").to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - mean, 0.0)
    scaled = load(grad, cols, inside, MASKED, "").to(tl.float32)
    if weight is not None:
        scaled *= load(weight, cols, inside, MASKED, "").to(tl.float32)
    return values, scaled


@triton.jit
def stream_rows_backward(
    grad,
    x,
    weight,
    added,
    grad_x,
    means,  # [rows]: what column_sums needs to know of each row
    scales,
    length,  # N again, at run time: a loop of a known number of turns would be unrolled, and spill
    eps,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row per program, read in chunks: for its mean, for its sums, and for its gradient."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    MASKED: tl.constexpr = N % CHUNK != 0
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    row = tl.program_id(0).to(tl.int64)
    here = row * N
    mean = 0.0
    if CENTRED:
        for begin in range(0, length, CHUNK):
            values = load(x + here + begin, cols, begin + cols < N, MASKED, "")
            mean += tl.sum(values.to(tl.float32), axis=0)
        mean *= 1.0 / N
    squares = 0.0
    along = 0.0
    level = 0.0
    for begin in range(0, length, CHUNK):
        place = here + begin
        # A weight that is None has no address.
        scale_here = None
        if weight is not None:
            scale_here = weight + begin
        values, scaled = _chunk(
            grad + place, x + place, scale_here, mean, cols, begin + cols < N, MASKED, CENTRED
        )
        squares += tl.sum(values * values, axis=0)
        along += tl.sum(scaled * values, axis=0)
        if CENTRED:
            level += tl.sum(scaled, axis=0)
    scale = inverse_root(squares, eps, N)
    if scales is not None:
        tl.store(scales + row, scale)
        if CENTRED:
            tl.store(means + row, mean)
    if grad_x is not None:
        along *= scale * (1.0 / N)
        level *= 1.0 / N
        for begin in range(0, length, CHUNK):
            place = here + begin
            inside = begin + cols < N
            scale_here = None
            if weight is not None:
                scale_here = weight + begin
            values, scaled = _chunk(
                grad + place, x + place, scale_here, mean, cols, inside, MASKED, CENTRED
            )
            result = (scaled - level - values * scale * along) * scale
            if added is not None:
                result += load(added + place, cols, inside, MASKED, "").to(tl.float32)
            store(grad_x + place, cols, result, inside, MASKED)


@triton.jit
def column_sums(
    grad,
    x,
    means,
    scales,
    weight_sums,  # [programs, N], or where there is one program, the gradient itself
    bias_sums,
    rows,
    N: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (c, p) takes the columns of block c in every so-many-th block of rows."""
    if DEPENDENT:
        gdc_wait()
    cols = tl.program_id(0) * COLS + tl.max_contiguous(tl.arange(0, COLS), VECTOR)[None, :]
    lanes = tl.arange(0, DEPTH)[:, None]
    inside = cols < N
    begin = tl.program_id(1).to(tl.int64) * DEPTH
    step = tl.num_programs(1).to(tl.int64) * DEPTH
    weight_sum = tl.zeros([DEPTH, COLS], tl.float32)
    bias_sum = tl.zeros([DEPTH, COLS], tl.float32)
    for first in range(begin, rows, step):
        row = first + lanes
        mask = (row < rows) & inside
        grads = tl.load(grad + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        if weight_sums is not None:
            values = tl.load(x + row * N + cols, mask=mask, other=0.0).to(tl.float32)
            if CENTRED:
                values -= tl.load(means + row, mask=row < rows, other=0.0)
            weight_sum += grads * (values * tl.load(scales + row, mask=row < rows, other=0.0))
        if bias_sums is not None:
            bias_sum += grads
    if DEPENDENT:
        gdc_launch_dependents()
    share = tl.program_id(1).to(tl.int64) * N
    if weight_sums is not None:
        store(weight_sums + share, cols, tl.sum(weight_sum, axis=0)[None, :], inside, True)
    if bias_sums is not None:
        store(bias_sums + share, cols, tl.sum(bias_sum, axis=0)[None, :], inside, True)
