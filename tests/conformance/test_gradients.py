"""Gradients of every op against those of its meaning in float64, eager and compiled.

Classes come from the catalog. A new one needs its meaning in ``tests/oracle.py``, in operations that
autograd follows. A backward op that is an entry of its own is looked at here through its forward.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cases import float32_calls, op_classes
from tests.joint import compiled
from tests.oracle import call, exact, same_bits, strided
from tileops.backend.tolerances import UNIT_ROUNDOFF, compare
from tileops.elementwise import MulFwdOp, PReLUFwdOp
from tileops.engine.validate.workloads import run_workload
from tileops.gemm import GEMMFwdOp
from tileops.norm import (
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)


def _flows(entry) -> bool:
    backwards = {other.entry.backward for other in op_classes().values()}
    both = entry.differentiable_inputs and entry.differentiable_outputs
    return bool(both) and entry.name not in backwards


NAMES = sorted(name for name, cls in op_classes().items() if _flows(cls.entry))
ALONE = [name for name in NAMES if not op_classes()[name].entry.composition]


def operator(cls) -> str:
    return cls.compile_op_names[0].removeprefix("tileops::")


def flowing(op, inputs):
    """Names of the present inputs that a gradient flows to in this call."""
    passed = frozenset(n for n, t in inputs.items() if t is not None)
    return [
        item.name
        for item in op.entry.differentiable_inputs
        if item.name in passed
        and inputs[item.name].is_floating_point()
        and not (item.mutated is not None and item.mutated.evaluate(op._params, passed))
    ]


def calls(name, seed, **more):
    """Those of ``float32_calls`` through which a gradient flows."""
    found = [(made.op, dict(made.inputs)) for made in float32_calls(name, seed, **more)]
    found = [(op, inputs) for op, inputs in found if flowing(op, inputs)]
    assert found, f"{name}: no gradient flows through any workload in float32"
    return found


def outputs_of(op, result):
    """The differentiable ones that are there."""
    results = result if isinstance(result, tuple) else (result,)
    found = {output.name for output in op.entry.differentiable_outputs}
    pairs = zip(op.entry.outputs, results, strict=True)
    return [r for output, r in pairs if output.name in found and r is not None]


def own(inputs, leaves, dtype=None):
    """Copies of the inputs, and those of them that are ``leaves``."""
    copies = {n: None if t is None else t.detach().clone() for n, t in inputs.items()}
    for name in leaves:
        copies[name] = copies[name].to(dtype or copies[name].dtype).requires_grad_()
    return copies, [copies[name] for name in leaves]


def incoming(results):
    """Random gradients, each at other strides."""
    found = []
    for n, result in enumerate(results):
        ways = [*strided(torch.randn(result.shape, dtype=torch.float32).to(result.dtype))]
        found.append(ways[(torch.randint(len(ways), ()).item() + n) % len(ways)][1])
    return found


def gradients(op, inputs, run=call, grads=None):
    """``(leaves, the incoming gradients, the gradients)`` of a call."""
    names = flowing(op, inputs)
    given, leaves = own(inputs, names)
    results = outputs_of(op, run(op, given))
    grads = incoming(results) if grads is None else grads
    before = [g.clone() for g in grads]
    found = torch.autograd.grad(results, leaves, grads, allow_unused=True)
    assert all(same_bits(g, b) for g, b in zip(grads, before, strict=True)), "written"
    return names, grads, found


def wanted(op, inputs, grads):
    """The gradients of the op's meaning, in float64."""
    given, leaves = own(inputs, flowing(op, inputs))
    results = outputs_of(op, exact(op, given)[0])
    return torch.autograd.grad(results, leaves, [g.double() for g in grads], allow_unused=True)


def shaken(tensor):
    """Each element of float32 by a few units of its last place."""
    if tensor is None or tensor.dtype is not torch.float32:
        return tensor
    return tensor * (1 + torch.randint(-4, 5, tensor.shape) * 2.0**-23)


