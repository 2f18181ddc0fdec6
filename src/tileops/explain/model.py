"""What an explanation says: plain data, one object per stage. ``None`` means unknown, always.

An empty list says "there was none"; a view shows ``None`` as unknown with the reason that
:attr:`Report.unknown` gives. All values are JSON's.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tileops.explain.model_run import (
    Buffer,
    CacheLookup,
    Call,
    Candidate,
    CudaGraphs,
    GraphRun,
    Group,
    Inductor,
    Kernel,
    Line,
    Measured,
    Phase,
    Unfused,
)

__all__ = [
    "Break", "Buffer", "CacheLookup", "Call", "Candidate", "Compilation", "CudaGraphs", "Decomposition",
    "Dispatch", "DispatchEntry", "DispatchStep", "Failure", "Graph", "GraphRun", "Group", "Guard", "Guards",
    "Inductor", "Inlined", "Kept", "Kernel", "Line", "Loop", "Measured", "NearMiss", "Node",
    "Normalisation", "OpNode", "Partition", "Phase", "Recompile", "Report", "Rewrite", "Unfused",
    "Unknown",
]  # fmt: skip

EVERYTHING = "every stage"
"""What is unknown where nothing was compiled."""
FORMAT = 1
"""Goes up when a field changes its meaning or goes."""


@dataclass
class Node:
    """A node of an FX graph."""

    name: str
    opcode: str
    """``placeholder``, ``call_function``, ``call_method``, ``call_module``, ``get_attr``, ``output``"""
    target: str
    args: str
    """As the code writes them."""
    inputs: list[str] = field(default_factory=list)
    """Names of the nodes that it reads."""
    line: Line | None = None
    dtype: str | None = None
    """Short, as torch prints it: ``f32``, ``bf16``, ``i64``."""
    shape: list[int | str] | None = None
    """A string is a symbolic size."""
    stride: list[int | str] | None = None
    device: str | None = None
    bytes: int | None = None
    """Of its value; unknown with symbolic sizes and for what is no tensor."""


@dataclass
class Graph:
    stage: str
    """``capture``, ``joint``, ``forward``, ``backward``, ``inference``"""
    code: str
    nodes: list[Node] = field(default_factory=list)


# ---- capture -------------------------------------------------------------------------------------


@dataclass
class Inlined:
    """A Python function whose body became part of the graph."""

    function: str
    at: Line
    times: int


@dataclass
class Loop:
    """A loop that tracing unrolled."""

    at: Line
    times: int | None


@dataclass
class Break:
    """A place where a graph ends and Python takes over."""

    kind: str
    """``print``, ``item``, ``branch``, ``shape``: a size that depends on data, ``generator``, ``raise``,
    ``backward``, ``asked``: by ``graph_break()``, ``builtin``, ``skipped``, ``other``"""
    reason: str
    at: Line | None
    stack: list[Line]
    """Outermost first."""
    advice: str
    hints: list[str]
    """What torch itself suggests."""
    crossing: list[Node] | None = None
    """Tensors that leave the graph here, and so live in memory."""
    extra_launches: int | None = None
    """Calls of compiled graphs that a call makes for this break; counted where it is measured."""
    synchronizations: int | None = None
    """Times that a call waits here for the device; on the CPU, where nothing waits, calls of ``item``.
    Unknown unless measured."""
    python_us: float | None = None
    """From the end of the graph to the search for the next one, in one call. Unknown unless measured."""


# ---- guards --------------------------------------------------------------------------------------


@dataclass
class Guard:
    group: str
    """``tensor``, ``global``, ``identity``, ``shape``, ``other``"""
    kind: str
    """Torch's name: ``TENSOR_MATCH``, ``ID_MATCH`` ..."""
    source: str
    """What is checked, such as ``L['x']``."""
    code: str
    at: Line | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    """Of a tensor: dtype, device, size, stride, requires_grad. Of a size that may vary: dimension, and
    min and max, which it has where they are known."""


@dataclass
class Guards:
    guards: list[Guard]
    check_us: float | None
    """Of one check, measured by torch."""
    lookup_us: float | None = None
    """Of finding this version in a call, all checks included. Unknown unless measured."""


@dataclass
class Failure:
    """A guard that sent a call to the compiler again."""

    compile_id: str
    """Of the earlier compilation whose guard failed."""
    guard: str
    source: str | None
    property: str | None
    """``size[0]``, ``dtype``, ``value`` ..."""
    expected: str | None
    actual: str | None
    advice: str


@dataclass
class Recompile:
    failures: list[Failure]
    count: int
    """Compilations of this code so far, this one included."""
    limit: int | None
    gave_up: bool = False
    """The limit is passed: nothing was compiled, and such calls run without torch.compile."""


# ---- dispatcher ----------------------------------------------------------------------------------


@dataclass
class DispatchEntry:
    key: str
    kernel: str
    """``kernel``, ``fallthrough``, ``composite`` ..., as torch names what serves the key."""
    registered_at: str | None


@dataclass
class DispatchStep:
    key: str
    what: str
    """``kernel`` or ``fallthrough``"""
    excludes: list[str]


