"""``torch.func`` and forward mode: every op against the same derivatives of its meaning in float64.

The meaning is differentiated by plain autograd (a Jacobian-vector product by going backward twice),
so that no transform is held against itself.
"""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from tests.conformance.test_gradients import (
    NAMES,
    calls,
    flowing,
    incoming,
    outputs_of,
    own,
    wanted,
)
from tests.oracle import call, exact
from tileops.backend.tolerances import compare
from tileops.elementwise import AddFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.engine.errors import TransformError
from tileops.gemm import GEMMFwdOp
from tileops.moe import MaskedLayoutSpec, MoEGroupedGEMMFwdOp
from tileops.norm import BatchNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp

FORWARD = [n for n in NAMES if not n.endswith("BwdOp") and n != "FloorDivideFwdOp"]
"""ATen has no derivative of floor_divide."""
SECOND = [
    "AddFwdOp", "FusedAddRMSNormFwdOp", "GELUFwdOp", "GEMMFwdOp", "LayerNormFwdOp", "MulFwdOp",
    "RMSNormFwdOp", "SiLUFwdOp", "SoftmaxFwdOp",
]  # fmt: skip
"""One of each way in which a gradient is made."""
OTHERWISE = [
    "AdaLayerNormFwdOp", "AdaLayerNormZeroFwdOp", "FusedAddLayerNormFwdOp", "GELUAndMulFwdOp",
    "GroupNormFwdOp", "HardsigmoidFwdOp", "SiLUAndMulFwdOp",
]  # fmt: skip
"""Whose decomposition could take a function of ATen that has no second derivative, or a wrong one."""


def functional(op, inputs, run=call):
    """``(function of the tensors that a gradient flows to, these)``."""
    names = flowing(op, inputs)

    def function(*leaves):
        return tuple(outputs_of(op, run(op, {**inputs, **dict(zip(names, leaves, strict=True))})))

    return function, tuple(inputs[n] for n in names)


def hold(op, names, found, exactly):
    """Within the tolerance of a result; else, where terms cancel, within some times the error that the
    meaning has in float32."""
    rough, exact_ones = None, exactly()
    for n, (name, ours, theirs) in enumerate(zip(names, found, exact_ones, strict=True)):
        theirs = torch.zeros_like(ours) if theirs is None else theirs.double()
        result = compare(ours, theirs, op.entry.kind)
        if not result.ok:
            if rough is None:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch.Tensor, "double", torch.Tensor.float)
                    rough = exactly()
            allowed = 64 * (rough[n] - theirs).norm() if rough[n] is not None else 0.0
            assert (ours - theirs).norm() <= allowed, f"{op!r}: {name}: {result.text}"


def meaning(op, inputs):
    return exact(op, inputs)[0]


def random_like(tensors):
    return tuple(torch.randn_like(t) for t in tensors)


def scalar(function):
    """One number from all outputs, curved in each."""
    return lambda *leaves: sum(r.sin().sum() for r in function(*leaves))


