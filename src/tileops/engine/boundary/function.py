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
from torch.utils.checkpoint import CheckpointPolicy

from tileops.engine.boundary.gate import direct, keys_below_autograd, living, node_meta
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
    name = overload.name().removeprefix("tileops::").partition(".")[0]
    carried = [
        output.name
        for index, output in enumerate(entry.outputs)
        if output.name not in branch.without and index not in returned_of(entry, branch)
    ]
    count = len(overload._schema.arguments)
    if gradient is None or set(carried) & set(gradient.wiring.outputs):
        gradient, copied = None, []
        setup_context, backward = refusing_rules(cls)
        name += "_declares_no_backward"  # the name is what users see as grad_fn
    else:
        found = _Rules(entry, branch, gradient, count)
        copied = found.copied

        # Dynamo, which traces the backward under compiled autograd, takes no bound method here.
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            found.setup_context(ctx, inputs, output)

        def backward(ctx: Any, *grads: Any) -> Any:
            return found.backward(ctx, *grads)

    forward = _forward(overload, body, count, _policy(entry, overload, branch, gradient))

    rules = {"forward": forward, "setup_context": setup_context, "backward": backward}
    return _applying(name, {key: staticmethod(rule) for key, rule in rules.items()}, copied)


def _applying(name: str, rules: dict[str, Any], copied: list[int]) -> Callable[..., Any]:
    function: Any = type(name, (torch.autograd.Function,), dict(rules))
    # Its own apply first binds the arguments to forward's signature by `inspect` (25 µs a call), though
    # they are given one by one, and hands on to functorch, whose dispatch has been passed by the time an
    # Autograd kernel runs. Its base class does one level, which is what is wanted here.
    apply_once = super(torch.autograd.Function, function).apply
    one_level: Any = type(name, (torch.autograd.function._SingleLevelFunction,), dict(rules))

    def apply(*args: Any) -> Any:
        if copied:
            # Copied again in the backward pass they would be copies of what was written.
            with _tagged(CheckpointPolicy.MUST_SAVE):
                args = (*args, *(args[n].clone() for n in copied))
        if torch._C._are_functorch_transforms_active():
            from torch._functorch.utils import enable_single_level_autograd_function

            with enable_single_level_autograd_function():
                return one_level.apply(*args)
        return apply_once(*[living(a) if isinstance(a, torch.Tensor) else a for a in args])

    return apply


# ---- forward -------------------------------------------------------------------------------------


def _policy(entry: Entry, overload: Any, branch: Branch, gradient: Any) -> CheckpointPolicy | None:
    """What a tracer of training is told: the output of a cheap op is computed again in the backward
    pass. Of an operator that it does not know it would keep it."""
    if entry.kind == "template" or branch.writes or gradient is None:
        return None
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return None  # computed again it would be another
    if set(gradient.wiring.saved) & {output.name for output in entry.outputs}:
        return None  # the output is what the backward op needs
    return CheckpointPolicy.PREFER_RECOMPUTE


def _forward(
    overload: Any, body: Callable[..., Any], count: int, policy: CheckpointPolicy | None
) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        args = args[:count]
        if direct() and all(type(argument) in _EXACT for argument in args[:-1]):
            return body(*args)
        with torch._C._AutoDispatchBelowAutograd(), _levels_below(), _tagged(policy):
            return overload.redispatch(keys_below_autograd(args), *args)

    return forward


@contextlib.contextmanager
def _levels_below() -> Iterator[None]:
    """The levels of functorch below have graphs and tangents of their own, which must go on where
    ``autograd.Function`` has switched both off for this one."""
    if not torch._C._are_functorch_transforms_active():
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


@contextlib.contextmanager
def _tagged(policy: CheckpointPolicy | None) -> Iterator[None]:
    """Mark the nodes that a tracer makes meanwhile for the partitioner of forward and backward. A
    checkpoint policy of the caller has spoken before, or speaks after, and wins."""
    meta = None if policy is None else node_meta()
    if meta is None or "recompute" in meta:
        yield
        return
    meta["recompute"] = policy
    try:
        yield
    finally:
        meta.pop("recompute", None)


# ---- backward ------------------------------------------------------------------------------------