@dataclass
class Dispatch:
    """How torch's dispatcher serves an operator."""

    operator: str
    table: list[DispatchEntry]
    visited: list[DispatchStep] | None
    """By a call with plain tensors of the device seen, in the modes of the thread."""
    functional: list[DispatchStep] | None = None
    """By a call with tensors that torch wraps to make a graph functional."""


# ---- normalisation -------------------------------------------------------------------------------


@dataclass
class Rewrite:
    """An in-place line and its functional form."""

    at: Line | None
    before: str
    after: list[str]
    copy: bool
    """Whether a write back to an input remains."""


@dataclass
class Decomposition:
    at: Line | None
    before: list[str]
    after: list[str]


@dataclass
class Kept:
    """A value that backward needs."""

    name: str
    target: str
    bytes: int | None
    at: Line | None


@dataclass
class Partition:
    """Min-cut: what forward saves for backward, and what backward computes again."""

    saved: list[Kept]
    recomputed: list[Kept]
    saved_bytes: int | None
    save_all_bytes: int | None
    """If every value that backward reads were saved."""


@dataclass
class Normalisation:
    graphs: list[Graph]
    rewrites: list[Rewrite]
    copies: list[str]
    """``aten.copy_`` nodes that remain: writes to inputs."""
    decompositions: list[Decomposition]
    partition: Partition | None
    """None: no gradient is asked for, or unknown."""


# ---- tileops -------------------------------------------------------------------------------------


@dataclass
class OpNode:
    op: str
    parameters: str
    node: str | None
    """Its node in the captured graph; None for an eager call."""
    at: Line | None
    target: str | None
    decided_by: str | None
    kernel: str | None
    refused: dict[str, str]
    """Kernel → why it refused."""
    identity: str | None
    plan_hit: bool | None
    substituted_from: list[Line]
    """The user's plain PyTorch that the backend "tileops" replaced by this op."""
    fused_into: str | None
    """The kernels that compute it with its neighbours."""
    not_fused: str | None
    """Why it stays a kernel of its own."""


@dataclass
class NearMiss:
    """Plain PyTorch that is an op of this library, or nearly is one, and stays what it is."""

    op: str
    at: Line | None
    reason: str
    means_it: bool
    """It means the op, and rewriting it would not pay or is not wanted; else it means something else."""


# ---- the whole -----------------------------------------------------------------------------------


@dataclass
class Compilation:
    """One compilation of one frame. Python calls a part of a function after a break a frame too."""

    id: str
    """As torch counts: ``frame/compilation``, such as ``0/1``."""
    function: str
    at: Line | None
    resumes: bool
    """It is what follows a graph break."""
    capture: Graph | None
    """None: nothing was captured."""
    inlined: list[Inlined] | None = None
    loops: list[Loop] | None = None
    breaks: list[Break] = field(default_factory=list)
    guards: Guards | None = None
    recompile: Recompile | None = None
    normalisation: Normalisation | None = None
    inductor: list[Inductor] = field(default_factory=list)
    caches: list[CacheLookup] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    cuda_graphs: CudaGraphs | None = None
    ops: list[OpNode] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    error: str | None = None


@dataclass
class Unknown:
    """What could not be known, and why."""

    what: str
    why: str


@dataclass
class Report:
    title: str = ""
    torch: str = ""
    device: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    compilations: list[Compilation] = field(default_factory=list)
    dispatch: list[Dispatch] = field(default_factory=list)
    calls: list[Call] | None = None
    """None: the calls were the user's own."""
    eager_ops: list[OpNode] = field(default_factory=list)
    caches: list[CacheLookup] = field(default_factory=list)
    """Of this library's own kernels."""
    measured: Measured | None = None
    """None: nothing was measured."""
    unknown: list[Unknown] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Text of the user's files that lines point to."""
    result: Any = field(default=None, repr=False, compare=False)
    """What the explained function returned; not in JSON."""

    @property
    def nothing(self) -> str | None:
        """Why nothing was compiled, so that there is nothing to show; None where something was."""
        return next((each.why for each in self.unknown if each.what == EVERYTHING), None)

    @property
    def breaks(self) -> list[Break]:
        return [each for one in self.compilations for each in one.breaks]

    @property
    def recompiles(self) -> list[Compilation]:
        return [one for one in self.compilations if one.recompile is not None]

    @property
    def graphs(self) -> list[Graph]:
        return [one.capture for one in self.compilations if one.capture is not None]

    @property
    def unfused(self) -> list[Unfused]:
        """Values that go through memory from one generated kernel to another; what else stayed apart
        is in :attr:`Inductor.unfused`."""
        lowered = [each for one in self.compilations for each in one.inductor]
        return [u for each in lowered for u in each.unfused or () if u.relation == "passes"]

    def plain(self) -> dict[str, Any]:
        """As dictionaries and lists."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "result"]
        return {"format": FORMAT, **{name: _plain(getattr(self, name)) for name in names}}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.plain(), indent=indent)

    def show(self, *stages: str, width: int | None = None) -> None:
        """Print it for a terminal: all, or the summary and ``stages`` such as ``"breaks"``."""
        from tileops.explain.views.terminal import render

        text = render(self, *stages, width=width)
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page."""
        from tileops.explain.views.html import render

        Path(path).write_text(render(self), encoding="utf-8", errors="backslashreplace")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value
