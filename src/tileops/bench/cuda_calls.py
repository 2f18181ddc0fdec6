"""Ways to launch RMSNorm's machine code on a card, the output allocated each time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tileops.backend import TensorSpec
from tileops.engine.plan import call_spec, resolve_entry
from tileops.lib.launch import output_of
from tileops.norm import RMSNormFwdOp

__all__ = ["build_of", "ways"]


def build_of(op: Any, *tensors: torch.Tensor) -> Any:
    """The ``TritonBuild`` that serves a call."""
    return resolve_entry(op, call_spec(op, tensors, None)[0])[1].build


def ways(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """``x``: ``[rows, width]``; one program a row."""
    rows, width = x.shape
    op, plain = RMSNormFwdOp(normalized_shape=(width,)), torch.nn.functional.rms_norm
    build = build_of(op, x, weight)
    launch, scalars = build().on(x.device.index), (rows, 1e-6)
    kernel = build.compile_for(torch.cuda.get_device_capability(x.device))
    types, constexprs = dict(build.signature), build.constants
    names = build.function.arg_names

    def values(y: torch.Tensor) -> list[Any]:
        given = iter((x, weight, y, *scalars))
        return [next(given) if name in types else constexprs[name] for name in names]

    def by_launch() -> None:
        launch(rows, 1, 1, x, weight, torch.empty_like(x), *scalars)

    def by_compiled_kernel() -> None:
        kernel[rows, 1, 1](*values(torch.empty_like(x)))

    def by_jit() -> None:
        build.function[rows, 1, 1](
            *values(torch.empty_like(x)),
            num_warps=build.num_warps,
            num_stages=build.num_stages,
            **dict(build.options),
        )

    return {
        "floor: empty_like + ctypes cuLaunchKernel": _floor(launch, kernel, rows, x, weight),
        "tileops op": lambda: op(x, weight),
        "F.rms_norm": lambda: plain(x, (width,), weight, 1e-6),
        "allocation: empty_like": lambda: torch.empty_like(x),
        "allocation: as tileops does it": output_of(TensorSpec.of(x)),
        "tileops launch, output allocated": by_launch,
        "Triton's compiled kernel [grid], output allocated": by_compiled_kernel,
        "Triton's kernel[grid], output allocated": by_jit,
    }


def _floor(launch: Any, kernel: Any, rows: int, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """The least that any library can do: the output, and one driver call with ready arguments."""
    y = torch.empty_like(x)
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (x, weight, y)]
    held: list[Any] = [
        *pointers,
        ctypes.c_int64(rows),
        ctypes.c_float(1e-6),
        *[ctypes.c_uint64(0)] * 2,
    ]
    arguments = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
    function, driver = launch.__globals__["_function"], ctypes.CDLL("libcuda.so.1")
    call, empty_like, stream = driver.cuLaunchKernel, torch.empty_like, ctypes.c_void_p(0)
    threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared

    def floor(_: Any = held) -> None:
        empty_like(x)
        call(function, rows, 1, 1, threads, 1, 1, shared, stream, arguments, None)

    return floor
