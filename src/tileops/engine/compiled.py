"""A function compiled by Inductor, whose code a repeated call enters without Dynamo and AOTAutograd.

The way through both costs 20 to 60 µs a call. All it does for a call of known facts is to find the
code that was made for them and to give it the tensors and their sizes in its own order. So the first
call of a plan goes that way, and what then reached Inductor's code is repeated.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Compiled", "inside"]

Run = Callable[..., Any]


class _Entered(threading.local):
    """The calls of Inductor's code in this thread, while somebody asks: (code, arguments, results)."""

    calls: list[tuple[Run, list[Any], Sequence[Any]]] | None = None


_entered = _Entered()


def inside() -> bool:
    """Whether this thread compiles or enters a kernel of ours: its graphs are not the user's."""
    return _entered.calls is not None


def _inductor(graph: Any, examples: Any) -> Any:
    """``torch.compile``'s backend "inductor", whose code tells of its calls."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def told(*args: Any, **kwargs: Any) -> Any:
        made: Any = compile_fx_inner(*args, **kwargs)
        code = getattr(made, "current_callable", None)
        if callable(code):
            made.current_callable = _telling(code)
        return made

    # What this cache has would come without being told. Inductor's own has the code all the same.
    with config.patch(enable_autograd_cache=False):
        return compile_fx(graph, examples, inner_compile=told)


def _telling(code: Run) -> Run:
    def telling(values: list[Any]) -> Any:
        if _entered.calls is None:
            return code(values)
        given = list(values)  # the code empties it
        results = code(values)
        _entered.calls.append((code, given, results))
        return results

    return telling


def _repeated(
    calls: list[tuple[Run, list[Any], Sequence[Any]]], tensors: list[Any], result: Any
) -> Run | None:
    """What gives ``result`` again for other tensors of the same facts; None where that is not plain."""
    if len(calls) != 1:
        return None
    code, given, results = calls[0]
    places = {id(tensor): n for n, tensor in enumerate(tensors) if tensor is not None}
    if len(places) < sum(tensor is not None for tensor in tensors):
        return None  # one tensor twice
    moved = [(n, places.get(id(v), -1)) for n, v in enumerate(given) if isinstance(v, torch.Tensor)]
    made = {id(value): n for n, value in enumerate(results)}
    whole = result if isinstance(result, tuple) else (result,)
    picked = [None if value is None else made.get(id(value), -1) for value in whole]
    if any(n < 0 for _, n in moved) or -1 in picked:
        return None
    fixed = [None if isinstance(value, torch.Tensor) else value for value in given]
    alone = None if isinstance(result, tuple) or result is None else picked[0]

    def repeat(args: tuple[Any, ...]) -> Any:
        values = fixed.copy()
        for place, n in moved:
            values[place] = args[n]
        results = code(values)
        if alone is not None:
            return results[alone]
        if result_is_none:
            return None
        return tuple(None if n is None else results[n] for n in picked)

    result_is_none = result is None
    return repeat


def _state() -> tuple[int, bool]:
    """What code is made for beside the facts of a call."""
    return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()


class Compiled:
    """``function`` of tensors and None, compiled at its first call; as it is where that fails."""

    def __init__(self, function: Run, name: str) -> None:
        assert isinstance(function, types.FunctionType)
        # A code object of its own: ops must not share one frame's recompile limit.
        code = function.__code__.replace(co_name=name)
        own = types.FunctionType(code, function.__globals__, name, None, function.__closure__)
        self.function, self.name = function, name
        self.compiled = torch.compile(own, dynamic=True, fullgraph=True, backend=_inductor)
        self.first = threading.Lock()
        self.ready = self.given_up = False

    def bound(self) -> Run:
        """The run of one plan. Its ``trusted`` serves tensors of the same facts as its first call."""
        repeat: Run | None = None
        made_for: Any = None

        def run(*args: Any) -> Any:
            nonlocal repeat, made_for
            result, repeat = self._traced(args)
            made_for = _state()
            return result

        def trusted(*args: Any) -> Any:
            if repeat is None or made_for != _state():
                return run(*args)
            return repeat(args)

        vars(run)["trusted"] = trusted
        return run

    def _traced(self, args: tuple[Any, ...]) -> tuple[Any, Run | None]:
        # Gradients are the boundary's affair: what requires one, or is a Parameter, must neither be
        # recorded here nor split the compiled code by kind of tensor.
        with torch.no_grad():
            plain = [
                a.detach() if isinstance(a, torch.Tensor) and not a.is_inference() else a
                for a in args
            ]
            if self.given_up:
                return self.function(*plain), None
            outer, _entered.calls = _entered.calls, []
            try:
                result = self._compiled(plain)
                return result, _repeated(_entered.calls, plain, result)
            except Exception as error:  # noqa: BLE001  (whatever a disabled or full compiler raises)
                result = self.function(*plain)  # raises where the fault is not the compiler's
                self.given_up = True
                problem = str(error).splitlines()[0] if str(error) else type(error).__name__
                warnings.warn(
                    f"tileops: {self.name} runs uncompiled from now on: {problem}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return result, None
            finally:
                _entered.calls = outer

    def _compiled(self, plain: list[Any]) -> Any:
        if self.ready:
            return self.compiled(*plain)
        with self.first:  # compiled at the first call: by one thread
            result = self.compiled(*plain)
            self.ready = True
            return result
