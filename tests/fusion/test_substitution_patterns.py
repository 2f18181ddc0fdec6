"""What each op is matched by; how matching works is in ``test_substitution.py``."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tileops
from tests.fusion.test_substitution import EPS, llama, rms
from tests.rewriting import rewritten
from tests.substituting import ONLY, grads_agree, held
from tileops.backend import register_kernel_builder

DTYPES = [torch.float32, torch.bfloat16]


def near_miss(function, *inputs):
    """The reasons for which nothing is matched."""
    run, seen = rewritten(function, "always", ONLY)
    result, expected = run(*inputs), function(*inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert not seen.substituted()
    return seen.near_misses()


# ---- layer norm ---------------------------------------------------------------------------------


def standard(x, w=None, b=None, eps=EPS):
    x = x.double()
    apart = x - x.mean(-1, keepdim=True)
    y = apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if w is None else y * w.double()
    return y if b is None else y + b.double()


def written_out(x, w, b):
    wide = x.float()
    u = wide.mean(-1, keepdim=True)
    s = (wide - u).pow(2).mean(-1, keepdim=True)
    return (b + w * ((wide - u) / torch.sqrt(s + EPS))).to(x.dtype)


def by_var(x, w, b):
    wide = x.float()
    y = (wide - wide.mean(-1, True)) * torch.rsqrt(wide.var(-1, keepdim=True, unbiased=False) + EPS)
    return y.to(x.dtype) * w + b


LAYER_NORMS = {
    "torch": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b, EPS),
    "weight after": lambda x, w, b: F.layer_norm(x, (x.shape[-1],), eps=EPS) * w + b,
    "written out": written_out,
    "by var": by_var,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norm(name, dtype, seed):
    x, w, b = torch.randn(3, 5, 17).to(dtype), torch.randn(17).to(dtype), torch.randn(17).to(dtype)
    seen = held(LAYER_NORMS[name], (x, w, b), standard, "reduction")
    assert seen.substituted() == ["LayerNormFwdOp(normalized_shape=(17,), eps=1e-06)"], seen.report


def test_layer_norm_without_weight_or_bias_and_its_near_misses():
    x, w = torch.randn(4, 8), torch.randn(8)
    for function, meaning in (
        (lambda x, w: F.layer_norm(x, (8,), w, None, EPS), lambda x, w: standard(x, w)),
        (lambda x, w: F.layer_norm(x, (8,), None, w, EPS), lambda x, w: standard(x, None, w)),
        (lambda x, w: F.layer_norm(x, (8,), None, None, EPS), lambda x, w: standard(x)),
    ):
        assert len(held(function, (x, w), meaning, "reduction").substituted()) == 1
    grads_agree(LAYER_NORMS["torch"], (x, w, w * 2), standard)

    def unbiased(x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS)

    run, seen = rewritten(unbiased, "always", ONLY)
    torch.testing.assert_close(run(x), unbiased(x))
    assert not seen.substituted()
    assert "bfloat16 where the op computes in float32" in near_miss(
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + EPS),
        x.bfloat16(),
    )["LayerNormFwdOp"]  # fmt: skip


# ---- residual addition and norm -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", ["llama", "torch", "layer_norm"])
def test_residual_addition_and_norm(inner, dtype, seed):
    """The rounded sum is normalised and given back, also to who reads it before the norm is done."""
    x, r, w = (torch.randn(s).to(dtype) for s in ((3, 5, 16), (3, 5, 16), (16,)))
    norm = {"llama": llama, "torch": lambda x, w: F.rms_norm(x, (16,), w, EPS),
            "layer_norm": lambda x, w: F.layer_norm(x, (16,), w, w, EPS)}[inner]  # fmt: skip

    def function(x, r, w):
        total = r + x
        early = total.abs()
        return norm(total, w), early, total

    def meaning(x, r, w):
        total = (x + r).double() if x.dtype is not torch.float64 else x + r
        meant = standard(total, w, w) if inner == "layer_norm" else rms(total, w)
        return meant, total.abs(), total

    seen = held(function, (x, r, w), meaning, "reduction")
    name = "FusedAddLayerNormFwdOp" if inner == "layer_norm" else "FusedAddRMSNormFwdOp"
    assert seen.substituted() == [f"{name}(eps=1e-06)"], seen.report
    grads_agree(function, (x, r, w), meaning)


def test_a_sum_that_nobody_else_reads_is_left_to_inductor():
    x, w = torch.randn(4, 16), torch.randn(16)
    seen = held(
        lambda x, w: llama(x + 1 + x, w),
        (x, w),
        lambda x, w: rms(2 * x.double() + 1, w),
        "reduction",
    )
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(16,), eps=1e-06)"]


def test_a_sum_in_float32_is_normalised_as_it_is():
    """Not the fused op, which rounds the sum."""

    def function(x, r, w):
        total = x.float() + r.float()
        y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
        return (y * w).bfloat16(), total.bfloat16()

    x, r, w = (torch.randn(s).bfloat16() for s in ((4, 16), (4, 16), (16,)))
    run, seen = rewritten(function, "always", ONLY)
    for given, wanted in zip(run(x, r, w), function(x, r, w), strict=True):
        torch.testing.assert_close(given, wanted)
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(16,), eps=1e-06)"]


def test_a_sum_that_is_written_before_the_norm_is_none():
    def function(x, r, w):
        total = x + r
        squares = total.pow(2)
        total.mul_(2)
        return total * torch.rsqrt(squares.mean(-1, keepdim=True) + EPS) * w, total

    x, w = torch.randn(4, 16), torch.randn(16)
    run, seen = rewritten(function, "always", ONLY)
    for given, wanted in zip(run(x, x, w), function(x, x, w), strict=True):
        torch.testing.assert_close(given, wanted)
    assert not seen.substituted()


def test_a_weight_that_is_made_after_the_sum_leaves_the_norm_alone_to_match():
    def function(x, r, w):
        total = x + r
        return F.rms_norm(total, (16,), w * total.mean(), EPS), total

    x, r, w = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    run, seen = rewritten(function, "always", ONLY)
    for given, wanted in zip(run(x, r, w), function(x, r, w), strict=True):
        torch.testing.assert_close(given, wanted)
    assert seen.substituted() == ["RMSNormFwdOp(normalized_shape=(16,), eps=1e-06)"]


# ---- gated activations --------------------------------------------------------------------------


def tanh_gelu(x):
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


GATES = {
    "silu": (lambda g, u: F.silu(g) * u, "SiLUAndMulFwdOp()"),
    "sigmoid": (lambda g, u: u * (torch.sigmoid(g) * g), "SiLUAndMulFwdOp()"),
    "module": (lambda g, u: torch.nn.SiLU()(g) * u, "SiLUAndMulFwdOp()"),
    "written out": (lambda g, u: g / (1 + torch.exp(-g)) * u, "SiLUAndMulFwdOp()"),
    "gelu": (lambda g, u: F.gelu(g) * u, "GELUAndMulFwdOp(approximate='none')"),
    "gelu tanh": (lambda g, u: u * F.gelu(g, approximate="tanh"), "GELUAndMulFwdOp(approximate='tanh')"),
    "gelu written out": (lambda g, u: g * 0.5 * (1.0 + torch.erf(g / math.sqrt(2.0))) * u,
                         "GELUAndMulFwdOp(approximate='none')"),
    "tanh written out": (lambda g, u: tanh_gelu(g) * u, "GELUAndMulFwdOp(approximate='tanh')"),
}  # fmt: skip
CUTS = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: torch.split(x, x.shape[-1] // 2, dim=-1),
    "slices": lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
    "all slices": lambda x: (x[:, :, :6], x[:, :, 6:12]),
    "narrow": lambda x: (x.narrow(-1, 0, 6), x.narrow(2, 6, 6)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATES)
def test_gated_activations(name, dtype, seed):
    gate, op = GATES[name]
    x = torch.randn(3, 5, 12).to(dtype)
    if "out" in name:  # what has sums inside would be rounded in between
        dtype, x = torch.float32, x.float()
    seen = held(lambda x: gate(*x.chunk(2, -1)), (x,),
                lambda x: gate(*x.double().chunk(2, -1)), "pointwise")  # fmt: skip
    assert seen.substituted() == [op], seen.report


@pytest.mark.parametrize("cut", CUTS)
def test_halves(cut):
    x = torch.randn(3, 5, 12)
    seen = held(lambda x: F.silu(CUTS[cut](x)[0]) * CUTS[cut](x)[1], (x,),
                lambda x: F.silu(x.double()[..., :6]) * x.double()[..., 6:], "pointwise")  # fmt: skip
    assert seen.substituted() == ["SiLUAndMulFwdOp()"]
    grads_agree(lambda x: F.silu(CUTS[cut](x)[0]) * CUTS[cut](x)[1], (x,),
                lambda x: F.silu(x[..., :6]) * x[..., 6:])  # fmt: skip


def test_gates_that_are_none():
    x, y = torch.randn(3, 12), torch.randn(3, 12)
    reasons = [
        near_miss(lambda x, y: F.silu(x) * y, x, y),
        near_miss(lambda x, y: F.silu(x[..., 6:]) * x[..., :6], x, y),
        near_miss(lambda x, y: F.silu(x[..., :6]) * y[..., 6:], x, y),
        near_miss(lambda x, y: F.silu(x[..., :4]) * x[..., 4:8], x, y),
        near_miss(lambda x, y: F.silu(x[..., ::2]) * x[..., 1::2], x, y),
        near_miss(lambda x, y: F.silu(x[..., :6]) * x[..., 3:9], x, y),
    ]
    expected = ["l_x_ is not the first half", "is not the first half", "input is l_x_ in one place and l_y_",
                "is not the first half", "is not the first half", "half of input's last dim"]  # fmt: skip
    for found, reason in zip(reasons, expected, strict=True):
        assert reason in found["SiLUAndMulFwdOp"], found
    assert near_miss(lambda x, y: F.silu(x) + y, x, y) == {}
    assert "is bfloat16 where the op computes in float32" in near_miss(
        lambda x: tanh_gelu(x[..., :6]) * x[..., 6:], x.bfloat16()
    )["GELUAndMulFwdOp"]  # fmt: skip


# ---- attention ----------------------------------------------------------------------------------


def attention(q, k, v, scale=None, causal=False):
    """The meaning, in float64; heads before positions."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.softmax(scores, -1) @ v


