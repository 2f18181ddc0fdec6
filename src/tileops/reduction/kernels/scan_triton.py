"""Device code of ``scan.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tileops.reduction.kernels.turns_triton import announce, await_bits


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _both(a, b, PRODUCT: tl.constexpr):
    return a * b if PRODUCT else a + b


@triton.jit
def _scanned(value, AXIS: tl.constexpr, PRODUCT: tl.constexpr):
    return tl.cumprod(value, AXIS) if PRODUCT else tl.cumsum(value, AXIS)


@triton.jit
def _total(value, AXIS: tl.constexpr, PRODUCT: tl.constexpr):
    return tl.reduce(value, AXIS, _times) if PRODUCT else tl.sum(value, AXIS)


@triton.jit
def _taken(pointer, inside, y, PRODUCT: tl.constexpr, WIDE: tl.constexpr):
    """Elements as the result's dtype holds them (torch casts first), the neutral one outside."""
    NUMBER: tl.constexpr = tl.float64 if WIDE else tl.float32
    value = tl.load(pointer, mask=inside, other=1.0 if PRODUCT else 0.0)
    return value.to(NUMBER).to(y.dtype.element_ty).to(NUMBER)


@triton.jit
def _before(
    total,
    states,
    words,
    kept,
    count,
    there,
    tile,
    tiles,
    part,
    parts,
    GROUP: tl.constexpr,
    PRODUCT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """What the parts before ``part`` give for some kept indices, of ``total`` in this one.

    ``states``: what each part gives, then what the groups before each group give, ``count`` apart.
    ``words``: of each group and tile, a bit for each part that has left its total, and one more for
    the groups before.
    """
    NEUTRAL: tl.constexpr = 1.0 if PRODUCT else 0.0
    group, turn, one = part // GROUP, part % GROUP, tl.full([], 1, tl.int64)
    word = words + group.to(tl.int64) * tiles + tile
    if DEPENDENT:
        gdc_wait()  # for the words; what came before them in the stream is complete
    tl.store(states + part.to(tl.int64) * count + kept, total, mask=there)
    announce(word, one << turn)
    before = tl.full(total.shape, NEUTRAL, total.dtype)
    if part > 0:
        wanted = (one << turn) - 1
        if group > 0:
            wanted += one << GROUP
        await_bits(word, wanted)
        each = tl.arange(0, GROUP)[:, None]
        place = (group * GROUP + each).to(tl.int64) * count + kept[None, :]
        earlier = tl.load(states + place, mask=(each < turn) & there[None, :], other=NEUTRAL)
        before = _total(earlier, 0, PRODUCT)
        sums = states + parts.to(tl.int64) * count + kept
        if group > 0:
            given = tl.load(sums + group.to(tl.int64) * count, mask=there, other=NEUTRAL)
            before = _both(given, before, PRODUCT)
    if (turn == GROUP - 1) & (part < parts - 1):
        following = _both(before, total, PRODUCT)
        sums = states + (parts + group + 1).to(tl.int64) * count + kept
        tl.store(sums, following, mask=there)
        announce(word + tiles, one << GROUP)
    return before


@triton.jit
def scan_rows(
    x,
    y,
    states,
    words,
    rows,
    n_groups,
    tiles,
    parts,
    GRAIN: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ALONE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Contiguous rows: some of them, or a part of one."""
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    program = tl.program_id(0)
    tile, part = program % tiles, program // tiles
    first, row = tile.to(tl.int64) * KEPT, tl.arange(0, KEPT)
    start, place = part.to(tl.int64) * BLOCK, tl.arange(0, BLOCK)[None, :]
    there = row < rows - first
    # A tile of several rows has short ones, so these offsets are small.
    corner, offset = first * n + start, row[:, None] * n.to(tl.int32) + place
    inside = there[:, None] & (place < n - start)
    value = _taken(x + corner + offset, inside, y, PRODUCT, WIDE)
    before = tl.full([KEPT], 1.0 if PRODUCT else 0.0, value.dtype)
    if not ALONE:
        total = _total(value, 1, PRODUCT)
        before = _before(total, states, words, first + row, rows, there, tile, tiles, part, parts,
                         GROUP, PRODUCT, DEPENDENT)  # fmt: skip
    # With nothing before too: a sum that begins with minus zero is plus zero.
    result = _both(before[:, None], _scanned(value, 1, PRODUCT), PRODUCT)
    tl.store(y + corner + offset, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def scan_columns(
    x,
    y,
    states,
    words,
    count,
    n,
    inner_groups,
    inner_tiles,
    tiles,
    parts,
    GRAIN: tl.constexpr,
    KEPT: tl.constexpr,
    STRETCHES: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    ALONE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """An axis with an inner stride: a part of some columns, in stretches of LENGTH that threads
    scan on their own."""
    NEUTRAL: tl.constexpr = 1.0 if PRODUCT else 0.0
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    tile, part = program % tiles, program // tiles
    outer = (tile // inner_tiles).to(tl.int64)
    first, column = (tile % inner_tiles).to(tl.int64) * KEPT, tl.arange(0, KEPT)
    start = part.to(tl.int64) * (STRETCHES * LENGTH)
    there = column < inner - first
    # The axis of a stretch is the slowest, which no two threads share.
    stretch = tl.arange(0, STRETCHES)
    place = stretch[None, :, None] * LENGTH + tl.arange(0, LENGTH)[:, None, None]
    corner = (outer * n + start) * inner + first
    offset = place * inner + column[None, None, :]
    inside = (place < n - start) & there[None, None, :]
    value = _taken(x + corner + offset, inside, y, PRODUCT, WIDE)
    each = _total(value, 0, PRODUCT)
    through = _scanned(each, 0, PRODUCT)
    previous = tl.broadcast_to(tl.maximum(stretch - 1, 0)[:, None], [STRETCHES, KEPT])
    earlier = tl.where(stretch[:, None] == 0, NEUTRAL, tl.gather(through, previous, 0))
    if not ALONE:
        total = _total(each, 0, PRODUCT)
        before = _before(total, states, words, outer * inner + first + column, count, there, tile,
                         tiles, part, parts, GROUP, PRODUCT, DEPENDENT)  # fmt: skip
        earlier = _both(before[None, :], earlier, PRODUCT)
    # With nothing before too: a sum that begins with minus zero is plus zero.
    result = _both(earlier[None, :, :], _scanned(value, 0, PRODUCT), PRODUCT)
    tl.store(y + corner + offset, result.to(y.dtype.element_ty), mask=inside)
