"""From the list of events to the compilations of a report."""

from __future__ import annotations

import copy
import linecache
import re
from pathlib import Path

from tileops.engine.record import Event as Recorded
from tileops.explain import torch_private as private
from tileops.explain.collect.capture import crossing, read_break, read_inlined
from tileops.explain.collect.dispatch import read_dispatch
from tileops.explain.collect.events import Event, Events
from tileops.explain.collect.graphs import UserLines, read_graph
from tileops.explain.collect.guards import read_guards, read_recompile
from tileops.explain.collect.inductor import Lowered, read_inductor
from tileops.explain.collect.loops import read_loops
from tileops.explain.collect.measure import UNMEASURED
from tileops.explain.collect.nodes import read_eager, read_nodes
from tileops.explain.collect.normalise import STAGES, read_normalisation
from tileops.explain.collect.run import read_caches, read_cuda_graphs, read_own_caches, read_phases
from tileops.explain.model import EVERYTHING, Compilation, Graph, Line, Report, Unknown

_RESUME = re.compile(r"^torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)$")


def assemble(
    report: Report, heard: Events, *, cuda_graphs: bool | None, versions: int, raised: bool
) -> None:
    """Fill ``report`` with what was seen. ``versions``: compiled ones that the function had before;
    ``raised``: the calls ended so."""
    recorded = heard.recorded
    groups = _by_compilation(heard.seen)
    pieces = [(_compilation(group, cuda_graphs, heard.told_rounds), group) for group in groups]
    for one, group in pieces:
        one.caches = read_caches(group, one, heard.started)
    known = [
        (one, group) for one, group in pieces
        if one.capture or one.breaks or one.error or one.recompile
    ]  # fmt: skip
    report.compilations = [one for one, _ in known]
    _after_breaks(report.compilations)
    for one, group in known:
        _whole_paths(one)
        _plain_names(one)
        lowered = [e.data["graph"] for e in _of(group, "inductor_post_grad_graph")]
        read_nodes(one, recorded, _rewriting(group, recorded), lowered)
    graphs = [
        g for one in report.compilations if one.normalisation for g in one.normalisation.graphs
    ]
    captured = [one.capture for one in report.compilations if one.capture]
    report.dispatch = read_dispatch([*captured, *graphs])
    report.eager_ops = read_eager(recorded, report.compilations)
    report.caches = read_own_caches(recorded)
    report.sources = _sources(report)
    report.unknown = _unknown(report)
    if not report.compilations:
        why = _nothing(traced=bool(groups), versions=versions, raised=raised)
        report.unknown.insert(0, Unknown(EVERYTHING, why))


def _by_compilation(events: list[Event]) -> list[list[Event]]:
    """Events of each compilation. After ``torch._dynamo.reset`` an id is used again."""
    current: dict[str, list[Event]] = {}
    groups: list[list[Event]] = []
    for event in events:
        if event.place is None:
            continue
        starts = event.kind in ("recompile_reasons", "dynamo_start")
        group = current.get(event.place)
        begun = group and any(e.kind not in ("recompile_reasons", "dynamo_start") for e in group)
        again = group and any(e.kind == event.kind for e in group)
        if group is None or (starts and (begun or again)):
            group = current[event.place] = []
            groups.append(group)
        group.append(event)
    return groups


def _rewriting(group: list[Event], recorded: list[Recorded]) -> list[Recorded]:
    """What the backend "tileops" did: between the captured graph and what torch tells next of it."""
    numbers = [i for i, event in enumerate(group) if event.kind == "dynamo_output_graph"]
    if not numbers:
        return []
    start = group[numbers[-1]].recorded
    end = next((event.recorded for event in group[numbers[-1] + 1 :]), len(recorded))
    kinds = ("inlined", "substituted", "fused", "declined", "near miss")
    return [event for event in recorded[start:end] if event.kind in kinds]


