"""Manifest files for tests: written from text, with faults located by a mark in the text."""

from __future__ import annotations

import itertools
from pathlib import Path
from textwrap import dedent, indent

from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.entry import Entry

__all__ = ["entry_of", "entry_text", "marked_line", "write_manifest"]

_numbers = itertools.count()

_REST = """\
workloads:
  - {label: one}
cost:
  flops: "1"
"""


def write_manifest(folder: Path, text: str) -> Path:
    """``text`` as the manifest of a family of its own below ``folder``."""
    family = folder / f"family{next(_numbers)}"
    family.mkdir(parents=True)
    path = family / "manifest.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def entry_text(signature: str, rest: str = _REST, name: str = "ThingFwdOp") -> str:
    """One entry around a signature; ``rest`` holds what follows it."""
    head = f"{name}:\n  status: implemented\n  reference: own\n  kind: pointwise\n  signature:\n"
    return head + indent(dedent(signature), "    ") + indent(dedent(rest), "  ")


def entry_of(folder: Path, signature: str, rest: str = _REST) -> Entry:
    """The parsed entry around a signature."""
    return load_family(write_manifest(folder, entry_text(signature, rest)))["ThingFwdOp"]


def marked_line(text: str, mark: str = "# here") -> int:
    """The line of ``text`` that carries the mark."""
    (line,) = [n for n, content in enumerate(dedent(text).splitlines(), 1) if mark in content]
    return line
