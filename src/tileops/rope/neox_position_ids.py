"""Rotary position embedding with explicit positions."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op


class RoPENeoxPositionIdsFwdOp(Op):
    """Rotates the first ``rotary_dim`` entries of each head of ``x`` ``[N, H, D]`` by
    ``positions[n] * base^(-2i / rotary_dim)``, pairing entry ``i`` with ``i + rotary_dim / 2`` (the
    NeoX layout); the rest is copied.

    ``positions``: int32 or int64 ``[N]``, 0 to ``max_position - 1``. The output is a new ``[N, H, D]``.
    Angles are exact to float32 at any position. Formula: Su et al., RoFormer, 2021; API:
    ``vllm._custom_ops.rotary_embedding`` (which writes its input instead).
    """

    grows = ("N",)
    kernel = KernelInterface(
        cuda=("rope_neox_position_ids:RopeNeoxPositionIds",),
        cpu=("rope_neox_cpu:RotateHalves",),
    )

    @staticmethod
    def decomposition(
        x: torch.Tensor,
        positions: torch.Tensor,
        *,
        max_position: int,
        base: float,
        rotary_dim: int | None,
    ) -> torch.Tensor:
        size = x.shape[-1] if rotary_dim is None else rotary_dim
        wide = torch.promote_types(x.dtype, torch.float32)
        # float64: at position 10^5 a float32 angle is off by 0.01.
        pairs = torch.arange(0, size, 2, dtype=torch.float64, device=x.device)
        angles = positions.to(torch.float64)[:, None] * torch.pow(base, pairs / -size)
        cos, sin = angles.cos().to(wide)[:, None], angles.sin().to(wide)[:, None]
        first, second = x[..., : size // 2].to(wide), x[..., size // 2 : size].to(wide)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([*(half.to(x.dtype) for half in turned), x[..., size:]], -1)
