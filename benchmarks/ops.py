"""Kernels with rivals of their own on a card: device and host time through the public ops, beside torch
and a copy. Every workload of a manifest, beside its reference: ``families.py``.

    PYTHONPATH=src python3 benchmarks/ops.py                 # all families; JSON in benchmarks/results
    PYTHONPATH=src python3 benchmarks/ops.py gemm attention  # some
    PYTHONPATH=src python3 benchmarks/ops.py rope --tune     # every candidate configuration too

Every contender but the copy is first checked against float64, on inputs that are then timed. GEMM is
timed with its candidates always, and ends with the lines to write into ``gemm.SHARE``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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

DEVICE = "cuda"
ERROR = {torch.float16: 1e-3, torch.bfloat16: 6e-3, torch.float32: 2e-6}
"""Greatest ‖y - y64‖ / ‖y64‖, by the dtype that is least precise in the case."""

Contender = Callable[..., Any]
Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One op at one size, and what it is measured against."""

    name: str
    op: Any
    make: Callable[[], Inputs]
    """Fresh random inputs."""
    expected: Callable[..., torch.Tensor]
    """The result in float64 or float32, of the same inputs."""
    moved: int
    """Bytes read once and written once."""
    rivals: dict[str, Contender] = field(default_factory=dict)
    error: float = ERROR[torch.bfloat16]
    flops: int = 0
    result: Callable[[Any, Inputs], torch.Tensor] = lambda returned, inputs: returned
    """What to check, where the op writes its inputs."""
    always_tune: bool = False


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


# --- reduction ----------------------------------------------------------------------------------


def reduction(
    sizes: tuple[tuple[int, int], ...] = ((4, 128256), (32768, 4096), (2048, 128256)),
) -> Iterator[Case]:
    from tileops.reduction import SoftmaxFwdOp

    for rows, columns in sizes:
        dtype = torch.float32 if rows == sizes[0][0] else torch.bfloat16
        yield Case(
            f"Softmax {rows}x{columns} bf16 to {str(dtype)[6:]}",
            SoftmaxFwdOp(-1, dtype=dtype),
            lambda rows=rows, columns=columns: (randn(rows, columns) * 3,),
            lambda x: torch.softmax(x.double(), -1),
            rows * columns * (2 + dtype.itemsize),
            {"torch": functools.partial(F.softmax, dim=-1, dtype=dtype)},
            ERROR[dtype],
        )
    yield Case(
        "Softmax 64x512x64 bf16 over the middle axis",
        SoftmaxFwdOp(1),
        lambda: (randn(64, 512, 64) * 3,),
        lambda x: torch.softmax(x.double(), 1),
        64 * 512 * 64 * 4,
        {"torch": functools.partial(F.softmax, dim=1)},
    )


def rows_alone() -> None:
    """A row's result must not depend on the rows beside it, whichever kernel serves."""
    from tileops.reduction import SoftmaxFwdOp

    op = SoftmaxFwdOp(-1)
    for columns in (4096, 16384, 16386, 128256):
        x = randn(1000, columns)
        every = op(x)
        for rows in (1, 3, 999):
            if not torch.equal(op(x[:rows]), every[:rows]):
                raise SystemExit(f"softmax of {columns} columns depends on the number of rows")


# --- rope ---------------------------------------------------------------------------------------