def _of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def _compilation(events: list[Event], cuda_graphs: bool | None, told_rounds: bool) -> Compilation:
    place = events[0].place or ""
    metrics = _of(events, "compilation_metrics")
    told = metrics[-1].data if metrics else {}
    for event in _of(events, "recompile_reasons"):  # where no version is made, nobody else tells
        told = {**told, **{k: told.get(k) or v for k, v in event.data["code"].items()}}
    function = told.get("co_name") or ""
    resumed = _RESUME.match(function)
    file, number = told.get("co_filename"), told.get("co_firstlineno")
    function = resumed["name"] if resumed else function
    at = (
        Line(file, number, function, linecache.getline(file, number).strip())
        if file and number
        else None
    )
    one = Compilation(place, function, at, bool(resumed), None)
    last = max(event.attempt for event in events)
    final = [event for event in events if event.attempt == last]
    lines = UserLines()
    if graphs := _of(final, "dynamo_output_graph"):
        one.capture = _graph("capture", graphs[-1], lines)
    # What was traced for a graph that was then given up is in none.
    traced = final if one.capture else []
    one.inlined = read_inlined(_of(traced, f"log:{private.TRACE_CALL}"))
    rounds = _of(traced, "round") if told_rounds else None
    one.loops = read_loops(_of(traced, f"log:{private.TRACE_SOURCE}"), rounds)
    seen = {}
    for event in _of(events, "dynamo_graph_break_reason"):
        found = read_break(event)
        seen[found.kind, found.at.file if found.at else "", found.at.number if found.at else 0] = (
            found
        )
    one.breaks = list(seen.values())
    if guards := _of(events, "dynamo_cpp_guards_str"):
        one.guards = read_guards(guards[-1])
    if reasons := _of(events, "recompile_reasons"):
        failed = told.get("fail_reason") or ""
        one.recompile = read_recompile(reasons[-1], int(place.rsplit("/", 1)[-1]), failed)
    stages = {event.kind: event for event in events if event.kind in STAGES and event.text}
    if stages:
        made = [_graph(STAGES[kind], event, lines) for kind, event in stages.items()]
        one.normalisation = read_normalisation(made, one.capture)
    _lowered(one, events, lines)
    one.phases = read_phases(events)
    gpu = one.capture is not None and any(
        (node.device or "").startswith("cuda") for node in one.capture.nodes
    )
    one.cuda_graphs = read_cuda_graphs(events, asked=cuda_graphs, on_gpu=gpu)
    one.error = told.get("fail_reason") if not one.breaks else None
    return one


def _graph(stage: str, event: Event, lines: UserLines) -> Graph:
    lines.stacks = event.data.get("stacks", [])
    return read_graph(stage, event.text, lines)


def _lowered(one: Compilation, events: list[Event], lines: UserLines) -> None:
    """Each output code ends the events of one graph through Inductor."""
    fusion: list[str] = []
    timed: list[dict[str, float]] = []
    nothing = Graph("lowered", "")
    graph, scheduled = nothing, None
    captured = (
        {node.name: node.line for node in one.capture.nodes if node.line} if one.capture else {}
    )
    for event in events:
        if event.kind == f"log:{private.FUSION}":
            fusion.append(event.text)
        elif event.kind == f"log:{private.POST_FUSION}":
            scheduled = event.text
        elif event.kind == "autotuned" and event.data["times"]:
            timed.append(event.data["times"])
        elif event.kind == "inductor_post_grad_graph":
            graph = event.data["graph"] = _graph("lowered", event, lines)
        elif event.kind == "inductor_output_code" and event.text:
            path = event.data.get("filename")
            told = Lowered(event.text, path, graph, fusion, scheduled, timed, captured)
            one.inductor.append(read_inductor(told))
            fusion, timed, scheduled, graph = [], [], None, nothing
        elif event.kind in ("fx_graph_cache_hit", "fx_graph_cache_miss"):  # follows the code
            for lowered in one.inductor[-1:]:
                lowered.key = lowered.key or event.json().get("key")


