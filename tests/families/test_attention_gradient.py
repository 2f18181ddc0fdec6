"""The gradients of attention on the CPU against autograd of loops over queries in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.cases import workload_call, workloads_in_every_dtype
from tests.oracle import check, exact, poisoned, same_bits, strided
from tileops import CheckError
from tileops.attention import GQADenseBwdOp, GQADenseFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LIBRARY, OWN = "sdpa_gradient", "decomposition"


def tensors(batch=1, s_q=3, s_kv=5, heads=4, kv_heads=2, size=8, dtype=torch.float32):
    shapes = {
        "grad_o": (s_q, heads), "q": (s_q, heads), "k": (s_kv, kv_heads), "v": (s_kv, kv_heads),
    }  # fmt: skip
    return {n: torch.randn(batch, *shape, size).to(dtype) for n, shape in shapes.items()}


def tables(places, columns, dtype=torch.float32):
    angles = torch.arange(places)[:, None] * torch.rand(columns)[None]
    return {"rope_cos": angles.cos().to(dtype), "rope_sin": angles.sin().to(dtype)}


def test_workloads(seed):
    for _, workload in workloads_in_every_dtype("GQADenseBwdOp"):
        made = workload_call("GQADenseBwdOp", workload, seed, most=256)
        check(made.op, dict(made.inputs))


SIZES = [
    ({"s_q": 1, "s_kv": 1, "heads": 1, "kv_heads": 1, "size": 1}, OWN),
    ({"batch": 2}, OWN),
    ({"s_q": 5, "s_kv": 13, "heads": 6, "kv_heads": 1, "size": 5}, OWN),
    # From 16 keys on torch's kernel serves; the decomposition is checked beside it.
    ({"s_q": 1, "s_kv": 19, "batch": 2}, LIBRARY),
    ({"s_q": 17, "s_kv": 17, "heads": 2, "kv_heads": 1, "size": 64}, LIBRARY),
    ({"s_q": 3, "s_kv": 37, "heads": 3, "kv_heads": 1, "size": 7}, LIBRARY),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sizes", "kernel"), SIZES)
def test_sizes(sizes, kernel, causal, dtype):
    op = GQADenseBwdOp(is_causal=causal)
    check(op, tensors(**sizes, dtype=dtype))
    assert op.last_call.kernel == kernel


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"s_q": 0}, {"heads": 0, "kv_heads": 1}, {"size": 0}]
)
@pytest.mark.parametrize("s_kv", [5, 17])
def test_empty(sizes, s_kv):
    for wants_q in (True, False):
        check(GQADenseBwdOp(wants_q=wants_q), tensors(**{"s_kv": s_kv, **sizes}))


@pytest.mark.parametrize("s_q", [1, 3, 20])
@pytest.mark.parametrize(("left", "right"), [(15, -1), (17, 0), (-1, 2), (16, 1), (2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(s_q, left, right, causal):
    op = GQADenseBwdOp(is_causal=causal, window_size_left=left, window_size_right=right)
    check(op, tensors(s_q=s_q, s_kv=20, heads=2, kv_heads=1))
    assert op.last_call.kernel == (OWN if left == 2 else LIBRARY)


def test_blocks_of_queries(monkeypatch):
    from tileops.attention.kernels import gqa_dense

    monkeypatch.setattr(gqa_dense, "BLOCK", 7)
    op = GQADenseBwdOp(window_size_left=15, window_size_right=2)
    for s_q, s_kv in ((24, 40), (40, 18)):  # the first keys are hidden, the first queries see none
        check(op, tensors(s_q=s_q, s_kv=s_kv, heads=2, kv_heads=1))
        assert op.last_call.kernel == LIBRARY


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s_kv", [2, 17])
def test_a_query_that_sees_nothing_has_no_gradient(s_kv, dtype):
    hidden = 3
    op, made = (
        GQADenseBwdOp(window_size_right=0),
        tensors(s_q=s_kv + hidden, s_kv=s_kv, dtype=dtype),
    )
    for passed in ({}, {"sinks": torch.randn(4)}):
        grad_q = check(op, {**made, **passed})[0]
        assert not grad_q[:, :hidden].any()
        assert grad_q[:, hidden + 1 :].abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "params",
    [
        {"softcap": 0.5},
        {"softcap": 5.0, "is_causal": True},
        {"sm_scale": 0.3},
        {"window_size_left": 1},
    ],
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks(params, with_sinks, dtype):
    made = tensors(batch=2, s_q=4, s_kv=6, dtype=dtype)
    sinks = {"sinks": torch.randn(4)} if with_sinks else {}
    assert (check(GQADenseBwdOp(**params), {**made, **sinks})[3] is not None) == with_sinks


def test_sinks_of_all_sizes():
    made = tensors(s_q=4, s_kv=6)
    without = check(GQADenseBwdOp(), made)
    found = check(GQADenseBwdOp(), {**made, "sinks": torch.full((4,), -math.inf)})
    assert all(torch.equal(a, b) for a, b in zip(found[:3], without[:3], strict=True))
    assert not found[3].any()
    assert not any(
        g.any() for g in check(GQADenseBwdOp(), {**made, "sinks": torch.full((4,), 1e4)})
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize("rotary", [None, 6])
def test_rope(layout, rotary, dtype):
    op = GQADenseBwdOp(
        is_causal=True, pos_encoding_mode="rope", rotary_dim=rotary, rope_layout=layout
    )
    for s_q, places in ((1, 5), (3, 9), (5, 5)):
        check(op, {**tensors(s_q=s_q, dtype=dtype), **tables(places, (rotary or 8) // 2, dtype)})


NAMES = ("q", "k", "v", "sinks")


@pytest.mark.parametrize("s_kv", [5, 19])
@pytest.mark.parametrize("wants", [w for w in itertools.product((True, False), repeat=3) if any(w)])
def test_only_what_is_wanted(wants, s_kv):
    op = GQADenseBwdOp(**{f"wants_{n}": w for n, w in zip(NAMES, wants, strict=False)})
    found = check(op, tensors(s_kv=s_kv))
    assert [g is not None for g in found] == [*wants, False]
    sinks = GQADenseBwdOp(wants_q=False, wants_k=False, wants_v=False)
    assert [g is None for g in check(sinks, {**tensors(s_kv=s_kv), "sinks": torch.randn(4)})] == [
        True, True, True, False,
    ]  # fmt: skip


def test_a_gradient_is_wanted():
    op = GQADenseBwdOp(wants_q=False, wants_k=False, wants_v=False)
    with pytest.raises(CheckError, match="at least one gradient"):
        op(**tensors())


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype):
    made = tensors(s_q=2, s_kv=17, heads=2, kv_heads=1, dtype=dtype)
    op = GQADenseBwdOp(is_causal=True)
    for name in made:
        for _, view in strided(made[name]):
            check(op, {**made, name: view})
    check(op, {**made, "grad_o": torch.ones((), dtype=dtype).expand(made["grad_o"].shape)})


@pytest.mark.parametrize("keys", [4, 15, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_hidden(dtype, keys):
    for causal, window in ((False, -1), (True, -1), (True, 1)):
        op = GQADenseBwdOp(is_causal=causal, window_size_left=window)
        made = tensors(s_q=keys, s_kv=keys, heads=2, kv_heads=2, dtype=dtype)
        made["q"][0, keys // 2, 0, 0] = math.nan
        grad_q, grad_k, grad_v = op(**made)[:3]
        last = keys // 2 + 1 if causal else keys
        first = max(0, last - 2) if window == 1 else 0
        assert grad_q[0, keys // 2, 0].isnan().all()
        assert int(grad_q.isnan().sum()) == 8
        for found in (grad_k, grad_v):
            assert found[0, first:last, 0].isnan().all(), (causal, window)
            assert found[0, :, 1].isfinite().all()
        made["grad_o"][0, 0, 1] = math.nan
        assert op(**made)[0][0, 0, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_that_overflow_are_no_zeros(dtype):
    made = tensors(s_q=17, s_kv=17, dtype=dtype)
    made["q"], made["k"] = (torch.full_like(made[n], 6e4) for n in "qk")
    made["q"][0, 3], made["k"][0, 5] = math.inf, math.inf
    grad_q, *_ = GQADenseBwdOp()(**made)
    assert grad_q[0, 3].isnan().all()


@pytest.mark.parametrize("s_kv", [5, 19])
def test_the_oracle_agrees_with_torch(s_kv):
    made = tensors(s_q=s_kv, s_kv=s_kv)
    ours, _ = exact(GQADenseBwdOp(is_causal=True), made)
    leaves = [made[n].double().transpose(1, 2).requires_grad_() for n in "qkv"]
    result = torch.nn.functional.scaled_dot_product_attention(
        *leaves, is_causal=True, enable_gqa=True
    )
    theirs = torch.autograd.grad(result, leaves, made["grad_o"].double().transpose(1, 2))
    for a, b in zip(ours[:3], theirs, strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2))


# ---- through the forward -------------------------------------------------------------------------


@pytest.mark.parametrize("s_kv", [5, 19])
def test_second_derivatives(s_kv):
    made = tensors(s_q=3, s_kv=s_kv)
    made["sinks"] = torch.randn(4)
    grad_o = made.pop("grad_o")
    weights = [torch.randn_like(t) for t in made.values()]
    both = []
    op = GQADenseFwdOp(is_causal=True, softcap=5.0 if s_kv == 5 else None)
    for wide in (False, True):
        given = {n: (t.double() if wide else t.clone()).requires_grad_() for n, t in made.items()}
        if wide:
            result = exact(op, given)[0][0]
        else:
            result = op(**given)
        grad = (grad_o.double() if wide else grad_o.clone()).requires_grad_()
        leaves = tuple(given.values())
        once = torch.autograd.grad(result, leaves, grad, create_graph=True)
        total = sum((g * w).sum() for g, w in zip(once, weights, strict=True))
        both.append(torch.autograd.grad(total, (*leaves, grad)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


class Looking(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_wherever_the_caller_is():
    """In inference mode, where autograd records nothing, and below the dispatcher's autograd."""
    op, made = GQADenseBwdOp(is_causal=True), tensors(s_q=17, s_kv=17)
    wanted = op(**made)
    assert op.last_call.kernel == LIBRARY
    with torch.inference_mode():
        found = [op(**{n: t.clone() for n, t in made.items()})]
    with torch.no_grad(), poisoned():
        found.append(op(**made))
    with Looking():
        found.append(op(**made))
    with torch._C._AutoDispatchBelowAutograd():
        found.append(op._call_boundary(**made, rope_cos=None, rope_sin=None, sinks=None))
    grad_o, *inputs = made.values()
    found.append(torch.func.vjp(GQADenseFwdOp(is_causal=True), *inputs)[1](grad_o))
    for results in found:
        for ours, theirs in zip(results, wanted, strict=False):
            assert same_bits(ours, theirs)


def test_a_gradient_may_be_written():
    with torch.no_grad():
        found = GQADenseBwdOp()(**tensors(s_kv=17))
    for result in found[:3]:
        assert not result.requires_grad
        result.mul_(torch.ones((), requires_grad=True))  # which a view made under no_grad refuses


@pytest.mark.parametrize("s_kv", [5, 19])
def test_float8_has_no_gradient(s_kv):
    made = tensors(s_kv=s_kv)
    made.pop("grad_o")
    given = {n: t.to(torch.float8_e4m3fn) for n, t in made.items()}
    scales = {f"{n}_scale": torch.ones(1, 2) for n in "qkv"}
    sinks = torch.randn(4, requires_grad=True)
    result = GQADenseFwdOp(out_dtype=torch.float32)(**given, **scales, sinks=sinks)
    with pytest.raises(CheckError, match="GQADenseBwdOp: argument 'q'.*float8"):
        result.sum().backward()
