"""Whole models: plain PyTorch, Inductor, and ``backend="tileops"``, eager first.

    python -m benchmarks.models --device cpu                   # MiniLM and SmolLM2, real weights
    python -m benchmarks.models --device cuda --seconds 420    # layers of Llama 3 8B
    python -m benchmarks.models --device cpu --tiny            # only that it works

For each case and contender: seconds of the first call, compiled with cold caches; milliseconds of a
step, medians of turns in which the contenders alternate; memory that a step allocates at its most.
``ratio`` is the median over turns of Inductor's time over the contender's, greater than 1 where that is
faster. ``ops``: the same computed by tileops ops instead of plain PyTorch, compiled by the backend.
Before anything is timed, results are compared with those of the eager model in float32: nobody may be off
by much more than that model is in the dtype at hand.

On a CPU that others use too, ``--threads 1`` counts the thread's own time instead of the clock's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.model_cases import Case, Step, cases  # noqa: E402
from benchmarks.timing import facts, slug, versions  # noqa: E402
from tileops.fusion import backend, last_report  # noqa: E402

ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""‖y - exact‖ / ‖exact‖ that any result may have, where ``exact`` is the eager model's in float32."""
MORE = 1.5
"""How many times the eager model's own error another may have: each rounds in other places."""

Work = Callable[[], Any]


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _off(given: Any, wanted: Any) -> float:
    """The greatest relative error of a result."""
    pairs = zip(_tensors(given), _tensors(wanted), strict=True)
    return max(float((g.double() - w.double()).norm() / w.double().norm()) for g, w in pairs)


def _peak(work: Work, device: str) -> int:
    """Bytes that one step allocates at its most, over what is there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in steps:
        now += size
        most = max(most, now)
    return most


def _contenders(case: Case) -> tuple[dict[str, Work], dict[str, dict[str, Any]]]:
    """The step by contender, and what each reports of its first call. Raises ``SystemExit`` where a
    result is wrong."""
    model, step, ops = case.make()
    exact = _exact(model, step)
    more: dict[str, Any] = {} if case.mode is None else {"mode": case.mode}
    makers: dict[str, Callable[[], Any]] = {
        "eager": lambda: model,
        "inductor": lambda: torch.compile(model.forward, fullgraph=True, **more),
        "tileops": lambda: torch.compile(model.forward, backend=backend, fullgraph=True, **more),
    }
    if ops is not None:
        makers["ops"] = lambda: torch.compile(ops.forward, backend=backend, fullgraph=True, **more)
    works: dict[str, Work] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        torch._dynamo.reset()
        run = make()
        begin = time.perf_counter()
        with torch._inductor.utils.fresh_cache():
            result = step(run)
        first = time.perf_counter() - begin
        error = _off(result, exact)
        about[name] = {"first_call_s": round(first, 2), "error": float(f"{error:.3g}")}
        if not error <= max(ERROR[case.dtype], MORE * about["eager"]["error"]):
            own = about["eager"]["error"]
            raise SystemExit(
                f"{case.name}: {name} is wrong by {error:.3g}, eager code by {own:.3g}"
            )
        if name in ("tileops", "ops"):
            report = last_report()
            assert report is not None
            kinds = [event.kind for event in report.events]
            about[name]["rewritten"] = {k: kinds.count(k) for k in dict.fromkeys(kinds)}
        works[name] = lambda run=run: step(run)
    return works, about


def _exact(model: Any, step: Step) -> Any:
    """The step in float32, whose result is kept; the model's weights are widened meanwhile."""
    dtypes = [weight.dtype for weight in model.parameters()]
    for weight in model.parameters():
        weight.data = weight.data.float()
    result = step(lambda **given: model(**_wide(given)))
    result = torch.utils._pytree.tree_map(torch.Tensor.clone, result)
    for weight, dtype in zip(model.parameters(), dtypes, strict=True):
        weight.data = weight.data.to(dtype)
    return result


def _wide(given: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments in float32: tensors, and those in a cache, which is not written then."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            found[name] = value.float() if value.is_floating_point() else value
        elif hasattr(value, "layers"):
            found[name] = cache = copy.deepcopy(value)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.float(), layer.values.float()
        else:
            found[name] = value
    return found


def _times(works: dict[str, Work], device: str, rounds: int, own: bool) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by contender; ``own``: the thread's."""
    clock = time.thread_time if own else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
        work()  # a CUDA graph is recorded at the second call
    order = list(works)
    for turn in range(rounds):
        for name in order if turn % 2 == 0 else reversed(order):
            _synchronise(device)
            begin = clock()
            works[name]()
            _synchronise(device)
            samples[name].append(clock() - begin)
    return samples


def measure(case: Case, device: str, rounds: int, own: bool) -> dict[str, Any]:
    """One case: every contender checked, then timed."""
    with torch.set_grad_enabled(case.trains):
        works, about = _contenders(case)
        samples = _times(works, device, rounds, own)
        for name, work in works.items():
            seconds = statistics.median(samples[name])
            turns = zip(samples["inductor"], samples[name], strict=True)
            about[name] |= {
                "ms": round(seconds * 1e3, 4),
                "tokens_per_s": round(case.tokens / seconds, 1),
                "ratio": round(statistics.median(base / own for base, own in turns), 3),
                "peak_mib": round(_peak(work, device) / 2**20, 2),
            }
    return {"case": case.name, "dtype": str(case.dtype)[6:], "tokens": case.tokens, **about}


def _table(result: dict[str, Any]) -> None:
    print(f"\n{result['case']}, {result['dtype']}")
    for name, row in result.items():
        if isinstance(row, dict):
            print(
                f"  {name:9}{row['ms']:11.3f} ms {row['tokens_per_s']:11.1f} tokens/s  ratio"
                f" {row['ratio']:.3f}  {row['peak_mib']:9.1f} MiB  first {row['first_call_s']:.1f} s"
                f"  {row.get('rewritten', '')}",
                flush=True,
            )


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.device == "cuda":
        return facts(arguments.commit)
    found = versions(arguments.commit)
    own = arguments.threads == 1
    load = [round(value, 1) for value in os.getloadavg()]
    clock = "time of the thread" if own else "wall"
    return {"card": "cpu", "threads": torch.get_num_threads(), "clock": clock,
            "load": load, **found}  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="parts of names of cases; all where none is given")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it works")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no case after these")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    begin = time.perf_counter()
    report: dict[str, Any] = {"facts": _about(arguments), "results": [], "left_out": []}
    out = arguments.out or ROOT / "benchmarks" / "results" / (
        f"models_{slug(report['facts']['card'])}.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    own = arguments.device == "cpu" and arguments.threads == 1
    for case in cases(arguments.device, arguments.tiny):
        if arguments.cases and not any(part in case.name for part in arguments.cases):
            continue
        if time.perf_counter() - begin > arguments.seconds:
            report["left_out"].append(case.name)
        else:
            result = measure(case, arguments.device, arguments.rounds, own)
            report["results"].append(result)
            _table(result)
        # After each case, as a run may be ended from outside.
        out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out}; left out: {', '.join(report['left_out']) or 'nothing'}")


if __name__ == "__main__":
    main()
