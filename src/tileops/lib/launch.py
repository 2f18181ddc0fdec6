"""Builds a Triton kernel from stated facts and launches it with little host work.

``kernel[grid](...)`` looks at every argument of every call to decide which machine code it needs.
Here that is said once, in a :class:`TritonBuild`, and a launch only packs its arguments and calls
the driver. Nothing in a launch synchronises, allocates device memory or depends on the values of
integers, so launches may be captured into a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

__all__ = ["TRITON_TYPES", "Launcher", "TritonBuild", "device_guard", "pointer_to"]

TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
"""Triton's name of an element type, as :class:`TritonBuild` takes it."""

_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]
_NOTHING = nullcontext()
_current_device = getattr(torch._C, "_cuda_getDevice", None)

Launch = Callable[..., None]
"""``launch(grid0, grid1, grid2, *args)`` on the current stream of one device."""


def pointer_to(dtype: torch.dtype) -> str:
    """The signature type of a pointer to elements of ``dtype``, such as ``*fp16``."""
    return "*" + TRITON_TYPES[dtype]


def device_guard(index: int) -> AbstractContextManager[Any]:
    """Makes CUDA device ``index`` current, doing nothing where it already is."""
    if _current_device is None or _current_device() == index:
        return _NOTHING
    return torch.cuda.device(index)


@dataclass(frozen=True)
class TritonBuild:
    """One compilation of a Triton kernel: what decides the machine code, and nothing else.

    Calling it compiles for the current CUDA device, loads, and gives the :class:`Launcher`. Under
    ``TRITON_INTERPRET=1`` (read by Triton when it is imported) the launcher interprets the kernel
    on CPU tensors instead.
    """

    fn: Any
    """The ``@triton.jit`` function."""
    signature: tuple[tuple[str, str], ...]
    """The run-time arguments in the kernel's order: ``("x", "*fp16"), ("M", "i64")``."""
    constexprs: tuple[tuple[str, Any], ...] = ()
    """The compile-time arguments; where they stand in the kernel's parameter list is free."""
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16: pointers to 16-byte boundaries, such integers."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further compiler options, such as ``("maxnreg", 128)``."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two builds exactly when their machine code may be shared."""
        source = self.fn.fn
        return (
            f"{source.__module__}.{source.__qualname__}",
            self.signature,
            self.constexprs,
            (("num_warps", self.num_warps), ("num_stages", self.num_stages), *self.options),
            self.aligned,
        )

    def __call__(self) -> Launcher:
        """The launcher of this build, loaded on the current CUDA device."""
        launcher = Launcher(self)
        if isinstance(self.fn, JITFunction):
            launcher.on(torch.cuda.current_device())
        return launcher

    def compile_for(self, arch: tuple[int, int]) -> Any:
        """Triton's ``CompiledKernel`` for compute capability ``arch``; needs no GPU.

        Served from Triton's on-disk cache where it was compiled before.
        """
        if not isinstance(self.fn, JITFunction):
            raise RuntimeError("under TRITON_INTERPRET=1 Triton kernels cannot be compiled")
        types, constexprs = dict(self.signature), dict(self.constexprs)
        unknown = set(self.fn.arg_names) ^ (types.keys() | constexprs.keys())
        if unknown:
            raise ValueError(f"{self.identity[0]}: arguments do not match the kernel's: {unknown}")
        source = ASTSource(
            self.fn,
            {name: types.get(name, "constexpr") for name in self.fn.arg_names},
            constexprs,
            {(self.fn.arg_names.index(name),): _DIVISIBLE_BY_16 for name in self.aligned},
        )
        return triton.compile(
            source,
            target=GPUTarget("cuda", arch[0] * 10 + arch[1], 32),
            options={
                "num_warps": self.num_warps,
                "num_stages": self.num_stages,
                **dict(self.options),
            },
        )


class Launcher:
    """Launches one build on any CUDA device; the first launch on a device loads it there.

    Tensors, integers and floats go in the order of the build's signature; None is a null pointer.
    """

    __slots__ = ("_build", "_loading", "_on")

    def __init__(self, build: TritonBuild) -> None:
        self._build = build
        self._loading = threading.Lock()
        self._on: dict[int, Launch] = {}

    def __call__(self, grid0: int, grid1: int, grid2: int, device_index: int, *args: Any) -> None:
        """Launch on the current stream of device ``device_index``, which must be current."""
        launch = self._on.get(device_index)
        if launch is None:
            launch = self.on(device_index)
        launch(grid0, grid1, grid2, *args)

    def on(self, device_index: int) -> Launch:
        """``launch(grid0, grid1, grid2, *args)`` for one device: the same, one look-up less."""
        with self._loading:
            launch = self._on.get(device_index)
            if launch is None:
                if isinstance(self._build.fn, JITFunction):
                    with device_guard(device_index):
                        launch = _load(self._build, device_index)
                else:
                    launch = _interpret(self._build)
                self._on[device_index] = launch
        return launch


def _interpret(build: TritonBuild) -> Launch:
    """A launch by Triton's interpreter, on tensors of any device."""
    names, constexprs = [name for name, _ in build.signature], dict(build.constexprs)

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        build.fn[grid0, grid1, grid2](**dict(zip(names, args, strict=True)), **constexprs)

    return launch


