"""Gated activations: the activated left half of every row times its right half.

Computed in float32 (float64 for float64), rounded once. Formula: Shazeer, GLU Variants Improve
Transformer, 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op
from tileops.lib.watching import watched


def _halves(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and factor, in the dtype of the computation."""
    wide = torch.promote_types(input.dtype, torch.float32)
    half = input.shape[-1] // 2
    return input[..., :half].to(wide), input[..., half:].to(wide)


class SiLUAndMulFwdOp(Op):
    """``silu(input[..., :N]) * input[..., N:]`` for ``input`` ``[*M, 2*N]``; the output is ``[*M, N]``.

    API: ``flashinfer.activation.silu_and_mul``.
    """

    kernel = KernelInterface(cuda=("gated:Gated",), compiled_from=1 << 17)

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        gate, up = _halves(input)
        return (F.silu(gate) * up).to(input.dtype)


def _silu_backward(grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if not watched(grad, gate):
        return torch.ops.aten.silu_backward(grad, gate)  # in one pass, and without a derivative
    sigmoid = torch.sigmoid(gate)
    return grad * sigmoid * (1 + gate * (1 - sigmoid))


class SiLUAndMulBwdOp(Op):
    """The gradient of ``SiLUAndMulFwdOp``: ``[g * up * silu'(gate), g * silu(gate)]``.

    ``grad_output``: ``[*M, N]``, ``input``: ``[*M, 2*N]``; with ``s = sigmoid(gate)``, ``silu'(gate)``
    is ``s * (1 + gate * (1 - s))``.
    """

    kernel = KernelInterface(cuda=("gated:GatedBackward",), compiled_from=1 << 17)

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor, input: torch.Tensor, *, wants_input: bool
    ) -> torch.Tensor:
        gate, up = _halves(input)
        grad = grad_output.to(gate.dtype)
        left = _silu_backward(grad * up, gate)
        return torch.cat((left, grad * F.silu(gate)), -1).to(input.dtype)


class GELUAndMulFwdOp(Op):
    """``gelu(input[..., :N]) * input[..., N:]`` for ``input`` ``[*M, 2*N]``; the output is ``[*M, N]``.

    API: ``vllm.model_executor.layers.activation.GeluAndMul``.
    """

    kernel = KernelInterface(cuda=("gated:Gated",), compiled_from=1 << 17)

    @staticmethod
    def decomposition(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
        gate, up = _halves(input)
        return (F.gelu(gate, approximate=approximate) * up).to(input.dtype)


class GELUAndMulBwdOp(Op):
    """The gradient of ``GELUAndMulFwdOp``: ``[g * up * gelu'(gate), g * gelu(gate)]``.

    ``grad_output``: ``[*M, N]``, ``input``: ``[*M, 2*N]``; ``gelu'(x)`` is ``Φ(x) + x * φ(x)``, or the
    derivative of the tanh form.
    """

    kernel = KernelInterface(cuda=("gated:GatedBackward",), compiled_from=1 << 17)

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor, input: torch.Tensor, *, approximate: str, wants_input: bool
    ) -> torch.Tensor:
        gate, up = _halves(input)
        grad = grad_output.to(gate.dtype)
        left = torch.ops.aten.gelu_backward(grad * up, gate, approximate=approximate)
        return torch.cat((left, grad * F.gelu(gate, approximate=approximate)), -1).to(input.dtype)
