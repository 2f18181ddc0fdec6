"""What a call costs on the host, stage by stage.

Stages are timed as the calls that the path makes, one by one, so that they need not add up exactly.
Ways of calling take turns in rounds; the least round says what a call costs, because whatever else
runs on the machine only adds.
"""

from __future__ import annotations

import datetime as dt
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.backend import register_kernel_builder
from tileops.bench import cuda_calls
from tileops.elementwise import SiLUFwdOp
from tileops.engine.boundary.gate import direct
from tileops.norm import RMSNormFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

__all__ = ["measure_host", "show"]

Work = Callable[[], Any]
Rows = dict[str, dict[str, float]]
TARGET = "bench_ready"
"""A target whose kernel returns a tensor that is there already: what remains is the op layer."""
ROWS, WIDTH = 2048, 4096


def measure_host(rounds: int, calls: int, *, cuda: bool, commit: str = "") -> dict[str, Any]:
    """The tables of this machine, in nanoseconds a call (``min`` and ``median`` of the rounds)."""
    cuda = cuda and torch.cuda.is_available()
    tables: dict[str, Rows] = {}
    with _quiet_threads():
        tables["cpu: op layer"] = _turns(_layers("cpu"), rounds, calls)
        tables["cpu: stages"] = _turns(_stages("cpu"), rounds, calls)
        tables["cpu: under torch.compile"] = _turns(_compiled("cpu"), rounds, calls)
        tables["cpu: forward and backward"] = _turns(_trained("cpu"), rounds, min(calls, 300))
        tables["cpu: growing"] = _growing("cpu", rounds, min(calls, 300))
        if cuda:
            tables["cuda: one call"] = _turns(cuda_calls.ways(*_tensors("cuda")), rounds, calls)
            tables["cuda: stages"] = _turns(_stages("cuda"), rounds, calls)
            tables["cuda: under torch.compile"] = _turns(_compiled("cuda"), rounds, calls)
            tables["cuda: forward and backward"] = _turns(_trained("cuda"), rounds, min(calls, 300))
            tables["cuda: growing"] = _growing("cuda", rounds, min(calls, 300))
    return {
        "what": "host time of a call, ns",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "card": torch.cuda.get_device_name() if cuda else None,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "rounds": rounds,
        "calls": calls,
        "tables": tables,
        "ratios": _ratios(tables),
    }