def hf_eager(q, k, v):
    """As ``transformers`` writes it, without a mask."""
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v)


GPT = {
    "hf": hf_eager,
    "divided": lambda q, k, v: ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v,
    "query first": lambda q, k, v: torch.softmax(q * q.shape[-1] ** -0.5 @ k.permute(0, 1, 3, 2), dim=3) @ v,
    "both sides": lambda q, k, v: (
        (q * q.shape[-1] ** -0.25) @ (k / q.shape[-1] ** 0.25).transpose(-2, -1)
    ).softmax(dim=-1) @ v,
    "sdpa": F.scaled_dot_product_attention,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GPT)
def test_attention(name, dtype, seed):
    q, k, v = (torch.randn(2, 3, s, 16).to(dtype) for s in (20, 33, 33))
    seen = held(GPT[name], (q, k, v), attention, "template")
    (op,) = seen.substituted()
    assert op.startswith("GQADenseFwdOp("), seen.report


def test_causal_attention_over_as_many_keys_and_grouped_heads():
    q, k = torch.randn(2, 6, 20, 16), torch.randn(2, 2, 20, 16)

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    seen = held(function, (q, k, k * 2),
                lambda q, k, v: attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), 0.3, True),
                "template")  # fmt: skip
    (op,) = seen.substituted()
    assert "is_causal=True" in op
    assert "sm_scale=0.3" in op
    grads_agree(function, (q, k, k * 2), lambda q, k, v: attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), 0.3, True))  # fmt: skip
    assert "from the first key" in near_miss(
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        q, torch.randn(2, 6, 21, 16),
    )["GQADenseFwdOp"]  # fmt: skip


