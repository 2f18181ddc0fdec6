"""Timing candidates on the inputs of a real call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tileops.engine.build import built
from tileops.engine.errors import BackendError
from tileops.engine.kernel import CallSpec, Entry, Kernel

__all__ = ["fastest"]

_ROUNDS = 5
_CALLS = 10


def fastest(
    call: CallSpec, kernels: list[type[Kernel]], inputs: tuple[Any, ...], has_out: bool
) -> tuple[type[Kernel], Entry, list[tuple[str, str]]]:
    """The fastest candidate and the losers with their times. Written tensors are cloned first."""
    timed: list[tuple[float, int, type[Kernel], Entry]] = []
    failed: list[tuple[str, str]] = []
    for kernel in kernels:
        for entry in kernel.candidates(call):
            try:
                time_us = _time(call, kernel, entry, inputs, has_out)
            except BackendError as error:
                failed.append((kernel.name, str(error)))
                continue
            timed.append((time_us, len(timed), kernel, entry))
    if not timed:
        raise BackendError(f"{call.op}: no candidate could be timed: {failed}")
    timed.sort(key=lambda row: row[:2])
    best, _, kernel, entry = timed[0]
    losers = [
        (k.name, f"tuned: {t:.1f} µs against {best:.1f} µs ({e.identity})")
        for t, _, k, e in timed[1:]
    ]
    return kernel, entry, losers + failed


def _time(
    call: CallSpec, kernel: type[Kernel], entry: Entry, inputs: tuple[Any, ...], has_out: bool
) -> float:
    identity = ("builtin", entry.identity, call.device.type, call.device.index)
    artifact = built(identity, entry.build, op=call.op, target="builtin", kernel=kernel.name)
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
