"""A directory of cache entries: damage, full and closed disks, bounds, dead writers."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from tileops.engine.cache import folder as module
from tileops.engine.cache.entry import DamagedEntryError, Stored, decode, encode, file_name
from tileops.engine.cache.folder import Folder
from tileops.engine.settings import parse_size, settings

KEY, OTHER = "a" * 64, "b" * 64
STORED = Stored("kernel", KEY, {"warps": 4, "name": "kernel"}, bytes(range(256)) * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_warned", set())
    return Folder(tmp_path / "cache", limit=1 << 20)


def put(cache, stored=STORED):
    given, made = cache.make(stored.kind, stored.key, lambda: stored)
    assert (given, made) == (stored, True)
    return cache.path / file_name(stored.kind, stored.key)


def names(cache):
    return sorted(path.name for path in cache.path.iterdir())


def test_what_is_made_once_is_read_ever_after(cache):
    assert cache.read("kernel", KEY) is None
    put(cache)
    assert cache.read("kernel", KEY) == STORED
    assert Folder(cache.path, readonly=True).read("kernel", KEY) == STORED
    assert cache.make("kernel", KEY, lambda: pytest.fail("built again")) == (STORED, False)
    assert names(cache) == [file_name("kernel", KEY)]
    assert encode(STORED) == encode(
        Stored("kernel", KEY, {"name": "kernel", "warps": 4}, STORED.payload)
    )


def test_a_failed_build_leaves_nothing(cache):
    def fail():
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        cache.make("kernel", KEY, fail)
    assert cache.make("kernel", KEY, lambda: None) == (None, True)
    assert names(cache) == []


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(place):
    def change(path):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return change


def _directory(path):
    path.unlink()
    path.mkdir()


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "truncated": _truncate,
    "empty": lambda path: path.write_bytes(b""),
    "magic": _flip(3),
    "digest": _flip(30),
    "facts": _flip(150),
    "payload": _flip(-20),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "foreign": lambda path: path.write_bytes(b"\x7fELF and so on"),
    "other entry": lambda path: path.write_bytes(encode(Stored("kernel", OTHER))),
    "directory": _directory,
    "pipe": _pipe,
    "dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_entries_are_reported_once_and_replaced(cache, damage):
    path = put(cache)
    damage(path)
    gone = path.is_symlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cache.read("kernel", KEY) is None
        assert cache.read("kernel", KEY) is None
    assert [str(path) in str(one.message) for one in said] == [True] * (not gone)
    put(cache)
    assert cache.read("kernel", KEY) == STORED
    assert names(cache) == [path.name]


def test_a_directory_that_somebody_uses_is_left_alone(cache):
    path = put(cache)
    _directory(path)
    (path / "mine").write_text("kept")
    with pytest.warns(RuntimeWarning, match="cannot be written|Is a directory"):
        put(cache)
    assert (path / "mine").read_text() == "kept"


def test_decode_names_the_fault():
    data = encode(STORED)
    for wrong, reason in ((b"", "empty"), (data[:40], "checksum"), (b"PK", "no cache entry")):
        with pytest.raises(DamagedEntryError, match=reason):
            decode(wrong, "kernel", KEY)
    with pytest.raises(DamagedEntryError, match="it is the entry kernel a"):
        decode(data, "kernel", OTHER)


# ---- disks that do not take it ---------------------------------------------------------------------


def _raises(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("target", "name", "number"),
    [
        (os, "write", errno.ENOSPC),
        (os, "open", errno.EACCES),
        (os, "open", errno.EROFS),
        (Path, "replace", errno.EDQUOT),
        (Path, "mkdir", errno.EROFS),
    ],
)
def test_a_disk_that_cannot_be_written(cache, monkeypatch, target, name, number):
    with monkeypatch.context() as broken:
        broken.setattr(target, name, _raises(number))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            put(cache)
            put(cache)
        (only,) = said
        assert "kernels are not kept" in str(only.message)
    assert not cache.path.exists() or names(cache) == []
    put(cache)


def test_a_folder_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_warned", set())
    (tmp_path / "file").write_text("")
    cache = Folder(tmp_path / "file" / "cache", limit=1 << 20)
    with pytest.warns(RuntimeWarning, match="cannot be written: Not a directory"):
        put(cache)
    assert cache.read("kernel", KEY) is None
    assert cache.rows() == []


def test_read_only_and_without_room(cache):
    put(cache)
    for closed in (Folder(cache.path, readonly=True), Folder(cache.path, limit=0)):
        assert closed.read("kernel", KEY) == STORED
        closed.make("kernel", OTHER, lambda: Stored("kernel", OTHER))
        closed.replace(Stored("kernel", OTHER))
    assert names(cache) == [file_name("kernel", KEY)]


def test_a_link_in_place_of_a_partial_file_is_not_written_through(cache, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache.path.mkdir(parents=True, exist_ok=True)
    (cache.path / (file_name("kernel", KEY) + ".part")).symlink_to(victim)
    with pytest.warns(RuntimeWarning):
        assert cache.make("kernel", KEY, lambda: STORED) == (STORED, True)
    assert victim.read_text() == "precious"


def test_a_pipe_in_place_of_an_entry_is_not_waited_for(cache):
    cache.path.mkdir(parents=True, exist_ok=True)
    os.mkfifo(cache.path / file_name("kernel", KEY))
    assert "no regular file" in cache.damaged()[file_name("kernel", KEY)]


def test_a_folder_in_which_everybody_may_write(cache):
    put(cache)
    cache.path.chmod(0o777)
    other = Folder(cache.path, limit=1 << 20)
    with pytest.warns(RuntimeWarning, match="everybody may write there"):
        assert other.read("kernel", KEY) is None
    other.make("kernel", OTHER, lambda: Stored("kernel", OTHER))
    assert len(names(cache)) == 1
    cache.path.chmod(0o755)
    assert Folder(cache.path).read("kernel", KEY) == STORED


# ---- several at once -------------------------------------------------------------------------------


def test_threads_build_once(cache):
    built = []

    def build():
        built.append(1)
        time.sleep(0.05)
        return STORED

    threads = [threading.Thread(target=cache.make, args=("kernel", KEY, build)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert names(cache) == [file_name("kernel", KEY)]


HOLD = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(cache):
    """A process that has begun the entry and does not go on."""
    cache.path.mkdir()
    part = cache.path / (file_name("kernel", KEY) + ".part")
    child = subprocess.Popen([sys.executable, "-c", HOLD, part], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"held\n"
    yield child
    child.kill()
    child.communicate()


def test_nobody_waits_for_a_stopped_writer_for_ever(cache, holder, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    put(cache)
    assert cache.read("kernel", KEY) == STORED
    assert file_name("kernel", KEY) + ".part" in names(cache)  # of the living


def test_what_the_dead_leave_goes(cache, holder):
    put(cache, Stored("kernel", OTHER))
    assert len(names(cache)) == 2  # the living one's is left alone
    holder.kill()
    holder.wait()
    put(cache, Stored("kernel", "c" * 64))
    assert names(cache) == [file_name("kernel", OTHER), file_name("kernel", "c" * 64)]


def test_a_partial_file_that_vanishes_before_it_is_locked(cache, monkeypatch):
    """Another process has renamed or removed it in between: what was locked is nobody's any more."""
    lock, vanished = fcntl.flock, []

    def flock(descriptor, operation):
        if not vanished:
            vanished.extend(cache.path.glob("*.part"))
            vanished[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        put(cache)
    assert len(vanished) == 1
    assert names(cache) == [file_name("kernel", KEY)]


def test_another_users_partial_file(cache, monkeypatch):
    """In a directory that several users write."""
    cache.path.mkdir()
    theirs = cache.path / (file_name("kernel", KEY) + ".part")
    theirs.touch()
    opened = os.open

    def refuse(path, *arguments, **named):
        if str(path) == str(theirs):
            raise PermissionError(errno.EACCES, "not yours")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    put(cache)
    assert cache.read("kernel", KEY) == STORED
    assert names(cache) == [file_name("kernel", KEY), theirs.name]


def test_a_directory_is_never_made_for_everybody(cache):
    before = os.umask(0)
    try:
        put(cache)
    finally:
        os.umask(before)
    assert cache.path.stat().st_mode & 0o777 == 0o755


def test_without_locks(cache, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", _raises(errno.ENOLCK))
    put(cache)
    assert names(cache) == [file_name("kernel", KEY)]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for host, process in ((module._host(), dead.pid), (module._host(), os.getpid()), ("far", 1)):
        (cache.path / f"{OTHER}.kernel.{host}.{process}.0a.part").write_bytes(b"")
    old = cache.path / f"{OTHER}.kernel.far.2.0a.part"
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    put(cache, Stored("kernel", OTHER))
    left = {name for name in names(cache) if name.endswith(".part")}
    assert left == {
        f"{OTHER}.kernel.{host}.{process}.0a.part"
        for host, process in ((module._host(), os.getpid()), ("far", 1))
    }


# ---- bounds ------------------------------------------------------------------------------------------


def fill(cache, count, size=1000):
    now = time.time()
    for n in range(count):
        path = put(cache, Stored("kernel", f"{n:064x}", {}, bytes(size)))
        os.utime(path, (now - 1000 + n, now - 1000 + n))


def test_the_least_recently_used_go_first(cache):
    fill(cache, 10)
    size = cache.rows()[0].size
    cache.limit = 8 * size
    oldest = cache.path / file_name("kernel", f"{0:064x}")
    os.utime(oldest)
    with oldest.with_name(file_name("kernel", f"{1:064x}")).open("rb") as reader:
        put(cache, Stored("kernel", KEY, {}, bytes(1000)))
        assert len(reader.read()) == size  # a reader reads on
    kept = {row.key for row in cache.rows()}
    assert KEY in kept
    assert f"{0:064x}" in kept
    assert f"{1:064x}" not in kept
    assert sum(row.size for row in cache.rows()) <= 8 * size
    assert len(kept) >= 6


def test_one_entry_beyond_the_limit_is_kept(cache):
    cache.limit = 10
    put(cache)
    assert cache.read("kernel", KEY) == STORED


def test_a_use_is_noted_once_a_day(cache):
    path = put(cache)
    for age, noted in ((2 * 86400, True), (3600, False)):
        before = time.time() - age
        os.utime(path, (before, before))
        cache.read("kernel", KEY)
        assert (path.stat().st_mtime - before > 1) is noted


def test_prune_and_clear(cache):
    fill(cache, 4)
    _truncate(cache.path / file_name("kernel", f"{2:064x}"))
    (cache.path / "notes.txt").write_text("mine")
    (cache.path / f"{KEY}.kernel.part").write_bytes(b"half")
    assert list(cache.damaged()) == [file_name("kernel", f"{2:064x}")]
    swept = cache.prune(limit=2 * cache.rows()[0].size)
    assert swept.damaged == [file_name("kernel", f"{2:064x}")]
    assert swept.abandoned == [f"{KEY}.kernel.part"]
    assert swept.evicted == [file_name("kernel", f"{n:064x}") for n in (0, 1)]
    assert cache.clear() == 1
    assert names(cache) == ["notes.txt"]


# ---- settings ------------------------------------------------------------------------------------------


def test_sizes():
    assert [parse_size(text) for text in ("0", "500", "1.5 kB", "64MB", "2 GiB", "1t")] == [
        0, 500, 1500, 64_000_000, 2 << 30, 10**12,
    ]  # fmt: skip
    for text in ("", "-1", "2 XB", "GiB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_size(text)


def test_where_the_cache_is(monkeypatch, tmp_path):
    def read():
        settings.cache_clear()
        return settings()

    try:
        monkeypatch.delenv("TILEOPS_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert read().cache_dir == tmp_path / "tileops"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert read().cache_dir == Path("/home/somebody/.cache/tileops")
        monkeypatch.setenv("TILEOPS_CACHE_DIR", str(tmp_path / "own"))
        monkeypatch.setenv("TILEOPS_CACHE_READONLY", f"{tmp_path}/a:{tmp_path}/b")
        assert read().cache_dir == tmp_path / "own"
        assert read().cache_readonly == (tmp_path / "a", tmp_path / "b")
        for name, value in (
            ("TILEOPS_CACHE_LIMIT", "much"),
            ("TILEOPS_JOBS", "0"),
            ("TILEOPS_TUNE", "maybe"),
        ):
            with monkeypatch.context() as wrong:
                wrong.setenv(name, value)
                with pytest.raises(ValueError, match=name):
                    read()
    finally:
        settings.cache_clear()
