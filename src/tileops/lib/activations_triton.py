"""Device code: activations of float32 values, with their slopes.

``NARROW`` asks for what is exact enough for a result of at most 11 bits (float16, bfloat16), in fewer
instructions: polynomials are minimax fits of relative error, stated in powers of 2.
"""

import triton
import triton.language as tl

__all__ = [
    "LN_2", "LOG2_E", "LOG2_E_REST", "exp", "exp2", "gelu_none_and_slope", "gelu_tanh_and_slope",
    "instruction", "inverse", "logistic", "ratio", "silu_and_slope",
]  # fmt: skip

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG2_E_REST: tl.constexpr = tl.constexpr(1.925963033500712e-08)
"""log2(e) less its float32."""
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def instruction(x, NAME: tl.constexpr):
    """One of PTX, from float32 to float32."""
    return tl.inline_asm_elementwise(
        NAME + " $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp2(x):
    return instruction(x, "ex2.approx.ftz.f32")


@triton.jit
def inverse(x):
    """``1 / x`` for sizes of ``x`` from 2**-126 to 2**126."""
    return instruction(x, "rcp.approx.ftz.f32")


@triton.jit
def ratio(x, y):
    """``x / y``, nearly always rounded once, for sizes of ``y`` from 2**-126 to 2**126 and finite ``x``."""
    approximate = inverse(y)
    result = x * approximate
    return tl.fma(tl.fma(result * -1.0, y, x), approximate, result)


@triton.jit
def exp(x, NARROW: tl.constexpr):
    """``e**x``; exactly, of ``x * log2(e)`` in two parts, since the rounding of a large one is seen."""
    if NARROW:
        return tl.exp(x)
    else:
        high = x * LOG2_E
        rest = tl.fma(x, LOG2_E_REST, tl.fma(x, LOG2_E, -high))
        power = tl.exp2(high)
        # Of infinities the rest is NaN, and of an infinite power any rest may be.
        return tl.where((high < 128.0) & (high > -150.0), tl.fma(power, rest * LN_2, power), power)


@triton.jit
def logistic(x, NARROW: tl.constexpr):
    """``1 / (1 + e**-x)``, also where that is below 2**-126."""
    power = exp2(x * -LOG2_E) if NARROW else exp(-x, False)
    return inverse(tl.fma(power, 0.25, 0.25)) * 0.25


@triton.jit
def silu_and_slope(x, NARROW: tl.constexpr):
    """Minus infinity gives NaN as torch does."""
    s = logistic(x, NARROW)
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu_none_and_slope(x, NARROW: tl.constexpr):
    """As exact, relative to it, far below 0."""
    if NARROW:
        size = tl.abs(x)
        t = inverse(tl.fma(size, 0.2, 1.0))
        # cdf(-|x|) * e**(x**2 / 2): 2**-19.2, since the two terms of the slope cancel near -0.75
        y = tl.fma(t, 0.2790939211845398, -0.38682493567466736)
        y = tl.fma(y, t, 0.4469377100467682)
        y = tl.fma(y, t, -0.12318501621484756)
        y = tl.fma(y, t, 0.13253651559352875)
        y = tl.fma(y, t, 0.07109225541353226)
        y = tl.fma(y, t, 0.08035018295049667) * t
        power = exp2(x * x * -0.7213475204444817)
        below, slope = y * power, tl.fma(size, -0.3989422804014327, y) * power
        cdf = tl.where(x < 0.0, below, 1.0 - below)
        return x * cdf, tl.where(x < 0.0, slope, 1.0 - slope)
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def gelu_tanh_and_slope(x, NARROW: tl.constexpr):
    # (1 + tanh(u)) / 2 is sigmoid(2u), which loses nothing where tanh is near -1.
    s = logistic(x * tl.fma(x * x, 0.07135481282553481, 1.5957691216057308), NARROW)
    return x * s, s + x * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
