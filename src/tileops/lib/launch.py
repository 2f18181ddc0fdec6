"""Building Triton kernels and launching them with little host work.

``kernel[grid](...)`` looks at every argument of every call to decide which machine code it needs.
Here that is said once, in a :class:`TritonBuild`, and a launch only packs its arguments and calls
the driver. Nothing in a launch synchronises, allocates device memory or depends on the values of
integers, so launches may be captured into a CUDA graph.

Device code stands in modules of its own (``*_triton.py``) and is named, not imported: a process
whose machine code is on disk never loads Triton.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from tileops.engine.asked import collector
from tileops.engine.kernel import DeviceFacts, TensorSpec
from tileops.engine.settings import settings
from tileops.lib.driver import Launch, load
from tileops.lib.machine_code import Code, DeviceFunction, check_card, code_for, key_of

__all__ = [
    "TRITON_TYPES",
    "DeviceFunction",
    "Launcher",
    "TritonBuild",
    "cdiv",
    "descriptor_of",
    "device_guard",
    "next_power_of_2",
    "output_of",
    "overlapping",
    "pointer_to",
    "resident",
]

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
_DESCRIPTOR = "tensordesc"
_NOTHING = nullcontext()
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_empty_strided_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def pointer_to(dtype: torch.dtype) -> str:
    """The signature type of a pointer to elements of ``dtype``, such as ``*fp16``."""
    return "*" + TRITON_TYPES[dtype]


def descriptor_of(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    """The signature type of a tensor descriptor, by which the bulk copy engine of compute capability 9.0
    and later moves blocks of a tensor: contiguous, at a 16-byte boundary as its rows are. A launch takes
    the tensor and describes it."""
    return f"{_DESCRIPTOR}<{TRITON_TYPES[dtype]}{list(block)}>"


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below ``number`` (at least 1)."""
    return 1 << max(number - 1, 0).bit_length()


def output_of(spec: TensorSpec) -> Callable[[], torch.Tensor]:
    """Allocates an output like ``spec``, contiguous, on the current device of its kind.

    On CUDA by the function that Inductor's code calls, which leaves out the dispatcher (half of the
    time of ``torch.empty_like``): a kernel runs where nobody watches it.
    """
    if spec.device.type == "cuda" and _empty_strided_cuda is not None:
        strides = TensorSpec.contiguous_of(spec.shape, spec.dtype, spec.device).strides
        return partial(_empty_strided_cuda, spec.shape, strides, spec.dtype)
    return partial(torch.empty, spec.shape, dtype=spec.dtype, device=spec.device)


def overlapping(device: DeviceFacts) -> tuple[tuple[str, Any], ...]:
    """The compiler option that lets a kernel be launched while the stream's previous one ends, which its
    device code then awaits (``dependent_triton.py``); none before compute capability 9.0."""
    return (("launch_pdl", True),) if device.arch >= (9, 0) else ()


def resident(device: DeviceFacts, warps: int) -> int:
    """How many programs of so many warps run at once, as far as their threads allow."""
    return 64 * device.multiprocessors // warps


def device_guard(index: int) -> AbstractContextManager[Any]:
    """Makes CUDA device ``index`` current, doing nothing where it already is."""
    if _current_device is None or _current_device() == index:
        return _NOTHING
    return torch.cuda.device(index)


