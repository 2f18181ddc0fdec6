"""The kernels that every op with a decomposition has: that function itself, on any device, and
compiled by Inductor on the CPU.

A decomposition is pure: ``decomposition(<inputs>, **params)`` returns the declared outputs (None for
one that does not exist), then the new value of each written input that is not itself an output.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from tileops.engine.kernel import CallSpec, Entry, Kernel

__all__ = ["decomposition_kernels"]


def _fresh(result: torch.Tensor, inputs: tuple[Any, ...]) -> torch.Tensor:
    """``result`` as an own, contiguous tensor: an op never returns its input or a view of it."""
    try:
        pointer = result.untyped_storage().data_ptr()
    except RuntimeError:
        if not result._is_zerotensor():
            raise
        # A derivative that is nothing but zero, without memory.
        return torch.zeros(result.shape, dtype=result.dtype, device=result.device)
    if not result.is_contiguous():
        return result.contiguous()
    for tensor in inputs:
        if tensor is not None and tensor.untyped_storage().data_ptr() == pointer:
            return result.clone(memory_format=torch.contiguous_format)
    # A view made under no_grad could not be written later where gradients are on; .data is none.
    return result.data if result._is_view() else result


def _runner(function: Callable[..., Any], call: CallSpec, has_out: bool, is_input: str) -> Any:
    """A ``Run`` from a pure function: fresh outputs, new values copied into what is written."""
    names = list(call.inputs)
    written = [names.index(name) for name in names if name in call.written and name != is_input]
    carried = names.index(is_input) if is_input in call.written else None
    count = len(call.outputs)
    out_given = has_out and "out" in call.written
    params = vars(call.params)
    if count == 1 and not call.written and not has_out:

        def make(*inputs: Any) -> Any:  # what most calls need, in half the time
            result = function(*inputs, **params)
            (result,) = result if isinstance(result, tuple) else (result,)
            return None if result is None else _fresh(result, inputs)

        return make

    def run(*args: Any) -> Any:
        inputs = args[: len(names)]
        result = function(*inputs, **params)
        results = result if isinstance(result, tuple) else (result,)
        for position, value in zip(written, results[count:], strict=True):
            inputs[position].copy_(value)
        if carried is not None:
            inputs[carried].copy_(results[0])
            return None
        if out_given:
            args[-1].copy_(results[0])
            return None
        outputs = tuple(
            None if value is None else _fresh(value, inputs) for value in results[:count]
        )
        return outputs[0] if count == 1 else (outputs if count else None)

    return run


@cache
def decomposition_kernels(
    function: Callable[..., Any], compiled_from: int | None, has_out: bool, is_input: str
) -> tuple[type[Kernel], type[Kernel]]:
    """(plain, Inductor) for one op class."""

    class Decomposition(Kernel):
        """The decomposition through ATen: any device, any call."""

        name = "decomposition"
        devices = ("*",)
        general = True
        last_resort = True

        @classmethod
        def entry_for(cls, call: CallSpec) -> Entry:
            identity = ("decomposition", function, call.key, call.device.type)
            return Entry(identity, lambda: function, lambda f, c: _runner(f, c, has_out, is_input))

    class Inductor(Kernel):
        """The decomposition as one C++ kernel."""

        name = "inductor"
        devices = ("cpu",)

        @classmethod
        def refuses(cls, call: CallSpec) -> str | None:
            if compiled_from is None:
                return "the decomposition is one ATen kernel already"
            largest = max((s.numel for s in call.outputs.values() if s is not None), default=0)
            if largest < compiled_from:
                return f"compiling pays from {compiled_from} output elements on, here {largest}"
            return None

        @classmethod
        def entry_for(cls, call: CallSpec) -> Entry:
            # Sizes are symbols in the compiled code, but for 1, which Dynamo takes as a fact.
            specs = tuple(
                None if s is None else (s.dtype, *(size == 1 for size in s.shape))
                for s in call.inputs.values()
            )
            identity = ("inductor", function, call.key, specs, tuple(sorted(call.written)))
            return Entry(
                identity,
                lambda: _compiled(function),
                lambda f, c: _runner(f, c, has_out, is_input),
            )

    return Decomposition, Inductor


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # A code object of its own: ops must not share one frame's recompile limit.
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    compiled = torch.compile(own, dynamic=True, fullgraph=True)
    first = threading.Lock()
    ready = given_up = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ready, given_up
        # Gradients are the boundary's affair: what requires one, or is a Parameter, must neither be
        # recorded here nor split the compiled code by kind of tensor.
        with torch.no_grad():
            plain = [
                a.detach() if isinstance(a, torch.Tensor) and not a.is_inference() else a
                for a in args
            ]
            if given_up:
                return function(*plain, **kwargs)
            try:
                if ready:
                    return compiled(*plain, **kwargs)
                with first:  # compiled at the first call: by one thread
                    result = compiled(*plain, **kwargs)
                    ready = True
                    return result
            except Exception as error:  # noqa: BLE001  (whatever a disabled or full compiler raises)
                result = function(*plain, **kwargs)  # raises where the fault is not the compiler's
                given_up = True
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
                warnings.warn(
                    f"tileops: {function.__qualname__} runs uncompiled from now on: {problem}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return result

    return run
