"""Products of many rows on the CPU: torch's, and oneDNN's in both orders, over weights that change.

    python -m benchmarks.cpu_products                      # the sizes of MiniLM and SmolLM2
    python -m benchmarks.cpu_products --rows 8 16 24 --matrix 1536x384

A row: µs a call by each, medians of turns in which they alternate, one thread and its own time; then what
the rule of ``tileops/gemm/kernels/on_cpu.py`` chooses, whose constants are written from this table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tileops.gemm import GEMMEpilogueFwdOp  # noqa: E402
from tileops.gemm.kernels.on_cpu import SWAPPED, linear, swapped  # noqa: E402

BYTES = 40 << 20
"""Of the weights together: what no cache holds."""
MATRICES = ("384x384", "1536x384", "384x1536", "192x576", "576x576", "1536x576", "576x1536")
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
PRODUCTS: dict[str, Product] = {
    "torch": lambda x, w, b: torch.addmm(b, x, w.t()),
    "oneDNN": lambda x, w, b: linear(x, w, b, "none", ""),
    "other order": swapped,
}


def measure(rows: int, columns: int, depth: int, rounds: int) -> dict[str, float]:
    """Median µs of a call by each."""
    weights = [torch.randn(columns, depth) for _ in range(max(2, BYTES // (4 * columns * depth)))]
    x, bias, turns = torch.randn(rows, depth), torch.randn(columns), itertools.cycle(weights)
    samples: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    for turn in range(-1, rounds):
        for name in PRODUCTS if turn % 2 else reversed(PRODUCTS):
            begin = time.thread_time()
            for _ in weights:
                PRODUCTS[name](x, next(turns), bias)
            if turn >= 0:
                samples[name].append((time.thread_time() - begin) * 1e6 / len(weights))
    return {name: round(statistics.median(values), 1) for name, values in samples.items()}


def chosen(rows: int, columns: int, depth: int) -> str:
    """What the rule says on this machine."""
    specs = (torch.zeros(rows, depth), torch.zeros(columns, depth))
    op = GEMMEpilogueFwdOp()
    op(*specs)
    assert op.last_call is not None
    if op.last_call.kernel != "onednn_epilogue":
        return "torch"
    return "other order" if rows in SWAPPED else "oneDNN"


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 20, 32, 64, 256, 512])
    parser.add_argument("--matrix", nargs="+", default=MATRICES, help="columns x depth")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    with torch.no_grad():
        for matrix, rows in itertools.product(arguments.matrix, arguments.rows):
            columns, depth = map(int, matrix.split("x"))
            found = measure(rows, columns, depth, arguments.rounds)
            times = "  ".join(f"{name} {us:9.1f}" for name, us in found.items())
            rule = chosen(rows, columns, depth)
            gain = found["torch"] / found[rule]
            print(f"{rows:5} x {matrix:10} {times}   rule: {rule}, {gain:.2f} of torch", flush=True)


if __name__ == "__main__":
    main()
