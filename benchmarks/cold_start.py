"""What the first call of a process costs, with nothing kept and with everything on disk.

    python benchmarks/cold_start.py --out benchmarks/results/cold_start.json

Each figure is of a fresh process. ``cold``: an empty cache of kernels, and of Triton's. ``disk``: the
kernels are kept from a process before. ``bundle``: they are in a bundle, and the cache is empty.
``prepared``: on disk, and ``op.prepare`` came before the call. Needs a card; ``--fake`` stands in for one
and measures the host's share alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 2048, 4096
ROOT = Path(__file__).parents[1]


def child(way: str, bundle: str, fake: bool) -> None:
    """One process: import, construct, call; print the seconds of each."""
    at = [time.perf_counter()]
    import torch

    at.append(time.perf_counter())
    if fake:
        sys.path.insert(0, str(ROOT))
        from tests.fake_card import believe
    device = "cpu" if fake else "cuda"
    x = torch.randn(ROWS, COLUMNS, dtype=torch.float16, device=device)
    weight = torch.ones(COLUMNS, dtype=torch.float16, device=device)
    if not fake:
        torch.cuda.synchronize()

    def synchronize() -> None:
        if not fake:
            torch.cuda.synchronize()
        at.append(time.perf_counter())

    synchronize()
    import tileops
    from tileops.norm import RMSNormFwdOp

    op = RMSNormFwdOp(normalized_shape=(COLUMNS,))
    if bundle:
        tileops.load_bundle(bundle)
    synchronize()
    if fake:
        believe()
    call = _host_call(op, x, weight) if fake else lambda: op(x, weight)
    synchronize()
    if way == "prepared":
        op.prepare(x, weight)
    synchronize()
    call()
    synchronize()
    call()
    synchronize()
    from tileops.engine import record

    names = ("torch", "tensors", "import", "_", "prepare", "first", "second")
    seconds = {name: b - a for name, a, b in zip(names, at, at[1:], strict=False) if name != "_"}
    print(json.dumps({**seconds, "compiled": record.compile_count(),
                      "triton": "triton" in sys.modules}))  # fmt: skip


def _host_call(op: Any, x: Any, weight: Any) -> Any:
    """A call as a plan makes it and runs it, with tensors that are on the CPU."""

    import torch

    from tileops.engine.plan import build_artifact, call_spec, resolve_entry
    from tileops.engine.targets import decide, device_facts

    def call() -> Any:
        card = torch.device("cuda", 0)
        decide("RMSNormFwdOp", None, card)
        made = replace(call_spec(op, (x, weight), None)[0], device=device_facts(card))
        selection, entry = resolve_entry(op, made)
        return entry.bind(build_artifact(made, selection.kernel.name, entry), made)(x, weight)

    return call


def run(way: str, caches: Path, bundle: str = "", library: Path | None = None) -> dict[str, Any]:
    """The figures of one process."""
    environment = {
        **os.environ,
        "TILEOPS_CACHE_DIR": str(caches / "kernels"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        # As after an installation, which compiles what it installs.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(caches.parent / "bytecode"),
    }
    command = [sys.executable, __file__, "--child", way, "--bundle", bundle]
    if library is not None:
        environment["LD_LIBRARY_PATH"] = str(library.parent)
        command.append("--fake")
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    whole = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stderr)
    return {**json.loads(done.stdout), "process": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--bundle", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.bundle, options.fake)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = None
        if options.fake:
            sys.path.insert(0, str(ROOT))
            from tests.fake_card import build_fake

            library = build_fake(Path(folder))
        warm, bundle = Path(folder) / "warm", Path(folder) / "norm.bundle"
        run("cold", warm, library=library)
        _bundle(warm, bundle)
        for turn in range(options.rounds):
            for way, caches, given in (
                ("cold", Path(folder) / f"cold{turn}", ""),
                ("disk", warm, ""),
                ("prepared", warm, ""),
                ("bundle", Path(folder) / f"empty{turn}", str(bundle)),
            ):
                found.setdefault(way, []).append(run(way, caches, given, library))
    print(f"{'':9} {'import':>8} {'prepare':>8} {'first':>8} {'second':>8} {'process':>8}  seconds")
    for way, rounds in found.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        columns = ("import", "prepare", "first", "second", "process")
        figures = " ".join(f"{middle[name]:8.4f}" for name in columns)
        triton = ", Triton imported" if middle["triton"] else ""
        print(f"{way:9} {figures}  compiled {middle['compiled']:.0f}{triton}")
    if options.out:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "rows": ROWS,
            "columns": COLUMNS,
            **_machine(options.fake),
        }
        options.out.write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def _bundle(caches: Path, bundle: Path) -> None:
    code = f"import tileops; tileops.bundle({str(bundle)!r})"
    environment = {**os.environ, "TILEOPS_CACHE_DIR": str(caches / "kernels")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _machine(fake: bool) -> dict[str, str]:
    import torch

    card = "none" if fake else torch.cuda.get_device_name()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                            check=False)  # fmt: skip
    return {"card": card, "torch": torch.__version__, "python": platform.python_version(),
            "commit": commit.stdout.strip()}  # fmt: skip


if __name__ == "__main__":
    main()
