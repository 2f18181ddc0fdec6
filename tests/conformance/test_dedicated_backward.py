"""An entry that names its backward op: how the two are wired, and what is refused."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap

import pytest
import torch

from tests.joint import compiled
from tests.op_packages import marked, swap
from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.derive import backward_name, derived_backward, faults_of_backward
from tileops.engine.validate import check
from tileops.norm import BatchNormBwdOp, BatchNormFwdOp

MANIFEST = """\
GateFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float32, float64]}
    params:
      power: {type: float, default: 2.0}
      unused: {type: int, default: 1}
    inputs:
      x: {dtype: T, shape: "[*B, N]"}
      scale: {dtype: T, shape: "[N]", optional: true}
      index: {dtype: int64, shape: "[N]", optional: true}
    outputs:
      gate: {dtype: T, shape: "[*B, N]"}
      plain: {dtype: T, shape: "[*B, N]"}
      sign: {dtype: T, shape: "[N]", differentiable: false}
  backward: GateBwdOp
  workloads:
    - {label: one, dims: {B: [4], N: 8}, passed: [scale, index], dtypes: {T: float32}}
    - {label: two, dims: {B: [], N: 8}, dtypes: {T: float64}}
  cost:
    flops: "2 * prod(B) * N"

GateBwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float32, float64]}
    params:
      power: {type: float, default: 2.0}
      wants_x: {type: bool, default: true, kw_only: true}
      wants_scale: {type: bool, default: true, kw_only: true}
    inputs:
      grad_gate: {dtype: T, shape: "[*B, N]"}
      grad_plain: {dtype: T, shape: "[*B, N]"}
      x: {dtype: T, shape: "[*B, N]"}
      gate: {dtype: T, shape: "[*B, N]"}
      scale: {dtype: T, shape: "[N]", optional: true}
    outputs:
      grad_x: {dtype: T, shape: "[*B, N]", nullable: "not wants_x"}
      grad_scale: {dtype: T, shape: "[N]", nullable: "not (wants_scale and passed(scale))"}
  workloads:
    - {label: one, dims: {B: [4], N: 8}, passed: [scale], dtypes: {T: float32}}
    - {label: two, dims: {B: [], N: 8}, dtypes: {T: float64}}
  cost:
    flops: "4 * prod(B) * N"
