"""Rotary embedding of the NeoX layout at given positions, exact for any of them.

Feature ``i`` of the first half of the rotary part turns with feature ``i`` of the second by
``position * base ** (-2 i / rotary_dim)`` radians. A float32 angle is off by up to a hundredth at
position 131072. Here angles are counted in turns with 64 bits after the point: a table holds the
turns per position, and an integer product that wraps drops the whole turns without rounding. What
is left lies within an eighth of a turn of a quarter turn, where short polynomials give sine and
cosine to float32 accuracy.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, next_power_of_2, pointer_to

__all__ = ["RopeNeoxPositionIds", "turns_per_position"]

DEVICE = f"{__name__}_triton"

TILE = 1024
"""Pairs of features rotated at a time."""
WARPS = 2
PROGRAMS_PER_SM = 8
"""With fewer programs than this, heads of one token go to several."""


def turns_per_position(base: float, rotary_dim: int) -> list[int]:
    """``base ** (-2 i / rotary_dim) / (2 pi)`` less whole turns, in signed units of 2**-64."""
    words = []
    for i in range(rotary_dim // 2):
        turns = Fraction(base ** (-2.0 * i / rotary_dim) / (2.0 * math.pi))
        word = round(turns % 1 * 2**64) % 2**64
        words.append(word - 2**64 if word >= 2**63 else word)
    return words


class RopeNeoxPositionIds(Kernel):
    """Every call: a program turns the heads of one token, or some of them where tokens are few."""

    name = "triton_rope_neox"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("x").dtype is torch.float64:
            return "float64: it computes in float32"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, TILE, WARPS)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls._entry(call, *size) for size in ((TILE, 2), (512, 2), (TILE, 4))]

    @classmethod
    def _entry(cls, call: CallSpec, tile: int, warps: int) -> Entry:
        spec, (_, _, width) = call.spec("x"), call.spec("x").shape
        rotary = call.params.rotary_dim or width
        half = next_power_of_2(max(rotary // 2, 1))
        height = max(tile // half, 1)
        pointer = pointer_to(spec.dtype)
        build = TritonBuild(
            f"{DEVICE}:rope_neox",
            signature=(
                ("x", pointer),
                ("positions", pointer_to(call.spec("positions").dtype)),
                ("turns", "*i64"),
                ("y", pointer),
                ("heads", "i32"),
                ("heads_each", "i32"),
                ("parts", "i32"),
            ),
            constexprs=(
                ("D", width),
                ("ROTARY", rotary),
                ("HEADS", height),
                ("HALF", half),
                ("TAIL", next_power_of_2(max(width - rotary, 1))),
            ),
            num_warps=warps,
            aligned=("x", "turns", "y") if spec.aligned else ("turns", "y"),
        )
        base = float(call.params.base)

        def bind(artifact: tuple[Launcher, torch.Tensor], call: CallSpec) -> Run:
            return _bind(*artifact, call, height)

        return Entry(
            (build.identity, base, rotary),
            functools.partial(_load, build, base, rotary, spec.device),
            bind,
        )


def _load(
    build: TritonBuild, base: float, rotary: int, device: torch.device
) -> tuple[Launcher, torch.Tensor]:
    table = torch.tensor(turns_per_position(base, rotary), dtype=torch.int64, device=device)
    return build(), table


def _bind(launcher: Launcher, turns: torch.Tensor, call: CallSpec, height: int) -> Run:
    spec, launch = call.spec("x"), launcher.on(call.device.index)
    _, heads, width = spec.shape
    most, empty_like = PROGRAMS_PER_SM * call.device.multiprocessors, torch.empty_like

    def run(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y, tokens = empty_like(x), x.shape[0]  # which may differ from call to call
        each = max(-(-heads // (-(-most // (tokens or 1)) * height)), 1) * height
        parts = -(-heads // each)
        if tokens * parts and width:
            launch(tokens * parts, 1, 1, x, positions, turns, y, heads, each, parts)
        return y

    return run