@dataclass(frozen=True)
class TritonBuild:
    """One compilation of a Triton kernel: what decides the machine code, and nothing else.

    Calling it loads the machine code for the current CUDA device, out of the cache or compiled, and
    gives the :class:`Launcher`. Under ``TRITON_INTERPRET=1`` (read by Triton when it is imported)
    the launcher interprets the kernel on CPU tensors instead.
    """

    fn: str
    """The ``@triton.jit`` function, as ``package.module:function``."""
    signature: tuple[tuple[str, str], ...]
    """The run-time arguments in the kernel's order: ``("x", "*fp16"), ("M", "i64")``."""
    constexprs: tuple[tuple[str, Any], ...] = ()
    """The compile-time arguments, device functions among them; where they stand in the kernel's
    parameter list is free. None stands for a pointer that this build does not have."""
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16: pointers to 16-byte boundaries, such integers."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further compiler options, such as ``("maxnreg", 128)``."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two builds exactly when their machine code may be shared."""
        return (
            self.fn,
            self.signature,
            self.constexprs,
            (("num_warps", self.num_warps), ("num_stages", self.num_stages), *self.options),
            self.aligned,
        )

    @cached_property
    def function(self) -> Any:
        """The function itself; imports Triton."""
        return DeviceFunction(self.fn).function

    @property
    def functions(self) -> tuple[str, ...]:
        """The kernel and the device functions that it is given, by name."""
        given = (value.fn for _, value in self.constexprs if isinstance(value, DeviceFunction))
        return (self.fn, *given)

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments as Triton takes them; imports it."""
        return {
            name: value.function if isinstance(value, DeviceFunction) else value
            for name, value in self.constexprs
        }

    def __call__(self) -> Launcher:
        """The launcher of this build, loaded on the current CUDA device."""
        launcher = Launcher(self)
        asked = collector()
        if asked is not None:
            asked.append(self)
        elif not settings().triton_interpret:
            launcher.on(torch.cuda.current_device())
        return launcher

    def key_for(self, arch: tuple[int, int]) -> str:
        """Its name in the kernel cache. Raises ``UnknownSourceError`` where it has none."""
        return key_of(self, arch)

    def code_for(self, arch: tuple[int, int], compile: bool = True) -> Code | None:
        """The machine code for compute capability ``arch``, out of the cache or compiled; needs no
        GPU. None where it would have to be compiled and ``compile`` is false."""
        return code_for(self, arch, compile)

    def compile_for(self, arch: tuple[int, int]) -> Any:
        """Triton's ``CompiledKernel`` for compute capability ``arch``; needs no GPU.

        Served from Triton's on-disk cache where it was compiled before.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.runtime.jit import JITFunction

        fn = self.function
        if not isinstance(fn, JITFunction):
            raise RuntimeError("under TRITON_INTERPRET=1 Triton kernels cannot be compiled")
        types, constexprs = dict(self.signature), self.constants
        unknown = set(fn.arg_names) ^ (types.keys() | constexprs.keys())
        if unknown:
            raise ValueError(f"{self.fn}: arguments do not match the kernel's: {unknown}")
        source = ASTSource(
            fn,
            {name: types.get(name, "constexpr") for name in fn.arg_names},
            constexprs,
            {(fn.arg_names.index(name),): _DIVISIBLE_BY_16 for name in self.aligned},
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
                if settings().triton_interpret:
                    launch = _interpret(self._build)
                else:
                    with device_guard(device_index):
                        launch = _load(self._build, device_index)
                self._on[device_index] = launch
        return launch


def _interpret(build: TritonBuild) -> Launch:
    """A launch by Triton's interpreter, on tensors of any device."""
    names, constexprs = [name for name, _ in build.signature], build.constants
    described = _describing(build)

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        args = described(args)
        build.function[grid0, grid1, grid2](**dict(zip(names, args, strict=True)), **constexprs)

    return launch


def _load(build: TritonBuild, device_index: int) -> Launch:
    """Fetch or compile for ``device_index``, which is current, and load there."""
    arch = torch.cuda.get_device_capability(device_index)
    check_card(arch)
    code = build.code_for(arch)
    assert code is not None
    if code.binary is None:
        return _by_compiled_kernel(build, code.compiled)
    return load(code.binary, tuple(kind for _, kind in build.signature), device_index)


def _by_compiled_kernel(build: TritonBuild, kernel: Any) -> Launch:
    """A launch by ``CompiledKernel``'s own door: takes every kernel; some 10 µs slower."""
    types, constexprs = dict(build.signature), build.constants
    place = {name: index for index, name in enumerate(types)}
    order, described = tuple(build.function.arg_names), _describing(build)

    def launch(grid0: int, grid1: int, grid2: int, *args: Any) -> None:
        args = described(args)
        every = [args[place[name]] if name in place else constexprs[name] for name in order]
        kernel[grid0, grid1, grid2](*every)

    return launch


def _describing(build: TritonBuild) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Puts descriptors in the place of the tensors that the signature wants described."""
    blocks = {
        place: json.loads(kind[kind.index("[") : kind.index("]") + 1])
        for place, (_, kind) in enumerate(build.signature)
        if kind.startswith(_DESCRIPTOR)
    }
    if not blocks:
        return lambda args: args
    from triton.tools.tensor_descriptor import TensorDescriptor

    def described(args: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = list(args)
        for place, block in blocks.items():
            changed[place] = TensorDescriptor.from_tensor(args[place], block)
        return tuple(changed)

    return described
