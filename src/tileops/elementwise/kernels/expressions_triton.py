"""What elementwise ops compute, one device function for each, named as ``expressions.py`` says.

Floating-point values come in float32, others in their own dtype; what is returned is rounded to the
output's dtype. Those that ``expressions.CAREFUL`` names are told whether that is a narrow one; those
called usual return where they hold, too. What torch's kernels give for NaN, infinities and zeros of both
signs holds here too.
"""

# ruff: noqa: A001, A004  (an expression has the name of its op)

import triton
import triton.language as tl

from tileops.elementwise.kernels import narrow_triton as narrow
from tileops.elementwise.kernels.functions_triton import (
    erf,
    expm1,
    floordivide,
    inverted,
    log,
    log1p,
    negated,
    number,
    pow,
    quotient,
    quotient_by,
    remainder,
    round_even,
    tanh,
    truncated,
    usual_remainder,
)
from tileops.lib.activations_triton import (
    exp,
    gelu_none_and_slope,
    gelu_tanh_and_slope,
    inverse,
    logistic,
    ratio,
    silu_and_slope,
)

__all__ = ["erf", "floordivide", "log", "pow", "remainder", "tanh", "usual_remainder"]

NANS: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)

# ---- arithmetic of two tensors -----------------------------------------------------------------------


@triton.jit
def add(x, y, alpha):
    if x.dtype.is_floating():
        return tl.fma(y, alpha, x)
    elif x.dtype.is_int1():
        return x | (y & (alpha != 0))
    else:
        return x + y * alpha


@triton.jit
def sub(x, y, alpha):
    if x.dtype.is_floating():
        return tl.fma(y, -alpha, x)
    else:
        return x - y * alpha


@triton.jit
def mul(x, y):
    return x & y if x.dtype.is_int1() else x * y


@triton.jit
def div(x, y, NARROW: tl.constexpr):
    return quotient(x, y, NARROW)


@triton.jit
def div_trunc(x, y):
    return truncated(tl.div_rn(x, y))


@triton.jit
def div_floor(x, y):
    return floordivide(x, y)


@triton.jit
def maximum(x, y):
    return tl.maximum(number(x), number(y), propagate_nan=NANS)


@triton.jit
def minimum(x, y):
    return tl.minimum(number(x), number(y), propagate_nan=NANS)


@triton.jit
def lerptensor(x, end, weight):
    # From the nearer end, so that a weight of 1 gives the end itself.
    gap = end - x
    return tl.where(tl.abs(weight) < 0.5, x + weight * gap, end - gap * (1.0 - weight))


@triton.jit
def lerpscalar(x, end, weight):
    gap = end - x
    near = (weight > -0.5) & (weight < 0.5)
    return tl.where(near, x + weight * gap, end - gap * (1.0 - weight))


# ---- comparisons, logic, bits --------------------------------------------------------------------------


@triton.jit
def eq(x, y):
    return number(x) == number(y)


@triton.jit
def ne(x, y):
    return number(x) != number(y)


@triton.jit
def gt(x, y):
    return number(x) > number(y)


@triton.jit
def lt(x, y):
    return number(x) < number(y)


@triton.jit
def ge(x, y):
    return number(x) >= number(y)


@triton.jit
def le(x, y):
    return number(x) <= number(y)


@triton.jit
def logicaland(x, y):
    return (x != 0) & (y != 0)


@triton.jit
def logicalor(x, y):
    return (x != 0) | (y != 0)


@triton.jit
def logicalnot(x):
    return x == 0


@triton.jit
def bitwiseand(x, y):
    return x & y


@triton.jit
def bitwiseor(x, y):
    return x | y


@triton.jit
def bitwisexor(x, y):
    return x ^ y


@triton.jit
def bitwisenot(x):
    if x.dtype.is_int1():
        return x == 0
    elif x.dtype == tl.uint8:
        return 255 - x
    else:
        return -1 - x


@triton.jit
def isnan(x):
    return x != x


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf") if x.dtype.is_floating() else x != x


@triton.jit
def isfinite(x):
    return tl.abs(x) < float("inf") if x.dtype.is_floating() else x == x


# ---- selection and bounds ------------------------------------------------------------------------------


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def maskedfillscalar(x, mask, value):
    return tl.where(mask, value, x)


@triton.jit
def maskedfilltensor(x, mask, value):
    return tl.where(mask, value, x)


@triton.jit
def clamptensor(x, low, high):
    return tl.minimum(
        tl.maximum(number(x), number(low), propagate_nan=NANS), number(high), propagate_nan=NANS
    )


@triton.jit
def clamptensor_min(x, low):
    return maximum(x, low)


@triton.jit
def clamptensor_max(x, high):
    return minimum(x, high)


@triton.jit
def clampscalar(x, low, high):
    return tl.minimum(tl.maximum(x, low, propagate_nan=NANS), high, propagate_nan=NANS)


