"""SiLU over a flat tensor, out of place or in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, pointer_to

__all__ = ["Silu", "silu"]

BLOCK = {2: 1024, 4: 512}
"""Elements of one program by bytes an element: the fastest of 1024 to 8192 halves on an H200."""
WARPS = 4


@triton.jit
def silu(value):
    """``value * sigmoid(value)`` in float32; minus infinity gives NaN as torch does."""
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _silu_flat(x, y, n, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Whole tiles take no mask: with one, n's divisibility would decide the vector width. The last
    # tile goes in small steps, so that the masked half of the code asks for few registers.
    if start + BLOCK <= n:
        place = start + tl.arange(0, BLOCK)
        tl.store(y + place, silu(tl.load(x + place).to(tl.float32)))
    else:
        for step in range(0, BLOCK, TAIL):
            place = start + step + tl.arange(0, TAIL)
            value = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
            tl.store(y + place, silu(value), mask=place < n)


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
            _silu_flat,
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
    programs = triton.cdiv(count, block)

    def out_of_place(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if count:
            launch(programs, 1, 1, x, y, count)
        return y

    def in_place(x: torch.Tensor) -> None:
        if count:
            launch(programs, 1, 1, x, x, count)

    return in_place if "input" in call.written else out_of_place
