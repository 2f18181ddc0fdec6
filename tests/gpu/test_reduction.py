"""Reductions, scans and softmaxes on a card, through the public ops, against float64 on that card."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import op_classes, workload_call
from tests.oracle import nearer
from tileops import reduction
from tileops.backend.tolerances import UNIT_ROUNDOFF, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HALF = torch.bfloat16


def cast(op, x):
    wanted = getattr(op, "dtype", None)
    return (x if wanted is None else x.to(wanted)).double()


def axes(op, x):
    return op.dim or tuple(range(x.ndim))


def implicit(op, x):
    """torch's axis of a softmax that names none depends on the rank."""
    return op.dim if op.dim is not None else 0 if x.ndim in (0, 1, 3) else 1


def first(op, x, least):
    """The first NaN, else the first extreme."""
    wide, dim = (x.double().flatten(), 0) if op.dim is None else (x.double(), op.dim)
    extreme = wide.amin(dim, keepdim=True) if least else wide.amax(dim, keepdim=True)
    hit = (wide == extreme) | wide.isnan()
    shape = [-1 if axis == dim % wide.ndim else 1 for axis in range(wide.ndim)]
    places = torch.arange(wide.shape[dim], device=x.device).view(shape)
    found = torch.where(hit, places, wide.shape[dim]).amin(dim, op.keepdim)
    return found.view([1] * x.ndim) if op.dim is None and op.keepdim else found


def gradient_of_products(op, grad, x):
    leaf = cast(op, x).requires_grad_()
    return torch.autograd.grad(leaf.cumprod(op.dim), leaf, grad.double())[0]


EXACT = {
    "SoftmaxFwdOp": lambda op, x: torch.softmax(cast(op, x), implicit(op, x)),
    "LogSoftmaxFwdOp": lambda op, x: torch.log_softmax(cast(op, x), op.dim),
    "SoftmaxBwdOp": lambda op, g, y: (
        y.double() * (g.double() - (g.double() * y.double()).sum(op.dim, keepdim=True))
    ),
    "LogSoftmaxBwdOp": lambda op, g, y: (
        g.double() - y.double().exp() * g.double().sum(op.dim, keepdim=True)
    ),
    "LogSumExpFwdOp": lambda op, x: torch.logsumexp(x.double(), op.dim, op.keepdim),
    "SumFwdOp": lambda op, x: cast(op, x).sum(axes(op, x), op.keepdim),
    "MeanFwdOp": lambda op, x: cast(op, x).mean(axes(op, x), op.keepdim),
    "ProdFwdOp": lambda op, x: cast(op, x).prod(op.dim, op.keepdim),
    "AmaxFwdOp": lambda op, x: x.double().amax(axes(op, x), op.keepdim),
    "AminFwdOp": lambda op, x: x.double().amin(axes(op, x), op.keepdim),
    "VarFwdOp": lambda op, x: x.double().var(
        axes(op, x), correction=op.correction, keepdim=op.keepdim
    ),
    "StdFwdOp": lambda op, x: x.double().std(
        axes(op, x), correction=op.correction, keepdim=op.keepdim
    ),
    "VarMeanFwdOp": lambda op, x: torch.var_mean(
        x.double(), axes(op, x), correction=op.correction, keepdim=op.keepdim
    ),
    "VectorNormFwdOp": lambda op, x: torch.linalg.vector_norm(
        cast(op, x), op.ord, axes(op, x), op.keepdim
    ),
    "ArgmaxFwdOp": lambda op, x: first(op, x, False),
    "ArgminFwdOp": lambda op, x: first(op, x, True),
    "AllFwdOp": lambda op, x: torch.all(x != 0, op.dim, op.keepdim),
    "AnyFwdOp": lambda op, x: torch.any(x != 0, op.dim, op.keepdim),
    "CountNonzeroFwdOp": lambda op, x: (x != 0).sum(axes(op, x)),
    "CumsumFwdOp": lambda op, x: cast(op, x).cumsum(op.dim),
    "CumprodFwdOp": lambda op, x: cast(op, x).cumprod(op.dim),
    "CumprodBwdOp": gradient_of_products,
}
SCANS = ("CumsumFwdOp", "CumprodFwdOp")
FEW = ("SoftmaxFwdOp", "SoftmaxBwdOp", "CumprodBwdOp")
"""Not in every shape below."""


