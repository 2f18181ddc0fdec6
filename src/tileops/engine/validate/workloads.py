"""Every workload of an op class, run without data: it must name what exists, bind, and be what the
signature, the decomposition and the cost say."""

from __future__ import annotations

import ast
import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from tileops.engine.errors import CheckError, ManifestError
from tileops.engine.kernel import CallSpec, DeviceFacts, TensorSpec
from tileops.engine.manifest.entry import Entry, Workload
from tileops.engine.op import Op
from tileops.engine.roofline import cost_terms
from tileops.engine.signature.literal import dtype_name
from tileops.engine.signature.runtime import DTYPE_VALUES
from tileops.engine.validate.report import Report, describe
from tileops.engine.workloads import WorkloadCall, presence_of, workload_inputs

__all__ = ["check_workloads", "run_workload"]

SMALL = 1 << 12
"""Most elements of a tensor where a decomposition that reads data is run for real."""

Fault = Callable[..., None]
Run = Callable[[Any, Workload, Fault], frozenset[str]]


def check_workloads(entry: Entry, op_cls: Any, run: Run | None, report: Report) -> None:
    """Report the faults of every workload, and optional inputs that no workload passes or omits.

    ``run`` is ``run_workload``, or None where no op can be made: then names are looked at alone.
    """
    labels: dict[str, int] = {}
    presence: list[frozenset[str]] = []
    for index, workload in enumerate(entry.workloads):

        def fault(
            problem: str, *path: Any, index: int = index, workload: Workload = workload
        ) -> None:
            line = entry.line_of("workloads", index, *path)
            report.add(entry.path, line, entry.name, f"workload '{workload.label}': {problem}")

        first = labels.setdefault(workload.label, workload.line)
        if first != workload.line:
            fault(f"the label is also at line {first}", "label")
        problems = list(_names(entry, workload))
        for problem, path in problems:
            fault(problem, *path)
        if run is not None and not problems:
            try:
                presence.append(run(op_cls, workload, fault))
            except ManifestError as error:
                report.add_error(error)
            except CheckError as error:
                fault(f"'{error.argument}': given {error.given}; accepted: {error.accepted}")
            except Exception as error:  # noqa: BLE001  (a decomposition may raise anything)
                fault(describe(error))
    if len(presence) == len(entry.workloads):
        _coverage(entry, presence, report)


def _coverage(entry: Entry, presence: list[frozenset[str]], report: Report) -> None:
    for item in entry.inputs:
        if not item.optional:
            continue
        passed = sum(item.name in names for names in presence)
        if 0 < passed < len(presence):
            continue
        word = "passes" if passed == 0 else "omits"
        problem = f"inputs.{item.name}: no workload {word} it"
        if item.passed_when is not None:
            value = "true" if passed == 0 else "false"
            problem = f"inputs.{item.name}: no workload makes {item.passed_when.text!r} {value}"
        report.add(entry.path, item.line, entry.name, problem)


# ---- what a workload names -----------------------------------------------------------------------


def _names(entry: Entry, workload: Workload) -> Iterator[tuple[str, tuple[Any, ...]]]:
    single, spliced = _dims(entry)
    for name, value in workload.dims.items():
        path = ("dims", name)
        if name in entry.dims:
            yield f"dims.{name}: is derived, so no workload states it", path
        elif name not in single | spliced:
            yield f"dims.{name}: no shape has it; {_accepted(single | spliced)}", path
        elif isinstance(value, tuple) != (name in spliced):
            yield f"dims.{name}: given {_size(value)}; accepted: {_kind(name in spliced)}", path
        elif min(value if isinstance(value, tuple) else (value,), default=0) < 0:
            yield f"dims.{name}: given {_size(value)}; accepted: sizes of at least 0", path
    params = {param.name for param in entry.params}
    for name in workload.params:
        if name not in params:
            yield f"params.{name}: no such parameter; {_accepted(params)}", ("params", name)
    optional = {item.name for item in entry.inputs if item.optional}
    for name in sorted(workload.passed - optional):
        yield f"passed: '{name}' is no optional input; {_accepted(optional)}", ("passed",)
    choices = {**entry.dtypes, **{i.name: i.dtypes for i in entry.inputs if len(i.dtypes) > 1}}
    for name, dtype in workload.dtypes.items():
        path = ("dtypes", name)
        if name not in choices:
            yield f"dtypes.{name}: nothing has this dtype; {_accepted(choices)}", path
        elif dtype not in choices[name]:
            yield f"dtypes.{name}: given {dtype}; {_accepted(choices[name])}", path


def _accepted(names: Any) -> str:
    return f"accepted: {', '.join(sorted(names)) or 'none'}"


