"""Activations, alone and gated."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.authoring import KernelInterface, Op


class SiLUFwdOp(Op):
    """``x * sigmoid(x)`` of ``input`` ``[*S]``.

    With ``inplace`` the call writes ``input`` and returns that tensor, else a new one. API:
    ``torch.nn.functional.silu``.
    """

    kernel = KernelInterface(cuda=("silu:Silu",))

    @staticmethod
    def decomposition(input: torch.Tensor, *, inplace: bool) -> torch.Tensor:
        return F.silu(input)


class SiLUAndMulFwdOp(Op):
    """``silu(input[..., :N]) * input[..., N:]`` for ``input`` ``[*M, 2*N]``; the output is ``[*M, N]``.

    Computed in float32 (float64 for float64), rounded once. API:
    ``flashinfer.activation.silu_and_mul``; formula: Shazeer, GLU Variants Improve Transformer, 2020.
    """

    kernel = KernelInterface(cuda=("silu_and_mul:SiluAndMul",), compiled_from=1 << 23)

    @staticmethod
    def decomposition(input: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        half = input.shape[-1] // 2
        gate, up = input[..., :half].to(wide), input[..., half:].to(wide)
        return (F.silu(gate) * up).to(input.dtype)


class GELUFwdOp(Op):
    """``x * Φ(x)`` of ``input`` ``[*S]``, exact or with ``approximate="tanh"``.

    Infinities follow torch on the device (NaN on the CPU).

    API: ``torch.nn.functional.gelu``.
    """

    @staticmethod
    def decomposition(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
        return F.gelu(input, approximate=approximate)
