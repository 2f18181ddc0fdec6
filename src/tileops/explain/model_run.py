"""What Inductor made of a graph, and what a run showed: the second half of :mod:`tileops.explain.model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Line:
    """A line of the user's source."""

    file: str
    number: int
    function: str = ""
    text: str = ""


# ---- inductor ------------------------------------------------------------------------------------


@dataclass
class Group:
    """What Inductor's scheduler fused into one loop nest."""

    name: str
    """As Inductor counts: ``op0_op1``."""
    kind: str
    """As :attr:`Kernel.kind`."""
    parts: list[str]
    """Kind of each thing that was fused, in order."""
    nodes: list[str]
    buffers: list[str]


@dataclass
class Kernel:
    """One launch: a generated function, or a call of a library's."""

    name: str
    kind: str
    """``pointwise``, ``reduction``, ``template``, ``extern``, ``tileops``"""
    language: str
    """``triton``, ``cpp``, ``extern``"""
    groups: list[Group] | None
    """On the CPU one function may hold several loop nests. None: the code came from a cache."""
    nodes: list[str] | None
    """Of the ATen graph, that it computes."""
    lines: list[Line]
    """Of the user, that it computes."""
    code: str | None
    schedule: dict[str, Any]
    """GPU: XBLOCK, num_warps ...; CPU: loops (order and length), vector, parallel."""
    time_us: float | None = None
    """Of one warm launch: on a GPU the device's time, on the CPU the call's. Unknown unless measured."""
    bytes: int | None = None
    """Of the tensors that it reads and writes, each whole; a gather may touch less."""
    bandwidth_fraction: float | None = None
    """``bytes`` in ``time_us``, beside what the device's memory can do."""


@dataclass
class Unfused:
    """Neighbours that stayed apart."""

    relation: str
    """``passes``: a generated kernel writes what another reads, and nothing forbids one kernel for both;
    ``shares``: they have no more in common than what both read;
    ``steps``: two steps of one operation, which Inductor splits;
    ``opaque``: a kernel of a library or of an op is one of them or lies between: nothing fuses into it"""
    first: str
    second: str
    first_nodes: list[str]
    second_nodes: list[str]
    reason: str | None
    """None: torch gave none."""


@dataclass
class Buffer:
    name: str
    bytes: int | None
    reuses: str | None
    """The dead buffer whose memory it takes."""
    kept: bool = False
    """It leaves the graph: a result, or saved for backward."""


@dataclass
class Candidate:
    kernel: str
    time_us: float
    chosen: bool


@dataclass
class Inductor:
    """One graph through Inductor. Forward and backward each have one."""

    stage: str
    kernels: list[Kernel]
    unfused: list[Unfused] | None
    buffers: list[Buffer]
    """That it allocates, in order."""
    candidates: list[Candidate] | None
    code: str
    path: str | None
    key: str | None = None
    """Of Inductor's cache."""
    peak_bytes: int | None = None
    """Of its buffers, at the moment when most of them live; unknown with symbolic sizes."""
    run: GraphRun | None = None
    """Unknown unless measured."""


# ---- run -----------------------------------------------------------------------------------------


@dataclass
class CacheLookup:
    level: str
    """``dynamo``, ``aot_autograd``, ``fx_graph``, ``code``: machine code of Inductor's kernels;
    ``tileops``: of this library's"""
    outcome: str
    """``hit``, ``miss``, ``bypass``"""
    key: str | None
    """At ``dynamo`` the function: its guards are the key."""
    reason: str | None = None


@dataclass
class Phase:
    name: str
    seconds: float


@dataclass
class CudaGraphs:
    used: bool | None
    reason: str | None
    """Why they were skipped."""


@dataclass
class GraphRun:
    """One warm call of one compiled graph."""

    host_us: float
    """From entering its code to leaving it."""
    device_us: float | None
    """Its kernels on a GPU together; None on the CPU."""
    idle_us: float | None
    """A GPU's waiting between them: gaps that the host makes."""


@dataclass
class Measured:
    """One warm call, watched by torch's profiler."""

    call_us: float
    outside_us: float | None
    """Of it outside Inductor's graphs: guards, wrappers, and Python at breaks."""
    graph_calls: int
    """Calls of compiled graphs."""
    synchronizations: int
    """Times that Python waits for the device; on the CPU, where nothing waits, calls of ``item``."""
    device_us: float | None
    """Kernels on a GPU together; None on the CPU."""
    idle_us: float | None
    """A GPU's waiting between the first kernel and the last."""
    memory_gbps: float | None
    """What the device's memory can do, which fractions refer to."""


@dataclass
class Call:
    """One call of compiled code."""

    function: str
    seconds: float
    compiled: list[str]
    """Ids of the compilations that it caused."""
