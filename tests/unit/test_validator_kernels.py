"""The validator on torch operators and kernels."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.op_packages import MODULE, swap
from tileops.engine.validate import Report, check
from tileops.engine.validate.classes import check_class
from tileops.engine.validate.find import scan

# ---- operators -----------------------------------------------------------------------------------


@pytest.fixture
def loaded(package):
    """A class that is in order, with its home; tests then bend it."""
    manifest = package()
    assert check(manifests=[manifest]).faults == []
    module = sys.modules[f"{manifest.parent.name}.ops"]
    return module.ScaleFwdOp, scan(manifest, Report())["ScaleFwdOp"]


def class_faults(op_cls, home) -> list[str]:
    report = Report()
    check_class(op_cls, home, report)
    assert {f.file for f in report.faults} <= {str(home.file)}
    assert {f.line for f in report.faults} <= {home.line, home.methods["decomposition"]}
    return [fault.problem for fault in report.faults]


def test_operator_names(loaded):
    op_cls, home = loaded
    family = op_cls.entry.family
    name = f"tileops::{family}_scale_fwd"
    assert op_cls.compile_op_names == (name,)
    op_cls.compile_op_names = ()
    assert class_faults(op_cls, home) == [f"compile_op_names is (); the entry says ('{name}',)"]
    op_cls.compile_op_names = (name,)
    op_cls.entry = dataclasses.replace(op_cls.entry, composition={"a": "ScaleFwdOp"})
    assert f"compile_op_names is ('{name}',); the entry says ()" in class_faults(op_cls, home)


def test_an_operator_that_torch_does_not_have(loaded):
    op_cls, home = loaded
    op_cls.entry = dataclasses.replace(
        op_cls.entry, family="nowhere", branches=op_cls.entry.branches
    )
    op_cls.compile_op_names = ("tileops::nowhere_scale_fwd",)
    assert class_faults(op_cls, home) == ["torch has no operator tileops::nowhere_scale_fwd"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"optional": False}, "Tensor bias, Optional[Tensor] table, str instance_key) -> 1 tensors"),
        ({"name": "offset"}, "Optional[Tensor] offset, Optional[Tensor] table, str instance_key)"),
    ],
)  # fmt: skip
def test_schemas(loaded, change, shown):
    op_cls, home = loaded
    x, bias, table = op_cls.entry.inputs
    entry = dataclasses.replace(
        op_cls.entry, inputs=(x, dataclasses.replace(bias, **change), table),
        branches=op_cls.entry.branches,
    )  # fmt: skip
    op_cls.entry = entry
    (problem,) = [p for p in class_faults(op_cls, home) if p.startswith("the schema")]
    name = op_cls.compile_op_names[0]
    assert problem.startswith(
        f"the schema of {name} is {name}(Tensor x, Tensor? bias, Tensor? table, "
    )
    assert f"the entry says (Tensor x, {shown}" in problem


def test_schemas_of_writes_and_absent_outputs(package):
    """Every kind of branch: a write, out, an output that does not exist."""
    manifest = """\
    WriteFwdOp:
      status: implemented
      reference: own
      kind: pointwise
      signature:
        dtypes: {T: [float32]}
        params: {inplace: {type: bool, default: false}}
        inputs:
          x: {dtype: T, shape: "[N]", mutated: inplace}
          state_in: {dtype: T, shape: "[N]", optional: true, mutated: passed(state_in)}
        outputs:
          y: {dtype: T, shape: "[N]", is_input: x}
          z: {dtype: T, shape: "[2*N]", nullable: inplace}
      workloads:
        - {label: one, dims: {N: 3}, passed: [state_in], dtypes: {T: float32}}
        - {label: two, dims: {N: 3}, params: {inplace: true}, dtypes: {T: float32}}
        - {label: three, dims: {N: 3}, params: {inplace: true}, passed: [state_in]}
      cost: {flops: N}
    """
    module = """\
    import torch
    from tileops.authoring import Op

    class WriteFwdOp(Op):
        @staticmethod
        def decomposition(x, state_in, *, inplace):
            new = () if state_in is None else (state_in + x,)
            return (x + 1, None if inplace else torch.cat((x, x)), *new)
    """
    path = package(manifest, module)
    assert check(manifests=[path]).faults == []
    wrong = module.replace("(state_in + x,)", "(state_in.double(),)")
    problem = "decomposition gives new state_in as float64[3]; the entry says float32[3]"
    faults = check(manifests=[package(manifest, wrong)]).faults
    assert [(f.line, f.problem) for f in faults] == [
        (line, f"workload '{label}': {problem}") for line, label in ((15, "one"), (17, "three"))
    ]
    op_cls = sys.modules[f"{path.parent.name}.ops"].WriteFwdOp
    home = scan(path, Report())["WriteFwdOp"]
    assert class_faults(op_cls, home) == []
    op_cls.entry = dataclasses.replace(
        op_cls.entry, outputs=(dataclasses.replace(op_cls.entry.outputs[0], is_input=None),
                               op_cls.entry.outputs[1]), branches=op_cls.entry.branches,
    )  # fmt: skip
    assert any("-> 1 tensors" in p and "(written) x" in p for p in class_faults(op_cls, home))


# ---- kernels -------------------------------------------------------------------------------------

KERNELS = """\
    import triton

    from tileops.authoring import Kernel

    class Special(Kernel):
        name = "special"

        @classmethod
        def entry_for(cls, call):
            raise NotImplementedError

    class General(Special):
        name = "general"
        general = True

    class Other(Special):
        name = "other"
        general = True

    class Host(Special):
        name = "host"
        devices = ("cpu",)

    class Twin(Special):
        pass

    class Tuned(Kernel):
        name = "tuned"

        @classmethod
        def candidates(cls, call):
            raise NotImplementedError

    class Nameless(Kernel):
        entry_for = Special.entry_for

    class Bare(Kernel):
        name = "bare"

    class NoKernel:
        pass
