"""What compilers keep on disk is right for the op as it is now, not as it was when they kept it.

Each test is two processes with one cache directory: an op package is edited in between.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.children import EPS, close, in_child, rms
from tests.contract.fresh import run_fresh

MANIFEST = """
ScaleFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    params: {factor: {type: float, default: 2.0}}
    inputs:
      x: {dtype: float32, shape: "[*B, N]"}
      count: {dtype: float32, shape: "[N]"}
    outputs:
      output: {dtype: float32, shape: "[*B, N]"}
  workloads: [{label: one, dims: {B: [4], N: 8}}]
  cost: {flops: "prod(B) * N"}
"""
MODULE = """
import torch

from tileops.authoring import Op


class ScaleFwdOp(Op):
    @staticmethod
    def decomposition(x, count, *, factor):
        return x * factor + count
"""
X = torch.arange(12.0).view(3, 4)
COUNT = torch.tensor([5.0, 6.0, 7.0, 8.0])

CHANGES: dict[str, tuple[dict[str, str], Any]] = {
    "nothing": ({}, lambda: X * 2 + COUNT),
    "output dtype": (
        {"output: {dtype: float32": "output: {dtype: float64", "+ count": "+ count.double()"},
        lambda: X.double() * 2 + COUNT,
    ),
    "output shape": (
        {'output: {dtype: float32, shape: "[*B, N]"': 'output: {dtype: float32, shape: "[*B]"',
         "x * factor + count": "(x * factor + count).sum(-1)"},
        lambda: (X * 2 + COUNT).sum(-1),
    ),
    "derived dim": (
        {"signature:": "signature:\n    dims: {M: N * 2}", '"[*B, N]"}\n  w': '"[*B, M]"}\n  w',
         "x * factor + count": "torch.cat([x * factor + count] * 2, -1)"},
        lambda: (X * 2 + COUNT).repeat(1, 2),
    ),
    "what is written": (
        {'shape: "[N]"}': 'shape: "[N]", mutated: true}',
         "x * factor + count": "x * factor + count, -count"},
        lambda: torch.cat([X * 2 + COUNT, -COUNT[None]]),
    ),
    "decomposition": ({"x * factor": "x - factor"}, lambda: X - 2 + COUNT),
}  # fmt: skip
"""What is edited, and what the edited op gives."""
STILL_RIGHT = {"nothing", "decomposition"}
"""Edits that no compiled code has in it: the artifact of before is taken, and is right."""


def write_package(root: Path, edits: dict[str, str], saved: str = "") -> None:
    """The op package ``scaling`` in ``root``, edited at places that occur once in its files; with a
    backward op that takes ``saved`` where the edits name it."""
    folder = root / "scaling"
    folder.mkdir(parents=True)
    manifest, module = MANIFEST, MODULE
    for old, new in edits.items():
        assert (manifest + module).count(old) == 1, (old, manifest)
        manifest, module = manifest.replace(old, new), module.replace(old, new)
    if saved:
        manifest, module = manifest + BACKWARD.replace("SAVED", saved), module + BACKWARD_CLASS
    (folder / "__init__.py").touch()
    (folder / "manifest.yaml").write_text(manifest)
    (folder / "scale.py").write_text(module)


def scale_class(root: str) -> Any:
    """The class of the package in ``root``, in the process that calls this."""
    sys.path.insert(0, root)
    from scaling.scale import ScaleFwdOp

    return ScaleFwdOp


def _compiled(root: str, cache: str) -> tuple[torch.Tensor, int]:
    """What compiled code that uses the op's result gives, and hits of the cache."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    op = scale_class(root)()

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        x, count = x + 0, count + 0
        result = op(x, count)
        if op.entry.input("count").mutated:
            result = torch.cat([result, count[None]])
        return result * 4

    result = torch.compile(function, fullgraph=True)(X, COUNT)
    return result, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache directory in which a process has left the code of the op as it was first."""
    root, cache = tmp_path_factory.mktemp("first"), str(tmp_path_factory.mktemp("inductor"))
    write_package(root, {})
    result, hits = run_fresh(_compiled, root=str(root), cache=cache)
    assert hits == 0
    torch.testing.assert_close(result, (X * 2 + COUNT) * 4)
    return cache


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_compiled_code_is_of_the_op_as_it_is(change, warm, tmp_path):
    edits, expected = CHANGES[change]
    write_package(tmp_path, edits)
    result, hits = run_fresh(_compiled, root=str(tmp_path), cache=warm)
    torch.testing.assert_close(result, expected() * 4, rtol=0, atol=0)
    assert hits == (change in STILL_RIGHT)


# ---- gradients -------------------------------------------------------------------------------------

BACKWARD = """
ScaleBwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    params:
      factor: {type: float, default: 2.0}
      wants_x: {type: bool, default: true, kw_only: true}
      wants_count: {type: bool, default: true, kw_only: true}
    inputs:
      grad_output: {dtype: float32, shape: "[*B, N]"}
      SAVED
    outputs:
      grad_x: {dtype: float32, shape: "[*B, N]", nullable: "not wants_x"}
      grad_count: {dtype: float32, shape: "[N]", nullable: "not wants_count"}
  workloads: [{label: one, dims: {B: [4], N: 8}}]
  cost: {flops: "prod(B) * N"}
"""
BACKWARD_CLASS = """

class ScaleBwdOp(Op):
    @staticmethod
    def decomposition(grad_output, saved, *, factor, wants_x, wants_count):
        grad_x = grad_output * saved if wants_x else None
        return grad_x, grad_output.sum(0) if wants_count else None
