"""RMSNorm on a card: device and host time beside PyTorch, Inductor, Liger and a plain copy.

    PYTHONPATH=src python3 benchmarks/rms_norm.py            # the table; JSON in benchmarks/results
    PYTHONPATH=src python3 benchmarks/rms_norm.py --tune     # every candidate configuration instead

Every contender is first checked against float64, on the inputs that are timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.timing import (  # noqa: E402
    Times,
    device_times,
    facts,
    host_times,
    sets_past_l2,
    slug,
)

EPS = 1e-6
SHAPES = ((2048, 4096), (32768, 4096), (32768, 8192), (1, 4096))
RIVALS = ("inductor rms_norm", "inductor formula", "inductor autotuned", "liger", "copy")
"""What tileops must not be slower than. ``F.rms_norm`` is shown beside them."""
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}
"""Greatest ‖y - y64‖ / ‖y64‖: about two roundings, since Liger rounds before the weight."""

Contender = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# --- contenders ---------------------------------------------------------------------------------


def formula(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
    return (values * scale * weight.float()).to(x.dtype)


def native(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def copy(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x)


def compiled(function: Contender, **options: Any) -> Contender:
    """A function of its own for each shape, so that no recompile limit is met."""

    @functools.wraps(function)
    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return function(x, weight)

    return torch.compile(own, fullgraph=True, dynamic=False, **options)


def liger() -> Contender | None:
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        return None
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def contenders(columns: int, autotuned: bool) -> dict[str, Contender | None]:
    """By name; None: not installed."""
    from tileops.norm import RMSNormFwdOp

    torch._dynamo.reset()
    found: dict[str, Contender | None] = {
        "tileops": RMSNormFwdOp((columns,), EPS),
        "F.rms_norm": native,
        "inductor rms_norm": compiled(native),
        "inductor formula": compiled(formula),
        "liger": liger(),
        "copy": copy,
    }
    if autotuned:
        found["inductor autotuned"] = compiled(formula, mode="max-autotune-no-cudagraphs")
    return found


def candidates(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Contender]:
    """Every configuration of the kernels that take this shape, beside a copy and ``F.rms_norm``."""
    from tileops.authoring import CallSpec, DeviceFacts, TensorSpec
    from tileops.norm.kernels.rows import ManyShortRows, RegisterRow, StreamedRow

    about = torch.cuda.get_device_properties(0)
    shared = about.shared_memory_per_block_optin
    arch = (about.major, about.minor)
    card = DeviceFacts("cuda", 0, arch, about.name, about.multi_processor_count, shared)
    device = torch.device("cuda", 0)
    x = TensorSpec.contiguous_of((rows, columns), dtype, device)
    weight = TensorSpec.contiguous_of((columns,), dtype, device)
    params = SimpleNamespace(normalized_shape=(columns,), eps=EPS)
    call = CallSpec("RMSNormFwdOp", params, {}, {"x": x, "weight": weight}, {"output": x}, card)
    found: dict[str, Contender] = {"F.rms_norm": native, "copy": copy}
    for kernel in (ManyShortRows, RegisterRow, StreamedRow):
        if kernel.refuses(call):
            continue
        entries = kernel.candidates(call)
        names = ["whole" if len(e.identity) > 3 else "split" for e in entries]
        if kernel is not StreamedRow:
            names = [
                f"rows={t.rows} warps={t.warps} policy={t.policy or '-'} "
                f"per_sm={t.per_multiprocessor or '-'}{' dependent' if t.dependent else ''}"
                for t in kernel.tiles(call)
            ]
        for turn, (name, entry) in enumerate(zip(names, entries, strict=True)):
            run = entry.bind(entry.build(), call)
            found[f"{'default ' if turn == 0 else ''}{name}"] = run
    return found


# --- checking -----------------------------------------------------------------------------------


def poisoned(work: Contender, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Call after filling the memory that the output will get with NaN."""
    torch.empty_like(x).fill_(float("nan"))  # freed at once: the allocator hands it out next
    return work(x, weight)


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """‖y - y64‖ / ‖y64‖, some rows at a time; NaN if there is one."""
    difference = magnitude = 0.0
    for some_y, some_x in zip(y.split(4096), x.split(4096), strict=True):
        values = some_x.double()
        expected = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
        expected *= weight.double()
        difference += (some_y.double() - expected).square().sum().item()
        magnitude += expected.square().sum().item()
    return math.sqrt(difference / magnitude)


def checked(
    works: dict[str, Contender | None], x: torch.Tensor, weight: torch.Tensor
) -> Iterator[tuple[str, float]]:
    for name, work in works.items():
        if work is None or name == "copy":
            continue
        found = error(poisoned(work, x, weight), x, weight)
        if not found < ERROR[x.dtype]:  # NaN too
            raise SystemExit(f"{name} is wrong at {tuple(x.shape)}: {found:.3g}")
        yield name, found


