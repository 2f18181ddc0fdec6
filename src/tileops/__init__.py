"""PyTorch operators for LLM work that the PyTorch compiler treats as its own.

Importing this package imports neither torch nor yaml; each public name loads what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tileops._lazy import register_operators
    from tileops.engine.bundling import bundle, load_bundle
    from tileops.engine.errors import (
        AmbiguousTargetError,
        BackendError,
        BundleError,
        CheckError,
        OpNotAvailableError,
        TileopsError,
        UnknownTargetError,
    )
    from tileops.engine.op import Op
    from tileops.engine.record import recording
    from tileops.engine.targets import (
        BUILTIN,
        default_target,
        load_failures,
        registered_targets,
        set_default_target,
        use_target,
    )
    from tileops.engine.trace import prepare, spec
    from tileops.explain.model import Report
    from tileops.explain.session import explain, explaining

_HOME = {
    "Op": "engine.op",
    "recording": "engine.record",
    "register_operators": "_lazy",
    "bundle": "engine.bundling",
    "load_bundle": "engine.bundling",
    "prepare": "engine.trace",
    "spec": "engine.trace",
    "Report": "explain.model",
    "explain": "explain.session",
    "explaining": "explain.session",
    **dict.fromkeys(
        (
            "AmbiguousTargetError",
            "BackendError",
            "BundleError",
            "CheckError",
            "OpNotAvailableError",
            "TileopsError",
            "UnknownTargetError",
        ),
        "engine.errors",
    ),
    **dict.fromkeys(
        (
            "BUILTIN",
            "default_target",
            "load_failures",
            "registered_targets",
            "set_default_target",
            "use_target",
        ),
        "engine.targets",
    ),
}

__all__ = [
    "BUILTIN",
    "AmbiguousTargetError",
    "BackendError",
    "BundleError",
    "CheckError",
    "Op",
    "OpNotAvailableError",
    "Report",
    "TileopsError",
    "UnknownTargetError",
    "bundle",
    "default_target",
    "explain",
    "explaining",
    "load_bundle",
    "load_failures",
    "prepare",
    "recording",
    "register_operators",
    "registered_targets",
    "set_default_target",
    "spec",
    "use_target",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tileops.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tileops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
