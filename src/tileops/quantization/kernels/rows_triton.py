"""Triton kernel that quantises values whose scale is that of neighbours; ``rows.py`` says when."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.lib.quantised_triton import largest_magnitude, quantised

__all__ = ["quantise_rows"]


@triton.jit
def quantise_rows(
    x,
    smooth,  # what each column is divided by first, or None
    q,
    scales,
    count,  # of scales
    eps,
    K: tl.constexpr,  # elements of a row
    GROUP: tl.constexpr,  # of its elements that share a scale
    BLOCK: tl.constexpr,  # GROUP rounded up to a power of two
    TILE: tl.constexpr,  # scales to a program
    VECTOR: tl.constexpr,  # elements read at once: every group begins at a multiple of them
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
    CAREFUL: tl.constexpr,
    DEPENDENT: tl.constexpr,  # may be launched before the stream's previous kernel has ended
):
    """Program p takes TILE scales from p * TILE on, and what they are of in registers."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    cols = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[None, :]
    first = tl.program_id(0).to(tl.int64) * TILE
    group = first + tl.arange(0, TILE)
    present = group < count
    if GROUPS == 1:
        x += first * K
        q += first * K
        starts = tl.arange(0, TILE) * K
        inside = cols < K
    else:
        place = (group % GROUPS).to(tl.int32) * GROUP
        starts = group // GROUPS * K + place
        inside = cols < tl.minimum(K - place, GROUP)[:, None]
    offsets = starts[:, None] + cols
    if BLOCK != GROUP or TILE != 1 or GROUPS != 1:
        inside = inside & present[:, None]
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + offsets).to(tl.float32)
    if smooth is not None:
        divisors = tl.load(smooth + cols, mask=cols < K, other=1.0, eviction_policy="evict_last")
        values = tl.div_rn(values, tl.broadcast_to(divisors, [TILE, BLOCK]))
    largest = largest_magnitude(values, 1)
    scale = tl.div_rn(tl.where(largest < eps, eps, largest), TOP)
    tl.store(scales + group, scale, mask=present)
    result = quantised(values, scale, TOP, NATIVE, CAREFUL)
    if BLOCK != GROUP or TILE != 1 or GROUPS != 1:
        tl.store(q + offsets, result, mask=inside)
    else:
        tl.store(q + offsets, result)
