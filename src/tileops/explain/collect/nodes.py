"""The ops of this library that a graph holds, and what served them."""

from __future__ import annotations

import ast
from typing import Any

from tileops.engine.boundary.instances import live_states
from tileops.engine.record import Event as Recorded
from tileops.explain.model import Compilation, Kernel, OpNode

_OPAQUE = "an op is one opaque node to this backend: it keeps its own kernel"


def read_nodes(one: Compilation, recorded: list[Recorded]) -> list[OpNode]:
    if one.capture is None:
        return []
    kernels = [kernel for each in one.inductor for kernel in each.kernels]
    found = []
    for node in one.capture.nodes:
        if not node.target.startswith("torch.ops.tileops."):
            continue
        key = _key(node.args)
        name, _, rest = key.partition("(")
        last = _last(key)
        plans = [each for each in recorded if each.kind == "plan" and each.data.get("key") == key]
        found.append(
            OpNode(
                name, f"({rest}" if rest else "", node.name, node.line,
                *_served(last, plans), _hit(last, plans), [],
                None, _OPAQUE if _own(node.target, kernels) else None,
            )
        )  # fmt: skip
    return found


def read_eager(recorded: list[Recorded], in_graphs: set[str]) -> list[OpNode]:
    """Ops that no captured graph holds."""
    found: dict[str, OpNode] = {}
    for each in recorded:
        key = each.data.get("key", "")
        name, _, rest = key.partition("(")
        if each.kind == "plan" and key not in in_graphs:
            served = _served(_last(key), [each])
            found[key] = OpNode(
                name, f"({rest}" if rest else "", None, None, *served, False, [], None, None
            )
    return list(found.values())


def key_of(node: OpNode) -> str:
    return node.op + node.parameters


def _key(args: str) -> str:
    """An operator's last argument says which op is meant."""
    try:
        call = ast.parse(f"f({args})", mode="eval").body
    except SyntaxError:
        return ""
    strings = [
        a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
    ]  # type: ignore[attr-defined]
    return strings[-1] if strings else ""


def _last(key: str) -> Any:
    """What served the last call of the ops of this key; None where none is alive or called."""
    from tileops.engine.op import Op

    name = key.partition("(")[0]
    waiting: list[type] = [Op]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__name__ == name:
            state = live_states(cls).get(key)
            alive = None if state is None else state()
            return None if alive is None else alive.last
    return None


def _served(last: Any, plans: list[Recorded]) -> tuple[Any, ...]:
    """Target, who decided it, kernel, refusals, build identity."""
    if last is not None:
        return (
            last.target,
            last.decided_by,
            last.kernel,
            dict(last.refused),
            repr(last.build) if last.build else None,
        )
    if plans:
        told = plans[-1].data
        return told["target"], told["decided_by"], told["kernel"], dict(told["refused"]), None
    return None, None, None, {}, None


def _hit(last: Any, plans: list[Recorded]) -> bool | None:
    return None if last is None and not plans else not plans


def _own(target: str, kernels: list[Kernel]) -> bool:
    name = target.removeprefix("torch.ops.").removesuffix(".default")
    return any(name in kernel.name for kernel in kernels)
