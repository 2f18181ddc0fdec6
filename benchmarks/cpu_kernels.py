"""Every workload of a family's manifest on the CPU, scaled to a size: the op beside the plain expression.

    PYTHONPATH=src python3 benchmarks/cpu_kernels.py elementwise norm           # families
    PYTHONPATH=src python3 benchmarks/cpu_kernels.py --op SiLUAndMulFwdOp --compile --mib 1 4 16

``torch`` is the entry's ``reference`` where that can be called, else the op's definition run through ATen;
a copy where the reference returns its input, since an op returns a new tensor.
With ``--compile`` also: ``inductor``, the definition as a node compiles it (which decides an op's
``compiled_from``), and ``compiled op`` and ``compiled torch``, both inside ``torch.compile`` as functions
of the call's tensors, numbers being literals. At the end of a line stands the op's time over torch's, which
should be at most 1.05, and the same compiled.

One thread; the processor time of this process, so that others on the machine count little; contenders take
turns, and a row is the median of ``--rounds`` samples of a few milliseconds.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.families import chosen, definition, of_case, reference, reference_function  # noqa: E402
from tileops.engine.decomposition import decomposition_kernels  # noqa: E402
from tileops.engine.manifest.catalog import families  # noqa: E402
from tileops.engine.manifest.entry import Workload  # noqa: E402
from tileops.engine.signature.source import compile_source  # noqa: E402
from tileops.engine.workloads import WorkloadCall, workload_inputs  # noqa: E402

SAMPLE_S = 4e-3
LIMIT = 1.05
WITHOUT = ("seed",)
"""Parameters that torch's own functions do not take."""
Work = Callable[[], Any]


