"""Targets: named sets of kernels that serve whole ops, and the decision which one serves a call.

The decision is made inside the node, per call: the op's ``target=``, else ``use_target``, else the
process default, else detectors by device, else ``BUILTIN``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tileops.engine.errors import (
    AmbiguousTargetError,
    BackendError,
    OpNotAvailableError,
    UnknownTargetError,
)
from tileops.engine.kernel import DeviceFacts
from tileops.engine.settings import settings

__all__ = [
    "BUILTIN", "BuildKernel", "Decision", "KernelResult", "ReadDeviceFacts", "Target", "builder_of",
    "context_target", "decide", "default_target", "device_facts", "epoch", "load_failures",
    "ops_of", "register_detector", "register_device_facts", "register_kernel_builder",
    "registered_targets", "registration_of", "set_default_target", "use_target",
]  # fmt: skip

BUILTIN = "builtin"
"""The in-tree kernels."""
GROUP = "tileops.backends"

KernelResult = torch.Tensor | tuple[torch.Tensor | None, ...] | None
BuildKernel = Callable[..., Callable[..., KernelResult]]
"""``build_kernel(*specs, **params)``: a ``TensorSpec`` per input (None if absent), the op's params;
returns a callable that takes the inputs (then ``out``, where the op has that buffer) and returns
the outputs. It may raise ``OpNotAvailableError`` to decline the call."""
ReadDeviceFacts = Callable[[torch.device], DeviceFacts]


@dataclass(frozen=True)
class Target:
    """What a plugin's entry point loads to: a name, builders by op class name, maybe a detector.

    ``claims(device) -> bool`` makes the target the default for devices that it claims.
    """

    name: str
    builders: Mapping[str, BuildKernel]
    claims: Callable[[torch.device], bool] | None = None
    distribution: str = field(default="", compare=False)


@dataclass(frozen=True)
class Decision:
    """Which target serves, and by whose word (``op``, ``use_target``, ``default``, ``detector``,
    ``builtin``). ``skipped``: a target that was wanted but does not serve this op."""

    target: str
    by: str
    skipped: str = ""


_lock = threading.RLock()
_builders: dict[str, dict[str, BuildKernel]] = {}
_registrations: dict[tuple[str, str], int] = {}
_plugins: dict[str, str] = {}
_detectors: dict[str, Callable[[torch.device], bool]] = {}
_facts_readers: dict[str, ReadDeviceFacts] = {}
_failures: dict[str, str] = {}
_discovered = False
_discovering = False
_default: str | None = None
_default_set = False
_context: ContextVar[str | None] = ContextVar("tileops_target", default=None)
_warned: set[tuple[str, str]] = set()

context_target = _context.get


class _Epoch:
    """``now`` changes with every registration and process default: plans made before are stale."""

    now = 0


epoch = _Epoch()


def _bump() -> None:
    epoch.now += 1
    device_facts.cache_clear()


# ---- registration -----------------------------------------------------------------------------


def _check_name(target: object) -> None:
    if not isinstance(target, str) or not target.isidentifier() or target == BUILTIN:
        raise BackendError(f"target {target!r} must be an identifier, not {BUILTIN!r}")


def _check_builder(target: str, op: object, build_kernel: object) -> None:
    if not isinstance(op, str):
        raise BackendError(f"target {target!r}: op {op!r} must be the name of an op class")
    if not callable(build_kernel):
        raise BackendError(f"target {target!r}: {op}: build_kernel is not callable")


def register_kernel_builder(target: str, op: str, build_kernel: BuildKernel) -> None:
    """Let ``target`` serve the op class named ``op``. Raises ``BackendError`` for a bad name."""
    _check_name(target)
    _check_builder(target, op, build_kernel)
    with _lock:
        _builders.setdefault(target, {})[op] = build_kernel
        _bump()
        _registrations[target, op] = epoch.now


def register_detector(target: str, claims: Callable[[torch.device], bool]) -> None:
    """Make ``target`` the default for every device for which ``claims(device)`` is true.

    One that raises is reported once, and claims nothing from then on."""
    _check_name(target)
    if not callable(claims):
        raise BackendError(f"target {target!r}: claims is not callable")
    with _lock:
        _builders.setdefault(target, {})
        _detectors[target] = claims
        _bump()


def register_device_facts(device_type: str, read: ReadDeviceFacts) -> None:
    """Tell how to read the ``DeviceFacts`` of a device type that tileops does not know."""
    with _lock:
        _facts_readers[device_type] = read
        _bump()


def _register(target: Target, owner: str) -> None:
    """All of a plugin's target, or nothing of it."""
    _check_name(target.name)
    if target.name in _plugins:
        raise BackendError(f"target {target.name!r} is already that of {_plugins[target.name]!r}")
    for op, build in target.builders.items():
        _check_builder(target.name, op, build)
    if target.claims is not None:
        register_detector(target.name, target.claims)
    _plugins[target.name] = owner
    _builders.setdefault(target.name, {})
    for op, build in target.builders.items():
        register_kernel_builder(target.name, op, build)


