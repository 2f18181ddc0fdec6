"""Device code of ``rotate.py``."""

import triton
import triton.language as tl

from tileops.lib.activations_triton import instruction
from tileops.lib.dependent_triton import begin


@triton.jit
def _sine_and_cosine(phase, NARROW: tl.constexpr):
    """Of ``phase``, in int32 units of 2**-32 turns; within 1.2e-7 of the true value, 2**-20 if NARROW."""
    if NARROW:
        angle = phase.to(tl.float32) * 1.4629180792671596e-09
        return instruction(angle, "sin.approx.ftz.f32"), instruction(angle, "cos.approx.ftz.f32")
    else:
        quarter = (phase + (1 << 29)) >> 30
        rest = (phase - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # radians
        square = rest * rest
        sine = -1.9515295891e-4 * square + 8.3321608736e-3
        sine = rest + rest * square * (sine * square - 1.6666654611e-1)
        cosine = 2.443315711809948e-5 * square - 1.388731625493765e-3
        cosine = cosine * square + 4.166664568298827e-2
        cosine = square * square * cosine + (1.0 - 0.5 * square)
        swapped = (quarter & 1) != 0
        first = tl.where(swapped, cosine, sine)
        second = tl.where(swapped, sine, cosine)
        first = tl.where((quarter & 2) != 0, -first, first)
        second = tl.where(((quarter + 1) & 2) != 0, -second, second)
        return first, second


@triton.jit
def _place(token, tokens, period):
    """Of a token in its sequence of ``period`` tokens, or in the one that there is if that is null. 32 bits
    divide in a fifth of the instructions."""
    if period is None:
        place = token
    else:
        if tokens <= 0x7FFFFFFF:
            place = (token.to(tl.uint32) % period.to(tl.uint32)).to(tl.int64)
        else:
            place = token % period
    return place


@triton.jit
def _read_rows(
    x, place, inside, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """What turns in rows that begin at ``place`` of ``x``, where they are ``inside``; both ``[ROWS, 1]``:
    both halves or, interleaved, twice the whole."""
    if INTERLEAVED:
        feature = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.load(x + place + feature, mask=inside & (feature < ROTARY), other=0.0)
        return pairs, pairs
    else:
        feature = tl.arange(0, HALF)[None, :]
        known = inside & (feature < ROTARY // 2)
        left = tl.load(x + place + feature, mask=known, other=0.0)
        return left, tl.load(x + place + feature + ROTARY // 2, mask=known, other=0.0)


@triton.jit
def _halves(left, right, ROWS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and second entries of pairs that ``_read_rows`` has read, in float32."""
    left, right = left.to(tl.float32), right.to(tl.float32)
    if INTERLEAVED:
        left, right = tl.split(tl.reshape(left, (ROWS, HALF, 2)))
    return left, right


@triton.jit
def _store_rows(
    y,
    place,
    inside,
    left,
    right,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write what ``_read_rows`` reads."""
    if INTERLEAVED:
        feature = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.reshape(tl.join(left, right), (ROWS, 2 * HALF))
        tl.store(y + place + feature, pairs, mask=inside & (feature < ROTARY))
    else:
        feature = tl.arange(0, HALF)[None, :]
        known = inside & (feature < ROTARY // 2)
        tl.store(y + place + feature, left, mask=known)
        tl.store(y + place + feature + ROTARY // 2, right, mask=known)


@triton.jit
def _write_rows(
    left,
    right,
    x,
    y,
    rows,
    sine,
    cosine,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turn what has been read of the first ``rows`` of a tile of ROWS rows that begins at ``x``, which 32
    bits address inside, and copy what does not turn."""
    row = tl.arange(0, ROWS)[:, None]
    inside = row < rows
    left, right = _halves(left, right, ROWS, HALF, INTERLEAVED)
    turned, turned_2 = left * cosine - right * sine, right * cosine + left * sine
    _store_rows(y, row * D, inside, turned, turned_2, ROTARY, ROWS, HALF, INTERLEAVED)
    if ROTARY < D:
        feature = ROTARY + tl.arange(0, TAIL)[None, :]
        known = inside & (feature < D)
        tl.store(y + row * D + feature, tl.load(x + row * D + feature, mask=known), mask=known)


@triton.jit
def rotate(
    x,
    positions,
    turns,
    y,
    tokens,
    period,
    heads,
    heads_each,
    scale,
    resident,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FEW_HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    NARROW: tl.constexpr,
):
    # The position of a token is what `positions` holds or, where that is null, its place in a
    # sequence of `period` tokens. Rows are asked for before their angles are worked out.
    pair = tl.arange(0, HALF)
    turn = tl.load(turns + pair, mask=pair < ROTARY // 2, other=0)[None, :]  # which no kernel wrote
    begin(DEPENDENT, resident)
    if FEW_HEADS:  # so many; the rows of a tile are those of several tokens
        first = tl.program_id(0).to(tl.int64) * ROWS
        rows = tl.minimum(tokens * FEW_HEADS - first, ROWS).to(tl.int32)
        corner = first * D
        tile = tl.arange(0, ROWS)[:, None]
        left, right = _read_rows(x + corner, tile * D, tile < rows, ROTARY, HALF, INTERLEAVED)
        token = first // FEW_HEADS
        # Where no token is in two tiles, sines are taken once for its heads; else for each row.
        EACH: tl.constexpr = FEW_HEADS if ROWS % FEW_HEADS == 0 else 1
        row = tl.arange(0, ROWS // EACH) * EACH
        later = ((first % FEW_HEADS).to(tl.int32) + row) // FEW_HEADS
        if positions is None:
            if period is None:
                position = token + later
            else:
                place = _place(token, tokens, period).to(tl.uint32) + later.to(tl.uint32)
                position = (place % period.to(tl.uint32)).to(tl.int64)
        else:
            position = tl.load(positions + token + later, mask=row < rows, other=0).to(tl.int64)
        sine, cosine = _sine_and_cosine(((position[:, None] * turn) >> 32).to(tl.int32), NARROW)
        sine, cosine = sine * scale, cosine * scale
        if EACH > 1:
            shape: tl.constexpr = (ROWS // EACH, EACH, HALF)
            sine = tl.reshape(tl.broadcast_to(sine[:, None, :], shape), (ROWS, HALF))
            cosine = tl.reshape(tl.broadcast_to(cosine[:, None, :], shape), (ROWS, HALF))
        _write_rows(
            left, right, x + corner, y + corner, rows, sine, cosine,
            D, ROTARY, ROWS, HALF, TAIL, INTERLEAVED,
        )  # fmt: skip
    else:  # the rows of a tile are heads of one token
        token = tl.program_id(0).to(tl.int64)
        first = tl.program_id(1) * heads_each
        last = tl.minimum(first + heads_each, heads)
        corner = (token * heads + first) * D
        tile = tl.arange(0, ROWS)[:, None]
        inside = tile < last - first
        left, right = _read_rows(x + corner, tile * D, inside, ROTARY, HALF, INTERLEAVED)
        if positions is None:
            position = _place(token, tokens, period)
        else:
            position = tl.load(positions + token).to(tl.int64)
        sine, cosine = _sine_and_cosine(((position * turn) >> 32).to(tl.int32), NARROW)
        sine, cosine = sine * scale, cosine * scale
        for head in range(first, last, ROWS):
            corner = (token * heads + head) * D
            inside = tile < last - head - ROWS
            left_ahead, right_ahead = _read_rows(
                x + corner + ROWS * D, tile * D, inside, ROTARY, HALF, INTERLEAVED
            )
            _write_rows(
                left, right, x + corner, y + corner, last - head, sine, cosine,
                D, ROTARY, ROWS, HALF, TAIL, INTERLEAVED,
            )  # fmt: skip
            left, right = left_ahead, right_ahead
