"""Many entries in one file that is only read: what a container carries so that it builds nothing.

A magic line; the SHA-256 of the manifest; the manifest, a line of JSON; then the entries, each as it
would lie in a directory. The manifest says for which architectures and versions the bundle is, and
where each entry begins, how long it is and what its SHA-256 is. A bundle is checked as a whole when it
is opened; then it is used, or refused with a reason. Nothing is unpacked, so no name in it is a path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from tileops import __version__
from tileops.engine.cache.entry import (
    FORMAT,
    DamagedEntryError,
    Stored,
    decode,
    encode,
    file_name,
    parse_name,
)
from tileops.engine.cache.folder import publish, warn_once
from tileops.engine.cache.versions import triton_version
from tileops.engine.errors import BundleError

__all__ = ["Bundle", "open_bundle", "write_bundle"]

_MAGIC = b"tileops bundle "
_FIRST = _MAGIC + f"{FORMAT}\n".encode()


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. ``manifest`` holds ``tileops``, ``triton``, ``architectures``, ``entries``."""

    path: Path
    manifest: dict[str, Any]
    entries: dict[str, bytes] = field(repr=False)
    _sources: dict[str, set[str]] = field(repr=False)

    def read(self, kind: str, key: str) -> Stored | None:
        """An entry, None where the bundle has none."""
        data = self.entries.get(file_name(kind, key))
        return None if data is None else decode(data, kind, key)

    def serves(self, arch: str) -> bool:
        """Whether it holds kernels for an architecture such as ``sm_90``."""
        return arch in self.manifest["architectures"]

    def refuse_arch(self, arch: str) -> NoReturn:
        """Raises ``BundleError``: the bundle is for other cards."""
        known = ", ".join(self.manifest["architectures"]) or "no architecture"
        raise BundleError(
            self.path,
            f"it is for {known}, and this card is {arch}; make one with 'tileops bundle "
            f"--arch {arch}'",
        )

    def missed(self, fn: str, source: str) -> None:
        """Told of a kernel that is not in it: says so once where it holds one of other text."""
        if fn in self._sources and source not in self._sources[fn]:
            warn_once(
                f"{self.path} {fn}",
                f"bundle {self.path} was made from another text of {fn}, which is compiled instead; "
                f"make the bundle again",
            )


def write_bundle(path: Path, stored: Iterable[Stored]) -> dict[str, Any]:
    """Write entries into one file, published whole; gives its manifest."""
    files = {file_name(one.kind, one.key): (encode(one), one.facts) for one in stored}
    rows: list[dict[str, Any]] = []
    offset = 0
    for name, (data, facts) in sorted(files.items()):
        rows.append(
            {
                "name": name,
                "offset": offset,
                "bytes": len(data),
                "sha256": sha256(data).hexdigest(),
                "facts": facts,
            }
        )
        offset += len(data)
    architectures = {str(facts["arch"]) for _, facts in files.values() if "arch" in facts}
    manifest = {
        "tileops": __version__,
        "triton": triton_version(),
        "architectures": sorted(architectures, key=lambda name: int(name[3:])),
        "entries": rows,
    }
    line = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    head = _FIRST + sha256(line).hexdigest().encode() + b"\n"
    publish(path, b"".join([head, line, *(data for _, (data, _) in sorted(files.items()))]))
    return manifest


def open_bundle(path: Path) -> Bundle:
    """The bundle at ``path``, checked to the last byte. Raises ``BundleError``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(path, f"it cannot be read: {error.strerror}") from None
    if not data.startswith(_MAGIC):
        raise BundleError(path, "it is no bundle of kernels")
    if not data.startswith(_FIRST):
        given = data[len(_MAGIC) : 80].partition(b"\n")[0].decode(errors="replace")
        raise BundleError(path, f"it has format {given}, and this tileops reads format {FORMAT}")
    digest, _, rest = data[len(_FIRST) :].partition(b"\n")
    line, end, _ = rest.partition(b"\n")
    if not end or sha256(line + end).hexdigest().encode() != digest:
        raise BundleError(path, "its manifest is damaged")
    begin = len(data) - len(rest) + len(line) + 1
    try:
        manifest = json.loads(line)
        _check_versions(path, manifest)
        return Bundle(path, manifest, *_entries(path, manifest, memoryview(data)[begin:]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(path, f"its manifest makes no sense: {error!r}") from error


def _check_versions(path: Path, manifest: dict[str, Any]) -> None:
    if manifest["tileops"] != __version__:
        made = f"it was made by tileops {manifest['tileops']}, and this is {__version__}"
        raise BundleError(path, made)
    here = triton_version()
    # Without Triton nothing else could be compiled: the kernels are what the bundle's made.
    if here is not None and manifest["triton"] != here:
        raise BundleError(
            path, f"its kernels were compiled by Triton {manifest['triton']}, and here is {here}"
        )


def _entries(
    path: Path, manifest: dict[str, Any], data: memoryview
) -> tuple[dict[str, bytes], dict[str, set[str]]]:
    found: dict[str, bytes] = {}
    sources: dict[str, set[str]] = {}
    offset = 0
    for row in manifest["entries"]:
        name = parse_name(row["name"])
        blob = bytes(data[row["offset"] : row["offset"] + row["bytes"]])
        if name is None or row["offset"] != offset or sha256(blob).hexdigest() != row["sha256"]:
            raise BundleError(path, f"its entry {row['name']!r} is damaged")
        offset += row["bytes"]
        try:
            facts = decode(blob, *name).facts
        except DamagedEntryError as damage:
            raise BundleError(path, f"its entry {row['name']!r}: {damage}") from None
        found[row["name"]] = blob
        if "fn" in facts:
            sources.setdefault(facts["fn"], set()).add(facts["source"])
    if offset != len(data):
        raise BundleError(path, "something stands behind its last entry")
    return found, sources
