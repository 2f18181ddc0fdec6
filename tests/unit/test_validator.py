"""The validator: the tree passes, and each rule broken is named with file, line and entry.

Each test writes a small package of ops outside the tree, sound but for one thing. ``# here`` marks the
line that the fault must name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tileops.cli import main
from tileops.engine.manifest.catalog import families
from tileops.engine.validate import Fault, Report, check
from tileops.engine.validate.classes import check_class
from tileops.engine.validate.find import scan

MANIFEST = """\
ScaleFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float16, float32]}
    params:
      factor: {type: float, default: 2.0}
      mode: {type: "enum(a,b)", default: a, kw_only: true}
    inputs:
      x: {dtype: T, shape: "[*B, N]"}
      bias: {dtype: T, shape: "[N]", optional: true}
      table: {dtype: [int32, int64], shape: "[N]", optional: "mode == 'b'"}
    outputs:
      y: {dtype: T, shape: "[*B, N]"}
  workloads:
    - {label: one, dims: {B: [4], N: 8}, passed: [bias], dtypes: {T: float32}}
    - {label: two, dims: {B: [], N: 8}, params: {mode: b}, dtypes: {T: float16, table: int64}}
  cost:
    flops: "2 * prod(B) * N"
"""

MODULE = '''\
"""Ops of a test."""

import torch

from tileops.authoring import Kernel, KernelInterface, Op


class ScaleFwdOp(Op):
    """``factor * x + bias``."""

    @staticmethod
    def decomposition(x, bias, table, *, factor, mode):
        return x * factor if bias is None else x * factor + bias
'''

_numbers = itertools.count()


@pytest.fixture
def package(tmp_path):
    """``package(manifest, module, **kernel modules)`` writes a package; returns its manifest."""

    def write(manifest: str = MANIFEST, module: str | None = MODULE, **kernels: str) -> Path:
        folder = tmp_path / f"outside{next(_numbers)}"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "manifest.yaml").write_text(dedent(manifest))
        if module is not None:
            (folder / "ops.py").write_text(dedent(module))
        if kernels:
            (folder / "kernels").mkdir()
            (folder / "kernels" / "__init__.py").touch()
            for name, text in kernels.items():
                (folder / "kernels" / f"{name}.py").write_text(dedent(text))
        return folder / "manifest.yaml"

    return write


def swap(text: str, *pairs: str) -> str:
    """``text`` with the first of each pair, which it holds once, replaced by the second."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def assert_faults(manifest: Path, *problems: str, entry: str = "ScaleFwdOp") -> Report:
    """The report holds these faults and no other, all at the marked line."""
    report = check(manifests=[manifest])
    found = [fault.problem for fault in report.faults]
    assert found == list(problems), found
    marked = [
        (str(path), number)
        for path in sorted(manifest.parent.rglob("*"))
        if path.suffix in (".py", ".yaml")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# here" in line
    ]
    assert {(fault.file, fault.line) for fault in report.faults} == set(marked)
    assert {fault.entry for fault in report.faults} == {entry}
    return report


# ---- what is sound -------------------------------------------------------------------------------


def test_a_sound_package(package):
    report = check(manifests=[package()])
    assert (report.faults, report.notes, report.unknown) == ([], [], {})
    assert report.checked == ["ScaleFwdOp"]


def test_the_tree_passes(capsys):
    assert main(["check"]) == 0
    captured = capsys.readouterr()
    assert "0 faults" in captured.out
    assert captured.err == ""
    report = check()
    assert report.faults == []
    assert len(report.checked) >= 19
    assert not any("triton" in note for note in report.notes)


def test_all_faults_are_reported_in_order(package):
    manifest = package(
        swap(MANIFEST, "N: 8}, passed", "N: 8, M: 2}, passed", "default: 2.0", "default: x",
             "T: float16, table: int64", "T: float64"),
        swap(MODULE, "factor, mode", "mode, factors"),
    )  # fmt: skip
    faults = check(manifests=[manifest]).faults
    assert [(Path(f.file).name, f.line) for f in faults] == [
        ("manifest.yaml", 8),
        ("manifest.yaml", 17),
        ("manifest.yaml", 18),
        ("ops.py", 12),
    ]
    assert faults == sorted(faults)


def test_two_files_and_one_that_does_not_load(package):
    sound, broken = package(), package("ScaleFwdOp: 3\n")
    faulty = package(swap(MANIFEST, "default: 2.0", "default: x"))
    report = check(manifests=[sound, broken, faulty])
    assert [(f.file, f.line, f.entry) for f in report.faults] == [
        (str(broken), 1, "ScaleFwdOp"),
        (str(faulty), 8, "ScaleFwdOp"),
    ]
    assert check(manifests=[sound.parent / "absent.yaml"]).faults[0].line == 1


