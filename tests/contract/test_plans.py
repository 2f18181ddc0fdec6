"""Plans: made once per facts, shared by calls that grow, bounded in number."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tileops.attention import GQADenseFwdOp
from tileops.engine.settings import settings
from tileops.norm import RMSNormFwdOp


def test_a_growing_sequence_shares_a_plan() -> None:
    """Decoding: the keys grow by one each call, and from some length on nothing is planned anew."""
    op = GQADenseFwdOp(is_causal=True, sm_scale=0.3)
    keys, values = torch.randn(2, 1, 300, 2, 16)
    query = torch.randn(1, 1, 6, 16)
    made = []
    for length in range(1, 300):
        k, v = keys[:, :length], values[:, :length]
        found = op(query, k, v)
        wanted = F.scaled_dot_product_attention(
            *(t.double().transpose(1, 2) for t in (query, k, v)), scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        made.append(len(op._state.plans))
    assert made[100] == made[-1]


def test_a_bad_call_is_refused_though_its_like_was_planned() -> None:
    """Sharing a plan skips no check."""
    op = GQADenseFwdOp(is_causal=True)
    query, keys = torch.randn(1, 1, 4, 16), torch.randn(1, 200, 2, 16)
    op(query, keys, keys)
    try:
        op(query, keys, keys[:, :150])
    except ValueError as error:
        assert "'v'" in str(error)
    else:
        raise AssertionError("values shorter than keys were accepted")


def test_plans_are_bounded() -> None:
    """A new size at each call must not grow the table for ever."""
    op = RMSNormFwdOp(8, 0.125)
    for rows in range(1, settings().plan_limit + 50):
        op(torch.randn(rows, 8))
    assert len(op._state.plans) == settings().plan_limit
