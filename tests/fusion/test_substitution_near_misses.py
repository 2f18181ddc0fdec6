"""Where plain PyTorch is nearly an op and stays, by the example of RMSNorm; what becomes one is in
``test_substitution.py``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.fusion.test_substitution import EPS, llama
from tests.rewriting import rewritten
from tests.substituting import ONLY


def written_x(x, w):
    x = x + 0
    s = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    x.add_(1)
    return x * s


def written_square(x, w):
    square = x * x
    total = square.mean(-1, keepdim=True)
    square.mul_(2)
    return x * torch.rsqrt(total + EPS), square


def twice_the_same_step_of_other_values(x, w):
    y = x + 0
    a = y + 1
    y.mul_(2)
    return (y + 1) * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + EPS)


def half_norm(wide, w):
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w).half()


def cast_then_written(x, w):
    x = x.half()
    wide = x.float()
    x.add_(1)
    return half_norm(wide, w.half())


def written_cast(x, w):
    wide = x.half().float()
    wide.mul_(wide)
    return half_norm(wide, w.half())


def weight_cast_then_written(x, w):
    w = w.half()
    wide = w.float()
    w.zero_()
    return half_norm(x.half().float(), wide)


def cast_before_and_after(x, w):
    x = x.half()
    total = x.float().pow(2).mean(-1, keepdim=True)
    x.add_(1)
    return x.float() * torch.rsqrt(total + EPS)


def no_grad_inside(x, w):
    with torch.no_grad():
        s = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * s


def by(statistic):
    return lambda x, w: x * torch.rsqrt(statistic(x, w))


NEAR_MISSES = {
    "eps a tensor": (by(lambda x, w: x.pow(2).mean(-1, keepdim=True) + w[0].abs()), "eps is abs_1, not a number"),
    "other dim": (by(lambda x, w: x.pow(2).mean(0, keepdim=True) + EPS), "over dims (0,), not over the last"),
    "aligned otherwise": (by(lambda x, w: x.pow(2).mean(-1) + EPS), "meets other dims"),
    "other tensor": (by(lambda x, w: w.pow(2).mean(-1, keepdim=True) + EPS), "x is g_w_ in one place"),
    "rounded": (lambda x, w: x.bfloat16() * torch.rsqrt(x.bfloat16().pow(2).mean(-1, keepdim=True) + EPS),
                "is bfloat16 where the op computes in float32"),
    "rounded inside": (lambda x, w: x.half() * torch.rsqrt(x.half().float().pow(2).mean(-1, keepdim=True) + EPS).half(),
                       "is float16 where the op computes in float32"),
    "other value": (lambda x, w: x.bfloat16() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).bfloat16(),
                    "in one place"),
    "scaled": (lambda x, w: 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), "it is 2 times"),
    "strides": (lambda x, w: x.t() * torch.rsqrt(x.t().pow(2).mean(-1, keepdim=True) + EPS), "strides"),
    "written": (written_x, "x is written in between"),
    "written step": (written_square, "square is written in between"),
    "written under a step": (twice_the_same_step_of_other_values, "x is a in one place and add_2"),
    "cast before and after": (cast_before_and_after, "x is x in one place and"),
    "no_grad": (no_grad_inside, "under torch.no_grad"),
    "detached": (by(lambda x, w: x.detach().pow(2).mean(-1, keepdim=True) + EPS), "x is detach in one place"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_and_say_why(name):
    function, reason = NEAR_MISSES[name]
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8)
    run, seen = rewritten(lambda x: function(x, w), "always", ONLY)
    result, expected = run(x), function(x, w)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not seen.substituted()
    ((op, found),) = seen.near_misses().items()
    assert op == "RMSNormFwdOp"
    assert reason.replace("g_w_", "") in found.replace("l_w_", "").replace("g_w_", ""), found


def norm_of(x):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


SQUARES = {
    "weight": lambda x, w: x * norm_of(x) * w[:, None],
    "weight, expanded": lambda x, w: x * norm_of(x) * w[:, None].expand(8, 8),
    "bias": lambda x, w: F.layer_norm(x, (8,), w) + w[:, None],
    "statistic": lambda x, w: x * torch.rsqrt(x.square().mean(-1) + EPS).expand(8, 8) * w,
    "mean": lambda x, w: x * torch.rsqrt(x.square().mean(-1).expand_as(x) + EPS) * w,
}


@pytest.mark.parametrize("name", SQUARES)
def test_columns_of_a_square_are_no_rows(name):
    x, w = torch.randn(8, 8), torch.randn(8)
    run, _ = rewritten(SQUARES[name], "always", ONLY)
    torch.testing.assert_close(run(x, w), SQUARES[name](x, w))


def test_a_long_chain_of_products_is_left():
    def function(x, w):
        for _ in range(600):
            x = x * w
        return F.linear(x, w[None])

    x, w = torch.randn(8, 8), torch.rand(8)
    run, seen = rewritten(function, "always", ONLY)
    torch.testing.assert_close(run(x, w), function(x, w))
    assert not seen.substituted()


def cast_alone(x, w):
    with torch.no_grad():
        a = x.float()
    return (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w


def weight_of_one_row(x, w):
    with torch.no_grad():
        w = w.unsqueeze(0)
    a = x.float()
    return (a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w


@pytest.mark.parametrize("function", [cast_alone, weight_of_one_row])
def test_a_gradient_that_stops_at_a_cast_or_view_is_none(function):
    given = [torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((8, 8), (8,))]
    run, _ = rewritten(function, "always", ONLY)
    run(*given).sum().backward()
    found = [t.grad is not None for t in given]
    assert found == ([False, True] if function is cast_alone else [True, False])


@pytest.mark.parametrize("function", [cast_then_written, written_cast, weight_cast_then_written])
def test_what_was_cast_and_then_written_is_read_after_the_cast(function):
    """The op in float32, of what the casts gave; not in float16, of what stands there now."""
    x, w = torch.randn(8, 8), torch.randn(8)
    run, seen = rewritten(lambda x: function(x, w), "always", ONLY)
    torch.testing.assert_close(run(x), function(x, w))
    assert len(seen.substituted()) == 1


def test_autocast_and_a_loss_are_none():
    w = torch.randn(8)

    def under(x):
        with torch.autocast("cpu", torch.bfloat16):
            return llama(x, w)

    run, seen = rewritten(under, "always", ONLY)
    run(torch.randn(4, 8))
    assert seen.near_misses() == {"RMSNormFwdOp": "it is called under torch.autocast"}
    run, seen = rewritten(lambda x: x.pow(2).mean() + 1 + x.abs().pow(3).mean(-1), "always", ONLY)
    run(torch.randn(4, 8))
    assert str(seen.report) == "nothing to rewrite"