def test_only_the_named_ops_are_checked(package):
    second = MANIFEST.replace("ScaleFwdOp", "OtherFwdOp").replace("default: 2.0", "default: x")
    manifest = package(MANIFEST + second, MODULE + MODULE.replace("ScaleFwdOp", "OtherFwdOp"))
    report = check(["ScaleFwdOp"], [manifest])
    assert (report.checked, report.faults) == (["ScaleFwdOp"], [])
    assert [f.entry for f in check(manifests=[manifest]).faults] == ["OtherFwdOp"]


# ---- classes and entries -------------------------------------------------------------------------


def test_an_entry_without_a_class(package):
    manifest = package(swap(MANIFEST, "status: implemented", "status: implemented  # here"), None)
    assert_faults(
        manifest, f"the entry says implemented, but no module of {manifest.parent} has the class"
    )


def test_a_planned_entry_needs_no_class(package):
    planned = swap(MANIFEST, "status: implemented", "status: planned")
    assert check(manifests=[package(planned, None)]).faults == []
    report = check(manifests=[package(planned)])
    assert report.faults == []
    assert report.notes == ["ScaleFwdOp: the class exists and the entry says planned"]


def test_a_class_without_an_entry(package):
    extra = "\n\nclass ExtraFwdOp(Op):  # here\n    pass\n"
    manifest = package(module=MODULE + extra)
    report = assert_faults(manifest, f"the class has no entry in {manifest}", entry="ExtraFwdOp")
    assert report.notes == ["ScaleFwdOp: not checked, because its module does not import"]


def test_a_class_that_is_defined_twice(package):
    manifest = package()
    text = MODULE.replace("class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here")
    (manifest.parent / "other.py").write_text(text)
    assert_faults(manifest, "the class is also in ops.py:8")


def test_a_module_that_raises(package):
    manifest = package(
        module=swap(MODULE, "import torch\n", "import torch\n\nraise OSError(7)  # here")
    )
    assert_faults(manifest, "the module does not import: OSError: 7")


def test_a_module_that_is_not_python(package):
    manifest = package()
    (manifest.parent / "more.py").write_text("x = 1\ndef (:  # here\n")
    assert_faults(manifest, "does not parse: invalid syntax", entry="")


def test_modules_below_the_family_and_kernels_apart(package):
    manifest = package(module=None)
    inner = manifest.parent / "inner"
    for folder in (inner, manifest.parent / "kernels", manifest.parent / "other"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (inner / "deep.py").write_text(MODULE)
    (manifest.parent / "kernels" / "k.py").write_text("class NoFwdOp(Op): pass\n")
    (manifest.parent / "other" / "manifest.yaml").touch()
    (manifest.parent / "other" / "o.py").write_text("class NoFwdOp(Op): pass\n")
    (manifest.parent / "helper.py").write_text("class NoFwdOp: pass\n")
    homes = scan(manifest, Report())
    assert [(h.name, h.file, h.line, h.methods) for h in homes.values()] == [
        ("ScaleFwdOp", inner / "deep.py", 8, {"decomposition": 12})
    ]
    assert check(manifests=[manifest]).faults == []


def test_a_class_that_is_not_an_op(package):
    base = "class BaseOp:\n    pass\n\n\n"
    module = swap(MODULE, "class ScaleFwdOp(Op):", base + "class ScaleFwdOp(BaseOp):  # here")
    assert_faults(package(module=module), "it is not an Op")


def test_module_names_are_not_confused(package, monkeypatch):
    """Two packages of one name: the second is not taken for the first."""
    first = package()
    assert check(manifests=[first]).faults == []
    second = first.parent.parent / "again" / first.parent.name
    second.mkdir(parents=True)
    for name in ("__init__.py", "ops.py", "manifest.yaml"):
        (second / name).write_text((first.parent / name).read_text())
    (fault,) = check(manifests=[second / "manifest.yaml"]).faults
    assert (fault.file, fault.line) == (str(second / "ops.py"), 1)
    assert f"the module name '{first.parent.name}.ops' is taken by" in fault.problem


# ---- constructor, forward, decomposition -------------------------------------------------------------


def with_init(parameters: str) -> str:
    init = f"""\
    def __init__(self, {parameters}):  # here
        self._construct((factor,), {{"mode": mode, "target": target}})

    @staticmethod
"""
    return swap(MODULE, "    @staticmethod\n", init)


def test_a_constructor_written_by_hand(package):
    module = with_init("factor=2.0, *, mode='a', target=None").replace("  # here", "")
    assert check(manifests=[package(module=module)]).faults == []


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ("factor=2.0, *, target=None, mode='a'",
         "__init__ takes (factor=2.0, *, target=None, mode='a'); "
         "the entry says (factor=2.0, *, mode='a', target=None)"),
        ("*, factor=2.0, mode='a'",
         "__init__ takes (*, factor=2.0, mode='a'); the entry says (factor=2.0, *, mode='a', target=None)"),
        ("factor=3.0, *, mode='a', target=None",
         "__init__: 'factor' defaults to 3.0; the entry says it defaults to 2.0"),
        ("factor, *, mode='a', target=None", "__init__: 'factor' is required; the entry says it defaults to 2.0"),
        ("factor=2.0, *, mode, target=None", "__init__: 'mode' is required; the entry says it defaults to 'a'"),
        ("factor=2.0, *, mode='z', target=None", "__init__: 'mode' defaults to 'z'; the entry says it defaults to 'a'"),
        ("factor=2.0, mode='a', *, target=None",
         "__init__: 'mode' is positional or keyword; the entry says keyword-only"),
        ("factor=2.0, *, mode='a', target='builtin'",
         "__init__: 'target' defaults to 'builtin'; the entry says it defaults to None"),
    ],
)  # fmt: skip
def test_a_constructor_that_differs(package, parameters, problem):
    module = with_init(parameters)
    if "target" not in parameters:
        module = module.replace('"target": target', '"target": None')
    assert_faults(package(module=module), problem)


