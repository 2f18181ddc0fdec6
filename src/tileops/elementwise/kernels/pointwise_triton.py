"""Device code of ``pointwise.py``: ``EXPRESSION`` is given the elements of ``TENSORS`` tensors ``a``,
``b``, ``c`` and ``SCALARS`` numbers ``p``, ``q``, ``r``."""

import triton
import triton.language as tl

from tileops.lib.dependent_triton import begin


@triton.jit
def _wide(x):
    if x.dtype.is_fp16() or x.dtype.is_bf16():
        x = x.to(tl.float32)
    return x


@triton.jit
def _flat_value(pointer, first, place, n, STEP: tl.constexpr, WHOLE: tl.constexpr):
    if STEP == 0:
        return _wide(tl.load(pointer))
    elif WHOLE:
        return _wide(tl.load(pointer + first + place))
    else:
        return _wide(tl.load(pointer + first + place, mask=place < n - first))


@triton.jit
def _flat_tile(a, b, c, y, first, n, p, q, r, EXPRESSION: tl.constexpr, TENSORS: tl.constexpr,
               SCALARS: tl.constexpr, CARE: tl.constexpr, STEPS: tl.constexpr, SIZE: tl.constexpr,
               WHOLE: tl.constexpr, PARTIAL: tl.constexpr):  # fmt: skip
    """Whether something is left to do: of a PARTIAL expression, which says where it holds."""
    place = tl.arange(0, SIZE)
    scalars = (p, q, r)[:SCALARS] + CARE
    x = _flat_value(a, first, place, n, STEPS[0], WHOLE)
    if TENSORS == 1:
        result = EXPRESSION(x, *scalars)
    else:
        other = _flat_value(b, first, place, n, STEPS[1], WHOLE)
        if TENSORS == 2:
            result = EXPRESSION(x, other, *scalars)
        else:
            third = _flat_value(c, first, place, n, STEPS[2], WHOLE)
            result = EXPRESSION(x, other, third, *scalars)
    left = False
    if PARTIAL:
        value, known = result
    else:
        value = result
    value = value.to(y.dtype.element_ty)
    if WHOLE:
        tl.store(y + first + place, value)
    else:
        tl.store(y + first + place, value, mask=place < n - first)
    if PARTIAL:  # only now, since all warps wait here
        left = tl.min(known.to(tl.int32)) == 0
    return left


