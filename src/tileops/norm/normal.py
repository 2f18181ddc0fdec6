"""Layer normalisation as the decompositions of several ops have it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.lib.watching import has_tangent


def layer_norm(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dims, which are ``shape``."""
    if not has_tangent(input, weight, bias):
        return F.layer_norm(input, shape, weight, bias, eps)
    # The tangent that ATen's own gives holds mean and variance for constants when it is differentiated.
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = list(range(-len(shape), 0))
    var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    result = (wide - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(input.dtype)
