"""How fast each pair of features turns: radians per position, and the length that all are given.

Float64 throughout: at position 10^5 an angle whose rate is float32 is off by 0.01. A spectrum is
``(rates, scale)``: ``[size / 2]`` on ``device``, and the factor on cosine and sine.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Spectrum", "keywords", "llama31", "long_rope", "of_call", "plain", "yarn"]

Spectrum = tuple[torch.Tensor, float]
Make = Callable[..., Spectrum]

BEYOND_COINCIDENT = 0.001
"""YaRN's ramp where it would begin and end at one pair: its width, by the published code."""


def plain(size: int, device: torch.device, *, base: float) -> Spectrum:
    """``base^(-2i / size)``: Su et al., RoFormer, 2021."""
    pairs = torch.arange(0, size, 2, dtype=torch.float64, device=device)
    return torch.pow(base, pairs / -size), 1.0


def llama31(
    size: int,
    device: torch.device,
    *,
    base: float,
    scaling_factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> Spectrum:
    """Pairs that turn fewer than ``low_freq_factor`` times in the original context are slowed by
    ``scaling_factor``, those that turn more than ``high_freq_factor`` times stay, and between the
    two it fades. Formula: Meta, Llama 3.1, 2024 (``apply_scaling`` of the published code)."""
    rates, scale = plain(size, device, base=base)
    wavelength = 2 * math.pi / rates
    slow = rates / scaling_factor
    kept = (original_max_position / wavelength - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    faded = torch.where(
        wavelength > original_max_position / low_freq_factor,
        slow,
        (1 - kept) * slow + kept * rates,
    )
    return torch.where(wavelength < original_max_position / high_freq_factor, rates, faded), scale


def yarn(
    size: int,
    device: torch.device,
    *,
    base: float,
    scaling_factor: float,
    original_max_position: int,
    beta_fast: float,
    beta_slow: float,
    attn_factor: float,
) -> Spectrum:
    """Pairs that turn fewer than ``beta_slow`` times in the original context are slowed by
    ``scaling_factor``, those that turn more than ``beta_fast`` times stay, and between the two it
    fades along the pairs; lengths grow by ``attn_factor (0.1 ln(scaling_factor) + 1)`` where the
    context is extended. Formula: Peng et al., YaRN, 2023."""
    rates, _ = plain(size, device, base=base)

    def pair_that_turns(times: float) -> float:
        turns = math.log(original_max_position) - math.log(2 * math.pi) - math.log(times)
        return size * turns / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(beta_slow)), size - 1)
    width = last - first if last != first else BEYOND_COINCIDENT
    pairs = torch.arange(size // 2, dtype=torch.float64, device=device)
    slowed = ((pairs - first) / width).clamp(0, 1)
    scale = 1.0 if scaling_factor <= 1 else 0.1 * math.log(scaling_factor) + 1
    return rates / scaling_factor * slowed + rates * (1 - slowed), scale * attn_factor


def long_rope(
    size: int,
    device: torch.device,
    *,
    base: float,
    rescale_factors: tuple[float, ...] | None,
    max_position: int,
    original_max_position: int,
) -> Spectrum:
    """Each pair is slowed by a factor of its own; lengths grow by
    ``sqrt(1 + ln(max_position / original_max_position) / ln(original_max_position))`` where the
    context is extended. Formula: Ding et al., LongRoPE, 2024, as in Phi-3."""
    rates, scale = plain(size, device, base=base)
    if rescale_factors is not None:
        rates = rates / torch.tensor(rescale_factors, dtype=torch.float64, device=device)
    extended = max_position / original_max_position
    if extended > 1:
        scale = math.sqrt(1 + math.log(extended) / math.log(original_max_position))
    return rates, scale


@functools.cache
def keywords(spectrum: Make) -> tuple[str, ...]:
    """The params of an op that a spectrum depends on."""
    found = inspect.signature(spectrum).parameters.values()
    return tuple(p.name for p in found if p.kind is p.KEYWORD_ONLY)


@functools.lru_cache(256)
def _numbers(
    spectrum: Make, size: int, params: tuple[tuple[str, Any], ...]
) -> tuple[tuple[float, ...], float]:
    rates, scale = spectrum(size, torch.device("cpu"), **dict(params))
    return tuple(rates.tolist()), scale


SPECTRA: dict[str, Make] = {
    "LongRoPE": long_rope,
    "RoPE": plain,
    "RoPELlama31": llama31,
    "RoPENeoxPositionIds": plain,
    "YaRN": yarn,
}
"""By what the names of an op's class and of its gradient's begin with."""


def of_call(op: str, size: int, params: Any) -> tuple[tuple[float, ...], float]:
    """The numbers of a call of the class ``op``, for kernels; a gradient turns the other way."""
    spectrum = SPECTRA[op[: -len("FwdOp")]]
    named = tuple((name, getattr(params, name)) for name in keywords(spectrum))
    rates, scale = _numbers(spectrum, size, named)
    return tuple(-rate for rate in rates) if op.endswith("BwdOp") else rates, scale
