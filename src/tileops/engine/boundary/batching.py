"""``vmap`` of an operator: one call where the named dims show how, else one call for each slice.

The batch joins the dims that lead every shape: ``*B`` in ``[*B, N]``, or all of ``[*A]`` and ``[*B]``
where the outputs are ``[*bcast(A, B)]``. In front of them it changes nothing if nothing else in the
entry looks at these dims, and if a reduction has others to reduce over.

Else it is folded into a dim along which the call could be cut into independent parts, as ``sharding``
tells: the slices are such parts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tileops.engine import record
from tileops.engine.boundary.dtensor import likely
from tileops.engine.boundary.instances import resolve
from tileops.engine.boundary.schema import returned_of
from tileops.engine.errors import TransformError
from tileops.engine.manifest.entry import Branch, Entry
from tileops.engine.manifest.expr import is_call_of
from tileops.engine.signature.sharding import SUM, Way, ways

__all__ = ["Leading", "give_batching", "leading", "takes_a_batch"]


@dataclass(frozen=True)
class Leading:
    """The splices that lead the shapes of a branch, and the one of each input that has one."""

    names: tuple[str, ...]
    of_input: dict[str, str]
    trailing: dict[str, int]
    """How many dims follow it in an input."""

    @property
    def broadcast(self) -> bool:
        """Inputs of fewer dims are padded by torch's broadcasting."""
        return len(self.names) > 1


def leading(entry: Entry, branch: Branch) -> Leading | None:
    """What leads every output of ``branch`` and every input that has it at all; None where a shape
    is built otherwise."""
    found = {_first(entry.outputs[i].shape.tree) for i in returned_of(entry, branch)}
    if len(found) != 1:
        return None
    names = found.pop()
    if not names or set(names) & (entry.shape_params | set(entry.dims)):
        return None
    for index in returned_of(entry, branch):
        if _rest(entry.outputs[index].shape.tree) & set(names):
            return None
    of_input, trailing = {}, {}
    for item in entry.inputs:
        tree = item.shape.tree
        first = _first(tree)
        if item.shape.names & set(names):
            if len(first) != 1 or first[0] not in names or _rest(tree) & set(names):
                return None
            rest = tree.elts[1:]  # type: ignore[attr-defined]
            if len(names) > 1 and any(isinstance(element, ast.Starred) for element in rest):
                return None
            of_input[item.name], trailing[item.name] = first[0], len(rest)
    return Leading(names, of_input, trailing)


def _first(tree: ast.expr) -> tuple[str, ...]:
    """The splices that a list of dims begins with: ``*A``, or ``*bcast(A, B)``."""
    if not isinstance(tree, ast.Tuple | ast.List) or not tree.elts:
        return ()
    element = tree.elts[0]
    if not isinstance(element, ast.Starred):
        return ()
    value = element.value
    parts = [value]
    if isinstance(value, ast.Call):
        parts = value.args if is_call_of(value, "bcast") else []
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return tuple(names) if len(names) == len(parts) else ()


def _rest(tree: ast.expr) -> set[str]:
    elements = tree.elts[1:]  # type: ignore[attr-defined]
    return {n.id for e in elements for n in ast.walk(e) if isinstance(n, ast.Name)}


def takes_a_batch(entry: Entry) -> bool:
    """Whether what leads the shapes is free: see the module."""
    free = next(filter(None, (leading(entry, branch) for branch in entry.branches)), None)
    if free is None:
        return False
    looked_at = [rule.require for rule in entry.rules]
    looked_at += [*entry.dims.values(), *(o.dtype for o in entry.outputs)]
    looked_at += [item.dtype for item in entry.inputs if item.dtype is not None]
    if any(expr.names & set(free.names) for expr in looked_at):
        return False
    for rule in entry.sharding:
        if set(rule.names) & set(free.names) and (rule.at or rule.word.text != "shard"):
            return False
    return entry.kind == "pointwise" or any(free.trailing.values())


