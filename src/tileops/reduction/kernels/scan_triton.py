"""Device code of ``scan.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AHEAD = tl.constexpr(8)


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
def _once(
    x,
    y,
    corner,
    offset,
    there,
    n,
    AXIS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Scan some kept indices of an axis that is one block: mode ``only``."""
    NEUTRAL: tl.constexpr = 1.0 if PRODUCT else 0.0
    place = tl.expand_dims(tl.arange(0, BLOCK), 1 - AXIS)
    inside = tl.expand_dims(there, AXIS) & (place < n)
    value = _taken(x + corner + offset, inside, y, PRODUCT, WIDE)
    # As in a walk, so that a sum which begins with minus zero is plus zero here too.
    result = _both(NEUTRAL, _scanned(value, AXIS, PRODUCT), PRODUCT)
    tl.store(y + corner + offset, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _walk(
    x,
    y,
    totals,
    corner,
    offset,
    kept,
    there,
    stride,
    n,
    part,
    parts,
    blocks,
    AXIS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scan the parts of some kept indices, whose first blocks are at ``corner + offset``.

    A result is (what the parts before gave) with ((what the blocks before gave) with (its block's
    scan)), in every mode: ``whole`` walks along all parts, ``write`` writes one of them after
    ``totals`` has left what each gives.
    """
    NUMBER: tl.constexpr = tl.float64 if WIDE else tl.float32
    NEUTRAL: tl.constexpr = 1.0 if PRODUCT else 0.0
    place, allowed = tl.expand_dims(tl.arange(0, BLOCK), 1 - AXIS), tl.expand_dims(there, AXIS)
    before = tl.full([KEPT], NEUTRAL, NUMBER)
    first, end = part, part + 1
    if MODE == "whole":
        first, end = part * 0, parts
    if MODE == "write":
        if DEPENDENT:
            gdc_wait()  # for the totals; what came before them in the stream is complete
        for some in range(0, part, AHEAD):
            for ahead in tl.static_range(AHEAD):  # so many loads are under way at once
                earlier = some + ahead
                seen = there & (earlier < part)
                total = tl.load(totals + kept * parts + earlier, mask=seen, other=NEUTRAL)
                before = _both(before, total, PRODUCT)
    for current in range(first, end):
        within = tl.full([KEPT], NEUTRAL, NUMBER)
        for block in range(current * blocks, tl.minimum((current + 1) * blocks, tl.cdiv(n, BLOCK))):
            start = block * BLOCK
            inside = allowed & (place < n - start)
            value = _taken(x + corner + start * stride + offset, inside, y, PRODUCT, WIDE)
            if MODE != "totals":
                result = _both(
                    tl.expand_dims(within, AXIS), _scanned(value, AXIS, PRODUCT), PRODUCT
                )
                result = _both(tl.expand_dims(before, AXIS), result, PRODUCT)
                result = result.to(y.dtype.element_ty)
                tl.store(y + corner + start * stride + offset, result, mask=inside)
            within = _both(within, _total(value, AXIS, PRODUCT), PRODUCT)
        if MODE == "totals":
            tl.store(totals + kept * parts + current, within, mask=there)
        before = _both(before, within, PRODUCT)


@triton.jit
def scan_rows(
    x,
    y,
    totals,
    rows,
    n_groups,
    parts,
    blocks,
    GRAIN: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Contiguous rows."""
    if DEPENDENT and MODE == "totals":
        gdc_launch_dependents()
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    program = tl.program_id(0)
    tile, part = program, program * 0
    if MODE == "totals" or MODE == "write":
        tile, part = program // parts, program % parts
    first, row = tile.to(tl.int64) * KEPT, tl.arange(0, KEPT)
    # A tile of several rows has short ones, so these offsets are small.
    offset = row[:, None] * n.to(tl.int32) + tl.arange(0, BLOCK)[None, :]
    if MODE == "only":
        _once(x, y, first * n, offset, row < rows - first, n, 1, BLOCK, PRODUCT, WIDE)
    else:
        _walk(x, y, totals, first * n, offset, first + row, row < rows - first, 1, n, part, parts,
              blocks, 1, KEPT, BLOCK, MODE, PRODUCT, WIDE, DEPENDENT)  # fmt: skip


@triton.jit
def scan_columns(
    x,
    y,
    totals,
    n,
    inner_groups,
    inner_tiles,
    parts,
    blocks,
    GRAIN: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    PRODUCT: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """An axis with an inner stride, some columns at a time."""
    if DEPENDENT and MODE == "totals":
        gdc_launch_dependents()
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    tile, part = program, program * 0
    if MODE == "totals" or MODE == "write":
        tile, part = program // parts, program % parts
    outer = (tile // inner_tiles).to(tl.int64)
    first, column = (tile % inner_tiles).to(tl.int64) * KEPT, tl.arange(0, KEPT)
    offset = tl.arange(0, BLOCK)[:, None] * inner + column[None, :]
    kept, corner = outer * inner + first + column, outer * n * inner + first
    if MODE == "only":
        _once(x, y, corner, offset, column < inner - first, n, 0, BLOCK, PRODUCT, WIDE)
    else:
        _walk(x, y, totals, corner, offset, kept, column < inner - first, inner, n, part, parts,
              blocks, 0, KEPT, BLOCK, MODE, PRODUCT, WIDE, DEPENDENT)  # fmt: skip
