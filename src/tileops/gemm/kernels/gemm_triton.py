"""Device code of ``gemm.py``: a product of tiles, and what is done to each element of the result."""

import triton
import triton.language as tl

from tileops.lib.activations_triton import (
    gelu_none_and_slope,
    gelu_tanh_and_slope,
    silu_and_slope,
)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, NARROW: tl.constexpr):
    """The value and its slope."""
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)  # NaN stays
    elif ACTIVATION == "gelu":
        return gelu_none_and_slope(x, NARROW)
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh_and_slope(x, NARROW)
    elif ACTIVATION == "silu":
        return silu_and_slope(x, NARROW)
    else:
        return x, 1.0


@triton.jit
def finished(total, bias, scale, ACTIVATION: tl.constexpr, NARROW: tl.constexpr):
    """``(total + bias, scale * activation(total + bias))``; ``bias`` in float32 or None."""
    if bias is not None:
        total += bias
    result, _ = activated(total, ACTIVATION, NARROW)
    if scale is not None:
        result *= scale
    return total, result


@triton.jit
def finish(
    total,
    d,
    bias,
    residual,
    kept,
    scale,
    place,
    column,
    inside,
    column_inside,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Write ``scale * activation(total + bias) + residual`` at ``place``, ``total + bias`` to ``kept``."""
    added = None
    if bias is not None:
        added = tl.load(bias + column, mask=column_inside, other=0.0).to(tl.float32)
    total, result = finished(total, added, scale, ACTIVATION, NARROW)
    if kept is not None:
        tl.store(kept + place, total.to(kept.dtype.element_ty), mask=inside)
    if residual is not None:
        result += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(d + place, result.to(d.dtype.element_ty), mask=inside)


@triton.jit
def gemm(
    a,
    b,
    d,
    bias,
    residual,
    kept,
    scale,
    M,
    N,
    K,
    steps_each,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    # Tiles go in groups of GROUP tile rows, column by column.
    program = tl.program_id(0)
    tile_rows = tl.cdiv(M, ROWS)
    in_group = GROUP * tl.cdiv(N, COLUMNS)
    first = program // in_group * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    first_row = (first + program % in_group % height).to(tl.int64) * ROWS
    first_column = (program % in_group // height).to(tl.int64) * COLUMNS
    part = tl.program_id(1)
    begin = part * steps_each
    end = tl.minimum(begin + steps_each, tl.cdiv(K, DEPTH))

    # Where a tile begins is a 64-bit scalar; 32 bits address its inside.
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    along_a, along_b = tl.arange(0, DEPTH)[None, :], tl.arange(0, DEPTH)[:, None]
    start = begin.to(tl.int64) * DEPTH
    if TRANS_A:
        a += start * M + first_row
        in_a = along_a * M + row
        step_a = M.to(tl.int64) * DEPTH
    else:
        a += first_row * K + start
        in_a = row * K + along_a
        step_a = DEPTH
    if TRANS_B:
        b += first_column * K + start
        in_b = column * K + along_b
        step_b = DEPTH
    else:
        b += start * N + first_column
        in_b = along_b * N + column
        step_b = N.to(tl.int64) * DEPTH
    row_inside, column_inside = row < M - first_row, column < N - first_column

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(begin, end):
        if EVEN_K:
            left = tl.load(a + in_a, mask=row_inside, other=0.0)
            right = tl.load(b + in_b, mask=column_inside, other=0.0)
        else:
            rest = K - step * DEPTH
            left = tl.load(a + in_a, mask=row_inside & (along_a < rest), other=0.0)
            right = tl.load(b + in_b, mask=column_inside & (along_b < rest), other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        a += step_a
        b += step_b
    # Parts lie behind each other; a single part is the result itself.
    at = (part.to(tl.int64) * M + first_row) * N + first_column
    d += at
    if bias is not None:
        bias += first_column
    if residual is not None:
        residual += at
    if kept is not None:
        kept += at
    finish(total, d, bias, residual, kept, scale, row * N + column, column,
           row_inside & column_inside, column_inside, ACTIVATION, NARROW)  # fmt: skip


@triton.jit
def add_parts(
    parts,
    d,
    bias,
    residual,
    kept,
    scale,
    count,
    N,
    number,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NARROW: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(number):
        total += tl.load(parts + place, mask=inside, other=0.0)
        parts += count
    finish(total, d, bias, residual, kept, scale, place, place % N, inside, inside,
           ACTIVATION, NARROW)  # fmt: skip
