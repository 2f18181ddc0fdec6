"""Compiling in several processes.

Not by ``multiprocessing``: its children run the caller's script again, which breaks a script that calls
``prepare`` at its top level. A worker here is a plain Python that imports this module and what it is
sent; device functions of the caller's own script therefore compile in the caller.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, BinaryIO

from tileops.engine.asked import Build

__all__ = ["Outcome", "compile_all", "serve"]

LEAST = 4
"""Kernels below which starting a process (a second, to import torch) does not pay."""

Job = tuple[Build, tuple[int, int]]
Outcome = Any
"""The code, without Triton's object; or the exception that compiling raised."""


def compile_all(jobs: Sequence[Job], processes: int, done: Callable[[int, Outcome], None]) -> None:
    """Compile each job; ``done(index, outcome)`` is called once for each, from any thread."""
    elsewhere = [n for n, (build, _) in enumerate(jobs) if not build.fn.startswith("__main__:")]
    count = min(processes, len(elsewhere) // (LEAST // 2))
    if processes < 2 or len(elsewhere) < LEAST:
        elsewhere = []
    apart = set(elsewhere)
    idle: SimpleQueue[_Worker] = SimpleQueue()
    workers: list[_Worker] = []
    lock = threading.Lock()

    def one(index: int) -> None:
        try:
            with lock:
                if idle.empty() and len(workers) < count:
                    workers.append(_Worker())
                    idle.put(workers[-1])
            worker = idle.get()
            try:
                outcome = worker.ask(jobs[index])
            finally:
                idle.put(worker)
        except Exception as error:  # noqa: BLE001  (it is told as what came of the job)
            outcome = error
        done(index, outcome)

    try:
        with ThreadPoolExecutor(max(count, 1)) as pool:
            pending = [pool.submit(one, index) for index in elsewhere]
            for index, (build, arch) in enumerate(jobs):
                if index not in apart:
                    done(index, _outcome(build, arch))
            for future in pending:
                future.result()
    finally:
        for worker in workers:
            worker.close()


def _outcome(build: Build, arch: tuple[int, int]) -> Outcome:
    try:
        return build.code_for(arch)
    except Exception as error:  # noqa: BLE001  (it is told as what came of the job)
        return error


class _Worker:
    """One process, asked one thing at a time."""

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from tileops.engine.workers import serve; serve()"
        )
        # Errors that a compiler prints go where ours go.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, job: Job) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, job)
            return _receive(self._process.stdout)
        except (OSError, EOFError):
            status = self._process.wait()
            raise RuntimeError(f"a compiling process ended with status {status}") from None

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


def _send(stream: BinaryIO | Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def serve() -> None:
    """A worker's life: jobs from standard input, outcomes to standard output, until there are none."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    while True:
        try:
            build, arch = _receive(sys.stdin.buffer)
        except EOFError:
            return
        outcome = _outcome(build, arch)
        try:
            _send(answers, outcome if isinstance(outcome, Exception) else outcome.portable())
        except (pickle.PicklingError, TypeError, AttributeError):
            _send(answers, RuntimeError(f"{type(outcome).__name__}: {outcome}"))
