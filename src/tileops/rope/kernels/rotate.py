"""Rotary embedding, exact at any position; also its gradient, which turns the other way.

A pair of features turns by ``position * rate`` radians. A float32 angle is off by up to a hundredth
at position 131072. Here angles are counted in turns with 64 bits after the point: a table holds the
turns per position, and an integer product that wraps drops the whole turns without rounding. What
is left lies within an eighth of a turn of a quarter turn, where short polynomials give sine and
cosine to float32 accuracy, or an instruction of the card does to the 20 bits that suffice for halves.
The table decides the spectrum and the direction; machine code does not depend on it.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    overlapping,
    pointer_to,
    resident,
)
from tileops.rope import spectra

__all__ = ["Rotate", "turns_per_position"]

DEVICE = f"{__name__}_triton"

SIZES = {
    # Pairs of features rotated at a time and warps, the default first.
    "heads": ((1024, 4), (512, 2), (1024, 2), (512, 4)),
    # Of which a part of the threads has nothing to do.
    "heads of no power of two": ((512, 2), (1024, 4), (1024, 2), (512, 4)),
    "tokens": ((512, 2), (1024, 4), (512, 4)),
    # With more warps each thread takes the sines of its own pairs, instead of being told them.
    "tokens of several heads": ((512, 1), (512, 2), (1024, 2), (1024, 4)),
}
FEWEST_PAIRS = 256
"""With fewer for all heads of a token, a tile holds several tokens: a program should have more to do
than to begin."""
FEWEST_PAIRS_SHARED = 1024
"""The same where heads are a power of two: sines are taken once for the heads of each token."""
PROGRAMS_PER_SM = 8
"""With fewer programs than this, heads of one token go to several."""


def turns_per_position(rates: tuple[float, ...]) -> list[int]:
    """``rates / (2 pi)`` less whole turns, in signed units of 2**-64."""
    words = []
    for rate in rates:
        word = round(Fraction(rate / (2.0 * math.pi)) % 1 * 2**64) % 2**64
        words.append(word - 2**64 if word >= 2**63 else word)
    return words


def turned(call: CallSpec) -> TensorSpec:
    """What a call turns: the input, or the gradient that comes back."""
    return next(spec for spec in call.inputs.values() if spec is not None)


class Rotate(Kernel):
    """Every call; a program turns the heads of one token, or some of them where tokens are few, or
    the heads of several tokens where these are few."""

    name = "triton_rotate"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if turned(call).dtype is torch.float64:
            return "float64: it computes in float32"
        if not all(map(math.isfinite, cls._rates(call)[0])):
            return "rates that are no finite numbers have no table"
        return None

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        if _few_heads(call):
            kind = "tokens of several heads" if _shares(call) else "tokens"
        else:
            half = _rotary(call) // 2
            kind = "heads" if next_power_of_2(half) == half else "heads of no power of two"
        sizes = SIZES[kind]
        return list({e.identity: e for e in (cls._entry(call, *size) for size in sizes)}.values())

    @classmethod
    def _rates(cls, call: CallSpec) -> tuple[tuple[float, ...], float]:
        return spectra.of_call(call.op, _rotary(call), call.params)

    @classmethod
    def _entry(cls, call: CallSpec, tile: int, warps: int) -> Entry:
        rates, scale = cls._rates(call)
        build, rows = _build(call, tile, warps)

        def bind(artifact: tuple[Launcher, torch.Tensor], call: CallSpec) -> Run:
            last = (scale, resident(call.device, build.num_warps))
            return _bind(*artifact, call, rows, last)

        load = functools.partial(_load, build, rates, turned(call).device)
        return Entry((build.identity, rates), load, bind)


def _heads(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) == 2 else shape[-2]


def _few_heads(call: CallSpec) -> int:
    """How many heads, if so few that a tile should hold several tokens; else 0."""
    heads = _heads(turned(call).shape)
    fewest = FEWEST_PAIRS_SHARED if _shares(call) else FEWEST_PAIRS
    return heads if heads * next_power_of_2(max(_rotary(call) // 2, 1)) < fewest else 0


def _shares(call: CallSpec) -> bool:
    """Whether a tile holds whole tokens of several heads, which turn alike."""
    heads = _heads(turned(call).shape)
    return heads > 1 and next_power_of_2(heads) == heads


def _rotary(call: CallSpec) -> int:
    size: int = getattr(call.params, "rotary_dim", None) or turned(call).shape[-1]
    return size


def _build(call: CallSpec, tile: int, warps: int) -> tuple[TritonBuild, int]:
    """The build, and the rows of its tile."""
    spec, rotary = turned(call), _rotary(call)
    width, half = spec.shape[-1], next_power_of_2(max(rotary // 2, 1))
    few, rows = _few_heads(call), max(tile // half, 1)
    if not few:  # a tile need not be higher than there are heads
        most = next_power_of_2(max(_heads(spec.shape), 1))
        warps = max(warps * min(rows, most) // rows, 1)
        rows = min(rows, most)
    one = len(spec.shape) < 4  # sequence
    pointer, positions = pointer_to(spec.dtype), call.inputs.get("positions")
    given = () if positions is None else (("positions", pointer_to(positions.dtype)),)
    overlap = overlapping(call.device)
    build = TritonBuild(
        f"{DEVICE}:rotate",
        signature=(
            ("x", pointer),
            *given,
            ("turns", "*i64"),
            ("y", pointer),
            ("tokens", "i64"),
            *(() if one else (("period", "i32"),)),
            ("heads", "i32"),
            ("heads_each", "i32"),
            ("scale", "fp32"),
            ("resident", "i32"),
        ),
        constexprs=(
            *(() if given else (("positions", None),)),
            *((("period", None),) if one else ()),
            ("D", width),
            ("ROTARY", rotary),
            ("ROWS", rows),
            ("HALF", half),
            ("TAIL", next_power_of_2(max(width - rotary, 1))),
            ("INTERLEAVED", getattr(call.params, "rope_layout", "neox") == "interleaved"),
            ("FEW_HEADS", few),
            ("NARROW", spec.dtype.itemsize < 4),
            ("DEPENDENT", bool(overlap)),
        ),
        num_warps=warps,
        aligned=("x", "turns", "y") if spec.aligned else ("turns", "y"),
        options=(("maxnreg", 255), *overlap),  # ptxas would rather spill one than use many
    )
    return build, rows


def _load(
    build: TritonBuild, rates: tuple[float, ...], device: torch.device
) -> tuple[Launcher, torch.Tensor]:
    return build(), torch.tensor(turns_per_position(rates), dtype=torch.int64, device=device)


def _bind(
    launcher: Launcher, turns: torch.Tensor, call: CallSpec, rows: int, last: tuple[float, int]
) -> Run:
    """``last``: the kernel's last arguments."""
    shape, launch = turned(call).shape, launcher.on(call.device.index)
    heads, width = _heads(shape), shape[-1]
    # [tokens, D], [tokens, heads, D] or [batch, period, heads, D]
    sequence = shape[1:2] if len(shape) == 4 else ()
    times = math.prod(sequence)
    few, most = _few_heads(call), PROGRAMS_PER_SM * call.device.multiprocessors
    empty_like = torch.empty_like

    def run(x: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
        y, tokens = empty_like(x), x.shape[0] * times  # which may differ from call to call
        if few:
            each = parts = 1
            programs = cdiv(tokens * few, rows)
        else:
            each = max(cdiv(heads, cdiv(most, tokens or 1) * rows), 1) * rows
            parts = cdiv(heads, each)
            programs = tokens
        if programs and width:
            given = (x, *positions, turns, y, tokens, *sequence, heads, each, *last)
            launch(programs, parts, 1, *given)
        return y

    return run
