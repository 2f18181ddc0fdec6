"""Device code of ``reduce.py``.

An op lifts each element, folds those of a part into a state of up to three lanes, merges states, and
makes its result from the last one. ``LIFT``, ``FOLD`` and ``END`` say how; every kernel here serves
all of them. A part is one tile, or several of which each place joins what it meets, so that only the
last is reduced across threads. ``divisor`` is that of ``END``, or the order of a norm.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_64 = tl.constexpr(-(2**63))
ONES = tl.constexpr(0x01010101)
HIGH = tl.constexpr(0x80808080 - 2**32)
NO_PLACE = tl.constexpr(2**62)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(value, AXIS: tl.constexpr):
    """The maximum, NaN where there is one."""
    if value.dtype.is_floating():
        return tl.reduce(value, AXIS, _larger)
    else:
        return tl.max(value, AXIS)


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
def _first_of(keys, places, AXIS: tl.constexpr):
    """The largest key along ``AXIS`` and the first of its places, both int64."""
    FAR: tl.constexpr = NO_PLACE if places.dtype == tl.int64 else 0x7FFFFFFF
    peak = tl.max(keys, AXIS)
    first = tl.where(keys == tl.expand_dims(peak, AXIS), places, FAR)
    return peak.to(tl.int64), tl.min(first, AXIS).to(tl.int64)


@triton.jit
def _power(base, exponent):
    """Of what is not negative."""
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def _lifted(
    pointer,
    inside,
    y,
    divisor,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    ORDER: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """A tile, lifted. What lies outside has no effect on the fold, or is masked there."""
    if LIFT == "zero" and PACKED:
        value = tl.load(pointer, mask=inside, other=ONES, eviction_policy=POLICY)
        # The high bit of each byte that is zero, and perhaps of some above one.
        result = ((value - ONES) & ~value & HIGH != 0).to(tl.int32)
    elif LIFT == "nonzero" or LIFT == "zero":
        NOTHING: tl.constexpr = 1.0 if LIFT == "zero" else 0.0
        value = tl.load(pointer, mask=inside, other=NOTHING, eviction_policy=POLICY)
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
            if FOLD == "exp" or ((FOLD == "max" or FOLD == "first") and LIFT == "same")
            else float("inf")
            if LIFT == "negative"
            else 0.0
        )
        value = tl.load(pointer, mask=inside, other=OTHER, eviction_policy=POLICY)
        if CASTS:  # torch casts first
            value = value.to(tl.float64 if WIDE else tl.float32).to(y.dtype.element_ty)
        result = value.to(tl.float64 if WIDE else tl.float32)
        if LIFT == "abs":
            result = tl.abs(result)
        elif LIFT == "square":
            result = result * result
        elif LIFT == "negative":
            result = -result
        elif LIFT == "power":
            base = tl.abs(result)
            if ORDER:  # neither small numbers nor the last digit are lost
                result = base
                for _ in tl.static_range(1, ORDER):
                    result = result * base
            else:
                # Of nothing a negative power is infinite.
                result = tl.where(inside, _power(base, divisor), 0.0)
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
        a = tl.reduce(value, AXIS, _smaller)
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
        # What lies outside is at most equal, and later.
        a, b = _first_of(_ordered(value), place, AXIS)
        c = a
    return a, b, c


@triton.jit
def _joined(a, b, value, inside, TURN: tl.constexpr, FOLD: tl.constexpr):
    """The first two lanes of each place's state after tile ``TURN``, whose elements are ``value``."""
    if FOLD == "sum":
        a += value
    elif FOLD == "prod":
        a *= value
    elif FOLD == "max":
        a = _larger(a, value)
    elif FOLD == "min":
        a = _smaller(a, value)
    elif FOLD == "moments":  # Youngs and Cramer 1971: sums, and squares about the mean
        a += value
        away = tl.where(inside, value * (TURN + 1) - a, 0.0)
        b += away * away * (1.0 / (TURN * (TURN + 1)))
    else:
        better = (value > a) | ((value != value) & (a == a))
        a = tl.where(better, value, a)
        b = tl.where(better, TURN, b)
    return a, b


