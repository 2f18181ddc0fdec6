"""Running sums and products."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op

_SCAN = KernelInterface(cuda=("scan:Scan",))


class CumsumFwdOp(Op):
    """Sums of ``input`` ``[*S]`` up to each place along ``dim``; cast to ``dtype`` first where given.

    Sums are formed in float32 (float64 for float64) and each is rounded once.
    """

    kernel = _SCAN

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.cumsum(input, dim, dtype=dtype)


class CumprodFwdOp(Op):
    """Products of ``input`` ``[*S]`` up to each place along ``dim``; cast to ``dtype`` first.

    Products are formed in float32 (float64 for float64) and each is rounded once.
    """

    kernel = _SCAN

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        return torch.cumprod(input, dim, dtype=dtype)
