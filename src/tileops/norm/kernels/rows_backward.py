"""The gradients of RMSNorm, LayerNorm and fused add RMSNorm on CUDA: ways by a row's length.

A row that fits in registers is read once with its gradient. The programs are as many as the device
runs at once; each adds the weight's gradient up over the rows that it takes, and a second kernel adds
the programs' sums in one order, so equal calls give equal bits on one kind of device. A row's own
gradient depends on no other row. Longer rows are streamed, and their columns summed by themselves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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

__all__ = ["HeldRows", "LongRows"]

DEVICE = "tileops.norm.kernels.rows_backward_triton"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HELD_BYTES = 16384
"""Longest row, in bytes, that a program holds together with its gradient and the weight's."""
HELD_ALONE = 16384
"""Longest row, in elements, that a program holds together with its gradient."""
ADDED = 8192
"""Numbers that a program of ``add_up`` reads at once: all shares of its columns on a device of 132
multiprocessors, since it waits for memory once a turn."""
CENTRED_BYTES = 32768
"""Longest such row, in bytes, where it is centred."""


@dataclass(frozen=True)
class BackwardRows:
    """What a call asks of these kernels."""

    call: CallSpec
    inputs: tuple[str, ...]
    """The kernels' names of the op's inputs, in order."""
    outputs: tuple[str, ...]
    """The kernels' names of the op's outputs, in order."""
    tensors: dict[str, TensorSpec]
    """What the call has, by the kernels' names."""
    count: int
    length: int
    eps: float
    centred: bool

    @classmethod
    def of(cls, call: CallSpec) -> BackwardRows:
        """Reads the call of one of the three ops."""
        inputs: tuple[str, ...] = ("grad", "x", "weight")
        outputs: tuple[str, ...] = ("grad_x", "grad_weight")
        if call.op == "LayerNormBwdOp":
            outputs = ("grad_x", "grad_weight", "grad_bias")
        elif call.op == "FusedAddRMSNormBwdOp":
            inputs = ("grad", "added", "x", "weight")
        given = zip(
            (*inputs, *outputs), (*call.inputs.values(), *call.outputs.values()), strict=True
        )
        tensors = {name: spec for name, spec in given if spec is not None}
        if "grad_x" not in tensors:
            tensors.pop("added", None)
        x, eps = tensors["x"], call.params.eps
        length = math.prod(getattr(call.params, "normalized_shape", x.shape[-1:]))
        return cls(
            call,
            inputs,
            outputs,
            tensors,
            count=x.numel // length if length else 0,
            length=length,
            eps=torch.finfo(torch.float32).eps if eps is None else float(eps),
            centred=call.op == "LayerNormBwdOp",
        )

    @property
    def summed(self) -> tuple[str, ...]:
        """The gradients that are sums over rows."""
        return tuple(name for name in ("weight", "bias") if f"grad_{name}" in self.tensors)

    @property
    def vector(self) -> int:
        """Elements that can be read at once: at most 16 bytes, and dividing a row."""
        if not all(spec.aligned for spec in self.tensors.values()):
            return 1
        return math.gcd(self.length, 16 // self.tensors["x"].dtype.itemsize)

    @property
    def unsupported(self) -> str | None:
        """Why no kernel here takes these types."""
        for spec in self.tensors.values():
            if spec.dtype not in DTYPES:
                accepted = ", ".join(str(dtype)[6:] for dtype in DTYPES)
                return f"{str(spec.dtype)[6:]} is not one of {accepted}"
        return None

    @property
    def dependent(self) -> bool:
        """Whether kernels may be launched while the stream's previous one still ends."""
        return self.call.device.arch >= (9, 0)

    def build(
        self,
        fn: str,
        arguments: tuple[str, ...],
        *,
        warps: int,
        options: tuple[tuple[str, Any], ...] = (),
        sums_are_results: bool = False,
        **constants: Any,
    ) -> TritonBuild:
        """Compile ``fn``, whose run-time arguments are ``arguments``; absent tensors are None."""
        kinds = {name: pointer_to(spec.dtype) for name, spec in self.tensors.items()}
        for name in self.summed:
            kinds[f"{name}_sums"] = kinds[f"grad_{name}"] if sums_are_results else "*fp32"
        kinds |= {"rows": "i64", "programs": "i32", "eps": "fp32"}
        kinds |= {"length": "i32" if self.length < 2**30 else "i64"}
        if "weight" in self.summed:
            kinds |= {"scales": "*fp32"} | ({"means": "*fp32"} if self.centred else {})
        signature = tuple((name, kinds[name]) for name in arguments if name in kinds)
        absent = {name: None for name in arguments if name not in kinds}
        wide = self.vector > 1
        constants |= {"N": self.length, "DEPENDENT": self.dependent}
        return TritonBuild(
            f"{DEVICE}:{fn}",
            signature,
            tuple({**absent, **constants}.items()),
            num_warps=warps,
            num_stages=1,
            aligned=tuple(name for name, kind in signature if wide and kind[0] == "*"),
            options=(*options, ("launch_pdl", True)) if self.dependent else options,
        )

    def add_up(self) -> TritonBuild:
        """The kernel that adds programs' shares."""
        arguments = ("weight_sums", "bias_sums", "grad_weight", "grad_bias", "programs")
        cols = self.columns_added
        return self.build("add_up", arguments, warps=4, COLS=cols, DEPTH=ADDED // cols)

    @property
    def columns_added(self) -> int:
        """Columns to a program of ``add_up``: rows of 32 bytes are read, more where rows are long."""
        return 16 if self.length >= 2048 else 8

    def makers(self) -> tuple[Callable[[], torch.Tensor] | None, ...]:
        """For each output of the op what allocates it, None where it is absent."""
        return tuple(
            output_of(self.tensors[name]) if name in self.tensors else None for name in self.outputs
        )

    def floats(self, *shape: int) -> Callable[[], torch.Tensor]:
        """Allocates float32 scratch memory."""
        device = self.tensors["x"].device
        return output_of(TensorSpec.contiguous_of(shape, torch.float32, device))


def _bind_empty(_: None, call: CallSpec) -> Run:
    rows = BackwardRows.of(call)
    makers = rows.makers()

    def run(*_inputs: torch.Tensor | None) -> Any:
        return tuple(None if make is None else make().zero_() for make in makers)

    return run


EMPTY = Entry(("tileops.norm", "gradients of rows without elements"), lambda: None, _bind_empty)
"""Serves what has no elements: sums over nothing are 0."""


def _all(*builds: TritonBuild) -> tuple[Launcher, ...]:
    return tuple(build() for build in builds)


def _entry(builds: list[TritonBuild], bind: Callable[..., Run]) -> Entry:
    identity = tuple(build.identity for build in builds)
    return Entry(identity, functools.partial(_all, *builds), bind)


def _tensors_of(
    rows: BackwardRows,
) -> Callable[[tuple[torch.Tensor | None, ...]], tuple[dict[str, Any], Any]]:
    """What gives, for the inputs of a call, every tensor by the kernels' names, and the outputs."""
    makers = rows.makers()

    def tensors(given: tuple[torch.Tensor | None, ...]) -> tuple[dict[str, Any], Any]:
        outputs = tuple(None if make is None else make() for make in makers)
        named = dict(zip((*rows.inputs, *rows.outputs), (*given, *outputs), strict=True))
        return named, outputs

    return tensors


ROW_TENSORS = ("grad", "x", "weight", "added", "grad_x")


# --- rows held in registers ---------------------------------------------------------------------

HELD_ARGUMENTS = (*ROW_TENSORS, "weight_sums", "bias_sums", "rows", "eps")


@dataclass(frozen=True)
class HeldTile:
    """How ``rows_backward`` is compiled and launched."""

    rows: int
    """Rows held at a time."""
    warps: int
    per_multiprocessor: int
    """Programs for each multiprocessor."""

    def entry(self, call: CallSpec) -> Entry:
        """``call`` served in this way."""
        rows = BackwardRows.of(call)
        if rows.tensors["x"].numel == 0:
            return EMPTY
        # Beyond 128 registers a thread, fewer programs are resident than are launched. (Several rows
        # to a program come to 136 at most, and would spill; so would rows that begin anywhere.)
        options: tuple[tuple[str, Any], ...] = ()
        if self.rows == 1 and rows.vector > 1:
            options = (("maxnreg", 128),)
        builds = [
            rows.build(
                "rows_backward",
                HELD_ARGUMENTS,
                warps=self.warps,
                options=options,
                BLOCK=next_power_of_2(rows.length),
                TILE=self.rows,
                VECTOR=rows.vector,
                CENTRED=rows.centred,
            )
        ]
        if rows.summed:
            builds.append(rows.add_up())
        return _entry(builds, self._bind)

    def _bind(self, launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
        rows = BackwardRows.of(call)
        first, *second = (launcher.on(call.device.index) for launcher in launchers)
        most = self.per_multiprocessor * call.device.multiprocessors
        programs = min(cdiv(rows.count, self.rows), most)
        tensors, summed, count, eps = _tensors_of(rows), rows.summed, rows.count, rows.eps
        passed = [name for name in ROW_TENSORS if name in rows.tensors]
        shares, grid = rows.floats(programs, rows.length), cdiv(rows.length, rows.columns_added)

        def run(*given: torch.Tensor | None) -> Any:
            named, outputs = tensors(given)
            sums = [shares() for _ in summed]
            first(programs, 1, 1, *[named[name] for name in passed], *sums, count, eps)
            if summed:
                results = [named[f"grad_{name}"] for name in summed]
                second[0](grid, 1, 1, *sums, *results, programs)
            return outputs

        return run


class HeldRows(Kernel):
    """Rows of at most 16 KiB, one or several to a program, read once."""

    name = "triton_backward_of_held_rows"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        rows = BackwardRows.of(call)
        most = HELD_BYTES // rows.tensors["x"].dtype.itemsize
        if rows.length > most:
            return f"rows of {rows.length} elements do not fit in registers (at most {most})"
        return rows.unsupported

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls.tiles(call)[0].entry(call)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [tile.entry(call) for tile in cls.tiles(call)]

    @classmethod
    def tiles(cls, call: CallSpec) -> list[HeldTile]:
        """Configurations worth timing, the default first: 32 bytes a thread, at 128 registers, and 64
        where one sum is all that is wanted, of short rows that need no masks."""
        rows = BackwardRows.of(call)
        block, size = next_power_of_2(rows.length), rows.tensors["x"].dtype.itemsize
        held = block * size
        warps = min(16, max(4, held // 1024))
        whole = rows.length == block and held <= 2048 and rows.vector * size == 16
        alone = whole and "grad_x" not in rows.tensors and len(rows.summed) == 1
        default = HeldTile(max(1, (8192 if alone else 4096) // held), warps, 16 // warps)
        wider = HeldTile(max(1, default.rows // 2), min(16, warps * 2), default.per_multiprocessor)
        more = HeldTile(default.rows, warps, default.per_multiprocessor * 2)
        return list(dict.fromkeys((default, wider, more)))


# --- longer rows --------------------------------------------------------------------------------

COLUMN_ARGUMENTS = ("grad", "x", "means", "scales", "weight_sums", "bias_sums", "rows")
COLUMNS, DEPTH = 64, 32
TURNS = 4
"""Tiles of rows to a program that sums columns, at least where rows are as many."""


class LongRows(Kernel):
    """Rows too long to hold the weight's gradient beside them: one to a program, held or read in
    chunks; columns summed by a kernel of their own."""

    name = "triton_backward_of_long_rows"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        rows = BackwardRows.of(call)
        most = HELD_BYTES // rows.tensors["x"].dtype.itemsize
        if rows.length <= most:
            return f"rows of {rows.length} elements fit in registers (more than {most})"
        return rows.unsupported

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        rows = BackwardRows.of(call)
        if rows.tensors["x"].numel == 0:
            return EMPTY
        constants: dict[str, Any] = {"VECTOR": rows.vector, "CENTRED": rows.centred}
        builds = [cls._row_build(rows, constants)]
        if rows.summed:
            alone = cls._programs(rows) == 1
            constants |= {"COLS": COLUMNS, "DEPTH": DEPTH, "sums_are_results": alone}
            builds.append(rows.build("column_sums", COLUMN_ARGUMENTS, warps=4, **constants))
            if not alone:
                builds.append(rows.add_up())
        return _entry(builds, cls._bind)

    @staticmethod
    def _holds(rows: BackwardRows) -> bool:
        most = CENTRED_BYTES // rows.tensors["x"].dtype.itemsize if rows.centred else HELD_ALONE
        return rows.length <= min(most, HELD_ALONE) and rows.vector > 1

    @classmethod
    def _row_build(cls, rows: BackwardRows, constants: dict[str, Any]) -> TritonBuild:
        tensors = (*ROW_TENSORS, "means", "scales")
        if cls._holds(rows):
            block = next_power_of_2(rows.length)
            constants = {**constants, "BLOCK": block}
            warps = min(32, block // 512)
            return rows.build("row_backward", (*tensors, "eps"), warps=warps, **constants)
        chunk = 2048 if rows.vector == 1 else 8192 // rows.tensors["x"].dtype.itemsize
        constants = {**constants, "CHUNK": chunk}
        return rows.build("stream_rows_backward", (*tensors, "length", "eps"), warps=8, **constants)

    @staticmethod
    def _programs(rows: BackwardRows) -> int:
        """That sum a block of columns."""
        most = cdiv(8 * rows.call.device.multiprocessors, cdiv(rows.length, COLUMNS))
        return min(cdiv(rows.count, DEPTH * TURNS), most)

    @classmethod
    def _bind(cls, launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
        rows = BackwardRows.of(call)
        of_row, *others = (launcher.on(call.device.index) for launcher in launchers)
        tensors, summed, count = _tensors_of(rows), rows.summed, rows.count
        scalars = (rows.eps,) if cls._holds(rows) else (rows.length, rows.eps)
        programs, blocks = cls._programs(rows), cdiv(rows.length, COLUMNS)
        facts = () if "weight" not in summed else ("means", "scales")[not rows.centred :]
        passed = [name for name in ROW_TENSORS if name in rows.tensors]
        shares, fact = rows.floats(programs, rows.length), rows.floats(count)
        grid = cdiv(rows.length, rows.columns_added)
        wants_rows = bool(facts) or "grad_x" in rows.tensors

        def run(*given: torch.Tensor | None) -> Any:
            named, outputs = tensors(given)
            of_rows = [fact() for _ in facts]
            if wants_rows:
                of_row(count, 1, 1, *[named[name] for name in passed], *of_rows, *scalars)
            if summed:
                columns, *add_up = others
                results = [named[f"grad_{name}"] for name in summed]
                sums = [shares() for _ in summed] if add_up else results
                columns(blocks, programs, 1, named["grad"], named["x"], *of_rows, *sums, count)
                if add_up:
                    add_up[0](grid, 1, 1, *sums, *results, programs)
            return outputs

        return run
