"""The kernels that every op with a decomposition has: that function itself, on any device, and
compiled by Inductor on the CPU.

A decomposition is pure: ``decomposition(<inputs>, **params)`` returns the declared outputs (None for
one that does not exist), then the new value of each written input that is not itself an output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from types import NoneType
from typing import Any

import torch

from tileops.engine.compiled import Compiled
from tileops.engine.kernel import CallSpec, Entry, Kernel
from tileops.engine.one_call import noted
from tileops.engine.signature.source import compile_source

__all__ = ["decomposition_kernels"]

_numbers = itertools.count()


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


def _with_constants(
    function: Callable[..., Any], names: list[str], params: dict[str, Any]
) -> Callable[..., Any]:
    """``function`` of the inputs alone. Numbers are constants of its code: those that Dynamo reads from
    elsewhere it makes symbols, or tensors, which the compiled loop then loads at every step."""
    given, others = list(names), {}
    for name, value in params.items():
        finite = not any(isinstance(v, float) and not isfinite(v) for v in _leaves(value))
        if finite and all(type(v) in (bool, int, float, str, NoneType) for v in _leaves(value)):
            given.append(f"{name}={value!r}")
        else:
            others[name] = value
            given.append(f"{name}={name}")
    source = f"def meaning({', '.join(names)}):\n    return function({', '.join(given)})\n"
    file = f"tileops_generated/nodes/{function.__name__}_{next(_numbers)}.py"
    meaning: Callable[..., Any] = compile_source(source, file, {"function": function, **others})[
        "meaning"
    ]
    return meaning


def _leaves(value: Any) -> tuple[Any, ...]:
    if type(value) is tuple:
        return tuple(leaf for item in value for leaf in _leaves(item))
    return (value,)


def _node(
    function: Callable[..., Any], call: CallSpec, has_out: bool, is_input: str
) -> Callable[..., Any]:
    """A ``Run`` from a pure function, but for whose memory the results are: new values are copied into
    what is written."""
    names = list(call.inputs)
    written = [names.index(name) for name in names if name in call.written and name != is_input]
    carried = names.index(is_input) if is_input in call.written else None
    count = len(call.outputs)
    out_given = has_out and "out" in call.written
    meaning = _with_constants(function, names, vars(call.params))

    def node(*args: Any) -> Any:
        result = meaning(*args[: len(names)])
        results = result if isinstance(result, tuple) else (result,)
        for position, value in zip(written, results[count:], strict=True):
            args[position].copy_(value)
        if carried is not None:
            args[carried].copy_(results[0])
            return None
        if out_given:
            args[-1].copy_(results[0])
            return None
        return results[0] if count == 1 else (tuple(results[:count]) or None)

    return node


def _plain(
    function: Callable[..., Any], call: CallSpec, has_out: bool, is_input: str
) -> Callable[..., Any]:
    """``_node``; the function itself where it is one, which takes half the time."""
    if call.written or has_out:
        return _node(function, call, has_out, is_input)
    params = vars(call.params)
    return partial(function, **params) if params else function


def _owning(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """``run`` with own results. Whether they are its own already follows from the facts of a call, so
    that of the first call holds for the plan: see ``Plan.trusted``."""

    def owning(*args: Any) -> Any:
        result = run(*args)
        if result is None:
            given: tuple[Any, ...] = ()
        else:
            given = result if isinstance(result, tuple) else (result,)
        kept = tuple(None if value is None else _fresh(value, args) for value in given)
        plain = type(result) is tuple if count > 1 else not isinstance(result, tuple)
        if plain and all(
            mine is value and not (mine is not None and mine.is_inference())  # has no views
            for mine, value in zip(kept, given, strict=True)
        ):
            vars(owning)["trusted"] = getattr(run, "trusted", run)
        if result is None:
            return None
        return kept[0] if count == 1 else kept

    return owning


@cache
def decomposition_kernels(
    function: Callable[..., Any],
    compiled_from: int | None,
    has_out: bool,
    is_input: str,
    unless: Callable[[CallSpec], str | None] | None = None,
) -> tuple[type[Kernel], type[Kernel]]:
    """(plain, Inductor) for one op class; ``unless`` is ``KernelInterface.compiled_unless``."""

    class Decomposition(Kernel):
        """The decomposition through ATen: any device, any call."""

        name = "decomposition"
        devices = ("*",)
        general = True
        last_resort = True

        @classmethod
        def entry_for(cls, call: CallSpec) -> Entry:
            identity = ("decomposition", function, call.key, call.device.type)

            def bind(_: Any, call: CallSpec) -> Any:
                run = _plain(function, call, has_out, is_input)
                return _owning(run if call.written else noted(run), len(call.outputs))

            return Entry(identity, lambda: function, bind)

    class Inductor(Kernel):
        """The decomposition as one C++ kernel."""

        name = "inductor"
        devices = ("cpu",)

        @classmethod
        def refuses(cls, call: CallSpec) -> str | None:
            if compiled_from is None:
                return "the decomposition is one ATen kernel already"
            specs = (*call.inputs.values(), *call.outputs.values())
            largest = max((spec.numel for spec in specs if spec is not None), default=0)
            if largest < compiled_from:
                return f"compiling pays from {compiled_from} elements on, here {largest}"
            return unless(call) if unless is not None else None

        @classmethod
        def entry_for(cls, call: CallSpec) -> Entry:
            # Sizes are symbols in the compiled code, but for 1, which Dynamo takes as a fact.
            specs = tuple(
                None if s is None else (s.dtype, *(size == 1 for size in s.shape))
                for s in call.inputs.values()
            )
            identity = ("inductor", function, call.key, specs, tuple(sorted(call.written)))

            def build() -> Compiled:
                return Compiled(_node(function, call, has_out, is_input), function.__qualname__)

            return Entry(identity, build, lambda made, c: _owning(made.bound(), len(c.outputs)))

    return Decomposition, Inductor
