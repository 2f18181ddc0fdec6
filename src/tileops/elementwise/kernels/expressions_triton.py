"""What elementwise ops compute, one device function each; in float32 for floating-point tensors."""

import triton
import triton.language as tl

# ---- activations with their slopes, for gates ------------------------------------------------------


@triton.jit
def silu_and_slope(x):
    """``x * sigmoid(x)``; minus infinity gives NaN as torch does."""
    s = 1.0 / (1.0 + tl.exp(-x))
    return x * s, s * (1.0 + x * (1.0 - s))


@triton.jit
def gelu_none_and_slope(x):
    cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))


@triton.jit
def gelu_tanh_and_slope(x):
    # (1 + tanh(u)) / 2 is sigmoid(2u), which loses nothing where tanh is near -1.
    s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x * s, s + x * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
