"""``torch.library.opcheck`` on every operator of every class: schema, autograd registration, fake
tensors, and AOT dispatch with static and with dynamic shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from tests.cases import distinct_classes, op_classes, workload_call

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def workloads(cls, operator):
    """Those of the entry. Where it has more branches, which gradients are wanted decides them: one more."""
    found = list(cls.entry.workloads)
    wants = {p.name for p in cls.entry.params if p.name.startswith("wants_")}
    if wants and len(found) < len(cls.entry.branches):
        without = {name.removeprefix("grad_") for name in operator.branch.without}
        given = {name: name.removeprefix("wants_") not in without for name in wants}
        passed = {i.name for i in cls.entry.inputs if f"wants_{i.name}" in wants}
        full = found[0].passed | {
            i.name for i in cls.entry.inputs if i.optional and i.name in passed
        }
        params = {**found[0].params, **given}
        found.append(replace(found[0], label="as-wanted", params=params, passed=full))
    return found


CASES = [
    pytest.param(operator, workload, id=f"{operator.name.split('::')[1]}-{workload.label}")
    for cls in distinct_classes().values()
    for operator in cls._boundary.operators
    for workload in workloads(cls, operator)
    if operator.branch in cls.entry.branches
]


def arguments(operator, cls, workload, seed):
    """The operator's arguments, or None where this workload takes another branch."""
    made = workload_call(cls.__name__, workload, seed, 128)
    inputs = dict(made.inputs)
    branch = operator.branch
    out = []
    if branch.out:
        out = [torch.empty_like(made())]
    taken = _taken(made.op, inputs, bool(out))
    return None if taken != branch else (*inputs.values(), *out, made.op._instance_key)


def utilities_for(given):
    """opcheck compares what was and was not written with ``allclose``, which float8 has not."""
    tensors = [t for t in given if isinstance(t, torch.Tensor)]
    float8 = any(t.is_floating_point() and t.dtype.itemsize == 1 for t in tensors)
    return tuple(u for u in UTILITIES if not float8 or u in UTILITIES[1:3])


def _taken(op, inputs, out):
    from tileops.engine.plan import _branch

    return _branch(type(op), tuple(inputs.values()), op, True if out else None)


def _class_of(operator):
    return next(c for c in op_classes().values() if operator in c._boundary.operators)


def test_every_operator_has_a_case(seed):
    for cls in op_classes().values():
        assert len(cls._boundary.operators) == len(cls.compile_op_names)
        for operator in cls._boundary.operators:
            made = [arguments(operator, cls, w, seed) for w in workloads(cls, operator)]
            assert any(args is not None for args in made), f"no workload calls {operator.name}"


@pytest.mark.parametrize(("operator", "workload"), CASES)
def test_opcheck(operator, workload, seed):
    given = arguments(operator, _class_of(operator), workload, seed)
    if given is None:
        pytest.skip("this workload takes another branch")
    utilities = utilities_for(given)
    results = opcheck(operator.overload, given, test_utils=utilities)
    assert results == dict.fromkeys(utilities, "SUCCESS")


@pytest.mark.parametrize(("operator", "workload"), CASES[::3])
def test_opcheck_of_strided_inputs(operator, workload, seed):
    cls = _class_of(operator)
    given = arguments(operator, cls, workload, seed)
    if given is None:
        pytest.skip("this workload takes another branch")
    spread = list(given)
    for index, item in enumerate(cls.entry.inputs):
        tensor = spread[index]
        if tensor is not None and tensor.ndim and not item.contiguous:
            room = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * 2))
            spread[index] = room[..., ::2].copy_(tensor)
    opcheck(operator.overload, tuple(spread), test_utils=utilities_for(given))
