"""A directory of cache entries that any number of processes read, write and prune at once.

An entry is written to ``<name>.part`` and renamed to ``<name>``, so readers meet whole entries only.
The writer holds an advisory lock (``flock``) on the partial file from before it compiles until after
the rename: others who want the same entry wait instead of compiling it too. The kernel drops the lock
of a process that dies, so nobody waits for the dead, and whoever can lock a partial file knows that its
writer is gone. Where the file system has no such locks, each writer has a partial file of its own,
with host and process in its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tileops.engine.cache.entry import (
    DamagedEntryError,
    Stored,
    decode,
    encode,
    file_name,
    parse_name,
)

__all__ = ["Folder", "Row", "Swept", "publish", "warn_once"]

PATIENCE = 300.0
"""Seconds to wait for another process's build before doing it too: it may have been stopped."""
ABANDONED = 86400.0
"""Seconds without a write after which a partial file without a lock is nobody's."""
TOUCH = 86400.0
"""Seconds for which a use need not be noted again."""
KEEP = 0.9
"""Share of the limit to which a directory that passed it shrinks."""
_PART = ".part"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}

_warned: set[str] = set()
_warning = threading.Lock()


def warn_once(subject: str, text: str) -> None:
    """A ``RuntimeWarning``, the first time in this process that there is one about ``subject``."""
    with _warning:
        if subject in _warned:
            return
        _warned.add(subject)
    warnings.warn(f"tileops: {text}", RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class Row:
    """One entry as it lies in a directory."""

    kind: str
    key: str
    size: int
    used: float
    """When it was last used, to a day; seconds since the epoch."""


@dataclass
class Swept:
    """What ``prune`` removed."""

    damaged: list[str] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """Damaged, and not removed: a directory that holds something, or no permission."""


class Folder:
    """Entries of one directory. ``limit`` bytes bound it; a read-only one is never written."""

    def __init__(self, path: Path, *, limit: int = 0, readonly: bool = False) -> None:
        self.path = path
        self.limit = limit
        self.readonly = readonly
        self._refused: bool | None = None

    # -- reading ----------------------------------------------------------------------------------

    def read(self, kind: str, key: str) -> Stored | None:
        """An entry, None where there is none that is whole; a damaged one is reported once."""
        if self.refused():
            return None
        path = self.path / file_name(kind, key)
        try:
            # Without waiting: whatever lies there, it may be a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _report(path, error.strerror)
            return None
        try:
            status = os.fstat(descriptor)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                stored = decode(file.read(), kind, key)
            if not self.readonly and time.time() - status.st_mtime > TOUCH:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
        except OSError as error:
            _report(path, error.strerror)
            return None
        except DamagedEntryError as damage:
            _report(path, str(damage))
            return None
        finally:
            os.close(descriptor)
        return stored

    def rows(self) -> list[Row]:
        """Every entry, the most recently used first; partial and foreign files are not among them."""
        found = []
        for item in self._scan():
            name = parse_name(item.name)
            with contextlib.suppress(OSError):
                if name and item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    found.append(Row(*name, status.st_size, status.st_mtime))
        return sorted(found, key=lambda row: (-row.used, row.key))

    def damaged(self) -> dict[str, str]:
        """Entries that are not whole: file name to reason."""
        found = {}
        for item in self._scan():
            name = parse_name(item.name)
            if name is None:
                continue
            try:
                if not item.is_file():  # a pipe would be waited for
                    raise DamagedEntryError("it is no regular file")
                decode(Path(item.path).read_bytes(), *name)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                found[item.name] = str(error.strerror)
            except DamagedEntryError as damage:
                found[item.name] = str(damage)
        return found

    def _scan(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as items:
                return list(items)
        except OSError:
            return []

    def refused(self) -> bool:
        """Whether others may plant code here: then it is not used, and a warning says so once."""
        if self._refused is None:
            try:
                status = self.path.stat()
            except OSError:
                return False
            self._refused = bool(status.st_mode & 0o002)
        if self._refused:
            warn_once(
                f"refused {self.path}",
                f"the cache directory {self.path} is not used: everybody may write there, so its "
                f"kernels may be anybody's; name another directory, or take the write permission "
                f"of others away",
            )
        return self._refused

    # -- writing ----------------------------------------------------------------------------------

    def make(
        self, kind: str, key: str, produce: Callable[[], Stored | None]
    ) -> tuple[Stored | None, bool]:
        """The entry and whether ``produce`` made it: else another process did while this waited.

        What cannot be written is used all the same; a warning says so once. ``produce`` may give
        None for what is not to be kept.
        """
        if self.readonly or self.limit <= 0 or self.refused():
            return produce(), True
        name = file_name(kind, key)
        try:
            self._create()
            claim = _claim(self.path / name)
        except OSError as error:
            self._unwritable(error)
            return produce(), True
        with claim:
            found = self.read(kind, key)
            if found is not None:
                return found, False
            stored = produce()
            if stored is not None:
                try:
                    claim.publish(encode(stored))
                except OSError as error:
                    self._unwritable(error)
                else:
                    self._tidy(name)
        return stored, True

    def replace(self, stored: Stored) -> None:
        """Write an entry over what is there."""
        if self.readonly or self.limit <= 0 or self.refused():
            return
        name = file_name(stored.kind, stored.key)
        try:
            self._create()
            with _claim(self.path / name) as claim:
                claim.publish(encode(stored))
        except OSError as error:
            self._unwritable(error)

    def _create(self) -> None:
        # Never writable by everybody, whatever the umask.
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)

    def _unwritable(self, error: OSError) -> None:
        warn_once(
            f"unwritable {self.path}",
            f"kernels are not kept: the cache directory {self.path} cannot be written: "
            f"{error.strerror}",
        )

    # -- tidying ----------------------------------------------------------------------------------

    def _tidy(self, fresh: str) -> None:
        """After a write: what dead writers left goes, and the oldest entries beyond the limit."""
        swept = Swept()
        self._sweep(swept)
        self._evict(self.limit, swept, fresh)

    def prune(self, limit: int | None = None) -> Swept:
        """Remove damaged entries, what dead writers left, and the least recently used entries
        beyond ``limit`` bytes (the directory's own where None)."""
        swept = Swept()
        for name in self.damaged():
            removed = _remove(self.path / name)
            (swept.damaged if removed else swept.stuck).append(name)
        self._sweep(swept)
        self._evict(self.limit if limit is None else limit, swept)
        return swept

    def clear(self) -> int:
        """Remove every entry and what dead writers left; how many entries there were."""
        removed = [item.name for item in self._scan() if parse_name(item.name)
                   and _remove(self.path / item.name)]  # fmt: skip
        self._sweep(Swept())
        return len(removed)

    def _sweep(self, swept: Swept) -> None:
        for item in self._scan():
            if item.name.endswith(_PART) and _abandoned(Path(item.path)):
                swept.abandoned.append(item.name)

    def _evict(self, limit: int, swept: Swept, fresh: str = "") -> None:
        rows = self.rows()
        size = sum(row.size for row in rows)
        if size <= limit:
            return
        for row in reversed(rows):
            if size <= limit * KEEP:
                break
            name = file_name(row.kind, row.key)
            # Who reads it now goes on reading: the file lives until it is closed.
            if name != fresh and _remove(self.path / name):
                size -= row.size
                swept.evicted.append(name)


def _report(path: Path, reason: object) -> None:
    warn_once(str(path), f"the cache entry {path} is not used: {reason}; it is built again")


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        return False
    return True


def publish(path: Path, data: bytes) -> None:
    """Write a whole file or none. Raises ``OSError``."""
    with _claim(path) as claim:
        claim.publish(data)


# ---- claims: the right to build one entry --------------------------------------------------------


@dataclass
class _Claim:
    """A partial file of ours. ``locked``: others wait for it."""

    target: Path
    part: Path
    descriptor: int
    locked: bool

    def publish(self, data: bytes) -> None:
        os.ftruncate(self.descriptor, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]
        try:
            self.part.replace(self.target)
        except IsADirectoryError:
            self.target.rmdir()  # an empty one; what somebody keeps there is not ours to remove
            self.part.replace(self.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Renamed, or given up. Before the lock is let go: the name may then be another's.
        if _same(self.part, self.descriptor):
            with contextlib.suppress(OSError):
                self.part.unlink()
        if self.locked:
            # Said, not left to close(): a forked child may hold the descriptor too.
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


def _claim(target: Path) -> _Claim:
    """Wait until nobody else builds ``target``. Raises ``OSError`` where nothing can be written."""
    part = target.with_name(target.name + _PART)
    deadline, pause = time.monotonic() + PATIENCE, 0.002
    while time.monotonic() < deadline:
        try:
            descriptor = _open(part)
        except PermissionError:
            if not part.exists():
                raise
            break  # another user's, in a directory that is shared
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            continue
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            with contextlib.suppress(OSError):
                part.unlink()
            break
        if _same(part, descriptor):
            return _Claim(target, part, descriptor, True)
        os.close(descriptor)  # its writer was done, and the file has another name now
    own = f"{target.name}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}{_PART}"
    part = target.with_name(own)
    return _Claim(target, part, _open(part), False)


def _open(part: Path) -> int:
    # A link there would have somebody else's file overwritten.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    return os.open(part, flags, 0o666)


def _same(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        named = path.lstat()
    except OSError:
        return False
    held = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def _host() -> str:
    name = "".join(c for c in os.uname().nodename if c.isalnum() or c == "-")
    return name[:64] or "host"


def _abandoned(part: Path) -> bool:
    """Remove a partial file whose writer is gone; whether it was removed."""
    owner = part.name.removesuffix(_PART).split(".")[2:]
    try:
        if len(owner) == 3:  # written without a lock
            host, process, _ = owner
            gone = host == _host() and not _alive(process)
            if gone or time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()
                return True
            return False
        descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _same(part, descriptor):
            return False
        part.unlink()
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True
