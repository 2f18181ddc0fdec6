"""What Inductor fused, why neighbours stayed apart, and the code that came out."""

from __future__ import annotations

import math
import re
from typing import Any

from tileops.explain.collect.graphs import read_graph
from tileops.explain.model import Buffer, Group, Inductor, Kernel, Line, Node, Unfused

_CANDIDATE = re.compile(r"SchedulerNode\(name='(?P<name>\w+)'\), (?P<kind>\w+)\(")
_ORIGINS = re.compile(r"origins=OrderedSet\(\[(?P<names>[^\]]*)\]\)")
_REFUSED = re.compile(r"^cannot fuse (?P<first>\w+) with (?P<second>\w+): (?P<why>.*)$", re.DOTALL)
_SCHEDULED = re.compile(r"^(?P<name>\w+): (?P<kind>\w*SchedulerNode)\((?P<of>.*)\)$", re.MULTILINE)
_OUTPUT = re.compile(r"^\s{4}(?P<name>buf\w+): ", re.MULTILINE)
_DEFINED = re.compile(r"^(?P<name>\w+) = async_compile\.(?P<how>\w+)\((?P<head>.*?)'''(?P<code>.*?)'''", re.MULTILINE | re.DOTALL)  # fmt: skip
_CALLED = re.compile(r"^\s+(?:(?P<result>buf\w+) = )?(?P<name>[A-Za-z_][\w.]*?)(?:\.run)?\((?P<args>.*)\)\s*$")  # fmt: skip
_COMMENT = re.compile(r"# Topologically Sorted Source Nodes: \[(?P<nodes>.*?)\], Original ATen: \[(?P<aten>.*?)\]")  # fmt: skip
_ALLOCATED = re.compile(r"^\s+(?P<name>buf\w+) = empty_strided\w*\(\((?P<size>[^)]*)\), \([^)]*\), torch\.(?P<dtype>\w+)", re.MULTILINE)  # fmt: skip
_REUSED = re.compile(r"^\s+(?P<name>buf\w+) = (?:reinterpret_tensor\()?(?P<old>buf\w+)\b.*# reuse", re.MULTILINE)  # fmt: skip
_NOT_KERNELS = ("empty_strided", "assert_", "reinterpret_tensor", "del", "args.", "return", "torch._C",
                "start_graph", "end_graph", "run_intermediate", "raise", "stream", "alloc_from_pool",
                "get_raw_stream", "with", "as_strided")  # fmt: skip
_WIDTH = {"bool": 1, "float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1,
          "uint8": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}  # fmt: skip


def read_inductor(code: str, path: str | None, graph: str, fusion: list[str], scheduled: str | None) -> Inductor:  # fmt: skip
    """One graph. ``fusion``: the scheduler's messages; ``scheduled``: its nodes after fusion.

    ``scheduled`` is None where the code came from a cache: nothing was scheduled then.
    """
    nodes = {node.name: node for node in read_graph("post_grad", graph).nodes}
    origins, kinds = _candidates(fusion)
    groups = None if scheduled is None else _groups(scheduled, origins, kinds)
    kernels = _kernels(code, groups, nodes)
    return Inductor(
        _stage(code), kernels,
        None if groups is None else _unfused(fusion, groups, scheduled or ""),
        _buffers(code), None, code, path,
    )  # fmt: skip


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
    groups = []
    for part in re.split(r"\n\n\n+", body):
        head = _SCHEDULED.match(part.strip("\n"))
        if head is None:
            continue
        members = re.findall(r"op\d+", head["name"])
        parts = [_kind_of(member, part, kinds) for member in members]
        nodes = list(dict.fromkeys(n for member in members for n in origins.get(member, ())))
        first = part.split(".snodes[0]", 1)[0]
        groups.append(Group(head["name"], _strongest(parts), parts, nodes, list(dict.fromkeys(_OUTPUT.findall(first)))))  # fmt: skip
    return groups


def _kind_of(member: str, text: str, kinds: dict[str, str]) -> str:
    if member in kinds:
        kind = kinds[member]
        return kind if kind in ("pointwise", "reduction") else {"scan": "reduction", "sort": "reduction"}.get(kind, "pointwise")  # fmt: skip
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


def _kernels(code: str, groups: list[Group] | None, nodes: dict[str, Node]) -> list[Kernel]:
    """Launches in the order of the call, joined with fusion groups by the buffers they write."""
    defined = {match["name"]: match for match in _DEFINED.finditer(code)}
    left = list(groups or ())
    kernels = []
    comment: re.Match[str] | None = None
    for line in _body(code):
        if found := _COMMENT.search(line):
            comment = found
            continue
        match = _CALLED.match(line)
        if match is None or match["name"].startswith(_NOT_KERNELS):
            continue
        name = match["name"]
        known = defined.get(name)
        if known is None and not re.match(
            r"(extern_kernels|aten|torch\.ops|mkldnn|_\w+_ops)", name
        ):
            continue
        touched = set(re.findall(r"buf\w+", line))
        own = [group for group in left if touched & set(group.buffers)]
        left = [group for group in left if group not in own]
        kernels.append(_kernel(name, known, own if groups is not None else None, comment, nodes))
        comment = None
    return kernels


