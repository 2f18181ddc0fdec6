"""Both libraries of this public surface in one run on a card: device time of the families' ops beside the
peer's, torch's and a copy of the same bytes.

    PYTHONPATH=src python3 benchmarks/beside_peer.py --peer SITE --rivals rivals.jsonl
    PYTHONPATH=src python3 benchmarks/beside_peer.py --peer SITE norm rope       # every workload

SITE is a folder that holds the installed peer and what it needs. It runs in a process of its own
(``peer_worker.py``) on the same inputs; the processes take turns, so the other one's context is idle. With
``--rivals`` only the rows of that file are measured. Inputs come from memory, as in ``families.py``, or are
rotated as the filed figures did (``--filed-sets``). A result of the peer that is not right is noted.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks import families as bench  # noqa: E402
from benchmarks.timing import capturable, facts, in_turns, sampler, sets_past_l2, slug  # noqa: E402
from tileops.engine.workloads import WorkloadCall, workload_inputs  # noqa: E402

WORKER = Path(__file__).with_name("peer_worker.py")


class PeerError(Exception):
    """The peer cannot do this."""


class Peer:
    """The worker's process and what it is asked."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder

    def load(self, calls: list[WorkloadCall]) -> list[torch.Tensor]:
        """Capture these calls; the results of the first."""
        first = calls[0]
        path = str(self._folder / "case.pt")
        sets = [(call.args, call.kwargs) for call in calls]
        torch.save({**identity(first), "sets": sets}, path)
        results = self._ask(load=path)["results"]
        return torch.load(results, map_location="cuda", weights_only=True)

    def sample(self) -> float:
        return self._ask(sample=True)["us"]

    def _ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        torch.cuda.synchronize()
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(site)}


@contextmanager
def peer(site: Path) -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(site),
        )  # fmt: skip
        try:
            yield Peer(process, Path(folder))
        finally:
            process.kill()
            process.wait()


def identity(call: WorkloadCall) -> dict[str, Any]:
    op_class = type(call.op)
    return {
        "module": f"tileops.{op_class.entry.family}",
        "op": op_class.__name__,
        "params": dict(call.op._params),
    }


def on_card(call: WorkloadCall) -> WorkloadCall:
    """The same call; an op without inputs is told where to write."""
    if call.inputs:
        return call
    op = type(call.op)(**{**call.op._params, "device": bench.DEVICE})
    return WorkloadCall(op, call.workload, {})


def warm(cases: list[bench.Case], site: Path, processes: int) -> None:
    """Let the peer compile what will be measured, in several processes."""
    made = []
    for case in cases:
        call = on_card(workload_inputs(*bench.of_case(case), "meta"))
        keyword = call.kwargs
        like = {n: None if x is None else (tuple(x.shape), x.dtype) for n, x in call.inputs.items()}
        by_position = {n: v for n, v in like.items() if n not in keyword}
        given = [by_position, {n: v for n, v in like.items() if n in keyword}]
        made.append({**identity(call), "like": given})
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(made, file.name)
        command = [sys.executable, str(WORKER), "--warm", file.name, str(processes)]
        subprocess.run(command, env=environment(site), check=False)


def measure(case: bench.Case, other: Peer, filed_sets: bool, rounds: int) -> dict[str, Any]:
    op_class, workload = bench.of_case(case)
    first = on_card(workload_inputs(op_class, workload, bench.DEVICE))
    works = bench.contenders(first, inductor=False)
    errors = bench.checked(first, works)
    if first.inputs:
        roofline = first.op.roofline_data_terms(*first.inputs.values())
        moved = roofline.read_bytes + roofline.write_bytes
    else:
        moved = sum(made.nbytes for made in bench.results_of(first()))
    count = bench.filed_sets(moved) if filed_sets else sets_past_l2(moved, bench.MOST_SETS)
    made = (workload_inputs(op_class, workload, bench.DEVICE, seed=n) for n in range(1, count))
    sets = [first, *map(on_card, made)]
    found: dict[str, Any] = {
        "family": case[0], "op": op_class.__name__, "label": workload.label, "bytes": moved,
    }  # fmt: skip
    samplers = {}
    try:
        results = other.load(sets)
        samplers["peer"] = other.sample
        if op_class.decomposition is not None and not op_class.random:
            wanted = bench.exact(bench.copied(first))
            if results:  # none where all is written in place
                pairs = zip(results, wanted, strict=False)
                errors["peer"] = max(bench.error_of(a, b) for a, b in pairs)
    except PeerError as problem:
        found["peer cannot"] = str(problem)
    with torch.no_grad():
        for name, work in works.items():
            calls = [functools.partial(work, made) for made in sets]
            if name == "tileops" or capturable(calls[:1]):
                samplers[name] = sampler(calls)
        samplers["copy"] = sampler([bench.copy_of(moved) for _ in sets])
    found["device_us"] = in_turns(samplers, rounds)
    found["relative_error"] = errors
    return bench.with_ratios(found, {})


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = {
        f"{r['op']} {r['label']}": r["versus"]["peer"] for r in results if "peer" in r["versus"]
    }
    found: dict[str, Any] = {
        "workloads": len(results),
        "the peer cannot": [r["op"] for r in results if "peer cannot" in r],
    }
    if ratios:
        found["geomean over peer"] = round(statistics.geometric_mean(ratios.values()), 4)
        behind = {name: ratio for name, ratio in ratios.items() if ratio < 0.97}
        found["slower than peer"] = dict(sorted(behind.items(), key=lambda item: item[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--peer", type=Path, required=True, metavar="SITE")
    parser.add_argument("--rivals", type=Path, help="measure only the rows of this file")
    parser.add_argument("--op", action="append", default=[], help="only these classes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--filed-sets", action="store_true", help="rotate as the filed figures did")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--processes", type=int, default=min(8, (os.cpu_count() or 2) // 2))
    parser.add_argument("--no-warm", dest="warm", action="store_false", help="compiled before")
    parser.add_argument("--commit", help="where this copy of the tree has no history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()

    wanted = arguments.families or ["elementwise", "norm", "reduction", "rope"]
    cases = bench.chosen(wanted, arguments.op)
    if arguments.rivals is not None:
        lines = filter(None, arguments.rivals.read_text().splitlines())
        rows = {(row["op"], row["label"]) for row in map(json.loads, lines)}
        cases = [c for c in cases if (c[1], bench.of_case(c)[1].label) in rows]
    if arguments.warm:
        warm(cases, arguments.peer, arguments.processes)
        bench.compile_ahead(cases, arguments.processes, False, None)
        print(f"compiled ahead in {time.monotonic() - begin:.0f} s", flush=True)

    results, left = [], []
    with peer(arguments.peer) as other:
        for case in cases:
            if time.monotonic() - begin > arguments.seconds:
                left.append(case[1])
                continue
            results.append(measure(case, other, arguments.filed_sets, arguments.rounds))
            print(bench.shown({"kernel": None, **results[-1]}), results[-1].get("peer cannot", ""))
            torch.cuda.empty_cache()
    report: dict[str, Any] = {"facts": facts(arguments.commit), "summary": {}, "not reached": left}
    for family in dict.fromkeys(r["family"] for r in results):
        found = report["summary"][family] = summary([r for r in results if r["family"] == family])
        print(f"\n{family}: {json.dumps(found, indent=1)}")
    report["results"] = results
    name = f"beside_peer_{slug(report['facts']['card'])}.json"
    out = arguments.out or ROOT / "benchmarks" / "results" / name
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwrote {out} after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
