"""What the machine code of a device function depends on, read from the files and not imported.

A function's text is the text of its definition and, from there on, of each helper, class and constant
that it names, in its own module or another. Comments, docstrings, formatting, file names and times do
not count. What comes from Triton is covered by its version, and what comes from Python or from another
installed package whose version is known, by its name and that version.
"""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tileops.engine.pause import without_collection

__all__ = ["UnknownSourceError", "digest_of", "forget", "still"]

_BY_VERSION = ("torch", "numpy")
"""Packages of which the version tells enough; Triton's is in the key of every kernel."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class UnknownSourceError(Exception):
    """The text of something that a device function uses cannot be found; the message says what."""


@dataclass
class _Module:
    """The top level of one file."""

    name: str
    package: str
    bindings: dict[str, list[ast.stmt]] = field(default_factory=dict)
    """Each name with the statements that bind it."""
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Each imported name with ``(module, name in it)``; '' for the module itself."""
    stars: list[str] = field(default_factory=list)
    """Modules of which every name is imported."""


_lock = threading.RLock()
_modules: dict[str, _Module] = {}
_digests: dict[str, str] = {}


def digest_of(fn: str) -> str:
    """SHA-256 of all that the text of ``package.module:function`` depends on.

    Read once in a process, as Python itself would. Raises ``UnknownSourceError``.
    """
    with _lock:
        found = _digests.get(fn)
        if found is None:
            found = _digests[fn] = _digest(fn)
        return found


def still(fn: str) -> bool:
    """Whether the files still say what ``digest_of`` read: what was imported since is that text."""
    global _modules
    with _lock:
        known, _modules = _modules, {}
        try:
            return _digest(fn) == digest_of(fn)
        except UnknownSourceError:
            return False
        finally:
            _modules = known


def _digest(fn: str) -> str:
    module, _, name = fn.partition(":")
    parts: dict[str, str] = {}
    with without_collection():
        _follow(module, name, parts)
    text = "\n".join(sorted(f"{where}\t{what}" for where, what in parts.items()))
    return sha256(text.encode()).hexdigest()


def forget() -> None:
    """Read every file again when it is next asked for."""
    with _lock:
        _modules.clear()
        _digests.clear()


# ---- following names -------------------------------------------------------------------------------


def _follow(module_name: str, name: str, parts: dict[str, str]) -> None:
    """Put ``name`` of a module and all that it uses into ``parts``."""
    top, where = module_name.partition(".")[0], f"{module_name}:{name}"
    if where in parts or top == "triton":
        return
    if _covered(module_name):
        parts[where] = importlib.metadata.version(top) if top in _BY_VERSION else "python"
        return
    module = _module(module_name)
    known = False
    if name in module.bindings:
        known = True
        parts[where] = "\n".join(_text(statement) for statement in module.bindings[name])
        for statement in module.bindings[name]:
            for path in _used(statement):
                _follow_path(module, path, statement, parts)
    if name in module.imports:
        known = True
        target, inner = module.imports[name]
        parts[where] = f"{parts.get(where, '')}= {target}:{inner}"
        if inner and not _is_module(f"{target}.{inner}"):
            _follow(target, inner, parts)
        else:
            _follow_all(f"{target}.{inner}" if inner else target, parts)
    if known:
        return
    for star in module.stars:
        if _covered(star):
            parts[where] = f"= {star}:*"
            return
        if name in _module(star).bindings or name in _module(star).imports:
            _follow(star, name, parts)
            return
    raise UnknownSourceError(f"module {module_name} has no name {name!r} at its top level")


def _follow_path(
    module: _Module, path: tuple[str, ...], user: ast.stmt, parts: dict[str, str]
) -> None:
    """A use ``a.b.c`` in ``module``: of ``a`` there, or of ``b`` in the module that ``a`` is."""
    head, *rest = path
    if head in module.bindings or head not in module.imports:
        if head in module.bindings or not (hasattr(builtins, head) or head in _bound_within(user)):
            _follow(module.name, head, parts)
        return
    target, inner = module.imports[head]
    if inner and not _is_module(f"{target}.{inner}"):
        _follow(module.name, head, parts)
        return
    target = f"{target}.{inner}" if inner else target
    while len(rest) > 1 and _is_module(f"{target}.{rest[0]}"):
        target, rest = f"{target}.{rest[0]}", rest[1:]
    if rest:
        _follow(target, rest[0], parts)
    else:
        _follow_all(target, parts)


def _follow_all(target: str, parts: dict[str, str]) -> None:
    """A module that is used as a whole."""
    if _covered(target):
        parts[f"{target}:"] = "whole"
        return
    module = _module(target)
    for name in (*module.bindings, *module.imports):
        _follow(target, name, parts)


def _covered(module: str) -> bool:
    """Whether versions say enough of a module."""
    top = module.partition(".")[0]
    in_python = top in sys.stdlib_module_names and top != "__main__"
    return in_python or top == "triton" or top in _BY_VERSION