def hold(op, inputs, names, grads, found):
    """Within the tolerance of a result; else, where terms cancel and next to nothing is left (the
    gradient of a norm of two elements), element by element within some times the error of the meaning
    in float32 at inputs close by: at these very ones it may be exact by chance."""
    exact_ones = wanted(op, inputs, grads)
    errors = []
    for n, (name, ours, theirs) in enumerate(zip(names, found, exact_ones, strict=True)):
        if theirs is None:  # the meaning does not use it
            theirs = torch.zeros(())
            ours = torch.zeros(()) if ours is None else ours.abs().max()
        assert ours is not None, f"{op!r}: no gradient of {name}"
        result = compare(ours, theirs.double(), op.entry.kind)
        if not result.ok:
            for _ in range(0 if errors else 8):
                close = {key: shaken(t) for key, t in inputs.items()}
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(torch.Tensor, "double", torch.Tensor.float)
                    rough = wanted(op, close, grads)
                pairs = zip(rough, wanted(op, close, grads), strict=True)
                errors.append([None if a is None else (a - b).abs() for a, b in pairs])
            most = torch.stack([error[n] for error in errors]).amax(0)
            beyond = (ours - theirs).abs() > 64 * most
            assert not beyond.any(), f"{op!r}: gradient of {name}: {result.text}"


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_that_of_the_meaning(name, seed):
    for op, inputs in calls(name, seed):
        names, grads, found = gradients(op, inputs)
        hold(op, inputs, names, grads, found)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_is_one_node(name, seed):
    for op, inputs in calls(name, seed)[:1]:
        torch._dynamo.reset()
        present = [n for n, t in inputs.items() if t is not None]

        def function(*tensors, op=op, present=present):
            return call(op, dict(zip(present, tensors, strict=True)))

        run, seen = compiled(function)
        names, grads, found = gradients(
            op,
            inputs,
            lambda op, given, run=run, present=present: run(*(given[n] for n in present)),
        )
        hold(op, inputs, names, grads, found)
        classes = op_classes()
        stages = [classes[n] for n in op.entry.composition.values()] or [type(op)]
        assert not any(name.startswith("aten") and "mm" in name for name in seen.joint), seen.joint
        for stage in stages:
            base = operator(stage.backward_class())
            nodes = [n for n in seen.joint if n.startswith(f"tileops.{base}")]
            assert len(nodes) == stages.count(stage), seen.joint


STEEP = ("ReciprocalFwdOp", "RsqrtFwdOp")
"""Next to 0 a step towards their gradients has no number in float16, where the gradients may have one."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALONE)
def test_low_precision(name, dtype, seed):
    """Against the gradient in float32 of the same values, which the tests above hold to the meaning.
    Each element is off by a few roundings of terms as large as the gradient's rms."""
    for op, inputs in calls(name, seed)[:2]:
        if name in STEEP:
            inputs = {n: t.abs().clamp_min(2.0**-6).copysign(t) for n, t in inputs.items()}
        variables = {
            i.name
            for i in op.entry.inputs
            if i.dtype is not None and i.dtype.names & set(op.entry.dtypes)
        }
        low = {
            n: t.to(dtype) if t is not None and n in variables and t.is_floating_point() else t
            for n, t in inputs.items()
        }
        high = {
            n: t.float() if t is not None and t.is_floating_point() else t for n, t in low.items()
        }
        names, grads, found = gradients(op, low)
        theirs = gradients(op, high, grads=[g.float() for g in grads])[2]
        exact_ones = wanted(op, high, [g.float() for g in grads])
        for n, a, b, c in zip(names, found, theirs, exact_ones, strict=True):
            assert a.dtype == low[n].dtype
            if c is not None and not compare(b, c.double(), op.entry.kind).ok:
                continue  # terms cancel: float32 is off itself
            assert torch.equal(a.isnan(), b.isnan())
            # What the dtype has no number for is infinite there, and its largest number here.
            top = torch.finfo(dtype).max
            a, b = a.nan_to_num(0.0), b.nan_to_num(0.0).clamp(-top, top)
            error = (a.float() - b).norm() / b.norm().clamp_min(1e-2)
            assert error <= 4 * UNIT_ROUNDOFF[dtype], (op, n, error)


