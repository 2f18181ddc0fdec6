"""docs/write-a-target.md works as written: its package is installed, its blocks and tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.contract.children import search_path
from tests.docs_blocks import blocks

FILES = {"acme/pyproject.toml", "acme/tileops_target_acme/__init__.py", "acme/test_acme.py"}


def test_guide_works_as_written(tmp_path: Path) -> None:
    """A newcomer makes the files, installs the package, pastes the blocks and runs the tests."""
    script, named, shell = [], set(), []
    for block in blocks("write-a-target.md"):
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.text)
            named.add(block.file)
        elif block.language == "python":
            script.append(block.text)
        elif block.language == "sh":
            shell.append(block.text.strip())
    assert named == FILES
    assert shell == ["pip install ./acme"]
    assert len(script) >= 8
    path = search_path(tmp_path / "acme")

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    shown = run("-c", "\n".join([*script, "print('all blocks ran')"]))
    print(shown)
    assert shown.endswith("all blocks ran\n")
    # The report that the guide shows is the one its reader gets, numbers apart.
    (text,) = (block.text for block in blocks("write-a-target.md") if block.language == "text")
    lines = [re.sub(r"[\d.]+", "#", line) for line in shown.splitlines()]
    for line in text.splitlines():
        assert line == "  ..." or re.sub(r"[\d.]+", "#", line) in lines, line
    counts = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "acme/test_acme.py")
    assert re.search(r"\d+ passed, 1 skipped", counts), counts


def test_the_first_target_is_thirty_lines() -> None:
    """What the heading promises, blank lines included."""
    (text,) = (b.text for b in blocks("write-a-target.md") if b.file.endswith("__init__.py"))
    assert len(text.splitlines()) <= 30
