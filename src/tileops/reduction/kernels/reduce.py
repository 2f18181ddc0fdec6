"""Every reduction that gives one number, or two, for each kept index.

A contiguous tensor is read once: whole rows held in registers, parts of long rows, or parts of columns
where the axis has an inner stride. A part of columns, and of a very long row, is walked in tiles of one
vector to a thread, all of whose loads may be under way while a number a place is kept. A part becomes
a state of up to three numbers; where an axis has several parts, or several axes with kept ones between
them are reduced, further launches merge states, up to ``STATES`` at a time. Which parts there are
follows from the sizes that are reduced and the stride, so a row's result does not depend on how many
rows stand beside it, and no order of programs matters.

From Hopper on each launch starts while the stream's previous one ends, and lets the next start once it
has read: programs that wait from earlier on are spread unevenly among those that read, which on an H200
made a sum over rows of 4096 x 4096 take 19 µs, and not 12.
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
from tileops.reduction.kernels.softmax import grain_of, load_all

__all__ = ["Reduce"]

DEVICE = f"{__name__}_triton"

REGISTER_ROW = 16384
"""Elements of a row that one program holds."""
ROW_PART, PART_WARPS = 4096, 8
WALKED_ROW = 1 << 22
"""Elements from which a row's parts are walked, for which there are then parts enough."""
ROW_TILE_BYTES = 4096
"""Of a tile of several short rows."""
WALK_BYTES, LEAST_WALK = 4096, 2048
"""Of a tile of a walk along a row, at most and at least: a vector for each of 256 threads or 128."""
FULL, LEAST_TURNS = 0.875, 4
"""A row of narrow elements that fills a held tile to less than that is walked, in as many turns at least.
On an H200 2048 rows of 11008 halves took 9.0 µs out of the cache to count, and not 10.6, and 18.5 for
argmax, and not 30; rows of float32 took 1 to 5 % more."""
ROW_TURNS = (4, 16)
"""Tiles of such a walk, at least and at most: as few as leave no more parts than one launch merges."""
WIDE_BYTES = 2048
"""Of a tile of columns that is one row, where the inner axes have as many: threads then keep columns of
their own, and none waits for another's sum."""
WIDE_TURN_BYTES = 1 << 20
"""Of a tile of each program together, where there are turns enough: what keeps the memory busy."""
WIDE_TURNS = (8, 64)
NARROW_BYTES = 128
"""Of a row of other tiles of columns: eight lanes, so that few of a program's sums meet outside a warp."""
NARROW_TILE, NARROW_TURNS = 2048, 16
COLUMN_BYTES = 256
"""Contiguous bytes of a tile of columns that is held, at least, where the inner axes have as many."""
PART_BYTES = 16384
"""Of such a tile, at least, where the inner axes have as many."""
TURNS_HELD = 8
"""Walked tiles' worth that is held."""
STATES = 4096
"""States of a kept index that one launch merges."""
STATE_TILE = 1024
"""Elements of a tile of states, unless one kept index has more: many small programs wait less."""
ROW_STATES = 128
"""Of such a tile, where the states of a kept index are neighbours: rows may be few, and how many there
are is not to decide the machine code."""
HELD = 32
"""Elements that one thread holds."""


@dataclass(frozen=True)
class Scheme:
    """How an op reduces; see ``reduce_triton.py``. ``divisor``: of ``END``, from the elements."""

    lift: str
    fold: str
    end: str = "same"
    divisor: Callable[[CallSpec, int], float] = lambda call, n: 1.0
    order: int = 0
    """Of a power that products give."""

    @property
    def walks(self) -> bool:
        """Whether a place's state takes another element at little cost: not at two exponentials'."""
        return self.fold != "exp"

    @property
    def counts(self) -> bool:
        """Its states are integers."""
        return self.lift in ("nonzero", "zero") or self.fold == "first"

    @property
    def lanes(self) -> int:
        """Numbers of a state."""
        return {"exp": 2, "moments": 3, "first": 2}.get(self.fold, 1)


def _elements(call: CallSpec, n: int) -> float:
    return float(n)


def _freedom(call: CallSpec, n: int) -> float:
    correction = call.params.correction
    return max(float(n - (1 if correction is None else correction)), 0.0)


