"""Triton kernels for what no program holds, read in parts: the largest of each, then all again."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tileops.lib.quantised_triton import largest_magnitude, quantised

__all__ = ["part_maxima", "quantise_parts"]


@triton.jit
def _read(x, smooth, here, begin, n, cols):
    """A chunk, and where it lies in its row."""
    inside = begin + cols < n
    values = tl.load(x + here + begin + cols, mask=inside, other=0.0).to(tl.float32)
    if smooth is not None:
        divisors = tl.load(smooth + begin + cols, mask=inside, other=1.0)
        values = tl.div_rn(values, divisors)
    return values, inside


@triton.jit
def part_maxima(
    x,
    smooth,
    maxima,  # [rows, parts]
    groups,  # of VECTOR elements in a row
    parts,
    turns,  # chunks of a part
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One part per program: its largest magnitude, as the bits of a float32."""
    n = groups * VECTOR
    program = tl.program_id(0).to(tl.int64)
    here, first = program // parts * n, program % parts * turns * CHUNK
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)
    held = tl.zeros([CHUNK], tl.int32)
    if DEPENDENT:
        gdc_wait()  # for the elements; what came before them in the stream is complete
    for turn in range(turns):
        values, _ = _read(x, smooth, here, first + turn * CHUNK, n, cols)
        held = tl.maximum(held, tl.abs(values).to(tl.int32, bitcast=True))
    if DEPENDENT:
        gdc_launch_dependents()
    tl.store(maxima + program, tl.max(held, axis=0))


@triton.jit
def quantise_parts(
    x,
    smooth,
    maxima,
    q,
    scales,
    groups,
    parts,
    turns,
    eps,
    CHUNK: tl.constexpr,
    VECTOR: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PARTS: tl.constexpr,  # the most that a row has
    TOP: tl.constexpr,
    NATIVE: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    """One part per program, the last first: the caches may still hold it."""
    n = groups * VECTOR
    program = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row, part = program // parts, program % parts
    places = tl.arange(0, PARTS)[None, :]
    if DEPENDENT:
        gdc_wait()  # for the maxima
    bits = tl.load(maxima + row * parts + places, mask=places < parts, other=0)
    largest = largest_magnitude(bits.to(tl.float32, bitcast=True), 1)
    scale = tl.div_rn(tl.where(largest < eps, eps, largest), TOP)
    tl.store(scales + row + tl.zeros([1], tl.int32), scale, mask=part == 0)
    cols = tl.max_contiguous(tl.arange(0, CHUNK), VECTOR)[None, :]
    for turn in range(turns):
        begin = (part * turns + turn) * CHUNK
        values, inside = _read(x, smooth, row * n, begin, n, cols)
        result = quantised(values, scale, TOP, NATIVE, CAREFUL)
        tl.store(q + row * n + begin + cols, result, mask=inside)