def _load(build: TritonBuild, device_index: int) -> Launch:
    """Compile for ``device_index``, which is current, and load there."""
    kernel = build.compile_for(torch.cuda.get_device_capability(device_index))
    return _direct(build, kernel, device_index) or _by_compiled_kernel(build, kernel)


def _direct(build: TritonBuild, kernel: Any, device_index: int) -> Launch | None:
    """A launch by the C function under Triton's Python launcher, or None where its form is not
    one that was tried, or where the kernel needs scratch memory allocated at each launch.
    """
    form = _DIRECT_FORMS.get(".".join(triton.__version__.split(".")[:2]))
    scratch = kernel.metadata.global_scratch_size or kernel.metadata.profile_scratch_size
    described = any(kind.startswith("tensordesc") for _, kind in build.signature)
    if form is None or scratch or described:
        return None
    kernel._init_handles()
    # The constexprs are baked in; a launcher whose signature leaves them out need not pass them,
    # and is shared by every build with the same run-time arguments.
    run_time = SimpleNamespace(signature=dict(build.signature), constants={})
    launcher = triton.runtime.driver.active.launcher_cls(run_time, kernel.metadata)
    return form(kernel, launcher, device_index)


def _direct_3_6(kernel: Any, launcher: Any, device_index: int) -> Launch:
    c_launch, function, packed = launcher.launch, kernel.function, kernel.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    stream_of = torch._C._cuda_getCurrentRawStream

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        c_launch(
            grid0,
            grid1,
            grid2,
            stream_of(device_index),
            function,
            cooperative,
            dependent,
            None,
            None,
            packed,
            None,
            None,
            None,
            *args,
        )

    return launch


def _direct_3_7(kernel: Any, launcher: Any, device_index: int) -> Launch:
    c_launch, function, packed = launcher.launch, kernel.function, kernel.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    annotations, kinds = launcher.arg_annotations, launcher.kernel_signature
    stream_of = torch._C._cuda_getCurrentRawStream

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        c_launch(
            grid0,
            grid1,
            grid2,
            stream_of(device_index),
            function,
            cooperative,
            dependent,
            packed,
            None,
            None,
            None,
            None,
            None,
            annotations,
            kinds,
            args,
        )

    return launch


_DIRECT_FORMS = {"3.6": _direct_3_6, "3.7": _direct_3_7}
"""By Triton release; tests/unit/test_launch.py tries the installed one."""


def _by_compiled_kernel(build: TritonBuild, kernel: Any) -> Launch:
    """A launch by ``CompiledKernel``'s own door: every release has it; some 10 µs slower."""
    types, constexprs = dict(build.signature), dict(build.constexprs)
    place = {name: index for index, name in enumerate(types)}
    order = tuple(build.fn.arg_names)

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        every = [args[place[name]] if name in place else constexprs[name] for name in order]
        kernel[grid0, grid1, grid2](*every)

    return launch
