"""A function compiled by Inductor, whose code a repeated call enters without Dynamo and AOTAutograd.

The way through both costs 20 to 60 µs a call. All it does for a call of known facts is to find the
code that was made for them and to give it the tensors and their sizes in its own order. So the first
call of a plan goes that way, and what then reached Inductor's code is repeated.
"""

from __future__ import annotations

import itertools
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tileops.engine.signature.source import compile_source

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
    calls: list[tuple[Run, list[Any], Sequence[Any]]], tensors: list[Any], result: Any, other: Run
) -> Run | None:
    """What gives ``result`` again for other tensors of the same facts, or else asks ``other``; None where
    that is not plain."""
    if len(calls) != 1:
        return None
    code, given, results = calls[0]
    places = {id(tensor): n for n, tensor in enumerate(tensors) if tensor is not None}
    if len(places) < sum(tensor is not None for tensor in tensors):
        return None  # one tensor twice
    fixed = [value for value in given if not isinstance(value, torch.Tensor)]
    taken = [places.get(id(v)) if isinstance(v, torch.Tensor) else -1 for v in given]
    made = {id(value): f"r[{n}]" for n, value in enumerate(results)}
    whole = result if isinstance(result, tuple) else (result,)
    picked = ["None" if value is None else made.get(id(value)) for value in whole]
    if None in taken or None in picked:
        return None
    values = f"({', '.join(map(str, picked))},)" if isinstance(result, tuple) else str(picked[0])
    enter: Run = _entering(len(tensors), tuple(taken), values)(code, other, *_state(), *fixed)
    return enter


@cache
def _entering(count: int, taken: tuple[int | None, ...], values: str) -> Run:
    """Makes a function of ``count`` arguments that enters code, argument ``taken[n]`` as its ``n``-th, or
    what is fixed where that is -1; it gives ``values`` of the results ``r``."""
    given = ", ".join(f"a{n}" for n in range(count))
    fixed = "".join(f", f{at}" for at, n in enumerate(taken) if n == -1)
    passed = ", ".join(f"f{at}" if n == -1 else f"a{n}" for at, n in enumerate(taken))
    source = (
        f"def make(code, other, threads, deterministic{fixed}):\n"
        f"    def enter({given}):\n"
        f"        if _threads() != threads or _deterministic() is not deterministic:\n"
        f"            return other({given})\n"
        f"        r = code([{passed}])\n"
        f"        return {values}\n"
        f"    return enter\n"
    )
    file = f"tileops_generated/nodes/entering_{next(_numbers)}.py"
    make: Run = compile_source(source, file, _ASKED)["make"]
    return make


_ASKED = {
    "_threads": torch.get_num_threads,
    "_deterministic": torch.are_deterministic_algorithms_enabled,
}
"""What code is made for beside the facts of a call."""
_numbers = itertools.count()


def _state() -> tuple[Any, ...]:
    return tuple(ask() for ask in _ASKED.values())


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
        latest: Run | None = None
        made_for: Any = None

        def run(*args: Any) -> Any:
            nonlocal latest, made_for
            result, latest = self._traced(args, changed)
            made_for = _state()
            vars(run)["trusted"] = latest or changed
            return result

        def changed(*args: Any) -> Any:
            if latest is None or made_for != _state():
                return run(*args)
            return latest(*args)

        return run

    def _traced(self, args: tuple[Any, ...], changed: Run) -> tuple[Any, Run | None]:
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
                return result, _repeated(_entered.calls, plain, result, changed)
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