def _is_module(name: str) -> bool:
    """Whether a dotted name is a module and no name in one. Imports nothing but packages."""
    parent, _, leaf = name.rpartition(".")
    if _covered(name):
        return False
    if not parent:
        return True
    path, _ = _file(parent)
    if path.name != "__init__.py" or leaf in _module(parent).bindings:
        return False
    return (path.with_name(f"{leaf}.py")).is_file() or (path.parent / leaf).is_dir()


# ---- reading one file --------------------------------------------------------------------------------


def _module(name: str) -> _Module:
    found = _modules.get(name)
    if found is None:
        path, package = _file(name)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise UnknownSourceError(f"module {name}: {error}") from None
        found = _Module(name, package)
        for statement in tree.body:
            _bind(found, statement)
        _modules[name] = found
    return found


def _file(name: str) -> tuple[Path, str]:
    """The file of a module and the package against which its relative imports count."""
    loaded = sys.modules.get(name)
    file = getattr(loaded, "__file__", None)
    if file is None or not file.endswith(".py"):
        try:
            spec = importlib.util.find_spec(name) if loaded is None else None
        except (ImportError, ValueError):
            spec = None
        file = getattr(spec, "origin", None)
    if file is None or not file.endswith(".py"):
        raise UnknownSourceError(f"module {name} has no source file")
    is_package = Path(file).name == "__init__.py"
    return Path(file), name if is_package else name.rpartition(".")[0]


def _bind(module: _Module, statement: ast.stmt) -> None:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.asname:
                module.imports[alias.asname] = (alias.name, "")
            else:
                top = alias.name.partition(".")[0]
                module.imports[top] = (top, "")
    elif isinstance(statement, ast.ImportFrom):
        source = _absolute(module, statement)
        for alias in statement.names:
            if alias.name == "*":
                module.stars.append(source)
            else:
                module.imports[alias.asname or alias.name] = (source, alias.name)
    else:
        for name in dict.fromkeys(_bound(statement)):
            module.bindings.setdefault(name, []).append(statement)
        # Imports that stand in an `if` or a `try`.
        for inner in _same_scope(statement):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                _bind(module, inner)


def _absolute(module: _Module, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    base = module.package.split(".")
    base = base[: len(base) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes without the insides of functions and classes."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from _same_scope(child)


def _bound(statement: ast.stmt) -> Iterator[str]:
    for node in _same_scope(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield from _root(node)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from _root(statement.value.func)  # TABLE.update(...)


def _root(node: ast.AST) -> Iterator[str]:
    """The name of which something is changed in place."""
    begin = node
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name) and node is not begin:
        yield node.id


def _bound_within(statement: ast.AST) -> set[str]:
    """Every name that a statement binds at any depth."""
    own = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
    return own


def _used(statement: ast.AST) -> list[tuple[str, ...]]:
    """The names that a statement reads, each with the attributes taken of it, but for those that a
    function binds itself."""
    own: set[str] = set()
    found: dict[tuple[str, ...], None] = {}
    inside: list[ast.AST] = [statement]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        own = _locals(statement)
        # Decorators, defaults and annotations are read where the function stands.
        outside: list[ast.AST] = [*statement.decorator_list, statement.args]
        for node in (*outside, *([statement.returns] if statement.returns else [])):
            _paths(node, set(), found)
        inside = list(statement.body)
    for node in inside:
        _paths(node, own, found)
    return list(found)


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    own = {argument.arg for argument in every if argument is not None}
    shared: set[str] = set()
    for statement in function.body:
        for node in _same_scope(statement):
            if isinstance(node, ast.Global):
                shared.update(node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
    return own - shared


def _paths(node: ast.AST, own: set[str], found: dict[tuple[str, ...], None]) -> None:
    attributes: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        attributes.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        if inner.id not in own:
            found[inner.id, *reversed(attributes)] = None
        return
    for child in ast.iter_child_nodes(node):
        _paths(child, own, found)


def _text(node: Any) -> str:
    """A statement as text that says what it does and not how it is written; the same for every
    release of Python that can parse it."""
    out: list[str] = []
    _write(node, out)
    return "".join(out)


_UNSAID = frozenset({"ctx", "type_comment", "kind", "lineno", "col_offset"})


def _write(node: Any, out: list[str]) -> None:
    if isinstance(node, ast.AST):
        out.append(type(node).__name__)
        out.append("(")
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(node, _SCOPES) and isinstance(value, list):
                value = _without_docstring(value)
            if value is None or value == [] or name in _UNSAID:
                continue
            out.append(name)
            out.append("=")
            _write(value, out)
            out.append(",")
        out.append(")")
    elif isinstance(node, list):
        out.append("[")
        for item in node:
            _write(item, out)
            out.append(",")
        out.append("]")
    else:
        out.append(f"{type(node).__name__}:{node!r}")


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:]
    return body
