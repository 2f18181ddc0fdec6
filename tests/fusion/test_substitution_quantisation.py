"""Dynamic quantisation in plain PyTorch becomes ops of the quantization family.

What it becomes is held to the ops' meaning exactly, and to what was written but for a number at the middle
of two, which a scale's inverse may round to the other one.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.oracle_quantization import by_rows, together
from tests.rewriting import rewritten
from tests.substituting import ONLY
from tileops.fusion import backend, cost

INT8, FP8 = torch.int8, torch.float8_e4m3fn
TOP = {INT8: 127.0, FP8: 448.0}


def rounds(quotient, dtype):
    quotient = quotient.clamp(-TOP[dtype], TOP[dtype])
    return (quotient.round() if dtype is INT8 else quotient).to(dtype)


def divided(x, dtype):
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / TOP[dtype]
    return rounds(wide / scale, dtype), scale


def of_the_type_it_has(x, dtype):
    scale = x.abs().amax(-1).float().clamp_min(1e-10) / TOP[dtype]
    return rounds(x / scale.unsqueeze(-1), dtype), scale


def inverse(x, dtype):
    wide = x.float()
    largest = torch.clamp(torch.max(torch.abs(wide), dim=-1, keepdim=True)[0], 1e-10)
    return rounds(wide * (TOP[dtype] / largest), dtype), largest / TOP[dtype]


def reciprocal(x, dtype):
    wide = x.float()
    scale = wide.abs().max(-1).values.clamp(min=1e-10).mul(1 / TOP[dtype])
    return rounds(scale.reciprocal()[..., None] * wide, dtype), scale


def least_scale(x, dtype):
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / TOP[dtype]).clip(min=1e-10 / TOP[dtype])
    return rounds(torch.true_divide(wide, scale), dtype), scale.squeeze(-1)


def without_clamp(x, dtype):
    wide = x.to(torch.float32)
    scale = torch.amax(wide.abs(), -1, True) / TOP[dtype]
    quotient = torch.clamp(wide / scale, -TOP[dtype] - 1, TOP[dtype] + 1)
    return (torch.round(quotient) if dtype is INT8 else quotient).type(dtype), scale


def unbounded(x, dtype):
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-10) / TOP[dtype]
    quotient = wide / scale
    return (torch.round(quotient) if dtype is INT8 else quotient).to(dtype), scale * 1.0


SPELLINGS = [
    divided, of_the_type_it_has, inverse, reciprocal, least_scale, without_clamp, unbounded,
]  # fmt: skip


def numbers(tensor):
    return tensor.view(torch.int8) if tensor.dtype is FP8 else tensor


def held(function, x, meaning, name, eps=1e-10):
    """As a node and inlined: the ops' meaning exactly, and nearly what was written."""
    wanted, plain = meaning(x), function(x)
    for passes in (ONLY, None):
        run, seen = rewritten(function, "always", *([passes] if passes else []))
        result = run(x.clone())
        (call,) = seen.substituted()
        assert call.startswith(f"{name}(eps=")
        assert float(call[len(name) + 5 : -1]) == pytest.approx(eps, rel=1e-12)
        for given, exact, written in zip(result, wanted, plain, strict=True):
            assert given.dtype == written.dtype
            assert given.stride() == written.stride()
            exact = exact.to(given.dtype).view(given.shape)
            assert torch.equal(numbers(given), numbers(exact))
            if given.dtype is torch.float32:
                torch.testing.assert_close(given, written, rtol=1e-6, atol=0)
            else:
                assert ((numbers(given).int() - numbers(written).int()).abs() <= 1).all()


def rows_of(x, dtype):
    return by_rows(x, TOP[dtype], 1e-10)[0]


ROWS = {INT8: "INT8QuantPerChannelFwdOp", FP8: "FP8QuantPerTokenGroupFwdOp"}


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling, dtype):
    given = torch.float32 if spelling in (inverse, unbounded) else torch.bfloat16
    eps = 0.0 if spelling is without_clamp else 1e-10
    for shape in ((5, 8), (2, 3, 6)):
        x = (torch.randn(shape) * 3).to(given)
        held(lambda x: spelling(x, dtype), x, lambda x: rows_of(x, dtype), ROWS[dtype], eps)


def test_the_numbers_alone():
    """The scale stays within."""
    x = torch.randn(4, 8)
    held(lambda x: divided(x, INT8)[:1], x, lambda x: rows_of(x, INT8)[:1], ROWS[INT8])


