"""Turning pairs of features, in plain PyTorch."""

from __future__ import annotations

import torch

from tileops.rope.spectra import Spectrum

__all__ = ["cosine_and_sine", "in_sequence", "turn"]


def cosine_and_sine(
    positions: torch.Tensor, spectrum: Spectrum, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[*positions, size / 2]`` each, rounded to ``dtype`` once."""
    rates, scale = spectrum
    angles = positions.to(torch.float64)[..., None] * rates
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def turn(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """The pairs of ``x`` ``[*S, D]``, entries ``i`` and ``i + size / 2`` or neighbours, turned by
    ``[*S, size / 2]``; what is left of ``D`` is copied."""
    half, wide = cosine.shape[-1], cosine.dtype
    if interleaved:
        first, second = x[..., : 2 * half].unflatten(-1, (half, 2)).to(wide).unbind(-1)
    else:
        first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([pairs.to(x.dtype), x[..., 2 * half :]], -1)


def in_sequence(
    x: torch.Tensor, spectrum: Spectrum, input_layout: str, rope_layout: str = "neox"
) -> torch.Tensor:
    """``x``: ``[S, D]`` (layout ``1d``) or ``[B, S, H, D]`` (``2d``), at positions 0 to S - 1."""
    places = torch.arange(x.shape[0 if input_layout == "1d" else 1], device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    tables = cosine_and_sine(places, spectrum, wide)
    if input_layout == "2d":
        tables = (tables[0][:, None], tables[1][:, None])
    return turn(x, *tables, interleaved=rope_layout == "interleaved")
