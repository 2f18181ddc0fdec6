"""Position encodings, written at the speed of memory from tables of one axis."""

from __future__ import annotations

import math
from functools import partial

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.elementwise.kernels.tiles import FEW, Tile, not_filling
from tileops.elementwise.position import alibi_slopes, sinusoidal_turns
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    overlapping,
    pointer_to,
    resident,
)

__all__ = ["Alibi", "Sinusoidal"]

DEVICE = f"{__name__}_triton"

TILE: Tile = (4096, 4)
"""Of one program: part of a row, or several rows. One short row would leave it waiting."""


class _Rows(Kernel):
    """Rows of the output in tiles of one program, which looks up what it needs of a table."""

    general = True
    device_function: str
    table_type: str

    @classmethod
    def table(cls, call: CallSpec) -> torch.Tensor:
        """On the call's device."""
        raise NotImplementedError(f"{cls.__name__} must define table")

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        output = call.spec("output")
        columns, (elements, warps) = output.shape[-1], cls.tile(call)
        width, overlap = min(elements, next_power_of_2(columns)), overlapping(call.device)
        build = TritonBuild(
            f"{DEVICE}:{cls.device_function}",
            signature=(
                ("table", cls.table_type), ("y", pointer_to(output.dtype)), ("rows", "i32"),
                ("per_entry", "i32"), ("columns", "i32"), ("tiles", "i32"), ("resident", "i32"),
            ),
            constexprs=(("ROWS", elements // width), ("COLUMNS", width), ("DEPENDENT", bool(overlap))),
            num_warps=warps,
            options=overlap,
            aligned=("y", *(("columns",) if columns % 16 == 0 else ())),
        )  # fmt: skip
        # The table is part of what is built: a call that is captured into a graph must find it.
        return Entry(
            (build.identity, _entries(call)), partial(_loaded, build, cls, call), cls._bind
        )

    @classmethod
    def tile(cls, call: CallSpec) -> Tile:
        """A call that does not fill the card waits for the work of one thread."""
        return FEW if not_filling(call) else TILE

    @classmethod
    def _bind(cls, loaded: tuple[Launcher, torch.Tensor], call: CallSpec) -> Run:
        launcher, table = loaded
        output, launch = call.spec("output"), launcher.on(call.device.index)
        columns, (elements, warps) = output.shape[-1], cls.tile(call)
        most = resident(call.device, warps)
        rows, width = output.numel // columns, min(elements, next_power_of_2(columns))
        tiles, fresh = cdiv(columns, width), output_of(output)
        programs = cdiv(rows, elements // width) * tiles
        per_entry = columns if len(output.shape) == 3 else 1

        def run() -> torch.Tensor:
            y = fresh()
            launch(programs, 1, 1, table, y, rows, per_entry, columns, tiles, most)
            return y

        return run


def _entries(call: CallSpec) -> int:
    """What the table follows from: the slopes of so many heads, or the turns of so many columns."""
    shape = call.spec("output").shape
    return shape[0] if len(shape) == 3 else shape[-1]


def _loaded(build: TritonBuild, cls: type[_Rows], call: CallSpec) -> tuple[Launcher, torch.Tensor]:
    return build(), cls.table(call)


class Alibi(_Rows):
    """The table holds the slope of each head."""

    name = "triton_alibi"
    device_function = "alibi"
    table_type = "*fp32"

    @classmethod
    def table(cls, call: CallSpec) -> torch.Tensor:
        slopes = alibi_slopes(call.params.num_heads)
        return torch.tensor(slopes, dtype=torch.float32, device=call.spec("output").device)


class Sinusoidal(_Rows):
    """The table holds the turn of each pair of columns, in quarters and float64, as angles need it."""

    name = "triton_sinusoidal"
    device_function = "sinusoidal"
    table_type = "*fp64"

    @classmethod
    def table(cls, call: CallSpec) -> torch.Tensor:
        turns = sinusoidal_turns(call.params.d_model, call.spec("output").device)
        return turns * (2 / math.pi)
