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


class CumprodBwdOp(Op):
    """``sum over j >= i of grad[j] * d output[j] / d input[i]`` along ``dim``, zeros included.

    What the forward gave is computed again from ``input``: rounded to a half it is too coarse here.
    """

    kernel = KernelInterface()

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        *,
        dim: int,
        dtype: torch.dtype | None,
        wants_input: bool,
    ) -> torch.Tensor:
        values = input if dtype is None else input.to(dtype)
        doubles = torch.float64 in (values.dtype, input.dtype)
        wide = values.double() if doubles else values.float()
        products = torch.cumprod(wide, dim)
        grad = grad_output.to(wide.dtype)
        return torch.ops.aten.cumprod_backward(grad, wide, dim, products).to(input.dtype)
