"""Timing on a card: device time by graph replay, host time, and the facts of the machine.

Device time. A work's calls are captured into one CUDA graph, each call on the next of several sets
of inputs, so that together they exceed the L2 cache and the launch gaps of Python are gone; one
sample is one replay over its number of calls. Outputs are kept alive during capture for as many
calls as there are sets: a work that allocates would otherwise write one cached buffer over and
over. What is so small that 64 sets fit in the cache is timed from the cache, where a decoding step
finds its activations too. Contenders take turns, forwards and backwards, so that a drift of clocks
hits all of them.
"""

from __future__ import annotations

import datetime as dt
import gc
import platform
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = [
    "Times",
    "capturable",
    "device_times",
    "facts",
    "host_times",
    "in_turns",
    "sampler",
    "sets_past_l2",
    "slug",
    "versions",
]

Work = Callable[[], Any]
Times = dict[str, float]
"""``median``, ``min``, ``max`` in µs and the number of ``samples``."""

SAMPLE_US = 3000.0
"""One replay lasts about this long, which makes the clock's grain and the launch small."""
FEWEST_CALLS, MOST_CALLS = 12, 2000


def sets_past_l2(bytes_each: int, most: int = 64) -> int:
    """How many sets of ``bytes_each`` together exceed four times the L2 cache."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(2, min(most, -(-4 * l2 // bytes_each)))


def device_times(contenders: Mapping[str, Sequence[Work]], rounds: int = 11) -> dict[str, Times]:
    """Device time of one call, for contenders given as a work on each set of inputs."""
    return in_turns({name: sampler(works) for name, works in contenders.items()}, rounds)


def sampler(works: Sequence[Work]) -> Callable[[], float]:
    """Captures a graph of these works; each call replays it and gives the device time of one work."""
    graph, calls = _sized(works)
    return lambda: _replay_us(graph) / calls


def in_turns(samplers: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Times]:
    """Samples of each, taken in turns, forwards and backwards."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers)
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            samples[name].append(samplers[name]())
    return {name: _summary(values) for name, values in samples.items()}


def capturable(works: Sequence[Work]) -> bool:
    """Whether a graph can hold these works: none waits for the device."""
    with torch.no_grad():
        for work in works:
            work()
        try:
            _captured(works, 1)
        except RuntimeError:
            torch.cuda.synchronize()
            return False
    return True


def _sized(works: Sequence[Work]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of so many calls that a replay lasts ``SAMPLE_US``, and their number."""
    for work in [*works[:2], *works]:  # compiles and loads, which a graph cannot
        work()
    once = _replay_us(_captured(works, 1)) / len(works)
    calls = min(max(SAMPLE_US / max(once, 0.1), FEWEST_CALLS), MOST_CALLS)
    turns = -(-int(calls) // len(works))
    return _captured(works, turns), turns * len(works)


def _captured(works: Sequence[Work], turns: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    alive: deque[Any] = deque(maxlen=len(works))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for work in works:
                alive.append(work())
    alive.clear()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Time of one replay, queued behind another so that no launch by the host is part of it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def host_times(
    contenders: Mapping[str, Work], calls: int = 2000, rounds: int = 9
) -> dict[str, Times]:
    """Host time of one call; read ``min``: what disturbs a host only adds.

    Works must be small on the device, or a full launch queue is measured.
    """
    for work in contenders.values():
        for _ in range(200):
            work()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in order if turn % 2 == 0 else reversed(order):
                work = contenders[name]
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    work()
                samples[name].append((time.perf_counter() - begin) * 1e6 / calls)
                torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return {name: _summary(values) for name, values in samples.items()}


def _summary(samples: list[float]) -> Times:
    return {
        "median": round(statistics.median(samples), 4),
        "min": round(min(samples), 4),
        "max": round(max(samples), 4),
        "samples": len(samples),
    }


def facts(commit: str | None = None) -> dict[str, Any]:
    """Card, driver, versions, date and commit, for the head of a report."""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "card": about.name,
        "multiprocessors": about.multi_processor_count,
        "l2_bytes": about.L2_cache_size,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": _output(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"
        ),
        "cuda": torch.version.cuda,
        **versions(commit),
    }


def versions(commit: str | None = None) -> dict[str, Any]:
    """The part of ``facts`` that needs no card."""
    root = Path(__file__).parent
    dirty = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "-C", str(root), "rev-parse", "HEAD"),
        "dirty": None if dirty is None else bool(dirty),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def slug(card: str) -> str:
    """A card's name as part of a file name: ``NVIDIA H200`` becomes ``nvidia_h200``."""
    return "".join(letter if letter.isalnum() else "_" for letter in card.lower())
