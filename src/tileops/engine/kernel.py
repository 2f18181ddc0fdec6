"""What a kernel is: facts of a call, a claim with reasons, a build identity and a build thunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

__all__ = ["CallSpec", "DeviceFacts", "Entry", "Kernel", "KernelInterface", "Run", "TensorSpec"]

Run = Callable[..., Any]
"""Runs one call: takes the op's inputs in manifest order (None where absent), then ``out`` where
the op has an out buffer; returns the op's outputs (a tensor, a tuple, or None)."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its data. ``strides`` and ``shape`` in elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    aligned: bool = True
    """The data pointer is a multiple of 16 bytes."""

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps (dims of size 1 may have any stride), as torch defines it."""
        expected = 1
        if 0 in self.shape:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real tensor."""
        aligned = tensor.device.type == "meta" or tensor.data_ptr() % 16 == 0
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.device, tuple(tensor.stride()), aligned
        )

    @classmethod
    def contiguous_of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> TensorSpec:
        """A contiguous, aligned spec."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), dtype, device, tuple(reversed(strides)), True)


@dataclass(frozen=True)
class DeviceFacts:
    """What kernels may know of a device. ``arch`` is CUDA's compute capability, (0, 0) elsewhere."""

    type: str
    index: int = 0
    arch: tuple[int, int] = (0, 0)
    name: str = ""
    multiprocessors: int = 1
    shared_memory: int = 0
    """Bytes of shared memory one block may opt into."""

    @property
    def arch_name(self) -> str:
        """``sm_90``; '' where there is no compute capability."""
        return f"sm_{self.arch[0]}{self.arch[1]}" if self.arch != (0, 0) else ""


@dataclass(frozen=True)
class CallSpec:
    """The immutable facts by which a kernel is chosen and built.

    ``params``: the op's parameters as attributes; ``dims``: named dims (int, or a tuple for a
    splice); ``inputs``/``outputs``: a ``TensorSpec`` by name, None where absent. Inputs that are
    not written reach the kernel contiguous, so their specs here are contiguous too.
    """

    op: str
    params: SimpleNamespace
    dims: Mapping[str, Any]
    inputs: Mapping[str, TensorSpec | None]
    outputs: Mapping[str, TensorSpec | None]
    device: DeviceFacts
    written: frozenset[str] = field(default_factory=frozenset)
    key: str = ""
    """The op as ``repr`` spells it: canonical, so that equal ops have equal keys."""

    def spec(self, name: str) -> TensorSpec:
        """The spec of an input or output that is there. Raises ``KeyError`` for an absent one."""
        found = self.inputs.get(name) or self.outputs.get(name)
        if found is None:
            raise KeyError(f"{self.op}: '{name}' is absent from this call")
        return found

    def __str__(self) -> str:
        given = ", ".join(
            f"{name}={str(spec.dtype)[6:]}{list(spec.shape)}"
            for name, spec in self.inputs.items()
            if spec is not None
        )
        return f"{self.op}({given}) on {self.device.type}"


@dataclass(frozen=True)
class Entry:
    """How one call is served.

    ``identity``: hashable; what makes two builds the same, and nothing else (no batch size unless
    the machine code depends on it). ``build()`` makes the artifact once per identity and process.
    ``bind(artifact, call)`` gives the ``Run`` of one call's exact shapes (grid, scalars); without
    it the artifact itself is the ``Run``.
    """

    identity: tuple[Any, ...]
    build: Callable[[], Any]
    bind: Callable[[Any, CallSpec], Run] | None = None


class Kernel:
    """One way to serve a slot. Never instantiated; states positively what it takes.

    One defines ``entry_for``, or ``candidates`` where tuning has a choice; each is made from the other.
    No method may read the environment or any global state.
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    arch: ClassVar[tuple[int, int]] = (8, 0)
    """Least compute capability (CUDA only)."""
    general: ClassVar[bool] = False
    """Stands behind every specialised kernel; at most one for a slot and device type."""
    last_resort: ClassVar[bool] = False
    """Stands behind the general kernel too: the decomposition."""
    compiles: ClassVar[bool] = False
    """Made by Inductor on the CPU: not where ``TILEOPS_CPU_KERNEL`` says ``plain``."""

    @classmethod
    def refuses(cls, call: CallSpec) -> str | None:
        """Why this kernel does not take the call, or None when it does."""
        return None

    @classmethod
    def cost(cls, call: CallSpec) -> float | None:
        """Expected device time in µs; resolves two specialised claims. None: not declared."""
        return None

    @classmethod
    def entry_for(cls, call: CallSpec) -> Entry:
        """The build identity and build of this call."""
        if not cls.serves():
            raise NotImplementedError(f"{cls.__name__} must define entry_for or candidates")
        return cls.candidates(call)[0]

    @classmethod
    def candidates(cls, call: CallSpec) -> list[Entry]:
        """Entries worth timing when tuning is requested; the default one first."""
        return [cls.entry_for(call)]

    @classmethod
    def serves(cls) -> bool:
        """Whether the class defines one of these two."""
        above = cls.__mro__[: cls.__mro__.index(Kernel)]
        return any({"entry_for", "candidates"} & vars(one).keys() for one in above)


@dataclass(frozen=True)
class KernelInterface:
    """A slot: the in-tree kernels by device type, named ``module:Class`` inside the family's
    ``kernels`` package and imported when that device is first used.

    Every slot of an op with a decomposition is served on the CPU and any other device by the
    decomposition; ``cpu`` here adds kernels.
    """

    cuda: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    compiled_from: int | None = None
    """Elements of the largest tensor from which the decomposition compiled by Inductor beats it run
    through ATen on the CPU, as ``benchmarks/cpu_kernels.py`` measures; None where it never does by what
    a second of compiling is worth."""
    compiled_unless: Callable[[CallSpec], str | None] | None = None
    """Why compiled code is slower for a call of that size, or None where it is not."""
