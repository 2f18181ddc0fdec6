"""Code blocks of the guides, so that tests can run what a reader is told to type."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.contract.fresh import clean_environment

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w./-]+\.(?:py|yaml|toml))`[^`]*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``file``: the path named by the text just before it, or ''."""

    language: str
    text: str
    file: str
    line: int


def blocks(name: str) -> list[Block]:
    """The blocks of ``docs/<name>`` in order."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found, end = [], 0
    for match in _FENCE.finditer(text):
        named = _FILE.search(text[end : match.start()].rstrip().removesuffix(":"))
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], named[1] if named else "", line))
        end = match.end()
    return found


def run_python(name: str, folder: Path) -> None:
    """Run the Python blocks of ``docs/<name>`` as one script, in a process of its own."""
    script = folder / "page.py"
    script.write_text("\n".join(b.text for b in blocks(name) if b.language == "python"))
    done = subprocess.run(
        [sys.executable, str(script)], env=clean_environment(str(folder)),
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def check_named_tests(name: str, least: int) -> None:
    """Every test that ``docs/<name>`` names is there, and it names more than ``least``."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / name).read_text())
    assert len(named) > least
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), (path, test)