def weighed(results):
    """One number from all outputs, each element with a weight of its own."""
    return sum(
        (r * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in results
    )


def writes(op, inputs):
    passed = frozenset(n for n, t in inputs.items() if t is not None)
    return any(i.mutated and i.mutated.evaluate(op._params, passed) for i in op.entry.inputs)


# ---- every class ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARD)
def test_vjp(name, seed):
    for op, inputs in calls(name, seed):
        function, leaves = functional(op, inputs)
        results, pull = vjp(function, *leaves)
        grads = incoming(results)
        found = pull(tuple(grads))
        hold(op, flowing(op, inputs), found, lambda g=grads, i=inputs, o=op: wanted(o, i, g))


def exact_jvp(op, inputs, tangents):
    """By going backward twice: ``J v`` is the gradient, at any ``u``, of ``(Jᵀ u) · v``."""
    given, leaves = own(inputs, flowing(op, inputs))
    results = outputs_of(op, meaning(op, given))
    dummies = [torch.zeros_like(r, requires_grad=True) for r in results]
    back = torch.autograd.grad(results, leaves, dummies, create_graph=True, allow_unused=True)
    product = sum(
        (b.double() * t.double()).sum()
        for b, t in zip(back, tangents, strict=True)
        if b is not None
    )
    constant = not getattr(product, "requires_grad", False)
    found = (
        [None] * len(dummies)
        if constant
        else torch.autograd.grad(product, dummies, allow_unused=True)
    )
    return [torch.zeros_like(d) if f is None else f for d, f in zip(dummies, found, strict=True)]


@pytest.mark.parametrize("name", FORWARD)
def test_jvp_and_dual_numbers(name, seed):
    for op, inputs in calls(name, seed):
        function, leaves = functional(op, inputs)
        tangents = random_like(leaves)
        results, ours = jvp(function, leaves, tangents)
        names = [o.name for o in op.entry.outputs][: len(ours)]
        hold(op, names, ours, lambda t=tangents, i=inputs, o=op: exact_jvp(o, i, t))
        assert all(r.is_contiguous() for r in results)
        with forward_ad.dual_level():
            pairs = zip(leaves, tangents, strict=True)
            duals = [forward_ad.make_dual(leaf, tangent) for leaf, tangent in pairs]
            unpacked = [forward_ad.unpack_dual(r) for r in function(*duals)]
        for dual, result, tangent in zip(unpacked, results, ours, strict=True):
            torch.testing.assert_close(dual.primal, result, equal_nan=True)
            torch.testing.assert_close(dual.tangent, tangent, equal_nan=True)


def weighed_by_slice(results):
    return sum(weighed(tuple(r[n] for r in results)) for n in range(3))


@pytest.mark.parametrize("name", [*SECOND, "GQADenseFwdOp", "MoEExpertMLPFwdOp", "SiLUAndMulFwdOp"])
def test_vmap_of_a_gradient_and_a_gradient_of_vmap(name, seed):
    op, inputs = next(pair for pair in calls(name, seed) if not writes(*pair))
    function, leaves = functional(op, inputs)
    batch = tuple(torch.stack([leaf, leaf / 2, leaf * 0.7]) for leaf in leaves)
    every = tuple(range(len(leaves)))
    each = vmap(grad(lambda *t: weighed(function(*t)), every))(*batch)
    all_at_once = grad(lambda *b: weighed_by_slice(vmap(function)(*b)), every)(*batch)
    for n in range(3):

        def exactly(n=n):
            one = [b[n].clone().requires_grad_() for b in batch]
            results = functional(op, inputs, meaning)[0](*one)
            return torch.autograd.grad(weighed(results), one, allow_unused=True)

        for found in (each, all_at_once):
            hold(op, flowing(op, inputs), [f[n] for f in found], exactly)


def test_what_torch_itself_gets_wrong():
    """When this no longer fails, the arithmetic in ``tileops.norm.normal`` is to go."""
    x, tangent = torch.randn(2, 3, 4, dtype=torch.float64)

    def loss(t):
        return F.layer_norm(t, (4,)).sin().sum()

    right = vjp(grad(loss), x)[1](tangent)[0]
    wrong = grad(lambda t: jvp(loss, (t,), (tangent,))[1])(x)
    assert not torch.allclose(wrong, right)


@pytest.mark.parametrize("name", [*SECOND, *OTHERWISE])
def test_second_derivatives(name, seed):
    """Products with the Hessian, by backward and forward in every order."""
    for op, inputs in calls(name, seed, most=24)[:2]:
        wide = {
            n: t.double() if t is not None and t.is_floating_point() else t
            for n, t in inputs.items()
        }
        function, leaves = functional(op, wide)
        if any(result.dtype is not torch.float64 for result in function(*leaves)):
            continue  # a parameter fixes the dtype
        tangents, every = random_like(leaves), tuple(range(len(leaves)))
        first = grad(scalar(function), every)

        def forward(*t, function=function, tangents=tangents):
            return jvp(scalar(function), t, tangents)[1]

        ours = {
            "forward over backward": jvp(first, leaves, tangents)[1],
            "backward over backward": vjp(first, *leaves)[1](tangents),
            "backward over forward": grad(forward, every)(*leaves),
        }
        bent = jvp(forward, leaves, tangents)[1]
        given, theirs = own(wide, flowing(op, wide))
        results = outputs_of(op, meaning(op, given))
        value = sum(r.sin().sum() for r in results)
        once = torch.autograd.grad(value, theirs, create_graph=True, allow_unused=True)
        pairs = zip(once, tangents, strict=True)
        twice = torch.autograd.grad(
            sum((g * t).sum() for g, t in pairs if g is not None), theirs, allow_unused=True
        )
        twice = [
            torch.zeros_like(t) if f is None else f for t, f in zip(leaves, twice, strict=True)
        ]
        ours["forward over forward"] = (bent,)
        for way, found in ours.items():
            forwards = way == "forward over forward"
            meant = [sum((h * t).sum() for h, t in zip(twice, tangents, strict=True))]
            for a, b in zip(found, meant if forwards else twice, strict=True):
                # Rows of small variance bend by up to 1/eps, and what is left of that is rounded.
                most = max(t.abs().max().item() for t in twice)
                torch.testing.assert_close(
                    a, b, rtol=1e-7, atol=max(1e-7, 1e-9 * most),
                    msg=lambda m, way=way: f"{way}: {m}",
                )  # fmt: skip


# ---- whole Jacobians -----------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian])
@pytest.mark.parametrize("case", ["rms_norm", "softmax", "gemm"])
def test_jacobians(transform, case):
    x, w = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    ours, theirs = {
        "rms_norm": (RMSNormFwdOp(3), lambda x, w: F.rms_norm(x, (3,), w)),
        "softmax": (lambda x, w: SoftmaxFwdOp(0)(x), lambda x, w: F.softmax(x, 0)),
        "gemm": (GEMMFwdOp(), lambda x, w: x @ w.t()),
    }[case]
    w = w[0] if case == "rms_norm" else w
    both = [transform(lambda *t, f=f: f(*t).sin(), (0, 1))(x, w) for f in (ours, theirs)]
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, both), strict=True):
        torch.testing.assert_close(a, b)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(4))
        self.up, self.down = torch.nn.Linear(4, 6), torch.nn.Linear(3, 4)
        self.norm, self.gate, self.add = RMSNormFwdOp(4), SiLUAndMulFwdOp(), AddFwdOp()

    def forward(self, x):
        return self.add(x, self.down(self.gate(self.up(self.norm(x, self.scale)))))


