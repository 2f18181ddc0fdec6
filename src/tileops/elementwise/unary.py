"""Functions of each element of one tensor ``input`` ``[*S]``; the output is a new ``[*S]``."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class AbsFwdOp(Op):
    """``|input|``; the least integer is its own. API: ``torch.abs``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.abs(input)


class NegFwdOp(Op):
    """``-input``; integers wrap. API: ``torch.neg``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.neg(input)


class SignFwdOp(Op):
    """1, 0 or -1; 0 for NaN. API: ``torch.sign``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.sign(input)


class ReciprocalFwdOp(Op):
    """``1 / input``, of integers in float32. API: ``torch.reciprocal``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.reciprocal(input)


class SqrtFwdOp(Op):
    """The square root, correctly rounded. API: ``torch.sqrt``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(input)


class RsqrtFwdOp(Op):
    """``1 / sqrt(input)``. API: ``torch.rsqrt``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(input)


class ExpFwdOp(Op):
    """``e**input``. API: ``torch.exp``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.exp(input)


class Expm1FwdOp(Op):
    """``e**input - 1``, exact near 0. API: ``torch.expm1``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.expm1(input)


class LogFwdOp(Op):
    """The natural logarithm. API: ``torch.log``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.log(input)


class Log1pFwdOp(Op):
    """``log(1 + input)``, exact near 0. API: ``torch.log1p``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.log1p(input)


class SinFwdOp(Op):
    """The sine of radians. API: ``torch.sin``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.sin(input)


class CosFwdOp(Op):
    """The cosine of radians. API: ``torch.cos``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.cos(input)


class TanhFwdOp(Op):
    """The hyperbolic tangent. API: ``torch.tanh``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(input)


class SigmoidFwdOp(Op):
    """``1 / (1 + exp(-input))``. API: ``torch.sigmoid``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(input)


class ErfFwdOp(Op):
    """The error function. API: ``torch.erf``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.erf(input)


class FloorFwdOp(Op):
    """The nearest integer below; integers are copied. API: ``torch.floor``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.floor(input)


class CeilFwdOp(Op):
    """The nearest integer above; integers are copied. API: ``torch.ceil``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.ceil(input)


class TruncFwdOp(Op):
    """The integer part; integers are copied. API: ``torch.trunc``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.trunc(input)


class RoundFwdOp(Op):
    """The nearest multiple of ``10**-decimals``, ties to even; integers are copied.

    Other ``decimals`` than 0 multiply by the power of 10, round and divide, in float32 for halves. API:
    ``torch.round``.
    """

    kernel = KernelInterface(cuda=("pointwise:Round",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, decimals: int) -> torch.Tensor:
        if decimals and input.dtype in (torch.float16, torch.bfloat16):
            # There torch rounds what it multiplies by the power of 10, too.
            return torch.round(input.float(), decimals=decimals).to(input.dtype)
        return torch.round(input, decimals=decimals) if decimals else torch.round(input)


class LogicalNotFwdOp(Op):
    """True where ``input`` is 0; the output is bool. API: ``torch.logical_not``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.logical_not(input)


class BitwiseNotFwdOp(Op):
    """Every bit turned; bools negated. API: ``torch.bitwise_not``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.bitwise_not(input)


class IsnanFwdOp(Op):
    """True where ``input`` is NaN; the output is bool. API: ``torch.isnan``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.isnan(input)


class IsinfFwdOp(Op):
    """True where ``input`` is infinite; the output is bool. API: ``torch.isinf``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.isinf(input)


class IsfiniteFwdOp(Op):
    """True where ``input`` is neither NaN nor infinite; the output is bool. API: ``torch.isfinite``."""

    kernel = KernelInterface(cuda=("pointwise:Pointwise",))

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        return torch.isfinite(input)