ROWS = 8192
MANY = {
    "RMSNormFwdOp": (
        RMSNormFwdOp(8, 1e-6), lambda x, w: F.rms_norm(x, (8,), w, 1e-6), (ROWS, 8), (8,),
    ),
    "LayerNormFwdOp": (
        LayerNormFwdOp(8), lambda x, w, b: F.layer_norm(x, (8,), w, b), (ROWS, 8), (8,), (8,),
    ),
    "FusedAddRMSNormFwdOp": (
        FusedAddRMSNormFwdOp(1e-6), lambda x, r, w: (F.rms_norm(x + r, (8,), w, 1e-6), x + r),
        (ROWS, 8), (ROWS, 8), (8,),
    ),
    "FusedAddLayerNormFwdOp": (
        FusedAddLayerNormFwdOp(1e-6),
        lambda x, r, w, b: (F.layer_norm(x + r, (8,), w, b, 1e-6), x + r),
        (ROWS, 8), (ROWS, 8), (8,), (8,),
    ),
    "GroupNormFwdOp": (
        GroupNormFwdOp(2), lambda x, w, b: F.group_norm(x, 2, w, b), (ROWS, 6), (6,), (6,),
    ),
    "InstanceNormFwdOp": (
        InstanceNormFwdOp(), lambda x, m, v, w, b: F.instance_norm(x, weight=w, bias=b),
        (ROWS, 4, 3), None, None, (4,), (4,),
    ),
    "PReLUFwdOp": (PReLUFwdOp(), F.prelu, (ROWS, 4), (4,)),
    "MulFwdOp": (MulFwdOp(), torch.mul, (ROWS, 8), (8,)),
    "GEMMFwdOp": (GEMMFwdOp(trans_a=True), lambda a, b: a.t() @ b.t(), (ROWS, 8), (4, ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_gradients_over_many_rows_are_summed_in_float32(name):
    """The gradients that come in are positive: a sum of halves would stop growing at some hundred terms."""
    op, reference, *shapes = MANY[name]
    # Sixteenths: a sum of two is exact, so that the reference normalises the same values.
    ours = [None if s is None else torch.randint(-32, 33, s).bfloat16() / 16 for s in shapes]
    theirs = [None if t is None else t.double().requires_grad_() for t in ours]
    ours = [None if t is None else t.requires_grad_() for t in ours]
    pairs = []
    for run, tensors in ((op, ours), (reference, theirs)):
        results = run(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        if not pairs:
            grads = [torch.rand(r.shape).bfloat16() for r in results]
        leaves = [t for t in tensors if t is not None]
        grads = [g.to(r.dtype) for g, r in zip(grads, results, strict=True)]
        pairs.append(torch.autograd.grad(results, leaves, grads))
    for found, exactly in zip(*pairs, strict=True):
        error = (found.double() - exactly).norm() / exactly.norm()
        assert error <= 2 * UNIT_ROUNDOFF[torch.bfloat16], error


WIDE = [
    n for n in ALONE
    if all("float64" in op_classes()[n].entry.dtypes.get(v, ()) for v in op_classes()[n].entry.dtypes)
]  # fmt: skip


LARGE = ("GroupNormFwdOp", "InstanceNormFwdOp")
"""Of many elements, each of which is moved twice, in the smallest call: the fast tier has LayerNorm."""


def few_elements(name, seed):
    """Two calls. Workloads of GroupNorm have 32 groups: of one channel each, which has no derivative, or of
    five, which are 160 elements."""
    if name != "GroupNormFwdOp":
        return calls(name, seed, most=12)[:2]
    affine = {"weight": torch.randn(4), "bias": torch.randn(4)}
    return [
        (GroupNormFwdOp(2), {"input": torch.randn(1, 4, 3), **given})
        for given in (affine, dict.fromkeys(affine))
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in WIDE]
)
def test_float64_by_differences(name, seed):
    """First and second derivatives; the second through the backward op's own gradient."""
    for op, inputs in few_elements(name, seed):
        names = flowing(op, inputs)
        fixed = {i.name for i in op.entry.inputs if i.dtype is None}
        wide = {
            n: t.double() if t is not None and t.is_floating_point() and n not in fixed else t
            for n, t in inputs.items()
        }
        if set(names) & fixed:
            continue
        if any(r.isnan().any() for r in outputs_of(op, call(op, own(wide, [])[0]))):
            wide = {
                n: t.abs() + 0.5 if n in names else t for n, t in wide.items()
            }  # of roots, logarithms

        def function(*leaves, op=op, wide=wide, names=names):
            return tuple(
                outputs_of(op, call(op, {**wide, **dict(zip(names, leaves, strict=True))}))
            )

        leaves = tuple(wide[n].clone().requires_grad_() for n in names)
        if any(result.dtype is not torch.float64 for result in function(*leaves)):
            continue  # a parameter fixes the dtype
        assert torch.autograd.gradcheck(function, leaves)
        # The first call of a derived gradient is noted (engine/one_call.py) and rounds otherwise; from
        # then on equal calls give equal bits.
        torch.autograd.gradgradcheck(function, leaves, nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("name", ALONE)
def test_the_backward_op_is_an_op(name, seed):
    """Its entry binds every workload, without data; its operator passes torch's own checks."""
    backward = op_classes()[name].backward_class()

    def fault(problem, *path):
        raise AssertionError(f"{backward.__name__}: {problem}")

    for workload in backward.entry.workloads:
        run_workload(backward, workload, fault)
    again = backward.backward_class()
    assert again is None or again.entry.family == backward.entry.family
    op, inputs = calls(name, seed)[0]
    names = flowing(op, inputs)
    given, leaves = own(inputs, names)
    results = outputs_of(op, call(op, given))
    found = torch.autograd.grad(results, leaves, incoming(results), allow_unused=True)
    assert all(g is None or g.is_contiguous() for g in found)
    wants = tuple(item.name in names for item in op.entry.differentiable_inputs)
    made = op._state.gradients[wants]
    assert type(made) is backward
    assert repr(made).startswith(backward.__name__ + "(")
    last = made.last_call
    assert last.call.op == backward.entry.name
