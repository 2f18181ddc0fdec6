"""Rotary embedding on the CPU: the rates of the angles once, and each half written where it goes."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run


class RotateHalves(Kernel):
    """The decomposition's arithmetic without its temporaries."""

    name = "rotate_halves"
    devices = ("cpu",)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        size = call.params.rotary_dim or call.dims["D"]
        base = call.params.base

        def build() -> torch.Tensor:
            pairs = torch.arange(0, size, 2, dtype=torch.float64)
            return torch.pow(base, pairs / -size)

        return Entry(("rotate_halves", size, base), build, _bind)


def _bind(rates: torch.Tensor, call: CallSpec) -> Run:
    half, size = rates.shape[0], 2 * rates.shape[0]
    wide = torch.promote_types(call.spec("x").dtype, torch.float32)
    whole = size == call.dims["D"]

    def run(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # float64: at position 10^5 a float32 angle is off by 0.01.
        angles = positions.to(torch.float64).unsqueeze(1) * rates
        cos, sin = angles.cos().to(wide).unsqueeze(1), angles.sin().to(wide).unsqueeze(1)
        result = torch.empty_like(x)
        values = x.to(wide)
        first, second = values[..., :half], values[..., half:size]
        result[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
        result[..., half:size] = (second * cos).addcmul_(first, sin)
        if not whole:
            result[..., size:] = x[..., size:]
        return result

    return run