@triton.jit
def _loaded(states, lanes, inside, FOLD: tl.constexpr, COUNTS: tl.constexpr):
    """States; ``lanes``: elements from one lane to the next."""
    NEUTRAL: tl.constexpr = (
        1
        if FOLD == "prod"
        else float("inf")
        if FOLD == "min"
        else float("-inf")
        if FOLD == "exp" or (FOLD == "max" and not COUNTS)
        else LEAST_64
        if FOLD == "first"
        else 0
    )
    a = tl.load(states, mask=inside, other=NEUTRAL)
    b, c = a, a
    if FOLD == "exp" or FOLD == "moments" or FOLD == "first":
        b = tl.load(states + lanes, mask=inside, other=NO_PLACE if FOLD == "first" else 0)
    if FOLD == "moments":
        c = tl.load(states + 2 * lanes, mask=inside, other=0.0)
    return a, b, c


@triton.jit
def _merged(a, b, c, FOLD: tl.constexpr, AXIS: tl.constexpr):
    """One state from those along ``AXIS``."""
    if FOLD == "exp":
        peaks, sums = a, b
        a = tl.max(peaks, AXIS)
        b = tl.sum(sums * tl.exp(peaks - tl.expand_dims(_finite(a), AXIS)), AXIS)
        c = a
    elif FOLD == "moments":
        means, squares, counts = a, b, c
        c = tl.sum(counts, AXIS)
        a = tl.sum(means * counts, AXIS) / c
        away = tl.where(counts > 0, means - tl.expand_dims(a, AXIS), 0.0)
        b = tl.sum(squares + counts * (away * away), AXIS)
    elif FOLD == "first":
        a, b = _first_of(a, b, AXIS)
        c = a
    else:
        if FOLD == "sum":
            a = tl.sum(a, AXIS)
        elif FOLD == "prod":
            a = tl.reduce(a, AXIS, _times)
        elif FOLD == "max":
            a = _largest(a, AXIS)
        else:
            a = tl.reduce(a, AXIS, _smaller)
        b, c = a, a
    return a, b, c


@triton.jit
def _inside(there, place, left, WHOLE: tl.constexpr):
    """Which elements of a tile there are."""
    inside = there & (place < left)
    return tl.full(inside.shape, True, tl.int1) if WHOLE else inside


