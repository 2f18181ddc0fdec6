"""Runs tests in processes that have never called an op, at a fraction of a second each.

A zygote imports torch with its compilers, and nothing of tileops; each test marked ``@fresh`` runs
in a child forked from it, with empty kernel and compiler caches of its own, and without the
TORCH*, TRITON* and TILEOPS* variables of whoever started pytest. One zygote serves one pytest worker;
nothing here imports tileops, so a child is as cold as the body that it runs.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

__all__ = ["ROOT", "clean_environment", "fresh", "run_fresh"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200
_PREFIXES = ("TORCH", "TRITON", "TILEOPS", "AOT_", "PYTORCH")


def fresh(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a test function: runs it in a child, whose output and failure it shows."""

    @functools.wraps(test)
    def in_child(**arguments: Any) -> None:
        run_fresh(in_child, **arguments)

    return in_child


def run_fresh(function: Callable[..., Any], /, *, env: Any = None, **arguments: Any) -> Any:
    """What ``function(**arguments)`` returns in a fresh process.

    Raises ``AssertionError`` with that process's traceback. ``function`` is found again by name.
    """
    inner = getattr(function, "__wrapped__", function)
    path = Path(inner.__code__.co_filename).resolve()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    with tempfile.TemporaryDirectory(prefix="tileops-fresh-", ignore_cleanup_errors=True) as folder:
        job = (folder, dict(env or {}), module, inner.__qualname__, pickle.dumps(arguments))
        status = _zygote().run(job)
        output = _read(Path(folder, "output"))
        print(output, end="")
        answer = Path(folder, "answer")
        if not answer.is_file():
            raise AssertionError(f"the child process ended with {status} and no answer\n{output}")
        failed, value = pickle.loads(answer.read_bytes())
    assert not failed, f"in a fresh process:\n{value}"
    return value


def clean_environment(folder: str, **more: str) -> dict[str, str]:
    """The environment of a fresh process whose caches lie in ``folder``."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_PREFIXES)}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        # Compiling in the process itself: a pool of compilers would outlive it.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # What the processor says that it can is so: each process with an empty cache would try it out,
        # which compiles for 7 s.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
        "TRITON_CACHE_DIR": str(Path(folder, "triton")),
        "TILEOPS_CACHE_DIR": str(Path(folder, "tileops")),
        **more,
    }


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


class _Zygote:
    """The parent's end: one request at a time."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="tileops-zygote-")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.contract import fresh; fresh.serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(folder, OMP_NUM_THREADS="1"),
            cwd=ROOT,
            start_new_session=True,  # so that it and its children can be ended together
        )
        atexit.register(self.end)

    def run(self, job: Any) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline().decode().strip() if ready else ""
        if not line:
            self.end()
            _zygote.cache_clear()
            return f"no word in {SECONDS} s" if not ready else "its parent"
        return line

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


# ---- in the zygote -------------------------------------------------------------------------------


def serve() -> None:
    """Fork a child for each request on standard input, and tell how it ended."""
    import pytest  # noqa: F401
    import torch._dynamo.backends.common
    import torch._inductor.compile_fx  # noqa: F401

    loaded = [name for name in sys.modules if name.split(".")[0] == "tileops"]
    assert not loaded, f"the zygote is not cold: {loaded}"
    requests = sys.stdin.buffer
    gc.freeze()  # a collection in a child passes over what is here
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            _child(requests, *job)
        _, status = os.waitpid(child, 0)
        print(f"exit status {os.waitstatus_to_exitcode(status)}", flush=True)


def _child(
    requests: BinaryIO, folder: str, env: dict[str, str], module: str, name: str, data: bytes
) -> NoReturn:
    output = os.open(Path(folder, "output"), os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), requests.fileno())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(clean_environment(folder, **env))
    code = 0
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        function = getattr(function, "__wrapped__", function)
        answer = (False, function(**pickle.loads(data)))
        Path(folder, "answer").write_bytes(pickle.dumps(answer))
    except BaseException:  # the parent tells
        Path(folder, "answer").write_bytes(pickle.dumps((True, traceback.format_exc())))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
