"""Who serves an operator under each dispatch key, and the order in which a call meets them."""

from __future__ import annotations

import re
from typing import Any

from tileops.explain import torch_private as private
from tileops.explain.collect.normalise import short
from tileops.explain.model import Dispatch, DispatchEntry, DispatchStep, Graph

_ROW = re.compile(
    r"^(?P<key>\w+): (?P<what>fallthrough |)registered at (?P<where>.+?) \[(?P<kind>[^\]]+)\]$"
)
_BUILD = re.compile(r"^/.*?/pytorch/(?=(?:aten|torch|build|c10)/)")
"""Where the machine that built torch had its source."""


def read_dispatch(graphs: list[Graph]) -> list[Dispatch]:
    """For each operator of these graphs."""
    devices: dict[str, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.target.startswith("torch.ops."):
                device = (node.device or "cpu").split(":", 1)[0]
                devices.setdefault(short(node.target), device)
    return [_dispatch(name, device) for name, device in devices.items()]


def _dispatch(name: str, device: str) -> Dispatch:
    parts = name.split(".")
    overload = f".{parts[2]}" if len(parts) > 2 else ""
    table = private.computed_table(f"{parts[0]}::{parts[1]}{overload}")
    if table is None:
        return Dispatch(name, [], None, None)
    entries = []
    for row in table.splitlines():
        if match := _ROW.match(row.strip()):
            kernel = "fallthrough" if match["what"] else match["kind"]
            entries.append(DispatchEntry(match["key"], kernel, _BUILD.sub("", match["where"])))
    plain, functional = private.key_set(device), private.key_set(device, functional=True)
    return Dispatch(name, entries, _visited(entries, plain), _visited(entries, functional))


def _visited(entries: list[DispatchEntry], keys: Any) -> list[DispatchStep] | None:
    """By torch's rule: the highest key of the call's set that is no fallthrough; redispatch goes on
    with the keys below it. A composite kernel calls other operators, which dispatch for themselves."""
    served = {entry.key: entry.kernel for entry in entries}
    steps: list[DispatchStep] = []
    order = None if keys is None else private.redispatch(keys)
    if order is None:
        return None
    passed: list[str] = []
    for key, _ in order:
        passed.append(key)
        kernel = served.get(key)
        if kernel is None:
            continue
        if kernel == "fallthrough":
            steps.append(DispatchStep(key, "fallthrough", []))
            continue
        final = not key.startswith(("Autograd", "ADInplace", "Autocast", "Functionalize", "Python"))
        final = final or "math" in kernel  # composite: CompositeImplicitAutograd
        steps.append(DispatchStep(key, "kernel", [] if final else list(passed)))
        if final:
            break
    return steps
