"""From the key in a graph to the op it means: a weak registry, else re-created and pinned."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tileops.engine.boundary.stamp import fault_in, split_key
from tileops.engine.errors import ExportError, InstanceKeyError, TileopsError
from tileops.engine.signature.literal import NoLiteralError, read_call, write

__all__ = ["OpState", "live_states", "resolve", "resolve_fake", "state_of"]


class OpState:
    """What equal ops share: plans, the last call, tuning choices. Keyed by the instance key."""

    __slots__ = (
        "__weakref__",
        "canonical",
        "gradients",
        "hots",
        "key",
        "last",
        "lock",
        "op",
        "plans",
        "sizes",
        "tune",
    )

    def __init__(self, key: str, canonical: bool) -> None:
        self.key = key
        self.canonical = canonical
        self.plans: dict[Any, Any] = {}
        self.hots: tuple[Any, ...] = ()
        """Plans behind guards, the latest first; replaced whole, so that no reader takes a lock."""
        self.last: Any = None
        self.sizes: tuple[int, ...] = ()
        """Of the last call along the dims that grow."""
        self.lock = threading.RLock()
        self.tune = False
        self.gradients: dict[tuple[bool, ...], Any] = {}
        """The backward op for each set of inputs whose gradients were wanted."""
        self.op: Any = None
        """The op that forward runs on; all ops of this key are interchangeable."""

    def forget(self) -> None:
        """Drop all plans: each next call decides afresh."""
        with self.lock:
            self.plans.clear()
            self.hots = ()


_lock = threading.RLock()
_states: weakref.WeakKeyDictionary[type, dict[str, weakref.ref[OpState]]] = (
    weakref.WeakKeyDictionary()
)
# By hand and not a WeakValueDictionary: a compiled graph looks here at every call of every op.
_pinned: dict[tuple[type, str], OpState] = {}


def state_of(cls: type, key: str, canonical: bool, make: Callable[[], Any]) -> OpState:
    """The shared state of ``key``; ``make`` gives the op it runs on when the state is new."""
    with _lock:
        states = live_states(cls)
        found = states.get(key)
        state = None if found is None else found()
        if state is None:
            state = OpState(key, canonical)
            state.op = make()
            # Bound now: at the end of the process a module's names go before its objects.
            states[key] = weakref.ref(state, partial(_forget, states, key))
        return state


def live_states(cls: type) -> dict[str, weakref.ref[OpState]]:
    """The states of a class by key; generated code looks there first."""
    return _states.setdefault(cls, {})


def _forget(states: dict[str, weakref.ref[OpState]], key: str, dead: weakref.ref[OpState]) -> None:
    # Without the lock: this runs in whichever thread collects, whatever that thread holds.
    if states.get(key) is dead:  # else a new state has taken the place
        states.pop(key, None)


def resolve(cls: Any, key: str) -> OpState:
    """The state a compiled graph names. Raises ``InstanceKeyError``."""
    found = live_states(cls).get(key)
    state = None if found is None else found()
    if state is None:
        with _lock:
            state = _pinned.get((cls, key))
            if state is None:
                state = _pinned[(cls, key)] = _recreate(cls, key)._state
    return state


def resolve_fake(cls: Any, key: str) -> Any:
    """The op of a call that is traced. Raises ``ExportError`` where it is traced for another process
    and could not be made again there."""
    state = resolve(cls, key)
    if not state.canonical and torch.compiler.is_exporting():
        for name, value in state.op._params.items():
            try:
                write(value)
            except NoLiteralError as error:
                raise ExportError(cls.__name__, name, str(error)) from None
    return state.op


def _recreate(cls: Any, key: str) -> Any:
    _, spelled, stamp = split_key(key)
    try:
        name, params = read_call(spelled)
        if name != cls.__name__:
            raise ValueError(f"it names {name}, the operator belongs to {cls.__name__}")
        fault = fault_in(cls, stamp)
        if fault:
            raise ValueError(fault)
        return cls(**params)
    except (ValueError, TypeError, TileopsError) as error:
        problem = str(error)
        if "=<object " in key:
            problem = "a parameter has no literal form, so the op lives only where it was made"
        raise InstanceKeyError(key, problem) from error
