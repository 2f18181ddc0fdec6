"""What ``backend="tileops"`` gains by inlining an op: alone, beside pointwise work, in a chain.

Decides the constants of ``tileops/fusion/cost.py``. Three contenders, each compiled by the backend: every
op keeps its own kernel (``never``), every op is inlined (``always``), the rule decides (``auto``).

    python -m benchmarks.fusion [--device cuda] [--out benchmarks/results/fusion.json]
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tileops.elementwise import SiLUAndMulFwdOp
from tileops.fusion import backend
from tileops.norm import FusedAddRMSNormFwdOp, RMSNormFwdOp
from tileops.rope import RoPEFwdOp

POLICIES = ("never", "always", "auto")


def _cases(rows: int, device: str, dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    n = 4096 if device == "cuda" else 1024
    x, r = (torch.randn(rows, n, device=device, dtype=dtype) for _ in range(2))
    w = torch.randn(n, device=device, dtype=dtype)
    norm, add_norm = RMSNormFwdOp(n, eps=1e-6), FusedAddRMSNormFwdOp()
    silu, rope = SiLUAndMulFwdOp(), RoPEFwdOp(input_layout="1d")
    return {
        "norm alone": (norm, (x, w)),
        "norm, scaled": (lambda x, w: norm(x, w) * 1.5 + 1, (x, w)),
        "activation alone": (silu, (x,)),
        "activation, quantised": (lambda x: (silu(x) * 9).round().clamp(-127, 127).char(), (x,)),
        "add, norm, rotation": (lambda x, r, w: rope(add_norm(x, r, w)[0]), (x, r, w)),
    }


def _least_us(works: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """The least of rounds in which the contenders take turns: whatever else runs only adds."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.perf_counter()
            for _ in range(5):
                work()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / 5 * 1e6)
    return {name: min(values) for name, values in times.items()}


def measure(device: str, sizes: list[int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Microseconds a call by case, rows and policy."""
    table: dict[str, dict[str, float]] = {}
    for rows in sizes:
        for name, (function, inputs) in _cases(rows, device, dtype).items():
            works = {}
            for policy in POLICIES:
                torch._dynamo.reset()
                run = torch.compile(function, backend=backend, options={"tileops.fusion": policy})
                run(*inputs)
                works[policy] = lambda run=run, inputs=inputs: run(*inputs)
            table[f"{name}, {rows} rows"] = _least_us(works, device, rounds)
    card = torch.cuda.get_device_name() if device == "cuda" else None
    facts = {"torch": torch.__version__, "cpu": platform.processor(), "card": card}
    date = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"what": "µs a call", "date": date, "dtype": str(dtype), **facts, "table": table}


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 2048])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    found = measure(args.device, args.rows, dtype, args.rounds)
    for name, row in found["table"].items():
        print(f"{name:36}" + "".join(f"{policy:>9} {row[policy]:9.1f}" for policy in POLICIES))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
