"""Matrix product with an epilogue: in the library's own epilogue where it has that one, after its product
in one kernel, or in the epilogue of a Triton product.

Which of them serves is decided by declared times, measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tileops.authoring import CallSpec, Entry, Kernel, Run
from tileops.gemm.kernels.gemm import Epilogue, TritonGEMM, bandwidth_of, cost_of, sizes
from tileops.lib.launch import (
    Launcher,
    TritonBuild,
    cdiv,
    descriptor_of,
    next_power_of_2,
    pointer_to,
)

__all__ = [
    "CublasEpilogue", "CublasThenFinish", "PersistentEpilogue", "PersistentTile", "TritonEpilogue",
    "epilogue_of", "row_blocks",
]  # fmt: skip

DEVICE = f"{__name__}_triton"

SHARE = {"cublas_epilogue": 1.0, "persistent_epilogue": 0.95, "triton_epilogue": 0.94}
"""Of the speed of the product alone: the library's, the Triton kernel's for the last. Measure with
`python -m benchmarks.epilogue` and write the medians here."""
FEW_TILES = 0.82
"""That share of the persistent kernel for less than one round of tiles: nothing is fetched while a tile is
finished."""
ROW_BLOCK = 2048
"""Columns that one program of a kernel over a matrix takes at most."""


def epilogue_of(call: CallSpec) -> Epilogue:
    """What a call does to each element."""
    bias, residual, kept = (
        None if spec is None else spec.dtype
        for spec in (
            call.inputs["bias"],
            call.inputs["residual"],
            call.outputs["preactivation"],
        )
    )
    narrow = call.spec("d").dtype.itemsize == 2
    return Epilogue(call.params.activation, bias, residual, kept, call.params.scale != 1.0, narrow)


def _outputs(call: CallSpec) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
    """Allocates ``d`` and ``preactivation``."""
    d, kept = call.spec("d"), call.outputs["preactivation"]

    def make() -> tuple[torch.Tensor, torch.Tensor | None]:
        return (
            torch.empty(d.shape, dtype=d.dtype, device=d.device),
            None if kept is None else torch.empty(kept.shape, dtype=kept.dtype, device=kept.device),
        )

    return make


def _rest(call: CallSpec) -> Callable[..., tuple[Any, ...]]:
    """The arguments of an epilogue's signature, of ``bias, residual, kept``."""
    scale = () if call.params.scale == 1.0 else (call.params.scale,)

    def rest(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
        return (*(t for t in tensors if t is not None), *scale)

    return rest


def _bytes(call: CallSpec, *names: str) -> int:
    found = (call.inputs.get(n) or call.outputs.get(n) for n in names)
    return sum(spec.numel * spec.dtype.itemsize for spec in found if spec is not None)


def _beside(call: CallSpec) -> float:
    """Microseconds of what an epilogue moves beside the product's own result."""
    return _bytes(call, "residual", "preactivation") / bandwidth_of(call) * 1e-6


# ---- the library ---------------------------------------------------------------------------------


class CublasEpilogue(Kernel):
    """``addmm``, alone or with an activation, whose epilogue cuBLAS has: ReLU, and GELU by tanh."""

    name = "cublas_epilogue"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        params = call.params
        if call.inputs["bias"] is None:
            return "it needs a bias"
        if params.activation not in (None, "relu", "gelu_tanh"):
            return f"the library has no {params.activation}"
        if not hasattr(torch, "_addmm_activation") and params.activation:
            return "this torch has no _addmm_activation"
        if params.scale != 1.0 or call.inputs["residual"] is not None:
            return "the library has neither scale nor residual behind an activation"
        if call.outputs["preactivation"] is not None:
            return "the library does not keep the preactivation"
        if call.spec("d").dtype is not call.spec("a").dtype:
            return "the library rounds to the inputs' dtype"
        if call.spec("a").dtype.itemsize != 2:
            return "float32 and float64 have no such epilogue"
        return None

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        return cost_of(call, "cublas") / SHARE["cublas_epilogue"]

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        facts = (bool(call.params.trans_a), bool(call.params.trans_b), call.params.activation)
        return Entry(("aten.addmm", *facts), lambda: _addmm(*facts))


def _addmm(trans_a: bool, trans_b: bool, activation: str | None) -> Run:
    def run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, _: None) -> Any:
        left, right = a.t() if trans_a else a, b.t() if trans_b else b
        if activation is None:
            return torch.addmm(bias, left, right), None
        gelu = activation == "gelu_tanh"
        return torch._addmm_activation(bias, left, right, use_gelu=gelu), None

    return run


def row_blocks(columns: int) -> tuple[int, int]:
    """Columns of one program of a kernel over the rows of a matrix, and programs for a row."""
    block = min(next_power_of_2(columns), ROW_BLOCK)
    return block, cdiv(columns, block)


