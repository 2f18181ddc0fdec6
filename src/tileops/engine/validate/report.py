"""What the validator found."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tileops.engine.errors import ManifestError

__all__ = ["Fault", "Report", "describe"]


def describe(error: BaseException) -> str:
    """An unexpected error in one line, with the place outside this package and torch that raised."""
    words = str(error).strip().splitlines()
    text = f"{type(error).__name__}{': ' + words[0] if words else ''}"
    own = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and own not in path.parents and "site-packages" not in path.parts:
            return f"{text} ({path.name}:{frame.lineno})"
    return text


@dataclass(frozen=True, order=True)
class Fault:
    """One broken promise; ``entry`` is '' where a file as a whole is at fault."""

    file: str
    line: int
    entry: str
    problem: str

    def __str__(self) -> str:
        path = Path(self.file)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{shown}:{self.line}: {self.entry + ': ' if self.entry else ''}{self.problem}"


@dataclass
class Report:
    """All faults; notes say what could not be looked at here; ``unknown`` maps a name that is no
    entry to the nearest that are."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    unknown: Mapping[str, list[str]] = field(default_factory=dict)

    def add(self, file: Path | str, line: int, entry: str, problem: str) -> None:
        """Record a fault, once."""
        fault = Fault(str(file), line, entry, problem)
        if fault not in self.faults:
            self.faults.append(fault)

    def add_error(self, error: ManifestError) -> None:
        """Record a located error."""
        file, _, line = error.where.rpartition(":")
        self.add(file, int(line), error.entry, error.problem)

    def note(self, text: str) -> None:
        """Record a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "checked": self.checked,
            "faults": [asdict(fault) for fault in self.faults],
            "notes": self.notes,
            "unknown": dict(self.unknown),
        }