def scaled_call(op_class: Any, workload: Workload, mib: int) -> WorkloadCall | None:
    """The workload with its largest tensor of at most ``mib`` MiB; None where it is below half of that."""
    most, call = mib << 20, None
    for itemsize in (8, 4, 2, 1):  # elements of which the widest of that many bytes are as much
        call = workload_inputs(op_class, workload, "cpu", scale_to=most // itemsize)
        sizes = [t.nbytes for t in call.inputs.values() if t is not None]
        if max(sizes, default=0) * 2 > most:
            return call if max(sizes) <= most else None
    return None


def compiled_node(call: WorkloadCall) -> Work:
    """The kernel that Inductor makes of the definition, as a repeated call finds it."""
    op, entry = call.op, call.op.entry
    is_input = next((o.is_input for o in entry.outputs if o.is_input), "")
    _, kernel = decomposition_kernels(type(op).decomposition, 0, entry.has_out, is_input)
    inputs = (*call.inputs.values(), *([None] if entry.has_out else []))
    spec = op._spec(tuple(call.inputs.values()))
    served = kernel.entry_for(spec)
    run = served.bind(served.build(), spec)
    run(*inputs)
    return functools.partial(run.trusted, *inputs)


def inside_compile(function: Work, inputs: Mapping[str, Any], *given: str, **params: Any) -> Work:
    """A call of ``function`` inside ``torch.compile``; ``given``: its arguments, over ``inputs``."""
    constants = {f"_{name}": value for name, value in params.items()}
    simple = (bool, int, float, type(None))
    literal = {n: repr(v) for n, v in constants.items() if type(v) in simple}
    given = (*given, *(f"{name}={literal.get(f'_{name}', f'_{name}')}" for name in params))
    source = f"def traced({', '.join(inputs)}):\n    return function({', '.join(given)})\n"
    traced = compile_source(source, f"traced/{id(inputs)}.py", {"function": function, **constants})
    return functools.partial(torch.compile(traced["traced"]), *inputs.values())


def compiled_plain(call: WorkloadCall, by_reference: bool) -> Work:
    """The plain expression inside ``torch.compile``."""
    params, names = call.op._params, list(call.inputs)
    if not by_reference:
        return inside_compile(type(call.op).decomposition, call.inputs, *names, **params)
    last = max(n for n, value in enumerate(call.inputs.values()) if value is not None)
    taken = {name: value for name, value in params.items() if name not in WITHOUT}
    return inside_compile(reference_function(call), call.inputs, *names[: last + 1], **taken)


def contenders(call: WorkloadCall, compiled: bool) -> dict[str, Work]:
    plain = reference(call, without=WITHOUT)
    if plain is not None:
        try:
            plain(call)
        except (TypeError, RuntimeError, ValueError):  # it names or orders its arguments otherwise
            plain = None
    torchs = functools.partial(plain or definition, call)
    given, found = next(iter(call.inputs.values())), torchs()
    if found is given and not call.op._params.get("inplace", False):
        torchs = given.clone
    op = functools.partial(call.op, *call.args, **call.kwargs)
    works: dict[str, Work] = {"tileops": op, "torch": torchs}
    if compiled:
        torch._dynamo.reset()
        works["inductor"] = compiled_node(call)
        named = [f"{name}={name}" if name in call.kwargs else name for name in call.inputs]
        works["compiled op"] = inside_compile(call.op, call.inputs, *named)
        works["compiled torch"] = compiled_plain(call, plain is not None)
    return works


def times_us(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """The median processor time of a call."""
    counts = {}
    for name, work in works.items():
        work()
        begin = time.process_time()
        work()
        counts[name] = max(
            1, min(200, math.ceil(SAMPLE_S / max(time.process_time() - begin, 1e-6)))
        )
    samples: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in works if turn % 2 else reversed(works):
            begin = time.process_time()
            for _ in range(counts[name]):
                works[name]()
            samples[name].append((time.process_time() - begin) * 1e6 / counts[name])
    return {name: round(statistics.median(values), 1) for name, values in samples.items()}


def measure(call: WorkloadCall, arguments: argparse.Namespace) -> dict[str, Any]:
    with torch.no_grad():
        works = contenders(call, arguments.compile)
        found = times_us(works, arguments.rounds)
        if (
            found["tileops"] > LIMIT * found["torch"]
        ):  # once more: noise does not strike twice alike
            again = times_us(works, 2 * arguments.rounds)
            if again["tileops"] / again["torch"] < found["tileops"] / found["torch"]:
                found = again
    row: dict[str, Any] = {"us": found, "over": round(found["tileops"] / found["torch"], 3)}
    if arguments.compile:
        row["compiled_over"] = round(found["compiled op"] / found["compiled torch"], 3)
    return row


def shown(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {value:.0f}" for name, value in row["us"].items())
    ratios = "  ".join(f"{row[name]:.2f}" for name in ("over", "compiled_over") if name in row)
    place = f"{row['op']} {row['label']} {row['mib']} MiB"
    return f"{place:48} µs: {times}   {ratios}"


def facts() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": dt.date.today().isoformat(), "commit": commit, "torch": torch.__version__,
        "threads": torch.get_num_threads(), "machine": platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="all where none is named")
    parser.add_argument("--op", action="append", default=[], help="only these classes")
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[1, 4], help="sizes, of the largest input"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="also through Inductor")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    known = families()
    if unknown := set(arguments.families) - known.keys():
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin, rows, left = time.monotonic(), [], []
    for case in chosen(arguments.families or list(known), arguments.op):
        op_class, workload = of_case(case)
        for mib in arguments.mib if op_class.entry.inputs and op_class.decomposition else []:
            if time.monotonic() - begin > arguments.seconds:
                left.append(f"{op_class.__name__} {workload.label} {mib} MiB")
            elif (call := scaled_call(op_class, workload, mib)) is not None:
                named = {"op": op_class.__name__, "label": workload.label, "mib": mib}
                rows.append({**named, **measure(call, arguments)})
                print(shown(rows[-1]), flush=True)
    for name in ("over", "compiled_over"):
        slow = sorted((r for r in rows if r.get(name, 0) > LIMIT), key=lambda r: -r[name])
        text = [f"{r['op']} {r['label']} {r['mib']} MiB {r[name]:.2f}" for r in slow]
        print(f"\n{name}: {len(slow)} of {len(rows)} above {LIMIT}", *text, sep="\n  ")
    if left:
        print(f"\nnot reached: {', '.join(left)}")
    if arguments.out:
        report = {"facts": facts(), "not reached": left, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
