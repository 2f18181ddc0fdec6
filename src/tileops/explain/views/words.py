"""How the views say a number."""

from __future__ import annotations

__all__ = ["BETWEEN", "UNKNOWN", "count", "size"]

UNKNOWN = "unknown"
BETWEEN = {
    "passes": "a value, through memory",
    "shares": "an input of both",
    "steps": "one operation, split",
    "opaque": "an opaque kernel",
}
"""How neighbours that stayed apart are related."""


def count(number: int, name: str) -> str:
    """``1 kernel``, ``2 kernels``, ``3 kernel launches``, ``4 misses``."""
    ending = "" if number == 1 else "es" if name.endswith(("ch", "s")) else "s"
    return f"{number:,} {name}{ending}"


def size(number: int | None) -> str:
    """Bytes for a reader."""
    if number is None:
        return UNKNOWN
    units = ["B", "KiB", "MiB", "GiB"]
    rest = float(number)
    while rest >= 1024 and len(units) > 1:
        rest /= 1024
        units.pop(0)
    return f"{rest:.0f} {units[0]}" if units[0] == "B" else f"{rest:.1f} {units[0]}"
