"""Where this process looks for entries, in order: bundles, its own directory, read-only ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tileops.engine.cache.bundle import Bundle, open_bundle
from tileops.engine.cache.entry import Stored
from tileops.engine.cache.folder import Folder
from tileops.engine.settings import Settings, settings

__all__ = ["Found", "Shelves", "shelves", "use_bundle"]


@dataclass(frozen=True)
class Found:
    """An entry and where it came from: ``bundle``, ``disk``, or ``made``."""

    stored: Stored
    origin: str


class Shelves:
    """The cache as one process sees it."""

    def __init__(self, given: Settings) -> None:
        self.bundles: list[Bundle] = [open_bundle(path) for path in given.bundle]
        self.own: Folder | None = None
        if given.cache_dir is not None:
            self.own = Folder(given.cache_dir, limit=given.cache_limit)
        self.readonly = [Folder(path, readonly=True) for path in given.cache_readonly]

    @property
    def folders(self) -> list[Folder]:
        """Every directory, the own one first."""
        return [*([self.own] if self.own else []), *self.readonly]

    def find(self, kind: str, key: str) -> Found | None:
        """An entry where it is at hand."""
        for bundle in self.bundles:
            stored = bundle.read(kind, key)
            if stored is not None:
                return Found(stored, "bundle")
        for folder in self.folders:
            stored = folder.read(kind, key)
            if stored is not None:
                return Found(stored, "disk")
        return None

    def check_arch(self, arch: str) -> None:
        """Raises ``BundleError`` where there are bundles and all are for other cards."""
        if self.bundles and not any(bundle.serves(arch) for bundle in self.bundles):
            self.bundles[-1].refuse_arch(arch)

    def obtain(
        self, kind: str, key: str, produce: Callable[[], Stored | None]
    ) -> tuple[Stored | None, str]:
        """An entry that was not found, produced by one process while others wait; its origin."""
        if self.own is None:
            return produce(), "made"
        stored, made = self.own.make(kind, key, produce)
        return stored, "made" if made else "disk"


_lock = threading.Lock()
_known: tuple[Settings, Shelves] | None = None
_loaded: list[Bundle] = []


def shelves() -> Shelves:
    """The cache of this process. Raises ``BundleError`` for a bundle that the environment names."""
    global _known
    given = settings()
    known = _known
    if known is None or known[0] is not given:
        with _lock:
            known = _known
            if known is None or known[0] is not given:
                known = (given, Shelves(given))
                known[1].bundles += _loaded
                _known = known
    return known[1]


def use_bundle(path: Path) -> Bundle:
    """Look there first from now on. Raises ``BundleError`` and changes nothing."""
    bundle = open_bundle(path)
    here = shelves()
    with _lock:
        _loaded.append(bundle)
        here.bundles.append(bundle)
    return bundle