SCHEMES = {
    "SumFwdOp": Scheme("same", "sum"),
    "MeanFwdOp": Scheme("same", "sum", "mean", _elements),
    "ProdFwdOp": Scheme("same", "prod"),
    "AmaxFwdOp": Scheme("same", "max"),
    "AminFwdOp": Scheme("same", "min"),
    "AllFwdOp": Scheme("zero", "max", "untruth"),
    "AnyFwdOp": Scheme("nonzero", "max", "truth"),
    "CountNonzeroFwdOp": Scheme("nonzero", "sum"),
    "LogSumExpFwdOp": Scheme("same", "exp", "log"),
    "VarFwdOp": Scheme("same", "moments", "var", _freedom),
    "StdFwdOp": Scheme("same", "moments", "std", _freedom),
    "VarMeanFwdOp": Scheme("same", "moments", "var_mean", _freedom),
    "ArgmaxFwdOp": Scheme("same", "first", "place"),
    "ArgminFwdOp": Scheme("negative", "first", "place"),
}
NORMS = {
    0: Scheme("nonzero", "sum"),
    1: Scheme("abs", "sum"),
    2: Scheme("square", "sum", "root"),
    math.inf: Scheme("abs", "max"),
    -math.inf: Scheme("abs", "min"),
}
LEAST_ORDER, MOST_ORDER = 0.1, 100.0
MOST_PRODUCTS = 8


def _ord(call: CallSpec, n: int) -> float:
    return float(call.params.ord)


def _scheme(call: CallSpec) -> Scheme | None:
    if call.op != "VectorNormFwdOp":
        return SCHEMES[call.op]
    order = call.params.ord
    if order in NORMS or not LEAST_ORDER <= abs(order) <= MOST_ORDER:
        return NORMS.get(order)
    products = int(order) if order in range(2, MOST_PRODUCTS + 1) else 0
    return Scheme("power", "sum", "power", _ord, products)


def _source(call: CallSpec) -> TensorSpec:
    (spec,) = call.inputs.values()
    assert spec is not None
    return spec


def _results(call: CallSpec) -> list[TensorSpec]:
    return [spec for spec in call.outputs.values() if spec is not None]


def _reduced_axes(call: CallSpec) -> set[int]:
    rank, dim = len(_source(call).shape), call.params.dim
    empty_is_all = call.op not in ("AllFwdOp", "AnyFwdOp")  # as torch's functions differ
    if dim is None or (dim == () and empty_is_all):
        return set(range(rank))
    return {axis % max(rank, 1) for axis in (dim if isinstance(dim, tuple) else (dim,))}


@dataclass(frozen=True)
class Step:
    """Reduces the middle axis of ``[outer, n, inner]``."""

    outer: int
    n: int
    inner: int


def steps_of(shape: tuple[int, ...], axes: set[int]) -> list[Step]:
    """One step for each run of neighbouring reduced axes, the innermost first."""
    runs: list[tuple[int, bool]] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        gone = axis in axes
        if runs and runs[-1][1] == gone:
            runs[-1] = (runs[-1][0] * size, gone)
        else:
            runs.append((size, gone))
    steps, inner = [], 1
    for place in reversed(range(len(runs))):
        size, gone = runs[place]
        if gone:
            steps.append(Step(math.prod(n for n, _ in runs[:place]), size, inner))
        else:
            inner *= size
    return steps or [Step(inner, 1, 1)]


