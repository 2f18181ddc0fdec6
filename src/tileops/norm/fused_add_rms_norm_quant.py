"""Residual addition, RMS normalisation and quantisation with one scale to a row."""

from __future__ import annotations

import torch

from tileops.authoring import KernelInterface, Op
from tileops.norm.normal import mean_of_squares


class FusedAddRMSNormPerTokenQuantFwdOp(Op):
    """``residual_out = input + residual``; ``y = rms_norm(residual_out, eps) * weight``; ``scale``:
    float32 ``[*B, 1]``, a row's largest ``|y|`` (at most ``scale_ub``) over 448 for float8 and 127 for
    int8; ``q = y / scale``, rounded to even and saturated.

    A scale is at least ``1 / (448 * 512)`` for float8 and float32's epsilon for int8, so that a row of
    zeros has one. ``y`` is never rounded to the dtype of ``input``; the sum is. A row that holds a NaN
    has a NaN as scale, and zeros as int8. Returns ``(q, scale, residual_out)``. API:
    ``vllm._custom_ops.rms_norm_dynamic_per_token_quant``.
    """

    kernel = KernelInterface(compiled_from=1 << 17, cuda=("rows:RegisterRow", "rows:ManyShortRows"))

    @staticmethod
    def decomposition(
        input: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        *,
        quant_dtype: torch.dtype,
        eps: float,
        scale_ub: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = input + residual
        values = total.float()
        values = values * torch.rsqrt(mean_of_squares(values) + eps)
        values = values * weight.float()
        largest = values.abs().amax(-1, keepdim=True)
        if quant_dtype is torch.int8:
            scale = (largest / 127.0).clamp(min=torch.finfo(torch.float32).eps)
            quotient = (values / scale).round().clamp(-128.0, 127.0)
            return quotient.nan_to_num(0.0).to(quant_dtype), scale, total
        if scale_ub is not None:
            largest = largest.clamp(max=scale_ub)
        scale = (largest / 448.0).clamp(min=1.0 / (448.0 * 512.0))
        return (values / scale).clamp(-448.0, 448.0).to(quant_dtype), scale, total
