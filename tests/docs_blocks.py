"""Code blocks of the guides, so that tests can run what a reader is told to type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
