"""Builds that are asked for and not made: how machine code is found from shapes alone.

An entry's ``build`` may do anything, so it is run, in a thread where a build of machine code is noted
instead of loaded and where tensors have no data. Likewise calls without tensors, which no dispatch mode
sees, are noted where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from tileops.engine.cache.sources import UnknownSourceError

__all__ = ["Build", "Dataless", "asked_by", "collecting", "collector", "noted", "noting"]


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


@contextmanager
def noting(note: Callable[[Any], None]) -> Iterator[None]:
    """In this thread, ``note`` is told of each call of an op that takes no tensors, by its state."""
    outer = getattr(_asked, "note", None)
    _asked.note = note
    try:
        yield
    finally:
        _asked.note = outer


def noted(state: Any) -> bool:
    """Tell of a call without tensors where that is asked for: it then needs no kernel."""
    note = getattr(_asked, "note", None)
    if note is not None:
        note(state)
    return note is not None


class Dataless(TorchFunctionMode):
    """Tensors that are made, or moved to a device, have no data. Not ``FakeTensorMode``: its first use
    imports Dynamo and Triton, a second of a warm start."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {
            n: "meta" if n == "device" and v is not None else v for n, v in (kwargs or {}).items()
        }
        return func(*("meta" if isinstance(a, torch.device) else a for a in args), **given)


def asked_by(build: Any) -> list[Build]:
    """The compilations that calling an entry's ``build`` would need. Raises ``UnknownSourceError``
    where it does more than can be done without data."""
    with collecting() as builds, Dataless():
        try:
            build()
        except Exception as error:
            problem = f"its build cannot run without data: {type(error).__name__}: {error}"
            raise UnknownSourceError(problem) from error
    return builds
