"""Words by which programs of one launch wait for each other."""

from __future__ import annotations

from tileops.authoring import CallSpec
from tileops.lib.launch import TritonBuild

__all__ = ["CLEARED", "clearing"]

CLEARED = 1024
"""Words that a program sets to zero."""


def clearing(call: CallSpec) -> TritonBuild:
    """A launch of ``cdiv(count, CLEARED)`` programs that sets ``count`` words to zero."""
    return TritonBuild(
        f"{__name__}_triton:clear",
        (("words", "*i64"), ("count", "i64")),
        (("BLOCK", CLEARED), ("DEPENDENT", call.device.arch >= (9, 0))),
    )