def check(op, *tensors):
    result = op(*tensors)
    wanted = EXACT[type(op).__name__](op, *tensors)
    for given, exactly in zip(
        result if isinstance(result, tuple) else (result,),
        wanted if isinstance(wanted, tuple) else (wanted,),
        strict=True,
    ):
        if "prod" in type(op).__name__.lower() and given.is_floating_point():
            # n roundings add up, each of at most u. Uniform and independent, as they are where
            # mantissas are (see `draw`), they have variances of at most u**2 / 3: 6 standard deviations
            # of the sum are 3.5 sqrt(n) u.
            u = UNIT_ROUNDOFF[torch.promote_types(given.dtype, torch.float32)]
            length = math.prod(tensors[-1].shape) if op.dim is None else tensors[-1].shape[op.dim]
            given = nearer(given, exactly, 3.5 * math.sqrt(length) * u * exactly.abs())
        found = compare(given, exactly, "reduction")
        assert found.ok, f"{op!r} {[tuple(t.shape) for t in tensors]}: {found.text}"
    return result


def draw(op_name, shape, dtype=torch.float32, dim=-1):
    x = torch.randn(shape, device="cuda")
    if "prod" in op_name.lower():
        # Products of neighbours stay of the order of 1 though the factors do not lie beside 1, where
        # float32 is twice as fine below as above and roundings have a mean.
        x = (x - x.roll(1, dim or 0)).div(32).exp()
    return x.to(dtype)


WORKLOADS = [
    pytest.param(name, workload, id=f"{name}-{workload.label}")
    for name, cls in op_classes().items()
    if cls.entry.family == "reduction"
    for workload in cls.entry.workloads
]


@pytest.mark.parametrize(("name", "workload"), WORKLOADS)
def test_workloads(name, workload):
    made = workload_call(name, workload, 0, 1 << 26)
    tensors = [t.cuda() for t in made.args]
    if "prod" in name.lower():
        tensors = [draw(name, tuple(t.shape), t.dtype, made.op.dim) for t in tensors]
    check(made.op, *tensors)
    assert made.op.last_call.kernel.startswith("triton_")


@pytest.mark.parametrize("name", sorted(set(EXACT) - set(FEW)))
@pytest.mark.parametrize("dtype", FLOATS)
def test_shapes(name, dtype):
    count = 2 if name.endswith("BwdOp") else 1
    for shape, dim in (
        ((1,), 0), ((67, 13), 1), ((67, 13), 0), ((3, 8191), 1), ((3, 16385), 1), ((2, 131071), 1),
        ((3, 32768), 1), ((3, 32767), 1),
        ((5, 1031, 3), 1), ((1031, 257), 0), ((300, 4096), 1), ((2, 3, 70000), -1), ((0, 4), 1),
    ):  # fmt: skip
        if shape == (1,) and ("Var" in name or "Std" in name):
            continue
        op = getattr(reduction, name)(dim=dim)
        tensors = [draw(name, shape, dtype, dim) for _ in range(count)]
        if name == "LogSoftmaxBwdOp":
            tensors[1] = torch.log_softmax(tensors[1], dim)
        if name in SCANS and dtype is not torch.float64:
            tensors = [tensors[0] if name == "CumprodFwdOp" else tensors[0].abs()]
        check(op, *tensors)


def test_gradient_of_products_with_zeros():
    for shape, dim in (((5, 3001), 1), ((1500, 7), 0)):
        op, x = reduction.CumprodBwdOp(dim), draw("prod", shape, dim=dim)
        check(op, torch.randn(shape, device="cuda"), x)
        x.movedim(dim, 1)[1:3, 700] = 0.0
        x.movedim(dim, 1)[2, 1200] = 0.0
        check(op, torch.randn(shape, device="cuda"), x)


@pytest.mark.parametrize("name", ["SumFwdOp", "VarMeanFwdOp", "LogSumExpFwdOp", "AnyFwdOp"])
def test_several_axes(name):
    for shape, dim in (
        ((32, 64, 56, 56), (0, 2, 3)), ((8, 2048, 100), (0, 1)), ((7, 300, 5, 130), (1, 3)),
        ((3, 4, 5, 6, 7), (0, 2, 4)), ((70000, 3), (0, 1)),
    ):  # fmt: skip
        for dtype in (HALF, torch.float32):
            check(getattr(reduction, name)(dim=dim), draw(name, shape, dtype))


def test_special_values():
    x = torch.randn(6, 40000, device="cuda")
    x[0, 37777] = math.nan
    x[1] = math.inf
    x[2] = -math.inf
    x[3, 5], x[3, 39999] = math.inf, -math.inf
    x[4] = 0.0
    for name in (
        "AmaxFwdOp",
        "AminFwdOp",
        "ArgmaxFwdOp",
        "ArgminFwdOp",
        "LogSumExpFwdOp",
        "SumFwdOp",
    ):
        for shape in (x, x.T.contiguous()):
            check(getattr(reduction, name)(dim=1 if shape is x else 0), shape)


