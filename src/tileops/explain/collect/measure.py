"""What warm calls took: joined from a profile's spans to graphs, kernels and breaks."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tileops.explain import torch_private as private
from tileops.explain.model import (
    Break,
    Compilation,
    GraphRun,
    Inductor,
    Kernel,
    Measured,
    Report,
    Unknown,
)
from tileops.explain.torch_private import Profile, Span

CALL = "tileops.explain: call"
"""The span of one call, where a session makes it itself."""
_KERNEL = "tileops.explain: kernel "
_GRAPH = re.compile(r"## Call CompiledFxGraph (\S+) ##")
_REGION = "Torch-Compiled Region: "
_LOOKUP = "TorchDynamo Cache Lookup"
_COMPILING = "(dynamo_timed)"
_READS = "aten::_local_scalar_dense"
_WAITS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^(cuda|hip)Memcpy$")
UNMEASURED = "time of kernels, bandwidth, gaps, synchronisations"


@dataclass(eq=False)
class _Node:
    span: Span
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)

    @property
    def us(self) -> float:
        return self.span.end - self.span.start

    def below(self) -> Iterator[_Node]:
        for child in self.children:
            yield child
            yield from child.below()

    def within(self, test: Callable[[str], bool]) -> _Node | None:
        """The nearest that encloses it and passes."""
        at = self.parent
        while at is not None and not test(at.span.name):
            at = at.parent
        return at


def tree(spans: list[Span]) -> list[_Node]:
    """All spans in the order of their starts, each below the one of its thread that encloses it."""
    nodes = [_Node(span) for span in sorted(spans, key=lambda each: (each.start, -each.end))]
    open_: dict[int, list[_Node]] = {}
    for node in nodes:
        stack = open_.setdefault(node.span.thread, [])
        while stack and stack[-1].span.end < node.span.end:
            stack.pop()
        if stack:
            node.parent = stack[-1]
            stack[-1].children.append(node)
        stack.append(node)
    return nodes


@contextlib.contextmanager
def kernels_marked(report: Report) -> Iterator[None]:
    """Calls of the C++ kernels in this report leave spans: they have none of their own."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for lowered in _lowered(report):
            modules = private.generated_names(lowered.path) if lowered.path else None
            kernels = {each.name for each in lowered.kernels if each.language == "cpp"}
            for names in modules or ():
                for name in kernels & names.keys():
                    plain = names[name]
                    if not hasattr(plain, "__wrapped__"):
                        undo.append((names, name, plain))
                        names[name] = _marked(name, plain)
        yield
    finally:
        for names, name, plain in undo:
            names[name] = plain


def _marked(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain, assigned=(), updated=())
    def call(*args: Any) -> Any:
        with private.span(_KERNEL + name):
            return plain(*args)

    return call


def _lowered(report: Report) -> list[Inductor]:
    return [each for one in report.compilations for each in one.inductor]


