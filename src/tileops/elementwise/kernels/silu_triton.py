"""Device code of ``silu.py``."""

import triton
import triton.language as tl


@triton.jit
def silu(value):
    """``value * sigmoid(value)`` in float32; minus infinity gives NaN as torch does."""
    return value / (1.0 + tl.exp(-value))


@triton.jit
def silu_flat(x, y, n, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Whole tiles take no mask: with one, n's divisibility would decide the vector width. The last
    # tile goes in small steps, so that the masked half of the code asks for few registers.
    if start + BLOCK <= n:
        place = start + tl.arange(0, BLOCK)
        tl.store(y + place, silu(tl.load(x + place).to(tl.float32)))
    else:
        for step in range(0, BLOCK, TAIL):
            place = start + step + tl.arange(0, TAIL)
            value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
            tl.store(y + place, silu(value), mask=place < n)
