"""Faults that a review found, each as the call that showed it."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import IntEnum

import pytest
import torch
import torch.nn.functional as F

from tileops import BackendError, CheckError
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.backend import register_kernel_builder
from tileops.elementwise import AddFwdOp, MulFwdOp, SiLUFwdOp
from tileops.engine.manifest.expr import ExpressionError, parse
from tileops.engine.signature import literal
from tileops.norm import RMSNormFwdOp

X = torch.randn(4, 8)


def test_a_window_holds_while_the_keys_grow() -> None:
    op = GQADenseFwdOp(window_size_left=100)
    for length in (64, 90, 101, 102, 150, 300):
        query = torch.randn(1, 1, 4, 16)
        keys, values = torch.randn(2, 1, length, 2, 16)
        seen = [t[:, -101:].double().transpose(1, 2) for t in (keys, values)]
        wanted = F.scaled_dot_product_attention(
            query.double().transpose(1, 2), *seen, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(op(query, keys, values).double(), wanted, atol=1e-5, rtol=1e-5)
        assert op.last_call is not None
        assert op.last_call.call.spec("k").shape[1] == length


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_infinite_score_of_halves_is_nan_and_not_zero(dtype: torch.dtype) -> None:
    query = torch.full((1, 20, 1, 8), 300.0).to(dtype)
    keys = torch.randn(1, 20, 1, 8).to(dtype)
    keys[0, 3] = float("inf")
    assert GQADenseFwdOp()(query, keys, torch.ones_like(keys)).isnan().all()


def test_a_disabled_compiler_is_no_error() -> None:
    code = (
        "import torch; from tileops.norm import RMSNormFwdOp; x = torch.randn(1024, 1024);"
        "y = RMSNormFwdOp(1024, 1e-6)(x);"
        "torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (1024,), eps=1e-6))\n"
        "try: torch.compile(torch.relu, fullgraph=True)(x)\n"
        "except Exception: print('refused')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_COMPILE_DISABLE": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Since torch 2.13 a disabled compiler refuses a full graph; before, it ran it uncompiled and was silent.
    assert ("runs uncompiled from now on" in done.stderr) == ("refused" in done.stdout)


def test_what_a_foreign_kernel_returns() -> None:
    """One tensor in a tuple is that tensor; a result with a gradient, or one that should have been
    written, is refused."""
    register_kernel_builder("alone", "MulFwdOp", lambda *s, **p: lambda a, b: (a * b,))
    assert torch.equal(MulFwdOp(target="alone")(X, X), X * X)
    parameter = torch.nn.Parameter(torch.ones(8))
    register_kernel_builder("graded", "MulFwdOp", lambda *s, **p: lambda a, b: a * b * parameter)
    with pytest.raises(BackendError, match="'graded': output 'output' requires grad"):
        MulFwdOp(target="graded")(X, X)
    register_kernel_builder("lazy", "SiLUFwdOp", lambda *s, **p: lambda a: F.silu(a))
    with pytest.raises(BackendError, match="returned a new tensor instead of writing 'input'"):
        SiLUFwdOp(inplace=True, target="lazy")(X.clone())


def test_a_slot_out_of_range_writes_nothing() -> None:
    cache = torch.zeros(2, 4, 1, 2)
    new = torch.ones(2, 1, 2)
    with pytest.raises(CheckError, match="slot 99"):
        PagedKVCacheWriteFwdOp()(new, new, cache, torch.zeros_like(cache), torch.tensor([0, 99]))
    assert not cache.any()


def test_a_failed_write_counts_as_a_write() -> None:
    """Autograd must not use what a failed kernel may have half written."""

    def fail(*specs: object, **params: object) -> object:
        def run(x: torch.Tensor) -> None:
            x.data[0] = 7.0
            raise RuntimeError("half-way")

        return run

    register_kernel_builder("halfway", "SiLUFwdOp", fail)
    weight = torch.ones(4, 8, requires_grad=True)
    saved = X.clone()
    product = weight * saved
    with pytest.raises(RuntimeError, match="half-way"):
        SiLUFwdOp(inplace=True, target="halfway")(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("alpha", [2**70, 10**300, 1e308])
def test_an_alpha_that_does_not_fit_is_refused(alpha: float) -> None:
    with pytest.raises(CheckError, match="alpha"):
        AddFwdOp(alpha=alpha)(X, X)


def test_numbers_that_python_would_not_print() -> None:
    with pytest.raises(CheckError, match="normalized_shape"):
        RMSNormFwdOp(1 << 20000)


def test_a_subclass_of_a_number_has_no_literal() -> None:
    kind = IntEnum("kind", ["A"])
    with pytest.raises(literal.NoLiteralError):
        literal.write(kind.A)


def test_a_power_tower_is_outside_the_language() -> None:
    for text in ("9**9**9", "2**N", "2**1000"):
        with pytest.raises(ExpressionError, match="constant exponent"):
            parse(text)
    assert parse("2**63").evaluate({}) == 2**63
