"""Selection, bounds and interpolation between tensors that broadcast."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class WhereFwdOp(Op):
    """``input`` ``[*A]`` where ``condition`` ``[*C]`` is true, else ``other`` ``[*B]``.

    API: ``torch.where``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(
        condition: torch.Tensor, input: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        return torch.where(condition, input, other)


class MaskedFillScalarFwdOp(Op):
    """``value`` where ``mask`` ``[*M]`` is true, else ``input`` ``[*A]``.

    API: ``torch.Tensor.masked_fill``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, mask: torch.Tensor, *, value: float) -> torch.Tensor:
        number = value if input.is_floating_point() else int(value)
        return torch.masked_fill(input, mask, number)


class MaskedFillTensorFwdOp(Op):
    """The one element of ``value`` where ``mask`` ``[*M]`` is true, else ``input`` ``[*A]``. API:
    ``torch.Tensor.masked_fill``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.masked_fill(input, mask, value)


class ClampTensorFwdOp(Op):
    """``input`` ``[*A]`` held between ``min`` ``[*L]`` and ``max`` ``[*U]``, of which one may be None.

    Where they cross it is ``max``; NaN where any is. API: ``torch.clamp``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(
        input: torch.Tensor, min: torch.Tensor | None, max: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.clamp(input, min, max)


class ClampScalarFwdOp(Op):
    """``input`` ``[*S]`` held between ``min`` and ``max``, of which one may be None.

    Where they cross it is ``max``; NaN stays. API: ``torch.clamp``.
    """

    kernel = KernelInterface(cuda=("pointwise:ClampScalar",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, min: float | None, max: float | None) -> torch.Tensor:
        return torch.clamp(input, min, max)


class NanToNumFwdOp(Op):
    """``input`` ``[*S]`` with other numbers for NaN and the infinities, which are the dtype's largest and
    lowest where they are not given. API: ``torch.nan_to_num``.
    """

    kernel = KernelInterface(cuda=("pointwise:NanToNum",))

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, nan: float, posinf: float | None, neginf: float | None
    ) -> torch.Tensor:
        return torch.nan_to_num(input, nan, posinf, neginf)


class LerpTensorFwdOp(Op):
    """``input + weight * (end - input)``, from the nearer end.

    ``input``: ``[*A]``, ``end``: ``[*E]``, ``weight``: ``[*W]``. API: ``torch.lerp``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.lerp(input, end, weight)
