"""Device code of ``reduce.py``.

An op lifts each element, folds a tile of them into a state of up to three lanes, merges states, and
makes its result from the last one. ``LIFT``, ``FOLD`` and ``END`` say how; every kernel here serves
all of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_32 = tl.constexpr(-(2**31))
LEAST_64 = tl.constexpr(-(2**63))
ONES = tl.constexpr(0x01010101)
HIGH = tl.constexpr(0x80808080 - 2**32)
NO_PLACE = tl.constexpr(2**62)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _largest(value, AXIS: tl.constexpr):
    """The maximum, NaN where there is one."""
    peak = tl.max(value, AXIS)
    if value.dtype.is_floating():
        bad = tl.max((value != value).to(tl.int32), AXIS)
        peak = tl.where(bad > 0, float("nan"), peak)
    return peak


@triton.jit
def _finite(peak):
    """What to subtract before exponentials are taken: the maximum where it is finite."""
    return tl.where(tl.abs(peak) == float("inf"), 0.0, peak)


@triton.jit
def _ordered(value):
    """Integers in the order of floats: both zeros alike, NaN above all."""
    value = tl.where(value != value, float("nan"), value)
    value = tl.where(value == 0.0, 0.0, value)
    if value.dtype == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = value.to(tl.int32, bitcast=True)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _lifted(
    pointer,
    inside,
    y,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile, lifted. What lies outside has no effect on the fold, or is masked there."""
    if LIFT == "zero" and PACKED:
        value = tl.load(pointer, mask=inside, other=ONES)
        # The high bit of each byte that is zero, and perhaps of some above one.
        result = ((value - ONES) & ~value & HIGH != 0).to(tl.int32)
    elif LIFT == "nonzero" or LIFT == "zero":
        value = tl.load(pointer, mask=inside, other=1.0 if LIFT == "zero" else 0.0)
        if MASK:  # the bits of a complex number but for its signs
            value = value & MASK
        result = (value == 0 if LIFT == "zero" else value != 0).to(tl.int32)
    else:
        OTHER: tl.constexpr = (
            1.0
            if FOLD == "prod"
            else float("inf")
            if FOLD == "min"
            else float("-inf")
            if FOLD == "exp" or (FOLD == "max" and LIFT == "same")
            else 0.0
        )
        value = tl.load(pointer, mask=inside, other=OTHER)
        if CASTS:  # torch casts first
            value = value.to(tl.float64 if WIDE else tl.float32).to(y.dtype.element_ty)
        result = value.to(tl.float64 if WIDE else tl.float32)
        if LIFT == "abs":
            result = tl.abs(result)
        elif LIFT == "square":
            result = result * result
        elif LIFT == "negative":
            result = -result
    return result


@triton.jit
def _fold(value, inside, place, count, FOLD: tl.constexpr, AXIS: tl.constexpr):
    """The state of a tile along ``AXIS``; ``place``: of its elements, ``count``: of those inside."""
    if FOLD == "sum":
        a = tl.sum(value, AXIS)
        b, c = a, a
    elif FOLD == "prod":
        a = tl.reduce(value, AXIS, _times)
        b, c = a, a
    elif FOLD == "max":
        a = _largest(value, AXIS)
        b, c = a, a
    elif FOLD == "min":
        a = -_largest(-value, AXIS)
        b, c = a, a
    elif FOLD == "exp":
        a = tl.max(value, AXIS)
        b = tl.sum(tl.exp(value - tl.expand_dims(_finite(a), AXIS)), AXIS)
        c = a
    elif FOLD == "moments":
        a = tl.sum(value, AXIS) / count
        away = tl.where(inside, value - tl.expand_dims(a, AXIS), 0.0)
        b = tl.sum(away * away, AXIS)
        c = tl.zeros_like(a) + count
    else:
        key = _ordered(value)
        LEAST: tl.constexpr = LEAST_64 if key.dtype == tl.int64 else LEAST_32
        key = tl.where(inside, key, LEAST)
        peak = tl.max(key, AXIS)
        first = tl.where(key == tl.expand_dims(peak, AXIS), place, 0x7FFFFFFF)
        a = peak.to(tl.int64)
        b = tl.min(first, AXIS).to(tl.int64)
        c = a
    return a, b, c


@triton.jit
def _merged(states, lanes, inside, FOLD: tl.constexpr, COUNTS: tl.constexpr):
    """One state from those along axis 1; ``lanes``: elements from one lane to the next."""
    if FOLD == "sum":
        a = tl.sum(tl.load(states, mask=inside, other=0), 1)
        b, c = a, a
    elif FOLD == "prod":
        a = tl.reduce(tl.load(states, mask=inside, other=1), 1, _times)
        b, c = a, a
    elif FOLD == "max":
        LEAST: tl.constexpr = 0 if COUNTS else float("-inf")
        a = _largest(tl.load(states, mask=inside, other=LEAST), 1)
        b, c = a, a
    elif FOLD == "min":
        a = -_largest(-tl.load(states, mask=inside, other=float("inf")), 1)
        b, c = a, a
    elif FOLD == "exp":
        peaks = tl.load(states, mask=inside, other=float("-inf"))
        sums = tl.load(states + lanes, mask=inside, other=0.0)
        a = tl.max(peaks, 1)
        b = tl.sum(sums * tl.exp(peaks - _finite(a)[:, None]), 1)
        c = a
    elif FOLD == "moments":
        means = tl.load(states, mask=inside, other=0.0)
        squares = tl.load(states + lanes, mask=inside, other=0.0)
        counts = tl.load(states + 2 * lanes, mask=inside, other=0.0)
        c = tl.sum(counts, 1)
        a = tl.sum(means * counts, 1) / c
        away = tl.where(inside, means - a[:, None], 0.0)
        b = tl.sum(squares + counts * (away * away), 1)
    else:
        keys = tl.load(states, mask=inside, other=LEAST_64)
        places = tl.load(states + lanes, mask=inside, other=NO_PLACE)
        a = tl.max(keys, 1)
        b = tl.min(tl.where(keys == a[:, None], places, NO_PLACE), 1)
        c = a
    return a, b, c


