"""``torch.compile(model, backend="tileops")``: Inductor, and before it a rewrite of the graph.

See ``docs/fusion.md``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tileops.fusion.compiler import backend
    from tileops.fusion.policies import policy
    from tileops.fusion.report import Report, last_report

_HOME = {
    "backend": "compiler",
    "policy": "policies",
    "Report": "report",
    "last_report": "report",
}

__all__ = ["Report", "backend", "last_report", "policy"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tileops.fusion.{_HOME[name]}"), name)
    raise AttributeError(f"module 'tileops.fusion' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