def give_batching(cls: Any, branch: Branch, overload: Any, library: Any, name: str) -> None:
    """Register what ``vmap`` does with the operator of ``branch``."""
    written = [*branch.writes, *(["out"] if branch.out else [])]
    rule = _refusal(cls, overload, written[0]) if written else _rule(cls, branch, overload)
    torch.library.register_vmap(f"tileops::{name}", rule, lib=library)


def _refusal(cls: Any, overload: Any, written: str) -> Callable[..., Any]:
    def refuse(info: Any, in_dims: Any, *args: Any) -> Any:
        raise TransformError(
            cls.__name__,
            f"vmap over a call that writes '{written}' ({overload.name()})",
            "call it outside of vmap, once for each slice",
        )

    return refuse


def _rule(cls: Any, branch: Branch, overload: Any) -> Callable[..., Any]:
    entry: Entry = cls.entry
    names = [item.name for item in entry.inputs]
    lead = leading(entry, branch)
    returned = [entry.outputs[index].name for index in returned_of(entry, branch)]
    count = len(returned)

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        op = resolve(cls, args[-1]).op
        if op.draws and info.randomness != "different":
            raise TransformError(
                cls.__name__,
                f"vmap with randomness={info.randomness!r} over a call that draws random numbers",
                "give the op a seed, which means the same numbers for each slice, or vmap "
                "randomness='different'",
            )
        tensors = {}
        for name, tensor, dim in zip(names, args[:-1], in_dims, strict=False):
            tensors[name] = tensor if dim is None else tensor.movedim(dim, 0)
        batched = {n for n, dim in zip(names, in_dims, strict=False) if dim is not None}
        served = None
        if lead is not None and batched <= set(lead.of_input):
            ranks = tuple(
                (name, tensor.ndim - (name in batched))
                for name, tensor in tensors.items()
                if tensor is not None
            )
            served = _served(cls, args[-1], ranks)
        size, dims = info.batch_size, (0,) * count
        way = None
        if served is None and not cls.random:
            way = _way(cls, branch, args[-1], _facts(tensors, batched))
        if record.listening():
            calls = size if served is None and way is None else 1
            record.emit("vmap", op=cls.__name__, key=args[-1], batch=size, calls=calls)
        if served is not None:
            assert lead is not None
            given = _joined(entry, lead, tensors, batched, size)
            result = overload(*given, served._instance_key)
        elif way is not None:
            given = _folded(entry, way, tensors, batched, size)
            dims = tuple(int(way.outputs[name]) for name in returned)
            result = _unfolded(overload(*given, args[-1]), dims, size)
        else:
            result = _by_slice(cls, overload, tensors, batched, args[-1], size)
        return result, dims[0] if count == 1 else dims

    return rule


@lru_cache(maxsize=256)
def _served(cls: Any, key: str, ranks: tuple[tuple[str, int], ...]) -> Any:
    """The op that takes the batch, kept: its plans live as long as it does."""
    return resolve(cls, key).op.batched(dict(ranks))


def _joined(
    entry: Entry, lead: Leading, tensors: dict[str, Any], batched: set[str], size: Any
) -> list[Any]:
    """The tensors of one call, with the batch in front of what leads."""
    shared = [lead.of_input[name] for name in batched]
    most = max(
        tensor.ndim - (name in batched) - lead.trailing[name]
        for name, tensor in tensors.items()
        if name in lead.of_input and tensor is not None
    )
    given = []
    for item in entry.inputs:
        name, tensor = item.name, tensors[item.name]
        if tensor is not None and name in lead.of_input:
            if name not in batched and lead.of_input[name] in shared:
                tensor = tensor.unsqueeze(0).expand(size, *tensor.shape)
            if lead.broadcast and (name in batched or lead.of_input[name] in shared):
                missing = most - (tensor.ndim - 1 - lead.trailing[name])
                tensor = tensor[(slice(None), *(None,) * missing)]
            if item.contiguous:
                tensor = tensor.contiguous()
        given.append(tensor)
    return given