"""


def with_kernels(package, interface: str) -> Path:
    module = swap(MODULE, "class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here",
                  "    @staticmethod",
                  f"    kernel = KernelInterface({interface})\n\n    @staticmethod")  # fmt: skip
    return package(module=module, ks=KERNELS)


def test_sound_kernels(package):
    manifest = with_kernels(
        package, "cuda=('ks:Special', 'ks:General', 'ks:Tuned'), cpu=('ks:Host',)"
    )
    report = check(manifests=[manifest])
    assert (report.faults, report.notes) == ([], [])


@pytest.mark.parametrize(
    ("interface", "problem"),
    [
        ("cuda=('absent:Special',)", "kernel absent:Special: No module named"),
        ("cuda=('ks:Absent',)", "kernel ks:Absent: {package}.kernels.ks has no Kernel class 'Absent'"),
        ("cuda=('ks:NoKernel',)",
         "kernel ks:NoKernel: {package}.kernels.ks has no Kernel class 'NoKernel'"),
        ("cuda=('ks:General', 'ks:Other')",
         "cuda: at most one kernel is general, and ks:General and ks:Other are"),
        ("cpu=('ks:Special',)", "kernel ks:Special stands under cpu and is for cuda"),
        ("cuda=('ks:Host',)", "kernel ks:Host stands under cuda and is for cpu"),
        ("cuda=('ks:Special', 'ks:Twin')", "kernels ks:Special and ks:Twin have one name, 'special'"),
        ("cuda=('ks:Nameless',)", "kernel ks:Nameless has no name"),
        ("cuda=('ks:Bare',)", "kernel ks:Bare defines neither entry_for nor candidates"),
    ],
)  # fmt: skip
def test_kernels(package, interface, problem):
    manifest = with_kernels(package, interface)
    report = check(manifests=[manifest])
    (fault,) = report.faults
    assert fault.problem.startswith(problem.format(package=manifest.parent.name))
    assert (fault.file, fault.line) == (str(manifest.parent / "ops.py"), 8)


def test_a_kernel_module_that_raises(package):
    manifest = with_kernels(package, "cuda=('ks:Special',)")
    path = manifest.parent / "kernels" / "ks.py"
    path.write_text("raise ValueError('no')\n")
    (fault,) = check(manifests=[manifest]).faults
    assert fault.problem == "kernel ks:Special: ValueError: no"


def test_without_triton_kernels_are_looked_up_as_text(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    manifest = with_kernels(package, "cuda=('ks:Special', 'more:Special', 'ks:Absent')")
    (manifest.parent / "kernels" / "more.py").write_text("from .ks import Special\n")
    report = check(manifests=[manifest])
    assert report.notes == ["triton is not installed: its kernels were looked up as text only"]
    assert [f.problem for f in report.faults] == [
        "kernel ks:Absent: kernels/ks.py has no class Absent"
    ]
