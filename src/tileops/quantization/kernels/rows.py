"""Rows, and groups of their elements, quantised on CUDA: values held in registers, read once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    next_power_of_2,
    output_of,
    pointer_to,
)

__all__ = ["CAREFUL_BELOW", "Groups", "HeldRows", "Quantisation"]

DEVICE = f"{__name__}_triton"

GROUP = 128
"""Neighbours that share a scale where the op has groups."""
SHORT = 1024
"""Longest group that shares a program with others."""
LONGEST = {2: 16384, 4: 8192}
"""Elements of the longest row that a program holds, by their bytes."""
CAREFUL_BELOW = 1e-24
"""Below this eps a scale may be so small that its division needs more care: the least quotient that counts
is 2**-10, and a rest 2**-57 of the scale must be a float32."""


@dataclass(frozen=True)
class Quantisation:
    """What a call asks of the kernels of this family."""

    x: TensorSpec
    smooth: TensorSpec | None
    q: TensorSpec
    scales: TensorSpec
    eps: float
    native: bool
    """The card has an instruction that makes float8."""
    dependent: bool
    """A kernel may be launched while the stream's previous one still ends."""

    @classmethod
    def of(cls, call: CallSpec) -> Quantisation:
        """Reads the call of any op of this family that quantises."""
        x, *more = call.inputs.values()
        q, scales = call.outputs.values()
        assert x is not None
        assert q is not None
        assert scales is not None
        arch = call.device.arch
        return cls(
            x, more[0] if more else None, q, scales, float(call.params.eps),
            arch >= (8, 9) and q.dtype.is_floating_point, arch >= (9, 0),
        )  # fmt: skip

    @property
    def kinds(self) -> dict[str, str]:
        """The signature types of the tensors."""
        quanta = "*u8" if self.q.dtype.is_floating_point else "*i8"
        kinds = {"x": pointer_to(self.x.dtype), "q": quanta, "scales": "*fp32"}
        return kinds if self.smooth is None else {**kinds, "smooth": "*fp32"}

    @property
    def numbers(self) -> dict[str, Any]:
        """The constants that say which numbers are made."""
        return {
            "TOP": 448.0 if self.q.dtype.is_floating_point else 127.0,
            "NATIVE": self.native,
            "CAREFUL": self.eps < CAREFUL_BELOW,
        }

    def vector(self, *begins: int) -> int:
        """Elements that can be read at once, where they are read from multiples of ``begins`` on."""
        if not self.x.aligned or not (self.smooth is None or self.smooth.aligned):
            return 1
        return math.gcd(16 // self.x.dtype.itemsize, *begins)

    def build(
        self, fn: str, arguments: tuple[tuple[str, str | None], ...], warps: int, **constexprs: Any
    ) -> TritonBuild:
        """Compile ``fn``, whose arguments have a type, or None for that of the tensor of their name,
        which may be absent."""
        kinds = {name: kind or self.kinds.get(name) for name, kind in arguments}
        pdl = (("launch_pdl", True),) if constexprs.get("DEPENDENT") else ()
        aligned = ("x", "smooth", "q") if constexprs["VECTOR"] > 1 else ()
        return TritonBuild(
            fn,
            tuple((name, kind) for name, kind in kinds.items() if kind is not None),
            (*((name, None) for name, kind in kinds.items() if kind is None), *constexprs.items()),
            num_warps=warps,
            num_stages=1,
            aligned=tuple(name for name in aligned if kinds.get(name) is not None),
            options=pdl,
        )

    def results(self) -> tuple[Any, Any]:
        """What makes the outputs."""
        return output_of(self.q), output_of(self.scales)


def bytes_of(q: torch.Tensor) -> torch.Tensor:
    """As the kernels write it: Triton has no float8 that every card can store."""
    return q.view(torch.uint8) if q.dtype.is_floating_point else q


def _bind_empty(_: None, call: CallSpec) -> Run:
    make, make_scales = Quantisation.of(call).results()
    return lambda *_given: (make(), make_scales())


EMPTY = Entry(("tileops.quantization", "no elements"), lambda: None, _bind_empty)
"""Serves what has no elements: nothing to compile, nothing to launch."""


def _entry(call: CallSpec, group: int, tile: int, warps: int) -> Entry:
    """``call`` with ``tile`` scales to a program, of ``group`` neighbours each."""
    asked = Quantisation.of(call)
    if asked.x.numel == 0:
        return EMPTY
    length = asked.x.shape[-1]
    if length % group == 0:
        length = group  # rows that end where groups do are more groups
    build = asked.build(
        f"{DEVICE}:quantise_rows",
        (("x", None), ("smooth", None), ("q", None), ("scales", None), ("count", "i64"), ("eps", "fp32")),
        warps,
        K=length,
        GROUP=group,
        BLOCK=next_power_of_2(group),
        TILE=tile,
        VECTOR=asked.vector(length, group),
        DEPENDENT=asked.dependent,
        **asked.numbers,
    )  # fmt: skip

    def bind(launcher: Launcher, call: CallSpec) -> Run:
        asked = Quantisation.of(call)
        launch, count, eps = launcher.on(call.device.index), asked.scales.numel, asked.eps
        make, make_scales = asked.results()
        programs = cdiv(count, tile)

        def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, scales = make(), make_scales()
            launch(programs, 1, 1, *given, bytes_of(q), scales, count, eps)
            return q, scales

        return run

    return Entry(build.identity, build, bind)


def _tile(length: int, itemsize: int, vector: int) -> tuple[int, int]:
    """Rows to a program and its warps: a thread has about 32 bytes, as ``norm`` measured it on an H200, or
    less where each element is read alone and needs an address and a mask."""
    block = next_power_of_2(length)
    if length <= SHORT:
        return max(1, (2048 if vector == 1 else 4096) // (block * itemsize)), 4
    warps = max(4, 1 << (length * itemsize // 1024).bit_length() - 1)
    return 1, min(32, max(warps, block // 512) if vector == 1 else warps)


class HeldRows(Kernel):
    """Rows of one scale each, short ones several to a program."""

    name = "triton_held_rows"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        x = Quantisation.of(call).x
        longest = LONGEST[x.dtype.itemsize]
        if x.shape[-1] > longest:
            return f"rows of {x.shape[-1]} elements do not fit in registers (at most {longest})"
        return None

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        asked = Quantisation.of(call)
        length = asked.x.shape[-1]
        tile, warps = _tile(length, asked.x.dtype.itemsize, asked.vector(length))
        ways = [(tile, warps)]
        ways += [(tile, w) for w in (warps // 2, warps * 2) if w <= 32]
        ways += [(tile * more, warps) for more in (2, 4) if length <= SHORT]
        return [_entry(call, length, *way) for way in ways]


class Groups(Kernel):
    """Groups of 128 neighbours, several to a program."""

    name = "triton_groups"

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        tile = 4096 // (GROUP * Quantisation.of(call).x.dtype.itemsize)
        return [_entry(call, GROUP, *way) for way in ((tile, 4), (tile, 2), (2 * tile, 4))]
