"""Every op under ``torch.vmap``: each slice is what the op means, in as few calls as can be."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cases import float32_calls, op_classes
from tests.oracle import call, exact
from tileops import recording
from tileops.attention import GQADenseFwdOp
from tileops.backend.tolerances import compare
from tileops.elementwise import AddFwdOp, DropoutFwdOp, GELUFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.engine.errors import TransformError
from tileops.gemm import GEMMFwdOp
from tileops.moe import MaskedLayoutSpec, MoEGroupedGEMMFwdOp
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

CALLED = sorted(name for name, cls in op_classes().items() if cls.entry.inputs)


def written(op, inputs):
    passed = frozenset(n for n, t in inputs.items() if t is not None)
    return [
        i.name
        for i in op.entry.inputs
        if i.mutated is not None and i.mutated.evaluate(op._params, passed)
    ]


def flat(result):
    return [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]


def batch_of(tensor, size, dim):
    """``size`` tensors of one shape, other values where values are free, stacked along ``dim``."""
    slices = [
        tensor / (n + 1) if tensor.is_floating_point() else tensor.clone() for n in range(size)
    ]
    if tensor.dtype is torch.int64 and tensor.ndim == 1 and tensor.numel():
        slices = [tensor.roll(n) for n in range(size)]  # the same indices elsewhere
    return torch.stack(slices, dim)


def mapped(op, inputs, dims, size):
    """``vmap`` of a call over the inputs that ``dims`` names, and what each slice should be."""
    batched = {n: batch_of(inputs[n], size, dim) for n, dim in dims.items()}

    def function(*tensors):
        return tuple(flat(call(op, {**inputs, **dict(zip(batched, tensors, strict=True))})))

    with recording() as events:
        ours = torch.vmap(function, in_dims=tuple(dims.values()))(*batched.values())
    slices = []
    for n in range(size):
        own = {name: tensor.select(dims[name], n) for name, tensor in batched.items()}
        slices.append(flat(exact(op, {**inputs, **own})[0]))
    calls = [e.data["calls"] for e in events if e.kind == "vmap"]
    return ours, [torch.stack(rows) for rows in zip(*slices, strict=True)], calls


def assert_right(op, ours, wanted):
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted, strict=True):
        assert a.shape == b.shape
        found = compare(a.contiguous(), b, op.entry.kind)
        assert found.ok, f"{op!r}: {found.text}"


# ---- every class ---------------------------------------------------------------------------------


@pytest.fixture(params=CALLED)
def samples(request, seed):
    return [(made.op, dict(made.inputs)) for made in float32_calls(request.param, seed)]


def test_vmap_over_each_input_and_over_all(samples):
    for op, inputs in samples:
        present = [n for n, t in inputs.items() if t is not None]
        # A composition checks the slice that it is given, as any call does.
        first = {i.name for i in op.entry.inputs if i.contiguous and op.entry.composition}
        last = {n: 0 if n in first else inputs[n].ndim for n in present}
        mixed = {n: index % (last[n] + 1) for index, n in enumerate(present)}
        choices = [mixed, *({n: last[n]} for n in present)]
        for dims in choices:
            if written(op, inputs):
                before = {n: None if t is None else t.clone() for n, t in inputs.items()}
                with pytest.raises(TransformError, match="vmap over a call that writes") as caught:
                    mapped(op, inputs, dims, 3)
                assert type(op).__name__ in str(caught.value) or any(
                    stage in str(caught.value) for stage in op.entry.composition.values()
                )
                assert all(t is None or torch.equal(t, before[n]) for n, t in inputs.items())
                continue
            ours, wanted, calls = mapped(op, inputs, dims, 3)
            assert_right(op, ours, wanted)
            assert len(calls) >= 1
            assert set(calls) <= {1, 3}


# ---- one call where the batch joins what leads -----------------------------------------------------

X, WEIGHT = (5, 4), (4,)
ONE_CALL = [
    (RMSNormFwdOp(4), {"x": X, "weight": WEIGHT}, {"x": 1}),
    (LayerNormFwdOp(4), {"input": X, "weight": WEIGHT, "bias": WEIGHT}, {"input": 2}),
    (FusedAddRMSNormFwdOp(), {"input": X, "residual": X, "weight": WEIGHT}, {"residual": 0}),
    (
        FusedAddRMSNormFwdOp(),
        {"input": X, "residual": X, "weight": WEIGHT},
        {"input": 2, "residual": 0},
    ),
    (SiLUFwdOp(), {"input": ()}, {"input": 0}),
    (SiLUAndMulFwdOp(), {"input": (3, 2, 8)}, {"input": 3}),
    (GELUFwdOp(), {"input": X}, {"input": 1}),
    (SoftmaxFwdOp(1), {"x": X}, {"x": 0}),
]


ATTENTION = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)}
ONE_CALL += [
    (GEMMFwdOp(), {"a": (2, 4), "b": (5, 4)}, {"a": 1}),
    (GEMMFwdOp(trans_a=True), {"a": (4, 2), "b": (5, 4)}, {"a": 0}),
    (GEMMFwdOp(trans_b=False), {"a": (2, 4), "b": (4, 5)}, {"b": 2}),
    (GQADenseFwdOp(is_causal=True), ATTENTION, {"q": 4, "k": 0, "v": 1}),
    (GQADenseFwdOp(), ATTENTION, {"q": 2}),
    (RoPENeoxPositionIdsFwdOp(max_position=9), {"x": (4, 2, 8), "positions": (4,)}, {"x": 3}),
    (
        RoPENeoxPositionIdsFwdOp(max_position=9),
        {"x": (4, 2, 8), "positions": (4,)},
        {"positions": 1},
    ),
    (BatchNormFwdOp(training=True), {"input": (4, 3, 2)}, {"input": 2}),
]


@pytest.mark.parametrize(("op", "shapes", "dims"), ONE_CALL)
@pytest.mark.parametrize("size", [0, 1, 7])
def test_one_call(op, shapes, dims, size):
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    if "positions" in inputs:
        inputs["positions"] = torch.randint(9, shapes["positions"])
    if not size:
        batched = {n: inputs[n][None][:0].movedim(0, dim) for n, dim in dims.items()}

        def function(*tensors):
            return call(op, {**inputs, **dict(zip(batched, tensors, strict=True))})

        for result in flat(torch.vmap(function, in_dims=tuple(dims.values()))(*batched.values())):
            assert result.shape[0] == 0
            assert result.ndim > 0
        return
    ours, wanted, calls = mapped(op, inputs, dims, size)
    assert_right(op, ours, wanted)
    assert calls == [1]


@pytest.mark.parametrize(
    ("a", "b"), [((4,), (4,)), ((3, 4), (4,)), ((4,), (2, 3, 4)), ((), (3, 4)), ((3, 1), (1, 4))]
)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0), (-1, 0)])
def test_a_batch_does_not_broadcast_with_a_slice(a, b, dims):
    sizes = [
        torch.randn((*shape, 6) if dim == -1 else (6, *shape) if dim == 0 else shape)
        for shape, dim in zip((a, b), dims, strict=True)
    ]
    with recording() as events:
        ours = torch.vmap(AddFwdOp(), in_dims=dims)(*sizes)
    assert torch.equal(ours, torch.vmap(torch.add, in_dims=dims)(*sizes))
    assert [e.data["calls"] for e in events if e.kind == "vmap"] == [1]


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 3, 2, 3)])
def test_an_axis_is_that_of_the_slice(shape):
    x = torch.randn(*shape, 5)
    for dim in [None, *range(-len(shape), len(shape))]:
        with recording() as events:
            ours = torch.vmap(SoftmaxFwdOp(dim), in_dims=-1)(x)
        for n in range(5):
            one = x[..., n]
            axis = dim if dim is not None else (0 if one.ndim in (0, 1, 3) else 1)
            torch.testing.assert_close(ours[n], F.softmax(one, axis))
        assert [e.data["calls"] for e in events if e.kind == "vmap"] == [1]
    assert torch.equal(torch.vmap(SoftmaxFwdOp(0))(torch.randn(3)), torch.ones(3))


def test_what_does_not_lead_is_called_by_slice():
    x, weight = torch.randn(3, 5, 4), torch.randn(3, 4)
    op = RMSNormFwdOp(4)
    with recording() as events:
        ours = torch.vmap(op)(x, weight)
    assert [e.data["calls"] for e in events if e.kind == "vmap"] == [3]
    for n in range(3):
        torch.testing.assert_close(ours[n], op(x[n], weight[n]))
    products = torch.vmap(GEMMFwdOp())(x, x)  # two slices, one product: no one call does it
    torch.testing.assert_close(products, x @ x.mT)
    empty = torch.vmap(op)(x[:0], weight[:0])
    assert empty.shape == (0, 5, 4)
    assert torch.vmap(GEMMFwdOp())(torch.empty(0, 2, 3), torch.empty(0, 5, 3)).shape == (0, 2, 5)


def test_a_contiguous_input_is_that_of_the_slice():
    op = MoEGroupedGEMMFwdOp(MaskedLayoutSpec(2))
    a, b, counts = torch.randn(2, 2, 4, 3), torch.randn(2, 5, 4), torch.tensor([1, 2]).int()
    ours = torch.vmap(lambda one: op(one, b, counts), in_dims=3)(a)
    for n in range(3):
        one = a[..., n].contiguous()
        torch.testing.assert_close(ours[n], op(one, b, counts))


# ---- nested, compiled, traced ----------------------------------------------------------------------


def test_nested():
    op, x, weight = RMSNormFwdOp(4), torch.randn(3, 5, 2, 4), torch.randn(5, 4)
    for dims in itertools.product((0, 1), (0, 1)):
        nested = torch.vmap(torch.vmap(op, (dims[1], None)), (dims[0], None))(x, weight[0])
        theirs = torch.vmap(torch.vmap(lambda t: F.rms_norm(t, (4,), weight[0]), dims[1]), dims[0])(
            x
        )
        torch.testing.assert_close(nested, theirs)
    # The inner level batches x alone, the outer both.
    nested = torch.vmap(torch.vmap(op, (0, None)), (1, 0))(x, weight)
    for n in range(5):
        torch.testing.assert_close(nested[n], F.rms_norm(x[:, n], (4,), weight[n]))


@pytest.mark.parametrize("dims", [(0, None), (2, None), (0, 0)])
def test_compiled(dims):
    op, x = RMSNormFwdOp(4), torch.randn(3, 5, 3, 4)
    weight = torch.randn(3, 4) if dims[1] == 0 else torch.randn(4)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    def function(x, weight):
        return torch.vmap(op, in_dims=dims)(x, weight)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), function(x, weight))
    nodes = [n for n in graphs[0].graph.nodes if str(n.target).startswith("tileops.")]
    assert len(nodes) == (1 if dims[1] is None else 3)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced(mode):
    op, x = SoftmaxFwdOp(0), torch.randn(3, 5, 4)
    function = torch.vmap(op, in_dims=1)
    graph = make_fx(function, tracing_mode=mode)(x)
    nodes = [n for n in graph.graph.nodes if str(n.target).startswith("tileops.")]
    assert len(nodes) == 1
    assert torch.equal(graph(x), function(x))


# ---- what is refused -------------------------------------------------------------------------------


def test_vmap_over_an_out_buffer_is_refused():
    op = MoEGroupedGEMMFwdOp(MaskedLayoutSpec(2))
    a, b, counts = torch.randn(3, 2, 2, 4), torch.randn(2, 5, 4), torch.tensor([1, 2]).int()
    out = torch.zeros(2, 2, 5)
    with pytest.raises(TransformError, match=r"writes 'out' .*moe_grouped_gemm_fwd_out"):
        torch.vmap(lambda one: op(one, b, counts, out=out))(a)
    assert not out.any()


def test_random_numbers():
    x = torch.ones(3, 40)
    seeded = torch.vmap(DropoutFwdOp(0.5, seed=3))(x)
    assert torch.equal(seeded, DropoutFwdOp(0.5, seed=3)(x[0]).expand(3, 40))
    for randomness in ("error", "same"):
        with pytest.raises(
            TransformError, match=f"randomness='{randomness}'.*DropoutFwdOp|Dropout"
        ):
            torch.vmap(DropoutFwdOp(0.5), randomness=randomness)(x)
    drawn = torch.vmap(DropoutFwdOp(0.5), randomness="different")(x)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.vmap(DropoutFwdOp(0.5, training=False))(x), x)


def test_a_write_beside_vmap_is_a_write():
    x, other = torch.randn(3, 4), torch.randn(4)
    wanted = F.silu(other)

    def function(one):
        return one + SiLUFwdOp(inplace=True)(other.clone())

    torch.testing.assert_close(torch.vmap(function)(x), x + wanted)