def test_defaults_are_compared_in_normal_form(package):
    manifest = swap(MANIFEST, "factor: {type: float, default: 2.0}",
                    "factor: {type: float, default: nan}\n      kind: {type: dtype, default: float16}\n"
                    "      sizes: {type: ints, default: [3]}")  # fmt: skip
    init = """\
    def __init__(
        self, factor=float("nan"), kind=torch.float16, sizes=3, *, mode="a", target=None
    ):
        self._construct((factor, kind, sizes), {"mode": mode, "target": target})

    @staticmethod
"""
    module = swap(
        MODULE, "    @staticmethod\n", init, "*, factor, mode", "*, factor, kind, sizes, mode"
    )
    assert check(manifests=[package(manifest, module)]).faults == []


def test_a_forward_that_never_runs(package):
    module = MODULE + "\n    def forward(self, x):  # here\n        return x\n"
    module = swap(module, "class ScaleFwdOp", "class ScaleFwdOp")
    report = check(manifests=[package(module=module)])
    problems = [fault.problem for fault in report.faults]
    assert problems == ["forward never runs: an op with a boundary is served by kernels"]
    assert report.faults[0].line == marked(module)


def marked(text: str) -> int:
    (line,) = [n for n, t in enumerate(text.splitlines(), 1) if "# here" in t]
    return line


def test_a_call_written_by_hand(package):
    module = MODULE + "\n    def __call__(self, *args):  # here\n        return args[0]\n"
    assert_faults(
        package(module=module), "__call__ is generated; what the class writes is not used"
    )


def test_a_call_that_was_replaced(package):
    manifest = package(
        module=swap(MODULE, "class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here")
        + "\n\nScaleFwdOp.__call__ = lambda self, x, bias, table=None: None\n"
    )
    problem = "__call__: 'bias' is required; the entry says it defaults to None"
    report = check(manifests=[manifest])
    assert problem in [f.problem for f in report.faults]
    assert {(f.file, f.line) for f in report.faults if f.problem == problem} == {
        (str(manifest.parent / "ops.py"), 8)
    }


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ("bias, x, table, *, factor, mode", True),
        ("x, bias, *, factor, mode", True),
        ("x, bias, table, *, factor", True),
        ("x, bias, table, *, factor, mode, more=None", True),
        ("x, bias, table, mode, factor", False),
    ],
)
def test_a_decomposition_takes_inputs_then_params(package, parameters, wanted):
    module = swap(MODULE, "(x, bias, table, *, factor, mode):", f"({parameters}):  # here")
    if not wanted:
        assert check(manifests=[package(module=module)]).faults == []
        return
    report = check(manifests=[package(module=module)])
    names = parameters.replace("*, ", "").replace("=None", "")
    problem = f"decomposition takes ({names}); the entry says (x, bias, table, factor, mode)"
    # The line of the function, which its decorator does not count to.
    (fault,) = [f for f in report.faults if f.file.endswith("ops.py")]
    assert (fault.problem, fault.line) == (problem, marked(module))


def test_a_decomposition_is_needed(package):
    module = MODULE.split("    @staticmethod")[0]
    module = swap(module, "class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here")
    faults = check(manifests=[package(module=module)]).faults
    assert [(f.problem, f.line) for f in faults if f.file.endswith("ops.py")] == [
        ("decomposition is missing: it is what serves any device", 8)
    ]


# ---- compositions ------------------------------------------------------------------------------------

