"""Matrix product: cuBLAS through ATen, and a Triton kernel that may split the K axis.

Both take every call; which serves is decided by the times in ``SHARE``. The Triton kernel gives
each program one tile of the result. Where tiles are fewer than multiprocessors (few rows: a decode
step), programs along K each leave a float32 partial product, and a second kernel adds these in
a fixed order, so results do not vary from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.lib.launch import Launcher, TritonBuild, cdiv, pointer_to

__all__ = [
    "PLAIN", "CublasGEMM", "Epilogue", "Tile", "TritonGEMM", "bandwidth_of", "cost_of", "sizes",
]  # fmt: skip

DEVICE = f"{__name__}_triton"

ROOFLINE = {
    # By compute capability: terabytes a second, and dense 16-bit teraflops a second.
    (8, 0): (1.6, 250.0),
    (9, 0): (4.3, 700.0),
    (10, 0): (7.0, 1600.0),
}
LAUNCH = {"cublas": 2.0, "triton": 2.0}
"""Microseconds of a call that moves nothing."""
SHARE = {
    # Of the roofline reached, for up to so many rows: (cuBLAS, Triton). Measure with
    # `python benchmarks/ops.py gemm` and write the medians here; the higher one serves.
    16: (0.744, 0.893),
    64: (0.880, 0.778),
    128: (0.776, 0.634),
    512: (1.049, 0.926),
    1 << 62: (1.096, 0.936),
}


@dataclass(frozen=True)
class Tile:
    """One way to run the Triton kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    """Tile rows whose tiles follow each other, sharing what they read of ``b``."""

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the stages take."""
        return (self.rows + self.columns) * self.depth * itemsize * self.stages


@dataclass(frozen=True)
class Epilogue:
    """What machine code does to each element of the product: ``bias``, ``residual`` and ``kept`` (the
    preactivation) are the dtypes of what is there."""

    activation: str | None = None
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    kept: torch.dtype | None = None
    scale: bool = False
    narrow: bool = True
    """The result has at most 11 bits."""

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """The run-time arguments: the tensors that are there, then the scale."""
        there = tuple((name, pointer_to(dtype)) for name, dtype in self._tensors if dtype)
        return (*there, ("scale", "fp32")) if self.scale else there

    @property
    def constexprs(self) -> tuple[tuple[str, Any], ...]:
        absent = tuple((name, None) for name, dtype in self._tensors if not dtype)
        absent = absent if self.scale else (*absent, ("scale", None))
        return (*absent, ("ACTIVATION", self.activation), ("NARROW", self.narrow))

    @property
    def _tensors(self) -> tuple[tuple[str, torch.dtype | None], ...]:
        return (("bias", self.bias), ("residual", self.residual), ("kept", self.kept))


PLAIN = Epilogue()

TILES = {
    # For up to so many rows of the result; the first that fits in shared memory is the default.
    16: (
        Tile(16, 64, 256, 4, 4),
        Tile(16, 32, 256, 4, 4),
        Tile(16, 128, 128, 4, 4),
        Tile(16, 64, 128, 4, 5),
        Tile(16, 64, 64, 4, 4),
    ),
    64: (
        Tile(64, 64, 128, 4, 4),
        Tile(64, 32, 128, 4, 5),
        Tile(64, 128, 128, 8, 3),
        Tile(64, 128, 64, 4, 4),
        Tile(64, 64, 64, 4, 3),
    ),
    128: (
        Tile(128, 64, 128, 4, 4),
        Tile(128, 128, 64, 4, 4),
        Tile(128, 64, 64, 4, 5),
        Tile(64, 64, 128, 4, 4),
        Tile(64, 64, 64, 4, 3),
    ),
    512: (
        Tile(128, 128, 64, 4, 4),
        Tile(128, 128, 64, 8, 4),
        Tile(128, 128, 128, 8, 3),
        Tile(128, 64, 64, 4, 4),
        Tile(64, 64, 64, 4, 3),
    ),
    1 << 62: (
        Tile(128, 256, 64, 8, 3),
        Tile(128, 256, 64, 8, 4),
        Tile(128, 128, 64, 8, 4),
        Tile(256, 128, 64, 8, 3),
        Tile(64, 64, 64, 4, 3),
    ),
}
IEEE_TILES = (Tile(64, 64, 32, 8, 2), Tile(32, 64, 32, 4, 2), Tile(16, 64, 32, 4, 2))
"""For float32, whose products are taken by the ordinary arithmetic units."""


ADD_BLOCK = 1024
LONGEST = (1 << 31) // 256 - 1
"""Elements of an axis, so that 32 bits address the inside of a tile."""


def sizes(call: CallSpec) -> tuple[int, int, int]:
    """``M``, ``N`` and ``K``."""
    a, b = call.spec("a").shape, call.spec("b").shape
    rows, depth = (a[1], a[0]) if call.params.trans_a else a
    return rows, b[0] if call.params.trans_b else b[1], depth


def _bucket(table: dict[int, Any], rows: int) -> Any:
    return next(found for most, found in table.items() if rows <= most)


def _roofline(call: CallSpec) -> tuple[float, float]:
    known = max((arch for arch in ROOFLINE if arch <= call.device.arch), default=min(ROOFLINE))
    return ROOFLINE[known]


def bandwidth_of(call: CallSpec) -> float:
    """Terabytes a second of the call's device."""
    return _roofline(call)[0]


