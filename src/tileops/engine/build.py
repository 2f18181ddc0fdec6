"""Builds: once per identity across threads; a failed one leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from tileops.engine import record
from tileops.engine.errors import BackendError, KernelBuildError

__all__ = ["built", "is_built"]

LIMIT = 4096
"""Artifacts kept, the oldest given up first: a foreign target builds for each exact shape, and a
sequence may grow for ever. What a plan uses lives on in the plan."""

_lock = threading.Lock()
_ABSENT = object()
_artifacts: dict[Hashable, Any] = {}
_under_way: dict[Hashable, threading.RLock] = {}


def is_built(identity: Hashable) -> bool:
    """Whether a build of that identity is at hand."""
    return identity in _artifacts


def built(
    identity: Hashable, build: Callable[[], Any], *, op: str, target: str, kernel: str
) -> Any:
    """The artifact of ``identity``, built by the first caller while the others wait.

    Raises ``KernelBuildError`` (an error of tileops itself passes through).
    """
    artifact = _artifacts.get(identity, _ABSENT)
    if artifact is not _ABSENT:
        return artifact
    with _lock:
        gate = _under_way.setdefault(identity, threading.RLock())
    with gate:
        artifact = _artifacts.get(identity, _ABSENT)
        if artifact is not _ABSENT:
            return artifact
        try:
            artifact = build()
        except BackendError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise KernelBuildError(op, target, kernel, problem) from error
        finally:
            with _lock:
                _under_way.pop(identity, None)
        with _lock:
            while len(_artifacts) >= LIMIT:
                _artifacts.pop(next(iter(_artifacts)))
            _artifacts[identity] = artifact
        record.emit("built", op=op, target=target, kernel=kernel, identity=identity)
    return artifact
