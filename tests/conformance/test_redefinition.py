"""A class defined twice, a name claimed twice, an op loaded in a process that made none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tileops
from tileops.engine.errors import ManifestError

ENTRY = """
ScaleFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    dtypes: {T: [float32]}
    params: {factor: {type: float, default: 2.0}}
    inputs: {x: {dtype: T, shape: "[*B]"}}
    outputs: {output: {dtype: T, shape: "[*B]"}}
  workloads: [{label: one, dims: {B: [4]}, dtypes: {T: float32}}]
  cost: {flops: "prod(B)"}
"""
MODULE = """
from tileops.authoring import Op


class ScaleFwdOp(Op):
    @staticmethod
    def decomposition(x, *, factor):
        return x * factor + SHIFT
"""


def _package(root: Path, name: str, shift: float, family: str = "scaling") -> None:
    folder = root / name / family
    folder.mkdir(parents=True)
    (root / name / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "manifest.yaml").write_text(ENTRY)
    (folder / "scale.py").write_text(MODULE.replace("SHIFT", str(shift)))


def _compiled(op: object, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(x)  # type: ignore[operator]


def test_reload_and_a_second_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload takes the operators over; another class of the name is refused, and harms nothing."""
    _package(tmp_path, "first_pack", 0.0)
    _package(tmp_path, "second_pack", 5.0)
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.randn(4)
    module = importlib.import_module("first_pack.scaling.scale")
    assert torch.equal(_compiled(module.ScaleFwdOp(), x), x * 2)
    with pytest.raises(ManifestError, match=r"already belongs to first_pack\.scaling\.scale"):
        importlib.import_module("second_pack.scaling.scale")
    assert torch.equal(_compiled(module.ScaleFwdOp(3.0), x), x * 3)
    path = tmp_path / "first_pack" / "scaling" / "scale.py"
    path.write_text(MODULE.replace("SHIFT", "1.0") + "\n# a later version\n")
    importlib.invalidate_caches()
    new = importlib.reload(module)
    assert torch.equal(new.ScaleFwdOp()(x), x * 2 + 1)
    assert torch.equal(_compiled(new.ScaleFwdOp(), x), x * 2 + 1)


def test_compiled_code_of_a_class_that_is_defined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and new have the same text, and both run what the class is now, while the old op is alive."""
    _package(tmp_path, "third_pack", 0.0, "noted")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("third_pack.noted.scale")
    x, calls = torch.randn(4), []
    for shift in (0.0, 1.0):
        if shift:
            path = tmp_path / "third_pack" / "noted" / "scale.py"
            path.write_text(MODULE.replace("SHIFT", "1.0") + "\n# a later version\n")
            importlib.invalidate_caches()
            module = importlib.reload(module)
        calls.append(module.ScaleFwdOp().compile(fullgraph=True))
        for call in calls * 4:
            torch.testing.assert_close(call(x), x * 2 + shift)


def test_register_operators_is_enough_to_load(tmp_path: Path) -> None:
    """Exported here, loaded in a process that calls ``register_operators`` and nothing else."""
    from tileops.elementwise import TanhFwdOp
    from tileops.norm import RMSNormFwdOp

    # One backward op has an entry, the other is derived.
    ops = (RMSNormFwdOp(8), RMSNormFwdOp.backward_class()(8), TanhFwdOp.backward_class()())

    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            forward, backward, tanh_backward = ops
            grad = tanh_backward(forward(x), x)
            return grad, *(g for g in backward(grad, x, None) if g is not None)

    x = torch.randn(3, 8)
    program = torch.export.export(Step(), (x,))
    assert sum("_bwd" in str(n.target) for n in program.graph.nodes) == 2
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((x, Step()(x)), tmp_path / "values.pt")
    code = (
        "import torch, tileops; assert 'tileops::norm_rms_norm_fwd' in tileops.register_operators('norm', 'elementwise');"
        "x, y = torch.load('values.pt');"
        "assert all(map(torch.equal, torch.export.load('program.pt2').module()(x), y))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_register_operators_refuses_an_unknown_family() -> None:
    with pytest.raises(ValueError, match="unknown family 'nrm'"):
        tileops.register_operators("nrm")
