"""Listen while compiled code runs, then say what happened."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tileops.explain import torch_private as private
from tileops.explain.collect.assemble import assemble
from tileops.explain.collect.events import Event, Events
from tileops.explain.collect.measure import CALL, attach, kernels_marked
from tileops.explain.model import Call, Report

__all__ = ["explain", "explain_into", "explaining"]

_REPEATS = 3
"""Of a measured call: times are medians."""


@contextlib.contextmanager
def explaining(title: str = "", *, measure: bool = False) -> Iterator[Report]:
    """Explain what the block compiles and runs, by its own calls of compiled code.

    The report is filled when the block ends, also by an exception. Caches are the user's own, so
    what was compiled before the block shows only where it is compiled again. ``measure=True`` runs
    the block under torch's profiler and reports the median call that compiled nothing.
    """
    report = Report(title=title)
    profile = None
    try:
        with _explaining(report, None, 0), private.profiled() if measure else _nothing() as profile:
            yield report
    finally:
        if profile is not None:
            attach(report, profile)


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield None


@contextlib.contextmanager
def _explaining(report: Report, cuda_graphs: bool | None, versions: int) -> Iterator[list[Event]]:
    events = Events()
    report.torch = torch.__version__
    report.device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    raised = True
    try:
        with events.listening():
            yield events.seen
        raised = False
    finally:
        assemble(report, events, cuda_graphs=cuda_graphs, versions=versions, raised=raised)


def explain(
    target: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str | Callable[..., Any] = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    training: bool | None = None,
    fullgraph: bool = False,
    then: Sequence[tuple[Any, ...]] = (),
    measure: bool = False,
) -> Report:
    """Compile a function or module, call it once with ``args``, and say what torch did. Of what
    ``torch.compile`` made, the function or module under it is taken.

    ``training=True`` also runs backward (``.grad`` stays as it is); ``False`` calls without
    gradients; ``None`` takes the grad mode as it is. Compiled versions, disk caches and what torch
    learnt about sizes are private to the call and dropped, so every stage is shown cold. The
    result is :attr:`Report.result`. ``then``: arguments of further calls, which may recompile.

    ``measure=True`` calls it some times more, warm and with copies of its tensors, for the time of
    kernels, gaps and synchronisations; what else it writes, it writes again.
    """
    report = Report()
    explain_into(
        report, target, args, kwargs or {}, backend=backend, dynamic=dynamic, mode=mode,
        training=training, fullgraph=fullgraph, then=then, measure=measure,
    )  # fmt: skip
    return report


def explain_into(
    report: Report,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backend: str | Callable[..., Any],
    dynamic: bool | None,
    mode: str | None,
    training: bool | None,
    fullgraph: bool = False,
    then: Sequence[tuple[Any, ...]] = (),
    measure: bool = False,
) -> None:
    """:func:`explain` into a report that holds what was seen also where the call raises."""
    if isinstance(target, type) or not callable(target):  # torch would patch the class for good
        kind = "the class" if isinstance(target, type) else "an object of type"
        named = getattr(target, "__qualname__", type(target).__qualname__)
        raise TypeError(
            f"explain: target is {kind} {named}; accepted is a function, a module or another callable "
            "object"
        )
    for each in then:
        if not isinstance(each, tuple | list):
            kind = type(each).__qualname__
            raise TypeError(
                f"explain: then holds {kind}; accepted is a tuple of arguments for each call"
            )
    target = private.plain_of(target)
    name = getattr(target, "__qualname__", None) or type(target).__name__
    report.title = name
    chosen = {
        "backend": backend,
        "dynamic": dynamic,
        "mode": mode,
        "training": training,
        "fullgraph": fullgraph,
    }
    report.settings = {key: _plain(value) for key, value in chosen.items()}
    graphs = mode in ("reduce-overhead", "max-autotune") or backend == "cudagraphs"
    tensors = _tensors(target, args, kwargs)
    cpu = backend in ("inductor", "tileops") and any(each.device.type == "cpu" for each in tensors)

    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() if training is None else training):
            start = private.differentiated_so_far() if training else 0
            result = compiled(*args, **kwargs)
            if training:
                _backward(result, start)
        return result

    with private.untouched(cpu=cpu):
        compiled = torch.compile(
            _own_code(target), backend=backend, dynamic=dynamic, mode=mode, fullgraph=fullgraph
        )
        calls = []
        with _explaining(report, graphs, _versions(target)) as seen:
            for given in (args, *then):
                started, before = time.perf_counter(), len(seen)
                result = call(given, kwargs)
                calls.append(
                    (time.perf_counter() - started, {each.place for each in seen[before:]})
                )
                report.result = result if given is args else report.result
        report.calls = [
            Call(name, seconds, [one.id for one in report.compilations if one.id in places])
            for seconds, places in calls
        ]
        if measure:
            _measure(report, lambda: call(*_copies((args, dict(kwargs)))))


def _measure(report: Report, call: Callable[[], Any]) -> None:
    """A call to warm up, some for the whole, and some for C++ kernels, whose marks cost time."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        call()
        with private.profiled() as plain:
            for _ in range(_REPEATS):
                with private.span(CALL):
                    call()
                if devices:
                    torch.cuda.synchronize()
        with kernels_marked(report), private.profiled() as marked:
            for _ in range(_REPEATS):
                call()
    attach(report, plain, marked)


def _copies(given: Any) -> Any:
    """The same with tensors of their own, which torch's guards cannot tell from the given ones."""

    def copied(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor:
            return leaf
        made = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        vars(made).update(vars(leaf))
        return made

    return torch.utils._pytree.tree_map(copied, given)


def _plain(value: Any) -> Any:
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known else getattr(value, "__name__", type(value).__name__)


def _own_code(target: Any) -> Any:
    """A function with a code object of its own, to which torch attaches what it compiles."""
    if not isinstance(target, types.FunctionType):
        return target
    own = types.FunctionType(
        target.__code__.replace(), target.__globals__, target.__name__, target.__defaults__,
        target.__closure__,
    )  # fmt: skip
    own.__kwdefaults__, own.__qualname__ = target.__kwdefaults__, target.__qualname__
    own.__dict__.update(target.__dict__)
    return own


def _versions(target: Any) -> int:
    """Compiled before, of code that is not the call's own: a function's is."""
    if isinstance(target, types.FunctionType):
        return 0
    called = target.forward if isinstance(target, torch.nn.Module) else target
    called = called if hasattr(called, "__code__") else type(called).__call__
    code = getattr(called, "__code__", None)
    return 0 if code is None else private.compiled_times(code)


def _tensors(*given: Any) -> list[torch.Tensor]:
    found = []
    for leaf in torch.utils._pytree.tree_leaves(given):
        if isinstance(leaf, torch.nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def _backward(result: Any, start: int) -> None:
    """Through what the call added to autograd's graph and no further: ``.grad`` of nothing changes, and
    the graphs that the arguments, or tensors of a closure, have of their own stay whole."""
    outputs = [each for each in _tensors(result) if private.differentiated(each.grad_fn) > start]
    waiting = [each.grad_fn for each in outputs]
    seen, ends = set(), {}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, number in node.next_functions:
            if following is None:
                continue
            if following.next_functions and private.differentiated(following) > start:
                waiting.append(following)
            else:
                ends[following, number] = torch.autograd.graph.GradientEdge(following, number)
    if ends:
        ones = [torch.ones_like(each) for each in outputs]
        torch.autograd.grad(outputs, [*ends.values()], ones, allow_unused=True)