@pytest.mark.parametrize("compiled", [False, True])
def test_per_sample_gradients_of_a_model(compiled):
    model, x, y = Model().double(), *torch.randn(2, 5, 4, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters, x, y):
        return F.mse_loss(torch.func.functional_call(model, parameters, (x[None],))[0], y)

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    ours = (torch.compile(each, backend="aot_eager") if compiled else each)(parameters, x, y)
    torch._dynamo.reset()
    for n in range(5):
        model.zero_grad()
        hidden = F.rms_norm(x[n], (4,), model.scale)
        gate, up = model.up(hidden).chunk(2)
        F.mse_loss(x[n] + model.down(F.silu(gate) * up), y[n]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(ours[name][n], parameter.grad)


def test_a_transform_inside_plain_autograd():
    """The gradient of a penalty on per-sample gradients."""
    x = torch.randn(5, 4, dtype=torch.float64)
    found = []
    for norm in (RMSNormFwdOp(4), lambda t, w: F.rms_norm(t, (4,), w)):
        weight = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        each = vmap(grad(lambda t, w, norm=norm: norm(t, w).sin().sum()), in_dims=(0, None))
        each(x, weight).square().sum().backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found)


def test_compiled_forward_mode():
    op, x, w = RMSNormFwdOp(4), torch.randn(3, 4), torch.randn(4)

    def function(x, tangent):
        return jvp(lambda t: op(t, w), (x,), (tangent,))

    tangent = torch.randn(3, 4)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, tangent), function(x, tangent))
    torch._dynamo.reset()


def test_what_is_detached_is_a_constant():
    op, x = RMSNormFwdOp(4), torch.randn(3, 4)
    ours = grad(lambda t: (t * op(t.detach())).sum())(x)
    torch.testing.assert_close(ours, op(x))
    primal, tangent = jvp(lambda t: op(t.detach()), (x,), (x,))
    assert torch.equal(primal, op(x))
    assert not tangent.any()


def test_running_statistics_under_forward_mode():
    op, x, tangent = BatchNormFwdOp(training=True), *torch.randn(2, 6, 3)
    plain, dual = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
    op(x, *plain)
    ours = jvp(lambda t: op(t, *dual)[0], (x,), (tangent,))[1]
    for a, b in zip(dual, plain, strict=True):
        torch.testing.assert_close(a, b)
    theirs = jvp(lambda t: F.batch_norm(t, None, None, training=True), (x,), (tangent,))[1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(TransformError, match="through a call that writes 'running_mean'"):
        jvp(lambda m: op(x, m * 1, dual[1])[0], (dual[0],), (dual[0],))


def test_a_write_takes_no_tangent():
    x = torch.randn(3, 4)
    with pytest.raises(TransformError, match="through a call that writes 'input'") as caught:
        jvp(lambda t: SiLUFwdOp(inplace=True)(t * 1), (x,), (x,))
    assert "SiLUFwdOp" in str(caught.value)
    op, a, b = MoEGroupedGEMMFwdOp(MaskedLayoutSpec(2)), torch.randn(2, 2, 4), torch.randn(2, 5, 4)
    counts, out = torch.tensor([1, 2]).int(), torch.zeros(2, 2, 5)
    with pytest.raises(TransformError, match="MoEGroupedGEMMFwdOp.*call that writes 'out'"):
        jvp(lambda t: op(t, b, counts, out=out), (a,), (a,))
    assert not out.any(), "refused before any work"
