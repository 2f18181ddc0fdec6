"""Layer and group normalisation as the decompositions of several ops have them."""

from __future__ import annotations

import torch

from tileops.lib.watching import has_tangent, recorded, watched


def _widened(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    wide = torch.promote_types(input.dtype, torch.float32)
    return (
        input.to(wide),
        None if weight is None else weight.to(wide),
        None if bias is None else bias.to(wide),
    )


def layer_norm(
    input: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dims, which are ``shape``."""
    if not watched(input, weight, bias):
        # F.layer_norm is this behind 0.5 µs of Python.
        return torch.layer_norm(input, shape, weight, bias, eps)
    result, factors, terms = _widened(input, weight, bias)
    if has_tangent(input, weight, bias):
        # The tangent that ATen's own gives holds mean and variance for constants when it is
        # differentiated.
        dims = list(range(-len(shape), 0))
        var, mean = torch.var_mean(result, dims, correction=0, keepdim=True)
        result = (result - mean) * torch.rsqrt(var + eps)
        result = result if factors is None else result * factors
        result = result if terms is None else result + terms
    else:
        # Of halves ATen's gradient sums halves on the CPU.
        result = torch.layer_norm(result, shape, factors, terms, eps)
    return result.to(input.dtype)


def group_norm(
    input: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The same over the channels of each of ``groups`` groups, and all that follows them."""
    if not recorded(input, weight, bias):
        return torch.group_norm(input, groups, weight, bias, eps)
    # Of halves ATen keeps mean and variance as halves.
    result, factors, terms = _widened(input, weight, bias)
    return torch.group_norm(result, groups, factors, terms, eps).to(input.dtype)
