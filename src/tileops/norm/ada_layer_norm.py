"""Layer normalisation whose scale and shift differ from row to row."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import layer_norm

KERNELS = ("rows:RegisterRow", "rows:StreamedRow", "rows:ManyShortRows")


def _modulated(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    normal = layer_norm(x.to(wide), x.shape[-1:], None, None, eps)
    return normal * scale.to(wide) + shift.to(wide)


class AdaLayerNormFwdOp(Op):
    """``y = layer_norm(x) * scale + shift``, all ``[*B, N]``.

    ``scale`` multiplies as it is: for the ``1 + scale`` of Peebles and Xie (Scalable Diffusion Models
    with Transformers, 2022) pass ``1 + scale``. Computed in float32 (float64 for float64), rounded
    once.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=KERNELS)

    @staticmethod
    def decomposition(
        x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float
    ) -> torch.Tensor:
        return _modulated(x, scale, shift, eps).to(x.dtype)


class AdaLayerNormZeroFwdOp(Op):
    """``y = gate * (layer_norm(x) * scale + shift)``, all ``[*B, N]``; see ``AdaLayerNormFwdOp``."""

    kernel = KernelInterface(compiled_from=1 << 17, cuda=KERNELS)

    @staticmethod
    def decomposition(
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        gate: torch.Tensor,
        *,
        eps: float,
    ) -> torch.Tensor:
        result = _modulated(x, scale, shift, eps)
        return (result * gate.to(result.dtype)).to(x.dtype)
