"""``python -m tileops.bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one measurement and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m tileops.bench", description=__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    host = commands.add_parser(
        "host",
        help="what a call costs on the host, stage by stage",
        description="What a call costs on the host, stage by stage, in nanoseconds. On a machine "
        "with a card, the CUDA call path as well. Other work on the machine only adds: figures are "
        "the least of the rounds, or medians where the table says so.",
    )
    host.add_argument("--rounds", type=int, default=9, help="rounds of each way (default 9)")
    host.add_argument("--calls", type=int, default=2000, help="calls a round (default 2000)")
    host.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    host.add_argument("--commit", default="", help="the commit to name in the file")
    host.add_argument("--device", choices=("auto", "cpu"), default="auto",
                      help="cpu: leave the card out (default auto)")  # fmt: skip
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.calls < 1:
        parser.error("--rounds and --calls are at least 1")

    from tileops.bench.host import measure_host, show

    report = measure_host(
        options.rounds, options.calls, cuda=options.device == "auto", commit=options.commit
    )
    print(show(report))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
