"""What the compiler says of a kernel, for architectures that need not be present.

``resources(build, arch)`` compiles through Triton's on-disk cache (which publishes atomically, so
parallel test processes share it) and reads registers, stack and shared memory from the cubin with
the ``cuobjdump`` in Triton's own package.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from tileops.lib.launch import TritonBuild

__all__ = ["ARCHITECTURES", "Resources", "assert_fits", "resources", "sass"]

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))

SHARED_MEMORY = {(8, 0): 163 << 10, (8, 6): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""Bytes of shared memory one block may opt into."""


@dataclass(frozen=True)
class Resources:
    """Of one thread: registers and stack bytes; of one block: shared memory bytes."""

    registers: int
    stack: int
    """Bytes of local memory a thread needs: 0 unless registers are spilled or indexed."""
    shared: int


def resources(build: TritonBuild, arch: tuple[int, int]) -> Resources:
    """What ``build`` needs on ``arch``."""
    return _resources(build.identity, arch, _Ignored(build))


def assert_fits(build: TritonBuild, arch: tuple[int, int]) -> Resources:
    """Fail unless ``build`` compiles for ``arch`` without spills and within its limits."""
    found = resources(build, arch)
    assert found.registers <= 255, (build.identity, arch, found)
    assert found.stack == 0, ("spills registers", build.identity, arch, found)
    assert found.shared <= SHARED_MEMORY[arch], (build.identity, arch, found)
    return found


def sass(build: TritonBuild, arch: tuple[int, int]) -> str:
    """The machine code as text, such as ``LDG.E.128`` for a 16-byte load."""
    return _cuobjdump(build.compile_for(arch).asm["cubin"], "-sass")


class _Ignored:
    """Carries a build past ``functools.cache``: the identity beside it is the key."""

    def __init__(self, build: TritonBuild) -> None:
        self.build = build

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ignored)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _resources(_identity: Any, arch: tuple[int, int], carrier: _Ignored) -> Resources:
    kernel = carrier.build.compile_for(arch)
    usage = _cuobjdump(kernel.asm["cubin"], "-res-usage")
    registers, stack, local = (
        max(map(int, re.findall(rf"\b{name}:(\d+)", usage))) for name in ("REG", "STACK", "LOCAL")
    )
    return Resources(registers, stack + local, kernel.metadata.shared)


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, option, file.name], check=True, capture_output=True, text=True
        ).stdout
