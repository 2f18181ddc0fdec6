"""The ``tileops`` command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.op_packages import MANIFEST, swap
from tileops.cli import main
from tileops.engine.manifest.catalog import families
from tileops.engine.validate import Fault, Report, check

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
