"""Triton kernel that quantises blocks of rows and columns with one scale each."""

import triton
import triton.language as tl

from tileops.lib.quantised_triton import largest_magnitude, quantised

__all__ = ["quantise_blocks"]


@triton.jit
def _read(x, place, rows, columns, down, cols):
    """A strip at row ``place`` of a block, where its elements lie and which are there."""
    inside = (place + down < rows) & (cols < columns)
    return tl.load(x, mask=inside, other=0.0).to(tl.float32), inside


@triton.jit
def quantise_blocks(
    x,
    q,
    scales,
    rows,
    groups,  # of VECTOR columns
    eps,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,  # rows read at a time: all of a block, which is then held, or twice each
    VECTOR: tl.constexpr,
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """One block to a program."""
    columns = groups * VECTOR
    across = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    top, left = program // across * BLOCK, program % across * BLOCK
    x += top * columns + left
    q += top * columns + left
    rows -= top
    right = columns - left
    down = tl.arange(0, STRIP)[:, None]
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    offsets = down * columns + cols
    values, inside = _read(x + offsets, 0, rows, right, down, cols)
    largest = largest_magnitude(values, 1)
    if STRIP != BLOCK:
        for place in range(STRIP, BLOCK, STRIP):
            values, _ = _read(x + place * columns + offsets, place, rows, right, down, cols)
            both = tl.join(largest, largest_magnitude(values, 1))
            largest = largest_magnitude(both, 1)
    largest = largest_magnitude(largest, 0)
    scale = tl.div_rn(tl.where(largest < eps, eps, largest), TOP)
    tl.store(scales + program, scale)
    each = tl.broadcast_to(scale, [STRIP])
    if STRIP == BLOCK:
        tl.store(q + offsets, quantised(values, each, TOP, NATIVE, CAREFUL), mask=inside)
    else:
        for place in range(0, BLOCK, STRIP):
            values, inside = _read(x + place * columns + offsets, place, rows, right, down, cols)
            result = quantised(values, each, TOP, NATIVE, CAREFUL)
            tl.store(q + place * columns + offsets, result, mask=inside)
