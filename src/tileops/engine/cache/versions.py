"""What the keys of the cache hold besides a kernel's own text: compilers and their settings."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from tileops.engine.settings import settings

__all__ = ["compiler_settings", "triton_version"]


@cache
def triton_version() -> str | None:
    """The release of Triton that would be imported, read from its text; None without Triton.

    Not by its distribution's metadata: torch's builds of it have other names.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    match = re.search(r"""^__version__\s*=\s*["'](.+?)["']""", text, re.MULTILINE)
    return match[1] if match else None


@cache
def compiler_settings() -> tuple[tuple[str, str], ...]:
    """The environment's word on the code that Triton makes; files count by what they hold."""
    return tuple((name, _content(value)) for name, value in settings().compiler)


def _content(value: str) -> str:
    path = Path(value)
    return sha256(path.read_bytes()).hexdigest() if path.is_absolute() and path.is_file() else value