def cost_of(call: CallSpec, library: str) -> float:
    """Microseconds: the roofline of the call at the share of it that ``library`` reaches."""
    rows, columns, depth = sizes(call)
    itemsize = call.spec("a").dtype.itemsize
    bandwidth, flops = _roofline(call)
    moved = (rows * depth + columns * depth + rows * columns) * itemsize / bandwidth * 1e-6
    # float32 takes the ordinary arithmetic units, about a tenth as fast.
    work = 2 * rows * columns * depth / (flops if itemsize == 2 else flops / 10) * 1e-6
    share = _bucket(SHARE, rows)[0 if library == "cublas" else 1]
    return LAUNCH[library] + max(moved, work) / share


class CublasGEMM(Kernel):
    """``torch.mm``; float32 follows torch's own setting of its precision."""

    name = "cublas"

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        return cost_of(call, "cublas")

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        trans_a, trans_b = bool(call.params.trans_a), bool(call.params.trans_b)
        return Entry(("aten.mm", trans_a, trans_b), lambda: _mm(trans_a, trans_b))


def _mm(trans_a: bool, trans_b: bool) -> Run:
    mm = torch.mm

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return mm(a.t() if trans_a else a, b.t() if trans_b else b)

    return run


class TritonGEMM(Kernel):
    """Any sizes and layouts; float32 products are exact float32 ones."""

    name = "triton_gemm"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if call.spec("a").dtype is torch.float64:
            return "float64: it adds up in float32"
        if max(sizes(call)) > LONGEST:
            return f"an axis of {max(sizes(call))} elements (at most {LONGEST})"
        return None

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        return cost_of(call, "triton")

    @classmethod
    def epilogue(cls, call: CallSpec) -> Epilogue:
        """What is done to the product."""
        return PLAIN

    @classmethod
    def tiles(cls, call: CallSpec) -> list[Tile]:
        """The tiles worth timing that fit the device's shared memory, the default first."""
        dtype, room = call.spec("a").dtype, call.device.shared_memory or 99 << 10
        some = IEEE_TILES if dtype.itemsize == 4 else _bucket(TILES, sizes(call)[0])
        # Before Hopper what is multiplied passes through registers too; so does what is added last.
        held = 64 if call.device.arch < (9, 0) or cls.epilogue(call) != PLAIN else 128
        fitting = [
            tile
            for tile in some
            if tile.shared(dtype.itemsize) <= room
            and tile.rows * tile.columns <= held * 32 * tile.warps
        ]
        return fitting or [Tile(16, 64, 32, 4, 2)]

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        tile = cls.tiles(call)[0]
        return cls.entry_of(call, tile, cls.parts(call, tile))

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls.entry_of(call, tile, parts) for tile, parts in cls.choices(call)]

    @classmethod
    def choices(cls, call: CallSpec) -> list[tuple[Tile, int]]:
        """Each tile with the numbers of parts worth timing, in the candidates' order."""
        found = []
        for tile in cls.tiles(call):
            parts = cls.parts(call, tile)
            most = max(sizes(call)[2] // (2 * tile.depth), 1)
            numbers = dict.fromkeys(min(number, most) for number in (parts, 1, parts * 2))
            found += [(tile, number) for number in numbers]
        return found

    @classmethod
    def parts(cls, call: CallSpec, tile: Tile) -> int:
        """How many programs share one tile: as many as let every multiprocessor have one."""
        rows, columns, depth = sizes(call)
        tiles = cdiv(rows, tile.rows) * cdiv(columns, tile.columns)
        room = call.device.multiprocessors // max(tiles, 1)
        return max(min(room, 16, depth // (4 * tile.depth)), 1)

    @classmethod
    def entry_of(cls, call: CallSpec, tile: Tile, parts: int) -> Entry:
        """The entry of one tile, the K axis cut into ``parts``."""
        epilogue = cls.epilogue(call)
        product = _product(call, tile, None if parts > 1 else epilogue)
        builds = [product]
        if parts > 1:
            builds.append(
                TritonBuild(
                    f"{DEVICE}:add_parts",
                    signature=(
                        ("parts", "*fp32"),
                        ("d", pointer_to(call.spec("d").dtype)),
                        *epilogue.signature,
                        ("count", "i64"),
                        ("N", "i32"),
                        ("number", "i32"),
                    ),
                    constexprs=(("BLOCK", ADD_BLOCK), *epilogue.constexprs),
                    aligned=("parts", "d"),
                )
            )

        def bind(launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
            return cls.bind(_bind(launchers, call, tile, parts), call)

        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(_load, *builds), bind)

    @classmethod
    def bind(cls, multiply: Callable[..., None], call: CallSpec) -> Run:
        """The run of a call; ``multiply`` writes ``d`` from ``a``, ``b`` and the epilogue's arguments."""
        rows, columns, _ = sizes(call)
        spec = call.spec("a")

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            d = torch.empty((rows, columns), dtype=spec.dtype, device=spec.device)
            multiply(a, b, d)
            return d

        return run


def _product(call: CallSpec, tile: Tile, epilogue: Epilogue | None) -> TritonBuild:
    """The build of the product; without an epilogue it leaves float32 parts."""
    end = epilogue or PLAIN
    a, b = call.spec("a"), call.spec("b")
    rows, columns, depth = sizes(call)
    # M counts only where it is a stride.
    divisible = {"M": call.params.trans_a and rows, "N": columns, "K": depth}
    aligned = [name for name, spec in (("a", a), ("b", b)) if spec.aligned]
    more = {"bias": end.bias, "residual": end.residual}
    aligned += [name for name, there in more.items() if there and call.spec(name).aligned]
    aligned += ["kept"] if end.kept else []
    aligned += ["d", *(name for name, size in divisible.items() if size and size % 16 == 0)]
    return TritonBuild(
        f"{DEVICE}:gemm",
        signature=(
            ("a", pointer_to(a.dtype)),
            ("b", pointer_to(b.dtype)),
            ("d", pointer_to(call.spec("d").dtype) if epilogue else "*fp32"),
            *end.signature,
            ("M", "i32"),
            ("N", "i32"),
            ("K", "i32"),
            ("steps_each", "i32"),
        ),
        constexprs=(
            ("TRANS_A", bool(call.params.trans_a)),
            ("TRANS_B", bool(call.params.trans_b)),
            ("ROWS", tile.rows),
            ("COLUMNS", tile.columns),
            ("DEPTH", tile.depth),
            ("GROUP", tile.group),
            ("EVEN_K", depth % tile.depth == 0),
            ("PRECISION", "ieee"),
            *end.constexprs,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=tuple(aligned),
        options=(("maxnreg", 255),),  # few programs fit beside each other: spend their registers
    )


def _load(*builds: TritonBuild) -> tuple[Launcher, ...]:
    return tuple(build() for build in builds)


def _bind(
    launchers: tuple[Launcher, ...], call: CallSpec, tile: Tile, parts: int
) -> Callable[..., None]:
    """``multiply(a, b, d, *rest)``: ``rest`` in the order of the epilogue's signature."""
    rows, columns, depth = sizes(call)
    device = call.spec("a").device
    multiply, *add = (launcher.on(call.device.index) for launcher in launchers)
    programs = cdiv(rows, tile.rows) * cdiv(columns, tile.columns)
    each = cdiv(cdiv(depth, tile.depth), parts)
    count = rows * columns

    def whole(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *rest: Any) -> None:
        if count:
            multiply(programs, 1, 1, a, b, d, *rest, rows, columns, depth, each)

    def split(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *rest: Any) -> None:
        if count:
            partial = torch.empty((parts, count), dtype=torch.float32, device=device)
            multiply(programs, parts, 1, a, b, partial, rows, columns, depth, each)
            add[0](cdiv(count, ADD_BLOCK), 1, 1, partial, d, *rest, count, columns, parts)

    return split if add else whole
