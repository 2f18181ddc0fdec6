"""Device code: rows of float32 over their scales, as int8 or the bytes of float8_e4m3fn."""

import triton
import triton.language as tl

from tileops.lib.float8_triton import e4m3_bytes

__all__ = ["largest_magnitude", "quantised"]


@triton.jit
def largest_magnitude(values, axis: tl.constexpr):
    """Along an axis of float32; NaN where one is among them."""
    # As integers, magnitudes are ordered like themselves, and NaN is the largest.
    magnitudes = tl.abs(values).to(tl.int32, bitcast=True)
    return tl.max(magnitudes, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def quantised(
    values,
    scale,
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """``values`` (``[rows, columns]``) over ``scale`` (``[rows]``): int8 where TOP is 127, with 0 for what
    has no quotient, else bytes of float8; both rounded to even.

    CAREFUL: quotients may be beyond TOP, scales below 1e-27. Otherwise a scale is such that none is.
    """
    divisor = scale
    if CAREFUL:
        # What the quotient below leaves must not be too small for a float32.
        lift = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
        values = values * lift[:, None]
        divisor = scale * lift
    # A division that rounds once, in three instructions (Markstein 1990): the inverse, rounded, and
    # what its product leaves, so taken that a zero keeps its sign. An infinite scale would leave NaN
    # where the quotient is 0.
    inverse = tl.div_rn(1.0, divisor)[:, None]
    finite = tl.where(divisor < float("inf"), divisor, 0.0)[:, None]
    quotient = values * inverse
    # (Multiplied by -1: Triton's minus subtracts from 0, and of 0 gives 0.)
    beyond = tl.fma(quotient, finite, values * -1.0)
    exact = tl.fma(beyond, inverse * -1.0, quotient)
    if CAREFUL:
        exact = tl.where(tl.abs(quotient) < float("inf"), exact, quotient)
    if TOP == 127.0:
        if CAREFUL:
            exact = tl.where(exact == exact, exact, 0.0)
            exact = tl.minimum(tl.maximum(exact, -128.0), 127.0)
        # Adding 1.5 * 2**23 leaves no fraction, rounded to even, and the integer in the lowest bits.
        bits = (exact + 12582912.0).to(tl.int32, bitcast=True)
        if not CAREFUL:
            # Where one has no quotient, all others of its row are 0. A card's NaN ends in ones, an
            # interpreter's in zeros.
            bits = tl.where((scale < float("inf"))[:, None], bits, 0)
        return bits.to(tl.int8)
    else:
        return e4m3_bytes(exact, NATIVE)