"""

MODULE = '''\
"""Ops of a test."""

import torch

from tileops.authoring import Op


class GateFwdOp(Op):
    """``(x**power * scale, 3 * x, sign(scale))``."""

    @staticmethod
    def decomposition(x, scale, index, *, power, unused):
        gate = x**power if scale is None else x**power * scale
        sign = x.new_ones(x.shape[-1]) if scale is None else scale.sign()
        return gate, 3 * x, sign


class GateBwdOp(Op):
    """Its gradient, from the output too: ``gate * power / x``."""

    @staticmethod
    def decomposition(
        grad_gate, grad_plain, x, gate, scale, *, power, wants_x, wants_scale
    ):
        grad_x = grad_gate * gate * power / x + 3 * grad_plain if wants_x else None
        grad_scale = None
        if wants_scale and scale is not None:
            grad_scale = (grad_gate * x**power).flatten(0, -2).sum(0) if x.ndim > 1 else grad_gate * x**power
        return grad_x, grad_scale
'''

_numbers = itertools.count()


def package(folder, manifest=MANIFEST, module=MODULE):
    name = f"gates{next(_numbers)}"
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "manifest.yaml").write_text(manifest)
    (folder / name / "gate.py").write_text(module)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.gate"), folder / name / "manifest.yaml"
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    return package(tmp_path_factory.mktemp("gates"))[0]


def tensors(dtype=torch.float64):
    x = torch.rand(3, 4, dtype=dtype) + 0.5
    return x.requires_grad_(), torch.randn(4, dtype=dtype, requires_grad=True)


def test_it_is_called_with_what_it_names(gates):
    op, (x, scale) = gates.GateFwdOp(3.0), tensors()
    assert gates.GateFwdOp.backward_class() is gates.GateBwdOp
    gate, plain, sign = op(x, scale, torch.arange(4))
    assert not sign.requires_grad, "declared"
    (gate.sum() + plain.sum()).backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2 * scale.detach() + 3)
    torch.testing.assert_close(scale.grad, (x.detach() ** 3).sum(0))
    (backward,) = op._state.gradients.values()
    assert repr(backward) == "GateBwdOp(power=3.0, wants_x=True, wants_scale=True)"


def test_zeros_stand_for_an_output_that_is_not_used(gates):
    op, (x, scale) = gates.GateFwdOp(), tensors()
    op(x, scale)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))
    assert torch.equal(scale.grad, torch.zeros_like(scale))


@pytest.mark.parametrize("with_scale", [False, True])
def test_by_differences(gates, with_scale):
    op, (x, scale) = gates.GateFwdOp(2.5), tensors()
    given = (x, scale) if with_scale else (x,)
    assert torch.autograd.gradcheck(lambda *a: op(*a)[:2], given)
    # The backward's own gradient is derived from its decomposition, and flows through the saved output.
    assert torch.autograd.gradgradcheck(lambda *a: op(*a)[:2], given)


def test_compiled(gates):
    op, (x, scale) = gates.GateFwdOp(3.0), tensors()
    torch._dynamo.reset()
    run, seen = compiled(lambda x, scale: op(x.exp(), scale)[0])
    run(x, scale).sum().backward()
    names = [n.rsplit("_", 2) for n in seen.joint if "gate" in n and n.startswith("tileops")]
    assert [n[-1] for n in names] == ["fwd.default", "bwd.default"]
    assert (
        seen.count(gates.GateFwdOp.compile_op_names[0].removeprefix("tileops::"), "backward") == 0
    ), "the backward needs the output: to compute it again would save nothing"
    wanted = 3 * (3 * x.detach()).exp() * scale.detach()
    torch.testing.assert_close(x.grad, wanted)


def test_a_saved_output_that_was_written(gates):
    op, (x, scale) = gates.GateFwdOp(), tensors()
    gate = op(x, scale)[0]
    with torch.no_grad():
        gate.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gate.sum().backward()


def test_the_validator_accepts_it(tmp_path):
    _, manifest = package(tmp_path)
    assert not check(manifests=[manifest]).faults


FAULTS = [
    (
        ("      grad_gate: {dtype: T,", "      grad_gates: {dtype: T,"),
        "its first inputs are grad_gate, grad_plain; given grad_gates, grad_plain, x, gate, scale",
    ),
    (
        ('      x: {dtype: T, shape: "[*B, N]"}\n      gate:', '      y: {dtype: T, shape: "[*B, N]"}\n      gate:'),
        "inputs.y: GateFwdOp has no input or output of this name",
    ),
    (
        ('      gate: {dtype: T, shape: "[*B, N]"}\n      scale', '      gate: {dtype: float32, shape: "[*B, N]"}\n      scale'),
        "inputs.gate.dtype: given float32; accepted: T, as the output",
    ),
    (
        ('grad_plain: {dtype: T, shape: "[*B, N]"}', 'grad_plain: {dtype: T, shape: "[N, *B]"}'),
        "inputs.grad_plain.shape: given '[N, *B]'; accepted: '[*B, N]', as the output",
    ),
    (
        ("wants_x: {type: bool, default: true, kw_only: true}", "wants_x: {type: bool, default: false, kw_only: true}"),
        "params.wants_x: it is a bool, kw_only, of default true",
    ),
    (
        ("power: {type: float, default: 2.0}\n      wants", "power: {type: float, default: 3.0}\n      wants"),
        "params.power: its type and default are the forward's",
    ),
    (
        ("power: {type: float, default: 2.0}\n      wants", "speed: {type: float, default: 2.0}\n      wants"),
        "params.speed: GateFwdOp has no parameter of this name",
    ),
    (('nullable: "not wants_x"', 'nullable: "wants_x"'), "outputs.grad_x.nullable: accepted: 'not wants_x'"),
    (
        ('nullable: "not wants_x"', 'nullable: "not (wants_x or wants_scale)"'),
        "outputs.grad_x.nullable: accepted: 'not wants_x'",
    ),
    (
        ("      grad_scale: {", "      scale_grad: {"),
        "its outputs are grad_x, grad_scale; given grad_x, scale_grad",
    ),
    (
        (
            '      grad_scale: {dtype: T, shape: "[N]", nullable: "not (wants_scale and passed(scale))"}\n', "",
            'nullable: "not wants_x"', 'nullable: "not (wants_x or wants_scale)"',
        ),
        "outputs.grad_x.shape: given '[*B, N]'; accepted: '[N]', as the input",
    ),
    (
        ('scale: {dtype: T, shape: "[N]", optional: true}\n    outputs:\n      grad', 'scale: {dtype: T, shape: "[N]"}\n    outputs:\n      grad'),
        "inputs.scale: it is optional as the forward's input is",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "fault"), FAULTS, ids=[fault[:40] for _, fault in FAULTS])
def test_what_does_not_fit_is_named(change, fault, tmp_path):
    (tmp_path / "gates").mkdir()
    path = tmp_path / "gates" / "manifest.yaml"
    path.write_text(swap(MANIFEST, *change))
    entries = load_family(path)
    assert fault in faults_of_backward(entries["GateFwdOp"], entries["GateBwdOp"])


def test_the_validator_says_it_where_it_is_written(tmp_path):
    change = ("  backward: GateBwdOp", "  backward: GateBwdOp  # here")
    text = swap(MANIFEST, *change, 'nullable: "not wants_x"', 'nullable: "wants_x"')
    module, manifest = package(tmp_path, text)
    faults = [f for f in check(manifests=[manifest]).faults if "backward" in f.problem]
    assert [f.line for f in faults] == [marked(text)]
    assert (
        faults[0].problem == "backward: GateBwdOp: outputs.grad_x.nullable: accepted: 'not wants_x'"
    )
    x, _ = tensors()
    with pytest.raises(ValueError, match="GateBwdOp: as backward of GateFwdOp: outputs.grad_x"):
        module.GateFwdOp()(x)


def test_a_class_that_is_not_there(tmp_path):
    module, _ = package(tmp_path, module=MODULE.replace("class GateBwdOp(Op)", "class GateBwd"))
    with pytest.raises(
        ValueError, match=r"neither gates\d+.gate nor gates\d+ has a class 'GateBwdOp'"
    ):
        module.GateFwdOp()(tensors()[0])


def test_a_derived_op_takes_no_name_of_an_entry():
    """``BatchNormBwdOp`` is the public operator of that name, and not by the convention."""
    derived = BatchNormFwdOp.backward_class()
    assert derived is not BatchNormBwdOp
    assert not set(derived.compile_op_names) & set(BatchNormBwdOp.compile_op_names)
    assert torch.ops.tileops.norm_batch_norm_bwd.default._schema.arguments[0].name == "doutput"


def test_names(tmp_path):
    """They follow from the entry alone."""
    assert backward_name("RMSNormFwdOp") == "RMSNormBwdOp"
    assert backward_name("RMSNormBwdOp") == "RMSNormBwdBwdOp"
    assert backward_name("BatchNormFwdOp", {"BatchNormBwdOp"}) == "BatchNormFwdBwdOp"
    (tmp_path / "gates").mkdir()
    path = tmp_path / "gates" / "manifest.yaml"
    path.write_text(textwrap.dedent(MANIFEST))
    entry = load_family(path)["GateBwdOp"]
    derived, wiring = derived_backward(entry)
    assert [i.name for i in derived.inputs] == [
        "grad_grad_x", "grad_grad_scale", "grad_gate", "grad_plain", "x", "gate", "scale",
    ]  # fmt: skip
    assert wiring.wants == (
        "wants_grad_gate", "wants_grad_plain", "wants_wants_x", "wants_gate", "wants_wants_scale",
    )  # fmt: skip
    assert [o.name for o in derived.outputs] == [
        "grad_grad_gate", "grad_grad_plain", "grad_x", "grad_grad_grad_gate", "grad_scale",
    ]  # fmt: skip
