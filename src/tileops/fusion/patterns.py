"""Which plain PyTorch means which op: what the manifests' entries name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tileops.engine.manifest.catalog import families, load_family, package_root
from tileops.engine.manifest.entry import Entry
from tileops.engine.op import Op
from tileops.engine.pattern import Bounded, Call, Named, Pattern, Product, Sum, Term

__all__ = ["Known", "known"]


@dataclass(frozen=True)
class Known:
    """A pattern and the op that it means; the class is imported when it is needed."""

    entry: Entry
    package: str
    """The family's."""

    @property
    def pattern(self) -> Pattern:
        found = getattr(
            importlib.import_module(f"{self.package}.patterns"), str(self.entry.pattern)
        )
        assert isinstance(found, Pattern)
        return found

    @property
    def op(self) -> type[Op]:
        found: type[Op] = getattr(importlib.import_module(self.package), self.entry.name)
        return found


@dataclass(frozen=True)
class _Elsewhere(Known):
    """Of another distribution, whose package need not be a door to its classes."""

    cls: type[Op]

    @property
    def op(self) -> type[Op]:
        return self.cls


def known() -> tuple[Known, ...]:
    """All patterns of this process, those of the most steps first: the family packages' and those of op
    classes of other distributions that have been imported."""
    found = [*_in_tree(), *_elsewhere()]
    return tuple(sorted(found, key=lambda k: -_size(k.pattern.meanings[0])))


@cache
def _in_tree() -> tuple[Known, ...]:
    paths = [path for path in families().values() if (path.parent / "patterns.py").is_file()]
    return tuple(
        Known(entry, f"tileops.{path.parent.name}")
        for path in paths
        for entry in load_family(path).values()
        if entry.pattern is not None
    )


def _elsewhere() -> tuple[Known, ...]:
    found: dict[tuple[str, str], Known] = {}
    for cls in _subclasses(Op):
        entry: Entry | None = cls.__dict__.get("entry")
        if entry is None or entry.pattern is None or entry.path.is_relative_to(package_root()):
            continue
        # A class that is defined again takes the place of the first.
        package = cls.__module__.rpartition(".")[0]
        found[entry.family, entry.name] = _Elsewhere(entry, package, cls)
    return tuple(found.values())


def _subclasses(cls: type[Op]) -> Iterator[type[Op]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _size(term: Term) -> int:
    """How many steps a term has."""
    if isinstance(term, Product):
        return 1 + sum(_size(t) for t, _ in term.factors)
    if isinstance(term, Sum):
        return 1 + sum(_size(t) for t, _ in term.terms)
    if isinstance(term, Named | Bounded):
        return _size(term.term)
    return 1 + sum(map(_size, term.arguments)) if isinstance(term, Call) else 1
