"""docs/kernel-cache.md: every block runs, in order, in a fresh process with caches nobody used."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.contract.fresh import ROOT, clean_environment
from tests.docs_blocks import blocks

BLOCKS = blocks("kernel-cache.md")


def test_python_and_commands(tmp_path):
    environment = clean_environment(str(tmp_path), TILEOPS_CACHE_DIR=str(tmp_path / "kernels"))
    code = "\n".join(block.text for block in BLOCKS if block.language == "python")
    script = tmp_path / "page.py"
    script.write_text(code)
    run = [sys.executable, str(script)]
    done = subprocess.run(run, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "normalize_rows" in done.stdout
    commands = [
        line for block in BLOCKS if block.language == "sh" for line in block.text.splitlines()
    ]
    assert len(commands) > 3
    for line in commands:
        words = shlex.split(line)
        given = dict(word.split("=", 1) for word in words if word.startswith("TILEOPS_"))
        assert words[len(given)] == "tileops"
        done = subprocess.run(
            [sys.executable, "-m", "tileops", *words[len(given) + 1 :]],
            env={**environment, **given}, cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)


def test_what_the_page_names_is_there():
    from tileops.cli import main

    text = (ROOT / "docs" / "kernel-cache.md").read_text()
    settings = (ROOT / "docs" / "settings.md").read_text()
    named = {word.strip("`,.:;()=1") for word in text.split() if "TILEOPS_" in word}
    for name in {word.split("=")[0] for word in named if word.startswith("TILEOPS_")}:
        assert f"`{name}`" in settings, name
    for action in ("path", "list", "verify", "prune", "clear"):
        with pytest.raises(SystemExit) as ended:
            main(["cache", action, "--help"])
        assert ended.value.code == 0
    assert os.pathsep == ":"  # as the page says
