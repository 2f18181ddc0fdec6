"""Going through the manifests: which entries, which classes, then everything about each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import families, load_family
from tileops.engine.manifest.entry import Entry
from tileops.engine.validate import classes, entries, workloads
from tileops.engine.validate.find import Home, load, scan
from tileops.engine.validate.report import Report, describe

__all__ = ["check"]


def check(ops: Sequence[str] = (), manifests: Iterable[Path] = ()) -> Report:
    """Validate the entries named ``ops``, or all, of ``manifests``, or of the in-tree ones."""
    report = Report()
    given = [Path(path).resolve() for path in manifests]
    in_tree = [path.resolve() for path in families().values()]
    loaded: dict[Path, dict[str, Entry]] = {}
    failed = False
    for path in dict.fromkeys([*given, *in_tree]):
        try:
            loaded[path] = load_family(path)
        except ManifestError as error:
            failed = True
            if path in given or not given:
                report.add_error(error)
    known = {name: entry for found in loaded.values() for name, entry in found.items()}
    wanted = {path: loaded[path] for path in given or in_tree if path in loaded}
    names = [name for found in wanted.values() for name in found]
    report.unknown = {op: _close_to(op, names) for op in ops if op not in names}
    for path, found in wanted.items():
        chosen = [entry for name, entry in found.items() if not ops or name in ops]
        if chosen:
            # Which ops exist cannot be said while a file of them does not load.
            _check_file(path, found, chosen, None if failed else known, report)
    report.faults.sort()
    return report


def _close_to(op: str, names: list[str]) -> list[str]:
    """The names most like ``op``, whose capitals are easily mistaken."""
    lowered = {name.lower(): name for name in names}
    return [lowered[name] for name in difflib.get_close_matches(op.lower(), lowered, 3, 0.5)]


def _check_file(
    path: Path,
    found: dict[str, Entry],
    chosen: list[Entry],
    known: dict[str, Entry] | None,
    report: Report,
) -> None:
    homes = scan(path, report)
    orphans = {name: home for name, home in homes.items() if name not in found}
    for name, orphan in orphans.items():
        report.add(orphan.file, orphan.line, name, f"the class has no entry in {path}")
    for entry in chosen:
        report.checked.append(entry.name)
        sound = guarded(report, entry, entries.check_entry, entry, known, report)
        home = homes.get(entry.name)
        if home is None:
            if entry.status == "implemented":
                report.add(path, entry.line_of("status"), entry.name, "the entry says implemented, "
                           f"but no module of {path.parent} has the class")  # fmt: skip
            continue
        if entry.status != "implemented":
            report.note(f"{entry.name}: the class exists and the entry says {entry.status}")
        op_cls = _load(home, orphans, report)
        if op_cls is not None:
            made = guarded(report, entry, classes.check_class, op_cls, home, report)
            # What cannot be constructed fails in every workload: that is one fault, not many.
            run = workloads.run_workload if sound and made else None
            guarded(report, entry, workloads.check_workloads, entry, op_cls, run, report)


def _load(home: Home, orphans: dict[str, Home], report: Report) -> Any:
    """The class; a module that fails by a class without an entry is one fault, not two."""
    aside = Report()
    op_cls = load(home, aside)
    for fault in aside.faults:
        if fault.entry in orphans:
            report.note(f"{home.name}: not checked, because its module does not import")
        else:
            report.add(fault.file, fault.line, fault.entry, fault.problem)
    return op_cls


def guarded(report: Report, entry: Entry, function: Callable[..., Any], *args: Any) -> Any:
    """The result of one part, or None; what it raises is a fault and stops no other part."""
    try:
        return function(*args)
    except ManifestError as error:
        report.add_error(error)
    except Exception as error:  # noqa: BLE001  (classes may raise anything)
        report.add(entry.path, entry.line, entry.name, describe(error))
    return None
