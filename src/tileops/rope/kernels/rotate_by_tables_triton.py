"""Device code of ``rotate_by_tables.py``."""

import triton
import triton.language as tl

from tileops.rope.kernels.rotate_triton import _halves, _read_rows, _store_rows


@triton.jit
def _table(
    table,
    place,
    known,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """What multiplies the first and the second entry of each pair."""
    if PAIRS:
        pair = tl.arange(0, HALF)[None, :]
        inside = known & (pair < D // 2)
        values = tl.load(table + place * (D // 2) + pair, mask=inside, other=0.0).to(tl.float32)
        return values, values
    else:
        first, second = _read_rows(table, place * D, known, D, HALF, INTERLEAVED)
        return _halves(first, second, PLACES, HALF, INTERLEAVED)


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
    shared_each,
    parts,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACES: tl.constexpr,
    SHARED: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    # One of PLACES, the places of the tables in a tile, and SHARED, the rows of each, is 1. The rows of a
    # tile are asked for before the one before it is written.
    ROWS: tl.constexpr = PLACES * SHARED
    place = tl.program_id(0) // parts * PLACES + tl.arange(0, PLACES)
    known = (place < places)[:, None]
    corner = (place // places_inner).to(tl.int64) * place_step
    corner = ((corner + (place % places_inner).to(tl.int64) * place_inner_step) * D)[:, None]
    first = tl.program_id(0) % parts * shared_each
    last = tl.minimum(first + shared_each, shared)
    row = first + tl.arange(0, SHARED)
    start = (row // shared_inner).to(tl.int64) * shared_step
    start = ((start + (row % shared_inner).to(tl.int64) * shared_inner_step) * D)[:, None]
    inside = known & (row < last)[:, None]
    left, right = _read_rows(x, corner + start, inside, D, HALF, INTERLEAVED)
    place = place.to(tl.int64)[:, None]
    cosine, cosine_2 = _table(cos, place, known, D, PAIRS, PLACES, HALF, INTERLEAVED)
    sine, sine_2 = _table(sin, place, known, D, PAIRS, PLACES, HALF, INTERLEAVED)
    if BACK:
        sine, sine_2 = -sine_2, -sine
    for _ in range(first, last, SHARED):
        row += SHARED
        ahead = (row // shared_inner).to(tl.int64) * shared_step
        ahead = ((ahead + (row % shared_inner).to(tl.int64) * shared_inner_step) * D)[:, None]
        inside_ahead = known & (row < last)[:, None]
        left_ahead, right_ahead = _read_rows(x, corner + ahead, inside_ahead, D, HALF, INTERLEAVED)
        left, right = _halves(left, right, ROWS, HALF, INTERLEAVED)
        turned = left * cosine - right * sine
        turned_2 = right * cosine_2 + left * sine_2
        _store_rows(y, corner + start, inside, turned, turned_2, D, ROWS, HALF, INTERLEAVED)
        left, right, start, inside = left_ahead, right_ahead, ahead, inside_ahead
