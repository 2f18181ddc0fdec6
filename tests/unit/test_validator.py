"""The validator: the tree passes, and each broken rule is named with file, line and entry.

Each test writes a small package outside the tree, sound but for one thing; ``# here`` marks the line
that the fault must name. Operators and kernels, workloads, and the command have files of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.op_packages import MANIFEST, MODULE, assert_faults, marked, swap
from tileops.cli import main
from tileops.engine.validate import Report, check
from tileops.engine.validate.find import scan

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
    sound, broken = package(), package("# A comment.\nScaleFwdOp: 3\n")
    faulty = package(swap(MANIFEST, "default: 2.0", "default: x"))
    report = check(manifests=[sound, broken, faulty])
    assert [(f.file, f.line, f.entry) for f in report.faults] == [
        (str(broken), 2, "ScaleFwdOp"),
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
    helpers = "class NoFwdOp: pass\n\n\nclass NoneFwdOp(Exception): pass\n"
    (manifest.parent / "helper.py").write_text(helpers)
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


# ---- constructor, forward, decomposition ---------------------------------------------------------


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
         "__init__ takes (factor=2.0, *, target=None, mode='a'); the entry says {entry}"),
        ("*, factor=2.0, mode='a'",
         "__init__ takes (*, factor=2.0, mode='a'); the entry says {entry}"),
        ("factor=3.0, *, mode='a', target=None",
         "__init__: 'factor' defaults to 3.0; the entry says it defaults to 2.0"),
        ("factor, *, mode='a', target=None",
         "__init__: 'factor' is required; the entry says it defaults to 2.0"),
        ("factor=2.0, *, mode, target=None",
         "__init__: 'mode' is required; the entry says it defaults to 'a'"),
        ("factor=2.0, *, mode='z', target=None",
         "__init__: 'mode' defaults to 'z'; the entry says it defaults to 'a'"),
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
    entry = "(factor=2.0, *, mode='a', target=None)"
    assert_faults(package(module=module), problem.format(entry=entry))


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
    module = MODULE.partition("    @staticmethod")[0]
    module = swap(module, "class ScaleFwdOp(Op):", "class ScaleFwdOp(Op):  # here")
    faults = check(manifests=[package(module=module)]).faults
    assert [(f.problem, f.line) for f in faults if f.file.endswith("ops.py")] == [
        ("decomposition is missing: it is what serves any device", 8)
    ]


# ---- compositions --------------------------------------------------------------------------------

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
        ("self, x=None, *, bias=None, out=None",
         "forward: 'x' defaults to None; the entry says it is required"),
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
    module = TWICE.partition("    def forward")[0].replace(
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
