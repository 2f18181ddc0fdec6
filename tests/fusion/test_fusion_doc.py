"""docs/fusion.md: its blocks run, the tests and constants that it names are there."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.contract.fresh import ROOT, clean_environment
from tests.docs_blocks import blocks
from tileops.fusion.cost import ADVANTAGE, OVERHEAD


def test_python(tmp_path):
    script = tmp_path / "page.py"
    python = [block.text for block in blocks("fusion.md") if block.language == "python"]
    script.write_text("\n".join(python))
    done = subprocess.run(
        [sys.executable, str(script)], env=clean_environment(str(tmp_path)),
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_it_names_is_there():
    text = (ROOT / "docs" / "fusion.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 8
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), (path, test)


def test_its_constants_are_those_of_the_rule():
    text = (ROOT / "docs" / "fusion.md").read_text()
    mib = OVERHEAD["cuda"] >> 20
    for kind, share in ADVANTAGE["cuda"].items():
        assert f"| CUDA, {kind} | {share:g} | {mib} MiB |" in text