def attach(report: Report, plain: Profile, marked: Profile | None = None) -> None:
    """Fill what ``plain`` shows, and from ``marked``, if there is one, the time of C++ kernels."""
    report.unknown = [each for each in report.unknown if each.what != UNMEASURED]
    if plain.why is not None:
        report.unknown.append(Unknown(UNMEASURED, plain.why))
        return
    nodes = tree(plain.host)
    calls = _calls(nodes)
    if not calls:
        why = "no measured call ran compiled code without compiling"
        report.unknown.append(Unknown(UNMEASURED, why))
        return
    middle = sorted(calls, key=lambda call: call.us)[len(calls) // 2]
    timeline = _Timeline(nodes, plain.device)
    inside = [node for node in nodes if _covers(middle, node)]
    report.measured = _measured(middle, inside, timeline)
    for one in report.compilations:
        _lookup(one, inside)
        _cuda_graphs(one, inside)
        for each in one.breaks:
            _break(one, each, inside)
    graphs = [n for call in calls for n in nodes if _covers(call, n) and _GRAPH.match(n.span.name)]
    timed = graphs
    if marked is not None and marked.why is None and not timeline.device:
        timed = [node for node in tree(marked.host) if _GRAPH.match(node.span.name)]
    for one in report.compilations:
        unnamed = [each for each in one.inductor if each.key is None]
        for lowered in one.inductor:
            # What Inductor's cache passed by has no key: its region tells it, if it is the only one.
            if lowered.key is not None or len(unnamed) == 1:
                own = [node for node in graphs if _is_of(node, one, lowered)]
                if own:
                    lowered.run = _run(own, timeline)
                _kernels(lowered, [node for node in timed if _is_of(node, one, lowered)], timeline)
    kernels = [kernel for each in _lowered(report) for kernel in each.kernels]
    if kernels and all(kernel.time_us is None for kernel in kernels):
        why = "the profile has no spans of kernels"
        report.unknown.append(Unknown("time of each kernel", why))


def _calls(nodes: list[_Node]) -> list[_Node]:
    """Warm calls: the session's own, or else outermost regions of compiled code."""
    made = [node for node in nodes if node.span.name == CALL]
    if not made:
        made = [
            node for node in nodes
            if node.span.name.startswith(_REGION)
            and node.within(lambda name: name.startswith(_REGION)) is None
        ]  # fmt: skip
    compiled_at = [node.span.start for node in nodes if _COMPILING in node.span.name]
    warm, before = [], 0.0
    for call in made:
        # In a user's loop the compiler runs ahead of the region that it made.
        cold = any(before <= at < call.span.end for at in compiled_at)
        if not cold and any(_is_compiled(each.span.name) for each in (call, *call.below())):
            warm.append(call)
        before = call.span.end
    return warm


def _is_compiled(name: str) -> bool:
    return name.startswith(_REGION) or _GRAPH.match(name) is not None


def _covers(call: _Node, node: _Node) -> bool:
    """By time: backward runs in a thread of its own on a GPU."""
    return call.span.start <= node.span.start and node.span.end <= call.span.end


def _key(node: _Node) -> str | None:
    match = _GRAPH.match(node.span.name)
    return match[1] if match else None


def _is_of(node: _Node, one: Compilation, lowered: Inductor) -> bool:
    if lowered.key is not None:
        return _key(node) == lowered.key
    region = node.within(lambda name: name.startswith(_REGION))
    return _key(node) == "None" and region is not None and region.span.name == _REGION + one.id


def _synchronizes(node: _Node, on_gpu: bool) -> bool:
    return bool(_WAITS.match(node.span.name)) if on_gpu else node.span.name == _READS


class _Timeline:
    """Kernels of a GPU in order, and which part of it each call of a graph launched.

    A launch and its kernel are told by the name and the time, which are the same number in both.
    """

    def __init__(self, nodes: list[_Node], device: list[Span]) -> None:
        self.device = sorted(device, key=lambda each: each.start)
        waiting: dict[tuple[str, float], list[Span]] = {}
        for span in reversed(self.device):
            waiting.setdefault((span.name, span.end - span.start), []).append(span)
        self.launched: list[tuple[_Node, Span | None]] = []
        for node in nodes:
            for kernel in node.span.kernels:
                spans = waiting.get(kernel)
                self.launched.append((node, spans.pop() if spans else None))

    def part(self, of: _Node) -> list[Span] | None:
        """None where nothing is known of a kernel."""
        own = [span for node, span in self.launched if node is of or _covers(of, node)]
        known = [span for span in own if span is not None]
        return sorted(known, key=lambda each: each.start) if len(known) == len(own) else None


def _idle(spans: list[Span] | None) -> float | None:
    if not spans:
        return None
    busy_until, idle = spans[0].end, 0.0
    for span in spans[1:]:
        idle += max(0.0, span.start - busy_until)
        busy_until = max(busy_until, span.end)
    return idle


def _device_us(nodes: list[_Node]) -> float | None:
    times = [us for node in nodes for _, us in node.span.kernels]
    return sum(times) if times else None


def _measured(call: _Node, inside: list[_Node], timeline: _Timeline) -> Measured:
    graphs = [node for node in inside if _GRAPH.match(node.span.name)]
    regions = [node for node in inside if node.span.name.startswith(_REGION)]
    on_gpu = bool(timeline.device)
    return Measured(
        call_us=call.us,
        outside_us=call.us - sum(node.us for node in graphs) if graphs else None,
        graph_calls=len(graphs or regions),
        synchronizations=sum(_synchronizes(node, on_gpu) for node in inside),
        device_us=_device_us(inside),
        idle_us=_idle(timeline.part(call)),
        memory_gbps=private.memory_gbps() if on_gpu else None,
    )


def _lookup(one: Compilation, inside: list[_Node]) -> None:
    """Each region follows the span in which Dynamo looked for it."""
    found, before = [], None
    for node in inside:
        if node.span.name == _LOOKUP:
            before = node
        elif node.span.name == _REGION + one.id and before is not None:
            found.append(before.us)
    if one.guards is not None and found:
        one.guards.lookup_us = median(found)


def _break(one: Compilation, at: Break, inside: list[_Node]) -> None:
    regions = [node for node in inside if node.span.name == _REGION + one.id]
    if not regions or len(one.breaks) != 1:
        return
    on_gpu = any(node.span.kernels for node in inside)
    waits, gaps, launches = 0, [], 0
    for region in regions:
        own = [
            n for n in region.below() if n.within(lambda name: name.startswith(_REGION)) is region
        ]
        outside = [n for n in own if n.within(lambda name: bool(_GRAPH.match(name))) is None]
        waits += sum(_synchronizes(node, on_gpu) for node in outside)
        launches += sum(node.span.name.startswith(_REGION) for node in own)
        ends = [node.span.end for node in own if _GRAPH.match(node.span.name)]
        looks = [node.span.start for node in own if node.span.name == _LOOKUP]
        if ends and looks and looks[0] >= ends[-1]:
            gaps.append(looks[0] - ends[-1])
    at.synchronizations, at.extra_launches = waits, launches
    at.python_us = sum(gaps) if gaps else None


def _cuda_graphs(one: Compilation, inside: list[_Node]) -> None:
    """Whether a warm call of its code launched recorded graphs."""
    keys = {each.key for each in one.inductor if each.key is not None}
    own = [node for node in inside if _key(node) in keys]
    if one.cuda_graphs is not None and one.cuda_graphs.used is None and own:
        launches = [node for node in inside if "GraphLaunch" in node.span.name]
        used = any(_covers(graph, launch) for graph in own for launch in launches)
        why = None if used else "a warm call launched none; torch says no reason"
        one.cuda_graphs.used, one.cuda_graphs.reason = used, why


def _run(calls: list[_Node], timeline: _Timeline) -> GraphRun:
    device = [_device_us([call, *call.below()]) for call in calls]
    idle = [_idle(timeline.part(call)) for call in calls]
    return GraphRun(median(call.us for call in calls), _median(device), _median(idle))


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


# ---- kernels -------------------------------------------------------------------------------------


def _kernels(lowered: Inductor, calls: list[_Node], timeline: _Timeline) -> None:
    """By order: the launches of a graph's code, and what a call of it left in the profile."""
    times: list[list[float]] = [[] for _ in lowered.kernels]
    for call in calls:
        spans = timeline.part(call)
        if not timeline.device:
            found = _on_host(lowered.kernels, call)
        else:
            found = [] if spans is None else _on_device(lowered.kernels, spans)
        for seen, time in zip(times, found, strict=bool(found)):
            if time is not None:
                seen.append(time)
    peak = private.memory_gbps() if timeline.device else None
    for kernel, seen in zip(lowered.kernels, times, strict=True):
        kernel.time_us = median(seen) if seen else None
        if kernel.time_us and kernel.bytes is not None and peak:
            kernel.bandwidth_fraction = kernel.bytes / (1e3 * kernel.time_us) / peak


def _on_host(kernels: list[Kernel], call: _Node) -> list[float | None]:
    left = list(call.children)
    found: list[float | None] = []
    for kernel in kernels:
        names = (_KERNEL + kernel.name, _operator(kernel.name))
        at = next((i for i, node in enumerate(left) if node.span.name in names), None)
        found.append(None if at is None else left[at].us)
        left = left if at is None else left[:at] + left[at + 1 :]
    return found


def _operator(name: str) -> str:
    """``aten::mm`` of ``extern_kernels.mm``, ``tileops::f`` of ``torch.ops.tileops.f.default``."""
    parts = name.removeprefix("torch.ops.").split(".")
    space = "aten" if parts[0] == "extern_kernels" else parts[0]
    return f"{space}::{parts[1]}" if len(parts) > 1 else name


def _on_device(kernels: list[Kernel], spans: list[Span]) -> list[float | None]:
    """A kernel of Triton has its name; what stands between two of them is a library's."""
    found: list[float | None] = []
    at = 0
    names = {kernel.name for kernel in kernels if kernel.language == "triton"}
    for number, kernel in enumerate(kernels):
        if kernel.language == "triton":
            own = next((i for i in range(at, len(spans)) if spans[i].name == kernel.name), None)
            found.append(None if own is None else spans[own].end - spans[own].start)
            at = at if own is None else own + 1
            continue
        end = next((i for i in range(at, len(spans)) if spans[i].name in names), len(spans))
        following = kernels[number + 1 : number + 2]
        alone = not following or following[0].language == "triton"
        before = number == 0 or kernels[number - 1].language == "triton"
        own_time = sum(span.end - span.start for span in spans[at:end])
        # Two calls of libraries in a row: nothing says where one ends.
        found.append(own_time if alone and before and end > at else None)
        at = end if alone else at
    return found
