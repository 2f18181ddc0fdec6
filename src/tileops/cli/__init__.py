"""The ``tileops`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tileops import __version__
from tileops.cli.cache import add_commands
from tileops.cli.explain import add_command
from tileops.engine.errors import BundleError

if TYPE_CHECKING:
    from tileops.engine.manifest.entry import Entry

__all__ = ["main"]

_CHECK = """\
Hold every entry to its class, operators, kernels and workloads. Runs anywhere: no GPU, no data.
Exit status: 0 without faults, 1 with faults, 2 where a name is no entry."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="tileops", description="PyTorch operators that the PyTorch compiler treats as its own."
    )
    parser.add_argument("--version", action="version", version=f"tileops {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    check = commands.add_parser(
        "check",
        help="validate manifests and op classes",
        description=_CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("ops", metavar="OP", nargs="*", help="op classes (all without)")
    check.add_argument(
        "--manifest",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="check this file instead of the in-tree ones; may be repeated",
    )
    check.add_argument("--json", action="store_true", help="print a JSON object")
    check.set_defaults(run=_check)

    listing = commands.add_parser("list", help="list the ops", description="List the in-tree ops.")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(run=_list)

    add_commands(commands)
    add_command(commands)
    options = parser.parse_args(argv)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BundleError as error:  # of TILEOPS_BUNDLE
        print(f"tileops: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough: flush no more to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _check(options: argparse.Namespace) -> int:
    from tileops.engine.validate import check

    report = check(options.ops, options.manifest)
    if options.json:
        print(json.dumps(report.plain(), indent=1))
    else:
        for fault in report.faults:
            print(fault)
        for note in report.notes:
            print(f"note: {note}")
    for name, close in report.unknown.items():
        hint = f"did you mean {' or '.join(close)}?" if close else "see 'tileops list'"
        print(f"tileops check: no entry is named '{name}'; {hint}", file=sys.stderr)
    if not options.json:
        faults = f"{len(report.faults)} fault{'' if len(report.faults) == 1 else 's'}"
        entries = f"{len(report.checked)} entr{'y' if len(report.checked) == 1 else 'ies'}"
        print(f"{entries} checked, {faults}")
    return 1 if report.faults else 2 if report.unknown else 0


def _list(options: argparse.Namespace) -> int:
    from tileops.engine.errors import ManifestError
    from tileops.engine.manifest.catalog import families, load_family

    rows, failed = [], False
    for path in families().values():
        try:
            rows += [_row(entry) for entry in load_family(path).values()]
        except ManifestError as error:
            failed = True
            print(f"tileops list: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        names = ("class", "family", "status", "boundary", "operators")
        table = [names, *(tuple(_cell(row[name]) for name in names) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(names))]
        for line in table:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())
    return 1 if failed else 0


def _row(entry: Entry) -> dict[str, Any]:
    from tileops.engine.boundary.naming import operator_base_name

    base = f"tileops::{operator_base_name(entry.family, entry.name)}"
    branches = entry.branches if entry.has_boundary else ()
    return {
        "class": entry.name,
        "family": entry.family,
        "status": entry.status,
        "boundary": entry.has_boundary,
        "operators": [base + branch.suffix for branch in branches],
    }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) or "-" if isinstance(value, list) else str(value)
