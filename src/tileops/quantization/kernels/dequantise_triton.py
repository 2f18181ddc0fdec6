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
    GROUP: tl.constexpr,  # columns that share a scale, 0 where a row's do
    TILE: tl.constexpr,  # rows to a program
    BLOCK: tl.constexpr,  # and columns
    VECTOR: tl.constexpr,
):
    columns = groups * VECTOR
    across = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    row = program // across * TILE + tl.arange(0, TILE)[:, None]
    first = program % across * BLOCK
    cols = first + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    inside = (row < rows) & (cols < columns)
    if GROUP == 0:
        factors = tl.load(scale + row, mask=row < rows, other=0.0)
    else:
        factors = tl.load(
            scale + row * tl.cdiv(columns, GROUP) + cols // GROUP, mask=inside, other=0.0
        )
    offsets = row * columns + cols
    values = tl.load(q + offsets, mask=inside, other=0).to(tl.float32) * factors
    tl.store(x + offsets, values.to(x.dtype.element_ty), mask=inside)
