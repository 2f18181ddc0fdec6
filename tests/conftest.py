"""Random inputs that are fresh with every change of the code, and the same until the next one: what
passes for a person passes for continuous integration. A failing test's captured output has its seed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import secrets
from pathlib import Path

import pytest


@functools.cache
def drawn(what: str) -> int:
    """The seed of a test, and of Hypothesis: of ``TILEOPS_TEST_SEED``, else of all code and its name."""
    given = os.environ.get("TILEOPS_TEST_SEED")
    if given == "fresh":
        return secrets.randbits(32)
    if given:
        return int(given)
    return int.from_bytes(hashlib.sha256(_code() + what.encode()).digest()[:4], "big")


@functools.cache
def _code() -> bytes:
    root = Path(__file__).parents[1]
    files = [f for top in ("src", "tests") for kind in ("py", "yaml") for f in (root / top).rglob(f"*.{kind}")]  # fmt: skip
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.digest()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.getoption("--hypothesis-seed", None) is None:
        config.option.hypothesis_seed = str(drawn("hypothesis"))


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

    number = drawn(request.node.nodeid)
    print(f"TILEOPS_TEST_SEED={number}")
    random.seed(number)
    torch.manual_seed(number ^ 0x5DEECE66D)
    return number
