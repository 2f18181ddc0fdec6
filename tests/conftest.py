"""Fresh random inputs in every run; the seed is among the captured output of a test that fails."""

from __future__ import annotations

import os
import random
import secrets

import pytest


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
def seed() -> int:
    """Seeds ``torch`` and ``random``. ``TILEOPS_TEST_SEED=<number>`` repeats a run.

    ``torch`` by another number than is returned: samples are drawn from that one, and gradients or
    tangents that repeat them let terms cancel.
    """
    import torch

    given = os.environ.get("TILEOPS_TEST_SEED")
    number = int(given) if given else secrets.randbits(32)
    print(f"TILEOPS_TEST_SEED={number}")
    random.seed(number)
    torch.manual_seed(number ^ 0x5DEECE66D)
    return number
