"""docs/export.md: each named test exists, and the Python runs, each block in a process of its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from tests.contract.fresh import ROOT, clean_environment
from tests.contract.test_compile_doc import NAMED
from tests.docs_blocks import blocks


def test_every_named_test_exists():
    named = NAMED.findall((ROOT / "docs" / "export.md").read_text())
    assert len(named) > 12
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, (path, name)


def test_what_is_exported_in_one_process_runs_in_the_next(tmp_path):
    scripts = [block.text for block in blocks("export.md") if block.language == "python"]
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False,
            cwd=tmp_path, env=clean_environment(str(tmp_path)), timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_the_shown_key_is_one():
    from tileops.engine.boundary.stamp import split_key
    from tileops.norm import RMSNormFwdOp

    (shown,) = [block.text.strip() for block in blocks("export.md") if block.language == "text"]
    ours = RMSNormFwdOp(64)._instance_key
    assert split_key(shown)[:2] == split_key(ours)[:2]
    assert re.sub("[0-9a-f]", "0", split_key(shown)[2]) == re.sub(
        "[0-9a-f]", "0", split_key(ours)[2]
    )
