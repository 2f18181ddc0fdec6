"""Every workload of a family's manifest on a card: device time beside a copy of the same bytes, torch
eager and Inductor, and beside the times of other libraries where a file has them.

    PYTHONPATH=src python3 benchmarks/families.py elementwise norm          # families
    PYTHONPATH=src python3 benchmarks/families.py --op AddFwdOp --op MulFwdOp
    PYTHONPATH=src python3 benchmarks/families.py rope --rivals rivals.jsonl --tune

Inputs are rotated so that they come from memory; contenders take turns (``timing.py``). Each is first
checked against the op's definition in float64. ``torch`` is the entry's ``reference`` where that can be
called, else the definition run through ATen. A rival that fails, is wrong or cannot be captured is dropped,
with a line that says so. First ``--processes`` processes compile everything into the caches on disk;
``--seconds`` bounds a run; what it did not reach is listed. ``--filed-sets`` rotates as the filed figures
did, over up to 8 sets of 128 MB together: some of them then come from the L2 cache, torch's too. A line of
``--rivals`` is ``{"op", "label", "peer": {"kernel_us"}, "torch": {"kernel_us"}}``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.timing import capturable, device_times, facts, sets_past_l2, slug  # noqa: E402
from tileops.engine.manifest.catalog import families, load_family  # noqa: E402
from tileops.engine.manifest.entry import Workload  # noqa: E402
from tileops.engine.workloads import WorkloadCall, workload_inputs  # noqa: E402

DEVICE = "cuda"
MOST_SETS = 16
LARGE = 64 << 20
"""Bytes from which a share of the copy's speed is a claim about the kernel and not the launch."""
ERROR = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 1e-2, torch.float8_e5m2: 2e-2, torch.int8: 1e-3,
}  # fmt: skip
"""Most ‖y - y64‖ / ‖y64‖, by the result's dtype; of integers, the share of elements that differ. Of what is
quantised a few elements round the other way, since their scale is float32."""


class WrongResultError(Exception):
    """Ours is wrong."""


Work = Callable[[WorkloadCall], Any]


# ---- contenders ----------------------------------------------------------------------------------


def ours(call: WorkloadCall) -> Any:
    return call()


def definition(call: WorkloadCall) -> Any:
    return type(call.op).decomposition(*call.inputs.values(), **call.op._params)


def reference(call: WorkloadCall, without: tuple[str, ...] = ("inplace", "seed")) -> Work | None:
    """The entry's reference, called with the inputs by position and the parameters by name, but for those
    ``without`` which it does."""
    found = reference_function(call)
    if found is None:
        return None
    params = {k: v for k, v in call.op._params.items() if k not in without}
    return lambda made: found(*_given(made), **params)


def reference_function(call: WorkloadCall) -> Callable[..., Any] | None:
    path = call.op.entry.reference
    if not path.startswith("torch."):
        return None
    module, _, name = path.rpartition(".")
    owner = functools.reduce(getattr, module.split(".")[1:], torch)
    return getattr(owner, name, None)


def _given(call: WorkloadCall) -> list[Any]:
    values = list(call.inputs.values())
    while values and values[-1] is None:
        values.pop()
    return values


def contenders(call: WorkloadCall, inductor: bool) -> dict[str, Work]:
    found: dict[str, Work] = {"tileops": ours}
    if type(call.op).decomposition is None:
        return found
    plain = reference(call)
    if plain is not None:
        try:
            plain(call)
        except (TypeError, RuntimeError, ValueError):  # it names or orders its arguments otherwise
            plain = None
    found["torch"] = plain or definition
    if not inductor:
        return found
    torch._dynamo.reset()
    compiled = torch.compile(type(call.op).decomposition, dynamic=False)
    found["inductor"] = lambda made: compiled(*made.inputs.values(), **made.op._params)
    return found


# ---- right before fast ---------------------------------------------------------------------------


