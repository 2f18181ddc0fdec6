"""Bundles as users meet them: made from what was prepared, and used by a process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tileops.engine.cache.bundle import Bundle, write_bundle
from tileops.engine.cache.entry import Stored
from tileops.engine.cache.shelves import shelves, use_bundle
from tileops.engine.cache.sources import UnknownSourceError, digest_of
from tileops.engine.cache.versions import triton_version
from tileops.engine.errors import BundleError
from tileops.engine.prepare import Prepared

__all__ = ["bundle", "load_bundle"]


def bundle(
    path: str | Path, *prepared: Prepared, architectures: Iterable[str] = ()
) -> dict[str, Any]:
    """Write kernels of the cache, and the choices of tuning for their ops, into one file.

    With ``prepared`` (what ``prepare`` returned): the kernels of these calls. Without: all that the
    cache holds for this text of the kernels and this Triton, of ``architectures`` (``"sm_90"``;
    every one where none is named). Gives the manifest. Raises ``BundleError`` where a kernel is in
    no cache or there is nothing to write.
    """
    for one in prepared:
        if not isinstance(one, Prepared):
            raise TypeError(f"bundle: {type(one).__name__}; accepted is what prepare returned")
    path, wanted = Path(path), frozenset(architectures)
    unkept = [k.function for one in prepared for k in one.kernels if k.function and k.key is None]
    if unkept:
        raise BundleError(path, f"no cache can hold {unkept[0]}: it has no text in a file, or "
                                f"constants without a literal form")  # fmt: skip
    keys = frozenset().union(*(one.keys for one in prepared))
    ops = {kernel.op for one in prepared for kernel in one.kernels}
    found: dict[tuple[str, str], Stored] = {}
    for kind, key in _keys(prepared, keys):
        entry = shelves().find(kind, key)
        if entry is None:
            if kind == "kernel" and prepared:
                raise BundleError(path, f"kernel {key} is not in the cache any more")
            continue
        facts = entry.stored.facts
        if wanted and facts.get("arch") not in wanted:
            continue
        if kind == "choice" and prepared and facts.get("op") not in ops:
            continue
        if kind == "choice" or prepared or _current(facts):
            found[kind, key] = entry.stored
    if not any(kind == "kernel" for kind, _ in found):
        of = f" for {', '.join(sorted(wanted))}" if wanted else ""
        raise BundleError(path, f"the cache holds no kernel{of} to put into it: prepare some first")
    try:
        return write_bundle(path, found.values())
    except OSError as error:
        raise BundleError(path, f"it cannot be written: {error.strerror}") from error


def _keys(prepared: tuple[Prepared, ...], keys: frozenset[str]) -> list[tuple[str, str]]:
    here = [(row.kind, row.key) for folder in shelves().folders for row in folder.rows()]
    if not prepared:
        return sorted(set(here))
    return [
        *(("kernel", key) for key in sorted(keys)),
        *sorted({k for k in here if k[0] == "choice"}),
    ]


def _current(facts: dict[str, Any]) -> bool:
    """Whether a process of this text and this Triton would ask for the kernel."""
    if facts["triton"] != triton_version():
        return False
    try:
        return digest_of(facts["fn"]) == facts["source"]
    except UnknownSourceError:
        return False


def load_bundle(path: str | Path) -> Bundle:
    """Use the kernels and choices of a bundle in this process, before any cache.

    Raises ``BundleError`` with the reason for a file that is damaged, or for another format, tileops
    or Triton, and nothing of it is used. Where no bundle of the process is for the card that a call
    is on, that call raises it.
    """
    loaded = use_bundle(Path(path))
    if torch.cuda.is_initialized():  # else asking would make a context, which a fork would lose
        major, minor = torch.cuda.get_device_capability()
        shelves().check_arch(f"sm_{major}{minor}")
    return loaded