def test_attention_that_is_none():
    q, mask = torch.randn(2, 3, 20, 16), torch.randn(20, 20)
    found = [
        near_miss(lambda q, m: torch.softmax(q @ q.mT / 4 + m, -1) @ q, q, mask),
        near_miss(lambda q, m: torch.softmax(q @ q.mT / 4, -2) @ q, q, mask),
        near_miss(lambda q, m: torch.softmax(torch.tanh(q @ q.mT), -1) @ q, q, mask),
        near_miss(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), q, mask),
        near_miss(lambda q, m: torch.softmax(q[0] @ q[0].mT / 4, -1) @ q[0], q, mask),
    ]
    expected = ["l_m_ is a mask, and the graph does not tell", "dim of softmax is -2, not -1", "tanh stands where",
                "l_m_ is a mask, and the graph does not tell", "has 3 dims, not 4"]  # fmt: skip
    for reasons, reason in zip(found, expected, strict=True):
        assert reason in reasons["GQADenseFwdOp"], reasons
    assert near_miss(lambda q, m: torch.softmax(q, -1) * 2, q, mask) == {}

    def trained(q, m):
        return F.dropout(torch.softmax(q @ q.mT, -1), 0.5) @ q

    run, seen = rewritten(trained, "always", ONLY)
    run(q, mask)
    assert not seen.substituted()


def test_attention_is_left_to_inductor_unless_a_target_serves_it():
    """Which puts there what the op's kernels call."""
    q, k = torch.randn(1, 2, 64, 16), torch.randn(1, 2, 64, 16)
    for function, reason in (
        (hf_eager, "Inductor's code is faster for fewer than"),
        (F.scaled_dot_product_attention, "Inductor puts there itself"),
    ):
        run, seen = rewritten(function)
        torch.testing.assert_close(run(q, k, k), function(q, k, k))
        assert reason in seen.declined()["GQADenseFwdOp"]

    def build(*specs, **params):
        return lambda q, *rest: torch.full_like(q, 7.0)

    register_kernel_builder("attention_test", "GQADenseFwdOp", build)
    with tileops.use_target("attention_test"):
        run, seen = rewritten(hf_eager)
        assert (run(q, k, k) == 7).all()
