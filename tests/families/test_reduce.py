"""Reductions and scans on the CPU against float64, torch's functions and their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check, strided
from tileops import CheckError, reduction

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TORCH = {
    "SumFwdOp": torch.sum,
    "MeanFwdOp": torch.mean,
    "AmaxFwdOp": torch.amax,
    "AminFwdOp": torch.amin,
    "LogSumExpFwdOp": torch.logsumexp,
    "VarFwdOp": torch.var,
    "StdFwdOp": torch.std,
    "VarMeanFwdOp": torch.var_mean,
    "VectorNormFwdOp": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim),
    "AllFwdOp": torch.all,
    "AnyFwdOp": torch.any,
    "CountNonzeroFwdOp": lambda x, dim, keepdim: torch.count_nonzero(x, dim),
    "ArgmaxFwdOp": torch.argmax,
    "ArgminFwdOp": torch.argmin,
    "ProdFwdOp": torch.prod,
    "CumsumFwdOp": lambda x, dim, keepdim: torch.cumsum(x, dim),
    "CumprodFwdOp": lambda x, dim, keepdim: torch.cumprod(x, dim),
}
SINGLE = ("ArgmaxFwdOp", "ArgminFwdOp", "ProdFwdOp", "CumsumFwdOp", "CumprodFwdOp")
WITHOUT_KEEPDIM = ("CountNonzeroFwdOp", "CumsumFwdOp", "CumprodFwdOp")
FULL = ("AmaxFwdOp", "AminFwdOp", "ArgmaxFwdOp", "ArgminFwdOp")
"""Ops that refuse an empty axis."""


def make(name, dim, keepdim=False, **params):
    if name not in WITHOUT_KEEPDIM:
        params["keepdim"] = keepdim
    return getattr(reduction, name)(dim=dim, **params)


def argument(op):
    return op.entry.inputs[0].name


@st.composite
def calls(draw):
    """A name, a shape, axes of it and a dtype."""
    name = draw(st.sampled_from(sorted(TORCH)))
    least = 1 if name in FULL or "Var" in name or "Std" in name else 0
    shape = draw(st.lists(st.sampled_from([least, 1, 2, 3, 7]), max_size=4))
    rank = max(len(shape), 1)
    if name in SINGLE:
        dim = draw(st.integers(-rank, rank - 1))
    else:
        axes = draw(st.sets(st.integers(0, rank - 1), min_size=1))
        dim = tuple(axis - rank if draw(st.booleans()) else axis for axis in sorted(axes))
    return name, tuple(shape), dim, draw(st.booleans()), draw(st.sampled_from(FLOATS))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls(), st.booleans())
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_any_axes_of_any_shape(call, transposed):
    name, shape, dim, keepdim, dtype = call
    x = torch.randn(shape).to(dtype)
    if name == "ProdFwdOp" or name == "CumprodFwdOp":
        x = (1 + x.float() / 8).to(dtype)
    x = x.T.contiguous().T if transposed and x.ndim == 2 else x
    op = make(name, dim, keepdim)
    result = check(op, {argument(op): x}, both_paths=False)
    wanted = TORCH[name](x, dim, keepdim=keepdim)
    for ours, theirs in zip(
        result if isinstance(result, tuple) else (result,),
        wanted if isinstance(wanted, tuple) else (wanted,),
        strict=True,
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("name", sorted(set(TORCH) - set(SINGLE) - {"LogSumExpFwdOp"}))
@pytest.mark.parametrize("dim", [None, ()])
def test_all_axes(name, dim):
    for shape in ((), (5,), (2, 3, 4)):
        x = torch.randn(shape)
        if shape == () and name in ("VarFwdOp", "StdFwdOp", "VarMeanFwdOp"):
            continue
        for keepdim in (False, True):
            op = make(name, dim, keepdim)
            result = check(op, {argument(op): x})
            if dim == () and name in ("AllFwdOp", "AnyFwdOp"):
                assert torch.equal(result, x.bool())


@pytest.mark.parametrize("name", ["AllFwdOp", "AnyFwdOp"])
def test_no_axis_in_compiled_code(name):
    """Inductor takes ``torch.all(x, ())`` for one along every axis."""
    x = torch.tensor([[0.0, -0.0, math.nan], [1, -2, math.inf]])
    run = torch.compile(getattr(reduction, name).decomposition, fullgraph=True)
    for keepdim in (False, True):
        assert torch.equal(run(x, dim=(), keepdim=keepdim), x.bool())


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", sorted(TORCH))
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(name, dtype):
    x = torch.randn(7, 9).to(dtype)
    x[0, 3] = math.nan
    x[1] = math.inf
    x[2] = -math.inf
    x[3, 1], x[3, 2] = math.inf, -math.inf
    x[4, ::2], x[4, 1::2] = 0.0, -0.0
    x[5, 8] = -math.inf
    x[6, 2], x[6, 5] = -math.nan, math.nan
    op = make(name, -1)
    check(op, {argument(op): x})


@pytest.mark.parametrize("name", ["ArgmaxFwdOp", "ArgminFwdOp"])
def test_the_first_of_equals(name):
    x = torch.tensor([[1.0, 2, 2, 1], [0.0, -0.0, 0.0, -0.0], [3, 3, 3, 3]])
    best = 1 if name == "ArgmaxFwdOp" else 0
    assert make(name, 1)(x).tolist() == [best, 0, 0]
    assert make(name, None)(torch.tensor([[1.0, math.nan], [math.nan, 9]])).item() == 1
    assert make(name, None, True)(x).shape == (1, 1)


@pytest.mark.parametrize("name", ["AllFwdOp", "AnyFwdOp", "CountNonzeroFwdOp"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ],
)
def test_what_is_zero(name, dtype):
    x = (torch.rand(5, 6) < 0.5).to(dtype)
    x[0], x[1] = 0, 1
    if dtype.is_complex:
        x[2] = torch.tensor(complex(-0.0, -0.0))
        x[3] = torch.tensor(complex(0, math.nan))
        assert torch.equal(make(name, 1)(x.conj()), make(name, 1)(x))
    for dim in (0, (0, 1), None):
        check(make(name, dim), {"input": x})


def test_a_conjugated_call_has_a_plan_of_its_own():
    x = torch.tensor([[1 + 1j, 0]])
    op = make("CountNonzeroFwdOp", 1)
    assert op(x).item() == op(x.conj()).item() == 1


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [None, 0, 1, 2.5, 9, True])
@pytest.mark.parametrize("name", ["VarFwdOp", "StdFwdOp", "VarMeanFwdOp"])
def test_correction(name, correction):
    x = torch.randn(4, 9)
    op = make(name, 1, correction=correction)
    check(op, {"input": x})
    check(make(name, 0, correction=correction), {"input": x})


@pytest.mark.parametrize("ord", [0, 1, 2, 3, 0.5, -1, math.inf, -math.inf])
def test_norms(ord):
    x = torch.randn(4, 9)
    check(make("VectorNormFwdOp", 1, ord=ord), {"x": x})
    if 0 <= ord < math.inf:
        assert not make("VectorNormFwdOp", 1, ord=ord)(torch.empty(2, 0)).any()
    else:
        with pytest.raises(CheckError, match="no axis is empty"):
            make("VectorNormFwdOp", 1, ord=ord)(torch.empty(2, 0))


@pytest.mark.parametrize(
    "name", ["SumFwdOp", "MeanFwdOp", "ProdFwdOp", "CumsumFwdOp", "CumprodFwdOp"]
)
@pytest.mark.parametrize("wanted", FLOATS)
def test_the_cast_comes_first(name, wanted):
    for dtype in FLOATS:
        check(make(name, 1, dtype=wanted), {"input": torch.randn(3, 8).to(dtype)})
    huge = torch.tensor([[70000.0, -69999.0]])
    if wanted is torch.float16:
        assert not make(name, 1, dtype=wanted)(huge).isfinite().all()


def test_a_norm_is_not_cast_to_less():
    for dtype, wanted in (
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float32),
    ):
        with pytest.raises(CheckError, match="dtype holds every value of x"):
            make("VectorNormFwdOp", 1, dtype=wanted)(torch.randn(2, 3).to(dtype))
    check(make("VectorNormFwdOp", 1, dtype=torch.float32), {"x": torch.randn(2, 3).bfloat16()})


@pytest.mark.parametrize("name", sorted(TORCH))
def test_strides(name):
    for _, view in strided(torch.randn(3, 4, 6)):
        op = make(name, 1)
        check(op, {argument(op): view})
    op = make(name, 0)
    check(op, {argument(op): torch.randn(1, 4).expand(3, 4)})


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", sorted(TORCH))
@pytest.mark.parametrize(("shape", "dim"), [((2, 0), 1), ((0, 3), 0), ((0, 3), 1), ((2, 0, 3), 1)])
def test_empty_axes_as_torch_has_them(name, shape, dim):
    op, x = make(name, dim), torch.empty(shape)
    if name in FULL and shape[dim] == 0:
        with pytest.raises(CheckError, match="no axis that is reduced is empty") as caught:
            op(x)
        assert caught.value.argument == "dim"
        return
    wanted = TORCH[name](x, dim, keepdim=False)
    result = op(x)
    for ours, theirs in zip(
        result if isinstance(result, tuple) else (result,),
        wanted if isinstance(wanted, tuple) else (wanted,),
        strict=True,
    ):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("dim", [(2,), (-3,), (0, 0), (1, -1), (0, 1, 2)])
@pytest.mark.parametrize("name", ["SumFwdOp", "LogSumExpFwdOp", "AllFwdOp", "CountNonzeroFwdOp"])
def test_axes_that_are_not_there(name, dim):
    with pytest.raises(CheckError, match="each once") as caught:
        make(name, dim)(torch.randn(2, 3))
    assert caught.value.argument == "dim"


def test_what_axes_may_be():
    assert make("SumFwdOp", [-1, 0]) == make("SumFwdOp", (-1, 0))
    assert make("SumFwdOp", 1).dim == (1,)
    for dim in (1.0, True, "0", (0.0,)):
        with pytest.raises(CheckError, match="'dim'"):
            make("SumFwdOp", dim)
    with pytest.raises(CheckError, match="at least one axis"):
        make("LogSumExpFwdOp", ())
    for name in SINGLE:
        with pytest.raises(CheckError, match="'dim'"):
            make(name, (0,))
        with pytest.raises(CheckError, match="is an axis of input"):
            make(name, 2)(torch.randn(2, 3))
