"""Forward and backward together on a card: device time beside PyTorch, Inductor and Liger.

    PYTHONPATH=src python3 benchmarks/backward.py                 # JSON in benchmarks/results
    PYTHONPATH=src python3 benchmarks/backward.py RMSNorm GEMM    # some
    PYTHONPATH=src python3 benchmarks/backward.py --device cpu --tiny    # only that it works

A step is the forward and all gradients that training needs. Every contender's gradients are first
checked against float64, on copies of inputs that are then timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.timing import Times, device_times, facts, sets_past_l2, slug  # noqa: E402

EPS = 1e-6
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2, torch.float32: 1e-5}
"""Greatest ‖g - g64‖ / ‖g64‖ of a gradient: a few roundings, as contenders round in between."""
RIVALS = ("torch", "inductor", "liger")

Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One op at one size. Functions take all that ``make`` gives and use what they need."""

    name: str
    sizes: tuple[int, ...]
    make: Callable[..., Tensors]
    """``make(new, *sizes)``; ``new(*shape)`` is a random tensor whose gradient is wanted."""
    torch: Function
    tileops: Callable[..., Function]
    """Makes the contender for these sizes. Raises ``ImportError`` where this build lacks the op."""
    liger: Callable[[], Function] | None = None
    tiny: tuple[int, ...] = (6, 8)


# --- contenders ---------------------------------------------------------------------------------