def results_of(returned: Any) -> list[torch.Tensor]:
    """The outputs that are there."""
    values = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def exact(call: WorkloadCall) -> list[torch.Tensor]:
    """The definition in float64, as are dtypes among its parameters; an input whose dtype the entry
    fixes stays in it."""
    wide = [
        t.double() if t is not None and t.is_floating_point() and item.dtype is not None else t
        for item, t in zip(call.op.entry.inputs, call.inputs.values(), strict=True)
    ]
    params = {name: _double(value) for name, value in call.op._params.items()}
    return results_of(type(call.op).decomposition(*wide, **params))


def _double(value: Any) -> Any:
    wide = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1
    return torch.float64 if wide else value


def error_of(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """``‖y - y64‖ / ‖y64‖`` where both are finite; infinite where one alone is not."""
    if not given.is_floating_point():
        return float((given != wanted.to(given.dtype)).double().mean())
    rounded, result = wanted.to(given.dtype).double(), given.double()
    finite = rounded.isfinite()
    if bool((finite != result.isfinite()).any()):
        return math.inf
    difference = (result - wanted.double())[finite].norm()
    return float(difference / wanted.double()[finite].norm().clamp_min(1e-30))


def checked(call: WorkloadCall, works: dict[str, Work]) -> dict[str, float]:
    """The error of each; a rival that cannot run or is wrong is dropped; ours raises."""
    if type(call.op).decomposition is None:
        return {}
    wanted = exact(copied(call))
    errors: dict[str, float] = {}
    for name, work in list(works.items()):
        try:
            given = copied(call)
            found = results_of(work(given))
        except Exception as problem:
            if name == "tileops":
                raise
            print(f"  {name} cannot run this: {str(problem).splitlines()[0][:100]}")
            del works[name]
            continue
        pairs = list(zip(found, wanted, strict=False))
        errors[name] = max((error_of(a, b) for a, b in pairs), default=0.0)
        limit = max((ERROR.get(a.dtype, 0.0) for a in found), default=0.0)
        if name == "torch" and type(call.op).random:
            continue  # it draws by a generator of its own
        if not errors[name] <= limit:
            if name == "tileops":
                raise WrongResultError(f"{call.op} is wrong: {errors[name]:.3g}, at most {limit}")
            print(f"  {name} gives something else ({errors[name]:.2g})")
            del works[name]
    return errors


def copied(call: WorkloadCall) -> WorkloadCall:
    inputs = {n: None if t is None else t.clone() for n, t in call.inputs.items()}
    return WorkloadCall(call.op, call.workload, inputs)


# ---- measuring -------------------------------------------------------------------------------------


def copy_of(moved: int) -> Callable[[], Any]:
    """Moves as many bytes: half are read, half written."""
    source = torch.zeros(max(moved // 2, 1), dtype=torch.uint8, device=DEVICE)
    return lambda: torch.empty_like(source).copy_(source)


def tuned(call: WorkloadCall) -> Iterator[tuple[str, Work]]:
    """Every candidate of every kernel that takes the call."""
    from tileops.engine.plan import in_tree_kernels

    call()
    spec = call.op.last_call.call
    for kernel in in_tree_kernels(type(call.op), "cuda"):
        if not kernel.last_resort and kernel.refuses(spec) is None:
            for turn, entry in enumerate(kernel.candidates(spec)):
                run = entry.build() if entry.bind is None else entry.bind(entry.build(), spec)
                yield f"{kernel.name} #{turn}", functools.partial(_run_on, run)


def _run_on(run: Callable[..., Any], call: WorkloadCall) -> Any:
    return run(*call.inputs.values())


Calls = dict[str, list[Callable[[], Any]]]


def times_of(calls: Calls, rounds: int) -> dict[str, Any]:
    """Device times; a rival that a graph cannot hold, since it waits for the device, is dropped."""
    for name in list(calls):
        if name != "tileops" and not capturable(calls[name][:1]):
            print(f"  {name} cannot be captured")
            del calls[name]
    with torch.no_grad():
        return dict(device_times(calls, rounds))


def measure(op_class: Any, workload: Workload, arguments: argparse.Namespace) -> dict[str, Any]:
    first = workload_inputs(op_class, workload, DEVICE)
    if not first.inputs:
        return measure_generator(first, workload, arguments)
    works = contenders(first, arguments.inductor)
    errors = checked(first, works)
    if arguments.tune:
        works.update(tuned(copied(first)))
    roofline = first.op.roofline_data_terms(*first.inputs.values())
    moved = roofline.read_bytes + roofline.write_bytes
    count = filed_sets(moved) if arguments.filed_sets else sets_past_l2(moved, MOST_SETS)
    sets = [first, *(workload_inputs(op_class, workload, DEVICE, seed=n) for n in range(1, count))]
    calls: Calls = {
        name: [functools.partial(work, made) for made in sets] for name, work in works.items()
    }
    calls["copy"] = [copy_of(moved) for _ in sets]
    return {
        "op": op_class.__name__, "label": workload.label, "kernel": first.op.last_call.kernel,
        "bytes": moved, "flops": roofline.flops, "device_us": times_of(calls, arguments.rounds),
        "relative_error": errors,
    }  # fmt: skip


def filed_sets(moved: int) -> int:
    return max(1, min(8, int(128e6) // max(moved, 1)))


def measure_generator(
    call: WorkloadCall, workload: Workload, arguments: argparse.Namespace
) -> dict[str, Any]:
    """An op that only writes, on the card."""
    op = type(call.op)(**{**call.op._params, "device": DEVICE})
    wanted = type(op).decomposition(**{**op._params, "out_dtype": torch.float32})
    if (error := error_of(op(), wanted)) > ERROR[op.out_dtype]:
        raise WrongResultError(f"{op} is wrong: {error:.3g}")
    moved = wanted.numel() * op.out_dtype.itemsize
    plain = functools.partial(type(op).decomposition, **op._params)
    calls: Calls = {"tileops": [op] * 4, "torch": [plain] * 4, "copy": [copy_of(moved)] * 4}
    if arguments.inductor:
        torch._dynamo.reset()
        calls["inductor"] = [torch.compile(plain, dynamic=False)] * 4
    times = times_of(calls, arguments.rounds)
    return {
        "op": type(op).__name__, "label": workload.label, "kernel": op.last_call.kernel,
        "bytes": moved, "flops": 0, "device_us": times, "relative_error": {"tileops": error},
    }  # fmt: skip


# ---- what is measured ------------------------------------------------------------------------------

Case = tuple[str, str, int]
"""A family, an op's class in it and the number of a workload."""


def chosen(names: list[str], ops: list[str]) -> list[Case]:
    found: list[Case] = []
    for family in names:
        for name, entry in load_family(families()[family]).items():
            wanted = not ops or name in ops
            if entry.status == "implemented" and wanted and not entry.composition:
                found += [(family, name, n) for n in range(len(entry.workloads))]
    return found


def of_case(case: Case) -> tuple[Any, Workload]:
    family, name, number = case
    op_class = getattr(importlib.import_module(f"tileops.{family}"), name)
    return op_class, op_class.entry.workloads[number]


def compile_case(case: Case, inductor: bool) -> None:
    """Leaves compiled code in the caches on disk. What fails here fails again where it is reported."""
    try:
        call = workload_inputs(*of_case(case), DEVICE)
        if call.inputs:
            for work in contenders(call, inductor).values():
                work(call)
    except Exception as problem:
        print(f"  not compiled ahead: {case}: {type(problem).__name__}", flush=True)
    torch.cuda.empty_cache()


def _alone() -> None:
    """A compiling process starts no others."""
    torch._inductor.config.compile_threads = 1


def compile_ahead(cases: list[Case], processes: int, inductor: bool, seconds: float | None) -> None:
    """``compile_case`` of each in several processes, for at most so long."""
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    pool = futures.ProcessPoolExecutor(processes, context, _alone)
    try:
        work = [pool.submit(compile_case, case, inductor) for case in cases]
        done, left = futures.wait(work, seconds)
        problems = [problem for each in done if (problem := each.exception()) is not None]
        if left or problems:
            print(
                f"  not compiled ahead: {len(left)} for time, {len(problems)} with {problems[:1]}"
            )
    finally:
        pool.shutdown(cancel_futures=True)
    print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)


# ---- report ----------------------------------------------------------------------------------------


def with_ratios(result: dict[str, Any], rivals: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """``copy_share``: the copy's time over ours; ``versus``: each rival's time over ours."""
    medians = {name: times["median"] for name, times in result["device_us"].items()}
    mine = medians["tileops"]
    result["copy_share"] = round(medians["copy"] / mine, 4)
    result["versus"] = {
        name: round(value / mine, 4)
        for name, value in medians.items()
        if name not in ("tileops", "copy")
    }
    filed = rivals.get((result["op"], result["label"]), {})
    for name in ("peer", "torch"):
        known = (filed.get(name) or {}).get("kernel_us")
        if known:
            result["versus"][f"filed {name}"] = round(known / mine, 4)
    return result


def shown(result: dict[str, Any]) -> str:
    ratios = "  ".join(f"{name} {value:.2f}x" for name, value in result["versus"].items())
    mine = result["device_us"]["tileops"]["median"]
    name = f"{result['op']} {result['label']}"
    return (
        f"{name:44} {mine:9.2f} µs  {result['bytes'] / mine / 1e6:6.3f} TB/s  "
        f"{result['copy_share']:5.2f} of the copy  {ratios}"
    )


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    large = [r["copy_share"] for r in results if r["bytes"] >= LARGE]
    found: dict[str, Any] = {"workloads": len(results), "large": len(large)}
    if large:
        found |= {"copy_share_median": statistics.median(large), "copy_share_least": min(large)}
    for name in ("torch", "inductor", "filed peer", "filed torch"):
        ratios = {
            f"{r['op']} {r['label']}": r["versus"][name] for r in results if name in r["versus"]
        }
        if ratios:
            found[f"geomean over {name}"] = round(statistics.geometric_mean(ratios.values()), 4)
            behind = {k: v for k, v in ratios.items() if v < 0.97}
            found[f"slower than {name}"] = dict(sorted(behind.items(), key=lambda item: item[1]))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--op", action="append", default=[], help="only these classes")
    parser.add_argument("--rivals", type=Path, help="times of other libraries, JSON lines")
    parser.add_argument("--tune", action="store_true", help="time every candidate too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--filed-sets", action="store_true", help="as many as the rivals' times had"
    )
    parser.add_argument("--no-inductor", dest="inductor", action="store_false")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument(
        "--processes", type=int, default=min(8, (os.cpu_count() or 2) // 2),
        help="that compile ahead; 0: none",
    )  # fmt: skip
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    known = families()
    if unknown := set(arguments.families) - known.keys():
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    rivals: dict[tuple[str, str], Any] = {}
    if arguments.rivals is not None:
        lines = filter(None, arguments.rivals.read_text().splitlines())
        rivals = {(row["op"], row["label"]): row for row in map(json.loads, lines)}
    torch.manual_seed(0)

    begin, results, left, wrong = time.monotonic(), [], [], []
    cases = chosen(arguments.families or list(known), arguments.op)
    if arguments.processes:
        bound = arguments.seconds / 2 if math.isfinite(arguments.seconds) else None
        compile_ahead(cases, arguments.processes, arguments.inductor, bound)
    card = facts(arguments.commit)
    for case in cases:
        op_class, workload = of_case(case)
        if time.monotonic() - begin > arguments.seconds:
            left.append(f"{op_class.__name__} {workload.label}")
            continue
        try:
            result = measure(op_class, workload, arguments)
        except WrongResultError as problem:
            wrong.append(f"{workload.label}: {problem}")
            print(wrong[-1], flush=True)
            continue
        results.append({"family": case[0], **with_ratios(result, rivals)})
        print(shown(results[-1]), flush=True)
        torch.cuda.empty_cache()
    report: dict[str, Any] = {"facts": card, "summary": {}, "not reached": left, "results": results}
    report |= {"wrong": wrong} if wrong else {}
    for family in dict.fromkeys(r["family"] for r in results):
        found = report["summary"][family] = summary([r for r in results if r["family"] == family])
        print(f"\n{family}: {json.dumps(found, indent=1)}")
    if left:
        print(f"\nnot reached in {arguments.seconds:.0f} s: {', '.join(left)}")
    out = arguments.out or ROOT / "benchmarks" / "results" / f"families_{slug(card['card'])}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out} after {time.monotonic() - begin:.0f} s")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