@triton.jit
def nantonum(x, nan, posinf, neginf):
    finite = tl.where(x == float("inf"), posinf, tl.where(x == float("-inf"), neginf, x))
    return tl.where(x != x, nan, finite)


# ---- functions of one number ---------------------------------------------------------------------------


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def neg(x):
    return negated(x) if x.dtype.is_floating() else 0 - x


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def reciprocal(x, NARROW: tl.constexpr):
    if x.dtype.is_floating():
        return inverted(x, NARROW)
    else:
        return tl.where(x == 0, float("inf"), ratio(1.0, x.to(tl.float32)))


@triton.jit
def _normal(x):
    """``x``, times 2**24 where it is subnormal: the card's approximate roots take that for zero."""
    small = tl.abs(x) < 1.1754943508222875e-38
    return tl.where(small, x * 16777216.0, x), small


@triton.jit
def sqrt(x, NARROW: tl.constexpr):
    if NARROW:
        shifted, small = _normal(x)
        return tl.sqrt(shifted) * tl.where(small, 2.44140625e-4, 1.0)  # 2**-12
    return tl.sqrt_rn(x)


@triton.jit
def sin(x):
    return tl.sin(x)


@triton.jit
def usual_sin(x):
    return narrow.sin(x), tl.abs(x) < 131072.0


@triton.jit
def cos(x):
    return tl.cos(x)


@triton.jit
def usual_cos(x):
    return narrow.cos(x), tl.abs(x) < 131072.0


@triton.jit
def rsqrt(x):
    shifted, small = _normal(x)
    return tl.rsqrt(shifted) * tl.where(small, 4096.0, 1.0)


@triton.jit
def floor(x):
    return tl.floor(x) if x.dtype.is_floating() else x


@triton.jit
def ceil(x):
    return tl.ceil(x) if x.dtype.is_floating() else x


@triton.jit
def trunc(x):
    return truncated(x) if x.dtype.is_floating() else x


@triton.jit
def round(x):
    return round_even(x) if x.dtype.is_floating() else x


@triton.jit
def round_decimals(x, power_of_10, power_of_a_tenth):
    return quotient_by(round_even(x * power_of_10), power_of_10, power_of_a_tenth)


@triton.jit
def round_tens(x, power_of_10, power_of_a_tenth):
    return round_even(quotient_by(x, power_of_10, power_of_a_tenth)) * power_of_10


# ---- activations -----------------------------------------------------------------------------------------


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=NANS)


@triton.jit
def leakyrelu(x, negative_slope):
    return tl.where(x > 0.0, x, x * negative_slope)


@triton.jit
def prelu(x, weight):
    return tl.where(x > 0.0, x, x * weight)


@triton.jit
def elu(x, alpha, NARROW: tl.constexpr):
    return tl.where(x > 0.0, x, expm1(x, NARROW) * alpha)


@triton.jit
def selu(x, NARROW: tl.constexpr):
    # The constants of Klambauer et al., 2017: scale, and scale * alpha.
    return tl.where(x > 0.0, x * 1.0507009873554805, expm1(x, NARROW) * 1.7580993408473766)


@triton.jit
def hardtanh(x, low, high):
    return clampscalar(x, low, high)


@triton.jit
def hardsigmoid(x):
    return clampscalar(x + 3.0, 0.0, 6.0) * 0.16666666666666666


@triton.jit
def hardswish(x):
    # The sixth first: x * 6 overflows where the result does not.
    return x * (clampscalar(x + 3.0, 0.0, 6.0) * 0.16666666666666666)


@triton.jit
def sigmoid(x, NARROW: tl.constexpr):
    return logistic(x, NARROW)


@triton.jit
def softplus(x, beta, threshold, NARROW: tl.constexpr):
    scaled = x * beta
    return tl.where(scaled > threshold, x, log1p(exp(scaled, NARROW), NARROW) * (1.0 / beta))


@triton.jit
def mish(x, NARROW: tl.constexpr):
    # tanh(log(1 + e**x)) is n / (n + 2) for n = e**x * (e**x + 2), which is 1 where e**x is large.
    power_of_e = exp(tl.minimum(x, 20.0, propagate_nan=NANS), NARROW)
    n = power_of_e * (power_of_e + 2.0)
    return x * (n * inverse(n + 2.0) if NARROW else tl.div_rn(n, n + 2.0))


@triton.jit
def silu(x, NARROW: tl.constexpr):
    value, _ = silu_and_slope(x, NARROW)
    return value


@triton.jit
def gelu_none(x, NARROW: tl.constexpr):
    value, _ = gelu_none_and_slope(x, NARROW)
    return value


@triton.jit
def gelu_tanh(x, NARROW: tl.constexpr):
    value, _ = gelu_tanh_and_slope(x, NARROW)
    return value
