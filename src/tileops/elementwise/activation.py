"""Activations. With ``inplace`` a call writes its input and returns that tensor, else a new one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op
from tileops.lib.watching import watched


class ReLUFwdOp(Op):
    """``max(input, 0)`` of ``input`` ``[*S]``.

    API: ``torch.nn.functional.relu``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",)
    )

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return F.relu(input)


class LeakyReLUFwdOp(Op):
    """``input`` where it is positive, else ``negative_slope * input``; ``input``: ``[*S]``.

    API: ``torch.nn.functional.leaky_relu``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, negative_slope: float, inplace: bool) -> torch.Tensor:
        return F.leaky_relu(input, negative_slope=negative_slope)


class PReLUFwdOp(Op):
    """``input`` where it is positive, else ``weight * input``.

    ``input``: ``[*S]``; ``weight``: one element, or one for each place of axis 1. API:
    ``torch.nn.functional.prelu``.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:PReLU",))

    @staticmethod
    def decomposition(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.prelu(input, weight if weight.ndim == 1 else weight.reshape(-1))


class ELUFwdOp(Op):
    """``input`` where it is positive, else ``alpha * (exp(input) - 1)``; ``input``: ``[*S]``.

    API: ``torch.nn.functional.elu``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",)
    )

    @staticmethod
    def decomposition(input: torch.Tensor, *, alpha: float, inplace: bool) -> torch.Tensor:
        return F.elu(input, alpha=alpha)


class SELUFwdOp(Op):
    """``scale * elu(input, alpha)`` with the constants of Klambauer et al., 2017; ``input``: ``[*S]``.

    API: ``torch.nn.functional.selu``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",)
    )

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return F.selu(input)


class HardtanhFwdOp(Op):
    """``input`` ``[*S]`` held between ``min_val`` and ``max_val``.

    API: ``torch.nn.functional.hardtanh``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",))

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, min_val: float, max_val: float, inplace: bool
    ) -> torch.Tensor:
        return F.hardtanh(input, min_val=min_val, max_val=max_val)


def _coarse(input: torch.Tensor) -> bool:
    """Whether torch would multiply by the float32 nearest to 1/6, as it does off the CPU."""
    return input.dtype is torch.float64 and input.device.type != "cpu"


def _sixths_of_relu6(input: torch.Tensor) -> torch.Tensor:
    return F.relu6(input + 3) / 6


class HardsigmoidFwdOp(Op):
    """``input + 3`` held between 0 and 6, divided by 6; ``input``: ``[*S]``.

    API: ``torch.nn.functional.hardsigmoid``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        if _coarse(input):
            return _sixths_of_relu6(input)
        if not watched(input):
            return F.hardsigmoid(input)
        # ATen's own has no second derivative.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        return _sixths_of_relu6(wide).to(input.dtype)


class HardswishFwdOp(Op):
    """``input * hardsigmoid(input)`` of ``input`` ``[*S]``.

    API: ``torch.nn.functional.hardswish``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return input * _sixths_of_relu6(input) if _coarse(input) else F.hardswish(input)


class SiLUFwdOp(Op):
    """``x * sigmoid(x)`` of ``input`` ``[*S]``.

    API: ``torch.nn.functional.silu``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return F.silu(input)


class MishFwdOp(Op):
    """``x * tanh(softplus(x))`` of ``input`` ``[*S]``.

    API: ``torch.nn.functional.mish``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17, cuda=("pointwise:Pointwise",), cpu=("in_place:InPlace",)
    )

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return F.mish(input)


class GELUFwdOp(Op):
    """``x * Φ(x)`` of ``input`` ``[*S]``, exact or with ``approximate="tanh"``.

    Infinities follow torch on the device (NaN on the CPU).

    API: ``torch.nn.functional.gelu``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
        return F.gelu(input, approximate=approximate)


class SoftplusFwdOp(Op):
    """``log(1 + exp(beta * input)) / beta``, and ``input`` where ``beta * input`` exceeds ``threshold``.

    ``input``: ``[*S]``.

    API: ``torch.nn.functional.softplus``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, beta: float, threshold: float) -> torch.Tensor:
        return F.softplus(input, beta, threshold)