def rope(sizes: tuple[int, ...] = (32, 8192), heads: int = 32, width: int = 128) -> Iterator[Case]:
    from tileops.rope import RoPENeoxPositionIdsFwdOp

    last = 32768
    turns = 10000.0 ** (torch.arange(width // 2, dtype=torch.float64, device=DEVICE) * -2 / width)
    angles = torch.arange(last, dtype=torch.float64, device=DEVICE)[:, None] * turns
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()

    def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)

    def torch_rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cosine, sine = table[positions].unsqueeze(1).chunk(2, -1)
        return turned(x, cosine, sine)

    def expected(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.double()[:, None, None] * turns
        return turned(x.double(), angle.cos(), angle.sin())

    for tokens in sizes:
        yield Case(
            f"RoPE {tokens}x{heads}x{width} bf16",
            RoPENeoxPositionIdsFwdOp(last),
            lambda tokens=tokens: (
                randn(tokens, heads, width),
                torch.randint(0, last, (tokens,), device=DEVICE, dtype=torch.int32),
            ),
            expected,
            tokens * (heads * width * 4 + 4),
            {"torch": torch_rope},
        )


# --- gemm ---------------------------------------------------------------------------------------

ROWS = (1, 16, 64, 128, 512, 2048, 8192)


def gemm(
    rows: tuple[int, ...] = ROWS,
    weights: tuple[tuple[int, int], ...] = ((2112, 7168), (4096, 4096), (7168, 4096), (4096, 7168)),
) -> Iterator[Case]:
    from tileops.gemm import GEMMFwdOp

    for columns, depth in weights:
        for some in rows:
            yield Case(
                f"GEMM {some}x{columns}x{depth} bf16",
                GEMMFwdOp(),
                lambda s=some, n=columns, k=depth: (randn(s, k), randn(n, k)),
                lambda a, b: a.double() @ b.double().T,
                2 * (some * depth + columns * depth + some * columns),
                {"torch.mm (cuBLAS)": lambda a, b: torch.mm(a, b.T)},
                flops=2 * some * columns * depth,
                always_tune=True,
            )


def shares(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """For ``gemm.SHARE``: the median share of the roofline, (cuBLAS, best Triton), by rows."""
    from tileops.gemm.kernels.gemm import LAUNCH, ROOFLINE, SHARE

    about = torch.cuda.get_device_properties(0)
    arch = max(a for a in ROOFLINE if a <= (about.major, about.minor))
    bandwidth, teraflops = ROOFLINE[arch]
    found: dict[int, list[tuple[float, float]]] = {most: [] for most in SHARE}
    for result in results:
        rows = int(result["name"].split()[1].split("x")[0])
        roof = max(result["bytes"] / bandwidth, result["flops"] / teraflops) * 1e-6
        times = {name: t["median"] for name, t in result["device_us"].items()}
        triton = min(t for name, t in times.items() if name.startswith("triton"))
        pair = [
            roof / max(t - LAUNCH[library], 0.1)
            for library, t in (("cublas", times["torch.mm (cuBLAS)"]), ("triton", triton))
        ]
        found[next(most for most in found if rows <= most)].append((pair[0], pair[1]))
    return {
        str(most): [round(sorted(side)[len(side) // 2], 3) for side in zip(*pairs, strict=True)]
        for most, pairs in found.items()
        if pairs
    }


# --- attention ----------------------------------------------------------------------------------


def attention(
    sizes: tuple[tuple[int, int, int, int, dict[str, Any]], ...] = (
        (32, 1, 4096, 128, {"is_causal": True}),
        (4, 4096, 4096, 128, {"is_causal": True}),
        (4, 512, 8192, 128, {"is_causal": True}),
        (4, 4096, 4096, 128, {"is_causal": True, "window_size_left": 1023}),
    ),
    heads: int = 32,
    kv_heads: int = 8,
) -> Iterator[Case]:
    from tileops.attention import GQADenseFwdOp

    for batch, queries, keys, width, params in sizes:
        left = params.get("window_size_left", -1)
        seen = min(keys, left + 1 if left >= 0 else keys)
        pairs = queries * seen if queries < keys or left >= 0 else queries * seen // 2
        label = f"GQA {batch}x{queries}x{keys} h{heads}/{kv_heads} d{width} bf16"
        yield Case(
            label + (f" window {left}" if left >= 0 else ""),
            GQADenseFwdOp(**params),
            lambda b=batch, s=queries, t=keys, d=width: (
                randn(b, s, heads, d),
                randn(b, t, kv_heads, d),
                randn(b, t, kv_heads, d),
            ),
            functools.partial(attention64, left=left),
            2 * batch * width * (2 * queries * heads + 2 * keys * kv_heads),
            dict(attention_rivals(queries, keys, left)),
            flops=4 * batch * heads * width * pairs,
        )


def attention_rivals(queries: int, keys: int, left: int) -> Iterator[tuple[str, Contender]]:
    """Torch's kernels one by one, where torch's own mask is the one that is meant."""
    if left >= 0 or 1 < queries < keys:
        return

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = queries == keys
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return found.transpose(1, 2)

    yield "torch", attend
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def forced(*inputs: torch.Tensor, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend(*inputs)

        yield f"torch {backend.name}", forced


def attention64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int) -> torch.Tensor:
    """Causal attention, one batch row and key head at a time."""
    (batch, queries, heads, width), (keys, kv_heads) = q.shape, k.shape[1:3]
    place = torch.arange(queries, device=q.device)[:, None] + keys - queries
    other = torch.arange(keys, device=q.device)[None, :]
    hidden = other > place if left < 0 else (other > place) | (other < place - left)
    found = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    for row in range(batch):
        for head in range(kv_heads):
            some = slice(head * group, (head + 1) * group)
            query = q[row, :, some].double().transpose(0, 1)
            scores = query @ k[row, :, head].double().T * width**-0.5
            weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
            found[row, :, some] = (weights @ v[row, :, head].double()).transpose(0, 1).float()
    return found


def cache(
    sizes: tuple[tuple[int, torch.dtype], ...] = (
        (64, torch.bfloat16),
        (2048, torch.bfloat16),
        (64, torch.float8_e4m3fn),
    ),
    heads: int = 8,
    width: int = 128,
    slots: int = 4096 * 16,
) -> Iterator[Case]:
    from tileops.attention import PagedKVCacheWriteFwdOp

    def rows_of(target: torch.Tensor) -> torch.Tensor:
        """A row for each slot; float8 as bytes, for which indexing is implemented."""
        plain = target.view(torch.uint8) if target.dtype.itemsize == 1 else target
        return plain.view(-1, heads, width)

    def found(target: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return rows_of(target)[places].view(target.dtype).float()

    for tokens, kind in sizes:
        scaled = kind.itemsize == 1
        caches = [
            torch.zeros(slots // 16, 16, heads, width, device=DEVICE, dtype=kind) for _ in range(2)
        ]
        scales = [torch.full((1,), 0.5, device=DEVICE) for _ in range(2)] if scaled else [None] * 2

        def make(tokens: int = tokens, caches: Any = caches, scales: Any = scales) -> Inputs:
            places = torch.randperm(slots, device=DEVICE)[:tokens]
            new = (randn(tokens, heads, width) for _ in range(2))
            return (*new, *caches, places, *scales)

        def index_put(
            k: Any, v: Any, k_cache: Any, v_cache: Any, places: Any, *scales: Any
        ) -> None:
            for new, target, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
                stored = new if scale is None else (new / scale).clamp(-448, 448).to(target.dtype)
                rows_of(target)[places] = stored.view(rows_of(target).dtype)

        yield Case(
            f"PagedKVCacheWrite {tokens}x{heads}x{width} bf16 to {str(kind)[6:]}",
            PagedKVCacheWriteFwdOp(),
            make,
            lambda k, v, *rest: torch.cat([k, v]).double() * (1.0 if rest[3] is None else 2.0),
            tokens * (2 * heads * width * (2 + kind.itemsize) + 8),
            {"torch": index_put},
            error=0.04 if scaled else 1e-9,
            result=lambda _, inputs: torch.cat([found(c, inputs[4]) for c in inputs[2:4]]),
        )


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "reduction": reduction,
    "rope": rope,
    "attention": attention,
    "cache": cache,
    "gemm": gemm,
}


# --- contenders ---------------------------------------------------------------------------------


def candidates(op: Any, inputs: Inputs) -> dict[str, Contender]:
    """Each configuration of each Triton kernel that takes the call."""
    from tileops.engine.plan import in_tree_kernels

    op(*inputs)
    call = op.last_call.call
    found: dict[str, Contender] = {}
    for kernel in in_tree_kernels(type(op), "cuda"):
        if not kernel.name.startswith("triton") or kernel.refuses(call):
            continue
        entries = kernel.candidates(call)
        compile_ahead(entries)
        parts = [n for _, n in kernel.choices(call)] if hasattr(kernel, "choices") else None
        for turn, entry in enumerate(entries):
            name = f"{kernel.name} #{turn} {described(entry)}"
            found[name + (f" parts={parts[turn]}" if parts else "")] = entry.bind(
                entry.build(), call
            )
    return found


def builds_of(entry: Any) -> list[Any]:
    parts = [entry.build, *getattr(entry.build, "args", ())]
    return [part for part in parts if hasattr(part, "compile_for")]


def compile_ahead(entries: list[Any]) -> None:
    """Fill Triton's cache on every core; the builds then only load."""
    arch = torch.cuda.get_device_capability()
    builds = {build.identity: build for entry in entries for build in builds_of(entry)}
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda build: build.compile_for(arch), builds.values()))


def described(entry: Any) -> str:
    build = builds_of(entry)[0]
    sizes = [f"{name}={value}" for name, value in build.constexprs if name != "PRECISION"]
    return f"{' '.join(sizes)} warps={build.num_warps} stages={build.num_stages}"


def copy(moved: int) -> Contender:
    """Moves as many bytes as the case: half are read, half written."""
    source = torch.zeros(max(moved // 2, 1), dtype=torch.uint8, device=DEVICE)
    return lambda *_: torch.empty_like(source).copy_(source)


def cloned(inputs: Inputs) -> Inputs:
    return tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs)


def checked(case: Case, works: dict[str, Contender], inputs: Inputs) -> dict[str, float]:
    """The relative error of each; those that cannot run are dropped, a wrong one ends the run."""
    errors: dict[str, float] = {}
    expected = case.expected(*inputs)
    for name, work in list(works.items()):
        given = cloned(inputs)
        torch.empty(expected.shape, dtype=torch.float32, device=DEVICE).fill_(math.nan)
        try:
            returned = work(*given)
        except RuntimeError as error:
            if name == "tileops" or name.startswith("triton"):
                raise
            print(f"  {name} cannot run this: {str(error).splitlines()[0]}")
            del works[name]
            continue
        found = case.result(given[0] if returned is None else returned, given)
        difference = (found.double() - expected).norm() / expected.double().norm()
        errors[name] = difference.item()
        limit = case.error if not name.startswith("torch") else 4 * case.error
        if not errors[name] <= limit:  # NaN too
            raise SystemExit(f"{name} is wrong in {case.name}: {errors[name]:.3g}")
    return errors


# --- measuring ----------------------------------------------------------------------------------


def measure(case: Case, tune: bool, rounds: int) -> dict[str, Any]:
    inputs = [case.make()]
    works: dict[str, Contender] = {"tileops": case.op, **case.rivals}
    if tune or case.always_tune:
        works.update(candidates(case.op, cloned(inputs[0])))
    errors = checked(case, works, inputs[0])
    inputs += [case.make() for _ in range(sets_past_l2(case.moved, most=32) - 1)]
    calls = {
        name: [functools.partial(work, *given) for given in inputs] for name, work in works.items()
    }
    calls["copy"] = [copy(case.moved) for _ in inputs]
    times = device_times(calls, rounds)
    return {
        "name": case.name,
        "kernel": case.op.last_call.kernel,
        "bytes": case.moved,
        "flops": case.flops,
        "input_sets": len(inputs),
        "device_us": times,
        "relative_error": errors,
    }


def measured_host() -> dict[str, dict[str, Times]]:
    """One eager call at sizes so small that the device is done before the host comes back."""
    from tileops.attention import PagedKVCacheWriteFwdOp
    from tileops.elementwise import SiLUAndMulFwdOp, SiLUFwdOp
    from tileops.gemm import GEMMFwdOp
    from tileops.reduction import SoftmaxFwdOp
    from tileops.rope import RoPENeoxPositionIdsFwdOp

    x, wide, scores = randn(1, 4096), randn(1, 8192), randn(16, 512)
    heads, positions = randn(4, 8, 128), torch.arange(4, device=DEVICE)
    a, b = randn(16, 256), randn(256, 256)
    new, keys, values = randn(4, 8, 128), randn(64, 16, 8, 128), randn(64, 16, 8, 128)
    silu, gated, softmax = SiLUFwdOp(), SiLUAndMulFwdOp(), SoftmaxFwdOp(-1)
    turn, product, write = RoPENeoxPositionIdsFwdOp(32768), GEMMFwdOp(), PagedKVCacheWriteFwdOp()
    pairs: dict[str, dict[str, Contender]] = {
        "SiLU": {"tileops": lambda: silu(x), "torch": lambda: F.silu(x)},
        "SiLUAndMul": {"tileops": lambda: gated(wide)},
        "Softmax": {"tileops": lambda: softmax(scores), "torch": lambda: F.softmax(scores, -1)},
        "RoPE": {"tileops": lambda: turn(heads, positions)},
        "GEMM": {"tileops": lambda: product(a, b), "torch": lambda: torch.mm(a, b.T)},
        "PagedKVCacheWrite": {"tileops": lambda: write(new, new, keys, values, positions)},
    }
    return {name: host_times(works, calls=1000, rounds=5) for name, works in pairs.items()}


# --- report -------------------------------------------------------------------------------------


def table(result: dict[str, Any], most: int = 8) -> None:
    print(f"\n{result['name']}: {result['kernel']}, {result['input_sets']} sets of inputs")
    ordered = sorted(result["device_us"].items(), key=lambda row: row[1]["median"])
    kept = [row for place, row in enumerate(ordered) if place < most or "triton" not in row[0]]
    for name, times in kept:
        speed = f"{result['bytes'] / times['median'] / 1e6:6.3f} TB/s"
        if result["flops"]:
            speed += f" {result['flops'] / times['median'] / 1e6:7.1f} TF/s"
        spread = f"({times['min']:.3f} to {times['max']:.3f})"
        print(f"  {times['median']:9.3f} µs  {spread:>22}  {speed}  {name}")
    if len(kept) < len(ordered):
        print(f"  and {len(ordered) - len(kept)} slower candidates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; all when none")
    parser.add_argument("--tune", action="store_true", help="time the candidate configurations too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-host", action="store_true", help="leave out host time")
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"unknown: {', '.join(unknown)}")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False

    begin = time.monotonic()
    report: dict[str, Any] = {"facts": facts(arguments.commit), "device": []}
    for family in arguments.families or FAMILIES:
        results = []
        for case in FAMILIES[family]():
            results.append(measure(case, arguments.tune, arguments.rounds))
            table(results[-1])
            torch.cuda.empty_cache()
        report["device"] += results
        if family == "reduction":
            rows_alone()
        if family == "gemm":
            report["gemm_share"] = shares(results)
            print("\nfor gemm.SHARE, (cuBLAS, Triton) by the most rows:")
            for most, pair in report["gemm_share"].items():
                print(f"    {most}: {tuple(pair)},")
        print(f"\n[{family} done after {time.monotonic() - begin:.0f} s]", flush=True)
    if not arguments.no_host:
        report["host_us"] = measured_host()
        print("\nhost time of one eager call, least of the rounds")
        for op, times in report["host_us"].items():
            row = "  ".join(f"{name} {t['min']:.2f} µs" for name, t in times.items())
            print(f"  {op:18} {row}")

    card = slug(report["facts"]["card"])
    out = arguments.out or ROOT / "benchmarks" / "results" / f"ops_{card}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out} after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