class _Rules:
    """``setup_context`` and ``backward`` where there is a backward op."""

    def __init__(self, entry: Entry, branch: Branch, gradient: Any, count: int) -> None:
        """``count``: how many arguments the operator has, the last one the key."""
        wiring = gradient.wiring
        inputs = {item.name: n for n, item in enumerate(entry.inputs)}
        returned = [entry.outputs[index].name for index in returned_of(entry, branch)]
        items = gradient.cls.entry.inputs
        self.entry, self.gradient, self.count = entry, gradient, count
        self.copied = [inputs[name] for name in wiring.saved if name in branch.writes]
        """Arguments of which the rules get a copy, made before the call writes them."""
        self.places = [returned.index(n) if n in returned else None for n in wiring.outputs]
        self.without = [n for n, name in enumerate(returned) if name not in wiring.outputs]
        self.needs_zeros = [not item.optional for item in items[: len(self.places)]]
        self.names = [item.name if item.kw_only else "" for item in items]
        self.wanted = [inputs[name] for name in wiring.inputs]
        self.results = wiring.results
        self.refused = [(n, name) for name, n in inputs.items() if n not in self.wanted]
        self.saved = [self._source(name, branch, inputs, returned) for name in wiring.saved]

    def _source(
        self, name: str, branch: Branch, inputs: dict[str, int], returned: list[str]
    ) -> int | None:
        """Where a saved tensor stands among the arguments, the copies and the results."""
        if name in branch.writes:
            return self.count + self.copied.index(inputs[name])
        if name in inputs:
            return inputs[name]
        at = self.count + len(self.copied)
        return at + returned.index(name) if name in returned else None

    def setup_context(self, ctx: Any, inputs: Any, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        tensors = (*inputs, *results)
        ctx.save_for_backward(*(None if n is None else tensors[n] for n in self.saved))
        ctx.set_materialize_grads(False)
        ctx.in_a_level = torch._C._are_functorch_transforms_active()
        if self.without:
            ctx.mark_non_differentiable(*(results[n] for n in self.without))
        # Held until the gradient is computed: a key may mean an op that lives only here.
        ctx.state = resolve(self.gradient.forward, inputs[self.count - 1])
        # Here, because compiled autograd traces the backward, and could not make an op there.
        needed = ctx.needs_input_grad
        wants = tuple(needed[n] for n in self.wanted)
        ctx.op = self.gradient.op(ctx.state, wants) if any(wants) else None
        ctx.target = self.gradient.context_target()
        ctx.refused = [
            (n, name, inputs[n].shape, inputs[n].dtype)
            for n, name in self.refused
            if inputs[n] is not None and inputs[n].requires_grad
        ]
        ctx.shapes = [(r.shape, r.dtype, r.device) for r in results] if len(results) > 1 else ()

    def backward(self, ctx: Any, *grads: Any) -> Any:
        found: list[Any] = [None] * (self.count + len(self.copied))
        given = [None if n is None else grads[n] for n in self.places]
        arrived = next((grad for grad in given if grad is not None), None)
        if arrived is None:
            return tuple(found)
        for n, name, shape, dtype in ctx.refused:
            found[n] = torch.ops.tileops.refuse_backward(
                arrived, shape, dtype, self.entry.name, name
            )
        if ctx.op is not None:
            tensors = [*self._filled(ctx, given), *ctx.saved_tensors]
            if ctx.in_a_level:
                tensors = [None if t is None else living(t) for t in tensors]
            args = [t for t, name in zip(tensors, self.names, strict=True) if not name]
            named = {name: t for t, name in zip(tensors, self.names, strict=True) if name}
            results = self.gradient.call(ctx.op, ctx.state.key, ctx.target, args, named)
            for n, place in zip(self.wanted, self.results, strict=True):
                found[n] = results[place] if ctx.needs_input_grad[n] else None
        return tuple(found)

    def _filled(self, ctx: Any, given: list[Any]) -> list[Any]:
        """The gradients, zeros for one that did not arrive and that the backward op must have."""
        filled = list(given)
        like = next(grad for grad in given if grad is not None)  # a DTensor's zeros are one too
        for n, (place, needed) in enumerate(zip(self.places, self.needs_zeros, strict=True)):
            if needed and filled[n] is None and place is not None:
                shape, dtype, device = ctx.shapes[place]
                filled[n] = like.new_zeros(shape, dtype=dtype, device=device)
        return filled
