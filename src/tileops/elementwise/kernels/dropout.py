"""Dropout: the mask is drawn where it is used."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Run
from tileops.elementwise.dropout import drawn_seed
from tileops.elementwise.kernels.tiles import Tile, Tiled, not_filling
from tileops.lib.launch import Launcher, TritonBuild, cdiv, output_of, overlapping, pointer_to

__all__ = ["Dropout"]

DEVICE = f"{__name__}_triton"


class Dropout(Tiled):
    """Any shape; a seed that is drawn stays on the device, so that a CUDA graph draws anew."""

    name = "triton_dropout"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("input").dtype is torch.float64:
            return "float64: it computes in float32"
        if not call.params.training or call.params.p == 0:
            return "nothing is dropped"
        return None

    @classmethod
    def itemsize(cls, call: CallSpec) -> int:
        return call.spec("input").dtype.itemsize

    @classmethod
    def tile(cls, call: CallSpec) -> Tile:
        return (1024 if not_filling(call) else 2048), 4

    @classmethod
    def entry_of(cls, call: CallSpec, tile: Tile) -> Entry:
        spec, (block, warps) = call.spec("input"), tile
        pointer, drawn = pointer_to(spec.dtype), call.params.seed is None
        overlap = overlapping(call.device)
        build = TritonBuild(
            f"{DEVICE}:dropout",
            signature=(
                ("x", pointer), ("y", pointer), ("seed", "*i64" if drawn else "i64"), ("n", "i64"),
                ("least", "i64"), ("scale", "fp32"),
            ),
            constexprs=(("DRAWN", drawn), ("BLOCK", block), ("DEPENDENT", bool(overlap))),
            num_warps=warps,
            options=overlap,
            aligned=("x", "y") if spec.aligned else () if call.written else ("y",),
        )  # fmt: skip

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, block)

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, block: int) -> Run:
    spec, launch, given = call.spec("input"), launcher.on(call.device.index), call.params
    count, p, seed = spec.numel, given.p, given.seed
    least = round(p * 2**32)
    numbers = (count, least, 1 / (1 - p) if least < 2**32 else 0.0)  # which no word reaches
    programs, fresh = cdiv(count, block), output_of(spec)

    def run_into(x: torch.Tensor, y: torch.Tensor) -> None:
        if not programs:
            return
        key = seed
        if key is None:
            key = drawn_seed(x.device)
        launch(programs, 1, 1, x, y, key, *numbers)

    def in_place(x: torch.Tensor) -> None:
        run_into(x, x)

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        y = fresh()
        run_into(x, y)
        return y

    return in_place if call.written else out_of_place
