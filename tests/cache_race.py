"""The races of tests/unit/test_cache_race.py; imports no torch.

``python -m tests.cache_race <folder> <seed> <rounds> <key>...``: in each round eight processes, forked
from this one, begin at once on an empty cache in ``<folder>/<round>``. Each makes every key in an order
of its own, and checks what it gets. One of them is killed. Prints a line a round: the process that was
to be killed, then each process with its exit status; what each built stands in ``<folder>/<round>.log``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from tileops.engine.cache.entry import Stored
from tileops.engine.cache.folder import Folder

BUILD_SECONDS = 0.02
PROCESSES = 8


def payload(key: str) -> bytes:
    return bytes.fromhex(key) * 500


def work(folder: Path, log: Path, order: list[str]) -> None:
    cache = Folder(folder, limit=1 << 30)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for key in order:

        def build(key: str = key) -> Stored:
            os.write(written, f"{os.getpid()} {key}\n".encode())
            time.sleep(BUILD_SECONDS)
            return Stored("kernel", key, {"made": key}, payload(key))

        stored = cache.read("kernel", key)
        if stored is None:
            stored, _ = cache.make("kernel", key, build)
        assert stored == Stored("kernel", key, {"made": key}, payload(key))


def forked(folder: Path, log: Path, order: list[str], begin: int, hold: int) -> int:
    """A process that works when nobody has ``hold`` open, the other end of ``begin``."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.close(hold)
        os.read(begin, 1)
        work(folder, log, order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one_round(folder: Path, keys: list[str], draw: random.Random) -> str:
    begin, hold = os.pipe()
    children = []
    for _ in range(PROCESSES):
        order = draw.sample(keys, len(keys))
        children.append(forked(folder, folder.with_suffix(".log"), order, begin, hold))
    os.close(hold)
    # The work takes at least this, and so does each process: it waits for every key.
    time.sleep(draw.uniform(0.0, len(keys) / PROCESSES * BUILD_SECONDS))
    victim = draw.choice(children)
    os.kill(victim, signal.SIGKILL)
    os.close(begin)
    ended = ((child, os.waitpid(child, 0)[1]) for child in children)
    return f"{victim} " + " ".join(
        f"{child}:{os.waitstatus_to_exitcode(status)}" for child, status in ended
    )


if __name__ == "__main__":
    place, seed, rounds, *names = sys.argv[1:]
    chance = random.Random(int(seed))
    for turn in range(int(rounds)):
        print(one_round(Path(place, str(turn)), names, chance), flush=True)
