"""Device code of ``silu_and_mul.py``."""

import triton
import triton.language as tl

from tileops.elementwise.kernels.silu_triton import silu


@triton.jit
def silu_and_mul(
    x,
    y,
    rows,
    column_groups,
    column_tiles,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    columns = column_groups * GRAIN  # so that the compiler knows what divides a row
    tile = tl.program_id(0)
    first_row = (tile // column_tiles).to(tl.int64) * ROWS
    first_column = (tile % column_tiles).to(tl.int64) * COLUMNS
    # 32 bits address the inside of a tile: it has one row, or its rows are shorter than a tile.
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    stride = columns.to(tl.int32)
    left = x + first_row * (2 * columns) + first_column + (row * (2 * stride) + column)
    right = left + columns
    gate = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(right, mask=inside, other=0.0).to(tl.float32)
    result = y + first_row * columns + first_column + (row * stride + column)
    tl.store(result, silu(gate) * up, mask=inside)
