"""The ``autograd.Function`` of an operator: one node forward, one backward.

The backward node is a call of the backward op (see ``engine/gradient.py``), an op as any other: eager
code reaches its plan directly, tracers and modes see its operator. An op that has none refuses when a
gradient arrives, not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

from tileops.engine.boundary.gate import direct, keys_below_autograd
from tileops.engine.boundary.instances import resolve
from tileops.engine.boundary.refusals import refusing_rules
from tileops.engine.boundary.schema import returned_of
from tileops.engine.manifest.entry import Branch, Entry

__all__ = ["differentiable"]

_EXACT = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def differentiable(
    cls: Any,
    overload: Any,
    branch: Branch,
    body: Callable[..., Any],
    gradient_of: Callable[[Any], Any],
) -> Callable[..., Any]:
    """What the Autograd kernel of an operator calls when an argument requires grad.

    Made at the first such call: only then is the gradient's op needed, and defined. In a process that
    finds compiled code in a cache that is when Dynamo traces the forward, before the code is loaded.
    """
    made: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal made
        if made is None:
            made = _make(cls, overload, branch, body, gradient_of(cls))
        return made(*args)

    return call


def _make(
    cls: Any, overload: Any, branch: Branch, body: Callable[..., Any], gradient: Any
) -> Callable[..., Any]:
    entry: Entry = cls.entry
    forward = _forward(entry, overload, body)
    name = overload.name().removeprefix("tileops::").partition(".")[0]
    carried = [
        output.name
        for index, output in enumerate(entry.outputs)
        if output.name not in branch.without and index not in returned_of(entry, branch)
    ]
    if gradient is None or set(carried) & set(gradient.wiring.outputs):
        setup_context, backward = refusing_rules(cls)
        name += "_declares_no_backward"  # the name is what users see as grad_fn
        copied: list[int] = []
    else:
        setup_context, backward, copied = _rules(entry, branch, gradient, len(overload._schema.arguments))

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward}
    function: Any = type(
        name, (torch.autograd.Function,), {key: staticmethod(rule) for key, rule in rules.items()}
    )
    return _applying(function, copied)


def _applying(function: Any, copied: list[int]) -> Callable[..., Any]:
    # Function.apply hands on to functorch, whose dispatch has been passed by the time an Autograd
    # kernel runs; its base class does one level, which is what is wanted here.
    one_level: Callable[..., Any] = super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if copied:
            args = (*args, *(args[n].clone() for n in copied))
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.utils import enable_single_level_autograd_function

            with enable_single_level_autograd_function():
                return one_level(*args)
        return function.apply(*args)

    return apply


# ---- forward -------------------------------------------------------------------------------------


def _forward(entry: Entry, overload: Any, body: Callable[..., Any]) -> Callable[..., Any]:
    count = len(overload._schema.arguments)
    recomputed = entry.kind != "template"

    def forward(*args: Any) -> Any:
        args = args[:count]
        if direct() and all(type(argument) in _EXACT for argument in args[:-1]):
            return body(*args)
        below = _levels_below() if torch._C._are_functorch_transforms_active() else _NOTHING
        cheap = _recomputed() if recomputed else _NOTHING
        with torch._C._AutoDispatchBelowAutograd(), below, cheap:
            return overload.redispatch(keys_below_autograd(args), *args)

    return forward


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _levels_below() -> Iterator[None]:
    """The levels of functorch below have graphs and tangents of their own, which must go on where
    ``autograd.Function`` has switched both off for this one."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


@contextlib.contextmanager
def _recomputed() -> Iterator[None]:
    """Tell a tracer of training that the node is cheap: its output is computed again in the backward
    pass and not kept. The partitioner would keep what an operator that it does not know gives. A
    checkpoint policy round it has spoken before or speaks after, and wins."""
    meta = fx_traceback.get_current_meta() if fx_traceback.has_preserved_node_meta() else None
    if meta is None or "recompute" in meta:
        yield
        return
    meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        meta.pop("recompute", None)


# ---- backward ------------------------------------------------------------------------------------


def _rules(
    entry: Entry, branch: Branch, gradient: Any, count: int
) -> tuple[Callable[..., Any], Callable[..., Any], list[int]]:
    """``setup_context``, ``backward``, and the arguments of which they get a copy made before the
    call writes them. ``count``: how many arguments the operator has, the last one the key."""
    wiring = gradient.wiring
    inputs = {item.name: n for n, item in enumerate(entry.inputs)}
    returned = [entry.outputs[index].name for index in returned_of(entry, branch)]
    places = [returned.index(name) if name in returned else None for name in wiring.outputs]
    copied = [inputs[name] for name in wiring.saved if name in branch.writes]
    without = [n for n, name in enumerate(returned) if name not in wiring.outputs]
    items = gradient.cls.entry.inputs
    needs_zeros = [n for n, item in enumerate(items[: len(places)]) if not item.optional]
    names = [item.name if item.kw_only else "" for item in items]
    wanted = [inputs[name] for name in wiring.inputs]
    refused = [(n, item.name) for n, item in enumerate(entry.inputs) if n not in wanted]
    alone = len(wanted) == 1

    def saved_of(arguments: Any, results: tuple[Any, ...]) -> Iterator[Any]:
        for name in wiring.saved:
            if name in branch.writes:
                yield arguments[count + copied.index(inputs[name])]
            elif name in inputs:
                yield arguments[inputs[name]]
            else:
                yield results[returned.index(name)] if name in returned else None

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*saved_of(inputs, results))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(results[n] for n in without))
        # Held until the gradient is computed: a key may mean an op that lives only here.
        ctx.state = resolve(gradient.forward, inputs[count - 1])
        ctx.refused = [
            (n, name, inputs[n].shape, inputs[n].dtype)
            for n, name in refused
            if inputs[n] is not None and inputs[n].requires_grad
        ]
        ctx.shapes = [(r.shape, r.dtype, r.device) for r in results] if len(results) > 1 else ()

    def gradients(ctx: Any, grads: tuple[Any, ...]) -> list[Any]:
        given = [None if place is None else grads[place] for place in places]
        for n in needs_zeros:
            place = places[n]
            if given[n] is None and place is not None:
                shape, dtype, device = ctx.shapes[place]
                given[n] = torch.zeros(shape, dtype=dtype, device=device)
        return given

    def backward(ctx: Any, *grads: Any) -> Any:
        found: list[Any] = [None] * (count + len(copied))
        wants = tuple(ctx.needs_input_grad[n] for n in wanted)
        arrived = next((grads[n] for n in places if n is not None and grads[n] is not None), None)
        if arrived is None:
            return tuple(found)
        for n, name, shape, dtype in ctx.refused:
            found[n] = torch.ops.tileops.refuse_backward(
                arrived, shape, dtype, entry.name, name
            )
        if not any(wants):
            return tuple(found)
        tensors = [*gradients(ctx, grads), *ctx.saved_tensors]
        args = [t for t, name in zip(tensors, names, strict=True) if not name]
        more = {name: t for t, name in zip(tensors, names, strict=True) if name}
        results = gradient.op(ctx.state, wants)(*args, **more)
        for n, result in zip(wanted, (results,) if alone else results, strict=True):
            found[n] = result
        return tuple(found)

    return setup_context, backward, copied