def _size(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _kind(spliced: bool) -> str:
    return "a list, because it is spliced" if spliced else "one size"


def _dims(entry: Entry) -> tuple[set[str], set[str]]:
    """The dims that shapes find: single ones and spliced ones."""
    single: set[str] = set()
    spliced: set[str] = set()
    for item in entry.inputs:
        for node in ast.walk(item.shape.tree):
            if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
                spliced.add(node.value.id)
        single |= item.shape.names
    for name, expr in entry.dims.items():
        single |= expr.names
        single.discard(name)
    taken = set(DTYPE_VALUES) | set(entry.dtypes) | entry.shape_params | set(entry.dims)
    return single - spliced - taken, spliced - taken


# ---- one workload --------------------------------------------------------------------------------


def run_workload(op_cls: Any, workload: Workload, fault: Fault) -> frozenset[str]:
    """Bind and run it without data; returns the inputs that it passes."""
    entry: Entry = op_cls.entry
    fake = FakeTensorMode()
    call = workload_inputs(op_cls, workload, "cpu", fake)
    passed = presence_of(entry, workload, call.op._params)
    for item in entry.inputs:
        if item.name in workload.passed - passed:
            assert item.passed_when is not None
            fault(f"passed: '{item.name}', but not: {item.passed_when.text}", "passed")
            return passed
    outputs, dims, _ = op_cls._signature(call.op, *call.inputs.values(), *_no_out(entry))
    for name in workload.dims:
        if dims.get(name) is None:
            fault(f"dims.{name}: this workload does not use it", "dims", name)
    with _quiet():
        _meaning(op_cls, call, outputs, fake, fault)
    _cost(entry, call, outputs, dims, fault)
    _stages(entry, call.op, fault)
    return passed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs a traceback for whatever fails on fake tensors; here it becomes a fault."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _no_out(entry: Entry) -> tuple[None, ...]:
    return (None,) if entry.has_out else ()


def _meaning(op_cls: Any, call: WorkloadCall, outputs: Any, fake: Any, fault: Fault) -> None:
    """The decomposition, and the call itself, give what the signature says."""
    entry: Entry = op_cls.entry
    if op_cls.decomposition is not None and not entry.composition:
        try:
            with fake:
                given = op_cls.decomposition(*call.inputs.values(), **call.op._params)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # It reads what tensors hold: run it on a small call with real ones.
            small = workload_inputs(op_cls, call.workload, "cpu", scale_to=SMALL)
            specs = op_cls._signature(small.op, *small.inputs.values(), *_no_out(entry))[0]
            given = op_cls.decomposition(*small.inputs.values(), **small.op._params)
        else:
            small, specs = call, outputs
        wanted = [*zip((o.name for o in entry.outputs), specs, strict=True)]
        wanted += _new_values(entry, small)
        _compare("decomposition", wanted, given, fault)
    if not entry.inputs and op_cls.forward is Op.forward:
        return  # its call is the decomposition
    with fake:
        given = call() if entry.inputs else call.op.forward()
    visible = [*zip((o.name for o in entry.outputs), outputs, strict=True)]
    _compare("the call", visible, given if visible else (), fault)


def _new_values(entry: Entry, call: WorkloadCall) -> list[tuple[str, Any]]:
    """What a decomposition returns after the outputs: each written input that is not one."""
    env = {**DTYPE_VALUES, **call.op._params}
    passed = frozenset(name for name, tensor in call.inputs.items() if tensor is not None)
    returned = {output.is_input for output in entry.outputs}
    values = []
    for item in entry.inputs:
        tensor = call.inputs[item.name]
        if item.mutated is None or item.name in returned or tensor is None:
            continue
        if item.mutated.evaluate(env, passed):
            values.append((f"new {item.name}", (tuple(tensor.shape), tensor.dtype)))
    return values


def _compare(what: str, wanted: list[tuple[str, Any]], given: Any, fault: Fault) -> None:
    values = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(values) != len(wanted):
        names = ", ".join(name for name, _ in wanted) or "nothing"
        fault(f"{what} returns {len(values)} values; the entry says {len(wanted)}: {names}")
        return
    for (name, spec), value in zip(wanted, values, strict=True):
        says = "None" if spec is None else f"{dtype_name(spec[1])}{list(spec[0])}"
        if value is None or isinstance(value, torch.Tensor):
            is_ = "None" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)}"
        else:
            is_ = type(value).__name__
        if says != is_:
            fault(f"{what} gives {name} as {is_}; the entry says {says}")


def _cost(entry: Entry, call: WorkloadCall, outputs: Any, dims: Any, fault: Fault) -> None:
    cpu = torch.device("cpu")

    def spec(shape: Any, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec.contiguous_of(tuple(shape), dtype, cpu)

    facts = CallSpec(
        op=entry.name,
        params=SimpleNamespace(**call.op._params),
        dims=dims,
        inputs={n: None if t is None else spec(t.shape, t.dtype) for n, t in call.inputs.items()},
        outputs={
            output.name: None if value is None else spec(*value)
            for output, value in zip(entry.outputs, outputs, strict=True)
        },
        device=DeviceFacts("cpu"),
    )
    for name, value in cost_terms(entry, facts).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            fault(f"cost.{name} is {value!r}; accepted: an int of at least 0")


def _stages(entry: Entry, op: Any, fault: Fault) -> None:
    for stage, name in entry.composition.items():
        served = getattr(op, stage, None)
        if isinstance(served, Op) and type(served).__name__ != name:
            fault(f"stage {stage} is a {type(served).__name__}; the entry says {name}")
