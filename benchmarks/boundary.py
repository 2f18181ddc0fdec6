"""What the line between traced and untraced code costs, on the CPU, by where it runs and how it is made.

Three tables: (1) one RMSNorm call with the boundary at the op, at the kernel, and nowhere; (2) a call of
an operator that does nothing, by how it is registered; (3) what a boundary gives up: a chain that
Inductor could have fused. The ways take turns; a figure is the least of the rounds, because whatever
else runs on the machine only adds.

    python -m benchmarks.boundary --out benchmarks/results/boundary_cpu.json
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tileops.elementwise import SiLUFwdOp
from tileops.norm import RMSNormFwdOp

ROUNDS = 200
SECONDS = 0.002
"""How long one round of one way lasts at least."""
WIDTH = 576
EPS = 1e-6
Work = Callable[[], Any]


def measure(works: dict[str, Work]) -> dict[str, float]:
    """µs a call: the least of the rounds, in which the ways take turns."""
    calls = {}
    for name, work in works.items():
        for _ in range(20):
            work()
        begin = time.perf_counter()
        for _ in range(20):
            work()
        calls[name] = max(2, int(SECONDS * 20 / (time.perf_counter() - begin)))
    samples: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for turn in range(ROUNDS):
        for name in order if turn % 2 else reversed(order):
            work, count = works[name], calls[name]
            begin = time.perf_counter()
            for _ in range(count):
                work()
            samples[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: round(min(times), 2) for name, times in samples.items()}


# ---- 1. where the boundary runs ----------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The kernel's body, the same for all three: no check, no choice."""
    return F.rms_norm(x, (WIDTH,), weight, EPS)


@torch.library.custom_op("tileops_bench::rms_norm", mutates_args=())
def rms_norm_kernel(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,), weight, EPS)


@rms_norm_kernel.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class AtTheKernel:
    """An op whose Python is traced: it checks its call, picks a kernel, and calls that."""

    def __init__(self) -> None:
        self.op = RMSNormFwdOp(WIDTH, EPS)
        self.kernels = {torch.float32: rms_norm_kernel, torch.bfloat16: rms_norm_kernel}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        type(self.op)._signature(self.op, x, weight, None)
        return self.kernels[x.dtype](x, weight)


def at_the_op() -> Any:
    """The op itself, served by the same body as the other two."""
    from tileops.backend import register_kernel_builder

    register_kernel_builder("bench", "RMSNormFwdOp", lambda *specs, **params: rms_norm)
    return RMSNormFwdOp(WIDTH, EPS, target="bench")


def tracing(function: Any, rows: int) -> dict[str, Any]:
    """What Dynamo makes of one call: nodes, guards, and the time until the first result."""
    return min((_trace(function, rows) for _ in range(5)), key=lambda made: made["first_call_ms"])


def _trace(function: Any, rows: int) -> dict[str, Any]:
    torch._dynamo.reset()
    x, weight = torch.randn(rows, WIDTH), torch.ones(WIDTH)
    nodes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    guards: list[int] = []
    compiled = torch._dynamo.optimize(
        backend, nopython=True, guard_export_fn=lambda made: guards.append(len(made))
    )(_calls(function))
    begin = time.perf_counter()
    compiled(x, weight)
    return {"nodes": nodes[0], "guards": guards[0],
            "first_call_ms": round((time.perf_counter() - begin) * 1e3, 1)}  # fmt: skip


def where() -> list[dict[str, Any]]:
    """Table 1."""
    rows = []
    ways = {"at the op": at_the_op(), "at the kernel": AtTheKernel(), "none": rms_norm}
    traced = {name: tracing(way, 2) for name, way in ways.items()}
    for count in (1, 32, 1024):
        x, weight = torch.randn(count, WIDTH), torch.ones(WIDTH)
        torch._dynamo.reset()
        compiled = {n: torch.compile(_calls(w), backend="aot_eager") for n, w in ways.items()}
        with torch.no_grad():
            eager = measure({n: partial(w, x, weight) for n, w in ways.items()})
            graph = measure({n: partial(f, x, weight) for n, f in compiled.items()})
        for name in ways:
            row = {"rows": count, "boundary": name, "kernel_us": eager["none"],
                   "eager_us": eager[name], "compiled_us": graph[name], **traced[name]}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def _calls(way: Any) -> Any:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return way(x, weight)

    call.__code__ = call.__code__.replace()  # a frame of its own
    return call


# ---- 2. how an operator is registered ----------------------------------------------------------------

_library = torch.library.Library("tileops_bench", "FRAGMENT")


def nothing(x: torch.Tensor) -> torch.Tensor:
    """The cheapest body that makes a tensor."""
    return torch.empty(x.shape)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape)