def show(report: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = []
    for title, rows in report["tables"].items():
        lines += [title, f"  {'min ns':>10}{'median ns':>12}"]
        lines += [f"  {row['min']:10.0f}{row['median']:12.0f}  {n}" for n, row in rows.items()]
        lines.append("")
    lines += [f"{value:8.3f}  {name}" for name, value in report["ratios"].items()]
    return "\n".join(lines)


def _ratios(tables: Mapping[str, Rows]) -> dict[str, float]:
    def pick(table: str, row: str, which: str = "min") -> float:
        return tables[table][row][which]

    found = {}
    layer = "cpu: op layer"
    over = pick(layer, "tileops op", "median") - pick(layer, "the body alone", "median")
    custom = pick(layer, "torch.library.custom_op", "median") - pick(
        layer, "the body alone", "median"
    )
    found["cpu: op layer over the body, µs, median"] = over / 1000
    found["cpu: the same as a share of custom_op's"] = over / custom
    for device in ("cpu", "cuda"):
        if f"{device}: under torch.compile" in tables:
            table = f"{device}: under torch.compile"
            found[f"{device}: compiled op / compiled bare operator"] = pick(
                table, "tileops op"
            ) / pick(table, "bare Library.define operator")
            rows = tables[f"{device}: growing"]
            for name in [name.removesuffix(", repeated") for name in rows if "repeated" in name]:
                ratio = rows[f"{name}, growing"]["min"] / rows[f"{name}, repeated"]["min"]
                found[f"{device}: {name}, growing / repeated"] = ratio
    if "cuda: one call" in tables:
        call = "cuda: one call"
        for other in ("floor: empty_like + ctypes cuLaunchKernel", "F.rms_norm"):
            found[f"cuda: tileops op / {other}"] = pick(call, "tileops op") / pick(call, other)
    return found


@contextmanager
def _quiet_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _turns(ways: Mapping[str, Work], rounds: int, calls: int) -> Rows:
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        for _ in range(5):
            work()
    order = list(ways)
    for turn in range(rounds):
        for name in order if turn % 2 else reversed(order):
            samples[name].append(_round(ways[name], calls))
    return {name: _summary(times) for name, times in samples.items()}


def _round(work: Work, calls: int) -> float:
    _synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        work()
    taken = time.perf_counter_ns() - begin
    _synchronize()
    return taken / calls


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(times: list[float]) -> dict[str, float]:
    return {"min": round(min(times), 1), "median": round(statistics.median(times), 1)}


# ---- the op layer ------------------------------------------------------------------------------------


def _tensors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ROWS if device == "cuda" else 4
    dtype = torch.float16 if device == "cuda" else torch.float32
    x = torch.randn(rows, WIDTH, device=device, dtype=dtype)
    return x, torch.randn(WIDTH, device=device, dtype=dtype)


def _ready_op(ready: torch.Tensor) -> RMSNormFwdOp:
    def build_kernel(*specs: Any, **params: Any) -> Any:
        return lambda x, weight: ready

    register_kernel_builder(TARGET, RMSNormFwdOp.__name__, build_kernel)
    return RMSNormFwdOp(normalized_shape=(WIDTH,), target=TARGET)


_library = None


def _bare_operator(ready: Mapping[str, torch.Tensor]) -> Any:
    """An operator of the plainest kind, with a literal key; defined once a process."""
    global _library
    if _library is None:
        _library = torch.library.Library("tileops_bench", "DEF")
        _library.define("bare(Tensor x, Tensor? weight, str key) -> Tensor")
        _library.impl("bare", lambda x, weight, key: ready[x.device.type],
                      "CompositeExplicitAutograd")  # fmt: skip
        torch.library.register_fake(
            "tileops_bench::bare", lambda x, weight, key: torch.empty_like(x), lib=_library
        )
    return torch.ops.tileops_bench.bare.default


_READY: dict[str, torch.Tensor] = {}


def _layers(device: str) -> dict[str, Work]:
    x, weight = _tensors(device)
    ready = _READY.setdefault(device, torch.empty_like(x))
    op, bare = _ready_op(ready), _bare_operator(_READY)

    def body(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ready

    @torch.library.custom_op("tileops_bench::custom", mutates_args=())  # noqa: TID251  (a rival)
    def custom(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ready

    return {
        "the body alone": lambda: body(x, weight),
        "tileops op": lambda: op(x, weight),
        "bare Library.define operator": lambda: bare(x, weight, "key"),
        "torch.library.custom_op": lambda: custom(x, weight),
    }


def _compiled(device: str) -> dict[str, Work]:
    x, weight = _tensors(device)
    ready = _READY.setdefault(device, torch.empty_like(x))
    op, bare = _ready_op(ready), _bare_operator(_READY)

    @torch.compile(fullgraph=True)
    def with_op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return op(x, weight)

    @torch.compile(fullgraph=True)
    def with_bare(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = bare(x, weight, "key")
        return result

    return {
        "tileops op": lambda: with_op(x, weight),
        "bare Library.define operator": lambda: with_bare(x, weight),
    }


def _stages(device: str) -> dict[str, Work]:
    """What one call of RMSNorm does, piece by piece."""
    x, weight = _tensors(device)
    op = RMSNormFwdOp(normalized_shape=(WIDTH,))
    for _ in range(3):
        op(x, weight)
    state = op._state
    stages: dict[str, Work] = {"an empty function of two tensors": lambda: None}
    stages["gate (the whole one)"] = direct
    if state.hots:
        check, run = state.hots[0].check, state.hots[0].run
        stages["guard of the plan"] = lambda: check(x, weight)
        stages["alignment"] = lambda: (x.data_ptr() | weight.data_ptr()) & 15
    else:
        run = state.last.run
    stages["contiguity of both, where no guard holds"] = lambda: (
        x.is_contiguous(), weight.is_contiguous())  # fmt: skip
    stages["allocation of the output"] = lambda: torch.empty_like(x)
    stages["the plan's kernel with its allocation"] = lambda: run(x, weight)
    if device == "cuda":
        y, launch = torch.empty_like(x), cuda_calls.build_of(op, x, weight)().on(x.device.index)
        stages["launch"] = lambda: launch(ROWS, 1, 1, x, weight, y, ROWS, 1e-6)
        stages["the current stream, asked of torch._C"] = lambda: (
            torch._C._cuda_getCurrentRawStream(0)
        )
    stages["the whole call"] = lambda: op(x, weight)
    return stages


# ---- a gradient --------------------------------------------------------------------------------------


def _trained(device: str) -> dict[str, Work]:
    """Forward and backward of small tensors, where the host is what takes time."""
    dtype = torch.float16 if device == "cuda" else torch.float32

    def leaves(*shape: int, count: int = 1) -> list[torch.Tensor]:
        made = torch.randn(count, *shape, device=device, dtype=dtype)
        return [one.clone().requires_grad_() for one in made]

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in heads)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    x, weight, heads = leaves(4, 64), leaves(64), leaves(1, 64, 8, 64, count=3)
    ways: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "SiLU": (SiLUFwdOp(), x),
        "F.silu": (F.silu, x),
        "RMSNorm": (RMSNormFwdOp(64, 1e-6), x + weight),
        "F.rms_norm": (lambda x, weight: F.rms_norm(x, (64,), weight, 1e-6), x + weight),
        "attention": (GQADenseFwdOp(), heads),
        "F.scaled_dot_product_attention": (attend, heads),
    }

    def both(way: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> Work:
        grad = torch.ones_like(way(*given))
        return lambda: torch.autograd.grad(way(*given), given, grad)

    return {name: both(*work) for name, work in ways.items()}


# ---- a sequence that grows ---------------------------------------------------------------------------


def _growing(device: str, rounds: int, calls: int) -> Rows:
    """Each call one longer than the last, beside the same calls at one length."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    cache, other = torch.randn(2, 1, 4096 + calls, 8, 64, device=device, dtype=dtype)
    q = torch.randn(1, 1, 32, 64, device=device, dtype=dtype)
    pages = torch.zeros(2, 64, 16, 8, 64, device=device, dtype=dtype).unbind()
    flat, slots = cache[0].contiguous(), torch.arange(4096 + calls, device=device) % 1024
    attention = GQADenseFwdOp(is_causal=True)
    rope, write = RoPENeoxPositionIdsFwdOp(max_position=1 << 20), PagedKVCacheWriteFwdOp()
    keys = 64 if device == "cpu" else 512

    def attend(n: int) -> Any:
        k, v = cache[:, : keys + n], other[:, : keys + n]
        return lambda: attention(q, k, v)

    def rotate(n: int) -> Any:
        x, positions = flat[: 1 + n % 512], slots[: 1 + n % 512]
        return lambda: rope(x, positions)

    def store(n: int) -> Any:
        k, v, places = (t[: 1 + n % 512] for t in (flat, other[0], slots))
        return lambda: write(k, v, *pages, places)

    samples: dict[str, list[float]] = {}
    for name, make in (("decode attention", attend), ("RoPE", rotate), ("KV write", store)):
        longer, same = [make(n) for n in range(calls)], [make(calls // 2)] * calls
        for turn in range(rounds + 1):
            for way, works in (("repeated", same), ("growing", longer)):
                taken = _each(works)
                if turn:
                    samples.setdefault(f"{name}, {way}", []).append(taken)
    return {name: _summary(times) for name, times in samples.items()}


def _each(works: list[Work]) -> float:
    _synchronize()
    begin = time.perf_counter_ns()
    for work in works:
        work()
    taken = time.perf_counter_ns() - begin
    _synchronize()
    return taken / len(works)
