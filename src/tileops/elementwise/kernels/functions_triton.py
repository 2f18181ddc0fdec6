"""Functions of float32 for ``expressions_triton.py``, which Triton lacks or has less exactly.

``NARROW`` asks for what is exact enough for a result of at most 11 bits, in fewer instructions.
"""

# ruff: noqa: A001  (pow is also the expression of an op)

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from tileops.elementwise.kernels import narrow_triton as narrow
from tileops.lib.activations_triton import (
    LN_2,
    LOG2_E,
    LOG2_E_REST,
    exp2,
    instruction,
    inverse,
    ratio,
)

LN_2_HIGH: tl.constexpr = tl.constexpr(0.693145751953125)
"""ln(2) in 13 bits: its product with an exponent is exact."""
LN_2_REST: tl.constexpr = tl.constexpr(1.4286068203094173e-06)


@triton.jit
def number(x):
    """Bools as numbers: as one bit, true would be -1."""
    return x.to(tl.uint8) if x.dtype.is_int1() else x


@triton.jit
def negated(x):
    """With the sign of a zero, which Triton's ``-x``, being ``0 - x``, loses."""
    return x * -1.0


@triton.jit
def truncated(x):
    return instruction(x, "cvt.rzi.f32.f32")


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even."""
    return instruction(x, "cvt.rni.f32.f32")


@triton.jit
def quotient(x, y, NARROW: tl.constexpr):
    return x / y if NARROW else tl.div_rn(x, y)


@triton.jit
def quotient_by(x, y, inverse):
    """``x / y``, rounded once, for the ``inverse`` of ``y`` so rounded (Markstein, 1990): a third of the
    instructions."""
    result = x * inverse
    rest = tl.fma(-result, y, x)
    return tl.where(tl.abs(rest) > 0.0, tl.fma(rest, inverse, result), result)


@triton.jit
def inverted(x, NARROW: tl.constexpr):
    if NARROW:
        return 1.0 / x
    else:
        return instruction(x, "rcp.rn.f32")


@triton.jit
def log2(x, NARROW: tl.constexpr):
    if NARROW:
        return instruction(x, "lg2.approx.f32")
    else:
        return tl.log2(x)


@triton.jit
def log(x, NARROW: tl.constexpr):
    return log2(x, True) * LN_2 if NARROW else tl.log(x)


@triton.jit
def expm1(x, NARROW: tl.constexpr):
    if NARROW:
        return narrow.expm1(x)
    else:
        bounded = tl.where(x < -100.0, -100.0, x)
        n = tl.minimum(tl.floor(bounded * LOG2_E + 0.5), 128.0)
        f = tl.fma(n, -LN_2_REST, tl.fma(n, -LN_2_HIGH, bounded))
        # The series of (e**f - 1) / f for |f| < ln(2) / 2; the next term is below 2**-26.
        series = 1.0 / 5040.0 + f * (1.0 / 40320.0)
        series = tl.fma(series, f, 1.0 / 720.0)
        series = tl.fma(series, f, 1.0 / 120.0)
        series = tl.fma(series, f, 1.0 / 24.0)
        series = tl.fma(series, f, 1.0 / 6.0)
        series = tl.fma(series, f, 0.5)
        series = tl.fma(series * f, f, f)
        half = tl.exp2(n - 1.0)  # 2**n itself may be too large
        result = 2.0 * tl.fma(half, series, half - 0.5)
        return tl.where(x == 0.0, x, result)


@triton.jit
def log1p(x, NARROW: tl.constexpr):
    """``log(1 + x)``; exactly, since what the sum's rounding does to its logarithm it does to
    ``sum - 1`` as well."""
    if NARROW:
        return narrow.log1p(x)
    else:
        total = 1.0 + x
        # Of a large one the correction is 1, and its inverse may be none.
        corrected = tl.log(total) * tl.where(x < 16777216.0, ratio(x, total - 1.0), 1.0)
        return tl.where(total == 1.0, x, corrected)


@triton.jit
def tanh(x, NARROW: tl.constexpr):
    if NARROW:
        return narrow.tanh(x)
    else:
        grown = expm1(tl.minimum(2.0 * tl.abs(x), 40.0), False)
        size = ratio(grown, grown + 2.0)
        return tl.where(x != x, x, tl.where(x < 0.0, -size, tl.where(x == 0.0, x, size)))


@triton.jit
def _nearest(x, y):
    """Of ``x / y``, within 2**-22 of itself: it, the nearest integer, and exactly what that leaves of
    ``x``, as far as the integer is below 2**20."""
    # Both times a power of 2 that leaves y where it has an inverse; infinite and zero stay.
    exponent = y.to(tl.int32, bitcast=True) & 0x7F800000
    scale = tl.maximum(0x7E800000 - exponent, 0x00800000).to(tl.float32, bitcast=True)
    approximate = (x * scale) * inverse(y * scale)
    nearest = round_even(approximate)
    # Of an infinite y too, all of x is left.
    left = tl.where(nearest == 0.0, x, tl.fma(negated(nearest), y, x))
    return approximate, nearest, left


@triton.jit
def floordivide(x, y):
    """``floor(x / y)`` of the exact quotient, as far as float32 has integers of its size."""
    approximate, nearest, left = _nearest(x, y)
    # On which side of the nearest integer the exact quotient lies, what is left tells.
    whole = tl.where(narrow.signed(left, y) < 0.0, nearest - 1.0, nearest)
    whole = tl.where(
        tl.abs(approximate) < 4194304.0, narrow.signed(tl.abs(whole), approximate), approximate
    )
    # torch takes the remainder first, and an infinite x has none.
    return tl.where((tl.abs(x) == float("inf")) & (y != 0.0), float("nan"), whole)


@triton.jit
def _remainder(x, y):
    """With the sign of ``x`` or of ``y``, and where it is exact."""
    approximate, _, rest = _nearest(x, y)
    return tl.where(rest == 0.0, x * 0.0, rest), tl.abs(approximate) < 1048576.0


@triton.jit
def _towards(rest, y):
    return tl.where(narrow.signed(rest, y) < 0.0, rest + y, rest)


@triton.jit
def remainder(x, y):
    """``x - floor(x / y) * y``, exactly, with the sign of ``y``."""
    rest, known = _remainder(x, y)
    # The library's function takes subnormal numbers for 0.
    least = tl.maximum(tl.abs(y), 1.1754943508222875e-38, propagate_nan=tl.PropagateNan.ALL)
    divisor = tl.where(y == 0.0, y, least)
    return _towards(tl.where(known, rest, libdevice.fmod(tl.where(known, 0.0, x), divisor)), y)


@triton.jit
def usual_remainder(x, y):
    rest, known = _remainder(x, y)
    return _towards(rest, y), known


@triton.jit
def erf(x, NARROW: tl.constexpr):
    return narrow.erf(x) if NARROW else tl.erf(x)


@triton.jit
def pow(x, y, NARROW: tl.constexpr):
    whole = tl.floor(y) == y
    # The sign of x is the result's where y is odd.
    sign = tl.where(whole & (tl.floor(y * 0.5) * 2.0 != y), -2147483648, 0)
    spoilt = tl.where(whole, 0.0, float("nan"))  # what a negative x adds
    size = tl.abs(x)
    # What is more raises anything but 1 to infinity or 0.
    y = tl.maximum(y, -4294967296.0, propagate_nan=tl.PropagateNan.ALL)
    y = tl.minimum(y, 4294967296.0, propagate_nan=tl.PropagateNan.ALL)
    if NARROW:
        total = log2(size, True)
        total = tl.where((x < 0.0) & (size < float("inf")), total + spoilt, total)
        result = exp2(y * total)
    else:
        total, low = _log2_of_root(size)
        total = tl.where(x < 0.0, total + spoilt, total)
        # Of 0, infinity and NaN.
        plain = size.to(tl.uint32, bitcast=True) - 1 < 0x7F7FFFFF
        total = tl.where(plain, total, instruction(size, "lg2.approx.ftz.f32"))
        # Infinity cannot be corrected, nor what is flushed: the power of the root is neither.
        exponent = y * total
        more = tl.fma(y, low, tl.fma(y, total, negated(exponent)))
        root = exp2(exponent)
        corrected = tl.fma(root, more * (2.0 * LN_2), root)
        result = tl.where(tl.abs(exponent) < 80.0, corrected, root) * root
    result = tl.where((x == 1.0) | (y == 0.0), 1.0, result)
    sign &= x.to(tl.int32, bitcast=True)
    return (result.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _log2_of_root(x):
    """For positive finite numbers; in two parts, since what multiplies a logarithm multiplies its error."""
    tiny = x < 1.1754943508222875e-38
    bits = tl.where(tiny, x * 16777216.0, x).to(tl.int32, bitcast=True)
    # x is m * 2**e with m from sqrt(1/2) to sqrt(2).
    e_bits = (bits - 0x3F3504F3) & -8388608
    f = (bits - e_bits).to(tl.float32, bitcast=True) - 1.0
    e = tl.fma(e_bits.to(tl.float32), 2.0**-24, tl.where(tiny, -12.0, 0.0))
    # log(m) / 2 is artanh(q) for q = (m - 1) / (m + 1); rest is what is left out of the quotient.
    inverted = inverse(f + 2.0)
    q = f * inverted
    rest = inverted * tl.fma(negated(q), f, tl.fma(-2.0, q, f))
    s = q * q
    # (artanh(q) / q - 1) / s, a minimax fit of relative error 2**-30 of the logarithm.
    series = tl.fma(s, 0.14935932, 0.19988768)
    series = tl.fma(series, s, 0.33333388)
    series = tl.fma(series, s, LOG2_E_REST / LOG2_E)
    # A mere product would be fused into the sums, which count what it rounded.
    high = tl.fma(q, LOG2_E, 0.0)
    low = tl.fma(q, LOG2_E, negated(high))
    low = tl.fma(tl.fma(series, q, rest), LOG2_E, low)
    of_m = high + low
    total = e + of_m
    return total, ((e - total) + of_m) + ((high - of_m) + low)
