"""The only reader of the environment. Read at first use, not at import."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """What the environment says; see ``docs/settings.md`` for each name."""

    default_target: str | None
    """``TILEOPS_TARGET``: the process default target until ``set_default_target`` is called."""
    validate_inputs: bool
    """``TILEOPS_VALIDATE_INPUTS=1``: check what index inputs hold; reads the device on each call."""
    cpu_kernel: str
    """``TILEOPS_CPU_KERNEL``: ``auto`` (measured rule), ``plain`` or ``inductor``."""
    plan_limit: int
    """``TILEOPS_PLAN_LIMIT``: plans kept per op key (the oldest go first)."""
    triton_interpret: bool
    """``TRITON_INTERPRET=1``: Triton's own switch to interpret kernels instead of compiling."""


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{name}={text!r}: accepted are 1 and 0")


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Raises ``ValueError`` naming a variable with a bad value."""
    cpu_kernel = os.environ.get("TILEOPS_CPU_KERNEL", "auto")
    if cpu_kernel not in ("auto", "plain", "inductor"):
        raise ValueError(f"TILEOPS_CPU_KERNEL={cpu_kernel!r}: accepted are auto, plain, inductor")
    limit = os.environ.get("TILEOPS_PLAN_LIMIT", "256")
    if not limit.isdigit() or int(limit) < 1:
        raise ValueError(f"TILEOPS_PLAN_LIMIT={limit!r}: accepted is a positive integer")
    return Settings(
        default_target=os.environ.get("TILEOPS_TARGET") or None,
        validate_inputs=_flag("TILEOPS_VALIDATE_INPUTS"),
        cpu_kernel=cpu_kernel,
        plan_limit=int(limit),
        triton_interpret=_flag("TRITON_INTERPRET"),
    )