def _discover() -> None:
    """Load the plugins of ``tileops.backends`` once; a broken one is isolated and reported."""
    global _discovered, _discovering
    if _discovered:
        return
    broken = []
    with _lock:
        if _discovered or _discovering:  # a plugin that asks for targets while it is loaded
            return
        _discovering = True
        try:
            for point in importlib.metadata.entry_points(group=GROUP):
                owner = point.dist.name if point.dist else "unknown distribution"
                try:
                    _register(_load(point), owner)
                except (Exception, SystemExit) as error:  # noqa: BLE001  (its fault is its own)
                    reason = f"{owner}: {type(error).__name__}: {error}"
                    _failures[point.name] = reason
                    broken.append(f"target {point.name!r} of distribution {owner!r} failed to load "
                                  f"and is left out: {type(error).__name__}: {error}")  # fmt: skip
            _discovered = True
            _bump()
        finally:
            _discovering = False
    # Last, because a warning may be an error.
    for text in broken:
        warnings.warn(f"tileops: {text}", RuntimeWarning, stacklevel=3)


def _load(point: importlib.metadata.EntryPoint) -> Target:
    loaded = point.load()
    target = loaded() if callable(loaded) and not isinstance(loaded, Target) else loaded
    if not isinstance(target, Target):
        raise TypeError(f"{point.value} gives {type(target).__name__}, not a Target")
    return target


def registered_targets() -> tuple[str, ...]:
    """Every target that may be named, ``BUILTIN`` first."""
    _discover()
    return (BUILTIN, *sorted(_builders))


def load_failures() -> dict[str, str]:
    """Plugins that failed to load: entry point name to distribution and reason."""
    _discover()
    return dict(_failures)


def builder_of(target: str, op: str) -> BuildKernel | None:
    """The builder by which ``target`` serves ``op``, or None."""
    return _builders.get(target, {}).get(op)


def ops_of(target: str) -> tuple[str, ...]:
    """The names of the op classes that ``target`` serves."""
    return tuple(sorted(_builders.get(target, {})))


def registration_of(target: str, op: str) -> int:
    """A number that changes when ``target`` is given another builder for ``op``, and only then."""
    return _registrations.get((target, op), 0)


def check_target(target: object) -> str:
    """The name itself; raises ``UnknownTargetError``."""
    if target == BUILTIN:
        return BUILTIN
    _discover()
    if not isinstance(target, str) or target not in _builders:
        raise UnknownTargetError(target, list(registered_targets()), load_failures())
    return target


# ---- choosing ---------------------------------------------------------------------------------


@contextlib.contextmanager
def use_target(target: str) -> Iterator[None]:
    """Serve the ops called in this context (thread or task) by ``target``.

    Raises ``UnknownTargetError``. An op that the target does not serve falls to ``BUILTIN``, which
    ``op.last_call`` says and a warning says once.
    """
    token = _context.set(check_target(target))
    try:
        yield
    finally:
        _context.reset(token)