def test_complex_and_integers():
    for dtype in (
        torch.bool,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ):
        x = (torch.rand(70, 9001, device="cuda") < 0.001).to(dtype)
        for name in ("AllFwdOp", "AnyFwdOp", "CountNonzeroFwdOp"):
            for dim in (0, 1, (0, 1)):
                check(getattr(reduction, name)(dim=dim), x)


@pytest.mark.parametrize(
    "name", ["SumFwdOp", "VarFwdOp", "LogSumExpFwdOp", "CumsumFwdOp", "LogSoftmaxFwdOp"]
)
@pytest.mark.parametrize("n", [100, 4096, 8192, 20000, 20001, 131072])
def test_a_row_does_not_depend_on_the_rows_beside_it(name, n):
    op, x = getattr(reduction, name)(dim=-1), torch.randn(600, n, device="cuda").to(HALF)
    together = op(x)
    for row in (0, 1, 599):
        assert torch.equal(op(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("name", ["LogSoftmaxBwdOp", "SoftmaxBwdOp"])
def test_a_gradient_does_not_depend_on_the_rows_beside_it(name):
    op = getattr(reduction, name)(dim=-1)
    for n in (100, 4096, 20000, 20001, 32768, 40000):
        g, y = (torch.randn(600, n, device="cuda").to(HALF) for _ in range(2))
        together = op(g, y)
        assert torch.equal(op(g[5:6], y[5:6])[0], together[5])


def test_more_than_two_billion_elements():
    n = 2**31 + 4096
    flags = torch.zeros(n, dtype=torch.bool, device="cuda")
    flags[-1] = flags[2**31 - 1] = flags[0] = True
    assert reduction.CountNonzeroFwdOp()(flags).item() == 3
    rows = flags.view(-1, 4096)
    assert reduction.CountNonzeroFwdOp(1)(rows).sum().item() == 3
    assert reduction.CountNonzeroFwdOp(0)(rows).sum().item() == 3
    halves = flags.half()
    del flags, rows
    assert reduction.SumFwdOp(dtype=torch.float32)(halves).item() == 3
    assert reduction.ArgmaxFwdOp()(halves).item() == 0
    halves[0] = 0
    assert reduction.ArgmaxFwdOp()(halves).item() == 2**31 - 1
    totals = reduction.CumsumFwdOp(-1)(halves.view(-1, 4096))
    assert totals[-1, -1].item() == 1
    assert totals[2**31 // 4096 - 1, -1].item() == 1
    assert totals[:-1].sum(dtype=torch.float32).item() == 1
    del totals
    last = halves.view(-1, 4096)
    gradient = reduction.LogSoftmaxBwdOp(-1)(last, last)
    assert torch.equal(gradient[-1:], reduction.LogSoftmaxBwdOp(-1)(last[-1:], last[-1:]))


def test_programs_that_wait_for_each_other_end_whatever_else_runs():
    """Scans of several groups of parts and long rows of softmax, on eight streams at once."""
    cases = [
        (reduction.CumsumFwdOp(0), torch.randn(40000, 96, device="cuda")),
        (reduction.CumsumFwdOp(1), torch.randn(3, 1 << 20, device="cuda")),
        (reduction.CumprodFwdOp(1), 1 + torch.randn(64, 3000, 40, device="cuda") / 256),
        (reduction.LogSoftmaxFwdOp(-1), torch.randn(300, 128256, device="cuda").to(HALF)),
        (reduction.SoftmaxFwdOp(-1), torch.randn(150, 100001, device="cuda")),
    ]
    wanted = []
    for op, x in cases:
        wanted.append(op(x))
        check(op, x)
    streams = [torch.cuda.Stream() for _ in range(8)]
    results = []
    torch.cuda.synchronize()
    for _ in range(3):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results += [(k % 5, cases[k % 5][0](cases[k % 5][1])) for k in range(n, n + 5)]
    torch.cuda.synchronize()
    for k, result in results:
        assert torch.equal(result, wanted[k]), cases[k][0]


def test_captured_into_a_graph():
    x = torch.randn(4, 128256, device="cuda")
    ops = [reduction.SumFwdOp(-1), reduction.ArgmaxFwdOp(-1), reduction.CumsumFwdOp(-1)]
    ops += [reduction.CumsumFwdOp(0)]
    for op in ops:
        op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [op(x) for op in ops]
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for op, result in zip(ops, results, strict=True):
        assert torch.equal(op(x), result)
