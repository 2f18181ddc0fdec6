"""Rotary position embedding with explicit positions."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.rope import rotation, spectra

_KERNEL = KernelInterface(cuda=("rotate:Rotate",), cpu=("rotate_cpu:Rotate",))


def _at_positions(
    x: torch.Tensor, positions: torch.Tensor, base: float, rotary_dim: int | None, way: int
) -> torch.Tensor:
    size = x.shape[-1] if rotary_dim is None else rotary_dim
    rates, scale = spectra.plain(size, x.device, base=base)
    wide = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = rotation.cosine_and_sine(positions, (way * rates, scale), wide)
    return rotation.turn(x, cosine[:, None], sine[:, None])


class RoPENeoxPositionIdsFwdOp(Op):
    """Rotates the first ``rotary_dim`` entries of each head of ``x`` ``[N, H, D]`` by
    ``positions[n] * base^(-2i / rotary_dim)``, pairing entry ``i`` with ``i + rotary_dim / 2`` (the
    NeoX layout); the rest is copied.

    ``positions``: int32 or int64 ``[N]``, 0 to ``max_position - 1``. The output is a new ``[N, H, D]``.
    Angles are exact to float32 at any position. Formula: Su et al., RoFormer, 2021; API:
    ``vllm._custom_ops.rotary_embedding`` (which writes its input instead).
    """

    grows = ("N",)
    kernel = _KERNEL

    @staticmethod
    def decomposition(
        x: torch.Tensor,
        positions: torch.Tensor,
        *,
        max_position: int,
        base: float,
        rotary_dim: int | None,
    ) -> torch.Tensor:
        return _at_positions(x, positions, base, rotary_dim, 1)


class RoPENeoxPositionIdsBwdOp(Op):
    """The gradient of ``RoPENeoxPositionIdsFwdOp``: ``grad_output`` ``[N, H, D]`` turned back, since
    a rotation's transpose is its inverse."""

    grows = ("N",)
    kernel = _KERNEL

    @staticmethod
    def decomposition(
        grad_output: torch.Tensor,
        positions: torch.Tensor,
        *,
        max_position: int,
        base: float,
        rotary_dim: int | None,
        wants_x: bool,
    ) -> torch.Tensor:
        return _at_positions(grad_output, positions, base, rotary_dim, -1)
