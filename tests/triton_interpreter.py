"""Runs marked functions in one child process whose Triton interprets kernels on CPU tensors.

Triton reads ``TRITON_INTERPRET`` once, when it is imported, so one process cannot both compile and
interpret. A test marks only what launches the kernel; everything else, parametrisation and oracle
included, stays an ordinary test of its own process::

    from triton_interpreter import interpreted

    @interpreted
    def launch(x, eps):                    # runs in the child; arguments and result are pickled
        from tileops.norm.kernels.rows import RegisterRow
        ...
        return y

    def test_one_row():
        torch.testing.assert_close(launch(x, 1e-6), expected)

The child starts at the first call, serves every test of its process and dies with it. A marked
function must stand at the top of its module, which the child loads by file. An exception in the
child is raised here, with the child's traceback.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["interpreted"]

_CHILD = "TILEOPS_TESTS_INTERPRETER_CHILD"


def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` in the interpreting child process."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get(_CHILD) == "1":
            return function(*args, **kwargs)
        file = function.__code__.co_filename
        return _child().submit(_serve, file, function.__name__, args, kwargs).result()

    return call


@functools.cache
def _child() -> ProcessPoolExecutor:
    executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    wanted = {_CHILD: "1", "TRITON_INTERPRET": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        executor.submit(_prepare).result()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return executor


def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """A multiply-add of float32 that rounds once, as cards do it; the interpreter's rounds twice."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    if z.data.dtype != np.float32:
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)
    with np.errstate(all="ignore"):
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(np.float32), z.dtype.scalar)


def _assembled(self: Any, text: str, constraints: str, values: Any, *rest: Any) -> Any:
    """The instructions that kernels name themselves."""
    import numpy as np
    from triton.runtime.interpreter import TensorHandle

    def flushed(x: Any) -> Any:
        return np.where(np.abs(x) < np.float32(2.0**-126), x * np.float32(0), x)

    functions = {
        "lg2.approx.f32": np.log2,
        "lg2.approx.ftz.f32": lambda x: np.log2(flushed(x)),
        "ex2.approx.ftz.f32": lambda x: flushed(np.exp2(flushed(x))),
        "rcp.approx.ftz.f32": lambda x: flushed(np.float32(1) / flushed(x)),
        "sin.approx.ftz.f32": np.sin,
        "cos.approx.ftz.f32": np.cos,
        "rcp.rn.f32": lambda x: np.float32(1) / x,
        "cvt.rni.f32.f32": np.rint,
        "cvt.rzi.f32.f32": np.trunc,
    }
    name, operands = text.split(maxsplit=1)
    assert operands == "$0, $1;", text
    with np.errstate(all="ignore"):
        result = [TensorHandle(functions[name](values[0].data), values[0].dtype.scalar)]
    return type("Result", (), {"get_result": lambda self, index: result[index]})()


def _fmod(x: Any, y: Any) -> Any:
    """The function of CUDA's library, which the interpreter does not load."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    with np.errstate(all="ignore"):
        result = np.fmod(x.handle.data, y.handle.data)
    return tl.tensor(TensorHandle(result, x.handle.dtype), x.type)


def _prepare() -> None:
    import torch
    import triton
    from triton.language.extra.cuda import libdevice
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    interpreter.InterpreterBuilder.create_fma = _fused
    interpreter.InterpreterBuilder.create_inline_asm = _assembled
    libdevice.fmod = _fmod
    # Here no launch overlaps another.
    cuda = sys.modules["triton.language.extra.cuda"]
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None
    if triton.__version__.startswith("3.6."):
        # There a loop's run-time bounds are arrays of one element, which NumPy 2.4 refuses as ints.
        plain = interpreter._patch_lang_tensor

        def patch(tensor: Any, scope: Any) -> None:
            plain(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patch


@functools.cache
def _load(file: str) -> Any:
    name = "_interpreted_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _serve(file: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(_load(file), name)(*args, **kwargs)
