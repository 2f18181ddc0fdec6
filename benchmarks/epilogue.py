"""A matrix product and what follows it: our kernels, each in its configurations, beside the library's
product with a separate epilogue, the library's own epilogue, and Inductor's code.

    python -m benchmarks.epilogue --device cuda         # under four minutes on an H200
    python -m benchmarks.epilogue --tiny --device cpu   # that it runs

Every contender is held to float64 before it is timed. Prints a table for each shape, the best of each
kernel, and what to write into ``SHARE`` of ``tileops/gemm/kernels/epilogue.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tileops.gemm import GEMMEpilogueFwdOp

ROOT = Path(__file__).parent.parent
Tensors = dict[str, "torch.Tensor | None"]

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
LEFT = ("cublas, separate", "inductor", "max-autotune")
"""Contenders that are not ours."""


@dataclass(frozen=True)
class Case:
    """One product: its sizes and what follows."""

    rows: int
    columns: int
    depth: int
    activation: str | None = "gelu"
    bias: bool = True
    residual: bool = False
    keeps: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.activation or "",
            *(n for n in ("bias", "residual", "keeps") if getattr(self, n)),
        ]
        return f"{self.rows}x{self.columns}x{self.depth} {'+'.join(filter(None, parts))}"

    def inputs(self, device: str) -> Tensors:
        """Of standard deviation about one, so that activations are neither 0 nor the identity."""
        dtype = torch.bfloat16

        def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        return {
            "a": make(self.rows, self.depth),
            "b": make(self.columns, self.depth, scale=self.depth**-0.5),
            "bias": make(self.columns) if self.bias else None,
            "residual": make(self.rows, self.columns) if self.residual else None,
        }

    def plain(self, a: Any, b: Any, bias: Any, residual: Any) -> Any:
        """The same in PyTorch."""
        inner = F.linear(a, b, bias)
        result = ACTIVATIONS[self.activation](inner)
        result = result if residual is None else result + residual
        return (result, inner) if self.keeps else result


CASES = (
    Case(4096, 4096, 4096),
    Case(4096, 4096, 4096, "gelu_tanh"),
    Case(4096, 4096, 1024),
    Case(8192, 4096, 4096),
    Case(4096, 16384, 4096),
    Case(4096, 4096, 4096, "silu", bias=False),
    Case(4096, 4096, 4096, None, bias=False, residual=True),
    Case(4096, 4096, 4096, keeps=True),
    Case(512, 4096, 4096),
    Case(16, 4096, 4096),
)
TINY = (Case(24, 40, 16), Case(16, 24, 32, "silu", bias=False, residual=True))


def configurations(case: Case, inputs: Tensors) -> dict[str, tuple[Any, Any]]:
    """The entries of each in-tree kernel that takes the case, by name, with the call's facts."""
    from tileops.engine.plan import call_spec
    from tileops.gemm.kernels import epilogue

    op = GEMMEpilogueFwdOp(activation=case.activation, keeps_preactivation=case.keeps)
    call, _ = call_spec(op, tuple(inputs.values()), None)
    found: dict[str, tuple[Any, Any]] = {}
    for kernel in (epilogue.CublasEpilogue, epilogue.CublasThenFinish):
        if kernel.refuses(call) is None:
            found[kernel.name] = (kernel.entry_for(call), call)
    triton = epilogue.TritonEpilogue
    for tile, parts in triton.choices(call)[: 6 if case.rows < 1024 else 3]:
        label = f"{tile.rows}x{tile.columns}x{tile.depth}w{tile.warps}s{tile.stages}p{parts}"
        found[f"{triton.name} {label}"] = (triton.entry_of(call, tile, parts), call)
    persistent = epilogue.PersistentEpilogue
    if call.device.arch >= persistent.arch and persistent.refuses(call) is None:
        for one in persistent.tiles(call):
            label = f"{one.rows}x{one.columns}x{one.depth}w{one.warps}s{one.stages}"
            label += f"/{one.parts}" + f" x{one.beside}" * (one.beside > 1)
            found[f"{persistent.name} {label}"] = (persistent.entry_of(call, one), call)
    return found


def built(cases: tuple[Case, ...]) -> None:
    """Compile what will be timed: the compiler's own programs run beside each other."""
    entries: dict[Any, Any] = {}
    for case in cases:
        one = case.inputs("cuda")
        entries |= {entry.identity: entry for entry, _ in configurations(case, one).values()}
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(_build, entries.values()))


def _build(entry: Any) -> None:
    torch.cuda.set_device(0)  # which a thread needs before it loads a kernel
    try:
        entry.build()
    except Exception as error:
        print(f"  [does not build: {type(error).__name__}: {str(error)[:200]}]", flush=True)


def works(case: Case, sets: list[Tensors], autotune: bool) -> dict[str, list[Callable[[], Any]]]:
    """Each contender as a work on each set of inputs."""
    functions: dict[str, Callable[..., Any]] = {LEFT[0]: case.plain}
    modes = {LEFT[1]: None} | ({LEFT[2]: "max-autotune-no-cudagraphs"} if autotune else {})
    for name, mode in modes.items():
        functions[name] = torch.compile(case.plain, mode=mode, dynamic=False)
    if sets[0]["a"].device.type == "cuda":  # type: ignore[union-attr]
        for name, (entry, call) in configurations(case, sets[0]).items():
            try:
                artifact = entry.build()
                functions[name] = entry.bind(artifact, call) if entry.bind else artifact
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}")
        functions["product alone"] = lambda a, b, *_: torch.mm(a, b.t())
    else:
        op = GEMMEpilogueFwdOp(activation=case.activation, keeps_preactivation=case.keeps)
        functions["tileops"] = op
    return {
        name: [functools.partial(function, *one.values()) for one in sets]
        for name, function in functions.items()
    }