def test_groups_are_rows_of_a_view():
    def function(x):
        q, scale = divided(x.view(4, 3, 8), INT8)
        return q.view(4, 24), scale.view(4, 3)

    x = torch.randn(4, 24)
    held(function, x, lambda x: rows_of(x.view(4, 3, 8), INT8), ROWS[INT8])


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4)])
def test_one_scale_for_all(shape):
    def function(x):
        scale = x.abs().max().clamp(min=1e-10) / 127
        return torch.round(x / scale).clamp(-128, 127).to(INT8), scale

    x = torch.randn(shape)
    name = "INT8QuantPerTensorFwdOp"
    held(function, x, lambda x: together(x, 127, 1e-10), name)
    # Where the scale stays within, nothing else tells that it is no row's.
    held(lambda x: function(x)[:1], x, lambda x: together(x, 127, 1e-10)[:1], name)


def test_the_scale_with_and_without_its_last_dim():
    def function(x):
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-10)
        return torch.round(x * (127.0 / largest)).to(INT8), largest / 127, (largest / 127)[..., 0]

    x = torch.randn(4, 8)
    q, scale = rows_of(x, INT8)
    held(function, x, lambda x: (q, scale, scale), ROWS[INT8])


def test_what_comes_before_and_after():
    """A product of integers behind it, with both scales; the op takes no other step."""
    w, w_scale = torch.randint(-127, 128, (8, 5)).float(), torch.rand(5)

    def function(x):
        q, scale = divided(F.silu(x), INT8)
        return (q.float() @ w) * scale * w_scale

    x = torch.randn(4, 8)
    run, seen = rewritten(function, "always", ONLY)
    q, scale = rows_of(F.silu(x), INT8)
    wanted = (q @ w.double()) * scale[:, None] * w_scale.double()
    torch.testing.assert_close(run(x).double(), wanted, rtol=1e-6, atol=1e-6)
    assert seen.substituted() == ["INT8QuantPerChannelFwdOp(eps=1e-10)"]


def test_rows_of_zeros_infinity_and_nan():
    x = torch.randn(4, 8)
    x[0], x[1, 2], x[2, 3] = 0.0, torch.inf, torch.nan
    for spelling, dtype in ((divided, INT8), (divided, FP8), (without_clamp, FP8)):
        run, seen = rewritten(lambda x: spelling(x, dtype), "always", ONLY)  # noqa: B023
        for given, plain in zip(run(x), spelling(x, dtype), strict=True):
            torch.testing.assert_close(given.float(), plain.float(), rtol=0, atol=0, equal_nan=True)
        assert len(seen.substituted()) == 1


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_graph_serves_all_sizes(dynamic):
    def function(x):  # of literal numbers: others would be symbols too
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
        return torch.round(x / scale).clamp(-128, 127).to(INT8), scale

    run, seen = rewritten(function, "always", ONLY, dynamic=dynamic)
    for rows in (3, 4, 7):
        x = torch.randn(rows, 2, 8)
        for given, exact in zip(run(x), rows_of(x, INT8), strict=True):
            assert torch.equal(given, exact.to(given.dtype).view(given.shape))
    assert len(seen.graphs) == (1 if dynamic else 2)
    assert len(seen.substituted()) == len(seen.graphs)


# ---- where it is not the op ---------------------------------------------------------------------


def quantised(x, scale, low=-128, high=127):
    return torch.round(x / scale).clamp(low, high).to(INT8), scale


def largest(x, dim=-1):
    return x.abs().amax(dim, keepdim=True)


def written(x):
    x = x + 0
    scale = largest(x) / 127
    x.mul_(2)
    return quantised(x, scale)


def rounded_scale(x):
    return quantised(x, (largest(x) / 127).bfloat16().float())


