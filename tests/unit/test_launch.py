"""The launch path, driven to the point where libcuda would take over.

A small fake of libcuda (tests/fake_cuda.c) writes down what it is asked to launch, so both ways of
launching that ``lib/launch.py`` knows can be compared on a machine without a card. It runs in a
child process, which must believe that there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from tests.fake_card import build_fake, run_child
from tileops.lib.launch import Launcher, TritonBuild, descriptor_of, device_guard, pointer_to

ROOT = Path(__file__).parents[2]
STREAM = 0x5000


@triton.jit
def scale(x, LEFT: tl.constexpr, y, count, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < count)
    if y is not None:
        tl.store(y + offsets, values * factor + LEFT, mask=offsets < count)


def scale_build(**changes):
    given = {
        "signature": (("x", "*fp16"), ("y", "*fp16"), ("count", "i64"), ("factor", "fp32")),
        "constexprs": (("LEFT", 3), ("BLOCK", 1024)),
        "aligned": ("x", "y"),
        "num_warps": 8,
    }
    return TritonBuild(f"{__name__}:scale", **{**given, **changes})


def test_identity_holds_what_decides_the_code_and_nothing_else():
    assert scale_build().identity == scale_build().identity
    assert len({scale_build().identity, scale_build(num_warps=4).identity}) == 2
    assert len({scale_build().identity, scale_build(aligned=("x",)).identity}) == 2
    options = (("maxnreg", 64),)
    assert len({scale_build().identity, scale_build(options=options).identity}) == 2
    assert hash(scale_build().identity) == hash(scale_build().identity)


def test_a_signature_that_is_not_the_kernels():
    with pytest.raises(ValueError, match="'BLOCK'"):
        scale_build(constexprs=(("LEFT", 3),)).compile_for((9, 0))


def test_pointer_types():
    assert pointer_to(torch.bfloat16) == "*bf16"
    assert pointer_to(torch.float8_e4m3fn) == "*fp8e4nv"


def test_guard_without_cuda():
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        pytest.skip("torch is built for cards and there is none: nothing asks for a guard")
    with device_guard(0):
        pass


# --- in the child -------------------------------------------------------------------------------


def _believe() -> None:
    from tileops.lib import launch

    launch._current_device = None  # a build for cards would ask its driver which that is
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM + device


def child(library: str) -> None:
    """Launch in both ways with the fake at ``library``; print what it wrote down."""
    import ctypes

    from triton.backends.nvidia.driver import CudaDriver

    from tileops.lib import launch as module

    _believe()
    triton.runtime.driver.set_active(CudaDriver())
    fake = ctypes.CDLL(library)
    fake.fake_cuda_record.restype = ctypes.POINTER(ctypes.c_ulonglong * 16)

    def written(parameters: int, launch, *arguments):
        fake.fake_cuda_expect(parameters)
        launch(*arguments)
        return list(fake.fake_cuda_record().contents)

    x, y = torch.zeros(8, dtype=torch.float16), torch.zeros(8, dtype=torch.float16)
    build = scale_build()
    launcher = build()
    assert isinstance(launcher, Launcher)
    slow = module._by_compiled_kernel(build, build.compile_for((9, 0)))
    arguments = (5, 2, 3, x, y, 2**40 + 7, 0.1)
    records = [
        written(4, launcher, *arguments[:3], 0, *arguments[3:]),
        written(4, launcher.on(0), *arguments),
        written(4, slow, *arguments),
    ]
    # Another device: loaded there, launched on its stream.
    records.append(written(4, launcher, *arguments[:3], 1, *arguments[3:]))
    # An absent tensor is a null pointer, an absent constant takes no parameter.
    records.append(written(4, launcher, 1, 1, 1, 0, x, None, 8, 1.0))
    absent = scale_build(
        signature=build.signature[:1] + build.signature[2:],
        constexprs=(("y", None), ("LEFT", 3), ("BLOCK", 1024)),
        aligned=("x",),
    )
    records.append(written(3, absent(), 1, 1, 1, 0, x, 8, 1.0))
    addresses = [x.data_ptr() & 0xFFFFFFFF, y.data_ptr() & 0xFFFFFFFF]
    json.dump({"records": records, "addresses": addresses}, sys.stdout)


@triton.jit
def add_some(x, y, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS]
    y.store(at, (x.load(at) + count).to(y.dtype))


def child_described(library: str) -> None:
    """Launch a kernel that takes tensor descriptors; print what the fake wrote down."""
    import ctypes

    from triton.backends.nvidia.driver import CudaDriver

    _believe()
    triton.runtime.driver.set_active(CudaDriver())
    fake = ctypes.CDLL(library)
    fake.fake_cuda_record.restype = ctypes.POINTER(ctypes.c_ulonglong * 16)
    fake.fake_cuda_maps.restype = ctypes.POINTER(ctypes.c_ulonglong * 12)
    x, y = torch.zeros(40, 64, dtype=torch.float16), torch.zeros(40, 64, dtype=torch.float16)
    kind = descriptor_of(torch.float16, (16, 32))
    build = TritonBuild(
        "tests.unit.test_launch:add_some",
        signature=(("x", kind), ("y", kind), ("count", "i32")),
        constexprs=(("ROWS", 16), ("COLUMNS", 32)),
    )
    fake.fake_cuda_expect(1)
    build()(3, 2, 1, 0, x, y, 7)
    record, maps = list(fake.fake_cuda_record().contents), list(fake.fake_cuda_maps().contents)
    json.dump({"record": record, "maps": maps, "at": [x.data_ptr(), y.data_ptr()]}, sys.stdout)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_tensors_are_described_where_the_signature_says_so(tmp_path):
    library = build_fake(tmp_path)
    code = f"import tests.unit.test_launch as it; it.child_described({str(library)!r})"
    caches = {
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TILEOPS_CACHE_DIR": str(tmp_path / "own"),
    }
    done = run_child(code, library, **caches)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    x, y = result["at"]
    assert result["record"][:4] == [1, 3, 2, 1]
    assert result["record"][8] == x & 0xFFFFFFFF  # the map itself is the parameter
    # Address, columns, rows, bytes of a row, columns and rows of a block.
    assert result["maps"] == [x, 64, 40, 128, 32, 16, y, 64, 40, 128, 32, 16]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_both_ways_launch_the_same(tmp_path):
    library = tmp_path / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source = ROOT / "tests/fake_cuda.c"
    command = ["cc", "-shared", "-fPIC", "-w", f"-I{include}", "-o", library, source]
    subprocess.run(command, check=True)
    code = f"import tests.unit.test_launch as it; it.child({str(library)!r})"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TILEOPS_CACHE_DIR": str(tmp_path / "own"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    *same, elsewhere, null, absent = result["records"]
    x, y = result["addresses"]
    tenth = int.from_bytes(struct.pack("f", 0.1), "little")
    one = int.from_bytes(struct.pack("f", 1.0), "little")
    for turn, record in enumerate(same):
        assert record[:5] == [turn + 1, 5, 2, 3, 256]
        assert record[6:] == [STREAM, 0x20, x, y, 7, tenth, 0, 0, 0, 0]
    assert elsewhere[6] == STREAM + 1
    assert null[8:12] == [x, 0, 8, one]
    assert absent[8:11] == [x, 8, one]
