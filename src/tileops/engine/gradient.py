"""The backward op of an op: the class that its entry names, else one derived from its decomposition."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileops.engine import targets
from tileops.engine.boundary.gate import as_at_the_top, direct, within_a_level
from tileops.engine.boundary.instances import OpState
from tileops.engine.errors import ManifestError
from tileops.engine.kernel import KernelInterface
from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.derive import Wiring, dedicated_wiring, derived_backward
from tileops.engine.manifest.entry import Entry

__all__ = ["Gradient", "gradient_of"]


_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Gradient:
    """How an op class is differentiated."""

    forward: Any
    cls: Any
    """The class of its backward op."""
    wiring: Wiring

    context_target = staticmethod(targets.context_target)

    def op(self, state: OpState, wants: tuple[bool, ...]) -> Any:
        """The backward op of an op for the gradients that are wanted."""
        found = state.gradients.get(wants)
        if found is None:
            found = state.gradients[wants] = self._make(state.op, wants)
        return found

    def call(
        self, op: Any, key: str, target: str | None, args: list[Any], named: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The gradients, None for those that ``op`` does not make. ``key``: the forward's; ``target``:
        that of its ``use_target``, which autograd's own threads do not see."""
        alone = target is None or targets.context_target() is not None
        try:
            with _NOTHING if alone else targets.use_target(str(target)):
                results = op(*args, **named)
        except Exception as error:
            error.add_note(f"raised by {op!r}, the gradient of {key}")
            raise
        return results if isinstance(results, tuple) else (results,)

    def _make(self, op: Any, wants: tuple[bool, ...]) -> Any:
        target = op.target
        if target is not None and targets.builder_of(target, self.cls.__name__) is None:
            target = None  # a target need not serve gradients
        own = {name: op._params[name] for name in self.wiring.params}
        wished = dict(zip(self.wiring.wants, wants, strict=True))
        return self.cls(**own, **wished, target=target)


_lock = threading.RLock()


def gradient_of(cls: Any) -> Gradient | None:
    """The gradient of an op class, made at the first call; None where none flows.

    Raises ``ManifestError`` where the entry names a backward op that does not fit.
    """
    if "_gradient" not in cls.__dict__:
        with _lock:
            if "_gradient" not in cls.__dict__:
                cls._gradient = _dedicated(cls) if cls.entry.backward else _derived(cls)
    found: Gradient | None = cls._gradient
    return found


def _dedicated(cls: Any) -> Gradient:
    entry: Entry = cls.entry
    name = str(entry.backward)
    entries = load_family(entry.path)
    if name not in entries:
        raise ManifestError(entry.where, entry.name, f"backward: no entry is named '{name}'")
    wiring = dedicated_wiring(entry, entries[name])
    package = cls.__module__.rpartition(".")[0]
    places = [sys.modules[cls.__module__], *([importlib.import_module(package)] if package else [])]
    for place in places:
        found = getattr(place, name, None)
        if found is not None:
            return Gradient(cls, found, wiring)
    raise ManifestError(
        entry.where, entry.name,
        f"backward: neither {' nor '.join(p.__name__ for p in places)} has a class '{name}'",
    )  # fmt: skip


def _derived(cls: Any) -> Gradient | None:
    from tileops.engine.op import Op

    found = None if cls.decomposition is None else derived_backward(cls.entry)
    if found is None:
        return None
    entry, wiring = found
    pays = cls.kernel.compiled_from if cls.kernel is not None else None
    body = {
        "__module__": cls.__module__,
        "__doc__": f"The gradient of ``{cls.__name__}``: the vector-Jacobian product of its "
        f"decomposition, recomputed from its inputs.",
        "decomposition": staticmethod(_vjp(cls.decomposition, cls.entry, wiring)),
        "kernel": KernelInterface(compiled_from=pays),
    }
    derived = types.new_class(
        entry.name, (Op,), {"entry": entry}, lambda namespace: namespace.update(body)
    )
    return Gradient(cls, derived, wiring)


def _vjp(decomposition: Callable[..., Any], entry: Entry, wiring: Wiring) -> Callable[..., Any]:
    """The decomposition of the derived backward op."""
    count = len(wiring.outputs)
    outputs = [n for n, o in enumerate(entry.outputs) if o.name in wiring.outputs]
    places = [n for n, item in enumerate(entry.inputs) if item.name in wiring.inputs]
    names, wishes = wiring.params, wiring.wants

    def vjp(pull: Callable[..., Any], args: tuple[Any, ...], params: dict[str, Any]) -> Any:
        grads, inputs = args[:count], args[count:]
        own = {name: params[name] for name in names}
        wanted = [
            place
            for place, wish in zip(places, wishes, strict=True)
            if params[wish] and inputs[place] is not None
        ]
        given = [n for n, grad in enumerate(grads) if grad is not None]

        def forward(*leaves: Any) -> Any:
            whole = list(inputs)
            for place, leaf in zip(wanted, leaves, strict=True):
                whole[place] = leaf
            results = decomposition(*whole, **own)
            results = results if isinstance(results, tuple) else (results,)
            return tuple(results[outputs[n]] for n in given)

        primals = tuple(inputs[place] for place in wanted)
        pulled = pull(forward, primals, tuple(grads[n] for n in given))
        found = dict(zip(wanted, pulled, strict=True))
        results = tuple(found.get(place) for place in places)
        return results[0] if len(results) == 1 else results

    def gradient(*args: Any, **params: Any) -> Any:
        if torch.compiler.is_compiling() or not _alone(args):
            return vjp(_pull, args, params)
        # As lib/pulling.py: autograd goes on below its dispatch key, and in inference mode, of whose
        # tensors it saves copies alone.
        with torch.inference_mode(False), torch.enable_grad():
            plain = (t.clone() if t is not None and t.is_inference() else t for t in args)
            return vjp(_pull_alone, tuple(plain), params)

    return gradient


def _alone(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether nothing watches, nor differentiates what is done with ``tensors``."""
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return direct() and not recorded


def _pull_alone(
    forward: Callable[..., Any], primals: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    """``_pull`` where nothing watches: a third of the time of ``torch.func.vjp``."""
    leaves = [primal.detach().requires_grad_() for primal in primals]
    pairs = zip(forward(*leaves), grads, strict=True)
    results = [(result, grad) for result, grad in pairs if result.requires_grad]
    if not results:
        return tuple(map(torch.zeros_like, primals))
    ends, given = zip(*results, strict=True)
    return torch.autograd.grad(ends, leaves, given, allow_unused=True, materialize_grads=True)


def _pull(
    forward: Callable[..., Any], primals: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The gradients of ``primals``, wherever the dispatcher is."""
    if torch.compiler.is_dynamo_compiling() or not within_a_level():
        with _NOTHING if torch.compiler.is_compiling() else as_at_the_top():
            found: tuple[Any, ...] = torch.func.vjp(forward, *primals)[1](grads)
            return found
    # Forward over reverse. Leaves of their own are made without grad, which tangents pass.
    from torch._functorch.eager_transforms import enable_inplace_requires_grad

    with torch.no_grad(), enable_inplace_requires_grad(True):
        leaves = [primal.view_as(primal).requires_grad_() for primal in primals]
    with torch.enable_grad():
        results = forward(*leaves)
    # With a graph: some of ATen's backward functions have derivatives only then.
    found = torch.autograd.grad(
        results, leaves, grads, create_graph=True, allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():  # detach() would drop the tangents too
        return tuple(gradient.view_as(gradient) for gradient in found)
