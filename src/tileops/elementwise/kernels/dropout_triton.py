"""Device code of ``dropout.py``."""

import triton
import triton.language as tl


@triton.jit
def dropout(x, y, seed, n, least, scale, DRAWN: tl.constexpr, BLOCK: tl.constexpr):
    """Element ``i`` is kept where word ``i`` of Philox-4x32-10 under ``seed`` is at least ``least``."""
    if DRAWN:
        seed = tl.load(seed)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    counter = start // 4 + tl.arange(0, BLOCK // 4)
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(seed, low, high, zero, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    factor = tl.where(words.to(tl.int64) >= least, scale, 0.0)
    place = tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask n's divisibility does not decide the vector width
        value = tl.load(x + start + place).to(tl.float32)
        tl.store(y + start + place, value * factor)
    else:
        inside = place < n - start
        value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + start + place, value * factor, mask=inside)
