"""The product with an epilogue and its gradient, on the CPU, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cases import workload_call, workloads_in_every_dtype
from tests.oracle import check, exact, strided
from tileops import CheckError
from tileops.backend.tolerances import compare
from tileops.gemm import GEMMEpilogueBwdOp, GEMMEpilogueFwdOp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]


def operands(m, n, k, dtype, bias=True, residual=True, trans_a=False, trans_b=True):
    return {
        "a": torch.randn((k, m) if trans_a else (m, k)).to(dtype),
        "b": torch.randn((n, k) if trans_b else (k, n)).to(dtype),
        "bias": torch.randn(n).to(dtype) if bias else None,
        "residual": torch.randn(m, n).to(dtype) if residual else None,
    }


@pytest.mark.parametrize("name", ["GEMMEpilogueFwdOp", "GEMMEpilogueBwdOp"])
def test_workloads(name, seed):
    for _, workload in workloads_in_every_dtype(name):
        made = workload_call(name, workload, seed)
        check(made.op, dict(made.inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_part_of_the_epilogue(activation, dtype):
    for bias, residual, scale in itertools.product((True, False), (True, False), (1.0, -0.75)):
        keeps = activation is not None and bias
        op = GEMMEpilogueFwdOp(activation=activation, scale=scale, keeps_preactivation=keeps)
        check(op, operands(7, 11, 5, dtype, bias, residual))


@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (37, 41, 43), (0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)]
)
def test_sizes(m, n, k, trans_a, trans_b):
    for dtype in (torch.bfloat16, torch.float32):
        made = operands(m, n, k, dtype, True, True, trans_a, trans_b)
        check(GEMMEpilogueFwdOp(trans_a, trans_b, activation="gelu", scale=0.5), made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_result_is_rounded_once_to_its_dtype(dtype, out_dtype):
    op = GEMMEpilogueFwdOp(activation="silu", out_dtype=out_dtype)
    assert check(op, operands(5, 7, 33, dtype))[0].dtype is out_dtype


def test_gelu_is_not_its_approximation():
    # Where both differ most, by 4.7e-4, at about 2.3.
    a, b = torch.full((1, 1), 2.3), torch.ones(1, 1)
    exactly, roughly = (
        GEMMEpilogueFwdOp(activation=name)(a, b)[0] for name in ("gelu", "gelu_tanh")
    )
    torch.testing.assert_close(exactly, torch.nn.functional.gelu(a))
    torch.testing.assert_close(roughly, torch.nn.functional.gelu(a, approximate="tanh"))
    assert (exactly - roughly).abs() > 3e-4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity(activation):
    made = operands(5, 7, 3, torch.float32)
    made["a"][1, 2], made["residual"][4, 5] = torch.nan, -torch.inf
    if activation not in ("gelu", "gelu_tanh"):  # of infinity torch's is NaN on the CPU
        made["bias"][3] = torch.inf
    result, _ = check(GEMMEpilogueFwdOp(activation=activation), made)
    assert result[1].isnan().all()
    assert result[4, 5] == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_strides(dtype):
    made = operands(4, 6, 5, dtype)
    for name in made:
        for _, other in strided(made[name]):
            check(GEMMEpilogueFwdOp(activation="relu"), made | {name: other})


# ---- the gradient --------------------------------------------------------------------------------


def gradients(op, made):
    leaves = {n: t.clone().requires_grad_() for n, t in made.items() if t is not None}
    d, _ = op(*(leaves.get(name) for name in made))
    grad = torch.randn(d.shape).to(d.dtype)
    return grad, torch.autograd.grad(d, tuple(leaves.values()), grad), leaves


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradient(dtype, activation, keeps):
    if keeps and activation is None:
        return
    for (trans_a, trans_b), some in zip(TRANSPOSES, itertools.product((True, False), repeat=2), strict=True):  # fmt: skip
        made = operands(7, 11, 5, dtype, *some, trans_a, trans_b)
        if dtype is torch.bfloat16:  # no sum is rounded: the slope of relu is another one beyond 0
            for name in ("a", "b", "bias"):
                if made[name] is not None:
                    made[name] = torch.randint_like(made[name], -3, 4)
            made["b"] /= 8
            if some[0]:
                made["bias"] = made["bias"] / 8 + 1 / 16
        op = GEMMEpilogueFwdOp(
            trans_a, trans_b, activation=activation, scale=0.75, keeps_preactivation=keeps
        )
        grad, found, _ = gradients(op, made)
        backward = GEMMEpilogueBwdOp(trans_a, trans_b, activation=activation, scale=0.75)
        inputs = {n: made[n] for n in ("a", "b", "bias")}
        wanted = [t for t in exact(backward, {"grad_d": grad, **inputs})[0] if t is not None]
        if not some[1]:
            wanted.pop()
        for one, other in zip(found, wanted, strict=True):
            result = compare(one, other, "template")
            assert result.ok, result.text


def test_second_derivative_goes_through_what_was_kept():
    made = operands(3, 4, 2, torch.float64)
    inputs = [t.requires_grad_() for t in made.values()]
    for keeps in (False, True):
        op = GEMMEpilogueFwdOp(activation="gelu", scale=1.5, keeps_preactivation=keeps)

        def run(*tensors, op=op):
            return tuple(t for t in op(*tensors) if t is not None)

        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("wanted", list(itertools.product((True, False), repeat=4)))
def test_gradients_that_are_wanted(wanted):
    if not any(wanted):
        return
    names = ("wants_a", "wants_b", "wants_bias", "wants_residual")
    op = GEMMEpilogueBwdOp(activation="silu", **dict(zip(names, wanted, strict=True)))
    made = operands(3, 4, 5, torch.float32, residual=False)
    del made["residual"]
    grads = check(op, {"grad_d": torch.randn(3, 4), **made})
    assert [grad is not None for grad in grads] == list(wanted)


# ---- what is refused -----------------------------------------------------------------------------


def test_refusals():
    made = operands(3, 4, 5, torch.float64)
    with pytest.raises(CheckError, match="out_dtype is unset for float64"):
        GEMMEpilogueFwdOp(out_dtype=torch.float32)(*made.values())
    with pytest.raises(CheckError, match="nothing to keep"):
        GEMMEpilogueFwdOp(keeps_preactivation=True)
    with pytest.raises(CheckError, match="scale is finite"):
        GEMMEpilogueFwdOp(scale=float("inf"))
    with pytest.raises(CheckError, match="activation"):
        GEMMEpilogueFwdOp(activation="gelu_new")
    with pytest.raises(CheckError, match="'residual'.*shape"):
        GEMMEpilogueFwdOp()(made["a"], made["b"], None, made["residual"].t())
    with pytest.raises(CheckError, match="'bias'.*dtype"):
        GEMMEpilogueFwdOp()(made["a"], made["b"], made["bias"].float())
    none = GEMMEpilogueBwdOp(wants_a=False, wants_b=False, wants_bias=False, wants_residual=False)
    with pytest.raises(CheckError, match="at least one gradient"):
        none(made["residual"], made["a"], made["b"])