class Reduce(Kernel):
    """Tiles in registers, then states."""

    name = "triton_reduce"

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        if _scheme(call) is None:
            return f"ord {call.params.ord}: it has 0, inf, -inf and {LEAST_ORDER} to {MOST_ORDER}"
        x = _source(call)
        if x.dtype is torch.complex128:
            return "complex128 has no type in Triton"
        if not x.numel and any(spec.numel for spec in _results(call)):
            return "there is nothing to reduce, and yet a result"
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        return cls._entry(call, _planned(call).tile.warps)

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        warps = _planned(call).tile.warps
        others = {min(2 * warps, 16), max(warps // 2, 1)} - {warps}
        return [cls._entry(call, number) for number in (warps, *sorted(others))]

    @classmethod
    def _entry(cls, call: CallSpec, warps: int) -> Entry:
        plan = _planned(call)
        builds = (_read_build(call, plan, warps), *(_merge_build(call, m) for m in plan.merges))
        identity = tuple(build.identity for build in builds)
        return Entry(identity, functools.partial(load_all, *builds), _bind)


@dataclass(frozen=True)
class Merge:
    """One launch of ``reduce_states``: ``n`` states of each kept index become ``parts``."""

    kept: int
    n: int
    inner: int
    width: int
    last: bool

    @property
    def parts(self) -> int:
        return cdiv(self.n, self.width)

    @property
    def height(self) -> int:
        """Kept indices of a tile."""
        if self.inner == 1:
            return max(ROW_STATES // self.width, 1)
        return min(max(STATE_TILE // self.width, 1), 64, next_power_of_2(self.inner))

    @property
    def tiles(self) -> int:
        """Of the kept indices that are neighbours in memory, or all where the states are."""
        return cdiv(self.kept if self.inner == 1 else self.inner, self.height)

    @property
    def programs(self) -> int:
        outer = 1 if self.inner == 1 else self.kept // self.inner
        return outer * self.tiles * self.parts


@dataclass(frozen=True)
class Tile:
    """What a program of the first launch holds at a time."""

    turn: int
    """Elements along the axis."""
    turns: int
    """Tiles of a part."""
    kept: int
    """Rows, or columns."""
    warps: int

    @property
    def length(self) -> int:
        """Elements of a part along the axis."""
        return self.turn * self.turns


@dataclass(frozen=True)
class Plan:
    """The first launch, which reads ``step`` in parts, and those that merge."""

    step: Step
    tile: Tile
    packed: bool
    """Elements of ``step`` are four of the tensor's."""
    merges: tuple[Merge, ...]

    @property
    def rows(self) -> bool:
        """Whether it reads contiguous rows."""
        return self.step.inner == 1

    @property
    def parts(self) -> int:
        return cdiv(self.step.n, self.tile.length)

    @property
    def whole(self) -> bool:
        """Whether no tile has an element outside, however many rows there are."""
        kept = self.tile.kept
        across = kept == 1 if self.rows else self.step.inner % kept == 0
        return across and self.step.n % self.tile.length == 0


def _packed(call: CallSpec, step: Step) -> bool:
    """Whether four elements of a byte are read as one number, to see what is zero among them."""
    x, scheme = _source(call), _scheme(call)
    assert scheme is not None
    asks = scheme.counts and scheme.fold == "max"
    return asks and x.dtype.itemsize == 1 and step.inner == 1 and step.n % 4 == 0 and x.aligned


def _held(turn: int, kept: int) -> Tile:
    """One that is the whole part."""
    return Tile(turn, 1, kept, min(max(kept * turn // (32 * HELD), 4), 16))


def _walked(turn: int, turns: int, kept: int, size: int) -> Tile:
    """One of as many, a vector of which a thread takes from each."""
    return Tile(turn, turns, kept, max(kept * turn * size // 512, 1))


def _turns(wanted: int, bounds: tuple[int, int]) -> int:
    return min(max(next_power_of_2(wanted), bounds[0]), bounds[1])


def _rows(step: Step, size: int, scheme: Scheme) -> Tile:
    extent = next_power_of_2(step.n)
    if step.n <= REGISTER_ROW:
        bytes_a_turn = min(WALK_BYTES, next_power_of_2(step.n * size // LEAST_TURNS + 1) // 2)
        turn = bytes_a_turn // size
        if (
            scheme.walks
            and bytes_a_turn >= LEAST_WALK
            and cdiv(step.n, turn) * turn <= FULL * extent
        ):
            return _walked(turn, cdiv(step.n, turn), 1, size)
        return _held(extent, max(ROW_TILE_BYTES // size // extent, 1))
    if step.n < WALKED_ROW or not scheme.walks:
        return Tile(ROW_PART, 1, 1, PART_WARPS)
    turn = WALK_BYTES // size
    return _walked(turn, _turns(cdiv(step.n, turn * STATES), ROW_TURNS), 1, size)


def _columns(step: Step, size: int, scheme: Scheme) -> Tile:
    extent, width = next_power_of_2(step.n), next_power_of_2(step.inner)
    if not scheme.walks:
        columns = min(width, max(COLUMN_BYTES, PART_BYTES // extent) // size)
        turn = max(WALK_BYTES // size // columns, 1)
        return _held(min(turn * TURNS_HELD, extent), columns)
    # Comparisons take longer wide: all of int32 [4096, 4096] 24 µs on an H200, narrow 19.
    if width * size >= WIDE_BYTES and scheme.lift not in ("nonzero", "zero"):
        turns = _turns(cdiv(step.n * step.inner * size, WIDE_TURN_BYTES), WIDE_TURNS)
        return _walked(1, min(turns, extent), WIDE_BYTES // size, size)
    columns = min(width, NARROW_BYTES // size)
    turn = min(NARROW_TILE // size // columns, extent)
    return _walked(turn, min(NARROW_TURNS, extent // turn), columns, size)


def _planned(call: CallSpec) -> Plan:
    x, scheme = _source(call), _scheme(call)
    assert scheme is not None
    first, *rest = steps_of(x.shape, _reduced_axes(call))
    size = x.dtype.itemsize
    if packed := _packed(call, first):
        first, size = Step(first.outer, first.n // 4, 1), 4
    tile = (_rows if first.inner == 1 else _columns)(first, size, scheme)
    merges: list[Merge] = []
    states = [Step(first.outer, cdiv(first.n, tile.length), first.inner), *rest]
    for step in states:
        n = step.n
        while n > 1:
            width = min(next_power_of_2(n), STATES)
            merges.append(Merge(step.outer * step.inner, n, step.inner, width, False))
            n = merges[-1].parts
    if merges:
        merges[-1] = Merge(**{**vars(merges[-1]), "last": True})
    return Plan(first, tile, packed, tuple(merges))


def _wide(call: CallSpec) -> bool:
    return torch.float64 in (_source(call).dtype, _results(call)[0].dtype)


def _state_type(call: CallSpec, scheme: Scheme) -> torch.dtype:
    if scheme.counts:
        return torch.int64
    return torch.float64 if _wide(call) else torch.float32


def _shared(call: CallSpec, scheme: Scheme, last: bool) -> tuple[tuple[str, Any], ...]:
    """The compile-time arguments of every launch."""
    return (
        ("LAST", last),
        ("LIFT", scheme.lift),
        ("FOLD", scheme.fold),
        ("END", scheme.end),
        ("LANES", scheme.lanes),
        ("DEPENDENT", _dependent(call)),
    )


def _dependent(call: CallSpec) -> bool:
    """Whether a launch starts while the stream's previous one still ends, and waits for it there."""
    return call.device.arch >= (9, 0)


def _options(call: CallSpec) -> tuple[tuple[str, Any], ...]:
    return (("launch_pdl", True),) if _dependent(call) else ()


def _outputs(call: CallSpec) -> tuple[tuple[str, str], ...]:
    first, *more = _results(call)
    return ("y", pointer_to(first.dtype)), ("y2", pointer_to((more or [first])[0].dtype))


def _read_as(call: CallSpec, plan: Plan) -> torch.dtype:
    """What the elements that a kernel reads are to it."""
    dtype = _source(call).dtype
    return torch.int32 if plan.packed else torch.int64 if dtype is torch.complex64 else dtype


def _read_build(call: CallSpec, plan: Plan, warps: int) -> TritonBuild:
    x, scheme = _source(call), _scheme(call)
    assert scheme is not None
    complex_bits = x.dtype is torch.complex64
    pointer = pointer_to(_read_as(call, plan))
    states = pointer_to(_state_type(call, scheme))
    number = "fp64" if _wide(call) else "fp32"
    sizes: tuple[tuple[str, str], ...] = (("rows", "i64"), ("n_groups", "i64"))
    if not plan.rows:
        sizes = (("n", "i64"), ("inner_groups", "i64"), ("inner_tiles", "i32"))
    return TritonBuild(
        f"{DEVICE}:{'reduce_rows' if plan.rows else 'reduce_columns'}",
        (
            ("x", pointer),
            *_outputs(call),
            ("states", states),
            ("lanes", "i64"),
            *sizes,
            ("parts", "i32"),
            ("divisor", number),
        ),
        (
            ("GRAIN", grain_of(plan.step.n if plan.rows else plan.step.inner)),
            ("ROWS" if plan.rows else "COLUMNS", plan.tile.kept),
            ("TURN", plan.tile.turn),
            ("TURNS", plan.tile.turns),
            ("WHOLE", plan.whole),
            *_shared(call, scheme, not plan.merges),
            ("ORDER", scheme.order),
            ("MASK", 0x7FFFFFFF7FFFFFFF if complex_bits else 0),
            ("PACKED", plan.packed),
            ("CASTS", getattr(call.params, "dtype", None) not in (None, x.dtype)),
            ("WIDE", _wide(call)),
            # Rows read in turns or parts leave the cache to others, and take 1 to 3 % less from memory.
            ("POLICY", "evict_first" if plan.rows and plan.parts * plan.tile.turns > 1 else ""),
        ),
        warps,
        aligned=("x",) if x.aligned else (),
        options=_options(call),
    )


def _merge_build(call: CallSpec, merge: Merge) -> TritonBuild:
    scheme = _scheme(call)
    assert scheme is not None
    states = pointer_to(_state_type(call, scheme))
    return TritonBuild(
        f"{DEVICE}:reduce_states",
        (
            ("states", states),
            ("lanes", "i64"),
            ("into", states),
            ("into_lanes", "i64"),
            *_outputs(call),
            ("kept", "i64"),
            ("n", "i64"),
            ("tiles", "i32"),
            ("parts", "i32"),
            ("divisor", "fp64" if _wide(call) else "fp32"),
        ),
        (
            ("KEPT", merge.height),
            ("N", merge.width),
            ("ROWS", merge.inner == 1),
            *_shared(call, scheme, merge.last),
        ),
        4,
        options=_options(call),
    )


def _bind(launchers: tuple[Launcher, ...], call: CallSpec) -> Run:
    plan, scheme, x = _planned(call), _scheme(call), _source(call)
    assert scheme is not None
    makes = [output_of(spec) for spec in _results(call)]
    single = makes[0] if len(makes) == 1 else None
    if not x.numel:
        empty = tuple(makes)
        return lambda x: single() if single else tuple(make() for make in empty)
    launches = [launcher.on(call.device.index) for launcher in launchers]
    step, state = plan.step, _state_type(call, scheme)
    counts = [step.outer * plan.parts * step.inner, *(m.kept * m.parts for m in plan.merges)]
    buffers = [
        output_of(TensorSpec.contiguous_of((scheme.lanes * count,), state, x.device))
        for count in counts[:-1]
    ]
    divisor = scheme.divisor(call, x.numel // max(_results(call)[0].numel, 1))
    if plan.rows:
        grid = cdiv(step.outer, plan.tile.kept) * plan.parts
        scalars: tuple[Any, ...] = (step.outer, step.n // grain_of(step.n), plan.parts, divisor)
    else:
        tiles = cdiv(step.inner, plan.tile.kept)
        grid = step.outer * plan.parts * tiles
        groups = step.inner // grain_of(step.inner)
        scalars = (step.n, groups, tiles, plan.parts, divisor)
    read, merging = launches[0], list(zip(plan.merges, launches[1:], counts[1:], strict=True))
    kind = _read_as(call, plan)
    viewed = kind is not x.dtype

    def run(x: torch.Tensor) -> Any:
        outs = [make() for make in makes]
        y, y2 = outs[0], outs[-1]
        states = buffers[0]() if buffers else None
        read(grid, 1, 1, x.view(-1).view(kind) if viewed else x, y, y2, states, counts[0], *scalars)
        for number, (merge, launch, count) in enumerate(merging, 1):
            into = buffers[number]() if number < len(buffers) else None
            kept = merge.kept if merge.inner == 1 else merge.inner
            launch(
                merge.programs, 1, 1, states, counts[number - 1], into, count, y, y2,
                kept, merge.n, merge.tiles, merge.parts, divisor,
            )  # fmt: skip
            states = into
        return y if single else tuple(outs)

    return run
