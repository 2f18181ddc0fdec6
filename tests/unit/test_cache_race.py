"""Eight processes on one empty cache, one of which is killed at a random moment."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cache_race import PROCESSES, payload
from tileops.engine.cache.folder import Folder

ROOT = Path(__file__).parents[2]
KEYS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(24)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def hold_round(folder: Path, victim: int, ended: dict[int, int]) -> None:
    assert len(ended) == PROCESSES
    assert all(code == 0 for child, code in ended.items() if child != victim), ended
    built = [line.split() for line in folder.with_suffix(".log").read_text().splitlines()]
    by_victim = {key for pid, key in built if int(pid) == victim}
    for key, count in Counter(key for _, key in built).items():
        # Once, and once more where the one that began it was killed.
        assert count <= 1 + (key in by_victim), (key, built)
    assert {row.key for row in Folder(folder).rows()} == set(KEYS)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{key}.kernel" for key in KEYS)
    for key in KEYS:
        assert Folder(folder).read("kernel", key).payload == payload(key)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_one_of_eight_writers_is_killed(tmp_path, rounds, seed):
    command = [
        sys.executable,
        "-m",
        "tests.cache_race",
        str(tmp_path),
        str(seed),
        str(rounds),
        *KEYS,
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == rounds
    killed = 0
    for turn, line in enumerate(lines):
        victim, *children = line.split()
        ended = {int(pid): int(code) for pid, code in (each.split(":") for each in children)}
        hold_round(tmp_path / str(turn), int(victim), ended)
        killed += ended[int(victim)] == -signal.SIGKILL
    assert rounds < 10 or killed > rounds // 2  # the kill came while they worked


def race(command, start, kill_after):
    """Start the processes, and kill one."""
    children = [
        subprocess.Popen([*command, str(seed)], env=ENVIRONMENT, stderr=subprocess.PIPE)
        for seed in range(PROCESSES)
    ]
    victim = random.choice(children)
    time.sleep(max(0.0, start + kill_after - time.time()))
    victim.send_signal(signal.SIGKILL)
    for child in children:
        _, error = child.communicate(timeout=60)
        assert child.returncode == 0 or child is victim, error.decode()


COMPILE = """
import sys, time
import torch, triton
from tests.unit.test_cache_keys import row_build
from tileops.lib.machine_code import code_for
from tileops.engine import record
start, seed = float(sys.argv[1]), int(sys.argv[2])
time.sleep(max(0.0, start - time.time()))
made = 0
for turn in range(3):
    code = code_for(row_build(BLOCK=256 << (turn + seed) % 3), (9, 0))
    assert code.binary.code[:4] == b"\\x7fELF" and code.registers > 0
print(record.compile_count())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(3))
def test_the_same_with_the_compiler(tmp_path, turn, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setitem(ENVIRONMENT, "TILEOPS_CACHE_DIR", str(folder))
    monkeypatch.setitem(ENVIRONMENT, "TRITON_CACHE_DIR", str(tmp_path / "triton"))
    start = time.time() + 12
    race([sys.executable, "-c", COMPILE, str(start)], start, random.uniform(0.0, 1.5))
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 3
    assert all(name.endswith(".kernel") for name in names)
    assert Folder(folder).damaged() == {}
    done = subprocess.run([sys.executable, "-c", COMPILE, "0", "1"], env=ENVIRONMENT,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout == "0\n"