class CublasThenFinish(Kernel):
    """The library's product, then one kernel over its result. Where the result is wider than the inputs, so
    is the product; a preactivation that is kept is the product itself."""

    name = "cublas_then_finish"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        return "float64: it computes in float32" if call.spec("a").dtype is torch.float64 else None

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        moved = _bytes(call, "d") * 2 + _bytes(call, "residual")
        moved += 0 if _keeps_product(call) else _bytes(call, "preactivation")
        return cost_of(call, "cublas") + 2.0 + moved / bandwidth_of(call) * 1e-6

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        epilogue = epilogue_of(call)
        if _keeps_product(call):
            epilogue = replace(epilogue, bias=None, kept=None)
        block, _ = row_blocks(call.spec("d").shape[1])
        build = TritonBuild(
            f"{DEVICE}:finish_rows",
            signature=(
                ("product", pointer_to(_product_dtype(call))),
                ("d", pointer_to(call.spec("d").dtype)),
                *epilogue.signature,
                ("N", "i32"),
                ("blocks", "i32"),
            ),
            constexprs=(("BLOCK", block), *epilogue.constexprs),
            num_warps=8 if block >= 2048 else 4,
            aligned=("product", "d", *(["N"] if call.spec("d").shape[1] % 16 == 0 else [])),
        )
        return Entry(build.identity, build, _bind_finish)


def _product_dtype(call: CallSpec) -> torch.dtype:
    return torch.promote_types(call.spec("a").dtype, call.spec("d").dtype)


def _keeps_product(call: CallSpec) -> bool:
    """The preactivation is what the library's product leaves."""
    kept = call.outputs["preactivation"]
    return kept is not None and kept.dtype is _product_dtype(call)


def _bind_finish(launcher: Launcher, call: CallSpec) -> Run:
    rows, columns, _ = sizes(call)
    launch, make, rest = launcher.on(call.device.index), _outputs(call), _rest(call)
    trans_a, trans_b = bool(call.params.trans_a), bool(call.params.trans_b)
    product = _product_dtype(call)
    wider = () if product is call.spec("a").dtype else (product,)
    keeps, (_, blocks) = _keeps_product(call), row_blocks(columns)

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        d, kept = make()
        if rows and columns:
            left, right = a.t() if trans_a else a, b.t() if trans_b else b
            if keeps:
                assert kept is not None
                if bias is None:
                    torch.mm(left, right, out=kept)
                else:
                    torch.addmm(bias, left, right, out=kept)
                launch(rows * blocks, 1, 1, kept, d, *rest(residual), columns, blocks)
            else:
                inner = torch.mm(left, right, *wider)
                more = rest(bias, residual, kept)
                launch(rows * blocks, 1, 1, inner, d, *more, columns, blocks)
        return d, kept

    return run


# ---- Triton --------------------------------------------------------------------------------------


class TritonEpilogue(TritonGEMM):
    """Any sizes and layouts; float32 products are exact float32 ones."""

    name = "triton_epilogue"

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        return cost_of(call, "triton") / SHARE[cls.name] + _beside(call)

    @classmethod
    def epilogue(cls, call: CallSpec) -> Epilogue:
        return epilogue_of(call)

    @classmethod
    def bind(cls, multiply: Callable[..., None], call: CallSpec) -> Run:
        make, rest = _outputs(call), _rest(call)

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            d, kept = make()
            multiply(a, b, d, *rest(bias, residual, kept))
            return d, kept

        return run


