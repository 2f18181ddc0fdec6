"""Timing candidates on the inputs of a real call, and keeping what was chosen beside the kernels.

A choice holds for one op, the shapes of one call, one kind of card and one set of candidates, each with
the text of its device code; whatever changes in these makes another key, and so another timing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from tileops import __version__
from tileops.engine import record
from tileops.engine.asked import asked_by
from tileops.engine.cache.entry import FORMAT, Stored
from tileops.engine.cache.shelves import shelves
from tileops.engine.cache.sources import UnknownSourceError
from tileops.engine.cache.versions import compiler_settings, triton_version
from tileops.engine.errors import BackendError
from tileops.engine.kernel import CallSpec, Entry, Kernel, TensorSpec
from tileops.engine.plan import build_artifact

__all__ = ["Tuned", "tuned"]

_ROUNDS = 5
_CALLS = 10

Candidate = tuple[type[Kernel], Entry]
Tuned = tuple[type[Kernel], Entry, list[tuple[str, str]]]
"""The fastest candidate and each other one with the reason why it does not serve."""


def tuned(
    call: CallSpec, kernels: list[type[Kernel]], inputs: tuple[Any, ...] | None, has_out: bool
) -> Tuned | None:
    """The candidate that was chosen before, else the fastest on ``inputs``, which is kept.

    None where there is no choice and no ``inputs`` to time with. Raises ``BackendError`` where no
    candidate can be timed.
    """
    candidates = [(kernel, entry) for kernel in kernels for entry in kernel.candidates(call)]
    try:
        names = [_name(call, kernel, entry) for kernel, entry in candidates]
        key = _key(call, names)
    except UnknownSourceError:  # a choice that no other process could recognise
        names, key = [], None
    kept = _kept(key, names) if key is not None else None
    if kept is not None:
        index, why = kept
        record.emit("reused", op=call.op, key=key, kernel=candidates[index][0].name)
        losers = [
            (kernel.name, f"tuned before: {why} ({entry.identity})")
            for n, (kernel, entry) in enumerate(candidates)
            if n != index
        ]
        return *candidates[index], losers
    if inputs is None:
        return None
    index, times, failed = _fastest(call, candidates, inputs, has_out)
    record.emit("tuned", op=call.op, key=key, kernel=candidates[index][0].name, times=times)
    if key is not None:
        _keep(call, key, names[index], times)
    losers = [
        (
            kernel.name,
            failed.get(n)
            or f"tuned: {times[n]:.1f} µs against {times[index]:.1f} µs ({entry.identity})",
        )
        for n, (kernel, entry) in enumerate(candidates)
        if n != index
    ]
    return *candidates[index], losers


# ---- names and keys ------------------------------------------------------------------------------


def _name(call: CallSpec, kernel: type[Kernel], entry: Entry) -> str:
    """What tells a candidate from the others in every process: its identity and its code."""
    text = f"{kernel.name} {_plain(entry.identity)}"
    if call.device.type == "cuda":
        text += "".join(f" {build.key_for(call.device.arch)}" for build in asked_by(entry.build))
    return text


def _plain(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({','.join(map(_plain, value))})"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, TensorSpec):
        return repr(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name:
        return f"{module}.{name}"
    raise UnknownSourceError(f"{type(value).__name__} has no name that lasts")


def _key(call: CallSpec, names: list[str]) -> str:
    if "=<object " in call.key:
        raise UnknownSourceError("the op's key is its own alone")

    def facts(spec: TensorSpec | None) -> Any:
        if spec is None:
            return None
        return (spec.shape, str(spec.dtype), spec.strides, spec.aligned)

    device = call.device
    parts = (
        ("format", FORMAT),
        ("tileops", __version__),
        ("torch", torch.__version__),
        ("triton", triton_version(), compiler_settings()),
        ("op", call.op, call.key),
        ("inputs", *((name, facts(spec)) for name, spec in call.inputs.items())),
        ("written", *sorted(call.written)),
        ("device", device.type, device.name, device.arch, device.multiprocessors),
        ("candidates", *names),
    )
    return sha256(repr(parts).encode()).hexdigest()


# ---- keeping -------------------------------------------------------------------------------------


def _kept(key: str, names: list[str]) -> tuple[int, str] | None:
    """The place of the kept choice among the candidates, and the times it was made by."""
    found = shelves().find("choice", key)
    if found is None:
        return None
    facts = found.stored.facts
    if facts.get("choice") not in names:
        return None  # not written by this code: it is timed again
    return names.index(facts["choice"]), f"{facts.get('why', '')}"


def _keep(call: CallSpec, key: str, name: str, times: dict[int, float]) -> None:
    own = shelves().own
    if own is None:
        return
    arch = call.device.arch_name
    facts = {
        "choice": name,
        "why": f"the fastest of {len(times)} took {min(times.values()):.1f} µs",
        "op": call.key,
        "device": call.device.name,
        **({"arch": arch} if arch else {}),
    }
    own.replace(Stored("choice", key, facts))


# ---- timing --------------------------------------------------------------------------------------


def _fastest(
    call: CallSpec, candidates: list[Candidate], inputs: tuple[Any, ...], has_out: bool
) -> tuple[int, dict[int, float], dict[int, str]]:
    """The index of the fastest, the time of each in µs, and what kept others from being timed.

    Written tensors are cloned first.
    """
    times: dict[int, float] = {}
    failed: dict[int, str] = {}
    for index, (kernel, entry) in enumerate(candidates):
        try:
            times[index] = _time(call, kernel, entry, inputs, has_out)
        except BackendError as error:
            failed[index] = str(error)
    if not times:
        raise BackendError(f"{call.op}: no candidate could be timed: {list(failed.values())}")
    return min(times, key=lambda index: (times[index], index)), times, failed


def _time(
    call: CallSpec, kernel: type[Kernel], entry: Entry, inputs: tuple[Any, ...], has_out: bool
) -> float:
    artifact = build_artifact(call, kernel.name, entry)
    run = artifact if entry.bind is None else entry.bind(artifact, call)
    args = [
        None if t is None else t.clone() if name in call.written else t.contiguous()
        for name, t in zip(call.inputs, inputs, strict=True)
    ]
    if "out" in call.written:
        spec = next(iter(call.outputs.values()))
        assert spec is not None
        args.append(torch.empty(spec.shape, dtype=spec.dtype, device=spec.device))
    elif has_out:
        args.append(None)
    run(*args)
    rounds = [_round(lambda: run(*args), call.device.type == "cuda") for _ in range(_ROUNDS)]
    return statistics.median(rounds)


def _round(work: Callable[[], Any], cuda: bool) -> float:
    if cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_CALLS):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / _CALLS
    begin = time.perf_counter()
    for _ in range(_CALLS):
        work()
    return (time.perf_counter() - begin) * 1e6 / _CALLS
