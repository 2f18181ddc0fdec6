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


def _gradient_of_products(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """``aten::cumprod_backward``, which off the CPU would wait for the device to look for zeros.

    The product of what lies before a place, times ``s[i] = grad[i] + x[i + 1] * s[i + 1]``: no division.
    """
    if not x.ndim or x.shape[dim] < 2:
        return grad
    n, step = x.shape[dim], 1
    before = torch.cumprod(x, dim).narrow(dim, 0, n - 1)
    before = torch.cat((torch.ones_like(x.narrow(dim, 0, 1)), before), dim)
    # After each round `total` is s as if it ended `step` places on, and `factor` the product of the
    # `step` places after a place, where there are so many.
    total, factor = grad, x.narrow(dim, 1, n - 1)
    while step < n:
        rest = n - step
        near = total.narrow(dim, 0, rest) + factor * total.narrow(dim, step, rest)
        total = torch.cat((near, total.narrow(dim, rest, step)), dim)
        if rest > step:
            factor = factor.narrow(dim, 0, rest - step) * factor.narrow(dim, step, rest - step)
        step *= 2
    return before * total


class CumprodBwdOp(Op):
    """``sum over j >= i of grad[j] * d output[j] / d input[i]`` along ``dim``, zeros included.

    What the forward gave is computed again from ``input``: rounded to a half it is too coarse here.
    Of a row that is not finite, the order of the products decides between NaN and infinity: on the
    CPU as ``torch.cumprod``'s own gradient.
    """

    kernel = KernelInterface(cuda=("product_gradient:ProductGradient",))

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
        grad = grad_output.to(wide.dtype)
        if wide.device.type != "cpu":
            return _gradient_of_products(grad, wide, dim).to(input.dtype)
        products = torch.cumprod(wide, dim)
        return torch.ops.aten.cumprod_backward(grad, wide, dim, products).to(input.dtype)