def rows_and_weights(weights: int, rows: int = 1) -> Callable[..., Tensors]:
    def make(new: Callable[..., torch.Tensor], count: int, width: int) -> Tensors:
        return (*(new(count, width) for _ in range(rows)), *(new(width) for _ in range(weights)))

    return make


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def rotate_half(x: torch.Tensor, _: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope_inputs(new: Callable[..., torch.Tensor], tokens: int, heads: int, width: int) -> Tensors:
    x = new(tokens, heads, width)
    places = torch.arange(tokens, device=x.device)
    rates = 10000.0 ** (torch.arange(0, width, 2, device=x.device, dtype=torch.float64) / -width)
    angles = (places[:, None] * rates).repeat(1, 2)[:, None]
    return x, places, angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def gated(activation: Function) -> Function:
    def function(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return function


def tileops(family: str, name: str, *params: Any, inputs: int = 9, **named: Any) -> Function:
    """The op on the first ``inputs`` inputs."""
    op = getattr(__import__(f"tileops.{family}", fromlist=[name]), name, None)
    if op is None:
        raise ImportError(f"tileops.{family} has no {name}")
    made = op(*params, **named)
    return lambda *tensors: made(*tensors[:inputs])


def liger(module: str, name: str, *params: Any) -> Callable[[], Function]:
    def make() -> Function:
        function = getattr(__import__(f"liger_kernel.ops.{module}", fromlist=[name]), name)
        return lambda *tensors: function.apply(*tensors, *params)

    return make


def liger_rope() -> Function:
    """It turns queries and keys in place; here all heads are queries, beside one head of keys."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def function(x: torch.Tensor, _: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        keys = torch.empty_like(x[:, :1])
        queries, keys = (t.unsqueeze(0).transpose(1, 2) for t in (x, keys))
        turned, _ = LigerRopeFunction.apply(queries, keys, cos[:, 0], sin[:, 0])
        return turned.transpose(1, 2)[0]

    return function


def liger_gelu() -> Function:
    """It has no form for gate and up in one tensor, and copies the halves."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda x: LigerGELUMulFunction.apply(*x.chunk(2, -1))


CASES = (
    *(
        Case(
            "RMSNorm",
            sizes,
            rows_and_weights(1),
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
            lambda _, width: tileops("norm", "RMSNormFwdOp", width, EPS),
            liger("rms_norm", "LigerRMSNormFunction", EPS, 0.0, "llama", False),
        )
        for sizes in ((32768, 4096), (2048, 4096))
    ),
    Case(
        "LayerNorm",
        (16384, 4096),
        rows_and_weights(2),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        lambda _, width: tileops("norm", "LayerNormFwdOp", width, EPS),
        liger("layer_norm", "LigerLayerNormFunction", EPS),
    ),
    Case(
        "FusedAddRMSNorm",
        (16384, 4096),
        rows_and_weights(1, rows=2),
        add_rms_norm,
        lambda _, width: tileops("norm", "FusedAddRMSNormFwdOp", EPS),
        liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", EPS, 0.0, "llama", False),
    ),
    Case(
        "SiLUAndMul",
        (8192, 28672),
        rows_and_weights(0),
        gated(F.silu),
        lambda *_: tileops("elementwise", "SiLUAndMulFwdOp"),
        liger("swiglu", "LigerFusedGateUpSiLUMulFunction"),
    ),
    Case(
        "GELUAndMul",
        (8192, 28672),
        rows_and_weights(0),
        gated(functools.partial(F.gelu, approximate="tanh")),
        lambda *_: tileops("elementwise", "GELUAndMulFwdOp", approximate="tanh"),
        liger_gelu,
    ),
    Case(
        "RoPE",
        (16384, 32, 128),
        rope_inputs,
        rotate_half,
        lambda tokens, *_: tileops("rope", "RoPENeoxPositionIdsFwdOp", tokens, inputs=2),
        liger_rope,
        (6, 2, 8),
    ),
    Case(
        "Softmax",
        (4096, 32768),
        rows_and_weights(0),
        lambda x: torch.softmax(x, -1),
        lambda *_: tileops("reduction", "SoftmaxFwdOp", -1),
        liger("softmax", "LigerSoftmaxFunction"),
    ),
    Case(
        "LogSoftmax",
        (4096, 32768),
        rows_and_weights(0),
        lambda x: torch.log_softmax(x, -1),
        lambda *_: tileops("reduction", "LogSoftmaxFwdOp", -1),
    ),
    Case(
        "GEMM",
        (8192, 4096, 4096),
        lambda new, m, n, k: (new(m, k), new(n, k)),
        lambda a, b: a @ b.t(),
        lambda *_: tileops("gemm", "GEMMFwdOp"),
        None,
        (6, 4, 8),
    ),
)


def contenders(case: Case, sizes: tuple[int, ...]) -> tuple[dict[str, Function], dict[str, str]]:
    """Functions by name, and why others are absent."""
    torch._dynamo.reset()

    def inductor() -> Function:
        @functools.wraps(case.torch)
        def own(*tensors: torch.Tensor) -> Any:  # a frame of its own: no recompile limit is met
            return case.torch(*tensors)

        return torch.compile(own, fullgraph=True, dynamic=False)

    makers = {"tileops": lambda: case.tileops(*sizes), "torch": lambda: case.torch,
              "inductor": inductor}  # fmt: skip
    if case.liger is not None:
        makers["liger"] = case.liger
    found, absent = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            absent[name] = str(error)
    return found, absent


# --- one step -----------------------------------------------------------------------------------


def step(function: Function, inputs: Tensors, incoming: Tensors) -> Tensors:
    """The gradients of all inputs that want one, as nobody else holds them."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return torch.autograd.grad(outputs, wanted, incoming)


def drawn(
    case: Case, sizes: tuple[int, ...], device: str, dtype: torch.dtype
) -> tuple[Tensors, Tensors]:
    """Random inputs, and gradients that come back."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    inputs = case.make(new, *sizes)
    with torch.no_grad():
        outputs = case.torch(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return inputs, tuple(torch.randn_like(output) for output in outputs)


def copies(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Of their own memory, floats as ``dtype``."""
    return tuple(
        t.detach()
        .to(dtype if dtype and t.is_floating_point() else t.dtype, copy=True)
        .requires_grad_(t.requires_grad)
        for t in tensors
    )


def errors(works: Mapping[str, Function], inputs: Tensors, incoming: Tensors) -> dict[str, float]:
    """The greatest relative error of a gradient, by contender. Raises ``SystemExit`` for a wrong one."""
    exact = step(works["torch"], copies(inputs, torch.float64), copies(incoming, torch.float64))
    found = {}
    for name, work in works.items():
        given = step(work, copies(inputs), copies(incoming))
        found[name] = max(
            float((g.double() - e).norm() / e.norm().clamp_min(math.ulp(0.0)))
            for g, e in zip(given, exact, strict=True)
        )
        if not found[name] < ERROR[inputs[0].dtype]:  # NaN too
            raise SystemExit(f"{name} is wrong: {found[name]:.3g}")
    return found


# --- measuring ----------------------------------------------------------------------------------


def host_clock(calls: Mapping[str, Sequence[Callable[[], Any]]], rounds: int) -> dict[str, Times]:
    """Without a card: that every contender runs."""
    times: dict[str, Times] = {}
    for name, works in calls.items():
        samples = []
        for _ in range(rounds):
            begin = time.perf_counter()
            works[0]()
            samples.append((time.perf_counter() - begin) * 1e6)
        times[name] = {"median": statistics.median(samples), "min": min(samples),
                       "max": max(samples), "samples": rounds}  # fmt: skip
    return times


def measure(case: Case, device: str, dtype: torch.dtype, tiny: bool, rounds: int) -> dict[str, Any]:
    """Check, then time, on fresh inputs that together exceed the L2 cache."""
    sizes = case.tiny if tiny else case.sizes
    works, absent = contenders(case, sizes)
    inputs, incoming = drawn(case, sizes, device, dtype)
    error = errors(works, inputs, incoming)
    moved = sum(t.numel() * t.element_size() for t in (*inputs, *incoming))
    on_card = device != "cpu"
    count = sets_past_l2(moved) if on_card else 1
    sets = [(inputs, incoming), *(drawn(case, sizes, device, dtype) for _ in range(count - 1))]
    calls = {
        name: [functools.partial(step, work, *tensors) for tensors in sets]
        for name, work in works.items()
    }
    times = device_times(calls, rounds) if on_card else host_clock(calls, rounds)
    result: dict[str, Any] = {
        "op": case.name, "sizes": list(sizes), "dtype": str(dtype)[6:], "input_sets": count,
        "step_us": times, "relative_error": error, "absent": absent,
    }  # fmt: skip
    medians = {name: value["median"] for name, value in times.items()}
    best = min((name for name in RIVALS if name in medians), key=medians.__getitem__)
    result["best_rival"] = best
    if "tileops" in medians:
        result["tileops_over_best_rival"] = round(medians["tileops"] / medians[best], 4)
    return result


def table(result: dict[str, Any]) -> None:
    print(f"\n{result['op']} {result['sizes']} {result['dtype']}")
    for name, value in sorted(result["step_us"].items(), key=lambda row: row[1]["median"]):
        print(f"  {value['median']:10.2f} µs  ({value['min']:.2f} to {value['max']:.2f})  {name}")
    for name, why in result["absent"].items():
        print(f"  {'-':>10}     {name}: {why}")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="such as RMSNorm; all of them where none is named")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few elements, to see that it works")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    unknown = set(arguments.ops) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    about = (
        {"card": "cpu", "torch": torch.__version__, "python": platform.python_version()}
        if arguments.device == "cpu"
        else facts(arguments.commit)
    )
    report: dict[str, Any] = {"facts": about, "results": []}
    for case in CASES:
        if arguments.ops and case.name not in arguments.ops:
            continue
        dtype = getattr(torch, arguments.dtype)
        result = measure(case, arguments.device, dtype, arguments.tiny, arguments.rounds)
        report["results"].append(result)
        table(result)
        if arguments.device != "cpu":
            torch.cuda.empty_cache()
    out = arguments.out or ROOT / "benchmarks" / "results" / f"backward_{slug(about['card'])}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