def set_default_target(target: str | None) -> None:
    """The process default, below ``target=`` and ``use_target``; None returns to detection."""
    global _default, _default_set
    name = None if target is None else check_target(target)
    with _lock:
        _default, _default_set = name, True
        _bump()


def default_target() -> str | None:
    """The process default, or None where detection decides. ``TILEOPS_TARGET`` sets it first."""
    if _default_set:
        return _default
    name = settings().default_target
    if name is None:
        return None
    try:
        return check_target(name)
    except UnknownTargetError as error:
        error.add_note("TILEOPS_TARGET asks for it")
        raise


def decide(op: str, explicit: str | None, device: torch.device) -> Decision:
    """Which target serves ``op`` on ``device`` now.

    Raises ``UnknownTargetError``; ``OpNotAvailableError`` where an explicit target does not serve
    the op; ``AmbiguousTargetError`` where two detectors claim the device.
    """
    if explicit is not None:
        check_target(explicit)
        if explicit != BUILTIN and builder_of(explicit, op) is None:
            served = ", ".join(ops_of(explicit)) or "no op"
            raise OpNotAvailableError(op, explicit, f"it serves {served}")
        return Decision(explicit, "op")
    wanted, by = _context.get(), "use_target"
    if wanted is None:
        wanted, by = default_target(), "default"
    if wanted is None:
        wanted, by = _detected(device), "detector"
    if wanted is None or wanted == BUILTIN:
        return Decision(BUILTIN, by if wanted else "builtin")
    if builder_of(wanted, op) is None:
        return skip(op, wanted, by, "it does not serve this op")
    return Decision(wanted, by)


def skip(op: str, wanted: str, by: str, reason: str) -> Decision:
    """The decision for ``BUILTIN`` in place of ``wanted``; says so once per op and target."""
    if by != "detector" and (op, wanted) not in _warned:
        _warned.add((op, wanted))
        warnings.warn(
            f"tileops: {op}: target {wanted!r} (by {by}): {reason}; {BUILTIN} serves instead",
            RuntimeWarning,
            stacklevel=2,
        )
    return Decision(BUILTIN, by, f"{wanted}: {reason}")


def _detected(device: torch.device) -> str | None:
    _discover()
    if not _detectors:
        return None
    claims = [name for name, claim in list(_detectors.items()) if _claims(name, claim, device)]
    if len(claims) > 1:
        raise AmbiguousTargetError(device, sorted(claims))
    return claims[0] if claims else None


def _claims(name: str, claim: Callable[[torch.device], bool], device: torch.device) -> bool:
    """The detector's word. One that raises is a broken plugin: out, and reported once."""
    try:
        return bool(claim(device))
    except Exception as error:  # noqa: BLE001  (its fault is its own)
        reason = f"its detector failed on {device}: {type(error).__name__}: {error}"
        with _lock:
            _failures[name] = f"{_plugins.get(name, 'unknown distribution')}: {reason}"
            reported = _detectors.pop(name, None) is None
    if not reported:
        warnings.warn(
            f"tileops: target {name!r} claims no device any more: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return False


@lru_cache(maxsize=64)
def device_facts(device: torch.device) -> DeviceFacts:
    """What kernels may know of ``device``."""
    reader = _facts_readers.get(device.type)
    if reader is not None:
        return reader(device)
    index = device.index or 0
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(index)
        return DeviceFacts(
            "cuda",
            index,
            (properties.major, properties.minor),
            properties.name,
            properties.multi_processor_count,
            getattr(properties, "shared_memory_per_block_optin", 0),
        )
    return DeviceFacts(device.type, index, name=_processor() if device.type == "cpu" else "")


def _processor() -> str:
    """The vendor of this machine's processor as it names itself, '' where that is not known."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            named = (line.partition(":")[2] for line in lines if line.startswith("vendor_id"))
            return next(named, "").strip()
    except OSError:  # no Linux
        return platform.processor()
