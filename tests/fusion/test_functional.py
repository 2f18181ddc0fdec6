"""Code that calls ``torch.func`` inside compiled code: right, and rewritten only outside of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.rewriting import rewritten

TRANSFORMED = {
    "vmap": lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x),
    "vmap of an epilogue": lambda x, w: torch.vmap(lambda row: F.gelu(F.linear(row, w)) * 2)(x),
    "vmap of a norm": lambda x, w: torch.vmap(lambda row: F.rms_norm(row, (8,), w[0], 1e-2))(x),
    "grad": lambda x, w: torch.func.grad(lambda x: F.gelu(F.linear(x, w)).sum())(x),
    "jvp": lambda x, w: torch.func.jvp(lambda x: F.silu(x[..., :4]) * x[..., 4:], (x,), (x,)),
    "jacrev": lambda x, w: torch.func.jacrev(lambda row: F.linear(row, w))(x[0]),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_is_transformed_stays(name):
    function = TRANSFORMED[name]
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    run, seen = rewritten(lambda x, w: (function(x, w), F.rms_norm(x, (8,), w[0], 1e-2)), "always")
    torch.testing.assert_close(run(x, w)[0], function(x, w))
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(8,), eps=0.01)"]
