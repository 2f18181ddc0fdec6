"""docs/gradients.md: its blocks run, and the tests that it names are there."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.contract.fresh import ROOT, clean_environment
from tests.docs_blocks import blocks


def test_python(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(block.text for block in blocks("gradients.md")))
    done = subprocess.run(
        [sys.executable, str(script)], env=clean_environment(str(tmp_path)),
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_it_names_is_there():
    text = (ROOT / "docs" / "gradients.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 3
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), (path, test)
