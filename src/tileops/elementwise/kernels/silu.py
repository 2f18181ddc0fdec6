"""SiLU over a flat tensor, out of place or in place."""

from __future__ import annotations

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, cdiv, pointer_to

__all__ = ["Silu"]

DEVICE = f"{__name__}_triton"

BLOCK = {2: 1024, 4: 512}
"""Elements of one program by bytes an element: the fastest of 1024 to 8192 halves on an H200."""
WARPS = 4


class Silu(Kernel):
    """Any shape and floating type; every 16-byte vector is read and written once."""

    name = "triton_silu"
    general = True

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("input").dtype is torch.float64:
            return "float64: it computes in float32"
        return None

    @classmethod
    def build(cls, call: CallSpec, block: int, warps: int) -> TritonBuild:
        """The kernel for ``block`` elements a program."""
        spec = call.spec("input")
        pointer = pointer_to(spec.dtype)
        in_place = "input" in call.written
        aligned = ("x", "y") if spec.aligned else () if in_place else ("y",)
        return TritonBuild(
            f"{DEVICE}:silu_flat",
            signature=(("x", pointer), ("y", pointer), ("n", "i64")),
            constexprs=(("BLOCK", block), ("TAIL", block // 4)),
            num_warps=warps,
            aligned=aligned,
        )

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, BLOCK[call.spec("input").dtype.itemsize], WARPS)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        block = BLOCK[call.spec("input").dtype.itemsize]
        sizes = [(block, 4), (block // 2, 4), (block * 2, 4), (block * 2, 8), (block // 4, 4)]
        return [cls._entry(call, *size) for size in sizes]

    @classmethod
    def _entry(cls, call: CallSpec, block: int, warps: int) -> Entry:
        build = cls.build(call, block, warps)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind(launcher, call, block)

        return Entry(build.identity, build, bind)


def _bind(launcher: Launcher, call: CallSpec, block: int) -> Run:
    spec, launch = call.spec("input"), launcher.on(call.device.index)
    count, shape, dtype, device = spec.numel, spec.shape, spec.dtype, spec.device
    programs = cdiv(count, block)

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if count:
            launch(programs, 1, 1, x, y, count)
        return y

    def in_place(x: torch.Tensor) -> None:
        if count:
            launch(programs, 1, 1, x, x, count)

    return in_place if "input" in call.written else out_of_place
