"""Device code of ``rotate.py``."""

import triton
import triton.language as tl


@triton.jit
def _sine_and_cosine(phase):
    """Of ``phase``, in int32 units of 2**-32 turns; within 1.2e-7 of the true value."""
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
def _rotate_rows(
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
    """The first ``rows`` of a tile of ROWS rows that begins at ``x``; 32 bits address its inside."""
    row = tl.arange(0, ROWS)[:, None]
    inside = row < rows
    if INTERLEAVED:
        feature = tl.arange(0, 2 * HALF)[None, :]
        known = inside & (feature < ROTARY)
        pairs = tl.load(x + row * D + feature, mask=known, other=0.0).to(tl.float32)
        left, right = tl.split(tl.reshape(pairs, (ROWS, HALF, 2)))
        pairs = tl.join(left * cosine - right * sine, right * cosine + left * sine)
        tl.store(y + row * D + feature, tl.reshape(pairs, (ROWS, 2 * HALF)), mask=known)
    else:
        feature = tl.arange(0, HALF)[None, :]
        known = inside & (feature < ROTARY // 2)
        place = row * D + feature
        left = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        right = tl.load(x + place + ROTARY // 2, mask=known, other=0.0).to(tl.float32)
        tl.store(y + place, left * cosine - right * sine, mask=known)
        tl.store(y + place + ROTARY // 2, right * cosine + left * sine, mask=known)
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
    parts,
    scale,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FEW_HEADS: tl.constexpr,
):
    # The position of a token is what `positions` holds or, where that is null, its place in a
    # sequence of `period` tokens.
    pair = tl.arange(0, HALF)
    turn = tl.load(turns + pair, mask=pair < ROTARY // 2, other=0)[None, :]
    if FEW_HEADS:  # so many; the rows of a tile are those of several tokens
        first = tl.program_id(0).to(tl.int64) * ROWS
        row = tl.arange(0, ROWS)
        rows = tl.minimum(tokens * FEW_HEADS - first, ROWS).to(tl.int32)
        token = first // FEW_HEADS
        later = ((first % FEW_HEADS).to(tl.int32) + row) // FEW_HEADS
        if positions is None:
            place = (token % period).to(tl.uint32) + later.to(tl.uint32)
            position = (place % period.to(tl.uint32)).to(tl.int64)
        else:
            position = tl.load(positions + token + later, mask=row < rows, other=0).to(tl.int64)
        sine, cosine = _sine_and_cosine(((position[:, None] * turn) >> 32).to(tl.int32))
        sine, cosine = sine * scale, cosine * scale
        corner = first * D
        _rotate_rows(
            x + corner, y + corner, rows, sine, cosine, D, ROTARY, ROWS, HALF, TAIL, INTERLEAVED
        )
    else:  # the rows of a tile are heads of one token
        token = (tl.program_id(0) // parts).to(tl.int64)
        first = tl.program_id(0) % parts * heads_each
        if positions is None:
            position = token % period
        else:
            position = tl.load(positions + token).to(tl.int64)
        sine, cosine = _sine_and_cosine(((position * turn) >> 32).to(tl.int32))
        sine, cosine = sine * scale, cosine * scale
        for head in range(first, tl.minimum(first + heads_each, heads), ROWS):
            corner = (token * heads + head) * D
            _rotate_rows(
                x + corner, y + corner, heads - head, sine, cosine,
                D, ROTARY, ROWS, HALF, TAIL, INTERLEAVED,
            )  # fmt: skip
