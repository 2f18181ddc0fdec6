"""Comparisons, logic and bits of two tensors of one dtype, ``input`` ``[*A]`` and ``other`` ``[*B]``, which
broadcast: the output is a new ``[*bcast(A, B)]``, bool but for that of bits."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class EqFwdOp(Op):
    """``input == other``; of NaN false. API: ``torch.eq``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.eq(input, other)


class NeFwdOp(Op):
    """``input != other``; of NaN true. API: ``torch.ne``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ne(input, other)


class GtFwdOp(Op):
    """``input > other``; of NaN false. API: ``torch.gt``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.gt(input, other)


class LtFwdOp(Op):
    """``input < other``; of NaN false. API: ``torch.lt``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.lt(input, other)


class GeFwdOp(Op):
    """``input >= other``; of NaN false. API: ``torch.ge``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ge(input, other)


class LeFwdOp(Op):
    """``input <= other``; of NaN false. API: ``torch.le``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.le(input, other)


class LogicalAndFwdOp(Op):
    """Whether both are other than 0. API: ``torch.logical_and``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.logical_and(input, other)


class LogicalOrFwdOp(Op):
    """Whether either is other than 0. API: ``torch.logical_or``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.logical_or(input, other)


class BitwiseAndFwdOp(Op):
    """``input & other``, bit by bit. API: ``torch.bitwise_and``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_and(input, other)


class BitwiseOrFwdOp(Op):
    """``input | other``, bit by bit. API: ``torch.bitwise_or``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_or(input, other)


class BitwiseXorFwdOp(Op):
    """``input ^ other``, bit by bit. API: ``torch.bitwise_xor``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_xor(input, other)
