"""Device code: float8_e4m3fn from float32."""

import triton
import triton.language as tl

__all__ = ["e4m3_bytes"]


@triton.jit
def e4m3_bytes(value, NATIVE: tl.constexpr = False):
    """The float8_e4m3fn bytes of float32 values, rounded to even, beyond 448 saturated.

    By integer arithmetic, some 16 instructions each, or with NATIVE by the one instruction of cards
    from compute capability 8.9 on. NaN gives NaN; the one instruction forgets its sign.
    """
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    held = tl.minimum(magnitude, 0x43E00000)  # 448
    # Dropping 20 bits of the significand; 120 is the difference of the exponents' biases.
    normal = ((held + 0x7FFFF + ((held >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9, which is that of float32 numbers from 2**14 on.
    small = (held.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(held < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