def error_of(case: Case, inputs: Tensors, result: Any) -> float:
    """Relative to float64, of some rows."""
    some = slice(0, 64)
    rows = {"a", "residual"}
    exact = case.plain(*(
        None if t is None else (t[some] if n in rows else t).double() for n, t in inputs.items()
    ))  # fmt: skip
    exact = exact[0] if case.keeps else exact
    given = result[0] if isinstance(result, tuple) else result
    return float((given[some].double() - exact).norm() / exact.norm())


def measure(case: Case, device: str, autotune: bool, rounds: int) -> dict[str, Any]:
    """Microseconds of each contender that is right, and the errors of all."""
    torch._dynamo.reset()
    first = case.inputs(device)
    number = 2
    if device == "cuda":
        from benchmarks.timing import sets_past_l2

        size = sum(t.numel() * t.dtype.itemsize for t in first.values() if t is not None)
        number = sets_past_l2(size + 2 * case.rows * case.columns, 16)
    sets = [first, *(case.inputs(device) for _ in range(number - 1))]
    contenders, errors = works(case, sets, autotune), {}
    for name in list(contenders):
        try:
            with torch.no_grad():
                errors[name] = error_of(case, first, contenders[name][0]())
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
            errors[name] = float("nan")
        if name != "product alone" and not errors[name] < 1e-2:
            del contenders[name]
    with torch.no_grad():
        times = _times(contenders, device, rounds)
    result = {"name": case.name, "device_us": times, "relative_error": errors}
    return result | {"best": _best(times)}


def _times(contenders: Any, device: str, rounds: int) -> dict[str, Any]:
    if device == "cuda":
        from benchmarks.timing import device_times

        return device_times(contenders, rounds)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, ready in contenders.items():
            begin = time.perf_counter()
            ready[0]()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    return {name: {"median": statistics.median(s), "min": min(s)} for name, s in samples.items()}


def _best(times: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """By kernel, its fastest configuration."""
    best: dict[str, tuple[str, float]] = {}
    for name, found in times.items():
        kernel = name if name in LEFT else name.partition(" ")[0]
        if name != "product alone" and found["median"] < best.get(kernel, ("", 1e99))[1]:
            best[kernel] = (name, found["median"])
    return best


def table(result: dict[str, Any], case: Case) -> None:
    """Print one shape, the fastest first."""
    flops = 2 * case.rows * case.columns * case.depth
    base = result["device_us"][LEFT[0]]["median"]
    print(f"\n{result['name']}")
    for name, found in sorted(result["device_us"].items(), key=lambda item: item[1]["median"]):
        us = found["median"]
        print(
            f"  {name:44} {us:9.1f} µs {flops / us * 1e-6:7.1f} TFLOP/s {base / us:6.3f} x separate"
            f"   error {result['relative_error'][name]:.1e}",
            flush=True,
        )


def constants(results: list[dict[str, Any]]) -> None:
    """Print what the shapes say of ``SHARE``: how fast a product is with its epilogue, of one without."""
    shares: dict[str, list[float]] = {}
    print(
        "\nspeed of the library's product alone, reached by the best configuration of each kernel:"
    )
    for result in results:
        alone = result["device_us"].get("product alone", {}).get("median")
        ours = {k: us for k, (_, us) in result["best"].items() if k not in LEFT}
        if alone is not None and ours:
            row = "  ".join(f"{kernel} {alone / us:.3f}" for kernel, us in ours.items())
            print(f"  {result['name']:36} {row}")
            for kernel, us in ours.items():
                shares.setdefault(kernel, []).append(alone / us)
    for kernel, found in shares.items():
        print(f"SHARE of {kernel}: {statistics.median(found):.3f} (median of {len(found)} shapes)")


def main() -> None:
    """Measure all cases; write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="two small shapes, to see that it runs")
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--autotune", type=int, default=1, help="cases that max-autotune enters too"
    )
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    cases: tuple[Case, ...] = TINY if arguments.tiny else CASES
    cases = tuple(c for c in cases if not arguments.only or arguments.only in c.name)
    report: dict[str, Any] = {"facts": {"torch": torch.__version__}, "shapes": []}
    if arguments.device == "cuda":
        from benchmarks.timing import facts

        report["facts"] = facts(arguments.commit)
        built(cases)
        print(f"[compiled after {time.monotonic() - begin:.0f} s]", flush=True)
    for number, case in enumerate(cases):
        autotune = arguments.device == "cuda" and number < arguments.autotune
        report["shapes"].append(measure(case, arguments.device, autotune, arguments.rounds))
        table(report["shapes"][-1], case)
    print("\nbest of each")
    for result in report["shapes"]:
        name, us = min(result["best"].values(), key=lambda found: found[1])
        base = result["device_us"][LEFT[0]]["median"]
        print(f"  {result['name']:36} {name:44} {us:9.1f} µs {base / us:6.3f} x separate")
    constants(report["shapes"])
    out = arguments.out
    if out is None and arguments.device == "cuda":
        from benchmarks.timing import slug

        out = ROOT / "benchmarks" / "results" / f"epilogue_{slug(report['facts']['card'])}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"\nwrote {out} after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
