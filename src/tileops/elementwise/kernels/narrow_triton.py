"""Functions of float32 for results of at most 11 bits (float16, bfloat16), in few instructions: a kernel
at the speed of an H200's memory has about 30 for each element, of which 3 by the special-function unit.

Polynomials are minimax fits of relative error, which their comments state in powers of 2. Results below
2**-126 may be 0.
"""

import triton
import triton.language as tl

from tileops.lib.activations_triton import LN_2, LOG2_E, exp2, instruction, inverse

PI: tl.constexpr = tl.constexpr(3.1415925025939941)
"""pi in float32, rounded down."""
PI_REST: tl.constexpr = tl.constexpr(1.5099579909783764e-07)
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 * 2**23: beside it float32 has no fractions, and the last bit is the integer's parity."""
NANS: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def log2(x):
    return instruction(x, "lg2.approx.ftz.f32")


@triton.jit
def signed(x, sign):
    """``x`` with its sign changed where ``sign`` is negative, a zero too; of integers, their first bit."""
    bits = sign.to(tl.int32, bitcast=True) & -0x80000000
    return (x.to(tl.int32, bitcast=True) ^ bits).to(tl.float32, bitcast=True)


# ---- exponentials and logarithms -------------------------------------------------------------------


@triton.jit
def expm1(x):
    near = x * tl.fma(tl.fma(x, 1.0 / 6.0, 0.5), x, 1.0)
    return tl.where(tl.abs(x) < 0.015625, near, exp2(x * LOG2_E) - 1.0)


@triton.jit
def log1p(x):
    near = x * tl.fma(tl.fma(x, 1.0 / 3.0, -0.5), x, 1.0)
    return tl.where(tl.abs(x) < 0.015625, near, log2(1.0 + x) * LN_2)


@triton.jit
def tanh(x):
    near = x * tl.fma(x * x, -1.0 / 3.0, 1.0)
    far = tl.fma(inverse(exp2(x * 2.8853900817779268) + 1.0), -2.0, 1.0)
    return tl.where(tl.abs(x) < 0.0625, near, far)


# ---- the normal distribution -------------------------------------------------------------------------


@triton.jit
def erf(x):
    x = tl.minimum(tl.maximum(x, -2.7, propagate_nan=NANS), 2.7, propagate_nan=NANS)
    s = x * x
    y = tl.fma(s, -8.149551912666063e-07, 2.8565288846021966e-05)  # 2**-14.8
    y = tl.fma(y, s, -0.00044144244826431283)
    y = tl.fma(y, s, 0.004035289926689935)
    y = tl.fma(y, s, -0.024846680320610146)
    y = tl.fma(y, s, 0.11105066610756428)
    y = tl.fma(y, s, -0.3754910234451139)
    return x * tl.fma(y, s, 1.1283395408928099)


# ---- waves ---------------------------------------------------------------------------------------------


@triton.jit
def _wave(rest, bits):
    """The sine of ``rest``, at most half of pi, with the sign of the parity in ``bits``."""
    s = rest * rest
    y = tl.fma(s, -0.00018539586816074445, 0.008314196090092462)  # 2**-19.7
    y = tl.fma(tl.fma(y, s, -0.166658481462254), s, 1.0)
    return signed(rest * y, bits << 31)


@triton.jit
def sin(x):
    """For sizes of ``x`` below 2**17, where ``x - n * PI`` is exact."""
    rounded = tl.fma(x, 0.3183098861837907, ROUNDER)
    n = rounded - ROUNDER
    rest = tl.fma(n, -PI_REST, tl.fma(n, -PI, x))
    return _wave(rest, rounded.to(tl.int32, bitcast=True))


@triton.jit
def cos(x):
    """As ``sin``: the sine of what is left to the next zero."""
    rounded = tl.fma(x, 0.3183098861837907, -0.5) + ROUNDER
    zero = (rounded - ROUNDER) + 0.5
    rest = tl.fma(zero, PI_REST, tl.fma(zero, PI, x * -1.0))
    return _wave(rest, rounded.to(tl.int32, bitcast=True))
