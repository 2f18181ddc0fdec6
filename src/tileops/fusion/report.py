"""What a rewrite did and declined, with reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from tileops.engine import record
from tileops.engine.manifest.catalog import package_root
from tileops.engine.record import Event

__all__ = ["Report", "last_report"]

_last: Report | None = None


@dataclass
class Report:
    """The events of one graph, in the order in which they happened; each also goes to every open
    ``tileops.recording()``.

    Kinds: ``substituted``: plain PyTorch became an op (``call``: which; ``steps``: of how many nodes;
    ``stacks``: where those are);
    ``near miss``: plain PyTorch has the hint of an op and does not mean it, for a ``reason``;
    ``inlined``: an op became its decomposition; ``fused``: an op took its neighbours; ``declined``: what
    means an op or is one stayed what it is, for a ``reason``. Data: ``op``, the class's name; ``node``;
    ``stack``: where the user's code is; what else the kind has to say.
    """

    events: list[Event] = field(default_factory=list)

    def add(self, kind: str, node: Node, op: str, **data: Any) -> None:
        """Note what happened to ``node``."""
        stack = node.meta.get("stack_trace") or ""
        event = Event(kind, {"op": op, "node": node.name, **data, "stack": stack})
        self.events.append(event)
        record.emit(kind, **event.data)

    def substituted(self, node: Node, op: str, call: str, region: Collection[Node]) -> None:
        """Note that ``node``, written ``call``, stands for the plain PyTorch of ``region``."""
        stacks = dict.fromkeys(step.meta.get("stack_trace") or "" for step in sorted(region))
        said = [stack for stack in stacks if stack]
        self.add("substituted", node, op, call=call, steps=len(region), stacks=said)

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """The data of the events of one kind."""
        return (event.data for event in self.events if event.kind == kind)

    def __str__(self) -> str:
        return "\n".join(map(_line, self.events)) or "nothing to rewrite"


_APART = ("op", "node", "stack", "stacks")


def _line(event: Event) -> str:
    more = (f"{k}: {v}" for k, v in event.data.items() if k not in _APART)
    frames = [line.strip() for line in event.data["stack"].splitlines()]
    place = next((f for f in reversed(frames) if f.startswith("File") and _of_user(f)), "")
    return f"{event.kind} {event.data['op']} ({', '.join([event.data['node'], *more])}) {place}".rstrip()


_LIBRARIES = tuple(f'File "{root}/' for root in (package_root(), Path(torch.__file__).parent))


def _of_user(frame: str) -> bool:
    return "tileops_generated" not in frame and not frame.startswith(_LIBRARIES)


def last_report() -> Report | None:
    """The report of the graph that this process compiled last with the backend, None before the
    first."""
    return _last


def keep(report: Report) -> None:
    """Make ``report`` the last one."""
    global _last
    _last = report