def _body(code: str) -> list[str]:
    """Lines of the function that launches."""
    lines = code.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"\s*def (call|partition_\d+)\(", line)]
    body = []
    for start in starts:
        depth = len(lines[start]) - len(lines[start].lstrip())
        for line in lines[start + 1 :]:
            if line.strip() and len(line) - len(line.lstrip()) <= depth:
                break
            body.append(line)
    return body


def _kernel(name: str, known: re.Match[str] | None, groups: list[Group] | None,
            comment: re.Match[str] | None, nodes: dict[str, Node]) -> Kernel:  # fmt: skip
    if known is None:
        kind, language, source, schedule = "extern", "extern", None, {}
    else:
        language = "triton" if known["how"] == "triton" else "cpp"
        source = known["code"].strip("\n")
        kind = _kind_by_name(name, source)
        schedule = _triton_schedule(known["head"], source) if language == "triton" else _loops(source)  # fmt: skip
    if "tileops" in name:
        kind = "tileops"
    elif groups:
        kind = _strongest([part for group in groups for part in group.parts])
    origins = list(dict.fromkeys(n for group in groups or () for n in group.nodes))
    if not origins and comment:  # a library's call says itself what it computes
        aten = {each.strip().removeprefix("aten.") for each in comment["aten"].split(",")}
        origins = [n.name for n in nodes.values() if _aten_name(n) in aten and n.opcode != "output"]
        origins = origins if len(origins) == 1 else []
        for group in groups or ():
            group.nodes = group.nodes or origins
    lines = [nodes[n].line for n in origins if n in nodes]
    return Kernel(name, kind, language, groups, origins or None, _distinct(lines), source, schedule)


def _aten_name(node: Node) -> str:
    return node.target.removeprefix("torch.ops.aten.").split(".", 1)[0]


def _distinct(lines: list[Line | None]) -> list[Line]:
    return list({(line.file, line.number): line for line in lines if line is not None}.values())


def _kind_by_name(name: str, source: str) -> str:
    for mark, kind in (("triton_tem", "template"), ("triton_red", "reduction"), ("triton_per", "reduction"), ("triton_poi", "pointwise"), ("triton_for", "pointwise")):  # fmt: skip
        if name.startswith(mark):
            return kind
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
    found.update(re.findall(r"\b([XYRZ]\d?_?BLOCK\w*|BLOCK_\w+)\s*:\s*tl\.constexpr\s*=\s*(\d+)", source))  # fmt: skip
    return found


def _loops(source: str) -> dict[str, Any]:
    """Loops of the C++ from the outside in, with ends and steps; vector width; threads."""
    loops = []
    for match in re.finditer(
        r"for\((?:int64_t|long) (\w+)=.*?; \1<(.*?); \1\+=(.*)\)$", source, re.MULTILINE
    ):
        loops.append({"index": match[1], "end": _number(match[2]), "step": _number(match[3])})
    found: dict[str, Any] = {"loops": loops, "vectorized": "Vectorized<" in source}
    steps = [loop["step"] for loop in loops if isinstance(loop["step"], int) and loop["step"] > 1]
    if found["vectorized"] and steps:
        found["vector_width"] = max(steps)
    threads = re.search(r"#pragma omp parallel num_threads\((\d+)\)", source)
    found["threads"] = int(threads[1]) if threads else (None if "#pragma omp parallel" in source else 1)  # fmt: skip
    return found


def _number(text: str) -> int | str:
    bare = re.sub(r"static_cast<int64_t>\((.*?)L?\)$", r"\1", text.strip())
    return int(bare) if bare.isdigit() else bare


def _buffers(code: str) -> list[Buffer]:
    body = "\n".join(_body(code))
    found = []
    for match in _ALLOCATED.finditer(body):
        sizes = [part.strip() for part in match["size"].split(",") if part.strip()]
        known = all(size.isdigit() for size in sizes)
        width = _WIDTH.get(match["dtype"], 4)
        found.append(Buffer(match["name"], math.prod(map(int, sizes)) * width if known else None, None))  # fmt: skip
    found += [Buffer(match["name"], None, match["old"]) for match in _REUSED.finditer(body)]
    return found


# ---- neighbours that stayed apart ----------------------------------------------------------------

_EXTERN = "a library's kernel is opaque to Inductor: nothing fuses into it"


def _unfused(fusion: list[str], groups: list[Group], scheduled: str) -> list[Unfused]:
    """The scheduler's last word on two things that are in different groups at the end.

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
    reads = _reads(scheduled)
    for first in groups:
        for second in groups:
            if first is not second and reads.get(second.name, set()) & set(first.buffers):
                extern = {"extern", "tileops"} & {first.kind, second.kind}
                last.setdefault((first.name, second.name), _EXTERN if extern else None)
    named = {group.name: group for group in groups}
    return [
        Unfused(first, second, named[first].nodes, named[second].nodes, why)
        for (first, second), why in last.items()
    ]


def _reads(scheduled: str) -> dict[str, set[str]]:
    """Buffers that each group reads of another."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"\n\n\n+", scheduled.split("AFTER FUSION\n", 1)[-1]):
        head = _SCHEDULED.match(part.strip("\n"))
        own = part.split(".unmet_dependencies = ", 1)[-1].split(".met_dependencies", 1)[0]
        if head is not None:
            found[head["name"]] = set(re.findall(r"'(buf\w+)'", own))
    return found
