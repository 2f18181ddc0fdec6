"""docs/transforms.md: each named test exists, and the table of autocast is what the manifests say.

``python -m tests.contract.test_transforms_doc`` writes the table anew.
"""

from __future__ import annotations

import ast
import re

from tests.cases import op_classes
from tests.contract.fresh import ROOT
from tileops.engine.boundary.autocast import autocast_rule, autocasts

PAGE = ROOT / "docs" / "transforms.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
TABLE = re.compile(r"(\| class \| rule \|\n\| --- \| --- \|\n)(.*?)(?=\n\n)", re.DOTALL)


def rows() -> str:
    """Of each class that autocast changes, but for those that it widens."""
    found = [
        f"| `{name}` | `{autocast_rule(cls.entry)}` |"
        for name, cls in sorted(op_classes().items())
        if autocasts(cls.entry) and autocast_rule(cls.entry) != "widest"
        if any(not (b.writes or b.out) for b in cls.entry.branches) or cls.entry.composition
    ]
    return "\n".join(found)


def test_the_tests_it_names_exist():
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 30
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text())
        assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (path, test)


def test_the_table_of_autocast():
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found[2] == rows(), "run python -m tests.contract.test_transforms_doc"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda match: match[1] + rows(), PAGE.read_text()))