@triton.jit
def _divided(value, by):
    if value.dtype == tl.float64:
        return value / by
    else:
        return tl.div_rn(value.to(tl.float32), by)


@triton.jit
def _rooted(value):
    if value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.sqrt_rn(value)


@triton.jit
def _end(y, y2, offset, inside, a, b, c, divisor, END: tl.constexpr):
    """Write the result that a state stands for."""
    if END == "mean":
        a = _divided(a, divisor)
    elif END == "root":
        a = _rooted(a)
    elif END == "log":
        a = tl.log(b) + _finite(a)
    elif END == "var":
        a = _divided(b, divisor)
    elif END == "std":
        a = _rooted(_divided(b, divisor))
    elif END == "var_mean":
        tl.store(y2 + offset, a, mask=inside)
        a = _divided(b, divisor)
    elif END == "place":
        a = b
    elif END == "truth":
        a = a != 0
    elif END == "untruth":
        a = a == 0
    tl.store(y + offset, a.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _keep(states, lanes, offset, inside, a, b, c, LANES: tl.constexpr):
    tl.store(states + offset, a.to(states.dtype.element_ty), mask=inside)
    if LANES > 1:
        tl.store(states + lanes + offset, b, mask=inside)
    if LANES > 2:
        tl.store(states + 2 * lanes + offset, c, mask=inside)


@triton.jit
def reduce_rows(
    x,
    y,
    y2,
    states,
    lanes,
    rows,
    n_groups,
    parts,
    divisor,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Contiguous rows: several to a tile, or a part of one."""
    if DEPENDENT:
        gdc_launch_dependents()
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    program = tl.program_id(0)
    first = (program // parts).to(tl.int64) * ROWS
    start = (program % parts).to(tl.int64) * N
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, N)[None, :]
    inside = (row < rows - first) & (place < n - start)
    pointer = x + first * n + start + (row * n + place)
    value = _lifted(pointer, inside, y, LIFT, FOLD, MASK, PACKED, CASTS, WIDE)
    count = tl.minimum(n - start, N).to(tl.float64 if WIDE else tl.float32)
    a, b, c = _fold(value, inside, place, count, FOLD, 1)
    if FOLD == "first":
        b += start
    kept = tl.arange(0, ROWS)
    there = kept < rows - first
    if LAST:
        _end(y, y2, first + kept, there, a, b, c, divisor, END)
    else:
        _keep(states, lanes, first * parts + program % parts + kept, there, a, b, c, LANES)


@triton.jit
def reduce_columns(
    x,
    y,
    y2,
    states,
    lanes,
    n,
    inner_groups,
    inner_tiles,
    parts,
    divisor,
    GRAIN: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """An axis with an inner stride: a tile is a part of some columns."""
    if DEPENDENT:
        gdc_launch_dependents()
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    column = (program % inner_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = (program // inner_tiles) % parts
    outer = (program // inner_tiles // parts).to(tl.int64)
    place = tl.arange(0, STEP)[:, None]
    start = part.to(tl.int64) * STEP
    inside = (place < n - start) & (column < inner)[None, :]
    pointer = x + (outer * n + start + place) * inner + column[None, :]
    value = _lifted(pointer, inside, y, LIFT, FOLD, MASK, PACKED, CASTS, WIDE)
    count = tl.minimum(n - start, STEP).to(tl.float64 if WIDE else tl.float32)
    a, b, c = _fold(value, inside, place, count, FOLD, 0)
    if FOLD == "first":
        b += start
    if LAST:
        _end(y, y2, outer * inner + column, column < inner, a, b, c, divisor, END)
    else:
        offset = (outer * parts + part) * inner + column
        _keep(states, lanes, offset, column < inner, a, b, c, LANES)


@triton.jit
def reduce_states(
    states,
    lanes,
    into,
    into_lanes,
    y,
    y2,
    kept,
    n,
    inner,
    parts,
    divisor,
    KEPT: tl.constexpr,
    N: tl.constexpr,
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """States along the middle axis of ``[kept // inner, n, inner]``, ``N`` to a part."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()  # for the states; what came before them in the stream is complete
    program = tl.program_id(0)
    part = program % parts
    index = (program // parts).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    outer, column = index // inner, index % inner
    place = part.to(tl.int64) * N + tl.arange(0, N)
    inside = (index < kept)[:, None] & (place < n)[None, :]
    offset = (outer * n * inner + column)[:, None] + (place * inner)[None, :]
    a, b, c = _merged(states + offset, lanes, inside, FOLD, LIFT == "nonzero" or LIFT == "zero")
    if LAST:
        _end(y, y2, index, index < kept, a, b, c, divisor, END)
    else:
        target = (outer * parts + part) * inner + column
        _keep(into, into_lanes, target, index < kept, a, b, c, LANES)
