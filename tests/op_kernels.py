"""A call of an op as its CUDA kernels see it: run in Triton's interpreter and held to the op's meaning,
or compiled for a card that is not there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.kernel_calls import poison, run_entry
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops import spec
from tileops.authoring import CallSpec, DeviceFacts, Entry
from tileops.backend.tolerances import compare
from tileops.engine.manifest.entry import Workload
from tileops.engine.plan import call_spec, resolve_entry
from tileops.engine.prepare import Prepared
from tileops.engine.workloads import workload_inputs

__all__ = ["check_kernel", "cuda_call", "entry_of", "prepared", "run_kernel"]

Tensors = dict[str, "torch.Tensor | None"]


def cuda_call(
    op: Any, inputs: Tensors, arch: tuple[int, int] = (9, 0), multiprocessors: int = 132
) -> CallSpec:
    """The facts of this call, were its tensors on a CUDA card."""
    whole = tuple(inputs.get(item.name) for item in op.entry.inputs)
    call, _ = call_spec(op, whole, None)
    shared = 227 << 10 if arch >= (9, 0) else 163 << 10
    facts = DeviceFacts("cuda", 0, arch, "test", multiprocessors, shared)
    return dataclasses.replace(call, device=facts)


def entry_of(call: CallSpec, op: Any, candidate: int | None = None) -> Entry:
    """The entry of the kernel that serves, or one of its candidates; not the decomposition."""
    selection, entry = resolve_entry(op, call)
    assert not selection.kernel.last_resort, selection.refused
    return entry if candidate is None else selection.kernel.candidates(call)[candidate]


@interpreted
def run_kernel(
    op: Any,
    inputs: Tensors,
    candidate: int | None = None,
    multiprocessors: int = 132,
    arch: tuple[int, int] = (9, 0),
) -> tuple[Any, Tensors]:
    """What the kernel returns, and the inputs afterwards."""
    whole = {item.name: inputs.get(item.name) for item in op.entry.inputs}
    whole = {name: None if t is None else t.contiguous() for name, t in whole.items()}
    call = cuda_call(op, whole, arch, multiprocessors)
    with poison():
        return run_entry(entry_of(call, op, candidate), call, *whole.values()), whole


def check_kernel(
    op: Any,
    inputs: Tensors,
    candidate: int | None = None,
    multiprocessors: int = 132,
    arch: tuple[int, int] = (9, 0),
) -> Any:
    """Hold the kernel of a call to the op's meaning; returns what it returned. On a card of few
    ``multiprocessors`` a small call is a large one."""
    outputs, written = exact(op, {n: None if t is None else t.clone() for n, t in inputs.items()})
    result, after = run_kernel(op, inputs, candidate, multiprocessors, arch)
    results = result if isinstance(result, tuple) else (result,)
    for declared, given, wanted in zip(op.entry.outputs, results, outputs, strict=True):
        if wanted is None or declared.is_input in written:
            assert given is None, declared.name
            continue
        assert given.shape == wanted.shape
        found = compare(given, wanted, op.entry.kind)
        assert found.ok, f"{op!r}: {declared.name} ({given.dtype}): {found.text}"
    for name, wanted in written.items():
        found = compare(after[name], wanted, op.entry.kind)
        assert found.ok, f"{op!r}: written {name}: {found.text}"
    return result


def prepared(
    op_class: Any, workload: Workload, arch: tuple[int, int], local_memory: str | None = None
) -> Prepared:
    """The kernels of one workload, compiled for a card that is not there and held to its limits; they use
    no local memory unless ``local_memory`` says why."""
    made = workload_inputs(op_class, workload, "meta")
    specs = {n: t if t is None else spec(*t.shape, dtype=t.dtype) for n, t in made.inputs.items()}
    named = {i.name: specs.pop(i.name) for i in op_class.entry.inputs if i.kw_only}
    found = made.op.prepare(*specs.values(), **named, device=f"cuda:sm_{arch[0]}{arch[1]}")
    assert local_memory or not found.spilling, str(found)
    assert all(not kernel.note for kernel in found.kernels), str(found)
    return found
