"""What Inductor fused, why neighbours stayed apart, and the code that came out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tileops.engine.boundary.compiled_calls import with_operators
from tileops.explain import torch_private as private
from tileops.explain.collect.memory import Memory, written
from tileops.explain.model import Candidate, Graph, Group, Inductor, Kernel, Line, Unfused

_CANDIDATE = re.compile(r"SchedulerNode\(name='(?P<name>\w+)'\), (?P<kind>\w+)\(")
_ORIGINS = re.compile(r"origins=OrderedSet\(\[(?P<names>[^\]]*)\]\)")
_REFUSED = re.compile(r"^cannot fuse (?P<first>\w+) with (?P<second>\w+): (?P<why>.*)$", re.DOTALL)
_SCHEDULED = re.compile(r"^(?P<name>\w+): (?P<kind>\w*SchedulerNode)\((?P<of>.*)\)$", re.MULTILINE)
_OUTPUT = re.compile(r"^\s{4}(?P<name>buf\w+): ", re.MULTILINE)
_DEFINED = re.compile(
    r"^(?P<name>\w+) = async_compile\.(?P<how>\w+)\((?P<head>.*?)'''(?P<code>.*?)'''",
    re.MULTILINE | re.DOTALL,
)
_CALLED = re.compile(
    r"^\s+(?:(?P<result>buf\w+) = )?(?P<name>[A-Za-z_][\w.]*?)(?:\.run)?\((?P<args>.*)\)\s*$"
)
_LOOP = re.compile(r"for\((?:int64_t|long) (\w+)=.*?; \1<(.*?); \1\+=(.*)\)$", re.MULTILINE)
_LAUNCHES = re.compile(r"\s*def (call|partition_\d+|\w*graph\w*)\((self, )?args\)")
"""The function of the graph, of its parts, and of graphs inside it: branches of ``cond``, loop bodies."""
_LIBRARY = re.compile(r"(extern_kernels|aten|torch\.ops|mkldnn)\b")
_NOT_KERNELS = ("empty_strided", "assert_", "reinterpret_tensor", "del", "args.", "return", "torch._C",
                "start_graph", "end_graph", "run_intermediate", "raise", "stream", "alloc_from_pool",
                "get_raw_stream", "with", "as_strided")  # fmt: skip
_TRITON_KINDS = {"tem": "template", "red": "reduction", "per": "reduction", "poi": "pointwise",
                 "for": "pointwise"}  # fmt: skip


@dataclass
class Lowered:
    """What torch told of one graph on its way through Inductor."""

    code: str
    path: str | None
    graph: Graph
    """The ATen graph that was lowered."""
    fusion: list[str]
    """The scheduler's messages."""
    scheduled: str | None
    """Its nodes after fusion; None where the code came from a cache: nothing was scheduled then."""
    timed: list[dict[str, float]]
    """Milliseconds of candidates, for each choice that was made by timing."""
    captured: dict[str, Line]
    """Lines of the captured graph's nodes by their names."""


def read_inductor(told: Lowered) -> Inductor:
    origins, kinds = _candidates(told.fusion)
    groups = None if told.scheduled is None else _groups(told.scheduled, origins, kinds)
    code = with_operators(told.code)
    memory = Memory(code, told.graph)
    kernels = _Kernels(told, code, groups, memory).found
    apart = None if groups is None else _unfused(told.fusion, groups, told.scheduled or "", kernels)
    candidates = None if groups is None else [each for one in told.timed for each in _choice(one)]
    return Inductor(
        _stage(code), kernels, apart, memory.buffers, candidates, told.code, told.path, None,
        memory.peak,
    )  # fmt: skip


def _choice(times: dict[str, float]) -> list[Candidate]:
    best = min(times, key=lambda name: times[name])
    return [Candidate(name, 1e3 * time, name == best) for name, time in times.items()]


def _stage(code: str) -> str:
    match = re.search(r"# AOT ID: \['\d+_(\w+)'\]", code)
    return match[1] if match else "inference"


