"""A family package: its op classes, found by name when first asked for.

No list of classes is kept: the modules beside a family's ``__init__.py`` are scanned for
``class Name`` as text, so that looking up one op imports one module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["family_door", "register_operators"]

_CLASS = re.compile(r"^class ([A-Z]\w*)[(:]", re.MULTILINE)


def family_door(package: str, folder: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a family package."""
    homes: dict[str, str] = {}

    def scan() -> dict[str, str]:
        if not homes:
            for path in sorted(Path(folder).glob("*.py")):
                if path.name != "__init__.py":
                    for name in _CLASS.findall(path.read_text(encoding="utf-8")):
                        homes[name] = path.stem
        return homes

    def getattribute(name: str) -> Any:
        if name == "__all__":
            return sorted(scan())
        if name.startswith("_") or name not in scan():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return getattribute, lambda: sorted(scan())


def register_operators(*families: str) -> tuple[str, ...]:
    """Define the torch operators of ``families`` (all of them where none is named) and those of their
    gradients, which otherwise happens when a class or its gradient is first used; gives their names.

    A process that loads an exported program or an AOTInductor package calls this first. Raises
    ``ValueError`` for an unknown family.
    """
    root = Path(__file__).parent
    known = sorted(path.parent.name for path in root.glob("*/manifest.yaml"))
    names: list[str] = []
    for family in families or known:
        if family not in known:
            raise ValueError(
                f"register_operators: unknown family {family!r}; known: {', '.join(known)}"
            )
        door = importlib.import_module(f"tileops.{family}")
        for name in dir(door):
            cls = getattr(door, name)
            names += getattr(cls, "compile_op_names", ())
            backward = cls.backward_class() if hasattr(cls, "backward_class") else None
            names += () if backward is None else backward.compile_op_names
    return tuple(dict.fromkeys(names))
