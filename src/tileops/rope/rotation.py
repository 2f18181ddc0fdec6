"""Turning pairs of features, in plain PyTorch."""

from __future__ import annotations

import torch

from tileops.rope.spectra import Spectrum

__all__ = ["cosine_and_sine", "in_sequence", "turn", "turn_by_tables"]


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
    first, second = _apart(x[..., : 2 * half].to(wide), interleaved)
    turned = _joined(first * cosine - second * sine, second * cosine + first * sine, interleaved)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def turn_by_tables(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope_layout: str, back: bool = False
) -> torch.Tensor:
    """The pairs of ``x`` ``[*B, D]`` by tables that broadcast to it: of ``D`` entries, one for each of
    ``x``, or of ``D / 2``, one for each pair. ``back``: by the transpose, which is the gradient."""
    interleaved, wide = rope_layout == "interleaved", torch.promote_types(x.dtype, torch.float32)

    def both(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = table.to(wide)
        if 2 * table.shape[-1] == x.shape[-1]:
            return table, table
        return _apart(table, interleaved)

    first, second = _apart(x.to(wide), interleaved)
    (cosine, other_cosine), (sine, other_sine) = both(cos), both(sin)
    if back:
        sine, other_sine = -other_sine, -sine
    turned = (first * cosine - second * sine, second * other_cosine + first * other_sine)
    return _joined(*turned, interleaved).to(x.dtype)


def _apart(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second entry of each pair."""
    half = x.shape[-1] // 2
    if interleaved:
        first, second = x.unflatten(-1, (half, 2)).unbind(-1)
        return first, second
    return x[..., :half], x[..., half:]


def _joined(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((first, second), -1).flatten(-2)
    return torch.cat((first, second), -1)


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
