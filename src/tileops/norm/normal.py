"""What the decompositions of several ops have in common."""

from __future__ import annotations

import math

import torch

from tileops.lib.watching import has_tangent, recorded, watched

_CHUNK, _PART = 4096, 256
"""Inductor's sum of more than ``_CHUNK`` float32 numbers on the CPU goes through memory at every step,
which takes three times as long; one of parts of any size up to that does not."""


def mean_of_squares(values: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """Over the last ``dims`` dims, which stay as 1."""
    squares, count = values.square(), math.prod(values.shape[-dims:])
    if values.device.type != "cpu" or count <= _CHUNK or count % _PART:
        return squares.mean(tuple(range(-dims, 0)), keepdim=True)
    parts = squares.reshape(*values.shape[:-dims], *[1] * (dims - 1), count // _PART, _PART)
    return parts.sum(-1).sum(-1, keepdim=True) / count


def by_statistics(
    input: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias``, where all but ``input`` are of its channels."""
    wide = torch.promote_types(input.dtype, torch.float32)
    scale = torch.rsqrt(var.to(wide) + eps)
    if weight is not None:
        scale = scale * weight.to(wide)
    if torch.compiler.is_dynamo_compiling() and input.device.type == "cpu":
        # In memory of its own: Inductor would else take the root again for every vector of elements.
        scale = scale.as_strided(scale.shape, (1,))
    channel = [1, -1] + [1] * (input.ndim - 2)
    result = (input.to(wide) - mean.to(wide).view(channel)) * scale.view(channel)
    if bias is not None:
        result = result + bias.to(wide).view(channel)
    return result.to(input.dtype)


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
