"""Position encodings, written at the speed of memory from tables of one axis."""

from __future__ import annotations

import math

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.elementwise.position import alibi_slopes, sinusoidal_turns
from tileops.lib.launch import Launcher, TritonBuild, cdiv, next_power_of_2, output_of, pointer_to

__all__ = ["Alibi", "Sinusoidal"]

DEVICE = f"{__name__}_triton"

TILE = 4096
"""Most elements of one program, all of one row."""
WARPS = 4


class _Rows(Kernel):
    """Rows of the output, each in tiles of one program; the table lies with the plan."""

    general = True
    device_function: str
    table_type: str

    @classmethod
    def table(cls, call: CallSpec) -> torch.Tensor:
        """What a program looks up, on the call's device."""
        raise NotImplementedError

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        output = call.spec("output")
        columns = output.shape[-1]
        block = min(TILE, next_power_of_2(columns))
        build = TritonBuild(
            f"{DEVICE}:{cls.device_function}",
            signature=(
                ("table", cls.table_type), ("y", pointer_to(output.dtype)), ("per_entry", "i32"),
                ("columns", "i32"), ("tiles", "i32"),
            ),
            constexprs=(("BLOCK", block),),
            num_warps=WARPS,
            aligned=("y", *(("columns",) if columns % 16 == 0 else ())),
        )  # fmt: skip

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, cls.table(call), block)

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, table: torch.Tensor, block: int) -> Run:
    output, launch = call.spec("output"), launcher.on(call.device.index)
    rows, columns = output.numel // output.shape[-1], output.shape[-1]
    tiles, fresh = cdiv(columns, block), output_of(output)
    per_entry = columns if len(output.shape) == 3 else 1

    def run() -> torch.Tensor:
        y = fresh()
        launch(rows * tiles, 1, 1, table, y, per_entry, columns, tiles)
        return y

    return run


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
