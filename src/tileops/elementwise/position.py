"""Position encodings made from parameters alone: no call-time tensors, no boundary."""

from __future__ import annotations

import math

import torch

from tileops.authoring import KernelInterface, Op


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head."""
    # The paper's rule: a geometric series for a power of two; else the series of the power below,
    # then every other slope of the power above.
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / power) for h in range(heads - power)]
    return slopes


def sinusoidal_turns(width: int, device: torch.device | None) -> torch.Tensor:
    """By how much the angle of each pair of columns grows from one position to the next."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return torch.exp(pairs * (-math.log(10000.0) / width))


class AlibiFwdOp(Op):
    """Attention bias ``-slope[h] * |i - j|`` as ``[num_heads, seq_len, seq_len]`` of ``out_dtype``.

    ``device=None`` is torch's default device. Formula: Press et al., Train Short, Test Long, 2021.
    """

    kernel = KernelInterface(cuda=("position:Alibi",))

    @staticmethod
    def decomposition(
        *, seq_len: int, num_heads: int, out_dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.float32, device=device)
        places = torch.arange(seq_len, dtype=torch.float32, device=device)
        distance = (places[:, None] - places[None, :]).abs()
        return (-slopes[:, None, None] * distance).to(out_dtype)


class SinusoidalFwdOp(Op):
    """``[seq_len, d_model]`` with ``sin(pos / 10000^(2i/d_model))`` in column ``2i`` and its cosine in
    column ``2i+1``, of ``out_dtype``.

    ``device=None`` is torch's default device. Formula: Vaswani et al., Attention Is All You Need,
    2017, section 3.5.
    """

    kernel = KernelInterface(cuda=("position:Sinusoidal",))

    @staticmethod
    def decomposition(
        *, seq_len: int, d_model: int, out_dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        # float64: at position 10^5 a float32 angle is off by 0.01.
        places = torch.arange(seq_len, dtype=torch.float64, device=device)
        angles = places[:, None] * sinusoidal_turns(d_model, device)
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(out_dtype)
