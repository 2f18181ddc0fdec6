"""Machine code to a launch, by the CUDA driver and nothing above it.

Every release of Triton launches in its own way, and needs Triton imported (0.2 s) to do it. The
driver's interface is stable, and a launch by it costs less: all arguments are packed into one
buffer that the driver reads, by one call of ``struct``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tileops.engine.errors import KernelLaunchError

__all__ = ["Binary", "Launch", "load"]

Launch = Callable[..., None]
"""``launch(grid0, grid1, grid2, *args)`` on the current stream of one device."""

_INVALID_CONTEXT = 201
_OPT_IN_SHARED = 48 << 10
"""Bytes of shared memory from which a function must ask for them."""
_COOPERATIVE, _PROGRAMMATIC_SERIALIZATION = 2, 6
_MAX_DYNAMIC_SHARED, _PREFER_SHARED = 8, 2

_CODES = {
    "i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q",
    "u64": "Q", "fp32": "f", "fp64": "d",
}  # fmt: skip
"""``struct``'s letter of a scalar type; a pointer is ``Q``."""


@dataclass(frozen=True)
class Binary:
    """Machine code of one kernel and what a launch must know of it."""

    code: bytes
    """A cubin."""
    name: str
    """The function in it."""
    arch: tuple[int, int]
    warps: int
    shared: int
    """Bytes of shared memory of a block."""
    dependent: bool = False
    """Launched while the stream's previous kernel still ends (programmatic dependent launch)."""
    cooperative: bool = False
    """All its blocks must be resident at once."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(kernel: str, function: str, *args: Any) -> None:
    status = getattr(_cuda(), function)(*args)
    if status:
        raise KernelLaunchError(kernel, function, _error(status))


def _error(status: int) -> str:
    text = ctypes.c_char_p()
    _cuda().cuGetErrorString(status, ctypes.byref(text))
    return f"{(text.value or b'unknown').decode()} ({status})"


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


# CUlaunchConfig: grid and block (3 x u32 each), shared memory (u32), stream, attributes, their number.
_CONFIG = "7I4xQQI4x"
_CONFIG_SIZE = struct.calcsize(_CONFIG)


def load(binary: Binary, types: tuple[str, ...], device_index: int) -> Launch:
    """A launch of ``binary``, whose run-time arguments have these Triton types, on one device.

    The device must be current and its context made. Tensors (None: a null pointer), integers and
    floats are passed in order. Raises ``KernelLaunchError`` where the driver refuses.
    """
    name = binary.name
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call(name, "cuModuleLoadData", ctypes.byref(module), binary.code)
    _call(name, "cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    if binary.shared > _OPT_IN_SHARED:
        _call(name, "cuFuncSetCacheConfig", function, _PREFER_SHARED)
        _call(name, "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, binary.shared)
    context = ctypes.c_void_p()
    _call(name, "cuCtxGetCurrent", ctypes.byref(context))
    wanted = {_PROGRAMMATIC_SERIALIZATION: binary.dependent, _COOPERATIVE: binary.cooperative}
    attributes = (_Attribute * 2)()
    count = 0
    for attribute in (key for key, given in wanted.items() if given):
        attributes[count].id = attribute
        attributes[count].value[0] = 1
        count += 1
    return _launch(binary, types, device_index, function, context, (attributes, count))


def _launch(
    binary: Binary,
    types: tuple[str, ...],
    device_index: int,
    function: Any,
    context: Any,
    attributes: tuple[Any, int],
) -> Launch:
    """The generated function: what a kernel takes decides every line of it."""
    pointers = [kind.startswith("*") for kind in types]
    # Every argument has 8 bytes of its own, after the launch configuration in the same buffer.
    code = "<" + _CONFIG + "".join(
        f"{_CODES['u64' if is_pointer else kind]}{8 - struct.calcsize(_CODES.get(kind, 'Q'))}x"
        for kind, is_pointer in zip(types, pointers, strict=True)
    )  # fmt: skip
    packed = struct.Struct(code)
    # Triton's kernels take two more pointers, to scratch memory; such kernels are not served here.
    places = [_CONFIG_SIZE + 8 * n for n in range(len(types) + 2)]
    pool: list[Any] = []

    def slot() -> tuple[Any, Any, Any]:
        buffer = ctypes.create_string_buffer(_CONFIG_SIZE + 8 * (len(types) + 2))
        begin = ctypes.addressof(buffer)
        arguments = (ctypes.c_void_p * len(places))(*(begin + place for place in places))
        return buffer, ctypes.byref(buffer), arguments

    def failed(status: int, ref: Any, arguments: Any) -> None:
        if status == _INVALID_CONTEXT:  # the first CUDA call of this thread
            _call(binary.name, "cuCtxSetCurrent", context)
            status = launch_kernel(ref, function, arguments, None)
        if status:
            raise KernelLaunchError(binary.name, "cuLaunchKernelEx", _error(status))

    launch_kernel = _cuda().cuLaunchKernelEx
    names = [f"a{n}" for n in range(len(types))]
    values = [
        f"(0 if {name} is None else {name}.data_ptr())" if is_pointer else name
        for name, is_pointer in zip(names, pointers, strict=True)
    ]
    stream = f"_stream({device_index})"
    configuration = ("g0", "g1", "g2", binary.threads, 1, 1, binary.shared, stream,
                     ctypes.addressof(attributes[0]), attributes[1])  # fmt: skip
    source = "\n".join([
        f"def launch(g0, g1, g2, {', '.join(names)}):",
        # A buffer of its own for each launch under way: the driver is called without the GIL.
        "    try: slot = _pop()",
        "    except IndexError: slot = _slot()",
        "    buffer, ref, arguments = slot",
        f"    _pack(buffer, 0, {', '.join(map(str, (*configuration, *values)))})",
        "    status = _launch_kernel(ref, _function, arguments, None)",
        "    if status: _failed(status, ref, arguments)",
        "    _push(slot)",
    ])  # fmt: skip
    space = {
        "_pop": pool.pop, "_push": pool.append, "_slot": slot, "_pack": packed.pack_into,
        "_stream": torch._C._cuda_getCurrentRawStream, "_launch_kernel": launch_kernel,
        "_function": function, "_failed": failed, "_kept": attributes,
    }  # fmt: skip
    exec(compile(source, f"<launch of {binary.name}>", "exec"), space)
    launch: Launch = space["launch"]
    return launch
