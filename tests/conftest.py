"""Random inputs that are fresh with every change of the library or of the test's own file, and the
same until the next one: what passes for a person passes for continuous integration. The captured
output of a test that fails has its seed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import secrets
from pathlib import Path

import pytest


def drawn(name: str, file: Path) -> int:
    """A seed: of ``TILEOPS_TEST_SEED``, else of all code of the library, the file and the name."""
    given = os.environ.get("TILEOPS_TEST_SEED")
    if given == "fresh":
        return secrets.randbits(32)
    if given:
        return int(given)
    return int.from_bytes(_digest(_library() + file.read_bytes() + name.encode())[:4], "big")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@functools.cache
def _library() -> bytes:
    source = Path(__file__).parents[1] / "src"
    files = sorted(f for kind in ("py", "yaml") for f in source.rglob(f"*.{kind}"))
    return _digest(b"".join(file.read_bytes() for file in files))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(drawn("hypothesis", Path(__file__)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Kernels and choices of tuning that a run keeps are its own; Triton's cache lies beneath."""
    from tileops.engine.settings import settings

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TILEOPS_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        settings.cache_clear()
        yield
    settings.cache_clear()


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Seeds ``torch`` and ``random``. ``TILEOPS_TEST_SEED=<number>`` repeats a run, ``=fresh`` draws anew.

    ``torch`` by another number than is returned: samples are drawn from that one, and gradients or
    tangents that repeat them let terms cancel.
    """
    import torch

    number = drawn(request.node.nodeid, request.node.path)
    print(f"TILEOPS_TEST_SEED={number}")
    random.seed(number)
    torch.manual_seed(number ^ 0x5DEECE66D)
    return number
