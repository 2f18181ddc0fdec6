"""What each process of the race in tests/unit/test_cache_race.py does; imports no torch.

``python -m tests.cache_race <folder> <log> <start> <seed> <key>...`` waits until the clock says
``start``, then makes every key in an order of its own, and checks what it gets.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from tileops.engine.cache.entry import Stored
from tileops.engine.cache.folder import Folder

BUILD_SECONDS = 0.02


def payload(key: str) -> bytes:
    return bytes.fromhex(key) * 500


def main(folder: str, log: str, start: str, seed: str, *keys: str) -> None:
    cache = Folder(Path(folder), limit=1 << 30)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    order = list(keys)
    random.Random(seed).shuffle(order)
    time.sleep(max(0.0, float(start) - time.time()))
    for key in order:

        def build(key: str = key) -> Stored:
            os.write(written, f"{os.getpid()} {key}\n".encode())
            time.sleep(BUILD_SECONDS)
            return Stored("kernel", key, {"made": key}, payload(key))

        stored = cache.read("kernel", key)
        if stored is None:
            stored, _ = cache.make("kernel", key, build)
        assert stored == Stored("kernel", key, {"made": key}, payload(key))


if __name__ == "__main__":
    main(*sys.argv[1:])
