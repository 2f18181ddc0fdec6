"""Finding manifest files: one per family, loaded when an entry of it is first asked for."""

from __future__ import annotations

import threading
from pathlib import Path

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.document import load_document
from tileops.engine.manifest.entry import Entry
from tileops.engine.manifest.read import parse_entry
from tileops.engine.manifest.sharding import share_sharding
from tileops.engine.pause import without_collection

__all__ = ["families", "family_file", "load_family", "package_root"]

_lock = threading.Lock()
_loaded: dict[Path, dict[str, Entry]] = {}


def package_root() -> Path:
    """The folder of the tileops package."""
    return Path(__file__).resolve().parents[2]


def families() -> dict[str, Path]:
    """The in-tree families: name to manifest file, in name order."""
    return {path.parent.name: path for path in sorted(package_root().glob("*/manifest.yaml"))}


def family_file(module_file: str) -> Path | None:
    """The manifest beside a class's module, or in the nearest package above it."""
    folder = Path(module_file).resolve().parent
    while True:
        if (folder / "manifest.yaml").is_file():
            return folder / "manifest.yaml"
        if not (folder / "__init__.py").is_file() or folder.parent == folder:
            return None
        folder = folder.parent


def load_family(path: Path, family: str | None = None) -> dict[str, Entry]:
    """All entries of one file, by class name. Raises ``ManifestError``; a failed load leaves
    nothing behind."""
    path = path.resolve()
    with _lock:
        found = _loaded.get(path)
        if found is None:
            with without_collection():
                document = load_document(path)
                if not isinstance(document.value, dict):
                    raise ManifestError(f"{path}:1", "", "the file must be a mapping of entries")
                name = family or path.parent.name
                found = {
                    entry: parse_entry(entry, node, path, name)
                    for entry, node in document.value.items()
                }
                share_sharding(found)
                del document
            _loaded[path] = found
        return found
