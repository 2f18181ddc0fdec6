"""Ops in exported programs, AOTInductor packages and pickles: made here, run in another process."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import tileops
from tests.cases import distinct_classes, float32_calls
from tests.contract.fresh import clean_environment, run_fresh

EPS, MOMENTUM = 1e-5, 0.25
FAMILIES = ("norm", "gemm", "elementwise")
BATCHES = (3, 5, 2)


class Block(torch.nn.Module):
    """Ops of three families in a row; the last one writes two buffers."""

    def __init__(self) -> None:
        from tileops.elementwise import SiLUAndMulFwdOp
        from tileops.gemm import GEMMFwdOp
        from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp

        super().__init__()
        self.add_norm, self.gemm = FusedAddRMSNormFwdOp(EPS), GEMMFwdOp()
        self.act, self.norm = SiLUAndMulFwdOp(), BatchNormFwdOp(True, MOMENTUM, EPS)
        generator = torch.Generator().manual_seed(1)
        self.up = torch.nn.Parameter(torch.randn(12, 8, generator=generator), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.randn(8, generator=generator), requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, _ = self.add_norm(x, residual, self.scale)
        hidden = self.act(self.gemm(normed, self.up))
        result, _, _ = self.norm(hidden, self.mean, self.var)
        return result, self.mean + 0, self.var + 0


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x, residual = torch.randn(2, batch, 8, generator=generator)
    return x, residual


def check(run: Any) -> None:
    """Three calls of a block against PyTorch in float64."""
    weights = Block()
    up, scale = weights.up.double(), weights.scale.double()
    mean, var = torch.zeros(6).double(), torch.ones(6).double()
    for batch in BATCHES:
        x, residual = inputs(batch)
        normed = torch.nn.functional.rms_norm((x + residual).double(), (8,), scale, EPS)
        gate, other = (normed @ up.t()).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * other
        wanted = torch.nn.functional.batch_norm(
            hidden, mean, var, training=True, momentum=MOMENTUM, eps=EPS
        )
        for ours, theirs in zip(run(x, residual), (wanted, mean, var), strict=True):
            torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-4)


def export(strict: bool) -> Any:
    batch = torch.export.Dim("batch", min=2, max=4096)
    shapes = {"x": {0: batch}, "residual": {0: batch}}
    program = torch.export.export(Block(), inputs(7), dynamic_shapes=shapes, strict=strict)
    nodes = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("tileops.")]
    assert len(nodes) == 4, nodes
    return program


def fails(code: str, folder: Path) -> str:
    """What a process that runs ``code`` and fails has printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        cwd=folder, env=clean_environment(str(folder)), timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stderr


# ---- exported programs -----------------------------------------------------------------------------


def _export_and_run(path: str, strict: bool) -> None:
    program = export(strict)
    torch.export.save(program, path)
    check(program.module())  # last: it writes the program's own buffers


def _load_and_run(path: str) -> None:
    assert len(tileops.register_operators(*FAMILIES)) > 3
    loaded = {name.split(".")[1] for name in sys.modules if name.startswith("tileops.")}
    assert not loaded & {"attention", "moe", "rope"}, "families that the program has nothing of"
    check(torch.export.load(path).module())


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_with_a_dynamic_batch_runs_in_a_new_process(strict, tmp_path):
    path = str(tmp_path / "block.pt2")
    run_fresh(_export_and_run, path=path, strict=strict)
    run_fresh(_load_and_run, path=path)


