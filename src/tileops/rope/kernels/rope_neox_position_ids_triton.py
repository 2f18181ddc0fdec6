"""Device code of ``rope_neox_position_ids.py``."""

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
def rope_neox(
    x,
    positions,
    turns,
    y,
    heads,
    heads_each,
    parts,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    token = tl.program_id(0) // parts
    first = tl.program_id(0) % parts * heads_each
    feature = tl.arange(0, HALF)
    known = feature < ROTARY // 2
    position = tl.load(positions + token).to(tl.int64)
    phase = position * tl.load(turns + feature, mask=known, other=0)
    sine, cosine = _sine_and_cosine((phase >> 32).to(tl.int32))
    sine, cosine = sine[None, :], cosine[None, :]
    corner = token.to(tl.int64) * heads * D
    for start in range(first, tl.minimum(first + heads_each, heads), HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & known[None, :]
        place = head * D + feature[None, :]
        left = tl.load(x + corner + place, mask=inside).to(tl.float32)
        right = tl.load(x + corner + place + ROTARY // 2, mask=inside).to(tl.float32)
        tl.store(y + corner + place, left * cosine - right * sine, mask=inside)
        tl.store(y + corner + place + ROTARY // 2, right * cosine + left * sine, mask=inside)
        if ROTARY < D:
            place = ROTARY + tl.arange(0, TAIL)[None, :]
            inside = (head < heads) & (place < D)
            place = head * D + place
            tl.store(y + corner + place, tl.load(x + corner + place, mask=inside), mask=inside)
