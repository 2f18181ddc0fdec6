"""A report as one self-contained page: no network, nothing to install, folded until it is read."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from tileops.explain.collect.graphs import NODE_LINE
from tileops.explain.model import (
    Break,
    Compilation,
    Dispatch,
    Graph,
    Guard,
    Inductor,
    Inlined,
    Kept,
    Kernel,
    Line,
    Loop,
    NearMiss,
    Node,
    OpNode,
    Report,
)
from tileops.explain.views.words import BETWEEN, UNKNOWN, count, size

__all__ = ["render"]

_AROUND = 4
"""Lines of source that stay in view beside one that has something to tell."""
_FOLDED = 4
"""Fewer lines with nothing to tell are not worth folding."""
_ASSIGNED = re.compile(r"^(?P<indent>\s*)(?P<name>\w+)(?=(?:: \".*?\")? = )")
_WORD = re.compile(r"[A-Za-z_]\w*")

_UNKNOWN = Markup(f'<span class="unknown">{UNKNOWN}</span>')

Piece = tuple[str, str | None]
"""Text, and the anchor that it leads to."""


def render(report: Report) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tileops.explain.views", "page"),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(size=_bytes, plural=count, told=_told, percent=_percent)
    environment.filters.update(
        seconds=_seconds, micros=_micros, between=lambda name: BETWEEN.get(name, name)
    )
    script, style = _asset(environment, "page.js"), _asset(environment, "page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        report=report, page=Page(report), script=script, style=style, digest=digest
    )


def _asset(environment: jinja2.Environment, name: str) -> Markup:
    """Ours, and so trusted: everything else in the page is escaped."""
    loader = environment.loader
    assert loader is not None
    return Markup(loader.get_source(environment, name)[0])


# ---- words ---------------------------------------------------------------------------------------


def _seconds(seconds: float) -> str:
    number, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    number, unit = (1e6 * seconds, "µs") if seconds < 1e-3 else (number, unit)
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.1f} {unit}"


def _micros(micros: float | None, otherwise: str = _UNKNOWN) -> str:
    return otherwise if micros is None else _seconds(micros / 1e6)


def _bytes(number: int | None) -> str:
    return _UNKNOWN if number is None else size(number)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _times(number: int | None) -> str:
    return f"{UNKNOWN} times" if number is None else count(number, "time")


def _together(found: Iterable[tuple[str, str | None, str]]) -> list[Chip]:
    """Anchors and names that have their note in common."""
    same: dict[str, Chip] = {}
    for note, anchor, name in found:
        same.setdefault(note, Chip([], note)).names.append((anchor, name))
    return list(same.values())


def _pieces(text: str, anchors: dict[str, str]) -> list[Piece]:
    """The text, its words that have an anchor leading there."""
    pieces: list[Piece] = []
    end = 0
    for word in _WORD.finditer(text):
        if anchor := anchors.get(word[0]):
            pieces += [(text[end : word.start()], None), (word[0], anchor)]
            end = word.end()
    return [*pieces, (text[end:], None)]


def _told(value: Any) -> str:
    """Any of JSON's values, for a reader."""
    return _UNKNOWN if value is None else _worded(value)


def _worded(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict) and value.keys() == {"index", "end", "step"}:
        return f"{value['index']} to {value['end']} by {value['step']}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_worded(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_worded, value))}]"
    return str(value)


# ---- what stands where ---------------------------------------------------------------------------


@dataclass
class About:
    """What became of one line of source in one compilation."""

    nodes: dict[str, list[Node]] = field(default_factory=dict)
    """Of each graph but the joint one, which forward and backward share out."""
    kernels: list[tuple[str, str, Kernel]] = field(default_factory=list)
    """With their anchors and stages."""
    breaks: list[tuple[str, Break]] = field(default_factory=list)
    inlined: list[Inlined] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    saved: list[Kept] = field(default_factory=list)
    recomputed: list[Kept] = field(default_factory=list)
    guards: list[tuple[str, Guard]] = field(default_factory=list)
    ops: list[tuple[str, OpNode]] = field(default_factory=list)
    near: list[tuple[str, NearMiss]] = field(default_factory=list)


class Chip(NamedTuple):
    """Things of one kind that are told together: each has a name, and an anchor if the page has more."""

    names: list[tuple[str | None, str]]
    note: str = ""


@dataclass
class Row:
    """A line of source, or many in a row that have nothing to tell."""

    number: int
    text: str
    about: dict[int, About] = field(default_factory=dict)
    """By the number of the compilation."""
    folded: list[tuple[int, str]] = field(default_factory=list)