STAGES = """\
TwiceFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float16, float32]}
    inputs:
      x: {dtype: T, shape: "[*B, N]"}
      bias: {dtype: T, shape: "[N]", optional: true, kw_only: true}
    outputs:
      y: {dtype: T, shape: "[*B, N]", buffer: out}
  composition: {first: ScaleFwdOp, second: ScaleFwdOp}
  workloads:
    - {label: one, dims: {B: [4], N: 8}, passed: [bias], dtypes: {T: float32}}
    - {label: two, dims: {B: [2], N: 8}, dtypes: {T: float16}}
  cost:
    flops: "4 * prod(B) * N"
"""

TWICE = '''

class TwiceFwdOp(Op):
    """Scales twice."""

    def setup(self):
        self.settle(first=ScaleFwdOp(3.0, target=self.target), second=ScaleFwdOp(target=self.target))

    def forward(self, x, *, bias=None, out=None):
        y = self.second(self.first(x, bias), bias)
        return y if out is None else out.copy_(y)
'''


def composed(package, manifest: str = STAGES, module: str = TWICE) -> Path:
    return package(MANIFEST + manifest, MODULE + module)


def test_a_sound_composition(package):
    assert check(manifests=[composed(package)]).faults == []


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ("self, *, bias=None, out=None",
         "forward takes (*, bias=None, out=None); the entry says (x, *, bias=None, out=None)"),
        ("self, x, *, bias=None",
         "forward takes (x, *, bias=None); the entry says (x, *, bias=None, out=None)"),
        ("self, x, *, out=None, bias=None",
         "forward takes (x, *, out=None, bias=None); the entry says (x, *, bias=None, out=None)"),
        ("self, x, *, bias, out=None", "forward: 'bias' is required; the entry says it defaults to None"),
        ("self, x=None, *, bias=None, out=None", "forward: 'x' defaults to None; the entry says it is required"),
        ("self, x, bias=None, *, out=None",
         "forward: 'bias' is positional or keyword; the entry says keyword-only"),
    ],
)  # fmt: skip
def test_a_forward_that_differs(package, parameters, problem):
    module = swap(
        TWICE,
        "def forward(self, x, *, bias=None, out=None):",
        f"def forward({parameters}):  # here",
    )
    report = check(manifests=[composed(package, module=module)])
    found = [f for f in report.faults if f.file.endswith("ops.py")]
    assert [(f.problem, f.line, f.entry) for f in found] == [
        (problem, marked(MODULE + module), "TwiceFwdOp")
    ]


def test_a_forward_that_is_missing(package):
    module = TWICE.split("    def forward")[0].replace(
        "class TwiceFwdOp(Op):", "class TwiceFwdOp(Op):  # here"
    )
    report = check(manifests=[composed(package, module=module)])
    found = [(f.problem, f.line) for f in report.faults if f.file.endswith("ops.py")]
    assert found == [("forward is missing: a composition writes its own", marked(MODULE + module))]


def test_what_a_composition_returns(package):
    module = swap(TWICE, "return y if", "return y.double() if")
    manifest = composed(package, module=module)
    report = check(manifests=[manifest])
    assert [(f.line, f.problem) for f in report.faults] == [
        (34, "workload 'one': the call gives y as float64[4, 8]; the entry says float32[4, 8]"),
        (35, "workload 'two': the call gives y as float64[2, 8]; the entry says float16[2, 8]"),
    ]


@pytest.mark.parametrize(
    ("composition", "extra", "problem"),
    [
        ("  composition:\n    first: ScaleFwdOp\n    second: ScalesFwdOp  # here\n", "",
         "composition.second: no entry is named 'ScalesFwdOp'"),
        ("  composition:\n    first: ScaleFwdOp\n    second: LaterFwdOp  # here\n",
         MANIFEST.replace("ScaleFwdOp", "LaterFwdOp").replace("status: implemented", "status: planned"),
         "composition.second: 'LaterFwdOp' is planned"),
        ("  composition: {first: ScaleFwdOp}\n  backward: ScaleBwdOp  # here\n", "",
         "backward: no entry is named 'ScaleBwdOp'"),
        ("  composition: {first: ScaleFwdOp, second: RMSNormFwdOp}\n", "", None),
    ],
)  # fmt: skip
def test_named_ops(package, composition, extra, problem):
    line = "  composition: {first: ScaleFwdOp, second: ScaleFwdOp}\n"
    manifest = composed(package, swap(STAGES, line, composition) + extra)
    report = check(manifests=[manifest])
    found = [(f.line, f.problem) for f in report.faults if "stage" not in f.problem]
    if problem is None:
        assert found == []
        assert {f.problem for f in report.faults} == {
            f"workload '{label}': stage second is a ScaleFwdOp; the entry says RMSNormFwdOp"
            for label in ("one", "two")
        }
    else:
        assert found == [(marked(manifest.read_text()), problem)]


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
        ({"optional": False}, "(Tensor x, Tensor bias, Optional[Tensor] table, str instance_key) -> 1 tensors"),
        ({"name": "offset"}, "(Tensor x, Optional[Tensor] offset, Optional[Tensor] table, str instance_key)"),
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
    assert f"the entry says {shown}" in problem


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
    faults = check(manifests=[package(manifest, wrong)]).faults
    assert [(f.line, f.problem) for f in faults] == [
        (line, f"workload '{label}': decomposition gives new state_in as float64[3]; "
               "the entry says float32[3]")
        for line, label in ((15, "one"), (17, "three"))
    ]  # fmt: skip
    op_cls = sys.modules[f"{path.parent.name}.ops"].WriteFwdOp
    home = scan(path, Report())["WriteFwdOp"]
    x, state = op_cls.entry.inputs
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

    class Nameless(Kernel):
        entry_for = Special.entry_for

    class Bare(Kernel):
        name = "bare"

    class NoKernel:
        pass
