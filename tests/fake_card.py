"""A process that believes in an H200: libcuda is tests/fake_cuda.c, and tensors stay on the CPU.

What is loaded and launched is written down by the fake; everything above the driver is real.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

__all__ = ["available", "believe", "build_fake", "launches", "run_child"]

ROOT = Path(__file__).parents[1]
available = shutil.which("cc") is not None


def build_fake(folder: Path) -> Path:
    """Compile the fake libcuda into ``folder``."""
    import triton

    library = folder / "libcuda.so.1"
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source = ROOT / "tests/fake_cuda.c"
    command = ["cc", "-shared", "-fPIC", "-w", f"-I{include}", "-o", library, source]
    subprocess.run(command, check=True)
    return library


def run_child(code: str, library: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the fake in place of libcuda."""
    whole = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        **environment,
    }
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=whole,
                          check=False)  # fmt: skip


def believe(capturing: bool = False) -> None:
    """In the child: a card of compute capability 9.0, with 132 multiprocessors, is there."""
    import torch

    from tileops.backend import DeviceFacts, register_device_facts
    from tileops.lib import launch

    launch._current_device = None  # a build for cards would ask its driver which that is
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.device = lambda index: nullcontext()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.is_current_stream_capturing = lambda: capturing
    torch._C._cuda_getCurrentRawStream = lambda device: 0x5000 + device
    facts = DeviceFacts("cuda", 0, (9, 0), "fake H200", 132, 232448)
    register_device_facts("cuda", lambda device: facts)


def launches() -> int:
    """In the child: how many launches the fake has seen."""
    fake = ctypes.CDLL("libcuda.so.1")
    fake.fake_cuda_record.restype = ctypes.POINTER(ctypes.c_ulonglong * 16)
    return int(fake.fake_cuda_record().contents[0])


def block_triton() -> None:
    """In the child: importing Triton fails from now on; that it is installed can still be seen."""

    class Blocked:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.startswith("triton."):
                raise AssertionError(f"{name} is imported")

    assert "triton" not in sys.modules
    sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