def _candidates(fusion: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """ATen nodes and kind of each scheduler node, from the first round's list."""
    origins: dict[str, list[str]] = {}
    kinds: dict[str, str] = {}
    for text in fusion:
        match = _CANDIDATE.search(text)
        if match is None or not text.startswith("  ") or match["name"] in kinds:
            continue
        kinds[match["name"]] = match["kind"].lower()
        if names := _ORIGINS.search(text):
            origins[match["name"]] = _names(names["names"])
    return origins, kinds


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _groups(scheduled: str, origins: dict[str, list[str]], kinds: dict[str, str]) -> list[Group]:
    body = scheduled.split("AFTER FUSION\n", 1)[-1]
    groups: list[Group] = []
    for part in re.split(r"\n\n\n+", body):
        head = _SCHEDULED.match(part.strip("\n"))
        if head is None:
            continue
        first = part.split(".snodes[0]", 1)[0]
        buffers = list(dict.fromkeys(_OUTPUT.findall(first)))
        # No work of its own: it names a result of what it reads, or what that wrote the parts of.
        if head["of"] == "MultiOutput" or head["kind"].startswith("Nop"):
            read = set(re.findall(r"'(buf\w+)'", first))
            for group in groups:
                group.buffers += buffers if read & set(group.buffers) else []
            continue
        members = re.findall(r"op\d+", head["name"])
        parts = [_kind_of(member, part, kinds) for member in members]
        nodes = list(dict.fromkeys(n for member in members for n in origins.get(member, ())))
        groups.append(Group(head["name"], _strongest(parts), parts, nodes, buffers))
    return groups


def _kind_of(member: str, text: str, kinds: dict[str, str]) -> str:
    if member in kinds:
        kind = kinds[member]  # also such as onlinesoftmaxreduction
        return "reduction" if "reduction" in kind or kind in ("scan", "sort") else "pointwise"
    own = re.search(rf"^{member}: (\w+)\((.*)\)$", text, re.MULTILINE)
    what = own[0] if own else text
    if "Template" in what:
        return "template"
    if "Extern" in what or "Fallback" in what:
        return "tileops" if "tileops" in text else "extern"
    # Its own text says: a reduction has a second, not empty, range of iteration.
    sizes = re.search(rf"^{member}\.sizes = \(\[.*?\], \[(.*?)\]\)", text, re.MULTILINE)
    return "reduction" if sizes and sizes[1] else "pointwise"


def _strongest(parts: list[str]) -> str:
    order = ("template", "tileops", "extern", "reduction", "pointwise")
    return next((kind for kind in order if kind in parts), "pointwise")


# ---- the code ------------------------------------------------------------------------------------


class _Kernels:
    """Launches in the order of the call, joined with fusion groups by what they write."""

    def __init__(
        self, told: Lowered, code: str, groups: list[Group] | None, memory: Memory
    ) -> None:
        self.memory = memory
        self.path = told.path
        self.nodes = {node.name: node for node in told.graph.nodes}
        self.captured = told.captured
        self.groups, self.left = groups, list(groups or ())
        self.mutated = _mutated(told.scheduled or "")
        self.used: set[str] = set()
        self.found: list[Kernel] = []
        defined = {match["name"]: match for match in _DEFINED.finditer(code)}
        comment = ""
        for line in _body(code):
            if "# Topologically Sorted Source Nodes: " in line:
                comment = line
                continue
            match = _CALLED.match(line)
            if match is None or match["name"].startswith(_NOT_KERNELS):
                continue
            if match["name"] in defined or _LIBRARY.match(match["name"]):
                self._launch(match["name"], defined.get(match["name"]), line, comment)
                comment = ""

    def _launch(self, name: str, known: re.Match[str] | None, line: str, comment: str) -> None:
        own = self._groups_of(line, known)
        self.left = [group for group in self.left if group not in own]
        if known is None:
            kind, language, source, schedule = "extern", "extern", None, {}
            origins = self._library_origin(name, comment)
            for group in own:
                group.nodes = group.nodes or origins
        else:
            language = "triton" if known["how"] == "triton" else "cpp"
            source = known["code"].strip("\n")
            kind = _kind_by_name(name, source)
            schedule = (
                _triton_schedule(known["head"], source) if language == "triton" else _loops(source)
            )
            if language == "triton" and self.path:
                schedule |= {
                    k: str(v) for k, v in (private.launched_with(self.path, name) or {}).items()
                }
            origins = list(dict.fromkeys(n for group in own for n in group.nodes))
        if "tileops" in name:
            kind = "tileops"
        elif own:
            kind = _strongest([part for group in own for part in group.parts])
        lines = [self.nodes[n].line for n in origins if n in self.nodes]
        groups = None if self.groups is None else own
        self.found.append(
            Kernel(
                name,
                kind,
                language,
                groups,
                origins or None,
                _distinct(lines),
                source,
                schedule,
                bytes=self.memory.touched(line, source),
            )
        )

    def _groups_of(self, line: str, known: re.Match[str] | None) -> list[Group]:
        """By their buffers; a group whose one result is a change of an older tensor, by that tensor.

        A C++ function holds all such up to the next call of a library, a Triton kernel one.
        """
        touched = set(re.findall(r"\w+", line))
        own = [group for group in self.left if touched & set(group.buffers)]
        changed = touched if known is None else written(line, known["code"])
        for group in self.left:
            if group in own:
                continue
            library = group.kind in ("extern", "tileops")
            if own and (known is None or known["how"] == "triton"):
                break
            if changed & self.mutated.get(group.name, set()) and library == (known is None):
                own.append(group)
            elif library:
                break
        return own

    def _library_origin(self, name: str, comment: str) -> list[str]:
        """The node of a library's call: by the operator's name or, where it stands for another operator, by
        the name that the comment tells, and by the line of what the comment names."""
        sources = _names(comment.split("Nodes: [", 1)[1].split("]", 1)[0]) if comment else []
        places = {(at.file, at.number) for n in sources if (at := self.captured.get(n))}
        parts = [part for part in name.split(".") if part not in ("default", "out")]
        operator = parts[3] if name.startswith("torch.ops.") else parts[-1]
        told = re.search(r"Original ATen: \[(.*?)\]", comment)
        others = [each.split(".")[1] for each in _names(told[1] if told else "") if "." in each]
        left = [node for node in self.nodes.values() if node.name not in self.used]
        tried = (
            [n for n in left if one in n.target.split(".")] for one in (operator, *others[::-1])
        )
        named = next(filter(None, tried), [])
        near = [n for n in named if n.line and (n.line.file, n.line.number) in places]
        chosen = [node.name for node in (near or named)[:1]]
        self.used.update(chosen)
        return chosen


def _body(code: str) -> list[str]:
    """Lines of the function that launches."""
    lines = code.splitlines()
    starts = [i for i, line in enumerate(lines) if _LAUNCHES.match(line)]
    body = []
    for start in starts:
        depth = len(lines[start]) - len(lines[start].lstrip())
        for line in lines[start + 1 :]:
            if line.strip() and len(line) - len(line.lstrip()) <= depth:
                break
            body.append(line)
    return body


def _distinct(lines: list[Line | None]) -> list[Line]:
    return list({(line.file, line.number): line for line in lines if line is not None}.values())


def _kind_by_name(name: str, source: str) -> str:
    if mark := re.match(r"triton_(tem|red|per|poi|for)_", name):
        return _TRITON_KINDS[mark[1]]
    if "gemm" in name:
        return "template"
    return "reduction" if "tmp_acc" in source or "reduction(" in source else "pointwise"


def _triton_schedule(head: str, source: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if hints := re.search(r"size_hints=(\{.*?\}|\[.*?\])", source):
        found["size_hints"] = hints[1]
    for name in ("num_warps", "num_stages", "reduction_hint", "tile_hint"):
        if value := re.search(rf"\b{name}\b['\"]?\s*[=:]\s*([\w.]+)", head + source):
            found[name] = value[1]
    found.update(
        re.findall(r"\b([XYRZ]\d?_?BLOCK\w*|BLOCK_\w+)\s*:\s*tl\.constexpr\s*=\s*(\d+)", source)
    )
    return found


def _loops(source: str) -> dict[str, Any]:
    """Loops of the C++ from the outside in, with ends and steps; vector width; threads."""
    loops = [
        {"index": match[1], "end": _number(match[2]), "step": _number(match[3])}
        for match in _LOOP.finditer(source)
    ]
    found: dict[str, Any] = {"loops": loops, "vectorized": "Vectorized<" in source}
    steps = [loop["step"] for loop in loops if isinstance(loop["step"], int) and loop["step"] > 1]
    if found["vectorized"] and steps:
        found["vector_width"] = max(steps)
    threads = re.search(r"#pragma omp parallel num_threads\((\d+)\)", source)
    found["threads"] = (
        int(threads[1]) if threads else (None if "#pragma omp parallel" in source else 1)
    )
    return found


def _number(text: str) -> int | str:
    bare = re.sub(r"static_cast<int64_t>\((.*?)L?\)$", r"\1", text.strip())
    return int(bare) if bare.isdigit() else bare


# ---- neighbours that stayed apart ----------------------------------------------------------------

_OPAQUE = ("extern", "tileops")
_EXTERN = "a library's kernel is opaque to Inductor: nothing fuses into it"


def _unfused(
    fusion: list[str], groups: list[Group], scheduled: str, kernels: list[Kernel]
) -> list[Unfused]:
    """The scheduler's last word on two things that are in different launches at the end.

    It is silent about calls of libraries, which it never tries; those count where one reads what
    the other wrote.
    """
    where = {member: group for group in groups for member in re.findall(r"op\d+", group.name)}
    last: dict[tuple[str, str], str | None] = {}
    for text in fusion:
        if match := _REFUSED.match(text.strip()):
            first = where.get(re.findall(r"op\d+", match["first"])[0])
            second = where.get(re.findall(r"op\d+", match["second"])[0])
            if first is not None and second is not None and first is not second:
                last[first.name, second.name] = " ".join(match["why"].split())
    readers = _readers(groups, scheduled)
    named = {group.name: group for group in groups}
    for first in groups:
        for name in readers[first.name]:
            extern = first.kind in _OPAQUE or named[name].kind in _OPAQUE
            last.setdefault((first.name, name), _EXTERN if extern else None)
    # On the CPU one function may hold several loop nests, one after the other.
    launch = {group.name: i for i, each in enumerate(kernels) for group in each.groups or ()}
    apart = [
        pair for pair in last if pair[0] not in launch or launch[pair[0]] != launch.get(pair[1])
    ]
    return [
        Unfused(_relation(named[first], named[second], named, readers), first, second,
                named[first].nodes, named[second].nodes, last[first, second])
        for first, second in apart
    ]  # fmt: skip


def _readers(groups: list[Group], scheduled: str) -> dict[str, list[str]]:
    """Groups that read what each group writes."""
    reads = _reads(scheduled)
    makers = {buffer: group.name for group in groups for buffer in group.buffers}
    found: dict[str, dict[str, None]] = {group.name: {} for group in groups}
    for group in groups:
        for buffer in reads.get(group.name, ()):
            maker = makers.get(buffer)
            if maker is not None and maker != group.name:
                found[maker][group.name] = None
    return {name: list(names) for name, names in found.items()}


def _relation(
    first: Group, second: Group, named: dict[str, Group], readers: dict[str, list[str]]
) -> str:
    """See :class:`Unfused`. One kernel for both would have to stop for an opaque one between them."""
    if first.kind in _OPAQUE or second.kind in _OPAQUE:
        return "opaque"
    if first.nodes and first.nodes == second.nodes:
        return "steps"
    seen, waiting = set(), [(name, False) for name in readers[first.name]]
    while waiting:
        name, through = waiting.pop()
        if name == second.name and through:
            return "opaque"
        if (name, through) not in seen:
            seen.add((name, through))
            through = through or named[name].kind in _OPAQUE
            waiting += [(following, through) for following in readers[name]]
    return "passes" if (second.name, False) in seen else "shares"


def _mutated(scheduled: str) -> dict[str, set[str]]:
    """Tensors that are not its own and that each group writes."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"\n\n\n+", scheduled.split("AFTER FUSION\n", 1)[-1]):
        if head := _SCHEDULED.match(part.strip("\n")):
            told = re.findall(r"\.mutations = \[(.*?)\]", part.split(".snodes[0]", 1)[0])
            found[head["name"]] = set(re.findall(r"'(\w+)'", " ".join(told)))
    return found


def _reads(scheduled: str) -> dict[str, set[str]]:
    """Buffers that each group reads of another."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"\n\n\n+", scheduled.split("AFTER FUSION\n", 1)[-1]):
        head = _SCHEDULED.match(part.strip("\n"))
        own = part.split(".unmet_dependencies = ", 1)[-1].split(".met_dependencies", 1)[0]
        if head is not None:
            found[head["name"]] = set(re.findall(r"'(buf\w+)'", own))
    return found