def _after_breaks(compilations: list[Compilation]) -> None:
    """What a break hands on, and the launches it adds."""
    resumed = {
        (other.at.file, other.function, other.at.number)
        for other in compilations if other.resumes and other.at and other.capture
    }  # fmt: skip
    for one in compilations:
        for each in one.breaks:
            each.extra_launches = 0
            if one.capture is not None:
                names = set(crossing(one.capture))
                each.crossing = [copy.deepcopy(n) for n in one.capture.nodes if n.name in names]
                # This frame goes on after its own line of the stack: the break may be in a callee.
                own = {(line.file, one.function, line.number) for line in each.stack}
                each.extra_launches = 1 if own & resumed else 0


def _whole_paths(one: Compilation) -> None:
    """Torch prints the end of a guard's path; the graph has the whole."""
    files = {node.line.file for node in one.capture.nodes if node.line} if one.capture else set()
    if one.at:
        files.add(one.at.file)
    for guard in one.guards.guards if one.guards else ():
        if guard.at:
            whole = [file for file in files if file.endswith(guard.at.file)]
            guard.at.file = whole[0] if len(whole) == 1 else guard.at.file


def _plain_names(one: Compilation) -> None:
    """The rest of a function after a break is that function to its author."""
    graphs = [one.capture, *(one.normalisation.graphs if one.normalisation else ())]
    lines = [node.line for graph in graphs for node in (graph.nodes if graph else ())]
    lines += [line for each in one.breaks for line in (each.at, *each.stack)]
    for line in lines:
        if line and (resumed := _RESUME.match(line.function)):
            line.function = resumed["name"]


def _sources(report: Report) -> dict[str, str]:
    files = {
        n.line.file
        for one in report.compilations
        if one.capture
        for n in one.capture.nodes
        if n.line
    }
    files |= {each.at.file for each in report.breaks if each.at}
    files |= {one.at.file for one in report.compilations if one.at}
    found = {}
    for file in sorted(files):
        path = Path(file)
        if not private.is_torch_file(file) and path.is_file():
            found[file] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _nothing(*, traced: bool, versions: int, raised: bool) -> str:
    """Why there is no compilation."""
    if raised:
        return "the call raised before anything was"
    if private.switched_off():
        return "torch.compile is switched off, by torch._dynamo.config.disable or its environment variable"
    if traced:
        return "Dynamo read the function and found no work on tensors"
    if versions:
        return (
            "the function was compiled before, and one of its versions served the call. Explain it before "
            "its first call, or after torch._dynamo.reset(), which forgets them"
        )
    return (
        "nothing that was called is compiled code, or a version compiled before served it. Call what "
        "torch.compile returns; torch._dynamo.reset() forgets versions; torch.compiler.disable keeps a "
        "function out"
    )


def _without_lines(one: Compilation) -> bool:
    """Of a module of torch's own, compiled by itself."""
    nodes = [n for n in one.capture.nodes if n.opcode.startswith("call")] if one.capture else []
    foreign = one.at is not None and private.is_torch_file(one.at.file)
    return foreign and any(node.line is None for node in nodes)


def _unknown(report: Report) -> list[Unknown]:
    lowered = [each for one in report.compilations for each in one.inductor]
    found = [Unknown(what, why) for what, why in private.missing.items()]
    if any(_without_lines(one) for one in report.compilations):
        why = (
            "torch keeps none for its own modules where no code of the user's stands round them: explain a "
            "function that calls the module"
        )
        found.append(Unknown("the user's lines of some nodes", why))
    if any(each.kernels and each.unfused is None for each in lowered):
        why = (
            "the code came from a cache: nothing was scheduled or timed. Explain with a cold cache."
        )
        found.append(Unknown("fusion groups, reasons and autotuning", why))
    if report.compilations:
        why = "no run was measured: ask for it by measure=True"
        found.append(Unknown(UNMEASURED, why))
    if any(kernel.language == "triton" for each in lowered for kernel in each.kernels):
        why = "torch does not tell whether Triton's own cache had it"
        found.append(Unknown("cache of the machine code of Triton kernels", why))
    if bare := [each.operator for each in report.dispatch if each.visited is None]:
        found.append(Unknown(f"dispatch of {', '.join(bare)}", "torch has no table for it"))
    if any(one.cuda_graphs and one.cuda_graphs.used is None for one in report.compilations):
        found.append(Unknown("CUDA graphs", "they are recorded at a later call"))
    return found
