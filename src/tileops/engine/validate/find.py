"""Which op classes stand beside a manifest: read as text first, so that a class without an entry
or a module that does not import is named where it is written.
"""

from __future__ import annotations

import ast
import importlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tileops.engine.errors import ManifestError
from tileops.engine.validate.report import Report

__all__ = ["Home", "load", "scan"]


@dataclass(frozen=True)
class Home:
    """Where a class is written: its file, its line, and the line of each of its methods."""

    name: str
    file: Path
    line: int
    methods: dict[str, int]


def scan(manifest: Path, report: Report) -> dict[str, Home]:
    """The op classes in the modules beside ``manifest`` and below, kernels apart."""
    found: dict[str, Home] = {}
    for path in sorted(manifest.parent.rglob("*.py")):
        inner = path.relative_to(manifest.parent).parent
        owned = [manifest.parent / p for p in (inner, *inner.parents) if p != Path()]
        if "kernels" in inner.parts or any((p / "manifest.yaml").is_file() for p in owned):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            report.add(path, error.lineno or 1, "", f"does not parse: {error.msg}")
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(_is_op(base) for base in node.bases):
                methods = {n.name: n.lineno for n in node.body if isinstance(n, ast.FunctionDef)}
                home = Home(node.name, path, node.lineno, methods)
                first = found.setdefault(node.name, home)
                if first is not home:
                    where = f"{first.file.name}:{first.line}"
                    report.add(path, node.lineno, node.name, f"the class is also in {where}")
    return found


def _is_op(base: ast.expr) -> bool:
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name.endswith("Op")


def load(home: Home, report: Report) -> Any:
    """The class, or None with the fault reported."""
    try:
        module = _import(home.file)
    except ManifestError as error:
        report.add_error(error)
        return None
    except Exception as error:  # noqa: BLE001  (whatever a module raises is its fault)
        problem = f"the module does not import: {type(error).__name__}: {error}"
        report.add(home.file, _line_in(home.file, error), home.name, problem)
        return None
    return getattr(module, home.name, None)


def _import(file: Path) -> ModuleType:
    folder, names = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(names)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    actual = getattr(module, "__file__", None)
    if actual is None or Path(actual).resolve() != file.resolve():
        raise ImportError(f"the module name {name!r} is taken by {actual}")
    return module


def _line_in(file: Path, error: BaseException) -> int:
    """The last line of ``file`` in the traceback of ``error``."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.lineno is not None and Path(frame.filename) == file
    ]
    return lines[-1] if lines else 1
