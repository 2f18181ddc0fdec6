"""The one formula of this family.

Of values that share a scale, with ``top`` 127 for int8 and 448 for float8_e4m3fn:

    scale = max(largest magnitude, eps) / top
    q     = value / scale, rounded to even and saturated

Both quotients are rounded to float32, and nothing else is, so that ``q`` is the same number on every
device. ``eps`` is the float32 nearest to what is given. Where a NaN is among the values, ``scale`` is NaN;
where an infinity is, ``scale`` is infinite and the finite values become 0. What has no quotient (a NaN,
an infinity over an infinite scale, 0 over a scale of 0, which ``eps=0`` allows) is NaN as float8 and 0 as
int8.
"""

from __future__ import annotations

import torch

__all__ = ["to_float8", "to_int8"]

INT8_TOP, FP8_TOP = 127.0, 448.0
Axes = int | tuple[int, ...]


def to_int8(values: torch.Tensor, over: Axes, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` and ``scale`` of float32 ``values``, which share a scale along ``over``."""
    scale = _scale(values, over, eps, INT8_TOP)
    quotient = (values / scale).round().clamp(-128.0, 127.0)
    return quotient.nan_to_num(0.0).to(torch.int8), scale.squeeze(over)


def to_float8(values: torch.Tensor, over: Axes, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` and ``scale`` of float32 ``values``, which share a scale along ``over``."""
    scale = _scale(values, over, eps, FP8_TOP)
    return (values / scale).clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn), scale.squeeze(over)


def _scale(values: torch.Tensor, over: Axes, eps: float, top: float) -> torch.Tensor:
    return values.abs().amax(over, keepdim=True).clamp(min=eps) / top
