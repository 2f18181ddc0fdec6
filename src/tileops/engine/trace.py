"""Preparing every op that a function calls, found by calling it once without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tileops.engine.asked import Dataless, noting
from tileops.engine.boundary.instances import OpState, resolve
from tileops.engine.errors import TileopsError
from tileops.engine.kernel import TensorSpec
from tileops.engine.op import Op
from tileops.engine.places import place_of
from tileops.engine.prepare import Prepared, Request, compile_requests, request_for

__all__ = ["owner_of", "prepare", "spec"]


def spec(*shape: int, dtype: torch.dtype = torch.float32, aligned: bool = True) -> TensorSpec:
    """A contiguous tensor without data, for ``prepare``: ``spec(2048, 4096, dtype=torch.float16)``.

    ``aligned``: it begins at a multiple of 16 bytes. Raises ``TypeError`` and ``ValueError``.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"spec: dtype={dtype!r}; accepted is a torch.dtype")
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"spec: size {size!r}; accepted are integers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(
            f"spec: shape {shape}; accepted are sizes from 0, of less than 2**63 bytes"
        )
    made = TensorSpec.contiguous_of(tuple(shape), dtype, torch.device("meta"))
    return TensorSpec(made.shape, made.dtype, made.device, made.strides, aligned)


def prepare(
    function: Callable[..., Any],
    *args: Any,
    device: str | torch.device | None = None,
    jobs: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Prepared:
    """Build every kernel that ``function(*args, **kwargs)`` would use, without calling it for real.

    ``function``: a function, a module or an op. It is called once with tensors that have no data:
    tensors and ``TensorSpec`` among the arguments count by shape and dtype, and so do a module's
    parameters and buffers. What branches on what a tensor holds cannot be followed, and raises.

    ``device``: as in ``Op.prepare``. ``jobs``: processes that compile (``TILEOPS_JOBS``).
    ``progress``: say on standard error how far it is. Raises what ``function`` raises, and
    ``KernelBuildError``.
    """
    place = place_of(device)
    seen: dict[Any, Request] = {}
    with torch.no_grad(), _Calls() as calls:
        try:
            # What it makes on a device that is not here has no data either.
            with Dataless(), noting(lambda state: calls.found.append((state, (), None))):
                _call(function, args, kwargs)
        except RuntimeError as error:
            error.add_note("tileops.prepare calls with tensors that have no data: what branches on "
                           "what they hold cannot be followed; prepare its parts")  # fmt: skip
            raise
    for state, inputs, out in calls.found:
        facts = tuple(None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in inputs)
        key = (type(state.op), state.key, facts, out is not None)
        if key not in seen:
            seen[key] = request_for(state, (), _named(state.op, inputs), out, place)
    return compile_requests(list(seen.values()), place, jobs, progress)


def _named(op: Op, inputs: tuple[Any, ...]) -> dict[str, Any]:
    return {item.name: t for item, t in zip(op.entry.inputs, inputs, strict=True) if t is not None}


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    def empty(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return value

    args, kwargs = tree_map(empty, args), tree_map(empty, kwargs)
    with torch.compiler.set_stance("force_eager"):
        if isinstance(function, torch.nn.Module):
            weights = {name: empty(t) for name, t in _weights(function)}
            torch.func.functional_call(function, weights, args, kwargs)
        else:
            function(*args, **kwargs)


def _weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class _Calls(TorchDispatchMode):
    """Notes the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[OpState, tuple[Any, ...], Any]] = []
        self._classes: dict[Any, type[Op]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "tileops":
            given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            given.update(kwargs or {})
            cls = self._classes.get(func) or self._classes.setdefault(func, owner_of(func))
            state = resolve(cls, given["instance_key"])
            entry = state.op.entry
            inputs = tuple(given.get(item.name) for item in entry.inputs)
            self.found.append((state, inputs, given.get("out") if entry.has_out else None))
            # What must be on the host is checked to be there.
            host = {item.name for item in entry.inputs if item.host}
            args = tuple(
                torch.empty_like(value, device="cpu")
                if a.name in host and value is not None
                else value
                for a, value in zip(func._schema.arguments, args, strict=False)
            )
        return func(*args, **(kwargs or {}))


def owner_of(operator: Any) -> type[Op]:
    """The class that an operator belongs to. Raises ``TileopsError``."""
    waiting: list[type[Op]] = [Op]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        operators = cls._boundary.operators if "_boundary" in cls.__dict__ else ()
        if any(one.overload is operator for one in operators):
            return cls
    raise TileopsError(f"operator {operator} belongs to no op class of this process")
