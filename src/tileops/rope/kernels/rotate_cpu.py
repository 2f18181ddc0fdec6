"""Rotary embedding on the CPU: the rates of the angles once, and each half written where it goes."""

from __future__ import annotations

import functools

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import next_power_of_2
from tileops.rope import rotation, spectra

__all__ = ["Rotate"]

Tables = tuple[torch.Tensor, torch.Tensor]


class Rotate(Kernel):
    """The decomposition's arithmetic without its temporaries. Cosine and sine of positions that a
    call does not give are made once, for as many as the next power of two."""

    name = "rotate"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        x = next(spec for spec in call.inputs.values() if spec is not None)
        size = getattr(call.params, "rotary_dim", None) or x.shape[-1]
        rates, scale = spectra.of_call(call.op, size, call.params)
        wide = torch.promote_types(x.dtype, torch.float32)
        spectrum = (torch.tensor(rates, dtype=torch.float64), scale)
        if "positions" in call.inputs:
            return Entry(("rotate", rates, scale), lambda: spectrum, _at_positions)
        length = next_power_of_2(x.shape[0 if len(x.shape) == 2 else 1])
        make = functools.partial(_tables, length, spectrum, wide)
        return Entry(("rotate", rates, scale, length, wide), make, _in_sequence)


def _tables(length: int, spectrum: spectra.Spectrum, wide: torch.dtype) -> Tables:
    return rotation.cosine_and_sine(torch.arange(length), spectrum, wide)


def _at_positions(spectrum: spectra.Spectrum, call: CallSpec) -> Run:

    def run(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        cosine, sine = rotation.cosine_and_sine(positions, spectrum, wide)
        return _turn(x, cosine.unsqueeze(1), sine.unsqueeze(1), False)

    return run


def _in_sequence(tables: Tables, call: CallSpec) -> Run:
    shape = next(spec.shape for spec in call.inputs.values() if spec is not None)
    length = shape[0 if len(shape) == 2 else 1]
    cosine, sine = (table[:length] if len(shape) == 2 else table[:length, None] for table in tables)
    interleaved = getattr(call.params, "rope_layout", "neox") == "interleaved"
    return lambda x: _turn(x, cosine, sine, interleaved)


def _turn(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    half, wide = cosine.shape[-1], cosine.dtype
    parts = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(0, half), slice(half, 2 * half))
    )
    result, values = torch.empty_like(x), x.to(wide)
    first, second = (values[..., part] for part in parts)
    result[..., parts[0]] = (first * cosine).addcmul_(second, sine, value=-1)
    result[..., parts[1]] = (second * cosine).addcmul_(first, sine)
    if 2 * half < x.shape[-1]:
        result[..., 2 * half :] = x[..., 2 * half :]
    return result
