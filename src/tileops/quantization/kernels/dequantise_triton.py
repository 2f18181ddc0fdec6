"""Triton kernel that multiplies integers by their scales; ``dequantise.py`` says when."""

import triton
import triton.language as tl

__all__ = ["dequantise"]


@triton.jit
def dequantise(
    q,
    scale,
    x,
    rows,
    groups,  # of VECTOR columns
    across,  # programs for all columns
    WIDTH: tl.constexpr,  # columns that share a scale, or a row's in a program where all of it do
    MANY: tl.constexpr,  # a row has a scale for each WIDTH
    TILE: tl.constexpr,  # rows to a program
    SPANS: tl.constexpr,  # and times WIDTH columns
    VECTOR: tl.constexpr,
):
    columns = groups * VECTOR
    many = tl.cdiv(columns, WIDTH)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None, None]
    span = (program % across).to(tl.int64) * SPANS + tl.arange(0, SPANS)[None, :, None]
    cols = span * WIDTH + tl.max_contiguous(tl.arange(0, WIDTH), VECTOR)[None, None, :]
    inside = (row < rows) & (cols < columns)
    if MANY:
        factors = tl.load(scale + row * many + span, mask=(row < rows) & (span < many), other=0.0)
    else:
        factors = tl.load(scale + row, mask=row < rows, other=0.0)
    offsets = row * columns + cols
    values = tl.load(q + offsets, mask=inside, other=0).to(tl.float32) * factors
    tl.store(x + offsets, values.to(x.dtype.element_ty), mask=inside)
