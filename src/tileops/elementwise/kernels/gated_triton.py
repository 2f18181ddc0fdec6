"""Device code of ``gated.py``."""

import triton
import triton.language as tl

from tileops.lib.dependent_triton import begin


@triton.jit
def _tile(rows, column_groups, GRAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
          WHOLE: tl.constexpr):  # fmt: skip
    """Of this program: the row pitch of the output, where the tile begins in the output and in the input,
    offsets inside it in pitches of one and of two rows, and what lies inside: all of it if WHOLE."""
    columns = column_groups * GRAIN  # so that the compiler knows what divides a row
    first_row = tl.program_id(1).to(tl.int64)
    if not WHOLE:
        first_row += tl.program_id(2).to(tl.int64) * tl.num_programs(1)
    first_row, first_column = first_row * ROWS, tl.program_id(0).to(tl.int64) * COLUMNS
    # 32 bits address the inside of a tile: it has one row, or its rows are shorter than a tile.
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    stride = columns.to(tl.int32)
    narrow, wide = row * stride + column, row * (2 * stride) + column
    to, at = first_row * columns + first_column, first_row * (2 * columns) + first_column
    return to, at, columns, narrow, wide, inside


@triton.jit
def _load(pointers, inside, WHOLE: tl.constexpr):
    values = tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _store(pointers, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def gated(input, output, rows, column_groups, resident, ACTIVATION: tl.constexpr, NARROW: tl.constexpr,
          GRAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
          DEPENDENT: tl.constexpr):  # fmt: skip
    begin(DEPENDENT, resident)
    to, at, columns, narrow, wide, inside = _tile(rows, column_groups, GRAIN, ROWS, COLUMNS, WHOLE)
    gate = _load(input + at + wide, inside, WHOLE)
    up = _load(input + at + columns + wide, inside, WHOLE)
    value, _ = ACTIVATION(gate, NARROW)
    _store(output + to + narrow, value * up, inside, WHOLE)


@triton.jit
def gated_backward(grad_output, input, grad_input, rows, column_groups, resident, ACTIVATION: tl.constexpr,
                   NARROW: tl.constexpr, GRAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   WHOLE: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    begin(DEPENDENT, resident)
    to, at, columns, narrow, wide, inside = _tile(rows, column_groups, GRAIN, ROWS, COLUMNS, WHOLE)
    grad = _load(grad_output + to + narrow, inside, WHOLE)
    gate = _load(input + at + wide, inside, WHOLE)
    up = _load(input + at + columns + wide, inside, WHOLE)
    value, slope = ACTIVATION(gate, NARROW)
    _store(grad_input + at + wide, grad * up * slope, inside, WHOLE)
    _store(grad_input + at + columns + wide, grad * value, inside, WHOLE)