NEAR_MISSES = {
    "eps a tensor": (lambda x: quantised(x, torch.maximum(largest(x), x[:1, :1].abs()) / 127),
                     "eps is abs_2, not a number that is known"),
    "eps added": (lambda x: quantised(x, largest(x) / 127 + 1e-6), "stands where the op has"),
    "other dim": (lambda x: quantised(x, largest(x, 0) / 127), "the amax is over dims (0,), not over the last"),
    "other levels": (lambda x: quantised(x, largest(x) / 128), "times what the op computes"),
    "bounded closer": (lambda x: quantised(x, largest(x) / 127, -7, 7), "is bounded closer than by -127 and 127"),
    "bounded below": (lambda x: quantised(x, largest(x) / 127, -100, None), "is bounded closer than by -127 and 127"),
    "bounded above": (lambda x: quantised(x, largest(x) / 127, None, 100), "is bounded closer than by -127 and 127"),
    "half a byte": (lambda x: quantised(x, largest(x) / 7, -8, 7), "is bounded closer than by -127 and 127"),
    "bounds a tensor": (lambda x: quantised(x, largest(x) / 127, x.amin(), x.amax()), "are not numbers that are known"),
    "decimals": (lambda x: (torch.round(x / (largest(x) / 127), decimals=1).to(INT8), x), "decimals of round is 1, not 0"),
    "in halves": (lambda x: quantised(x.half(), largest(x.half()) / 127), "is float16 where the op computes in float32"),
    "a rounded scale": (rounded_scale, "is bfloat16 where the op computes in float32"),
    "other values": (lambda x: quantised(x + 1, largest(x) / 127), "in one place and"),
    "aligned otherwise": (lambda x: quantised(x, x.abs().amax(-1) / 127), "meets other dims"),
    "written": (written, "w is written in between"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_and_say_why(name):
    function, reason = NEAR_MISSES[name]
    x = torch.randn(8, 8)
    run, seen = rewritten(function, "always", ONLY)
    for given, plain in zip(run(x), function(x), strict=True):
        assert torch.equal(given, plain)
    assert not seen.substituted()
    ((op, found),) = seen.near_misses().items()
    assert op.startswith("INT8Quant")
    assert reason in found, found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x / (largest(x) / 127)).to(INT8),  # towards 0
        lambda x: torch.round(x / (x.amax(-1, keepdim=True) / 127)).to(INT8),
        lambda x: torch.round(x / (largest(x) / 127)),
        lambda x: largest(x) * 2,
        lambda x: torch.round(x / (torch.max(x.abs(), x * 2) / 127)).to(INT8),
    ],
)
def test_what_is_something_else_stays(function):
    x = torch.randn(8, 8) + 0.1
    run, seen = rewritten(function, "always", ONLY)
    assert torch.equal(run(x), function(x))
    assert not seen.substituted()


def test_a_gradient_of_the_scale_keeps_it():
    def function(x):
        q, scale = divided(x, INT8)
        return q.float() * scale

    x = torch.randn(4, 8, requires_grad=True)
    run, seen = rewritten(function, "always", ONLY)
    torch.testing.assert_close(run(x), function(x))
    assert seen.near_misses() == {
        "INT8QuantPerChannelFwdOp": "the op has no gradient of scale, of which one is asked"
    }
    run, seen = rewritten(lambda x: divided(x, INT8)[0], "always", ONLY)
    assert torch.equal(run(x), divided(x, INT8)[0])
    assert len(seen.substituted()) == 1
    with torch.no_grad():
        run, seen = rewritten(function, "always", ONLY)
        run(x)
    assert len(seen.substituted()) == 1


def test_a_norm_of_float8():
    """Which no dtype is wider than for ``torch.promote_types``."""

    def function(x, w):
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    x, w = torch.randn(4, 8).to(FP8), torch.randn(8)
    run, seen = rewritten(function, "always", ONLY)
    torch.testing.assert_close(run(x, w), function(x, w))
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(8,), eps=1e-05)"]


# ---- whether it is worth it ---------------------------------------------------------------------


def test_the_rule(monkeypatch):
    x = torch.randn(4, 8)
    run, seen = rewritten(lambda x: divided(x, INT8), passes=ONLY)
    run(x)
    assert seen.declined() == {
        "INT8QuantPerChannelFwdOp": "on cpu its own kernel is no faster than Inductor's code"
    }
    monkeypatch.setitem(cost.ADVANTAGE, "cpu", {"reduction": 0.1})
    run, seen = rewritten(lambda x: divided(x, INT8), passes=ONLY)
    run(x)
    assert seen.substituted() == ["INT8QuantPerChannelFwdOp(eps=1e-10)"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_through_inductor(dtype):
    torch._dynamo.reset()
    run = torch.compile(
        lambda x: divided(F.silu(x), dtype),
        backend=backend,
        fullgraph=True,
        options={"tileops.fusion": "always"},
    )
    x = torch.randn(64, 128)
    q, scale = run(x)
    wanted, its = divided(F.silu(x), dtype)
    torch.testing.assert_close(scale, its, rtol=1e-5, atol=0)
    assert ((numbers(q).int() - numbers(wanted).int()).abs() <= 1).all()
