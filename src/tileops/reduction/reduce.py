"""Sums, products, extremes, norms, variances: one number, or two, for each kept index.

``dim`` names axes, each once, negative from the end; None and ``()`` are all of them. A reduced axis
stays as 1 with ``keepdim``. Sums are formed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tileops.authoring import CallSpec, KernelInterface, Op

Axes = tuple[int, ...] | None

_HALVES = (torch.float16, torch.bfloat16)


def not_halves(call: CallSpec) -> str | None:
    """Why ATen's kernel serves. It widens halves one by one; of float32 it keeps many sums at once, where
    Inductor keeps one."""
    dtype = next(spec.dtype for spec in call.inputs.values() if spec is not None)
    return None if dtype in _HALVES else f"ATen's kernel is faster for {str(dtype)[6:]}"


_REDUCE = KernelInterface(cuda=("reduce:Reduce",))
_COMPILED = KernelInterface(compiled_from=1 << 17, cuda=_REDUCE.cuda)
_HALVES_COMPILED = KernelInterface(
    compiled_from=1 << 17, compiled_unless=not_halves, cuda=_REDUCE.cuda
)


def _every(x: torch.Tensor, dim: Axes) -> tuple[int, ...]:
    """The axes, where torch's function takes ``()`` for none."""
    return dim or tuple(range(x.ndim))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _HALVES else x


def _truth(
    function: Callable[..., torch.Tensor], x: torch.Tensor, dim: Axes, keepdim: bool
) -> torch.Tensor:
    # Along no axis Inductor takes torch's function for one along every axis.
    return x != 0 if dim == () else function(x, dim, keepdim)


class SumFwdOp(Op):
    """Sum of ``input`` ``[*S]`` along ``dim``; cast to ``dtype`` first where given."""

    kernel = _HALVES_COMPILED

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: Axes, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        return torch.sum(input, _every(input, dim), keepdim, dtype=dtype)


class MeanFwdOp(Op):
    """Mean of ``input`` ``[*S]`` along ``dim``, NaN for none; cast to ``dtype`` first where given."""

    kernel = _HALVES_COMPILED

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: Axes, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        # For a half result ATen's kernel for the CPU does not cast first, as that for CUDA does.
        values = input.to(dtype) if dtype in _HALVES else input
        return torch.mean(values, _every(input, dim), keepdim, dtype=dtype)


class ProdFwdOp(Op):
    """Product of ``input`` ``[*S]`` along the one axis ``dim``; cast to ``dtype`` first."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: int, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        values = input if dtype is None else input.to(dtype)
        # ATen's kernel for the CPU multiplies in the dtype of the result.
        return torch.prod(_wide(values), dim, keepdim).to(values.dtype)


class AmaxFwdOp(Op):
    """Maximum of ``input`` ``[*S]`` along ``dim``, NaN where there is one."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: Axes, keepdim: bool) -> torch.Tensor:
        return torch.amax(input, _every(input, dim), keepdim)


class AminFwdOp(Op):
    """Minimum of ``input`` ``[*S]`` along ``dim``, NaN where there is one."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: Axes, keepdim: bool) -> torch.Tensor:
        return torch.amin(input, _every(input, dim), keepdim)


class LogSumExpFwdOp(Op):
    """``log(sum(exp(input)))`` of ``input`` ``[*S]`` along ``dim``, without overflow; ``-inf`` for
    none."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: tuple[int, ...], keepdim: bool) -> torch.Tensor:
        return torch.logsumexp(_wide(input), dim, keepdim).to(input.dtype)


class VarFwdOp(Op):
    """Variance of ``input`` ``[*S]`` along ``dim``: squares away from the mean, summed, over
    ``max(n - correction, 0)``. ``correction=None`` is 1."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: Axes, correction: float | None, keepdim: bool
    ) -> torch.Tensor:
        return torch.var(input, _every(input, dim), correction=correction, keepdim=keepdim)


class StdFwdOp(Op):
    """Root of ``VarFwdOp``."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: Axes, correction: float | None, keepdim: bool
    ) -> torch.Tensor:
        return torch.std(input, _every(input, dim), correction=correction, keepdim=keepdim)


class VarMeanFwdOp(Op):
    """``VarFwdOp`` and ``MeanFwdOp`` in one reading. The mean of what holds an infinity is
    ``torch.mean``'s, where ``torch.var_mean`` gives NaN or infinity as its order of work has it."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(
        input: torch.Tensor, *, dim: Axes, correction: float | None, keepdim: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axes = _every(input, dim)
        var = torch.var(input, axes, correction=correction, keepdim=keepdim)
        return var, torch.mean(input, axes, keepdim=keepdim)


class VectorNormFwdOp(Op):
    """``sum(abs(x) ** ord) ** (1 / ord)`` of ``x`` ``[*S]`` along ``dim``; cast to ``dtype`` first.
    ``ord`` 0 counts what is not zero; ``inf`` and ``-inf`` are the extremes of ``abs(x)``."""

    kernel = _HALVES_COMPILED

    @staticmethod
    def decomposition(
        x: torch.Tensor, *, ord: float, dim: Axes, keepdim: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        return torch.linalg.vector_norm(x, ord, _every(x, dim), keepdim, dtype=dtype)


class ArgmaxFwdOp(Op):
    """int64 index of the maximum of ``input`` ``[*S]`` along ``dim``, or in all of it: of the first
    NaN, else of the first maximum."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: int | None, keepdim: bool) -> torch.Tensor:
        return torch.argmax(input, dim, keepdim)


class ArgminFwdOp(Op):
    """int64 index of the minimum of ``input`` ``[*S]`` along ``dim``, or in all of it: of the first
    NaN, else of the first minimum."""

    kernel = _COMPILED

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: int | None, keepdim: bool) -> torch.Tensor:
        return torch.argmin(input, dim, keepdim)


class AllFwdOp(Op):
    """Whether no element of ``input`` ``[*S]`` along ``dim`` is zero; ``dim=()`` reduces nothing."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: Axes, keepdim: bool) -> torch.Tensor:
        return _truth(torch.all, input, dim, keepdim)


class AnyFwdOp(Op):
    """Whether an element of ``input`` ``[*S]`` along ``dim`` is not zero; ``dim=()`` reduces
    nothing."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: Axes, keepdim: bool) -> torch.Tensor:
        return _truth(torch.any, input, dim, keepdim)


class CountNonzeroFwdOp(Op):
    """int64 number of elements of ``input`` ``[*S]`` along ``dim`` that are not zero."""

    kernel = _REDUCE

    @staticmethod
    def decomposition(input: torch.Tensor, *, dim: Axes) -> torch.Tensor:
        # Of all axes, given one by one, ATen makes a tensor of bools and sums it.
        every = not dim or len(dim) == input.ndim
        return torch.count_nonzero(input, None if every else dim)
