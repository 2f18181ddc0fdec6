"""Every way in which a call may be spread over ranks, of every class: the parts, computed one after
another without processes, make up what the whole call gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.cases import op_classes, workload_call, workloads_in_every_dtype
from tileops import CheckError
from tileops.engine.errors import ManifestError
from tileops.engine.gradient import gradient_of
from tileops.engine.manifest.entry import Branch, Workload
from tileops.engine.signature.sharding import REPLICATE, SUM, Way, ways

RANKS, EVEN_RANKS, SIZE = 4, 2, 6
"""Six rows over four ranks: two, two, two and none."""


def with_boundary() -> list[str]:
    return [name for name, cls in op_classes().items() if cls.entry.has_boundary]


def part(tensor: torch.Tensor, place: Any, rank: int, ranks: int) -> torch.Tensor:
    """What one rank holds, by DTensor's rule: chunks of the size rounded up, the last ones empty."""
    if place == REPLICATE:
        return tensor.clone()
    if place == SUM:
        return tensor * 0.5 ** min(rank + 1, ranks - 1)  # exact in halves too
    size = tensor.shape[place]
    step = -(-size // ranks)
    low, high = min(step * rank, size), min(step * (rank + 1), size)
    return tensor.narrow(place, low, high - low).clone(memory_format=torch.contiguous_format)


def joined(parts: list[torch.Tensor], place: Any) -> torch.Tensor:
    if place == REPLICATE:
        assert all(torch.equal(parts[0], other) for other in parts[1:])
        return parts[0]
    return sum(parts) if place == SUM else torch.cat(parts, place)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    # Of float32 a sum of at most some hundred products, whose order may differ; else bits.
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def run(op: Any, inputs: dict[str, torch.Tensor | None]) -> tuple[Any, ...]:
    by_position = [inputs[item.name] for item in op.entry.positional_inputs]
    result = op(*by_position, **{i.name: inputs[i.name] for i in op.entry.inputs if i.kw_only})
    return result if isinstance(result, tuple) else (result,)


def branch_of(op: Any, inputs: dict[str, torch.Tensor | None]) -> Branch:
    """What a call without ``out`` writes."""
    env, passed = dict(op._params), frozenset(n for n, t in inputs.items() if t is not None)
    writes = [i.name for i in op.entry.inputs if i.mutated and i.mutated.evaluate(env, passed)]
    return Branch(writes=tuple(writes))


def divides(way: Way, inputs: dict[str, Any]) -> bool:
    return all(
        inputs[name].shape[place] % EVEN_RANKS == 0
        for name, place in way.inputs.items()
        if isinstance(place, int)
    )


def assert_adds_up(op: Any, way: Way, inputs: dict[str, torch.Tensor | None]) -> None:
    whole = {n: None if t is None else t.clone() for n, t in inputs.items()}
    expected = run(op, whole)
    parts: list[Any] = []
    results = []
    ranks = EVEN_RANKS if way.even else RANKS
    for rank in range(ranks):
        parts.append({
            n: None if t is None else part(t, way.inputs[n], rank, ranks) for n, t in inputs.items()
        })  # fmt: skip
        results.append(run(op, parts[-1]))
    for index, output in enumerate(op.entry.outputs):
        if output.name in way.outputs:
            found = joined([result[index] for result in results], way.outputs[output.name])
            assert_near(found, expected[index])
    for name in branch_of(op, inputs).writes:
        found = joined([p[name] for p in parts], way.inputs[name])
        assert_near(found, whole[name])


def calls(name: str, seed: int) -> list[Any]:
    """A call for each presence of inputs and each construction, in floating point where the op has it,
    with sizes that can be cut."""
    every = [workload for _, workload in workloads_in_every_dtype(name)]
    some = [workload for workload in every if "float32" in workload.dtypes.values()] or every
    # Float32 beside a narrower dtype may be that of tables: the result is rounded as the other.
    wide = [w for w in some if not {"float16", "bfloat16"} & set(w.dtypes.values())] or some
    found = {(workload.passed, repr(workload.params)): workload for workload in reversed(wide)}
    return [spread(name, workload, seed) for workload in found.values()]


def spread(name: str, workload: Workload, seed: int) -> Any:
    made = workload_call(name, workload, seed, 96)
    for dim, size in made.workload.dims.items():
        for index in range(len(size)) if isinstance(size, tuple) else [None]:
            changed = dict(made.workload.dims)
            if index is None:
                changed[dim] = SIZE
            else:
                changed[dim] = (*changed[dim][:index], SIZE, *changed[dim][index + 1 :])
            try:
                grown = dataclasses.replace(made.workload, dims=changed)
                other = workload_call(name, grown, seed, None)
                type(other.op)._signature(other.op, *other.inputs.values(), None)
            except (CheckError, ManifestError):
                continue
            made = other
    return made


@pytest.mark.parametrize("name", with_boundary())
def test_parts_make_up_the_whole(name, seed):
    tried = 0
    for call in calls(name, seed):
        inputs = dict(call.inputs)
        for way in ways(call.op, branch_of(call.op, inputs), inputs)[1:]:
            if not way.even or divides(way, inputs):
                assert_adds_up(call.op, way, inputs)
                tried += 1
    print(f"{name}: {tried} ways")


def forwards() -> list[str]:
    """Classes whose gradient is no entry of its own, where they have one."""
    entries = {name: op_classes()[name].entry for name in with_boundary()}
    return [n for n, e in entries.items() if not n.endswith("BwdOp") and not e.backward]


def gradient_call(call: Any) -> tuple[Any, dict[str, Any]]:
    """A call of the derived gradient, of random gradients that come in."""
    found = gradient_of(type(call.op))
    assert found is not None
    results = dict(
        zip([o.name for o in call.op.entry.outputs], run(call.op, dict(call.inputs)), strict=True)
    )
    grads = [
        None if results[name] is None else torch.randn_like(results[name])
        for name in found.wiring.outputs
    ]
    saved = [call.inputs[name] for name in found.wiring.saved]
    op = found.cls(**{name: call.op._params[name] for name in found.wiring.params})
    return op, dict(zip([i.name for i in op.entry.inputs], [*grads, *saved], strict=True))


@pytest.mark.parametrize("name", forwards())
def test_parts_make_up_the_whole_gradient(name, seed):
    if op_classes()[name].backward_class() is None:
        pytest.skip("no gradient flows")
    tried = 0
    for call in calls(name, seed):
        if not run(call.op, dict(call.inputs))[0].is_floating_point():
            continue
        op, inputs = gradient_call(call)
        for way in ways(op, Branch(), inputs)[1:]:
            if not way.even or divides(way, inputs):
                assert_adds_up(op, way, inputs)
                tried += 1
    print(f"{name}: {tried} ways")
