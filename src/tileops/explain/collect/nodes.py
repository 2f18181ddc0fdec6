"""The ops of this library that a graph holds, and what served them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from tileops.engine.boundary.instances import live_states
from tileops.engine.boundary.stamp import split_key
from tileops.engine.op import Op
from tileops.engine.record import Event as Recorded
from tileops.explain.collect.graphs import read_graph, user_line
from tileops.explain.model import (
    Compilation,
    Graph,
    Inductor,
    Kernel,
    Line,
    NearMiss,
    Node,
    OpNode,
)

_OPAQUE = "an op is one opaque node to this backend: it keeps its own kernel"


def read_nodes(
    one: Compilation, recorded: list[Recorded], rewriting: list[Recorded], lowered: list[Graph]
) -> None:
    """Fill the ops of a compilation and its near misses. ``rewriting``: what the backend "tileops"
    did to its graph; ``lowered``: the graphs that Inductor was given, as torch printed them."""
    kernels = [kernel for each in one.inductor for kernel in each.kernels]
    for node in _nodes(one):
        if node.target.startswith("torch.ops.tileops."):
            op = _op(_spelled(node.args), recorded)
            op.node, op.at = node.name, node.line
            op.not_fused = _OPAQUE if _own_kernel(node.target, kernels) else None
            one.ops.append(op)
    for event in rewriting:
        _rewritten(one, event, recorded)
    inlined = {event.data["node"] for event in rewriting if event.kind == "inlined"}
    for op in one.ops:
        if op.node in inlined:
            op.fused_into, op.not_fused = _inside(op, one.inductor, lowered), None


def _rewritten(one: Compilation, event: Recorded, recorded: list[Recorded]) -> None:
    told = event.data
    line = user_line(told["stack"])
    if event.kind == "substituted":
        op = _op(told.get("call", told["op"]), recorded)
        op.node, op.at = told["node"], line
        found = [user_line(stack) for stack in told.get("stacks", [told["stack"]])]
        places = {(each.file, each.number): each for each in found if each is not None}
        op.substituted_from = [places[place] for place in sorted(places)]
        if op.op.startswith("torch."):
            op.target, op.decided_by, op.kernel = "torch", "the backend", told["op"]
        one.ops.append(op)
    elif event.kind in ("declined", "near miss"):
        same = [each for each in one.ops if (each.node, each.op) == (told["node"], told["op"])]
        for op in same:
            op.not_fused = told["reason"]
        if not same:
            means_it = event.kind == "declined"
            one.near_misses.append(NearMiss(told["op"], line, told["reason"], means_it))


def _inside(op: OpNode, inductor: list[Inductor], lowered: list[Graph]) -> str | None:
    """The kernels that compute the nodes of an op's decomposition."""
    own: set[str] = set()
    lines: list[Line | None] = [*op.substituted_from] or [op.at]
    for graph in lowered:
        # Torch prints the innermost line, which for such nodes is in the op's generated code.
        raw = {node.name for node in read_graph("", graph.code).nodes if _generated(node.line)}
        # What replaced plain code has the lines of that code.
        own |= {
            n.name for n in graph.nodes
            if (op.substituted_from or n.name in raw) and any(_same_place(n.line, at) for at in lines)
        }  # fmt: skip
    names = [
        kernel.name for each in inductor if each.stage != "backward" for kernel in each.kernels
        if own & set(kernel.nodes or ())
    ]  # fmt: skip
    return ", ".join(names) or None


def _generated(line: Line | None) -> bool:
    return line is not None and line.file.startswith("tileops_generated")


def _same_place(line: Line | None, other: Line | None) -> bool:
    return (
        line is not None
        and other is not None
        and (line.file, line.number) == (other.file, other.number)
    )


def read_eager(recorded: list[Recorded], compilations: list[Compilation]) -> list[OpNode]:
    """Ops that planned a call and that no captured graph holds."""
    in_graphs = {_spelled(node.args) for one in compilations for node in _nodes(one)}
    planned = dict.fromkeys(each.data["key"] for each in recorded if each.kind == "plan")
    return [_op(key, recorded) for key in planned if key not in in_graphs]


def _nodes(one: Compilation) -> list[Node]:
    """Of the captured graph and of its backward."""
    later = one.normalisation.graphs if one.normalisation else []
    backward = [node for graph in later if graph.stage == "backward" for node in graph.nodes]
    return [*(one.capture.nodes if one.capture else ()), *backward]


def _spelled(args: str) -> str:
    """The op as its constructor call, which an operator's last string argument holds."""
    try:
        call = ast.parse(f"f({args})", mode="eval").body
    except SyntaxError:
        return ""
    given = call.args if isinstance(call, ast.Call) else []
    texts = [each.value for each in given if isinstance(each, ast.Constant)]
    keys = [text for text in texts if isinstance(text, str)]
    return split_key(keys[-1])[1] if keys else ""


@dataclass
class _Served:
    target: str | None = None
    decided_by: str | None = None
    kernel: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    identity: str | None = None


def _op(spelled: str, recorded: list[Recorded]) -> OpNode:
    name, bracket, rest = spelled.partition("(")
    plans = [each for each in recorded if each.kind == "plan" and each.data["key"] == spelled]
    last = _last(name, spelled)
    served = _Served()
    if last is not None:
        build = re.sub(r" at 0x[0-9a-f]+", "", repr(last.build)) if last.build else None
        served = _Served(last.target, last.decided_by, last.kernel, dict(last.refused), build)
    elif plans:  # the op is gone: its plan told the same, without the build
        told = plans[-1].data
        served = _Served(told["target"], told["decided_by"], told["kernel"], dict(told["refused"]))
    called = last is not None or bool(plans)
    return OpNode(
        op=name, parameters=bracket + rest, node=None, at=None, **vars(served),
        plan_hit=not plans if called else None, substituted_from=[], fused_into=None, not_fused=None,
    )  # fmt: skip


def _last(name: str, spelled: str) -> Any:
    """What served the last call of such ops; None where none is alive or was called."""
    waiting: list[type] = [Op]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        for key, reference in list(live_states(cls).items()) if cls.__name__ == name else ():
            state = reference() if split_key(key)[1] == spelled else None
            if state is not None and state.last is not None:
                return state.last.made
    return None


def _own_kernel(target: str, kernels: list[Kernel]) -> bool:
    name = target.removeprefix("torch.ops.").removesuffix(".default")
    return any(name in kernel.name for kernel in kernels)