@triton.jit
def _part(
    pointer,
    step,
    there,
    place,
    left,
    y,
    divisor,
    TURN: tl.constexpr,
    TURNS: tl.constexpr,
    WHOLE: tl.constexpr,
    AXIS: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    ORDER: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    POLICY: tl.constexpr,  # of the cache, for what is read
    DEPENDENT: tl.constexpr,
):
    """The state of TURNS tiles, ``step`` apart in memory, of TURN elements along the axis each, of
    which ``left`` are inside."""
    inside = _inside(there, place, left, WHOLE)
    value = _lifted(
        pointer, inside, y, divisor, LIFT, FOLD, ORDER, MASK, PACKED, CASTS, WIDE, POLICY
    )
    if TURNS == 1:
        if DEPENDENT:
            gdc_launch_dependents()
        count = tl.minimum(left, TURN).to(tl.float64 if WIDE else tl.float32)
        a, b, c = _fold(value, inside, place, count, FOLD, AXIS)
    else:
        a, b = value, value
        if FOLD == "first":  # the tile of each place's first maximum
            b = tl.zeros(value.shape, tl.int32)
        elif FOLD == "moments":
            b = tl.zeros_like(value)
        for turn in tl.static_range(1, TURNS):
            inside = _inside(there, place + turn * TURN, left, WHOLE)
            value = _lifted(
                pointer + turn * step, inside, y, divisor,
                LIFT, FOLD, ORDER, MASK, PACKED, CASTS, WIDE, POLICY,
            )  # fmt: skip
            a, b = _joined(a, b, value, inside, turn, FOLD)
        if DEPENDENT:
            gdc_launch_dependents()
        c = a
        if FOLD == "moments":
            turns = tl.maximum(tl.minimum((left - place + (TURN - 1)) // TURN, TURNS), 0)
            c = tl.broadcast_to(tl.where(there, turns, 0), value.shape).to(value.dtype)
            a = a / tl.maximum(c, 1.0)
        elif FOLD == "first":
            a, b = _ordered(a), place + b * TURN
        a, b, c = _merged(a, b, c, FOLD, AXIS)
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
    elif END == "power":
        a = _power(a, 1.0 / divisor)
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
    TURN: tl.constexpr,
    TURNS: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile has an element outside
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    ORDER: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    POLICY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Contiguous rows: several to a tile, or a part of one row."""
    n = n_groups * GRAIN  # so that the compiler knows what divides a row
    program = tl.program_id(0)
    first = (program // parts).to(tl.int64) * ROWS
    start = (program % parts).to(tl.int64) * (TURN * TURNS)
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, TURN)[None, :]
    pointer = x + first * n + start + (row * n + place)
    if DEPENDENT:
        gdc_wait()  # for the elements; what came before them in the stream is complete
    a, b, c = _part(
        pointer, TURN, row < rows - first, place, n - start, y, divisor,
        TURN, TURNS, WHOLE, 1, LIFT, FOLD, ORDER, MASK, PACKED, CASTS, WIDE, POLICY, DEPENDENT,
    )  # fmt: skip
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
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    TURNS: tl.constexpr,
    WHOLE: tl.constexpr,  # no tile has an element outside
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    ORDER: tl.constexpr,
    MASK: tl.constexpr,
    PACKED: tl.constexpr,
    CASTS: tl.constexpr,
    WIDE: tl.constexpr,
    POLICY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """An axis with an inner stride: a tile is a part of some columns."""
    inner = inner_groups * GRAIN
    program = tl.program_id(0)
    column = (program % inner_tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = (program // inner_tiles) % parts
    outer = (program // inner_tiles // parts).to(tl.int64)
    place = tl.arange(0, TURN)[:, None]
    start = part.to(tl.int64) * (TURN * TURNS)
    pointer = x + (outer * n + start + place) * inner + column[None, :]
    if DEPENDENT:
        gdc_wait()  # for the elements; what came before them in the stream is complete
    a, b, c = _part(
        pointer, inner * TURN, (column < inner)[None, :], place, n - start, y, divisor,
        TURN, TURNS, WHOLE, 0, LIFT, FOLD, ORDER, MASK, PACKED, CASTS, WIDE, POLICY, DEPENDENT,
    )  # fmt: skip
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
    tiles,
    parts,
    divisor,
    KEPT: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    LAST: tl.constexpr,
    LIFT: tl.constexpr,
    FOLD: tl.constexpr,
    END: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """States along the axis ``n`` of ``[outer, n, kept]``, or of ``[kept, n]`` with ROWS, ``N`` to a
    part."""
    program = tl.program_id(0)
    part = program % parts
    outer = (program // parts // tiles).to(tl.int64)
    index = (program // parts % tiles).to(tl.int64) * KEPT + tl.arange(0, KEPT)
    place = part.to(tl.int64) * N + tl.arange(0, N)
    inside = (index < kept)[:, None] & (place < n)[None, :]
    if ROWS:
        offset = (index * n)[:, None] + place[None, :]
        target = index * parts + part
    else:
        offset = (outer * n * kept + index)[:, None] + (place * kept)[None, :]
        target = (outer * parts + part) * kept + index
    COUNTS: tl.constexpr = LIFT == "nonzero" or LIFT == "zero"
    if DEPENDENT:
        gdc_wait()  # for the states; what came before them in the stream is complete
    a, b, c = _loaded(states + offset, lanes, inside, FOLD, COUNTS)
    if DEPENDENT:
        gdc_launch_dependents()
    a, b, c = _merged(a, b, c, FOLD, 1)
    if LAST:
        _end(y, y2, outer * kept + index, index < kept, a, b, c, divisor, END)
    else:
        _keep(into, into_lanes, target, index < kept, a, b, c, LANES)
