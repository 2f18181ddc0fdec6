"""Functions of float32 that Triton lacks or has less exactly, for ``expressions_triton.py``.

``NARROW`` asks for what is exact enough for a result of at most 11 bits, in fewer instructions.
"""

# ruff: noqa: A001  (pow is also the expression of an op)

import triton
import triton.language as tl

from tileops.elementwise.kernels import narrow_triton as narrow
from tileops.lib.activations_triton import LN_2, LOG2_E, LOG2_E_REST

LN_2_HIGH: tl.constexpr = tl.constexpr(0.693145751953125)
"""ln(2) in 13 bits: its product with an exponent is exact."""
LN_2_REST: tl.constexpr = tl.constexpr(1.4286068203094173e-06)
TWO_TO_64: tl.constexpr = tl.constexpr(18446744073709551616.0)


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
    return tl.inline_asm_elementwise(
        "cvt.rzi.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even."""
    return tl.inline_asm_elementwise(
        "cvt.rni.f32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def quotient(x, y, NARROW: tl.constexpr):
    return x / y if NARROW else tl.div_rn(x, y)


@triton.jit
def log2(x, NARROW: tl.constexpr):
    if NARROW:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
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
        corrected = tl.log(total) * tl.div_rn(x, total - 1.0)
        return tl.where((total == 1.0) | (x == float("inf")), x, corrected)


@triton.jit
def tanh(x, NARROW: tl.constexpr):
    if NARROW:
        return narrow.tanh(x)
    else:
        grown = expm1(tl.minimum(2.0 * tl.abs(x), 40.0), False)
        size = tl.div_rn(grown, grown + 2.0)
        return tl.where(x != x, x, tl.where(x < 0.0, -size, tl.where(x == 0.0, x, size)))


@triton.jit
def _sign_differs(x, y):
    return (x < 0.0) != (y < 0.0)


@triton.jit
def _exact_floordivide(x, y):
    """``floor(x / y)`` of the exact quotient, as far as float32 has integers of its size."""
    approximate = x / y
    nearest = tl.floor(approximate + 0.5)
    # On which side of the nearest integer the exact quotient lies, what is left tells.
    left = tl.fma(-nearest, y, x)
    below = tl.where(y < 0.0, left > 0.0, left < 0.0)
    below |= (tl.abs(y) == float("inf")) & (x != 0.0) & _sign_differs(x, y)
    whole = tl.where(below, nearest - 1.0, nearest)
    whole = tl.where(tl.abs(approximate) < 4194304.0, whole, tl.floor(approximate))
    whole = tl.where((whole == 0.0) & (approximate == 0.0), approximate, whole)
    # torch takes the remainder first, and an infinite x has none.
    return tl.where((tl.abs(x) == float("inf")) & (y != 0.0), float("nan"), whole)


@triton.jit
def _reduced(left, divisor):
    """``left`` less a multiple of ``divisor``, exactly: both positive, the quotient below 2**23."""
    rest = tl.fma(-tl.floor(left / divisor), divisor, left)
    rest = tl.where(rest < 0.0, rest + divisor, rest)
    return tl.where(rest >= divisor, rest - divisor, rest)


@triton.jit
def _exact_remainder(x, y):
    """``x - floor(x / y) * y``, exactly, with the sign of ``y``."""
    plain = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf")) & (tl.abs(y) > 1.2e-38)
    left, divisor = tl.where(plain, tl.abs(x), 0.0), tl.where(plain, tl.abs(y), 1.0)
    bits = divisor.to(tl.int32, bitcast=True)
    longer = (left.to(tl.int32, bitcast=True) >> 23) - (bits >> 23)
    # Quotients of more than 22 bits are rare: 22 bits at a time, by the divisor times a power of 2.
    while tl.max(longer) > 22:
        shift = tl.maximum(longer - 22, 0)
        left = _reduced(left, (bits + (shift << 23)).to(tl.float32, bitcast=True))
        longer = (left.to(tl.int32, bitcast=True) >> 23) - (bits >> 23)
    rest = _reduced(left, divisor)
    rest = tl.where(x.to(tl.int32, bitcast=True) < 0, negated(rest), rest)
    # Of an infinite y every number is its own remainder; of 0 there is none.
    own = (tl.abs(x) < float("inf")) & (tl.abs(y) == float("inf"))
    none = (tl.abs(x) == float("inf")) | (x != x) | (y != y) | (y == 0.0)
    rest = tl.where(none, float("nan"), tl.where(own, x, rest))
    return tl.where((rest != 0.0) & _sign_differs(rest, y), rest + y, rest)


@triton.jit
def floordivide(x, y, NARROW: tl.constexpr):
    if NARROW:
        result, known = narrow.floordivide(x, y)
        if tl.min(known.to(tl.int32)) == 0:
            result = _exact_floordivide(x, y)
        return result
    else:
        return _exact_floordivide(x, y)


@triton.jit
def remainder(x, y, NARROW: tl.constexpr):
    if NARROW:
        result, known = narrow.remainder(x, y)
        if tl.min(known.to(tl.int32)) == 0:
            result = _exact_remainder(x, y)
        return result
    else:
        return _exact_remainder(x, y)


@triton.jit
def sin(x, NARROW: tl.constexpr):
    if NARROW:
        result = narrow.sin(x)
        known = tl.abs(x) < 131072.0
        if tl.min(known.to(tl.int32)) == 0:
            result = tl.where(known, result, tl.sin(x))
        return result
    else:
        return tl.sin(x)


@triton.jit
def cos(x, NARROW: tl.constexpr):
    if NARROW:
        result = narrow.cos(x)
        known = tl.abs(x) < 131072.0
        if tl.min(known.to(tl.int32)) == 0:
            result = tl.where(known, result, tl.cos(x))
        return result
    else:
        return tl.cos(x)


@triton.jit
def erf(x, NARROW: tl.constexpr):
    return narrow.erf(x) if NARROW else tl.erf(x)


@triton.jit
def _signed_power(x, y, size):
    """``size`` is ``|x|**y``."""
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    negative = x.to(tl.int32, bitcast=True) < 0
    result = tl.where(negative & odd, negated(size), size)
    return tl.where((x < 0.0) & ~whole & (x > float("-inf")), float("nan"), result)


@triton.jit
def _is_one(x, y):
    """Where ``|x|**y`` is 1 whatever its logarithm says."""
    return (y == 0.0) | (x == 1.0) | ((x == -1.0) & (y == y))


@triton.jit
def pow(x, y, NARROW: tl.constexpr):
    if NARROW:
        exponent = tl.where(_is_one(x, y), 0.0, y * log2(tl.abs(x), True))
        return _signed_power(x, y, tl.exp2(exponent))
    else:
        return _exact_power(x, y)


@triton.jit
def _exact_power(x, y):
    """With the logarithm in two parts, since ``y`` multiplies its error."""
    size = tl.abs(x)
    tiny = size < 1.1754943508222875e-38
    bits = tl.where(tiny, size * 16777216.0, size).to(tl.int32, bitcast=True)
    # |x| is m * 2**e with m from sqrt(1/2) to sqrt(2).
    e = (bits - 0x3F3504F3) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    e = tl.where(tiny, e - 24, e).to(tl.float32)
    # log(m) is 2 * artanh(q) for q = (m - 1) / (m + 1); rest is what the quotient's rounding left out.
    inverse = tl.div_rn(1.0, f + 2.0)
    q = f * inverse
    rest = inverse * tl.fma(-q, f, tl.fma(-2.0, q, f))
    s = q * q
    series = tl.fma(s, 1.0 / 9.0, 1.0 / 7.0)
    series = tl.fma(series, s, 0.2)
    series = tl.fma(series, s, 1.0 / 3.0)
    double = 2.0 * q
    high = double * LOG2_E
    low = tl.fma(double, LOG2_E, -high) + double * LOG2_E_REST
    low += 2.0 * LOG2_E * tl.fma(series, s * q, rest)
    summed = e + high
    low += (e - summed) + high
    total = summed + low
    low = (summed - total) + low
    total = tl.where(size == 0.0, float("-inf"), tl.where(size < float("inf"), total, size))
    exponent = y * total
    more = tl.fma(y, total, -exponent) + y * low
    # Infinity cannot be corrected, nor a subnormal that is flushed: less or more by 2**64 until it is.
    large, small = exponent > 64.0, exponent < -64.0
    result = tl.exp2(exponent - tl.where(large, 64.0, tl.where(small, -64.0, 0.0)))
    corrected = tl.fma(result, more * LN_2, result)
    result = tl.where(tl.abs(exponent) < 160.0, corrected, result)
    result *= tl.where(large, TWO_TO_64, tl.where(small, 1.0 / TWO_TO_64, 1.0))
    return _signed_power(x, y, tl.where(_is_one(x, y), 1.0, result))
