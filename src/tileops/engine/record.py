"""Plain events about what the engine did: targets decided, kernels refused, chosen, built.

Nothing is stored unless somebody listens: ``with recording() as events: ...``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "build_count", "compile_count", "emit", "listening", "recording"]


@dataclass(frozen=True)
class Event:
    """One fact: ``kind`` and its data. Kinds: ``plan``; ``built``: an artifact of this process;
    ``compiled``, ``loaded``: machine code made, or found in the cache; ``tuned``, ``reused``;
    ``vmap``: a batch of so many slices became so many calls; ``inlined``, ``substituted``, ``fused``,
    ``declined``: what the fusion backend made of a node."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


_lock = threading.Lock()
_sinks: list[list[Event]] = []
_counts = {"built": 0, "compiled": 0}


def listening() -> bool:
    """Whether anybody records; lets a caller skip making event data."""
    return bool(_sinks)


def emit(kind: str, **data: Any) -> None:
    """Give an event to every open recording; builds and compilations are counted always."""
    if kind in _counts:
        with _lock:
            _counts[kind] += 1
    if _sinks:
        event = Event(kind, data)
        with _lock:
            for sink in _sinks:
                sink.append(event)


def build_count() -> int:
    """Kernels built in this process so far, by any target."""
    return _counts["built"]


def compile_count() -> int:
    """Kernels of which this process has made the machine code: those that no cache had."""
    return _counts["compiled"]


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """Collect the events of all threads while the block runs."""
    sink: list[Event] = []
    with _lock:
        _sinks.append(sink)
    try:
        yield sink
    finally:
        with _lock:
            # By identity: an equal but different list must stay.
            _sinks[:] = [s for s in _sinks if s is not sink]
