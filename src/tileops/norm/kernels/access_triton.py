"""What the kernels of rows share: access to a tile, and the factor of a row."""

import triton
import triton.language as tl

__all__ = ["inverse_root", "load", "store"]


@triton.jit
def load(pointer, offsets, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        return tl.load(pointer + offsets, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(pointer + offsets, eviction_policy=POLICY)


@triton.jit
def store(pointer, offsets, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + offsets, values.to(pointer.dtype.element_ty))


@triton.jit
def inverse_root(sum_of_squares, eps, N: tl.constexpr):
    """``1 / sqrt(mean + eps)``, contracted in every kernel alike."""
    return tl.rsqrt(tl.fma(sum_of_squares, 1.0 / N, eps))
