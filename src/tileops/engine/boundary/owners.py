"""Who owns an operator's name: one class, or its own newer definition."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tileops.engine.boundary.naming import operator_base_name
from tileops.engine.errors import ManifestError
from tileops.engine.manifest.entry import Entry

__all__ = ["Owner", "claim"]


@dataclass
class Owner:
    """The class that has a name now; ``generation`` counts its definitions in this process."""

    qualname: str
    generation: int = 1
    library: Any = None

    @property
    def suffix(self) -> str:
        """What tells the generated files of a later definition from those of the first."""
        return "" if self.generation == 1 else f"_{self.generation}"


_lock = threading.Lock()
_owners: dict[str, Owner] = {}


def claim(cls: type, entry: Entry) -> Owner:
    """The owner record of a class about to be defined.

    A class defined again (a reloaded module, a notebook cell run twice) takes its operators over;
    graphs compiled with the old definition are void. Raises ``ManifestError`` where another class
    has the name, before anything is touched.
    """
    base = operator_base_name(entry.family, entry.name)
    qualname = f"{cls.__module__}.{cls.__qualname__}"
    with _lock:
        owner = _owners.get(base)
        if owner is None:
            owner = _owners[base] = Owner(qualname)
        elif owner.qualname != qualname:
            raise ManifestError(
                entry.where,
                entry.name,
                f"operator tileops::{base} already belongs to {owner.qualname}: family and class "
                f"name together must be one class in a process",
            )
        else:
            owner.generation += 1
            if owner.library is not None:
                owner.library._destroy()
                owner.library = None
        return owner