@dataclass(frozen=True)
class PersistentTile:
    """One way to run the persistent kernel."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    parts: int = 1
    """In which the tile is finished."""
    beside: int = 1
    """Programs on one multiprocessor: while one finishes a tile another multiplies."""
    group: int = 8

    def shared(self, itemsize: int, ends: int) -> int:
        """Bytes of shared memory: the stages, and ``ends`` bytes for each element of a part."""
        stages = (self.rows + self.columns) * self.depth * itemsize * self.stages
        return stages + self.rows * self.columns // self.parts * ends + 1024


_ALONE = PersistentTile(128, 128, 64, 8, 4, parts=2)
"""The fastest where a multiprocessor gets one tile at most."""
_WITH_RESIDUAL = PersistentTile(128, 256, 64, 8, 3, parts=2)
"""The fastest where a residual is fetched: two programs beside each other wait for it at the same time."""
PERSISTENT_TILES = (
    PersistentTile(128, 128, 64, 4, 3, parts=2, beside=2),
    _WITH_RESIDUAL,
    PersistentTile(128, 256, 64, 8, 4, parts=2),
    PersistentTile(256, 128, 64, 8, 3),
    _ALONE,
    PersistentTile(128, 128, 128, 8, 3, parts=2),
)


def _few_tiles(call: CallSpec) -> bool:
    """Fewer than two programs on each multiprocessor take at once."""
    rows, columns, _ = sizes(call)
    return cdiv(rows, 128) * cdiv(columns, 128) < 2 * call.device.multiprocessors


class PersistentEpilogue(Kernel):
    """Tiles fetched and written by the bulk copy engine, programs that stay for many of them."""

    name = "persistent_epilogue"
    arch = (9, 0)

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        reason = TritonGEMM.refuses(call)
        if reason:
            return reason
        if call.spec("a").dtype.itemsize != 2:
            return "float32 products are not for tensor cores"
        if min(sizes(call)) == 0:
            return "a call without elements"
        for name in ("a", "b", "residual", "d", "preactivation"):
            spec = call.inputs.get(name) or call.outputs.get(name)
            if spec is None:
                continue
            if not spec.aligned or spec.shape[1] * spec.dtype.itemsize % 16:
                return f"rows of {name} do not begin at multiples of 16 bytes"
        if sizes(call)[0] <= 64:
            return "so few rows leave most multiprocessors without a tile"
        return None

    @classmethod
    def cost(cls, call: CallSpec) -> float:
        share = FEW_TILES if _few_tiles(call) else SHARE[cls.name]
        return cost_of(call, "cublas") / share + _beside(call)

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls.entry_of(call, cls.tiles(call)[0])

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        return [cls.entry_of(call, tile) for tile in cls.tiles(call)]

    @classmethod
    def tiles(cls, call: CallSpec) -> list[PersistentTile]:
        """The tiles worth timing that fit the device's shared memory, the default first."""
        itemsize, room = call.spec("a").dtype.itemsize, call.device.shared_memory or 227 << 10
        # What is written and what is read pass through it.
        ends = call.spec("d").dtype.itemsize + (itemsize if call.inputs["residual"] else 0)
        fitting = [tile for tile in PERSISTENT_TILES if tile.shared(itemsize, ends) <= room]
        best = _ALONE if _few_tiles(call) else _WITH_RESIDUAL if call.inputs["residual"] else None
        return sorted(fitting, key=lambda tile: tile != best)

    @classmethod
    def entry_of(cls, call: CallSpec, tile: PersistentTile) -> Entry:
        """The entry of one tile."""
        build = _persistent(call, tile)

        def bind(launcher: Launcher, call: CallSpec) -> Run:
            return _bind_persistent(launcher, call, tile)

        return Entry((*build.identity, tile.beside), build, bind)


def _persistent(call: CallSpec, tile: PersistentTile) -> TritonBuild:
    trans_a, trans_b = bool(call.params.trans_a), bool(call.params.trans_b)
    epilogue = epilogue_of(call)
    part = (tile.rows, tile.columns // tile.parts)
    blocks = {"residual": part, "kept": part}
    own = call.spec("a").dtype
    left, right = (tile.rows, tile.depth), (tile.depth, tile.columns)
    aligned = ["N"] if call.spec("d").shape[1] % 16 == 0 else []
    aligned += ["bias"] if epilogue.bias and call.spec("bias").aligned else []
    return TritonBuild(
        f"{DEVICE}:persistent",
        signature=(
            ("a", descriptor_of(own, left[::-1] if trans_a else left)),
            ("b", descriptor_of(own, right[::-1] if trans_b else right)),
            ("d", descriptor_of(call.spec("d").dtype, part)),
            *(
                (name, descriptor_of(own, blocks[name]) if name in blocks else kind)
                for name, kind in epilogue.signature
            ),
            ("M", "i32"),
            ("N", "i32"),
            ("K", "i32"),
            ("programs", "i32"),
        ),
        constexprs=(
            ("TRANS_A", trans_a),
            ("TRANS_B", trans_b),
            ("ROWS", tile.rows),
            ("COLUMNS", tile.columns),
            ("DEPTH", tile.depth),
            ("GROUP", tile.group),
            ("PARTS", tile.parts),
            *epilogue.constexprs,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=tuple(aligned),
        options=(("maxnreg", 255),),  # few programs fit beside each other: spend their registers
    )


def _bind_persistent(launcher: Launcher, call: CallSpec, tile: PersistentTile) -> Run:
    rows, columns, depth = sizes(call)
    launch, make, rest = launcher.on(call.device.index), _outputs(call), _rest(call)
    tiles = cdiv(rows, tile.rows) * cdiv(columns, tile.columns)
    programs = min(tiles, call.device.multiprocessors * tile.beside)

    def run(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        d, kept = make()
        more = rest(bias, residual, kept)
        launch(programs, 1, 1, a, b, d, *more, rows, columns, depth, programs)
        return d, kept

    return run
