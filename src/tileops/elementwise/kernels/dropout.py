"""Dropout: the mask is drawn where it is used."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, cdiv, output_of, pointer_to

__all__ = ["Dropout"]

DEVICE = f"{__name__}_triton"

TILE = {2: 1024, 4: 512}
"""Elements of one program by bytes an element: as for other pointwise ops."""
WARPS = 4


class Dropout(Kernel):
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
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, 1, WARPS)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls._entry(call, *size) for size in ((1, 4), (2, 4), (2, 8), (4, 8))]

    @classmethod
    def _entry(cls, call: CallSpec, times: int, warps: int) -> Entry:
        spec = call.spec("input")
        pointer, drawn = pointer_to(spec.dtype), call.params.seed is None
        block = times * TILE[spec.dtype.itemsize]
        build = TritonBuild(
            f"{DEVICE}:dropout",
            signature=(
                ("x", pointer), ("y", pointer), ("seed", "*i64" if drawn else "i64"), ("n", "i64"),
                ("least", "i64"), ("scale", "fp32"),
            ),
            constexprs=(("DRAWN", drawn), ("BLOCK", block)),
            num_warps=warps,
            aligned=("x", "y") if spec.aligned else () if call.written else ("y",),
        )  # fmt: skip

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, block)

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, block: int) -> Run:
    spec, launch, given = call.spec("input"), launcher.on(call.device.index), call.params
    count, p, seed = spec.numel, given.p, given.seed
    numbers = (count, round(p * 2**32), 1 / (1 - p) if p < 1 else 0.0)
    programs, fresh = cdiv(count, block), output_of(spec)

    def run_into(x: torch.Tensor, y: torch.Tensor) -> None:
        if not programs:
            return
        key = seed
        if key is None:
            key = torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
        launch(programs, 1, 1, x, y, key, *numbers)

    def in_place(x: torch.Tensor) -> None:
        run_into(x, x)

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        y = fresh()
        run_into(x, y)
        return y

    return in_place if call.written else out_of_place
