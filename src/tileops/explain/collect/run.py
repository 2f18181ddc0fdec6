"""Caches, time of each phase, CUDA graphs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from tileops.engine.record import Event as Recorded
from tileops.explain import torch_private as private
from tileops.explain.collect.events import Event
from tileops.explain.model import CacheLookup, Compilation, CudaGraphs, Phase

_CACHE = re.compile(r"^(aotautograd|fx_graph)_cache_(hit|miss|bypass)$")
_LEVELS = {"aotautograd": "aot_autograd", "fx_graph": "fx_graph"}


def read_caches(events: list[Event], one: Compilation, started: float) -> list[CacheLookup]:
    """A compilation is a miss of Dynamo's cache; a hit compiles nothing, so a session sees none."""
    at = one.at
    key = f"{one.function} at {at.file}:{at.number}" if at else one.function or None
    failed = one.recompile.failures[:1] if one.recompile else []
    why: str | None = failed[0].guard if failed else "no version was compiled yet"
    found = [CacheLookup("dynamo", "miss", key, why), *_code_cache(one, started)]
    for event in events:
        match = _CACHE.match(event.kind)
        if match is None:
            continue
        told = event.json() if event.text else {}
        why = told.get("cache_bypass_reason") or told.get("cache_status_detailed")
        found.append(CacheLookup(_LEVELS[match[1]], match[2], told.get("key"), why))
    return found


def _code_cache(one: Compilation, started: float) -> list[CacheLookup]:
    """Machine code of C++ kernels: a library that is older than the session was found."""
    libraries: dict[str, str] = {}
    for lowered in one.inductor:
        for kernel in lowered.kernels if lowered.path else ():
            library = private.library(lowered.path or "", kernel.name)
            if library is not None:
                libraries.setdefault(library, kernel.name)
    found = []
    for library, name in libraries.items():
        with contextlib.suppress(OSError):
            made = Path(library).stat().st_mtime >= started
            key = Path(library).name.split(".", 1)[0]
            found.append(CacheLookup("code", "miss" if made else "hit", key, name))
    return found


def read_own_caches(recorded: list[Recorded]) -> list[CacheLookup]:
    """Of this library's kernels: machine code, and choices that were timed."""
    outcomes = {"loaded": "hit", "compiled": "miss", "reused": "hit", "tuned": "miss"}
    return [
        CacheLookup(
            "tileops", outcomes[each.kind], str(each.data["key"]),
            f"{'machine code' if each.kind in ('loaded', 'compiled') else 'choice by time'} of "
            f"{getattr(each.data['kernel'], '__name__', each.data['kernel'])}",
        )
        for each in recorded if each.kind in outcomes
    ]  # fmt: skip


def read_phases(events: list[Event]) -> list[Phase]:
    """Each phase without those inside it. ``backward`` is lowered when it is first needed."""
    phases = []
    for event in events:
        told = event.data
        if event.kind == "compilation_metrics":
            frame, backend = (told.get(f"{n}_compile_time_s") for n in ("entire_frame", "backend"))
            inductor, code = told.get("inductor_compile_time_s"), told.get("code_gen_time_s")
            names = ("capture", "normalise", "lower", "code")
            phases += _nested(names, (frame, backend, inductor, code))
            if restart := told.get("dynamo_time_before_restart_s"):
                phases.append(Phase("capture given up", restart))
        elif event.kind == "bwd_compilation_metrics":
            inductor, code = told.get("inductor_compile_time_s"), told.get("code_gen_time_s")
            phases += _nested(("backward: lower", "backward: code"), (inductor, code))
    return phases


def _nested(names: tuple[str, ...], times: tuple[float | None, ...]) -> list[Phase]:
    """From times of phases each of which holds the next one."""
    phases = []
    for number, (name, time) in enumerate(zip(names, times, strict=True)):
        if time is not None:
            inside = next((each for each in times[number + 1 :] if each is not None), 0.0)
            phases.append(Phase(name, max(0.0, time - inside)))
    return phases


def read_cuda_graphs(events: list[Event], *, asked: bool | None, on_gpu: bool) -> CudaGraphs | None:
    """None where nobody asked for them."""
    skipped = [_skip(event) for event in events]
    reason = next((each for each in skipped if each), None)
    if reason:
        return CudaGraphs(False, reason)
    if not asked:
        return None
    if not on_gpu:
        return CudaGraphs(False, "nothing runs on a GPU")
    return CudaGraphs(None, None)


def _skip(event: Event) -> str | None:
    if event.kind.endswith("compilation_metrics") and event.data.get("cudagraph_skip_reason"):
        return str(event.data["cudagraph_skip_reason"])
    if event.kind.endswith("__cudagraphs") and "skipping cudagraphs" in event.text:
        return event.text
    return None
