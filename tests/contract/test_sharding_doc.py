"""The table of docs/sharding.md is what the entries give.

PYTHONPATH=. .venv/bin/python -m tests.contract.test_sharding_doc    # writes it anew
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cases import op_classes
from tests.conformance.test_sharding import branch_of, calls
from tileops.engine.signature.sharding import SUM, ways

DOC = Path(__file__).parents[2] / "docs" / "sharding.md"
HEAD = "| op | cut along | summed along | partial inputs |\n| --- | --- | --- | --- |\n"


def table() -> dict[str, str]:
    lines = DOC.read_text(encoding="utf-8").partition(HEAD)[2].splitlines()
    rows = itertools.takewhile(lambda line: line.startswith("| `"), lines)
    return {row.split("`")[1]: row for row in rows}


def row(name: str) -> str:
    """What some call of the class's workloads allows."""
    cut: set[str] = set()
    summed: set[str] = set()
    partial: set[str] = set()
    for call in calls(name, 0):
        inputs = dict(call.inputs)
        for way in ways(call.op, branch_of(call.op, inputs), inputs)[1:]:
            text = ", ".join(f"`{part}`" for part in sorted(way.of))
            if SUM in way.inputs.values():
                partial.add(text)
            else:
                into = summed if SUM in way.outputs.values() else cut
                into.add(text + (" =" if way.even else ""))
    cells = ["; ".join(sorted(cells)) for cells in (cut, summed, partial)]
    return f"| `{name}` | " + " | ".join(cells) + " |"


def names() -> list[str]:
    """Every class of the package that has a boundary and is no gradient."""
    return sorted(
        name
        for name, cls in op_classes().items()
        if cls.entry.has_boundary and name.endswith("FwdOp")
    )


@pytest.mark.parametrize("name", sorted(table()))
def test_a_row(name):
    assert table()[name] == row(name)


def test_no_class_is_missing():
    assert sorted(table()) == names()


if __name__ == "__main__":
    text = DOC.read_text(encoding="utf-8")
    before, head, after = text.partition(HEAD)
    rest = after[after.index("\n\n") :]
    DOC.write_text(before + head + "\n".join(map(row, names())) + rest, encoding="utf-8")
