"""From the key in a graph to the op it means: a weak registry, else re-created and pinned."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from tileops.engine.errors import InstanceKeyError, TileopsError
from tileops.engine.signature.literal import read_call

__all__ = ["OpState", "resolve", "state_of"]


class OpState:
    """What equal ops share: plans, the last call, tuning choices. Keyed by the instance key."""

    __slots__ = ("__weakref__", "canonical", "key", "last", "lock", "op", "plans", "tune")

    def __init__(self, key: str, canonical: bool) -> None:
        self.key = key
        self.canonical = canonical
        self.plans: dict[Any, Any] = {}
        self.last: Any = None
        self.lock = threading.RLock()
        self.tune = False
        self.op: Any = None
        """The op that forward runs on; all ops of this key are interchangeable."""


_lock = threading.RLock()
_states: dict[tuple[type, str], weakref.ref[OpState]] = {}
# By hand and not a WeakValueDictionary: a compiled graph looks here at every call of every op.
_pinned: dict[tuple[type, str], OpState] = {}


def state_of(cls: type, key: str, canonical: bool, make: Callable[[], Any]) -> OpState:
    """The shared state of ``key``; ``make`` gives the op it runs on when the state is new."""
    with _lock:
        found = _states.get((cls, key))
        state = None if found is None else found()
        if state is None:
            state = OpState(key, canonical)
            state.op = make()
            _states[(cls, key)] = weakref.ref(state, lambda dead: _forget((cls, key), dead))
        return state


def _forget(place: tuple[type, str], dead: weakref.ref[OpState]) -> None:
    # Without the lock: this runs in whichever thread collects, whatever that thread holds.
    if _states.get(place) is dead:  # else a new state has taken the place
        _states.pop(place, None)


def resolve(cls: Any, key: str) -> OpState:
    """The state a compiled graph names. Raises ``InstanceKeyError``."""
    found = _states.get((cls, key))
    state = None if found is None else found()
    if state is None:
        with _lock:
            state = _pinned.get((cls, key))
            if state is None:
                state = _pinned[(cls, key)] = _recreate(cls, key)._state
    return state


def _recreate(cls: Any, key: str) -> Any:
    try:
        name, params = read_call(key)
        if name != cls.__name__:
            raise ValueError(f"it names {name}, the operator belongs to {cls.__name__}")
        return cls(**params)
    except (ValueError, TypeError, TileopsError) as error:
        problem = str(error)
        if "=<object " in key:
            problem = "a parameter has no literal form, so the op lives only where it was made"
        raise InstanceKeyError(key, problem) from error