"""


def with_kernels(package, interface: str) -> Path:
    module = swap(MODULE, "class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here",
                  "    @staticmethod", f"    kernel = KernelInterface({interface})\n\n    @staticmethod")  # fmt: skip
    return package(module=module, ks=KERNELS)


def test_sound_kernels(package):
    manifest = with_kernels(package, "cuda=('ks:Special', 'ks:General'), cpu=('ks:Host',)")
    report = check(manifests=[manifest])
    assert (report.faults, report.notes) == ([], [])


@pytest.mark.parametrize(
    ("interface", "problem"),
    [
        ("cuda=('absent:Special',)", "kernel absent:Special: No module named"),
        ("cuda=('ks:Absent',)", "kernel ks:Absent: {package}.kernels.ks has no Kernel class 'Absent'"),
        ("cuda=('ks:NoKernel',)", "kernel ks:NoKernel: {package}.kernels.ks has no Kernel class 'NoKernel'"),
        ("cuda=('ks:General', 'ks:Other')",
         "cuda: at most one kernel is general, and ks:General and ks:Other are"),
        ("cpu=('ks:Special',)", "kernel ks:Special stands under cpu and is for cuda"),
        ("cuda=('ks:Host',)", "kernel ks:Host stands under cuda and is for cpu"),
        ("cuda=('ks:Special', 'ks:Twin')", "kernels ks:Special and ks:Twin have one name, 'special'"),
        ("cuda=('ks:Nameless',)", "kernel ks:Nameless has no name"),
        ("cuda=('ks:Bare',)", "kernel ks:Bare does not define entry_for"),
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


# ---- what an entry says ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("factor: {type: float, default: 2.0}", "factor:\n        type: float\n        default: two  # here",
         "params.factor.default: given 'two' (str); accepted: a float"),
        ("default: a,", "default: c,  # here\n       ",
         "params.mode.default: given 'c' (str); accepted: one of 'a', 'b'"),
        ("    dtypes: {T: [float16, float32]}", "    dtypes:\n      T: [float16, float32]\n      U: [int8]  # here",
         "dtypes.U: is not used"),
        ('      bias: {dtype: T, shape: "[N]", optional: true}',
         '      bias:\n        dtype: T\n        shape: "[N]"\n        optional: true\n        content: {max: N}  # here',
         "inputs.bias.content: is for integers, and bias may be float16"),
    ],
)  # fmt: skip
def test_entries(package, old, new, problem):
    manifest = swap(MANIFEST, old, new)
    report = check(manifests=[package(manifest)])
    lines = {f.line for f in report.faults if f.problem == problem}
    assert lines == {marked(manifest)}, report.faults


def test_a_dtype_variable_that_nothing_binds(package):
    manifest = swap(
        MANIFEST, "dtypes: {T: [float16, float32]}",
        "dtypes:\n      T: [float16, float32]\n      U: [float32]  # here",
        'y: {dtype: T, shape: "[*B, N]"}', 'y: {dtype: "U if mode == \'z\' else T", shape: "[*B, N]"}',
    )  # fmt: skip
    assert_faults(package(manifest), "dtypes.U: is never bound: no input's dtype is just it")


def test_a_parameter_with_the_name_of_an_attribute(package):
    manifest = MANIFEST.replace("mode:", "last_call:  # here\n       ", 1)
    manifest = manifest.replace("mode == 'b'", "last_call == 'b'").replace(
        "{mode: b}", "{last_call: b}"
    )
    module = MODULE.replace("mode", "last_call")
    report = check(manifests=[package(manifest, module)])
    assert ("params.last_call: every op has an attribute of this name", marked(manifest)) in [
        (f.problem, f.line) for f in report.faults
    ]


def test_a_shape_that_cannot_be_solved(package):
    manifest = swap(
        MANIFEST, 'x: {dtype: T, shape: "[*B, N]"}', 'x: {dtype: T, shape: "[*B, N + 1]"}  # here'
    )
    assert_faults(
        package(manifest),
        "inputs.x.shape: cannot solve 'N + 1': N not known by then; only <dim>, <int>*<dim> and "
        "<dim>*<int> find a dim",
    )


# ---- optional inputs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("passed: [bias], ", ""), "inputs.bias: no workload passes it"),
        (("params: {mode: b}, dtypes", "params: {mode: b}, passed: [bias], dtypes"),
         "inputs.bias: no workload omits it"),
        (("params: {mode: b}, ", "", ", table: int64", ""), "inputs.table: no workload makes \"mode == 'b'\" true"),
        (("passed: [bias], ", "passed: [bias], params: {mode: b}, "),
         "inputs.table: no workload makes \"mode == 'b'\" false"),
    ],
)  # fmt: skip
def test_optional_inputs(package, changes, problem):
    name = problem.split(":")[0].removeprefix("inputs.")
    text = swap(MANIFEST, *changes)
    lines = [
        line + "  # here" if line.startswith(f"      {name}:") else line
        for line in text.splitlines()
    ]
    assert_faults(package("\n".join(lines)), problem)


# ---- workloads -----------------------------------------------------------------------------------

ONE = "    - {label: one, dims: {B: [4], N: 8}, passed: [bias], dtypes: {T: float32}}"


def with_workload(row: str, **changes: str) -> str:
    """The manifest with its first workload written over several lines, one of them bent."""
    fields = {
        "label": "one",
        "dims": "{B: [4], N: 8}",
        "passed": "[bias]",
        "dtypes": "{T: float32}",
    }
    key = row.split(":")[0]
    fields[key] = row.split(":", 1)[1].strip()
    lines = [f"      {k}: {v}{'  # here' if k == key else ''}" for k, v in fields.items()]
    return swap(MANIFEST, ONE, "    -" + "\n".join(lines)[5:])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("dims: {B: [4], N: 8, M: 2}", "dims.M: no shape has it; accepted: B, N"),
        ("dims: {B: 4, N: 8}", "dims.B: given 4; accepted: a list, because it is spliced"),
        ("dims: {B: [4], N: [8]}", "dims.N: given [8]; accepted: one size"),
        ("dims: {B: [-4], N: 8}", "dims.B: given [-4]; accepted: sizes of at least 0"),
        ("params: {factors: 2}", "params.factors: no such parameter; accepted: factor, mode"),
        ("passed: [bias, x]", "passed: 'x' is no optional input; accepted: bias, table"),
        ("passed: [bias, y]", "passed: 'y' is no optional input; accepted: bias, table"),
        ("passed: [bias, table]", "passed: 'table', but not: mode == 'b'"),
        ("dtypes: {T: float32, U: int8}", "dtypes.U: nothing has this dtype; accepted: T, table"),
        ("dtypes: {T: float64}", "dtypes.T: given float64; accepted: float16, float32"),
        ("dtypes: {T: float32, table: float32}", "dtypes.table: given float32; accepted: int32, int64"),
    ],
)  # fmt: skip
def test_what_a_workload_names(package, row, problem):
    report = assert_faults(package(with_workload(row)), f"workload 'one': {problem}")
    assert report.faults[0].entry == "ScaleFwdOp"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("dims: {N: 8}", "dims.B: is missing; input x needs it"),
        ("dims: {B: [4]}", "dims.N: is missing; input x needs it"),
        ("dtypes: {}", "dtypes.T: is missing; input x needs it"),
        ("params: {factor: x}", "'factor': given 'x' (str); accepted: a float"),
    ],
)
def test_workloads_that_do_not_bind(package, row, problem):
    manifest = swap(MANIFEST, ONE, ONE + "  # here")
    before, after = ONE.split(row.split(":")[0] + ": ")[0], row
    if "params" in row:
        changed = ONE.replace("passed:", row + ", passed:")
    elif row.startswith("dims"):
        changed = ONE.replace("dims: {B: [4], N: 8}", row)
    else:
        changed = ONE.replace("dtypes: {T: float32}", row)
    assert before
    assert after
    manifest = swap(MANIFEST, ONE, changed + "  # here")
    assert_faults(package(manifest), f"workload 'one': {problem}")


def test_a_workload_that_breaks_a_rule(package):
    rule = "    rules: [{require: N % 16 == 0 or len(B) == 0, message: N is a multiple of 16}]\n  workloads:"
    manifest = swap(MANIFEST, "  workloads:", rule, ONE, ONE + "  # here")
    problem = "workload 'one': 'table': given B=(4,), N=8; accepted: N is a multiple of 16"
    assert_faults(package(manifest), problem)


def test_a_dim_that_a_workload_does_not_use(package):
    shape = "\"[N] if mode == 'b' else [N, M]\", optional: true}"
    manifest = swap(
        MANIFEST, 'bias: {dtype: T, shape: "[N]", optional: true}', "bias: {dtype: T, shape: " + shape,
        ONE, ONE.replace("N: 8", "N: 8, M: 8"),
        "    - {label: two, dims: {B: [], N: 8}", "    - label: two\n      dims: {B: [], N: 8, M: 3}  # here\n",
        ", params: {mode: b}, dtypes: {T: float16, table: int64}}",
        "      params: {mode: b}\n      dtypes: {T: float16, table: int64}",
    )  # fmt: skip
    module = swap(MODULE, BODY, "return x * factor")
    assert_faults(
        package(manifest, module), "workload 'two': dims.M: this workload does not use it"
    )


def test_a_derived_dim_is_not_stated(package):
    manifest = swap(
        with_workload("dims: {B: [4], N: 8, H: 4}"),
        "    dtypes: {T: [f",
        "    dims: {H: N // 2}\n    dtypes: {T: [f",
    )
    assert_faults(package(manifest), "workload 'one': dims.H: is derived, so no workload states it")


def test_a_label_twice(package):
    manifest = swap(
        MANIFEST, "label: two", "label: one", "table: int64}}", "table: int64}}  # here"
    )
    assert_faults(package(manifest), "workload 'one': the label is also at line 17")


# ---- decompositions under fake tensors -----------------------------------------------------------

BODY = "return x * factor if bias is None else x * factor + bias"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return x.double()", "decomposition gives y as float64[4, 8]; the entry says float32[4, 8]"),
        ("return x[0]", "decomposition gives y as float32[8]; the entry says float32[4, 8]"),
        ("return x, x", "decomposition returns 2 values; the entry says 1: y"),
        ("return None", "decomposition gives y as None; the entry says float32[4, 8]"),
        ("return 3", "decomposition gives y as int; the entry says float32[4, 8]"),
        ("raise OSError('no')", "OSError: no (ops.py:15)"),
        ("assert not x.numel()", "AssertionError (ops.py:15)"),
        ("return x @ x", "RuntimeError: "),
        ("return x[:int(x.sum()) * 0]", "decomposition gives y as float32[0, 8]; the entry says float32[4, 8]"),
        ("return x[x > 9e9]", "decomposition gives y as float32[0]; the entry says float32[4, 8]"),
    ],
)  # fmt: skip
def test_decompositions(package, body, problem):
    module = swap(MODULE, BODY, f"if mode == 'b':\n            {BODY}\n        {body}")
    manifest = package(swap(MANIFEST, ONE, ONE + "  # here"), module)
    (fault,) = check(manifests=[manifest]).faults
    assert fault.problem.startswith(f"workload 'one': {problem}")
    assert (fault.file, fault.line, fault.entry) == (str(manifest), 17, "ScaleFwdOp")


def test_a_decomposition_that_reads_data_is_run_small(package):
    """It cannot run on fake tensors: real ones are made, of few elements."""
    body = "x = x + 0 * x.sum().item()\n        assert x.numel() <= 4096\n        " + BODY
    big = swap(MANIFEST, "B: [4], N: 8", "B: [4096, 4096], N: 4096")
    assert check(manifests=[package(big, swap(MODULE, BODY, body))]).faults == []


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "problem"),
    [
        ("flops: 4 - N", "cost.flops is -4; accepted: an int of at least 0"),
        ("flops: N * 0.5", "cost.flops is 4.0; accepted: an int of at least 0"),
        ("flops: N > 1", "cost.flops is True; accepted: an int of at least 0"),
        ("flops: N\n    read_bytes: nbytes_x - 9999", "cost.read_bytes is -9871; accepted: an int"),
        ("flops: N\n    write_bytes: -nbytes_y", "cost.write_bytes is -128; accepted: an int"),
        ("flops: N // len(B)", "ZeroDivisionError: "),
    ],
)
def test_costs(package, cost, problem):
    manifest = swap(MANIFEST, 'flops: "2 * prod(B) * N"', cost)
    faults = check(manifests=[package(manifest)]).faults
    assert {(f.line, f.entry) for f in faults} <= {(17, "ScaleFwdOp"), (18, "ScaleFwdOp")}
    assert faults
    assert any(problem in f.problem for f in faults)


# ---- the command ---------------------------------------------------------------------------------


def test_check_prints_faults(package, capsys, monkeypatch):
    manifest = package(swap(MANIFEST, "default: 2.0", "default: x"))
    monkeypatch.chdir(manifest.parent.parent)
    assert main(["check", "--manifest", str(manifest)]) == 1
    lines = capsys.readouterr().out.splitlines()
    where = f"{manifest.parent.name}/manifest.yaml:8"
    assert lines[0].startswith(f"{where}: ScaleFwdOp: params.factor.default: given 'x' (str)")
    assert lines[1:] == ["1 entry checked, 1 fault"]


def test_check_prints_json(package, capsys):
    manifest = package(swap(MANIFEST, "status: implemented", "status: planned"))
    assert main(["check", "--json", "--manifest", str(manifest), "--manifest", str(package())]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "checked": ["ScaleFwdOp", "ScaleFwdOp"],
        "faults": [],
        "notes": ["ScaleFwdOp: the class exists and the entry says planned"],
        "unknown": {},
    }
    faulty = package(swap(MANIFEST, "passed: [bias], ", ""))
    assert main(["check", "--json", "--manifest", str(faulty), "ScaleFwdOp"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"] == [
        {"file": str(faulty), "line": 12, "entry": "ScaleFwdOp",
         "problem": "inputs.bias: no workload passes it"}
    ]  # fmt: skip


def test_an_unknown_op(capsys):
    assert main(["check", "SiluFwdOp", "RMSNormFwdOp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "1 entry checked, 0 faults\n"
    assert captured.err.startswith(
        "tileops check: no entry is named 'SiluFwdOp'; did you mean SiLUFwdOp"
    )
    assert main(["check", "--json", "zzz"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["unknown"] == {"zzz": []}
    assert captured.err == "tileops check: no entry is named 'zzz'; see 'tileops list'\n"


def test_list(capsys):
    assert main(["list", "--json"]) == 0
    rows = {row["class"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["RMSNormFwdOp"] == {
        "class": "RMSNormFwdOp",
        "family": "norm",
        "status": "implemented",
        "boundary": True,
        "operators": ["tileops::norm_rms_norm_fwd"],
    }
    assert rows["MoEExpertMLPFwdOp"]["boundary"] is False
    assert rows["MoEExpertMLPFwdOp"]["operators"] == []
    assert {row["family"] for row in rows.values()} == set(families())
    import tileops.elementwise

    operators = tuple(rows["SiLUFwdOp"]["operators"])
    assert operators == tileops.elementwise.SiLUFwdOp.compile_op_names
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["class", "family", "status", "boundary", "operators"]
    assert len(lines) == len(rows) + 1
    (line,) = [line for line in lines if line.startswith("MoEExpertMLPFwdOp ")]
    assert line.split() == ["MoEExpertMLPFwdOp", "moe", "implemented", "no", "-"]


def test_list_with_a_file_that_does_not_load(package, capsys, monkeypatch):
    from tileops.engine.manifest import catalog

    broken = package("ScaleFwdOp: 3\n", None)
    monkeypatch.setattr(catalog, "families", lambda: {"broken": broken})
    assert main(["list"]) == 1
    assert f"tileops list: {broken}:1: ScaleFwdOp: the entry: given 3" in capsys.readouterr().err
    report = check()
    assert report.faults == []  # the validator has its own name for the function replaced here


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["list"], ["check", "--help"], []]
)
def test_startup_is_light(arguments):
    """Help, version and list import no torch; nothing at all without a command is an error."""
    code = (
        "import sys\nfrom tileops.cli import main\n"
        f"try:\n    status = main({arguments!r})\nexcept SystemExit as end:\n    status = end.code\n"
        "heavy = {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "print(status, heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{0 if arguments else 2} set()"
    shown = {
        "--help": "check",
        "--version": "tileops 0.1.0",
        "list": "RMSNormFwdOp",
        "check": "--manifest",
    }
    if arguments:
        assert shown[arguments[0]] in done.stdout


def test_as_a_module_and_with_a_reader_that_leaves():
    command = f"{sys.executable} -m tileops list | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("class ")
    assert done.stderr == ""
    done = subprocess.run(
        [sys.executable, "-m", "tileops", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "tileops 0.1.0\n")


def test_faults_sort_and_print():
    faults = [Fault("/b", 2, "A", "p"), Fault("/a", 10, "", "q"), Fault("/a", 9, "Z", "r")]
    assert [str(fault) for fault in sorted(faults)] == ["/a:9: Z: r", "/a:10: q", "/b:2: A: p"]
    report = Report()
    for _ in range(2):
        report.add("/a", 1, "A", "p")
        report.note("n")
    assert (len(report.faults), len(report.notes)) == (1, 1)