Fact = tuple[str, tuple[int, ...] | None, torch.dtype | None, bool]
"""Name, shape of a slice, dtype and whether it is batched; of one that is absent the name alone."""


def _facts(tensors: dict[str, Any], batched: set[str]) -> tuple[Fact, ...]:
    return tuple(
        (name, None, None, False)
        if t is None
        else (name, tuple(map(likely, t.shape[name in batched :])), t.dtype, name in batched)
        for name, t in tensors.items()
    )


@lru_cache(maxsize=1024)
def _way(cls: Any, branch: Branch, key: str, facts: tuple[Fact, ...]) -> Way | None:
    """The way to cut a call that gives the slices back, with the fewest elements to repeat."""
    entry: Entry = cls.entry
    with torch._C._DisableFuncTorch(), _disable_current_modes():
        slices = {
            name: None if shape is None else torch.empty(shape, dtype=dtype, device="meta")
            for name, shape, dtype, _ in facts
        }
        candidates = ways(resolve(cls, key).op, branch, slices)
    batched = {name for name, _, _, there in facts if there}
    returned = [entry.outputs[index].name for index in returned_of(entry, branch)]
    found = [
        way
        for way in candidates
        if SUM not in way.inputs.values()
        and not way.even  # rules speak of that size: what holds of a slice may not of many
        and all(isinstance(way.inputs[name], int) for name in batched)
        and all(isinstance(way.outputs[name], int) for name in returned)
    ]

    def repeated(way: Way) -> int:
        cut = {name for name, place in way.inputs.items() if isinstance(place, int)}
        return sum(prod(shape) for name, shape, *_ in facts if shape and name in cut - batched)

    return min(found, key=repeated, default=None)


def _folded(
    entry: Entry, way: Way, tensors: dict[str, Any], batched: set[str], size: Any
) -> list[Any]:
    """The tensors of one call, with the batch outermost in the dim that ``way`` cuts."""
    given = []
    for item in entry.inputs:
        tensor, place = tensors[item.name], way.inputs.get(item.name)
        if isinstance(place, int):
            if item.name not in batched:
                tensor = tensor.unsqueeze(0).expand(size, *tensor.shape)
            tensor = tensor.movedim(0, place).flatten(place, place + 1)
            if item.contiguous:
                tensor = tensor.contiguous()
        given.append(tensor)
    return given


def _unfolded(result: Any, dims: tuple[int, ...], size: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.unflatten(dims[0], (size, result.shape[dims[0]] // max(size, 1)))
    return tuple(_unfolded(r, (dim,), size) for r, dim in zip(result, dims, strict=True))


def _by_slice(
    cls: Any, overload: Any, tensors: dict[str, Any], batched: set[str], key: str, size: int
) -> Any:
    """One call for each slice, stacked."""
    contiguous = {item.name for item in cls.entry.inputs if item.contiguous}
    given = {n: t.contiguous() if n in batched & contiguous else t for n, t in tensors.items()}
    if not size:
        return _of_no_slice(cls, overload, given, batched, key)
    results = [
        overload(*(t[n] if name in batched else t for name, t in given.items()), key)
        for n in range(size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(torch.stack(rows) for rows in zip(*results, strict=True))


def _of_no_slice(
    cls: Any, overload: Any, tensors: dict[str, Any], batched: set[str], key: str
) -> Any:
    """The outputs of no slice, by the shapes that a slice would have."""
    metas = [
        None if t is None else torch.empty(t.shape[name in batched :], dtype=t.dtype, device="meta")
        for name, t in tensors.items()
    ]
    result = overload(*metas, key)
    like = next(t for name, t in tensors.items() if name in batched)

    def none_of(slice_: torch.Tensor) -> torch.Tensor:
        return like.new_empty((0, *slice_.shape), dtype=slice_.dtype)

    return none_of(result) if isinstance(result, torch.Tensor) else tuple(map(none_of, result))