# --- measuring ----------------------------------------------------------------------------------


def measure(
    rows: int, columns: int, dtype: torch.dtype, works: dict[str, Contender | None], rounds: int
) -> dict[str, Any]:
    """Check, then time, on fresh inputs that together exceed the L2 cache."""
    moved = (2 * rows * columns + columns) * dtype.itemsize
    sets = sets_past_l2(moved)
    weight = torch.randn(columns, device="cuda").to(dtype)
    inputs = [torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(sets)]
    errors = dict(checked(works, inputs[0], weight))
    calls = {
        name: [functools.partial(work, x, weight) for x in inputs]
        for name, work in works.items()
        if work is not None
    }
    times = device_times(calls, rounds)
    bandwidth = {name: moved / time["median"] / 1e6 for name, time in times.items()}
    return {
        "shape": [rows, columns],
        "dtype": str(dtype)[6:],
        "bytes": moved,
        "input_sets": sets,
        "device_us": times,
        "terabytes_per_second": {name: round(value, 3) for name, value in bandwidth.items()},
        "relative_error": errors,
        "absent": [name for name, work in works.items() if work is None],
    }


def compared(result: dict[str, Any]) -> dict[str, Any]:
    """The best rival and what tileops takes relative to it."""
    medians = {name: time["median"] for name, time in result["device_us"].items()}
    best = min((name for name in RIVALS if name in medians), key=medians.__getitem__)
    return {
        "best_rival": best,
        "tileops_over_best_rival": round(medians["tileops"] / medians[best], 4),
        "tileops_over_each": {
            name: round(medians["tileops"] / value, 4) for name, value in medians.items()
        },
    }


def measured_host(dtype: torch.dtype) -> dict[str, Times]:
    """One eager call on one row: the device is done before the host comes back."""
    import triton

    from tileops.norm import RMSNormFwdOp
    from tileops.norm.kernels import rows as triton_rows

    columns = 4096
    x = torch.randn(1, columns, device="cuda", dtype=dtype)
    weight = torch.randn(columns, device="cuda", dtype=dtype)
    op, liger_norm = RMSNormFwdOp((columns,), EPS), liger()
    kernel = triton_rows.normalize_rows

    def bare() -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[(1,)](
            *(x, None, weight, y, None, 1, EPS),
            N=columns,
            BLOCK=triton.next_power_of_2(columns),
            TILE=1,
            VECTOR=8,
            PERSISTENT=False,
            POLICY="evict_first",
            DEPENDENT=False,
            num_warps=8,
        )
        return y

    works = {
        "tileops": lambda: op(x, weight),
        "F.rms_norm": lambda: native(x, weight),
        "Triton kernel[grid]": bare,
        "torch.empty_like": lambda: torch.empty_like(x),
    }
    if liger_norm is not None:
        works["liger"] = lambda: liger_norm(x, weight)
    return host_times(works)


# --- report -------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> None:
    rows, columns = result["shape"]
    print(f"\n{rows} x {columns} {result['dtype']}, {result['input_sets']} sets of inputs")
    ordered = sorted(result["device_us"].items(), key=lambda row: row[1]["median"])
    for name, time in ordered:
        print(
            f"  {time['median']:9.3f} µs  ({time['min']:.3f} to {time['max']:.3f})  "
            f"{result['terabytes_per_second'][name]:6.3f} TB/s  {name}"
        )


def shapes(text: str) -> list[tuple[int, int]]:
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=shapes, default=SHAPES, help="such as 2048x4096,1x4096")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tune", action="store_true", help="time the candidate configurations")
    parser.add_argument("--autotuned", action="store_true", help="Inductor with max-autotune too")
    parser.add_argument("--no-host", action="store_true", help="leave out host time")
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)

    report: dict[str, Any] = {"facts": facts(arguments.commit), "device": []}
    for rows, columns in arguments.shapes:
        if arguments.tune:
            works: Any = candidates(rows, columns, dtype)
        else:
            works = contenders(columns, arguments.autotuned)
        result = measure(rows, columns, dtype, works, arguments.rounds)
        if not arguments.tune:
            result.update(compared(result))
        report["device"].append(result)
        table(result)
        if not arguments.tune:
            ratio, best = result["tileops_over_best_rival"], result["best_rival"]
            print(f"  tileops takes {ratio:.3f} of the best rival's time ({best})")
        torch.cuda.empty_cache()
    if not (arguments.tune or arguments.no_host):
        report["host_us"] = measured_host(dtype)
        print("\nhost time of one eager call, least of the rounds")
        for name, time in sorted(report["host_us"].items(), key=lambda row: row[1]["min"]):
            print(f"  {time['min']:9.3f} µs  (median {time['median']:.3f})  {name}")

    kind = "rms_norm_tune" if arguments.tune else "rms_norm"
    card = slug(report["facts"]["card"])
    out = arguments.out or ROOT / "benchmarks" / "results" / f"{kind}_{card}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
