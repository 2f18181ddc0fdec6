"""Builds that are asked for and not made: how machine code is found from shapes alone.

An entry's ``build`` may do anything, so it is run, in a thread where a build of machine code is noted
instead of loaded and where tensors have no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol

__all__ = ["Build", "asked_by", "collecting", "collector"]


class Build(Protocol):
    """One compilation, such as ``tileops.lib.launch.TritonBuild``; can be pickled."""

    @property
    def fn(self) -> str:
        """The device function, as ``package.module:function``."""

    def key_for(self, arch: tuple[int, int]) -> str:
        """Its name in the cache. Raises ``UnknownSourceError`` where it has none."""

    def code_for(self, arch: tuple[int, int], compile: bool = True) -> Any:
        """Its machine code; None where it would have to be compiled and must not be."""


_asked = local()


def collector() -> list[Build] | None:
    """Where this thread's builds are noted instead of loaded; None: they are loaded."""
    return getattr(_asked, "builds", None)


@contextmanager
def collecting() -> Iterator[list[Build]]:
    """In this thread, calling a build only notes it here: nothing is compiled or loaded."""
    outer = collector()
    builds: list[Build] = []
    _asked.builds = builds
    try:
        yield builds
    finally:
        _asked.builds = outer


def asked_by(build: Any) -> list[Build]:
    """The compilations that calling an entry's ``build`` would need."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with collecting() as builds, FakeTensorMode(allow_non_fake_inputs=True):
        build()
    return builds
