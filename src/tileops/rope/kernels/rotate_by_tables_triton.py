"""Device code of ``rotate_by_tables.py``."""

import triton
import triton.language as tl

from tileops.lib.dependent_triton import begin
from tileops.rope.kernels.rotate_triton import _halves, _read_rows, _store_rows


@triton.jit
def _table(
    table,
    place,
    inside,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """What multiplies the first and the second entry of each pair."""
    if PAIRS:
        pair = tl.arange(0, HALF)[None, :]
        known = inside & (pair < D // 2)
        values = tl.load(table + place * (D // 2) + pair, mask=known, other=0.0).to(tl.float32)
        return values, values
    else:
        first, second = _read_rows(table, place * D, inside, D, HALF, INTERLEAVED)
        return _halves(first, second, ROWS, HALF, INTERLEAVED)


@triton.jit
def _row(index, inner, outer_step, inner_step):
    """Which row of ``x`` a place is; ``inner`` is null where all lie equally far apart."""
    if inner is None:
        row = index * inner_step
    else:
        outer = (index.to(tl.uint32) // inner.to(tl.uint32)).to(tl.int64)
        row = outer * outer_step + (index - outer * inner) * inner_step
    return row


@triton.jit
def rotate_by_tables(
    x,
    cos,
    sin,
    y,
    places,
    places_inner,
    place_step,
    place_inner_step,
    shared,
    shared_inner,
    shared_step,
    shared_inner_step,
    resident,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BY_PLACE: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    begin(DEPENDENT, resident)
    # A tile has so many rows of one place or, BY_PLACE, one row of so many places.
    several = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    # For each row, as then each thread reads what multiplies its own features.
    one += tl.zeros((ROWS,), tl.int64)
    if BY_PLACE:
        place, row = several, one
    else:
        place, row = one, several
    inside = ((place < places) & (row < shared))[:, None]
    corner = _row(place, places_inner, place_step, place_inner_step)
    corner = ((corner + _row(row, shared_inner, shared_step, shared_inner_step)) * D)[:, None]
    left, right = _read_rows(x, corner, inside, D, HALF, INTERLEAVED)
    place = place[:, None]
    cosine, cosine_2 = _table(cos, place, inside, D, PAIRS, ROWS, HALF, INTERLEAVED)
    sine, sine_2 = _table(sin, place, inside, D, PAIRS, ROWS, HALF, INTERLEAVED)
    if BACK:
        sine, sine_2 = -sine_2, -sine
    left, right = _halves(left, right, ROWS, HALF, INTERLEAVED)
    turned = left * cosine - right * sine
    turned_2 = right * cosine_2 + left * sine_2
    _store_rows(y, corner, inside, turned, turned_2, D, ROWS, HALF, INTERLEAVED)
