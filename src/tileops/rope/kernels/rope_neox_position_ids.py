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
import triton
import triton.language as tl

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, pointer_to

__all__ = ["RopeNeoxPositionIds", "turns_per_position"]

TILE = 1024
"""Pairs of features rotated at a time."""
WARPS = 2
PROGRAMS_PER_SM = 8
"""With fewer programs than this, heads of one token go to several."""


@triton.jit
def _sine_and_cosine(phase):
    """Of ``phase``, in int32 units of 2**-32 turns; within 1.2e-7 of the true value."""
    quarter = (phase + (1 << 29)) >> 30
    rest = (phase - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # radians
    square = rest * rest
    sine = -1.9515295891e-4 * square + 8.3321608736e-3
    sine = rest + rest * square * (sine * square - 1.6666654611e-1)
    cosine = 2.443315711809948e-5 * square - 1.388731625493765e-3
    cosine = cosine * square + 4.166664568298827e-2
    cosine = square * square * cosine + (1.0 - 0.5 * square)
    swapped = (quarter & 1) != 0
    first = tl.where(swapped, cosine, sine)
    second = tl.where(swapped, sine, cosine)
    first = tl.where((quarter & 2) != 0, -first, first)
    second = tl.where(((quarter + 1) & 2) != 0, -second, second)
    return first, second


@triton.jit
def _rope_neox(
    x,
    positions,
    turns,
    y,
    heads,
    heads_each,
    parts,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
):
    token = tl.program_id(0) // parts
    first = tl.program_id(0) % parts * heads_each
    feature = tl.arange(0, HALF)
    known = feature < ROTARY // 2
    position = tl.load(positions + token).to(tl.int64)
    phase = position * tl.load(turns + feature, mask=known, other=0)
    sine, cosine = _sine_and_cosine((phase >> 32).to(tl.int32))
    sine, cosine = sine[None, :], cosine[None, :]
    corner = token.to(tl.int64) * heads * D
    for start in range(first, tl.minimum(first + heads_each, heads), HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & known[None, :]
        place = head * D + feature[None, :]
        left = tl.load(x + corner + place, mask=inside).to(tl.float32)
        right = tl.load(x + corner + place + ROTARY // 2, mask=inside).to(tl.float32)
        tl.store(y + corner + place, left * cosine - right * sine, mask=inside)
        tl.store(y + corner + place + ROTARY // 2, right * cosine + left * sine, mask=inside)
        if ROTARY < D:
            place = ROTARY + tl.arange(0, TAIL)[None, :]
            inside = (head < heads) & (place < D)
            place = head * D + place
            tl.store(y + corner + place, tl.load(x + corner + place, mask=inside), mask=inside)


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
        half = triton.next_power_of_2(max(rotary // 2, 1))
        height = max(tile // half, 1)
        pointer = pointer_to(spec.dtype)
        build = TritonBuild(
            _rope_neox,
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
                ("TAIL", triton.next_power_of_2(max(width - rotary, 1))),
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
    shape, dtype, device = spec.shape, spec.dtype, spec.device
    tokens, heads, width = shape
    wanted = triton.cdiv(PROGRAMS_PER_SM * call.device.multiprocessors, max(tokens, 1))
    each = max(triton.cdiv(heads, wanted * height), 1) * height
    parts = triton.cdiv(heads, each)
    programs = tokens * parts if width else 0

    def run(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if programs:
            launch(programs, 1, 1, x, positions, turns, y, heads, each, parts)
        return y

    return run