class Page:
    """Anchors of everything in a report, and the links between them."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self._files = {file: i for i, file in enumerate(report.sources)}
        self._lengths = {f: len(text.splitlines()) for f, text in report.sources.items()}
        self._about: dict[tuple[str, int], dict[int, About]] = {}
        self._kernels: dict[tuple[int, str, str], list[tuple[str, Kernel]]] = {}
        self._nodes: dict[tuple[int, str, str], str] = {}
        for i, one in enumerate(report.compilations):
            self._compilation(i, one)

    def _compilation(self, i: int, one: Compilation) -> None:
        for g, graph in self.graphs(one):
            for k, node in enumerate(graph.nodes):
                self._nodes.setdefault((i, graph.stage, node.name), f"n{i}-{g}-{k}")
                if graph.stage != "joint" and (about := self._of(i, node.line)):
                    about.nodes.setdefault(graph.stage, []).append(node)
        for j, lowered in enumerate(one.inductor):
            for k, kernel in enumerate(lowered.kernels):
                placed = (f"k{i}-{j}-{k}", kernel)
                for name in kernel.nodes or ():
                    self._kernels.setdefault((i, lowered.stage, name), []).append(placed)
                for line in kernel.lines:
                    if about := self._of(i, line):
                        about.kernels.append((placed[0], lowered.stage, kernel))
        partition = one.normalisation.partition if one.normalisation else None
        self._each(i, "breaks", one.breaks, f"b{i}-")
        self._each(i, "guards", one.guards.guards if one.guards else (), f"g{i}-")
        self._each(i, "ops", one.ops, f"o{i}-")
        self._each(i, "near", one.near_misses, f"m{i}-")
        self._each(i, "inlined", one.inlined or ())
        self._each(i, "loops", one.loops or ())
        self._each(i, "saved", partition.saved if partition else ())
        self._each(i, "recomputed", partition.recomputed if partition else ())

    def _each(self, i: int, name: str, found: Any, anchor: str = "") -> None:
        for k, each in enumerate(found):
            if about := self._of(i, each.at):
                getattr(about, name).append((f"{anchor}{k}", each) if anchor else each)

    def _of(self, i: int, line: Line | None) -> About | None:
        if line is None or not self.line(line):
            return None
        return self._about.setdefault((line.file, line.number), {}).setdefault(i, About())

    # Anchors; None where the page has no such thing.

    def line(self, line: Line | None) -> str | None:
        if line is None or not 1 <= line.number <= self._lengths.get(line.file, 0):
            return None
        return f"l{self._files[line.file]}-{line.number}"

    def node(self, i: int, stage: str, name: str) -> str | None:
        return self._nodes.get((i, stage, name))

    # Links.

    def kernels(self, i: int, stage: str, node: Node) -> list[tuple[str, Kernel]]:
        """Those that compute an ATen node; for a captured one those of its line."""
        if stage != "capture":
            return self._kernels.get((i, stage, node.name), [])
        about = self._of(i, node.line)
        return [(anchor, kernel) for anchor, _, kernel in about.kernels] if about else []

    def arguments(self, i: int, stage: str, node: Node) -> list[Piece]:
        """The arguments as written, each node in them leading to its row."""
        anchors = {name: anchor for name in node.inputs if (anchor := self.node(i, stage, name))}
        return _pieces(node.args, anchors)

    def fused(self, i: int, op: OpNode) -> list[Piece]:
        """What it was fused into, as said, each kernel leading to it."""
        lowered = enumerate(self.report.compilations[i].inductor)
        named = [
            (each.name, f"k{i}-{j}-{k}") for j, one in lowered for k, each in enumerate(one.kernels)
        ]
        return _pieces(op.fused_into or "", dict(reversed(named)))

    def code(self, i: int, graph: Graph) -> list[list[Piece]]:
        """Lines of a graph's code; those that name the user's file lead there, others to nodes."""
        lines: list[list[Piece]] = []
        for text in graph.code.splitlines():
            if match := NODE_LINE.match(text):
                at = Line(match["file"], int(match["number"]))
                lines.append([(text, self.line(at))])
            elif match := _ASSIGNED.match(text):
                rest = text[match.end() :]
                anchor = self.node(i, graph.stage, match["name"])
                lines.append([(match["indent"], None), (match["name"], anchor), (rest, None)])
            else:
                lines.append([(text, None)])
        return lines

    @staticmethod
    def margin(row: Row) -> list[str]:
        """What stands beside a line: counts over all compilations."""
        abouts = row.about.values()
        times = [loop.times for about in abouts for loop in about.loops]
        nodes = sum(len(about.nodes.get("capture", ())) for about in abouts)
        kernels = sum(len(about.kernels) for about in abouts)
        guards = sum(len(about.guards) for about in abouts)
        told = ["break"] if any(about.breaks for about in abouts) else []
        told += dict.fromkeys("unrolled" if each is None else f"×{each}" for each in times)
        told += [count(nodes, "node")] if nodes else []
        told += [count(kernels, "kernel")] if kernels else []
        return told or ([count(guards, "guard")] if guards else [])

    def became(self, i: int, about: About) -> list[tuple[str, list[Chip]]]:
        """What to tell of a line: titles, each with what stands under it."""
        graphs = [
            ("Captured" if stage == "capture" else f"ATen, {stage}",
             _together((node.target, self.node(i, stage, node.name), node.name) for node in nodes))
            for stage, nodes in about.nodes.items()
        ]  # fmt: skip
        launches: dict[tuple[str, str], list[tuple[str | None, str]]] = {}
        for anchor, stage, kernel in about.kernels:
            same = launches.setdefault((kernel.name, f"{kernel.kind}, {stage}"), [])
            same.append((anchor, str(len(same) + 1) if same else kernel.name))
        guards = _together(
            (each.source or each.kind, anchor, each.kind) for anchor, each in about.guards
        )
        return [
            ("Graph break", [Chip([(a, each.kind)], each.reason) for a, each in about.breaks]),
            ("Loop", [Chip([(None, "unrolled")], _times(each.times)) for each in about.loops]),
            ("Inlined", [Chip([(None, each.function)], _times(each.times)) for each in about.inlined]),
            ("Operators", [Chip([(a, each.op)], each.kernel or "") for a, each in about.ops]),
            *graphs,
            ("Kernels", [Chip(names, note) for (_, note), names in launches.items()]),
            ("Saved for backward", [self._kept(i, "forward", each) for each in about.saved]),
            ("Computed again", [self._kept(i, "backward", each) for each in about.recomputed]),
            ("Near misses", [Chip([(a, each.op)], each.reason) for a, each in about.near]),
            ("Guards", [Chip([(a, each.note)], count(len(each.names), "guard"))
                        for each in guards for a, _ in each.names[:1]]),
        ]  # fmt: skip

    def _kept(self, i: int, stage: str, kept: Kept) -> Chip:
        return Chip([(self.node(i, stage, kept.name), kept.name)], size(kept.bytes))

    # Order and grouping.

    @staticmethod
    def graphs(one: Compilation) -> list[tuple[int, Graph]]:
        """With their numbers in anchors: the captured graph has 0."""
        made = enumerate(one.normalisation.graphs if one.normalisation else (), 1)
        return [*([(0, one.capture)] if one.capture else []), *made]

    def listing(self, file: str) -> list[Row]:
        """The file's lines; long stretches that have nothing to tell are one row."""
        texts = self.report.sources[file].splitlines()
        rows = [Row(n, text, self._about.get((file, n), {})) for n, text in enumerate(texts, 1)]
        told = [row.number for row in rows if row.about]
        near = {n for number in told for n in range(number - _AROUND, number + _AROUND + 1)}
        listed: list[Row] = []
        for shown, stretch in itertools.groupby(rows, lambda row: not told or row.number in near):
            many = list(stretch)
            if shown or len(many) < _FOLDED:
                listed += many
            else:
                folded = [(row.number, row.text) for row in many]
                listed.append(Row(many[0].number, "", folded=folded))
        return listed

    @staticmethod
    def table(dispatch: Dispatch) -> list[tuple[str, str | None, list[str]]]:
        """Keys that the same registration serves; what a call meets comes first."""
        served: dict[tuple[str, str | None], list[str]] = {}
        for entry in dispatch.table:
            served.setdefault((entry.kernel, entry.registered_at), []).append(entry.key)
        met = {step.key: place for place, step in enumerate(dispatch.visited or ())}
        rows = [(kernel, where, keys) for (kernel, where), keys in served.items()]
        return sorted(rows, key=lambda row: min(met.get(key, len(met)) for key in row[2]))

    @staticmethod
    def groups(guards: list[Guard]) -> dict[str, list[tuple[int, Guard]]]:
        """By group; those whose meaning is known come first."""
        grouped: dict[str, list[tuple[int, Guard]]] = {}
        for k, guard in sorted(enumerate(guards), key=lambda each: not each[1].properties):
            grouped.setdefault(guard.group, []).append((k, guard))
        return grouped

    @staticmethod
    def operations(graph: Graph) -> int:
        return sum(node.opcode.startswith("call") for node in graph.nodes)

    @property
    def breaks(self) -> list[tuple[Break, list[str]]]:
        """Each place that breaks, with an anchor for each compilation that met it."""
        places: dict[Any, tuple[Break, list[str]]] = {}
        for i, one in enumerate(self.report.compilations):
            for k, each in enumerate(one.breaks):
                place = (each.kind, each.at and (each.at.file, each.at.number))
                places.setdefault(place, (each, []))[1].append(f"b{i}-{k}")
        return list(places.values())

    @staticmethod
    def apart(one: Compilation) -> list[tuple[int, str, int]]:
        """Where a value goes through memory between two kernels: which graph, its stage, how often."""
        counts = [
            (j, each.stage, sum(pair.relation == "passes" for pair in each.unfused or ()))
            for j, each in enumerate(one.inductor)
        ]
        return [each for each in counts if each[2]]

    @staticmethod
    def kinds(lowered: Inductor) -> str:
        counts = Counter(kernel.kind for kernel in lowered.kernels)
        return ", ".join(f"{number} {kind}" for kind, number in counts.items())

    @staticmethod
    def caches(one: Compilation) -> str:
        outcomes = Counter(each.outcome for each in one.caches)
        return ", ".join(count(number, outcome) for outcome, number in outcomes.items())

    @property
    def launches(self) -> int:
        return sum(len(each.kernels) for one in self.report.compilations for each in one.inductor)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for one in self.report.compilations for phase in one.phases)

    @staticmethod
    def short(file: str) -> str:
        return Path(file).name
