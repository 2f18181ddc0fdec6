"""Arithmetic of two tensors of one dtype, ``input`` ``[*A]`` and ``other`` ``[*B]``, which broadcast: the
output is a new ``[*bcast(A, B)]``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tileops.authoring import CallSpec, KernelInterface, Op
from tileops.lib.watching import watched

_HALVES = (torch.float16, torch.bfloat16)


def _scaled_sum(
    function: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor, alpha: float
) -> torch.Tensor:
    exact = alpha in (-1, 0, 1)
    if not exact and input.dtype in _HALVES and input.device.type == "cpu":
        # There torch rounds alpha * other to the dtype before it adds; elsewhere it does not.
        return function(input.float(), other.float(), alpha=alpha).to(input.dtype)
    return function(input, other, alpha=alpha)


def _in_float32(
    function: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """``function``, of which torch would round every step to half the width."""
    if input.dtype in _HALVES:
        return function(input.float(), other.float()).to(input.dtype)
    return function(input, other)


def _rounded_once(
    function: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """``function``, which torch rounds once on the CPU; not elsewhere, nor its derivative."""
    if input.dtype not in _HALVES or (input.device.type == "cpu" and not watched(input, other)):
        return function(input, other)
    return _in_float32(function, input, other)


class AddFwdOp(Op):
    """``input + alpha * other``, rounded once; integers wrap; bool adds as logical or.

    API: ``torch.add``.
    """

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor, *, alpha: float) -> torch.Tensor:
        return _scaled_sum(torch.add, input, other, alpha)


class SubFwdOp(Op):
    """``input - alpha * other``, rounded once; integers wrap. API: ``torch.sub``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor, *, alpha: float) -> torch.Tensor:
        return _scaled_sum(torch.sub, input, other, alpha)


class MulFwdOp(Op):
    """``input * other``; integers wrap; bool multiplies as logical and. API: ``torch.mul``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.mul(input, other)


def _but_truncated_halves(call: CallSpec) -> str | None:
    """Why ATen serves all else: Inductor's floor is of the quotient as it was rounded."""
    halves = call.spec("input").dtype in _HALVES
    if call.params.rounding_mode == "trunc" and halves:
        return None
    return "ATen's one kernel serves all but truncated quotients of halves"


class DivFwdOp(Op):
    """``input / other``; with ``rounding_mode`` ``"trunc"`` its integer part, with ``"floor"`` as
    ``FloorDivideFwdOp``. API: ``torch.div``.
    """

    kernel = KernelInterface(
        compiled_from=1 << 17,
        compiled_unless=_but_truncated_halves,
        cuda=("pointwise:Pointwise",),
    )

    @staticmethod
    def decomposition(
        input: torch.Tensor, other: torch.Tensor, *, rounding_mode: str | None
    ) -> torch.Tensor:
        if rounding_mode is None:  # whose derivative holds other**2, of halves often infinite
            return _rounded_once(torch.div, input, other)
        return _in_float32(partial(torch.div, rounding_mode=rounding_mode), input, other)


class FloorDivideFwdOp(Op):
    """The integer below the exact quotient. API: ``torch.floor_divide``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _in_float32(torch.floor_divide, input, other)


class RemainderFwdOp(Op):
    """``input - floor(input / other) * other``, with the sign of ``other``. API: ``torch.remainder``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _rounded_once(torch.remainder, input, other)


class PowFwdOp(Op):
    """``input ** exponent``. API: ``torch.pow``."""

    kernel = KernelInterface(cuda=("pointwise:Pow",))

    @staticmethod
    def decomposition(input: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return _rounded_once(torch.pow, input, exponent)


class LerpScalarFwdOp(Op):
    """``input + weight * (end - input)``, from the nearer end. API: ``torch.lerp``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, end: torch.Tensor, *, weight: float) -> torch.Tensor:
        return torch.lerp(input, end, weight)


class MaximumFwdOp(Op):
    """The larger one; NaN where either is. API: ``torch.maximum``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(input, other)


class MinimumFwdOp(Op):
    """The smaller one; NaN where either is. API: ``torch.minimum``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.minimum(input, other)