"""
NAMED = {"kind: pointwise\n": "kind: pointwise\n  backward: ScaleBwdOp\n"}
GRADIENTS: dict[str, tuple[dict[str, str], str, Any]] = {
    "derived": ({}, "", lambda y: torch.full_like(y, 2.0)),
    "of another decomposition": ({"x * factor": "x * factor * 3"}, "", lambda y: torch.full_like(y, 6.0)),
    "saves an input": (NAMED, 'x: {dtype: float32, shape: "[*B, N]"}', lambda y: X),
    "saves an output": (NAMED, 'output: {dtype: float32, shape: "[*B, N]"}', lambda y: y),
    "declared away": (
        {'count: {dtype: float32, shape: "[N]"}': 'count: {dtype: float32, shape: "[N]", differentiable: false}'},
        "", None,
    ),
}  # fmt: skip
"""Edits; what the backward op saves where one is named; by what a gradient is then multiplied, None
where it is refused. A named op that multiplies by what it saved is wrong, and so cannot be taken for
another."""


def _differentiated(root: str, cache: str) -> tuple[Any, Any, int]:
    """Gradients that compiled code gives for ``x`` and ``count``, and hits of the cache."""
    from tileops.engine.errors import BackwardError

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    op = scale_class(root)()
    x, count = X.clone().requires_grad_(), COUNT.clone().requires_grad_()
    result = torch.compile(lambda x, count: op(x, count) * 4, fullgraph=True)(x, count)
    with contextlib.suppress(BackwardError):
        result.sum().backward()
    return x.grad, count.grad, torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
def test_compiled_gradients_are_of_the_op_as_it_is(tmp_path):
    """One cache for a row of processes, each with another gradient than all before."""
    for n, (name, (edits, saved, factor)) in enumerate(GRADIENTS.items()):
        root = tmp_path / str(n)
        write_package(root, edits, saved)
        cache = str(tmp_path / "inductor")
        grad, of_count, hits = run_fresh(_differentiated, root=str(root), cache=cache)
        assert hits == (name == "of another decomposition"), name
        if factor is None:
            assert grad is None
            assert of_count is None
            continue
        torch.testing.assert_close(grad, 4 * factor(X * 2 + COUNT), rtol=0, atol=0)
        torch.testing.assert_close(of_count, torch.full_like(COUNT, 12.0), rtol=0, atol=0)


# ---- targets ---------------------------------------------------------------------------------------


def _compiled_for_a_target(cache: str, target: str | None) -> tuple[str, int]:
    """The target that serves compiled code under a context's target, and hits of the cache."""
    import tileops

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    cls, x, weight, expected = rms()
    op = cls(8, EPS)
    with tileops.use_target(target) if target else contextlib.nullcontext():
        close(torch.compile(lambda x, w: op(x, w) * 4, fullgraph=True)(x, weight), expected * 4)
    hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return op.serving_target, hits


@pytest.mark.slow
def test_compiled_code_is_of_no_target(tmp_path):
    """The target is decided inside the node, so one artifact serves whichever is chosen later; the
    last process does not even know the target for which it was compiled."""
    cache = str(tmp_path)
    assert in_child(_compiled_for_a_target, cache, "testcpu") == ("testcpu", 0)
    assert in_child(_compiled_for_a_target, cache, None) == ("builtin", 1)
    assert in_child(_compiled_for_a_target, cache, None, installed=()) == ("builtin", 1)


# ---- exported programs and packages ----------------------------------------------------------------

LATER: dict[str, tuple[dict[str, str], str, Any]] = {
    "nothing": ({}, "", lambda: X * 2 + COUNT),
    "another decomposition": ({"x * factor": "x - factor"}, "", lambda: X - 2 + COUNT),
    "another default": ({"default: 2.0": "default: 3.0"}, "", lambda: X * 2 + COUNT),
    "a named gradient": (NAMED, GRADIENTS["saves an input"][1], lambda: X * 2 + COUNT),
    "another output dtype": (*CHANGES["output dtype"][:1], "", None),
    "a parameter more": (
        {"default: 2.0}": "default: 2.0}, shift: {type: float, default: 1.0}",
         "factor)": "factor, shift)", "+ count": "+ count + shift"},
        "", None,
    ),
}  # fmt: skip
"""Edits between export and load, and what the program then gives; None where it is refused."""
PACKAGED = ("another decomposition", "another output dtype")
"""Of these, what is tried with a package, which takes long to load: one that runs, one that does not."""


class _Model(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.op(x, count)


def _export(root: str, path: str, package: bool) -> None:
    program = torch.export.export(_Model(scale_class(root)()), (X, COUNT))
    if package:
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    else:
        torch.export.save(program, path)


def _load(root: str, path: str, package: bool) -> torch.Tensor | str:
    scale_class(root)
    if package:
        run = torch._inductor.aoti_load_package(path)
    else:
        run = torch.export.load(path).module()
    try:
        return run(X, COUNT)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("package", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_was_exported_is_right_or_refused(package, tmp_path):
    first, path = tmp_path / "first", str(tmp_path / "program.pt2")
    write_package(first, {})
    run_fresh(_export, root=str(first), path=path, package=package)
    for n, (name, (edits, saved, expected)) in enumerate(LATER.items()):
        if package and name not in PACKAGED:
            continue
        root = tmp_path / str(n)
        write_package(root, edits, saved)
        result = run_fresh(_load, root=str(root), path=path, package=package)
        if expected is None:
            assert isinstance(result, str), (name, result)
            assert "cannot re-create the op 'scaling.scale.ScaleFwdOp(factor=2.0)" in result, name
            assert "another definition of ScaleFwdOp" in result, name
            assert "export it again" in result, name
        else:
            assert isinstance(result, torch.Tensor), (name, result)
            torch.testing.assert_close(result, expected(), rtol=0, atol=0, msg=name)
