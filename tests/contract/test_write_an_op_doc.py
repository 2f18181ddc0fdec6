"""docs/write-an-op.md works as written: its files are made, its blocks run, its check passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs_blocks import blocks

NAMED_FILES = {
    "my_ops/manifest.yaml",
    "my_ops/scale_rows.py",
    "my_ops/kernels/scale_rows.py",
    "my_ops/kernels/scale_rows_triton.py",
}


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TILEOPS_CACHE_DIR": str(folder / "kernels"),
    }


def test_guide_works_as_written(tmp_path: Path) -> None:
    """A newcomer makes the files, pastes the Python blocks into one session, and checks the op."""
    script, named = [], set()
    for package in ("my_ops", "my_ops/kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for block in blocks("write-an-op.md"):
        if block.file.startswith("my_ops/"):
            (tmp_path / block.file).write_text(block.text)
            named.add(block.file)
        elif block.language == "python":
            script.append(block.text)
    assert named == NAMED_FILES
    assert len(script) >= 3
    program = "\n".join([*script, "print('all blocks ran')"])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all blocks ran"
    check = subprocess.run(
        [sys.executable, "-m", "tileops", "check", "--manifest", "my_ops/manifest.yaml"],
        cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert check.returncode == 0, check.stdout + check.stderr
