"""DTensor on processes that exchange data (gloo)."""

from __future__ import annotations

import pytest

from tests.sharded import spawn


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_values_on_processes(count, tmp_path, seed):
    spawn(count, "gloo", tmp_path, seed)
