"""RMSNorm on CUDA: three ways of holding a row, chosen by its length alone.

How many rows there are decides neither which kernel serves nor any order of summation, so a row's
result never depends on its neighbours. The same classes serve RMSNorm after a residual is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run, TensorSpec
from tileops.lib.launch import Launcher, TritonBuild, next_power_of_2, output_of, pointer_to

__all__ = ["ManyShortRows", "RegisterRow", "StreamedRow", "Tile", "tile_for"]

DEVICE = "tileops.norm.kernels.rows_triton"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHORT = 1024
"""Longest row, in elements, that shares a program with other rows."""
HELD_BYTES = 65536
"""Longest row, in bytes, that a program holds in registers."""
HELD_APART = 16384
"""Longest such row, in elements, where each is read alone and needs its own address and mask."""


@dataclass(frozen=True)
class Rows:
    """What a call asks of these kernels."""

    count: int
    length: int
    x: TensorSpec
    weight: TensorSpec | None
    residual: TensorSpec | None
    eps: float

    @classmethod
    def of(cls, call: CallSpec) -> Rows:
        """Rows of RMSNorm's ``x`` or of fused add RMSNorm's ``input``."""
        x = call.inputs.get("x") or call.inputs["input"]
        assert x is not None
        length = math.prod(getattr(call.params, "normalized_shape", x.shape[-1:]))
        eps = call.params.eps
        return cls(
            count=x.numel // length if length else 0,
            length=length,
            x=x,
            weight=call.inputs.get("weight"),
            residual=call.inputs.get("residual"),
            eps=torch.finfo(torch.float32).eps if eps is None else float(eps),
        )

    @property
    def vector(self) -> int:
        """Elements that can be read at once: at most 16 bytes, and dividing a row."""
        given = [spec for spec in (self.x, self.weight, self.residual) if spec is not None]
        if not all(spec.aligned for spec in given):
            return 1
        return math.gcd(self.length, 16 // self.x.dtype.itemsize)

    @property
    def longest_held(self) -> int:
        """Elements of the longest row of this kind that fits in registers."""
        held = HELD_BYTES // self.x.dtype.itemsize
        return held if self.vector > 1 else min(held, HELD_APART)

    @property
    def unsupported(self) -> str | None:
        """Why no kernel here takes these types."""
        for spec in (self.x, self.weight, self.residual):
            if spec is not None and spec.dtype not in DTYPES:
                accepted = ", ".join(str(dtype)[6:] for dtype in DTYPES)
                return f"{str(spec.dtype)[6:]} is not one of {accepted}"
        return None

    def build(
        self, fn: str, *arguments: str, warps: int, pdl: bool, **constexprs: Any
    ) -> TritonBuild:
        """Compile ``fn``, whose run-time arguments are ``arguments``; absent tensors are None."""
        tensors = {
            **dict.fromkeys(("x", "y", "source"), self.x),
            **dict.fromkeys(("residual", "total"), self.residual),
            "weight": self.weight,
        }
        scalars = {
            "rows": "i64",
            "length": "i32" if self.length < 2**30 else "i64",
            "eps": "fp32",
            "sums": "*fp32",
        }
        signature: list[tuple[str, str]] = []
        absent: dict[str, None] = {}
        for name in arguments:
            if name in scalars:
                signature.append((name, scalars[name]))
            elif (spec := tensors[name]) is None:
                absent[name] = None
            else:
                signature.append((name, pointer_to(spec.dtype)))
        # Where rows begin anywhere, elements are read one by one, coalesced. Wider reads of the
        # weight would have Triton give each thread several neighbours, and scatter the others.
        wide = self.vector > 1
        return TritonBuild(
            fn,
            tuple(signature),
            tuple({**absent, "N": self.length, "VECTOR": self.vector, **constexprs}.items()),
            num_warps=warps,
            num_stages=1,
            aligned=tuple(name for name, kind in signature if wide and kind[0] == "*"),
            options=(("launch_pdl", True),) if pdl else (),
        )


def _run_rows(rows: Rows, launch: Callable[..., None], programs: int, size: int) -> Run:
    """One launch, of a kernel that takes ``size`` and ``eps`` after its tensors."""
    empty, eps = output_of(rows.x), rows.eps

    def with_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        y, total = empty(), empty()
        launch(programs, 1, 1, x, residual, weight, y, total, size, eps)
        return y, total

    def with_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = empty()
        launch(programs, 1, 1, x, weight, y, size, eps)
        return y

    def plain(x: torch.Tensor, weight: None = None) -> torch.Tensor:
        y = empty()
        launch(programs, 1, 1, x, y, size, eps)
        return y

    if rows.residual is not None:
        return with_residual
    return plain if rows.weight is None else with_weight


def _bind_empty(_: None, call: CallSpec) -> Run:
    if Rows.of(call).residual is not None:
        return lambda x, residual, weight: (torch.empty_like(x), torch.empty_like(x))
    return lambda x, weight=None: torch.empty_like(x)


EMPTY = Entry(("tileops.norm", "rows without elements"), lambda: None, _bind_empty)
"""Serves what has no elements: nothing to compile, nothing to launch."""


# --- rows held in registers ---------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How ``normalize_rows`` is compiled and launched."""

    rows: int
    """Rows held at a time."""
    warps: int
    policy: str = ""
    """How the caches treat what is read."""
    dependent: bool = False
    """Launch while the stream's previous kernel still ends (compute capability 9.0)."""
    per_multiprocessor: int | None = None
    """Programs for each multiprocessor, each taking every so-many-th tile; None: one a tile."""

    def entry(self, call: CallSpec) -> Entry:
        """``call`` served in this way."""
        rows = Rows.of(call)
        if rows.x.numel == 0:
            return EMPTY
        build = rows.build(
            f"{DEVICE}:normalize_rows",
            *("x", "residual", "weight", "y", "total", "rows", "eps"),
            warps=self.warps,
            pdl=self.dependent,
            BLOCK=next_power_of_2(rows.length),
            TILE=self.rows,
            PERSISTENT=self.per_multiprocessor is not None,
            POLICY=self.policy,
            DEPENDENT=self.dependent,
        )
        return Entry(build.identity, build, self._bind)

    def _bind(self, launcher: Launcher, call: CallSpec) -> Run:
        rows = Rows.of(call)
        programs = -(-rows.count // self.rows)
        if self.per_multiprocessor is not None:
            programs = min(programs, self.per_multiprocessor * call.device.multiprocessors)
        return _run_rows(rows, launcher.on(call.device.index), programs, rows.count)


def tile_for(length: int, itemsize: int, vector: int) -> Tile:
    """The default for rows of ``length``: a thread holds about 32 bytes, so it has two 16-byte
    loads in flight and a multiprocessor some 48 KiB; but 16 elements at most where each needs its
    own address and mask.

    Never by the number of rows, except for ``per_multiprocessor``: a row's sum would follow it.
    """
    block = next_power_of_2(max(length, 1))
    if length <= SHORT:
        return Tile(rows=max(1, 4096 // (block * itemsize)), warps=4)
    warps = max(4, 1 << (length * itemsize // 1024).bit_length() - 1)
    if vector == 1:
        warps = max(warps, block // 512)
    return Tile(rows=1, warps=min(32, warps))


class _Held(Kernel):
    """What the two kernels that hold rows in registers share."""

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._default(call).entry(call)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [tile.entry(call) for tile in cls.tiles(call)]

    @classmethod
    def tiles(cls, call: CallSpec) -> list[Tile]:
        """Configurations worth timing, the default first."""
        default = cls._default(call)
        return [default, *(tile for tile in cls._tiles(default, call) if tile != default)]

    @classmethod
    def _default(cls, call: CallSpec) -> Tile:
        rows = Rows.of(call)
        tile = tile_for(rows.length, rows.x.dtype.itemsize, rows.vector)
        # Measured on an H200: 2048 x 4096 gains 6 %, one row 25 %, long runs neither lose nor gain.
        return replace(tile, dependent=call.device.arch >= (9, 0))

    @classmethod
    def _tiles(cls, default: Tile, call: CallSpec) -> list[Tile]:
        raise NotImplementedError


class ManyShortRows(_Held):
    """Rows of at most 1024 elements, several to a program."""

    name = "triton_many_short_rows"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        rows = Rows.of(call)
        if rows.length > SHORT:
            return f"rows of {rows.length} elements are not short (at most {SHORT})"
        return rows.unsupported

    @classmethod
    def _tiles(cls, default: Tile, call: CallSpec) -> list[Tile]:
        return [
            Tile(max(1, default.rows * warps * more // 4), warps, per_multiprocessor=programs)
            for warps in (1, 2, 4, 8)
            for more in (1, 2)
            for programs in (None, 32 // warps)
        ]


class RegisterRow(_Held):
    """Rows of more than 1024 elements and at most 64 KiB: one to a program, read once."""

    name = "triton_register_row"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        rows = Rows.of(call)
        if rows.length > rows.longest_held:
            return (
                f"rows of {rows.length} elements do not fit in registers "
                f"(at most {rows.longest_held})"
            )
        if rows.length <= SHORT:
            return f"rows of {rows.length} elements would leave threads idle (more than {SHORT})"
        return rows.unsupported

    @classmethod
    def _tiles(cls, default: Tile, call: CallSpec) -> list[Tile]:
        return [
            Tile(1, warps, policy, dependent, programs)
            for warps in (default.warps // 2, default.warps, default.warps * 2)
            if warps <= 32
            for policy, dependent, programs in (
                ("", True, None),
                ("", False, None),
                ("evict_first", True, None),
                ("evict_first", False, None),
                ("", True, max(1, 32 // warps)),
            )
            if call.device.arch >= (9, 0) or not dependent
        ]


# --- longer rows --------------------------------------------------------------------------------


def _both(sums: TritonBuild, scales: TritonBuild) -> tuple[Launcher, Launcher]:
    return sums(), scales()


class StreamedRow(Kernel):
    """Rows too long for registers, read twice in chunks: by one program for each row, or, where
    rows are few, by one program for each chunk in two launches that sum in the same order.
    """

    name = "triton_streamed_row"
    WARPS: ClassVar[int] = 16

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        rows = Rows.of(call)
        if rows.length <= rows.longest_held:
            return (
                f"rows of {rows.length} elements need no second reading "
                f"(more than {rows.longest_held})"
            )
        return rows.unsupported

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        if Rows.of(call).count <= call.device.multiprocessors:
            return cls.split(call)
        return cls.whole(call)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        default = cls.entry_for(call)
        both = [cls.whole(call), cls.split(call)]
        return [default, *(entry for entry in both if entry.identity != default.identity)]

    @classmethod
    def chunk(cls, rows: Rows) -> int:
        """Elements read at a time: 32 bytes a thread, fewer where each is read alone."""
        return 4096 if rows.vector == 1 else 16384 // rows.x.dtype.itemsize

    @classmethod
    def _build(cls, rows: Rows, fn: str, *arguments: str) -> TritonBuild:
        return rows.build(fn, *arguments, warps=cls.WARPS, pdl=False, CHUNK=cls.chunk(rows))

    @classmethod
    def whole(cls, call: CallSpec) -> Entry:
        """One program for each row."""
        rows = Rows.of(call)
        if rows.x.numel == 0:
            return EMPTY
        arguments = ("x", "residual", "weight", "y", "total", "length", "eps")
        build = cls._build(rows, f"{DEVICE}:stream_rows", *arguments)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            rows = Rows.of(call)
            return _run_rows(rows, launcher.on(call.device.index), rows.count, rows.length)

        return Entry(build.identity, build, bind)

    @classmethod
    def split(cls, call: CallSpec) -> Entry:
        """One program for each chunk of each row."""
        rows = Rows.of(call)
        if rows.x.numel == 0:
            return EMPTY
        sums = cls._build(rows, f"{DEVICE}:chunk_sums", "x", "residual", "total", "sums")
        arguments = ("source", "weight", "y", "sums", "eps")
        scales = cls._build(rows, f"{DEVICE}:normalize_chunks", *arguments)
        build = functools.partial(_both, sums, scales)
        return Entry(("split", sums.identity, scales.identity), build, cls._bind_split)

    @classmethod
    def _bind_split(cls, launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
        rows = Rows.of(call)
        add_up, scale = (launcher.on(call.device.index) for launcher in launchers)
        empty_like, empty, eps = torch.empty_like, torch.empty, rows.eps
        programs = rows.count * -(-rows.length // cls.chunk(rows))

        def sums_for(x: torch.Tensor) -> torch.Tensor:
            return empty(programs, dtype=torch.float32, device=x.device)

        def with_residual(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            y, total, sums = empty_like(x), empty_like(x), sums_for(x)
            add_up(programs, 1, 1, x, residual, total, sums)
            scale(programs, 1, 1, total, weight, y, sums, eps)
            return y, total

        def without(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            y, sums = empty_like(x), sums_for(x)
            add_up(programs, 1, 1, x, sums)
            if weight is None:
                scale(programs, 1, 1, x, y, sums, eps)
            else:
                scale(programs, 1, 1, x, weight, y, sums, eps)
            return y

        return without if rows.residual is None else with_residual
