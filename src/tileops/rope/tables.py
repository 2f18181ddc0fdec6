"""Rotary position embedding by cosines and sines that are given, as models compute them once for all
layers."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.rope import rotation

_KERNEL = KernelInterface(compiled_from=1 << 17, cuda=("rotate_by_tables:RotateByTables",))


class RoPETablesFwdOp(Op):
    """``x * cos + turned(x) * sin`` of ``x`` ``[*B, D]``, where ``turned`` puts ``(-b, a)`` in the place
    of each pair ``(a, b)``: entries ``i`` and ``i + D / 2`` (``rope_layout`` ``neox``) or ``2i`` and
    ``2i + 1`` (``interleaved``).

    ``cos`` and ``sin``: ``[*C, W]`` of the dtype of ``x``, or float32 where that is narrower; ``C``
    broadcasts to ``B`` and ``W`` is ``D`` (an entry for each of ``x``) or ``D / 2`` (one for each pair).
    They need lie on no circle. No gradient flows to them. Formula: Su et al., RoFormer, 2021; API:
    ``apply_rotary_pos_emb`` of ``transformers``.
    """

    kernel = _KERNEL

    @staticmethod
    def decomposition(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, rope_layout: str
    ) -> torch.Tensor:
        return rotation.turn_by_tables(x, cos, sin, rope_layout)


class RoPETablesBwdOp(Op):
    """The gradient of ``RoPETablesFwdOp`` in ``x``: ``grad_output`` ``[*B, D]`` by the transpose of what
    the tables do, ``g * cos - turned(g * sin)``."""

    kernel = _KERNEL

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        rope_layout: str,
        wants_x: bool,
    ) -> torch.Tensor:
        return rotation.turn_by_tables(grad_output, cos, sin, rope_layout, back=True)
