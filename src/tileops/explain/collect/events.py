"""One list of what torch says while a session listens; nothing is read out until it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tileops.engine.compiled import inside
from tileops.engine.record import Event as Recorded
from tileops.engine.record import recording
from tileops.explain import torch_private as private

_CONTEXT = {
    "rank", "frame_id", "frame_compile_id", "attempt", "compiled_autograd_id", "stack",
    "has_payload", "timestamp", "thread", "pathname", "severity", "lineno", "subgraph_name",
}  # fmt: skip
_GRAPHS = {
    "dynamo_output_graph", "aot_joint_graph", "aot_forward_graph", "aot_backward_graph",
    "aot_inference_graph", "inductor_post_grad_graph",
}  # fmt: skip
_SKIPPED = {"chromium_event", "describe_storage", "describe_tensor", "describe_source", "str"}


@dataclass
class Event:
    kind: str
    """Of the structured trace, or ``log:`` and the logger's name."""
    place: str | None
    """Id of the compilation."""
    attempt: int
    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    recorded: int = 0
    """How many events this library had recorded by then: those know no compilation."""

    def json(self) -> Any:
        return json.loads(self.text)


class Events:
    """Listens from :meth:`listening` on; :attr:`seen` in the order it happened."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.recorded: list[Recorded] = []
        self.started = time.time()
        self._lock = threading.Lock()
        self._end_autotune: Callable[[], None] | None = None
        self.told_rounds = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with recording() as self.recorded, self._tapping():
            yield

    @contextlib.contextmanager
    def _tapping(self) -> Iterator[None]:
        loggers = (
            private.TRACE_SOURCE, private.TRACE_CALL, private.FUSION, private.POST_FUSION,
            private.CUDAGRAPHS,
        )  # fmt: skip
        end_rounds = private.on_round(self._round)
        self.told_rounds = end_rounds is not None
        try:
            with private.tapped(
                {private.TRACE: self._traced, **dict.fromkeys(loggers, self._logged)}
            ):
                yield
        finally:
            for end in (end_rounds, self._end_autotune):
                if end is not None:
                    end()

    def _add(self, event: Event) -> None:
        if inside():
            return
        event.recorded = len(self.recorded)
        with self._lock:
            self.seen.append(event)

    def _traced(self, record: logging.LogRecord) -> None:
        metadata: dict[str, Any] = record.metadata  # type: ignore[attr-defined]
        kind = next((name for name in metadata if name not in _CONTEXT), None)
        if kind is None or kind in _SKIPPED:
            return
        data = metadata[kind]
        text = getattr(record, "payload", None)
        if kind == "artifact":
            kind = data["name"]
        place, attempt = _place(metadata)
        event = Event(kind, place, attempt, data if isinstance(data, dict) else {}, text or "")
        if kind == "recompile_reasons":
            reasons = _reasons(event.text)
            event.data = {"reasons": reasons, **_the_call(reasons)}
        elif kind in _GRAPHS:
            if kind == "inductor_post_grad_graph" and self._end_autotune is None:
                self._end_autotune = private.on_autotune(self._timed)
            event.data = {**event.data, "stacks": private.node_stacks() or []}
        self._add(event)

    def _round(self, code: types.CodeType, head: Any) -> None:
        place, attempt = private.compile_place() or (None, 0)
        where = {
            "file": code.co_filename,
            "function": code.co_name,
            "at": head.positions,
            "offset": head.offset,
        }
        self._add(Event("round", place, attempt, where))

    def _timed(self, name: str, times: dict[str, float]) -> None:
        place, attempt = private.compile_place() or (None, 0)
        self._add(Event("autotuned", place, attempt, {"name": name, "times": times}))

    def _logged(self, record: logging.LogRecord) -> None:
        place, attempt = private.compile_place() or (None, 0)
        self._add(Event(f"log:{record.name}", place, attempt, text=record.getMessage()))


def _place(metadata: dict[str, Any]) -> tuple[str | None, int]:
    frame, number = metadata.get("frame_id"), metadata.get("frame_compile_id")
    if frame is None:
        inside = private.compile_place()
        return inside or (None, 0)
    autograd = metadata.get("compiled_autograd_id")
    place = f"{frame}/{number}" if autograd is None else f"!{autograd}/{frame}/{number}"
    return place, metadata.get("attempt") or 0


def _reasons(text: str) -> list[str]:
    """One reason stands as it is, several as JSON."""
    return json.loads(text) if text.startswith("[") else [text]


def _the_call(reasons: list[str]) -> dict[str, Any]:
    """Its function, and what it brought where a guard refused it; read while its frame lives."""
    from tileops.explain.collect.guards import what_came

    frame = private.recompiled_frame()
    if frame is None:
        return {"actual": {}, "code": {}}
    names, module, code = frame
    came = (what_came(reason, names, module) for reason in reasons)
    values = dict(each for each in came if each is not None)
    named = {"co_name": code.co_name, "co_filename": code.co_filename,
             "co_firstlineno": code.co_firstlineno}  # fmt: skip
    return {"actual": values, "code": named}
