"""Device code of ``position.py``."""

import triton
import triton.language as tl

from tileops.lib.dependent_triton import begin


@triton.jit
def _tile(tiles, ROWS: tl.constexpr):
    """The rows of this program, and the number of its tile in them."""
    return tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)[:, None], tl.program_id(0) % tiles


@triton.jit
def _store(y, value, row, rows, columns, tile, COLUMNS: tl.constexpr):
    first, place = tile * COLUMNS, tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (place < columns - first)
    to = y + (row.to(tl.int64) * columns + first)
    tl.store(to + place, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def alibi(table, y, rows, per_entry, columns, tiles, resident, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Row ``h * per_entry + i`` is ``-table[h] * |i - j|``."""
    begin(DEPENDENT, resident)
    row, tile = _tile(tiles, ROWS)
    place = tl.arange(0, COLUMNS)[None, :]
    distance = tl.abs(row % per_entry - tile * COLUMNS - place).to(tl.float32)
    slope = tl.load(table + row // per_entry, mask=row < rows, other=0.0)
    _store(y, (0.0 - slope) * distance, row, rows, columns, tile, COLUMNS)


@triton.jit
def sinusoidal(table, y, rows, per_entry, columns, tiles, resident, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Columns ``2 * i`` and ``2 * i + 1`` of row ``p`` are sine and cosine of ``p * table[i]`` quarter
    turns."""
    begin(DEPENDENT, resident)
    row, tile = _tile(tiles, ROWS)
    pair = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :]
    turn = tl.load(table + pair, mask=pair < columns // 2, other=0.0)
    # In float64, and whole quarters go without rounding. No constant but powers of 2 beside float64:
    # Triton rounds the arguments of its functions to float32.
    angle = row.to(tl.float64) * turn
    quarters = tl.floor(angle + 0.5)
    rest = (angle - quarters).to(tl.float32) * 1.5707963267948966  # radians
    square = rest * rest
    # The series of sine and cosine for |rest| <= pi / 4; the next terms are below 2**-26.
    sine = tl.fma(square, 2.7557319223985893e-06, -1.984126984126984e-04)
    sine = tl.fma(sine, square, 8.333333333333333e-03)
    sine = tl.fma(sine, square, -0.16666666666666666)
    sine = tl.fma(sine * square, rest, rest)
    cosine = tl.fma(square, 2.48015873015873e-05, -1.388888888888889e-03)
    cosine = tl.fma(cosine, square, 4.1666666666666664e-02)
    cosine = tl.fma(cosine, square, -0.5)
    cosine = tl.fma(cosine, square, 1.0)
    quarter = quarters.to(tl.int64).to(tl.int32) & 3
    swapped = (quarter & 1) == 1
    left, right = tl.where(swapped, cosine, sine), tl.where(swapped, sine, cosine)
    left = tl.where(quarter >= 2, -left, left)
    right = tl.where((quarter == 1) | (quarter == 2), -right, right)
    _store(y, tl.interleave(left, right), row, rows, columns, tile, COLUMNS)
