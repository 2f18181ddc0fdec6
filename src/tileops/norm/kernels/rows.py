"""Rows normalised on CUDA: three ways of holding a row, chosen by its length alone.

How many rows there are decides neither which kernel serves nor any order of summation, so a row's
result never depends on its neighbours. An op says in ``ROLES`` what its inputs are to these kernels,
which do everything that any of them asks: a residual added first, rows centred or not, weights of a
row's elements or of channels, a scale and shift of each element, quantised results. Where InstanceNorm
keeps running statistics, a second launch moves them by the moments that the first one leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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

__all__ = ["ManyShortRows", "RegisterRow", "StreamedRow", "Tile", "tile_for"]

DEVICE = "tileops.norm.kernels.rows_triton"
RUNNING = "tileops.norm.kernels.channels_triton:instance_statistics"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHORT = 1024
"""Longest row, in elements, that shares a program with other rows."""
HELD_BYTES = 65536
"""Longest row, in bytes, that a program holds in registers."""
HELD_APART = 16384
"""Longest such row, in elements, where each is read alone and needs its own address and mask."""
CENTRED_BYTES = 32768
"""Longest such row where it is centred, with weights and biases, or quantised: registers again."""
MODULATED_BYTES = 16384
"""Longest row, in bytes, that is held together with its scales and shifts."""
CHANNELS_TOGETHER = 32
"""Channels whose running statistics one program moves."""

OF_CHANNELS = ("x", "running_mean", "running_var", "weight", "bias")
ROLES = {
    "RMSNormFwdOp": ("x", "weight"),
    "LayerNormFwdOp": ("x", "weight", "bias"),
    "AdaLayerNormFwdOp": ("x", "scale", "shift"),
    "AdaLayerNormZeroFwdOp": ("x", "scale", "shift", "gate"),
    "FusedAddRMSNormFwdOp": ("x", "residual", "weight"),
    "FusedAddLayerNormFwdOp": ("x", "residual", "weight", "bias"),
    "FusedAddRMSNormPerTokenQuantFwdOp": ("x", "residual", "weight"),
    "GroupNormFwdOp": ("x", "weight", "bias"),
    "InstanceNormFwdOp": OF_CHANNELS,
}
"""The kernels' names of each op's inputs, in the op's order, which is also the kernels'."""
UNCENTRED = {"RMSNormFwdOp", "FusedAddRMSNormFwdOp", "FusedAddRMSNormPerTokenQuantFwdOp"}
TENSORS = ("x", "residual", "weight", "bias", "scale", "shift", "gate", "moments")
QUANTISED: dict[torch.dtype | None, tuple[float, float]] = {
    None: (0.0, 0.0),
    torch.float8_e4m3fn: (448.0, 1.0 / (448.0 * 512.0)),
    torch.int8: (127.0, 2.0**-23),
}
"""Largest quantised number and smallest scale."""


@dataclass(frozen=True)
class Rows:
    """What a call asks of these kernels."""

    count: int
    length: int
    eps: float
    given: dict[str, TensorSpec]
    """The inputs by the kernels' names."""
    refused: str | None
    """What no kernel here does."""
    centred: bool
    groups: int = 0
    """Groups of channels, 0 where weights are not of channels."""
    spatial: int = 1
    """Elements of one channel of one instance."""
    quantised: torch.dtype | None = None
    bound: float | None = None
    """Of a quantised row's largest magnitude."""

    @classmethod
    def of(cls, call: CallSpec) -> Rows:
        """Reads the call of any op in ``ROLES``."""
        roles = zip(ROLES[call.op], call.inputs.values(), strict=True)
        given = {name: spec for name, spec in roles if spec is not None}
        x, params = given["x"], call.params
        channels: dict[str, int] = {}
        if call.op in ("GroupNormFwdOp", "InstanceNormFwdOp"):
            groups = getattr(params, "num_groups", x.shape[1])
            spatial = math.prod(x.shape[2:])
            length = x.shape[1] // groups * spatial if groups else 0
            channels = {"groups": groups, "spatial": spatial}
        else:
            length = math.prod(getattr(params, "normalized_shape", x.shape[-1:]))
        count = x.numel // length if length else 0
        running, refused = [given.pop(n, None) for n in ("running_mean", "running_var")], None
        if running[0] is not None:
            given["moments"] = TensorSpec.contiguous_of((2, count), torch.float32, x.device)
            if not params.use_input_stats:
                refused = "its statistics are given"
            elif not all(spec.contiguous for spec in running if spec is not None):
                refused = "running statistics that are written are not contiguous"
            elif not count:
                refused = "running statistics become those of no instance"
        return cls(
            count=count,
            length=length,
            eps=torch.finfo(torch.float32).eps if params.eps is None else float(params.eps),
            given=given,
            refused=refused,
            centred=call.op not in UNCENTRED,
            quantised=getattr(params, "quant_dtype", None),
            bound=getattr(params, "scale_ub", None),
            **channels,
        )

    @property
    def x(self) -> TensorSpec:
        """What is normalised."""
        return self.given["x"]

    @property
    def added(self) -> bool:
        """Whether a residual is added first."""
        return "residual" in self.given

    @property
    def vector(self) -> int:
        """Elements that can be read at once: at most 16 bytes, and dividing a row."""
        apart = ("weight", "bias", "moments") if self.groups else ()
        read = [spec for name, spec in self.given.items() if name not in apart]
        if not all(spec.aligned for spec in read):
            return 1
        return math.gcd(self.length, 16 // self.x.dtype.itemsize)

    @property
    def longest_held(self) -> int:
        """Elements of the longest row of this kind that fits in registers."""
        most = HELD_BYTES
        if self.centred or self.quantised is not None:
            most = MODULATED_BYTES if "scale" in self.given else CENTRED_BYTES
        held = most // self.x.dtype.itemsize
        return held if self.vector > 1 else min(held, HELD_APART)

    @property
    def unsupported(self) -> str | None:
        """Why no kernel here takes the call."""
        for spec in self.given.values():
            if spec.dtype not in DTYPES:
                accepted = ", ".join(str(dtype)[6:] for dtype in DTYPES)
                return f"{str(spec.dtype)[6:]} is not one of {accepted}"
        return self.refused

    def build(
        self, fn: str, *arguments: str, warps: int, pdl: bool, **constexprs: Any
    ) -> TritonBuild:
        """Compile ``fn``, whose run-time arguments are ``arguments``; absent tensors are None."""
        kinds = {name: pointer_to(spec.dtype) for name, spec in self.given.items()}
        kinds |= {"y": kinds["x"], "source": kinds["x"], "sums": "*fp32"}
        if self.added:
            kinds["total"] = kinds["x"]
        if self.quantised is not None:
            kinds |= {"quanta": "*fp32", "y": "*u8" if self.quantised.is_floating_point else "*i8"}
        if self.bound is not None:
            kinds["bound"] = "fp32"
        kinds |= {"rows": "i64", "length": "i32" if self.length < 2**30 else "i64", "eps": "fp32"}
        signature = tuple((name, kinds[name]) for name in arguments if name in kinds)
        absent = {name: None for name in arguments if name not in kinds}
        # Where rows begin anywhere, elements are read one by one, coalesced. Wider reads of the
        # weight would have Triton give each thread several neighbours, and scatter the others.
        wide = self.vector > 1
        narrow = (
            ("weight", "bias", "moments", "quanta", "sums") if self.groups else ("quanta", "sums")
        )
        options: tuple[tuple[str, Any], ...] = (("launch_pdl", True),) if pdl else ()
        if "scale" in self.given:
            # All that a multiprocessor has: left alone, ptxas spills to have more programs on one.
            options = (*options, ("maxnreg", min(255, 2048 // warps)))
        constants = {**absent, "N": self.length, "VECTOR": self.vector, **constexprs}
        return TritonBuild(
            fn,
            signature,
            tuple({**constants, "CENTRED": self.centred}.items()),
            num_warps=warps,
            num_stages=1,
            aligned=tuple(
                name for name, kind in signature if wide and kind[0] == "*" and name not in narrow
            ),
            options=options,
        )

    @property
    def channels(self) -> dict[str, int]:
        """The constants that say which weight is whose."""
        return {"GROUPS": self.groups, "SPATIAL": self.spatial if self.groups else 1}


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    return first(), second()


def _keeping_statistics(call: CallSpec, entry: Entry) -> Entry:
    """``entry``, and the launch that moves running statistics where the call has any."""
    rows = Rows.of(call)
    if "moments" not in rows.given:
        return entry
    dependent, pointers = call.device.arch >= (9, 0), ("moments", "running_mean", "running_var")
    build = TritonBuild(
        RUNNING,
        (*((name, "*fp32") for name in pointers), ("instances", "i32"), ("momentum", "fp32")),
        (
            ("C", rows.groups),
            ("L", rows.spatial),
            ("CB", CHANNELS_TOGETHER),
            ("DEPTH", 2048 // CHANNELS_TOGETHER),
            ("DEPENDENT", dependent),
        ),
        options=(("launch_pdl", True),) if dependent else (),
    )

    def bind(launchers: tuple[Any, Launcher], call: CallSpec) -> Run:
        rows, update = Rows.of(call), launchers[1].on(call.device.index)
        assert entry.bind is not None
        normalize = entry.bind(launchers[0], call)
        make, momentum = output_of(rows.given["moments"]), float(call.params.momentum)
        programs, instances = cdiv(rows.groups, CHANNELS_TOGETHER), rows.count // rows.groups

        def run(x: torch.Tensor, *given: torch.Tensor | None) -> torch.Tensor:
            moments = make()
            y: torch.Tensor = normalize(x, *given[2:], moments)
            update(programs, 1, 1, moments, *given[:2], instances, momentum)
            return y

        return run

    identity = (entry.identity, build.identity)
    return Entry(identity, functools.partial(_both, entry.build, build), bind)


def _run_rows(rows: Rows, call: CallSpec, launch: Callable[..., None], grid: int, size: int) -> Run:
    """One launch, of a kernel that takes ``size`` and ``eps`` after its tensors."""
    makers = [output_of(spec) for spec in call.outputs.values() if spec is not None]
    eps, scalars = rows.eps, () if rows.bound is None else (rows.bound,)
    whole = len(rows.given) == len(call.inputs)

    def one(*given: torch.Tensor | None) -> torch.Tensor:
        y = make()
        launch(grid, 1, 1, *given, y, size, eps)
        return y

    def one_of_some(*given: torch.Tensor | None) -> torch.Tensor:
        y = make()
        launch(grid, 1, 1, *[tensor for tensor in given if tensor is not None], y, size, eps)
        return y

    def with_total(*given: torch.Tensor | None) -> Any:
        y, total = make(), make()
        launch(grid, 1, 1, *given, y, total, size, eps)
        return y, total

    def quantised(*given: torch.Tensor | None) -> Any:
        q, scale, total = (maker() for maker in makers)
        launch(
            grid,
            1,
            1,
            *given,
            q.view(torch.uint8) if bytewise else q,
            total,
            scale,
            size,
            eps,
            *scalars,
        )
        return q, scale, total

    make = makers[0]
    if rows.quantised is not None:
        bytewise = rows.quantised.is_floating_point
        return quantised
    if rows.added:
        return with_total
    return one if whole else one_of_some


def _bind_empty(_: None, call: CallSpec) -> Run:
    makers = [output_of(spec) for spec in call.outputs.values() if spec is not None]

    def run(*_given: torch.Tensor | None) -> Any:
        results = tuple(make() for make in makers)
        return results if len(results) > 1 else results[0]

    return run


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
        top, least = QUANTISED[rows.quantised]
        build = rows.build(
            f"{DEVICE}:normalize_rows",
            *(*TENSORS, "y", "total", "quanta", "rows", "eps", "bound"),
            warps=self.warps,
            pdl=self.dependent,
            BLOCK=next_power_of_2(rows.length),
            TILE=self.rows,
            PERSISTENT=self.per_multiprocessor is not None,
            POLICY=self.policy,
            DEPENDENT=self.dependent,
            TOP=top,
            LEAST=least,
            NATIVE=rows.quantised is not None and call.device.arch >= (8, 9),
            **rows.channels,
        )
        return _keeping_statistics(call, Entry(build.identity, build, self._bind))

    def _bind(self, launcher: Launcher, call: CallSpec) -> Run:
        rows = Rows.of(call)
        programs = -(-rows.count // self.rows)
        if self.per_multiprocessor is not None:
            programs = min(programs, self.per_multiprocessor * call.device.multiprocessors)
        return _run_rows(rows, call, launcher.on(call.device.index), programs, rows.count)


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
        # A program reads its weights once: of channels they are not those of all its rows.
        alone = bool(Rows.of(call).groups)
        others = (t for t in cls._tiles(default, call) if not (alone and t.per_multiprocessor))
        return [default, *(tile for tile in others if tile != default)]

    @classmethod
    def _default(cls, call: CallSpec) -> Tile:
        rows = Rows.of(call)
        tile = tile_for(rows.length, rows.x.dtype.itemsize, rows.vector)
        if rows.groups:
            # Its weights are other rows' too seldom to hold several rows for their sake, and two sums
            # one after the other want more warps to hide behind.
            tile = replace(tile, rows=max(1, tile.rows // 2))
        # Measured on an H200: 2048 x 4096 gains 6 %, one row 25 %, long runs neither lose nor gain.
        return replace(tile, dependent=call.device.arch >= (9, 0))

    @classmethod
    def _tiles(cls, default: Tile, call: CallSpec) -> list[Tile]:
        raise NotImplementedError(f"{cls.__name__} must define _tiles")


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
    """Rows of more than 1024 elements and at most 64 KiB (less where more is held with them): one to a
    program, read once."""

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
    def _build(cls, rows: Rows, fn: str, *arguments: str, **constexprs: int) -> TritonBuild:
        sizes = {"CHUNK": cls.chunk(rows), **constexprs}
        return rows.build(fn, *arguments, warps=cls.WARPS, pdl=False, **sizes)

    @classmethod
    def whole(cls, call: CallSpec) -> Entry:
        """One program for each row."""
        rows = Rows.of(call)
        if rows.x.numel == 0:
            return EMPTY
        arguments = (*TENSORS, "y", "total", "length", "eps")
        build = cls._build(rows, f"{DEVICE}:stream_rows", *arguments, **rows.channels)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            rows = Rows.of(call)
            return _run_rows(rows, call, launcher.on(call.device.index), rows.count, rows.length)

        return _keeping_statistics(call, Entry(build.identity, build, bind))

    @classmethod
    def split(cls, call: CallSpec) -> Entry:
        """One program for each chunk of each row."""
        rows = Rows.of(call)
        if rows.x.numel == 0:
            return EMPTY
        sums = cls._build(rows, f"{DEVICE}:chunk_sums", "x", "residual", "total", "sums")
        arguments = ("source", *TENSORS[2:], "y", "sums", "eps")
        scales = cls._build(rows, f"{DEVICE}:normalize_chunks", *arguments, **rows.channels)
        build = functools.partial(_both, sums, scales)
        entry = Entry(("split", sums.identity, scales.identity), build, cls._bind_split)
        return _keeping_statistics(call, entry)

    @classmethod
    def _bind_split(cls, launchers: tuple[Launcher, Launcher], call: CallSpec) -> Run:
        rows = Rows.of(call)
        add_up, scale = (launcher.on(call.device.index) for launcher in launchers)
        programs = rows.count * -(-rows.length // cls.chunk(rows))
        make, eps = output_of(rows.x), rows.eps
        shape = (programs, 2) if rows.centred else (programs,)
        make_sums = output_of(TensorSpec.contiguous_of(shape, torch.float32, rows.x.device))

        def with_residual(x: torch.Tensor, residual: torch.Tensor, *others: torch.Tensor) -> Any:
            y, total, sums = make(), make(), make_sums()
            add_up(programs, 1, 1, x, residual, total, sums)
            scale(programs, 1, 1, total, *others, y, sums, eps)
            return y, total

        def without(x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
            y, sums = make(), make_sums()
            add_up(programs, 1, 1, x, sums)
            present = [tensor for tensor in others if tensor is not None]
            scale(programs, 1, 1, x, *present, y, sums, eps)
            return y

        return with_residual if rows.added else without
