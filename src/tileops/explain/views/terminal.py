"""A report for a terminal: one screen of summary, then each compilation stage by stage."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tileops.explain.model import (
    EVERYTHING,
    Break,
    Compilation,
    Guards,
    Inductor,
    Kernel,
    Line,
    Normalisation,
    OpNode,
    Recompile,
    Report,
    Unfused,
)
from tileops.explain.views.words import UNKNOWN as _UNKNOWN
from tileops.explain.views.words import count as _count
from tileops.explain.views.words import size

STAGES = ("capture", "breaks", "guards", "dispatch", "aten", "inductor", "run", "ops")
"""What :func:`render` can be asked for, in the order in which it shows them."""


def render(report: Report, *stages: str, width: int | None = None) -> str:
    """The whole report, or its summary and ``stages`` of each compilation."""
    if unknown := [name for name in stages if name not in STAGES]:
        raise ValueError(f"no stage is named {unknown[0]!r}; there are {', '.join(STAGES)}")
    columns = width or min(shutil.get_terminal_size().columns, 120)
    shown = stages or STAGES
    lines = [*_summary(report)]
    for one in report.compilations:
        lines += _compilation(one, shown)
    if "dispatch" in shown:
        lines += _dispatch(report)
    if not stages:
        lines += _rest(report)
    return "\n".join(_fold(line, columns) for line in lines)


def _fold(line: str, columns: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return (
        "\n".join(textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False))
        or ""
    )


def _where(line: Line | None) -> str:
    return _UNKNOWN if line is None else f"{Path(line.file).name}:{line.number}"


def _code(line: Line | None) -> str:
    return f"{_where(line)}  {line.text}" if line else _UNKNOWN


def _bounded(text: str, most: int = 160) -> str:
    """A user's string may be a whole prompt."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _first_line(text: str) -> str:
    """Torch goes on with stacks and advice about itself."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _summary(report: Report) -> Iterable[str]:
    kernels = [k for one in report.compilations for each in one.inductor for k in each.kernels]
    yield f"{report.title or 'compiled code'}  (torch {report.torch}, {report.device})"
    if report.nothing:
        yield f"  NOTHING WAS COMPILED: {report.nothing}."
        return
    yield (
        f"  {_count(len(report.graphs), 'graph')}, {_count(len(report.breaks), 'break')}, "
        f"{_count(len(report.recompiles), 'recompilation')}, {_count(len(kernels), 'kernel launch')}"
    )
    for place, times in Counter(_code(each.at) for each in report.breaks).items():
        yield f"  break: {place}{f'  ({times} times)' if times > 1 else ''}"
    made = [one.normalisation for one in report.compilations if one.normalisation]
    for place in dict.fromkeys(_code(r.at) for each in made for r in each.rewrites if r.copy):
        yield f"  copied back to an input: {place}"
    for one in report.recompiles:
        # The first failure is of the version that served the last call.
        failures = one.recompile.failures if one.recompile else []
        yield f"  recompiled {one.function}: {_bounded(failures[0].guard) if failures else _UNKNOWN}"


def _compilation(one: Compilation, shown: Sequence[str]) -> list[str]:
    parts = {
        "capture": lambda: _capture(one),
        "breaks": lambda: [line for each in one.breaks for line in _break(each, one)],
        "guards": lambda: [*_recompile(one.recompile), *_guards(one.guards)],
        "aten": lambda: _normalisation(one.normalisation),
        "inductor": lambda: [line for each in one.inductor for line in _inductor(each)],
        "run": lambda: _run(one),
        "ops": lambda: [*(line for op in one.ops for line in _op(op)), *_near(one)],
    }
    lines = [
        line for stage in STAGES if stage in shown and stage in parts for line in parts[stage]()
    ]
    rest = ", the rest after a break" if one.resumes else ""
    head = ["", f"[{one.id}] {one.function}{rest}  {_where(one.at)}"]
    if one.error:
        head.append(f"  failed: {_first_line(one.error)}")
    elif one.capture is None and not one.breaks:
        head.append("  captured nothing: no work on tensors")
    return [*head, *lines] if lines or one.error else []


def _capture(one: Compilation) -> Iterable[str]:
    if one.capture:
        nodes = [node for node in one.capture.nodes if node.opcode.startswith("call")]
        yield f"  Capture: {_count(len(nodes), 'operation')}"
        for node in nodes:
            yield f"    {node.name:<16} {node.opcode:<14} {node.target}({node.args})  {_where(node.line)}"
    for inlined in one.inlined or ():
        yield f"    inlined {inlined.function}, {_count(inlined.times, 'time')}  {_code(inlined.at)}"
    for loop in one.loops or ():
        times = _UNKNOWN if loop.times is None else _count(loop.times, "time")
        yield f"    unrolled {times}  {_code(loop.at)}"


def _break(each: Break, one: Compilation) -> Iterable[str]:
    yield f"  Break ({each.kind}): {_code(each.at)}"
    yield f"    {each.reason}"
    own = [i for i, line in enumerate(each.stack) if line.function == one.function]
    if (
        calls := each.stack[own[-1] : -1] if own else []
    ):  # who called the function is not its affair
        yield f"    called from: {' → '.join(map(_where, calls))}"
    if each.crossing is not None:
        values = ", ".join(
            f"{n.name} {n.dtype or ''} {n.shape or ''} {size(n.bytes)}" for n in each.crossing
        )
        yield f"    values that cross: {values or 'none'}"
    cost = []
    if each.extra_launches:
        cost.append(f"{_count(each.extra_launches, 'more graph call')} in each call")
    if each.synchronizations:
        cost.append(f"{_count(each.synchronizations, 'wait')} for the device")
    if each.python_us is not None:
        cost.append(f"{each.python_us:.1f} µs of Python")
    if cost:
        yield f"    cost: {', '.join(cost)}"
    yield f"    mend: {each.advice}"


def _recompile(again: Recompile | None) -> Iterable[str]:
    if again is None:
        return
    limit = _UNKNOWN if again.limit is None else again.limit
    passed = ": the limit is passed, such calls run uncompiled" if again.gave_up else ""
    yield f"  Recompiled: version {again.count} of at most {limit}{passed}"
    for failure in again.failures:
        about = failure.guard
        if failure.expected is not None:
            name = f"{failure.source or failure.guard} {failure.property or ''}"
            came = _UNKNOWN if failure.actual is None else _bounded(failure.actual)
            about = f"{name}: expected {_bounded(failure.expected)}, got {came}"
        yield f"    not [{failure.compile_id}]: {_bounded(about, 400)}"
        yield f"      mend: {failure.advice}"


def _guards(guards: Guards | None) -> Iterable[str]:
    if guards is None:
        return
    groups = Counter(guard.group for guard in guards.guards)
    cost = _UNKNOWN if guards.check_us is None else f"{guards.check_us:.1f} µs a check"
    yield f"  Guards: {', '.join(f'{n} {g}' for g, n in groups.items())}; {cost}"
    held = 0
    for guard in guards.guards:
        if guard.group == "shape":
            yield f"    {guard.code.split('  # ')[0]}"
        elif guard.kind == "TENSOR_MATCH" and re.search(
            r"_(parameters|buffers)['\"]?\]?\[", guard.source
        ):
            held += 1
        elif guard.kind == "TENSOR_MATCH":
            facts = {k: v for k, v in guard.properties.items() if k != "dispatch_keys"}
            text = ", ".join(f"{k} {_fact(v)}" for k, v in facts.items() if v is not None)
            yield f"    {guard.source}: {text or guard.code}"
    if held:
        yield f"    {_count(held, 'parameter')} and buffers: dtype, device, size and stride of each"


def _fact(value: object) -> str:
    """A size that may vary is None."""
    if not isinstance(value, list):
        return str(value)
    return "[" + ", ".join("any" if each is None else str(each) for each in value) + "]"


def _dispatch(report: Report) -> Iterable[str]:
    if report.dispatch:
        yield from ("", "Dispatch keys that a call meets, in order")
    for each in report.dispatch:
        steps = each.visited
        order = [s.key if s.what == "kernel" else f"({s.key} falls through)" for s in steps or ()]
        yield f"  {each.operator}: {_UNKNOWN if steps is None else ' → '.join(order)}"


def _normalisation(made: Normalisation | None) -> Iterable[str]:
    if made is None:
        return
    counts = [f"{g.stage} {sum(n.opcode.startswith('call') for n in g.nodes)}" for g in made.graphs]
    yield f"  ATen: operations: {', '.join(counts)}"
    for rewrite in made.rewrites:
        copy = "; a copy back to the input remains" if rewrite.copy else ""
        yield f"    functional: {rewrite.before} → {'; '.join(rewrite.after) or _UNKNOWN}{copy}"
    for change in made.decompositions:
        yield f"    {_where(change.at)}: {_some(change.before)} → {_some(change.after)}"
    if made.partition:
        part = made.partition
        everything = size(part.save_all_bytes)
        yield f"    saved for backward: {size(part.saved_bytes)} (all that it reads: {everything})"
        for name, kept in (("save", part.saved), ("recompute", part.recomputed)):
            for each in kept:
                given = each.at is None and each.name == each.target
                place = "an input" if given else _where(each.at)
                yield f"      {name} {each.name} = {each.target}, {size(each.bytes)}  {place}"


def _inductor(lowered: Inductor) -> Iterable[str]:
    moved = [kernel.bytes for kernel in lowered.kernels if kernel.bytes is not None]
    facts = [_count(len(lowered.kernels), "kernel")]
    if moved and len(moved) == len(lowered.kernels):
        facts.append(f"{size(sum(moved))} read and written")
    if lowered.peak_bytes:
        facts.append(f"buffers of {size(lowered.peak_bytes)} at most")
    yield f"  Inductor ({lowered.stage}): {', '.join(facts)}"
    for kernel in lowered.kernels:
        nests = [group.nodes for group in kernel.groups or () if kernel.language != "extern"]
        nodes = " | ".join(map(_some, nests)) if len(nests) > 1 else _some(kernel.nodes)
        lines = ", ".join(dict.fromkeys(map(_where, kernel.lines))) or _UNKNOWN
        yield f"    {kernel.name}  {_kind(kernel)}: {nodes}{_moved(kernel)}  [{lines}]"
    for each in lowered.candidates or ():
        yield f"    timed {each.kernel}: {each.time_us:.1f} µs{', chosen' if each.chosen else ''}"
    if lowered.unfused is None:
        yield f"    not fused: {_UNKNOWN}, the code came from a cache"
    yield from _apart(lowered.unfused or [])


def _apart(pairs: list[Unfused]) -> Iterable[str]:
    told: dict[str, None] = {}
    for each in pairs:
        first, second = _some(each.first_nodes), _some(each.second_nodes)
        pair = f"{first or each.first} | {second or each.second}"
        if each.relation != "opaque":
            told[f"{pair}: {each.reason or 'torch gave no reason'}"] = None
    yield from (f"    not fused: {text}" for text in told)
    if opaque := sum(each.relation == "opaque" for each in pairs):
        yield f"    not fused: {_count(opaque, 'pair')} parted by a library's or an op's kernel"


def _kind(kernel: Kernel) -> str:
    return kernel.kind if kernel.kind == kernel.language else f"{kernel.kind}, {kernel.language}"


def _moved(kernel: Kernel) -> str:
    facts = [] if kernel.bytes is None else [size(kernel.bytes)]
    if kernel.time_us is not None:
        facts.append(f"{kernel.time_us:.1f} µs")
    if kernel.bandwidth_fraction is not None:
        facts.append(f"{kernel.bandwidth_fraction:.0%} of the memory's bandwidth")
    return f"; {', '.join(facts)}" if facts else ""


def _some(names: list[str] | None) -> str:
    """Enough of them to be told."""
    if names is None:
        return _UNKNOWN
    few = names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"]
    return ", ".join(few)


def _run(one: Compilation) -> Iterable[str]:
    if one.caches:
        yield "  Caches: " + ", ".join(f"{each.level} {each.outcome}" for each in one.caches)
    if one.phases:
        yield "  Time: " + ", ".join(f"{each.name} {each.seconds:.2f} s" for each in one.phases)
    if one.cuda_graphs:
        used = {True: "used", False: "skipped", None: _UNKNOWN}[one.cuda_graphs.used]
        reason = _first_line(one.cuda_graphs.reason or "").replace(
            "skipping cudagraphs due to ", ""
        )
        yield f"  CUDA graphs: {used}{', ' if reason else ''}{reason.split(' Found from', 1)[0]}"


def _op(op: OpNode) -> Iterable[str]:
    owner = "" if op.op.startswith("torch.") else "tileops "
    yield f"  {owner}{op.op}{op.parameters}  {_where(op.at)}"
    if op.substituted_from:
        yield f"    in the place of {'; '.join(map(_code, op.substituted_from))}"
    if op.fused_into:
        yield f"    fused into {op.fused_into}"
    else:  # what served an equal op elsewhere says nothing of one that is no call any more
        target = f"target {op.target or _UNKNOWN} (by {op.decided_by or _UNKNOWN})"
        yield f"    {target}, kernel {op.kernel or _UNKNOWN}"
        for name, reason in op.refused.items():
            yield f"    refused {name}: {reason}"
    if op.not_fused:
        yield f"    not fused: {op.not_fused}"


def _near(one: Compilation) -> Iterable[str]:
    for miss in one.near_misses:
        what = f"is {miss.op}, left alone" if miss.means_it else f"nearly {miss.op}"
        yield f"  {what}: {_code(miss.at)}"
        yield f"    because: {miss.reason}"


def _rest(report: Report) -> Iterable[str]:
    if report.measured:
        made = report.measured
        outside = (
            "" if made.outside_us is None else f", {made.outside_us:.1f} µs outside the graphs"
        )
        yield (
            f"a warm call: {made.call_us:.1f} µs{outside}; {_count(made.graph_calls, 'graph call')}, "
            f"{_count(made.synchronizations, 'wait')} for the device"
        )
    for call in report.calls or ():
        yield f"call of {call.function}: {call.seconds:.2f} s, {_count(len(call.compiled), 'compilation')}"
    for op in report.eager_ops:
        yield from _op(op)
    for each in report.unknown:
        if each.what != EVERYTHING:  # it stands at the top
            yield f"unknown: {each.what}: {each.why}"
