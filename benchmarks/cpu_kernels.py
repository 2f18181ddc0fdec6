"""The decomposition on the CPU, through ATen and compiled by Inductor, and PyTorch's own function.

Decides ``INDUCTOR_FROM`` in ``tileops/engine/decomposition.py``. Prints, per op and size, the median
time of each in one run, interleaved, and their ratios; writes JSON with ``--out``.

    python -m benchmarks.cpu_kernels --out benchmarks/results/cpu_kernels.json
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tileops.elementwise import GELUFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.engine.decomposition import _compiled
from tileops.norm import FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

ROUNDS = 9


def _cases(elements: int, dtype: torch.dtype) -> list[tuple[str, Any, tuple[Any, ...], Any]]:
    """(name, op, inputs, PyTorch's own expression or None)."""
    n = 1024
    rows = max(elements // n, 1)
    x = torch.randn(rows, n, dtype=dtype)
    w = torch.randn(n, dtype=dtype)
    return [
        ("RMSNormFwdOp", RMSNormFwdOp(n), (x, w), lambda: F.rms_norm(x, (n,), w)),
        ("LayerNormFwdOp", LayerNormFwdOp(n), (x, w, w), lambda: F.layer_norm(x, (n,), w, w)),
        ("FusedAddRMSNormFwdOp", FusedAddRMSNormFwdOp(), (x, x, w), None),
        ("SiLUFwdOp", SiLUFwdOp(), (x,), lambda: F.silu(x)),
        ("GELUFwdOp", GELUFwdOp(), (x,), lambda: F.gelu(x)),
        ("SiLUAndMulFwdOp", SiLUAndMulFwdOp(), (torch.cat((x, x), 1),), None),
        ("SoftmaxFwdOp", SoftmaxFwdOp(-1), (x,), lambda: torch.softmax(x, -1)),
        (
            "RoPENeoxPositionIdsFwdOp",
            RoPENeoxPositionIdsFwdOp(rows),
            (x.view(rows, 8, 128), torch.arange(rows)),
            None,
        ),
    ]


def _median_us(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for turn in range(ROUNDS):
        for name in order if turn % 2 else reversed(order):
            begin = time.perf_counter()
            works[name]()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for power in (16, 18, 20, 22, 24):
            for name, op, inputs, native in _cases(1 << power, dtype):
                function, params = type(op).decomposition, op._params
                compiled = _compiled(function)
                begin = time.perf_counter()
                compiled(*inputs, **params)
                seconds = time.perf_counter() - begin
                works: dict[str, Callable[[], Any]] = {
                    "plain": lambda f=function, i=inputs, p=params: f(*i, **p),
                    "inductor": lambda f=compiled, i=inputs, p=params: f(*i, **p),
                }
                if native is not None:
                    works["torch"] = native
                for work in works.values():
                    work()
                row = {"op": name, "dtype": str(dtype)[6:], "elements": 1 << power,
                       "first_call_s": round(seconds, 2), **_median_us(works)}  # fmt: skip
                row["plain_over_inductor"] = round(row["plain"] / row["inductor"], 2)
                rows.append(row)
                print(row, flush=True)
    if arguments.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "date": dt.date.today().isoformat(),
            "commit": commit,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
            "rounds": ROUNDS,
        }
        arguments.out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
