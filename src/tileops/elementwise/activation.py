"""Activations."""

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


class GELUFwdOp(Op):
    """``x * Φ(x)`` of ``input`` ``[*S]``, exact or with ``approximate="tanh"``.

    Infinities follow torch on the device (NaN on the CPU).

    API: ``torch.nn.functional.gelu``.
    """

    @staticmethod
    def decomposition(input: torch.Tensor, *, approximate: str) -> torch.Tensor:
        return F.gelu(input, approximate=approximate)
