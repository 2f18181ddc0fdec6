"""The ops of this library that a graph holds, and what served them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from tileops.engine.boundary.instances import live_states
from tileops.engine.boundary.stamp import split_key
from tileops.engine.op import Op
from tileops.engine.record import Event as Recorded
from tileops.explain.model import Compilation, Kernel, Node, OpNode

_OPAQUE = "an op is one opaque node to this backend: it keeps its own kernel"


def read_nodes(one: Compilation, recorded: list[Recorded]) -> list[OpNode]:
    kernels = [kernel for each in one.inductor for kernel in each.kernels]
    found = []
    for node in _nodes(one):
        if node.target.startswith("torch.ops.tileops."):
            op = _op(_spelled(node.args), recorded)
            op.node, op.at = node.name, node.line
            op.not_fused = _OPAQUE if _own_kernel(node.target, kernels) else None
            found.append(op)
    return found


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
        build = repr(last.build) if last.build else None
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
