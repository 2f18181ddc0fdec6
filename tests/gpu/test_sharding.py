"""DTensor on cards (NCCL)."""

from __future__ import annotations

import pytest
import torch

from tests.sharded import spawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2,
        reason="needs two CUDA cards",
    ),
]


def test_values_on_two_cards(tmp_path, seed):
    spawn(2, "nccl", tmp_path, seed)