def _save_one(path: str) -> None:
    from tileops.norm import RMSNormFwdOp

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.weight = RMSNormFwdOp(8), torch.nn.Parameter(torch.arange(8.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.op(x, self.weight)

    torch.export.save(torch.export.export(Model(), (torch.randn(3, 8),)), path)


def _train_one(path: str) -> None:
    tileops.register_operators("norm")
    module = torch.export.load(path).module()
    x = torch.randn(3, 8)
    module(x).square().sum().backward()
    normed = torch.nn.functional.rms_norm(x.double(), (8,), eps=torch.finfo(torch.float32).eps)
    expected = (2 * torch.arange(8.0).double() * normed.square()).sum(0)
    torch.testing.assert_close(module.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_program_is_trained_in_a_new_process(tmp_path):
    path = str(tmp_path / "one.pt2")
    run_fresh(_save_one, path=path)
    run_fresh(_train_one, path=path)


# ---- AOTInductor packages --------------------------------------------------------------------------


def _package_and_run(path: str) -> None:
    torch._inductor.aoti_compile_and_package(export(strict=False), package_path=path)
    check(torch._inductor.aoti_load_package(path))


def _load_package_and_run(path: str) -> None:
    tileops.register_operators(*FAMILIES)
    check(torch._inductor.aoti_load_package(path))


@pytest.mark.slow
def test_a_package_with_a_dynamic_batch_runs_here_and_in_a_new_process(tmp_path):
    path = str(tmp_path / "block.pt2")
    run_fresh(_package_and_run, path=path)
    run_fresh(_load_package_and_run, path=path)
    # A process without the operators is told by C++, where nobody can say more.
    said = fails(f"import torch; torch._inductor.aoti_load_package({path!r})", tmp_path)
    assert re.search(r"Could not find schema for tileops::(norm|gemm|elementwise)_\w+_fwd", said)
    # What it needs can be read from it.
    with zipfile.ZipFile(path) as archive:
        texts = [
            archive.read(n).decode() for n in archive.namelist() if n.endswith(".wrapper.json")
        ]
    modules = set(re.findall(r'"([\w.]+)\.\w+FwdOp\(', "".join(texts)))
    assert {name.split(".")[:2][-1] for name in modules} == set(FAMILIES), texts


class Everything(torch.nn.Module):
    """A call of every op with a signature of its own, two of those whose calls differ in what they are given
    or write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [
            (made.op, dict(made.inputs))
            for name in distinct_classes()
            for made in float32_calls(name, 7)[:2]
        ]  # fmt: skip

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t.clone() for _, given in self.calls for t in given.values() if t is not None)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, results = iter(tensors), []
        for op, given in self.calls:
            named = {name: None if t is None else next(own) for name, t in given.items()}
            positional = [named.pop(i.name) for i in op.entry.positional_inputs]
            result = op(*positional, **named)
            several = result if isinstance(result, tuple) else (result,)
            results += [t for t in several if t is not None]
        return tuple(results)


def _package_everything(path: str, calls: str) -> int:
    model = Everything()
    program = torch.export.export(model, model.tensors())
    # The package holds one file of calls: headers compiled in advance, and speed, serve nothing.
    quick = {
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quick)
    given, own = model.tensors(), model.tensors()
    torch.save((given, (*model(*own), *own)), calls)
    return len(model.calls)


def _run_everything(path: str, calls: str) -> None:
    """Where no op is alive: each is made again from its key."""
    tileops.register_operators()
    run = torch._inductor.aoti_load_package(path)
    given, wanted = torch.load(calls)
    results = run(*given)
    # What is written is among `given`.
    for ours, theirs in zip((*results, *given), wanted, strict=True):
        if ours.is_floating_point() and ours.dtype.itemsize == 1:  # which takes no tolerance
            ours, theirs = ours.float(), theirs.float()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.slow
def test_a_package_of_every_op(tmp_path):
    """Against eager calls, which ``tests/families`` hold to references."""
    places = {"path": str(tmp_path / "everything.pt2"), "calls": str(tmp_path / "calls.pt")}
    assert run_fresh(_package_everything, **places) >= len(distinct_classes())
    run_fresh(_run_everything, **places)


# ---- what cannot be loaded -------------------------------------------------------------------------

HOLD = """
HoldFwdOp:
  status: implemented
  reference: own
  kind: pointwise
  signature:
    params: {function: {type: object}}
    inputs: {x: {dtype: float32, shape: "[*B]"}}
    outputs: {output: {dtype: float32, shape: "[*B]"}}
  workloads: [{label: one, dims: {B: [4]}, params: {function: a}}]
  cost: {flops: "prod(B)"}
"""


def _export_an_object(root: str, strict: bool) -> None:
    folder = Path(root, "holding")
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "manifest.yaml").write_text(HOLD)
    (folder / "hold.py").write_text(
        "from tileops.authoring import Op\n\n\nclass HoldFwdOp(Op):\n    @staticmethod\n"
        "    def decomposition(x, *, function):\n        return function(x)\n"
    )
    sys.path.insert(0, root)
    from holding.hold import HoldFwdOp

    class Model(torch.nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.op = HoldFwdOp(function)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.op(x)

    x = torch.randn(4)
    # It works here, compiled as well; it is only that nobody else could make it.
    torch.testing.assert_close(torch.compile(Model(torch.exp), backend="aot_eager")(x), x.exp())
    with pytest.raises((tileops.TileopsError, RuntimeError)) as caught:
        torch.export.export(Model(torch.exp), (x,), strict=strict)
    assert "HoldFwdOp cannot be exported: parameter 'function'" in str(caught.value)
    if not strict:  # Dynamo wraps what a fake raises
        assert type(caught.value).__name__ == "ExportError"
    torch.export.export(Model("text"), (x,), strict=strict)  # a value with a literal form


@pytest.mark.parametrize("strict", [False, True])
def test_an_op_that_nobody_could_make_again_is_not_exported(strict, tmp_path):
    run_fresh(_export_an_object, root=str(tmp_path), strict=strict)


@pytest.mark.parametrize("first", ["", "import tileops\n"])
def test_a_process_without_the_operators_is_told_what_to_import(first, tmp_path):
    run_fresh(_save_one, path=str(tmp_path / "one.pt2"))
    said = fails(f"{first}import torch; torch.export.load('one.pt2')", tmp_path)
    assert "failed to resolve torch.ops.tileops.norm_rms_norm_fwd" in said
    assert "Please import the custom op" in said
    assert "tileops.norm.rms_norm.RMSNormFwdOp(normalized_shape=(8,), eps=None)" in said


# ---- pickles ---------------------------------------------------------------------------------------


def _save_module(path: str) -> None:
    module = Block()
    check(copy.deepcopy(module))
    check(pickle.loads(pickle.dumps(module)))
    check(module)  # the copies have buffers of their own
    torch.save(Block(), path)


def _load_module(path: str) -> None:
    check(torch.load(path, weights_only=False))


def test_a_saved_module_runs_in_a_new_process(tmp_path):
    """Nothing is imported or registered there first: a pickle names the classes it is of."""
    path = str(tmp_path / "block.pt")
    run_fresh(_save_module, path=path)
    run_fresh(_load_module, path=path)


def _in_worker(rank: int, blocks: list[Any], folder: str) -> None:
    check(blocks[rank])  # buffers lie in memory that processes share
    Path(folder, f"{rank}-{blocks[rank].add_norm!r}").touch()


@pytest.mark.slow
def test_a_module_goes_to_spawned_workers(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.multiprocessing.spawn(_in_worker, ([Block(), Block()], str(tmp_path)), nprocs=2)
    names = [f"{rank}-FusedAddRMSNormFwdOp(eps=1e-05)" for rank in (0, 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
