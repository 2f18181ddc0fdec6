"""What importing costs and touches: real processes, started from nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.fresh import ROOT, clean_environment

SOURCE = ROOT / "src" / "tileops"
FAMILIES = sorted(path.parent.name for path in SOURCE.glob("*/manifest.yaml"))
ALL_CLASSES = f"""
import importlib
families = [importlib.import_module("tileops." + name) for name in {FAMILIES}]
classes = [getattr(family, name) for family in families for name in dir(family)]
ops = [cls for cls in classes if hasattr(cls, "compile_op_names")]
assert len(ops) >= 19, ops
"""


def python(code: str, folder: Path, *options: str) -> str:
    """What ``code`` prints in a process of its own; fails with its traceback."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True, text=True, check=False, cwd=folder,
        env=clean_environment(str(folder)), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str, folder: Path) -> set[str]:
    """The top-level packages that are loaded after ``code``."""
    names = python(f"{code}\nimport sys; print(*sorted(sys.modules))", folder).split()
    return {name.partition(".")[0] for name in names}


# ---- import tileops ------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["tileops", "tileops.engine.errors", "tileops.engine.settings"])
def test_the_package_loads_nothing_heavy(module, tmp_path):
    assert not loaded(f"import {module}", tmp_path) & {"torch", "yaml", "triton", "numpy"}


def test_names_of_the_package_are_listed_without_loading_anything(tmp_path):
    code = "import tileops; assert 'Op' in dir(tileops); tileops.CheckError; tileops.recording"
    assert "torch" not in loaded(code, tmp_path)


def test_distributed_tensors_are_loaded_by_whoever_uses_them(tmp_path):
    """Not by calls, and a class that was called before has its strategies all the same: also where no
    Autograd kernel runs."""
    python(
        """
import sys, torch
from tileops.norm import RMSNormFwdOp
op = RMSNormFwdOp((4,))
op(torch.ones(2, 4)), op(torch.ones(2, 4, device="meta"))
assert "torch.distributed.tensor" not in sys.modules

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x = DTensor.from_local(torch.ones(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
with torch.inference_mode():
    result = op(x)
assert (result.placements, result.shape) == ((Shard(0),), (4, 4))
""",
        tmp_path,
    )


def _seconds(code: str, folder: Path) -> float:
    begin = time.perf_counter()
    python(code, folder)
    return time.perf_counter() - begin


def test_the_package_is_imported_in_a_moment(tmp_path):
    _seconds("import tileops", tmp_path)
    # In turns, so that a busy machine slows both; medians, so that one pause does not count.
    pairs = [(_seconds("pass", tmp_path), _seconds("import tileops", tmp_path)) for _ in range(7)]
    nothing, tileops = (statistics.median(times) for times in zip(*pairs, strict=True))
    assert tileops - nothing < 0.15


# ---- import of a family --------------------------------------------------------------------------


def test_importing_a_family_loads_no_kernel_language(tmp_path):
    python(
        f"""
import importlib, sys, torch
for name in {FAMILIES}:
    family = importlib.import_module("tileops." + name)
    classes = [getattr(family, name) for name in dir(family)]
    assert classes
    heavy = {{"triton", "cuda", "cutlass", "pynvml"}} & {{m.partition(".")[0] for m in sys.modules}}
    kernels = [m for m in sys.modules if m.startswith("tileops.") and ".kernels" in m]
    assert not heavy and not kernels, (name, heavy, kernels)
""",
        tmp_path,
    )


def test_importing_every_family_touches_no_device_and_builds_nothing(tmp_path):
    python(
        f"""
import torch

def touched(*args, **kwargs):
    raise AssertionError("a device was touched at import")

for name in ("_lazy_init", "init", "is_available", "device_count", "current_device",
             "get_device_properties", "get_device_capability"):
    assert hasattr(torch.cuda, name), name
    setattr(torch.cuda, name, touched)
torch._C._cuda_getDeviceCount = touched
{ALL_CLASSES}
from tileops.engine.record import build_count
assert build_count() == 0
assert not torch.cuda.is_initialized()
""",
        tmp_path,
    )
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [], "importing wrote files"


def test_importing_defines_every_operator_and_makes_no_op(tmp_path):
    python(
        f"""
import torch
{ALL_CLASSES}
for cls in ops:
    assert bool(cls.compile_op_names) == (bool(cls.entry.inputs) and not cls.entry.composition)
    for name in cls.compile_op_names:
        assert hasattr(torch.ops.tileops, name.removeprefix("tileops::")), name
from tileops.engine.boundary import instances
assert not any(map(len, instances._states.values())) and not instances._pinned
""",
        tmp_path,
    )


def test_a_child_forked_after_the_import_works(tmp_path):
    output = python(
        f"""
import os, torch
{ALL_CLASSES}
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    from tileops.norm import RMSNormFwdOp
    op, x = RMSNormFwdOp(8, 1e-6), torch.full((2, 8), 3.0)
    torch.testing.assert_close(op(x), torch.ones(2, 8))
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.ones(2, 8))
    print("the child computed", flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
        tmp_path,
    )
    assert output == "the child computed\n"


# ---- without Triton ------------------------------------------------------------------------------


MODULES = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__main__.py"
]


def test_everything_but_triton_kernels_is_imported_and_works_without_triton(tmp_path):
    assert len(MODULES) > 50
    python(
        f"""
import sys
sys.modules["triton"] = None  # any import of it raises ImportError
import importlib
for name in {MODULES}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        # Only kernels, and what they share, may need it.
        assert "import of triton" in str(error), (name, error)
        assert ".kernels." in name or name.startswith("tileops.lib"), name
{ALL_CLASSES}
for cls in ops:
    for name in cls.kernel.cpu if cls.kernel else ():
        importlib.import_module(cls.kernel_package + ".kernels." + name.partition(":")[0])
import torch
from tests.compile_contract import CASES
for case in CASES.values():
    call = case.make(6)
    call.check(call.run())
    call = case.make(6)
    call.check(call.run(torch.compile(call.op, backend="aot_eager", fullgraph=True)))
    torch._dynamo.reset()
""",
        tmp_path,
    )


def test_a_family_may_first_be_imported_under_a_mode(tmp_path):
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    from tileops.norm import RMSNormFwdOp
    op = RMSNormFwdOp((8,))
    print(type(op(torch.randn(2, 8), None)).__name__)
print(type(op(torch.randn(2, 8), None)).__name__)
"""
    assert python(code, tmp_path).split() == ["FakeTensor", "Tensor"]