@triton.jit
def flat(a, b, c, y, n, whole, resident, p, q, r, EXPRESSION: tl.constexpr, USUAL: tl.constexpr,
         TENSORS: tl.constexpr, SCALARS: tl.constexpr, CARE: tl.constexpr, STEPS: tl.constexpr,
         BLOCK: tl.constexpr, TAIL: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Every tensor is as long as ``y``, or one element long (its step is 0). ``whole``: tiles without an
    end in them. ``USUAL``: does for EXPRESSION where it says so, or null."""
    begin(DEPENDENT, resident)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Whole tiles take no mask: with one, n's divisibility would decide the vector width. The last
    # tile goes in small steps, so that the masked half of the code asks for few registers.
    left = tl.program_id(0) >= whole
    if tl.program_id(0) < whole:
        if USUAL is None:
            _flat_tile(
                a, b, c, y, start, n, p, q, r, EXPRESSION, TENSORS, SCALARS, CARE, STEPS, BLOCK, True, False
            )  # fmt: skip
        else:
            left = _flat_tile(
                a, b, c, y, start, n, p, q, r, USUAL, TENSORS, SCALARS, (), STEPS, BLOCK, True, True
            )
    if left:
        for step in range(0, BLOCK, TAIL):
            _flat_tile(
                a, b, c, y, start + step, n, p, q, r, EXPRESSION, TENSORS, SCALARS, CARE, STEPS, TAIL,
                False, False,
            )  # fmt: skip


@triton.jit
def _split(index, by):
    """``index // by`` and what is left; without signs that takes a third less."""
    U: tl.constexpr = tl.uint64 if index.dtype == tl.int64 else tl.uint32
    quotient = (index.to(U) // by.to(U)).to(index.dtype)
    return quotient, index - quotient * by


@triton.jit
def _row_value(pointer, row, rest, s0, s1, s2, n1, column, inside, row_inside, column_inside,
               STEP: tl.constexpr, MOVES: tl.constexpr, OUTER: tl.constexpr, TILED: tl.constexpr,
               GRAIN: tl.constexpr):  # fmt: skip
    """A value for each element of the tile, for each of its rows or columns, or one for all of it."""
    offset = row * s0 if MOVES else 0
    if OUTER == 2:
        offset += rest * s1
    elif OUTER == 3:
        outermost, middle = _split(rest, n1)
        offset += middle * s1 + outermost * s2
    if STEP == 0:
        if TILED and not MOVES:
            return _wide(tl.load(pointer + offset))
        else:
            return _wide(tl.load(pointer + offset, mask=row_inside))
    else:
        if TILED and not MOVES:
            return _wide(tl.load(pointer + (offset * GRAIN + column), mask=column_inside))
        else:
            return _wide(tl.load(pointer + (offset * GRAIN + column), mask=inside))


@triton.jit
def broadcasting(a, b, c, y, rows, groups, column_tiles, row_tiles, n0, n1, a0, a1, a2, b0, b1, b2,
                 c0, c1, c2, resident, p, q, r, EXPRESSION: tl.constexpr, TENSORS: tl.constexpr,
                 SCALARS: tl.constexpr, CARE: tl.constexpr, STEPS: tl.constexpr, MOVES: tl.constexpr,
                 OUTER: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr, GRAIN: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """``y`` is rows of ``groups * GRAIN`` columns; ``n0`` rows make the innermost outer axis, and a tile
    lies within them if ``TILED``. ``STEPS`` and ``MOVES`` say whether a tensor differs from column to
    column and from row to row. ``WIDE``: offsets need 64 bits."""
    begin(DEPENDENT, resident)
    columns = groups * GRAIN  # so that the compiler knows what divides a row
    tile = tl.program_id(0)
    if WIDE:
        tile = tile.to(tl.int64)
    if column_tiles is None:  # one
        column_tile = 0
    else:
        tile, column_tile = _split(tile, column_tiles)
    first_column = column_tile * COLUMNS
    down, place = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if TILED:
        if OUTER == 1:
            rest = 0
            within = tile * ROWS
            first_row = within
        else:
            rest, within = _split(tile, row_tiles)
            within *= ROWS
            first_row = rest * n0 + within
        row = within + down
        row_inside = down < n0 - within
    else:
        first_row = tile * ROWS
        rest, row = _split(first_row + down, n0)
        row_inside = down < rows - first_row
    column_inside = place < columns - first_column
    inside = row_inside & column_inside
    column = first_column + place
    scalars = (p, q, r)[:SCALARS] + CARE
    x = _row_value(
        a, row, rest, a0, a1, a2, n1, column, inside, row_inside, column_inside, STEPS[0], MOVES[0], OUTER,
        TILED, GRAIN,
    )  # fmt: skip
    if TENSORS == 1:
        result = EXPRESSION(x, *scalars)
    else:
        other = _row_value(
            b, row, rest, b0, b1, b2, n1, column, inside, row_inside, column_inside, STEPS[1], MOVES[1],
            OUTER, TILED, GRAIN,
        )  # fmt: skip
        if TENSORS == 2:
            result = EXPRESSION(x, other, *scalars)
        else:
            third = _row_value(
                c, row, rest, c0, c1, c2, n1, column, inside, row_inside, column_inside, STEPS[2],
                MOVES[2], OUTER, TILED, GRAIN,
            )  # fmt: skip
            result = EXPRESSION(x, other, third, *scalars)
    result = result.to(y.dtype.element_ty)
    # 32 bits address the inside of a tile: it has one row, or its rows are shorter than a tile.
    to = y + (first_row * columns + first_column)
    tl.store(to + (down * columns.to(tl.int32) + place), result, mask=inside)
