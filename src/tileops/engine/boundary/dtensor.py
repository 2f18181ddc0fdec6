"""DTensor: the sharding strategies of a class's operators, registered when the first is asked for.

DTensor computes what an operator returns, by its fake, before it looks for the operator's strategy; so
the fake is where registration is done. Nothing of ``torch.distributed`` is imported before, and no
call of plain tensors comes here.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tileops.engine.boundary.instances import resolve
from tileops.engine.errors import CheckError
from tileops.engine.manifest.entry import Branch
from tileops.engine.signature.sharding import REPLICATE, SUM, Place, Way, ways

__all__ = ["likely", "register_strategies"]

_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register_strategies(cls: Any) -> None:
    """Tell DTensor, where it is in use, the strategies of ``cls``, once."""
    if cls in _registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for operator in cls._boundary.operators:
        # Not `register_sharding`: decisions are kept by those arguments alone that are tensors or
        # ints, so that ops of one class would share them whatever their parameters and whichever
        # inputs are absent. And it hands out no mesh of several dims, nor written arguments.
        everything_counts = RuntimeSchemaInfo(static_argnum=0)
        propagator.register_op_strategy(
            operator.overload, partial(_strategies, cls, operator.branch), everything_counts
        )
    _registered.add(cls)


def _strategies(cls: Any, branch: Branch, schema: Any) -> Any:
    """All placements of one call, each with what it costs to move the inputs there."""
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
    from torch.distributed.tensor._ops.utils import generate_redistribute_costs

    *arguments, key = schema.args_schema
    op = resolve(cls, key).op
    names = [*(item.name for item in cls.entry.inputs), *(["out"] if branch.out else [])]
    given = {
        name: argument
        for name, argument in zip(names, arguments, strict=True)
        if isinstance(argument, OpStrategy)
    }
    specs = {name: argument.strategies[0].output_spec for name, argument in given.items()}
    mesh = _mesh(cls, specs)
    inputs = {item.name: _whole(specs.get(item.name)) for item in cls.entry.inputs}
    found = ways(op, branch, inputs)
    written = [*branch.writes, *(["out"] if branch.out else [])]
    strategies = []
    for combined in itertools.product(found, repeat=mesh.ndim):
        wanted = _arguments(cls, branch, combined)
        if not _possible(combined, wanted, specs, written):
            continue
        targets = {n: _spec(mesh, wanted[n], spec.tensor_meta) for n, spec in specs.items()}
        outputs = [_spec(mesh, places, None) for places in _returned(cls, branch, combined)]
        strategies.append(
            OpSpec(
                output_specs=None
                if not outputs
                else outputs[0]
                if len(outputs) == 1
                else tuple(outputs),
                input_specs=[targets[name] for name in given],
                redistribute_cost=[
                    generate_redistribute_costs(given[name], targets[name]) for name in given
                ],
            )
        )
    if not strategies:
        _refuse(cls, branch, found, specs, written)
    return OpStrategy(strategies)


# ---- one combination of ways, one for each dim of the mesh --------------------------------------------


def _arguments(cls: Any, branch: Branch, combined: Sequence[Way]) -> dict[str, tuple[Place, ...]]:
    """Places by argument, one for each dim of the mesh."""
    wanted = {name: tuple(way.inputs[name] for way in combined) for name in combined[0].inputs}
    if branch.out:
        (output,) = cls.entry.outputs
        wanted["out"] = tuple(way.outputs[output.name] for way in combined)
    return wanted


def _returned(cls: Any, branch: Branch, combined: Sequence[Way]) -> list[tuple[Place, ...]]:
    from tileops.engine.boundary.schema import returned_of

    names = [cls.entry.outputs[index].name for index in returned_of(cls.entry, branch)]
    return [tuple(way.outputs[name] for way in combined) for name in names]


def _possible(
    combined: Sequence[Way],
    wanted: dict[str, tuple[Place, ...]],
    specs: dict[str, Any],
    written: list[str],
) -> bool:
    """Whether the arguments may be brought there: what is written stays where it is, no partial sum is
    made of whole values, ranks that all hold the same go on doing so, and parts are even where they
    must be."""
    for index, way in enumerate(combined):
        cut = any(isinstance(place, int) for place in way.inputs.values())
        if cut and not any(_is_cut(spec.placements[index]) for spec in specs.values()):
            return False
    for name, places in wanted.items():
        now, shape = specs[name].placements, specs[name].shape
        if name in written and tuple(map(_placement, places)) != tuple(now):
            return False
        parts: dict[int, int] = {}
        for index, (place, way) in enumerate(zip(places, combined, strict=True)):
            if place == SUM and not now[index].is_partial("sum"):
                return False
            if isinstance(place, int):
                parts[place] = parts.get(place, 1) * specs[name].mesh.size(index)
                if way.even and not _divides(parts[place], shape[place]):
                    return False
    return True


def _mesh(cls: Any, specs: dict[str, Any]) -> Any:
    """The one mesh. (That of ``OpSchema`` is asked of the first argument alone, which may be absent.)"""
    (first, spec), *others = specs.items()
    for name, other in others:
        if other.mesh != spec.mesh:
            accepted = f"the mesh of '{first}', {spec.mesh}"
            raise CheckError(cls.__name__, name, f"a DTensor on {other.mesh}", accepted)
    return spec.mesh


def _is_cut(placement: Any) -> bool:
    return not (placement.is_replicate() or placement.is_partial())


def _divides(parts: int, size: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(size % parts == 0))


def _placement(place: Place) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if isinstance(place, int):
        return Shard(place)
    return Replicate() if place == REPLICATE else Partial("sum")


def _spec(mesh: Any, places: tuple[Place, ...], meta: Any) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(mesh, tuple(map(_placement, places)), tensor_meta=meta)


# ---- whole shapes ------------------------------------------------------------------------------------


def _whole(spec: Any) -> torch.Tensor | None:
    """A tensor of the whole shape, without data."""
    if spec is None:
        return None
    meta = spec.tensor_meta
    shape, stride = tuple(map(likely, meta.shape)), tuple(map(likely, meta.stride))
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # else a tracer would record it
        return torch.empty_strided(shape, stride, dtype=meta.dtype, device="meta")


def likely(size: Any) -> int:
    """A size, or a likely value of a symbolic one: a decision must not cost a guard."""
    if isinstance(size, int):
        return size
    if size.node.hint is not None:
        return int(size.node.hint)
    expression = size.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 8192)))


def _refuse(
    cls: Any, branch: Branch, found: list[Way], specs: dict[str, Any], written: list[str]
) -> None:
    """Only what is written cannot be moved: name what it may be."""
    name = written[0]
    accepted = {_placement(_arguments(cls, branch, (way,))[name][0]) for way in found}
    raise CheckError(
        cls.__name__,
        name,
        f"placements {tuple(specs[name].placements)}",
        "on each dim of the mesh one of "
        + ", ".join(sorted(map(str, accepted)))
        + ", since it is written where it lies",
    )