def _defined(name: str) -> Any:
    _library.define(f"{name}(Tensor x) -> Tensor")
    _library.impl(name, nothing, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tileops_bench::{name}", _fake, lib=_library)
    return getattr(torch.ops.tileops_bench, name).default


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


def _with_autograd_kernel() -> Any:
    """As the engine generates it: one Python kernel at Autograd that calls the body."""
    overload = _defined("with_autograd_kernel")
    exact, grad_enabled = frozenset({torch.Tensor, torch.nn.Parameter}), torch.is_grad_enabled

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                return overload(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        backward = staticmethod(_backward)

    def autograd(keyset: Any, x: torch.Tensor) -> torch.Tensor:
        if grad_enabled() and x.requires_grad:
            return Function.apply(x)
        if type(x) in exact:
            return nothing(x)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, x)

    _library.impl("with_autograd_kernel", autograd, "Autograd", with_keyset=True)
    return overload


def registrations() -> list[dict[str, Any]]:
    """Table 2."""
    custom = torch.library.custom_op("tileops_bench::custom", nothing, mutates_args=())
    custom.register_fake(_fake)
    differentiable = torch.library.custom_op("tileops_bench::custom_ad", nothing, mutates_args=())
    differentiable.register_fake(_fake)
    differentiable.register_autograd(_backward)
    registered = _defined("with_register_autograd")
    torch.library.register_autograd(
        "tileops_bench::with_register_autograd", _backward, lib=_library
    )
    ways = {
        "plain Python call": nothing,
        "define + impl": _defined("plain"),
        "define + impl + Autograd kernel (ours)": _with_autograd_kernel(),
        "define + impl + register_autograd": registered,
        "custom_op": custom,
        "custom_op + register_autograd": differentiable,
    }
    x, needs = torch.randn(4), torch.randn(4, requires_grad=True)
    no_grad = measure({name: partial(way, x) for name, way in ways.items()})
    gradient = measure({n: partial(w, needs) for n, w in ways.items() if "utograd" in n})
    rows = [
        {"way": name, "us": no_grad[name], "us_requires_grad": gradient.get(name)} for name in ways
    ]
    for row in rows:
        print(row, flush=True)
    return rows


# ---- 3. what it gives up -------------------------------------------------------------------------------


def given_up() -> list[dict[str, Any]]:
    """Table 3: ``silu(rms_norm(x + y))``, compiled by Inductor, with two ops as nodes and in the open."""
    norm, silu = RMSNormFwdOp(WIDTH, EPS), SiLUFwdOp()
    weight = torch.ones(WIDTH)

    def nodes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return silu(norm(x + y, weight))

    def in_the_open(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        normed = RMSNormFwdOp.decomposition(x + y, weight, normalized_shape=(WIDTH,), eps=EPS)
        return F.silu(normed)

    rows = []
    for count in (32, 1024, 16384):
        x, y = torch.randn(2, count, WIDTH)
        torch._dynamo.reset()
        works = {n: torch.compile(f) for n, f in (("nodes", nodes), ("in the open", in_the_open))}
        with torch.no_grad():
            times = measure({n: partial(f, x, y) for n, f in works.items()})
        rows.append({"rows": count, "nodes_us": times["nodes"], "fused_us": times["in the open"]})
        print(rows[-1], flush=True)
    return rows


# ---- report ----------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> dict[str, str]:
    """The tables of ``docs/internals/boundary.md``, by the key of the results that they show."""

    def table(columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
        lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
        for row in rows:
            cells = ("" if row[key] is None else str(row[key]) for key in columns.values())
            lines.append(" | ".join(cells))
        return "".join(f"| {line} |\n" for line in lines)

    return {
        "where": table(
            {"rows": "rows", "boundary": "boundary", "kernel, µs": "kernel_us",
             "eager, µs": "eager_us", "compiled, µs": "compiled_us", "nodes": "nodes",
             "guards": "guards", "first traced call, ms": "first_call_ms"},
            results["where"],
        ),
        "registration": table(
            {"registered by": "way", "call, µs": "us", "of an input that requires grad, µs":
             "us_requires_grad"},
            results["registration"],
        ),
        "given_up": table(
            {"rows": "rows", "two nodes, µs": "nodes_us", "fused by Inductor, µs": "fused_us"},
            results["given_up"],
        ),
    }  # fmt: skip


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables = {"registration": registrations(), "where": where(), "given_up": given_up()}
    if arguments.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        facts = {
            "command": "python -m benchmarks.boundary --out " + str(arguments.out),
            "date": dt.date.today().isoformat(),
            "commit": commit,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "rounds": ROUNDS,
            "width": WIDTH,
            "dtype": "float32",
        }
        arguments.out.write_text(json.dumps({"facts": facts, **tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
