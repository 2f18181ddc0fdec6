"""docs/fusion.md: its blocks run, the tests and constants that it names are there."""

from __future__ import annotations

from tests.contract.fresh import ROOT
from tests.docs_blocks import check_named_tests, run_python
from tileops.fusion.cost import ADVANTAGE, OVERHEAD


def test_python(tmp_path):
    run_python("fusion.md", tmp_path)


def test_what_it_names_is_there():
    check_named_tests("fusion.md", 8)


def test_its_constants_are_those_of_the_rule():
    text = (ROOT / "docs" / "fusion.md").read_text()
    mib = OVERHEAD["cuda"] >> 20
    for kind, share in ADVANTAGE["cuda"].items():
        assert f"| CUDA, {kind} | {share:g} | {mib} MiB |" in text
