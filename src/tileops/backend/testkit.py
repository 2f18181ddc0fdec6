"""Proves a target: every op it serves, against the op's meaning in float64.

``print(check_target("acme", device="cuda"))`` shows what was proved, what the target declined and
what is wrong. In a vendor's own tests, one test per case::

    from tileops.backend.testkit import parametrize_target

    @parametrize_target("acme", device="cuda")
    def test_acme(case):
        case.check()

A case is one call, made from the op's manifest: each workload scaled to the machine; and, of the
first one, sizes 0, 1 and a prime, every dtype, optional inputs given and left out, strided and
unaligned inputs, ``out=``, and two builds of one spec. A case passes when values lie within
``tileops.backend.tolerances``, outputs are contiguous and fresh, and nothing is written that the
entry does not declare. To decline is fine; to decline by another error than
``OpNotAvailableError``, or when the kernel runs, is not.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tileops.backend.tolerances import compare
from tileops.engine import targets
from tileops.engine.errors import (
    BackendError,
    CheckError,
    KernelBuildError,
    ManifestError,
    OpNotAvailableError,
)
from tileops.engine.kernel import CallSpec
from tileops.engine.manifest.catalog import families, load_family
from tileops.engine.manifest.entry import Entry, Workload
from tileops.engine.op import Op
from tileops.engine.plan import call_spec
from tileops.engine.record import recording
from tileops.engine.workloads import WorkloadCall, scaled, workload_inputs

__all__ = ["Case", "Report", "Result", "check_target", "parametrize_target", "target_cases"]

SIZES = (0, 1, 131)  # a prime is no multiple of what kernels like
SMALL = 1 << 14  # elements of the largest tensor in a case that varies one thing

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Result:
    """``outcome``: ``pass``, ``decline``, ``fail``, or ``skip`` where tileops itself has no answer
    to compare with; ``detail``: how close, why, or what is wrong."""

    op: str
    case: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class Report:
    """What ``check_target`` found; ``print`` it."""

    target: str
    device: str
    results: tuple[Result, ...]

    def of(self, outcome: str) -> tuple[Result, ...]:
        """The results with that outcome."""
        return tuple(result for result in self.results if result.outcome == outcome)

    @property
    def idle(self) -> tuple[str, ...]:
        """Ops of which the target served no case at all: nothing is proved about them."""
        served = {result.op for result in self.of("pass")}
        return tuple(dict.fromkeys(r.op for r in self.results if r.op not in served))

    @property
    def ok(self) -> bool:
        """Nothing failed, and every op was served at least once."""
        return bool(self.results) and not self.of("fail") and not self.idle

    def __str__(self) -> str:
        counts = ", ".join(
            f"{len(self.of(outcome))} {word}"
            for outcome, word in (("pass", "passed"), ("decline", "declined"), ("fail", "failed"))
        )
        if skipped := len(self.of("skip")):
            counts += f", {skipped} skipped"
        lines = [f"target {self.target!r} on {self.device}: {counts}"]
        width = max((len(result.case) for result in self.results), default=0)
        for op in dict.fromkeys(result.op for result in self.results):
            lines.append(op + (" (served no case)" if op in self.idle else ""))
            lines += [
                f"  {'FAIL' if r.outcome == 'fail' else r.outcome:8}{r.case:{width}}  {r.detail}"
                for r in self.results
                if r.op == op
            ]
        return "\n".join(lines)


def check_target(
    name: str,
    ops: Iterable[str | type[Op]] | None = None,
    device: torch.device | str | None = None,
    *,
    scale_to: int | None = None,
) -> Report:
    """Run every case of target ``name`` and report.

    ``ops``: classes or their names, all that the target serves without it. ``device``: ``cuda``
    where there is one, else ``cpu``. ``scale_to``: elements of the largest tensor of a workload.
    Raises ``UnknownTargetError``.
    """
    cases = target_cases(name, ops, device, scale_to=scale_to)
    results = (case.run() for case in cases)
    return Report(name, str(_device(device)), tuple(r for r in results if r is not None))


def parametrize_target(
    name: str,
    ops: Iterable[str | type[Op]] | None = None,
    device: torch.device | str | None = None,
    *,
    scale_to: int | None = None,
) -> Any:
    """A pytest mark that gives a test each ``case`` of ``check_target``, to ``check()``."""
    import pytest

    cases = target_cases(name, ops, device, scale_to=scale_to)
    return pytest.mark.parametrize("case", cases, ids=[f"{c.op}-{c.name}" for c in cases])


def target_cases(
    name: str,
    ops: Iterable[str | type[Op]] | None = None,
    device: torch.device | str | None = None,
    *,
    scale_to: int | None = None,
) -> list[Case]:
    """The cases that ``check_target`` runs; no tensor is made yet."""
    targets.check_target(name)
    place = _device(device)
    most = scale_to or (1 << 18 if place.type == "cpu" else 1 << 22)
    cases = []
    for op in targets.ops_of(name) if ops is None else ops:
        cls = _op_class(op) if isinstance(op, str) else op
        if cls is None or not (cls.entry.has_boundary or not cls.entry.inputs):
            why = "tileops has no op of this name" if cls is None else "a composition has no kernel"
            cases.append(Case(name, place, str(op), "served", fault=why))
            continue
        for position, workload in enumerate(cls.entry.workloads):
            cases.append(Case(name, place, cls.__name__, workload.label, cls, workload, most))
            if position == 0:
                cases += _variations(name, place, cls, workload)
    return cases


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _op_class(name: str) -> type[Op] | None:
    """The in-tree class of that name."""
    for family, path in families().items():
        if name in load_family(path):
            found: type[Op] = getattr(importlib.import_module(f"tileops.{family}"), name)
            return found
    return None


# ---- variations of a workload ------------------------------------------------------------------


def _variations(
    target: str, device: torch.device, cls: type[Op], workload: Workload
) -> Iterator[Case]:
    """Cases that change one thing; those the op's rules refuse say so when they run."""

    def case(name: str, changed: Workload = workload, **how: Any) -> Case:
        label = f"{workload.label}, {name}"
        return Case(target, device, cls.__name__, label, cls, changed, SMALL, varied=True, **how)

    for name, changed in _changed(cls.entry, workload):
        yield case(name, changed)
    for section, name in _size_names(cls.entry, workload):
        for size in SIZES:
            yield case(f"{name}={size}", size=(section, name, size))
    if cls.entry.inputs:
        yield case("strided", layout=_strided)
        yield case("unaligned", layout=_unaligned)
    if cls.entry.has_out:
        yield case("out=", with_out=True)
    yield case("built twice", twice=True)


def _changed(entry: Entry, workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Other dtypes, and other optional inputs."""
    for variable, accepted in entry.dtypes.items():
        for dtype in accepted:
            if dtype != workload.dtypes.get(variable):
                dtypes = {**workload.dtypes, variable: dtype}
                yield f"{variable}={dtype}", dataclasses.replace(workload, dtypes=dtypes)
    for item in entry.inputs:
        if item.optional and item.passed_when is None:
            word = "without" if item.name in workload.passed else "with"
            passed = workload.passed ^ {item.name}
            yield f"{word} {item.name}", dataclasses.replace(workload, passed=passed)


def _size_names(entry: Entry, workload: Workload) -> Iterator[tuple[str, str]]:
    """The sizes that a workload states: dims, and params that shapes use."""
    yield from (("dims", name) for name in sorted(workload.dims))
    in_shapes = {name for item in entry.inputs for name in item.shape.names}
    for param in entry.params:
        counts = param.type.alternatives[0][0] in ("int", "ints", "tuple")
        if counts and param.name in in_shapes and param.name in workload.params:
            yield "params", param.name


def _resized(workload: Workload, section: str, name: str, size: int) -> Workload:
    given = dict(getattr(workload, section))
    old = given[name]
    given[name] = (*old[:-1], size) if isinstance(old, tuple) else size
    changes: dict[str, Any] = {section: given}
    return dataclasses.replace(workload, **changes)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a longer tensor."""
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    return wide[..., ::2].copy_(tensor)


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, beginning one element past an aligned address."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


# ---- one case -----------------------------------------------------------------------------------


class _InapplicableError(Exception):
    """The op's own rules refuse the variation."""


class _UnansweredError(Exception):
    """The op's own definition raises."""


@dataclass(frozen=True)
class Case:
    """One call that a target must serve or decline. ``run`` gives None where a variation is no call
    of the op (its rules refuse it)."""

    target: str
    device: torch.device
    op: str
    name: str
    cls: type[Op] | None = None
    workload: Workload | None = field(default=None, repr=False)
    scale_to: int = SMALL
    varied: bool = False
    size: tuple[str, str, int] | None = None
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None
    with_out: bool = False
    twice: bool = False
    fault: str = ""

    def check(self) -> None:
        """Within a test: pass, fail with ``AssertionError``, or skip with the target's reason."""
        import pytest

        result = self.run()
        if result is None:
            pytest.skip("the op's own rules refuse this call")
        if result.outcome in ("decline", "skip"):
            pytest.skip(f"{result.outcome}: {result.detail}")
        assert result.outcome == "pass", f"{self.op}, {self.name}: {result.detail}"

    def run(self) -> Result | None:
        """Make the call and judge it."""
        if self.fault:
            return self._result("fail", self.fault)
        try:
            call, spec = self._call()
        except _InapplicableError:
            return None
        if self.twice:
            return self._build_twice(call, spec)
        try:
            return self._serve(call, spec)
        except _UnansweredError as error:
            return self._result("skip", f"the op's own definition raises {error}")

    def _result(self, outcome: str, detail: str) -> Result:
        return Result(self.op, self.name, outcome, detail)

    def _call(self) -> tuple[WorkloadCall, CallSpec]:
        assert self.cls is not None
        assert self.workload is not None
        try:
            workload = scaled(self.cls, self.workload, self.scale_to)
            if self.size is not None:
                workload = _resized(workload, *self.size)
            call = workload_inputs(self.cls, workload, self.device, target=self.target)
            if self.layout is not None:
                call = dataclasses.replace(call, inputs=dict(self._laid_out(call)))
            return call, call_spec(call.op, tuple(call.inputs.values()), None)[0]
        except (CheckError, ManifestError) as error:
            if self.varied:
                raise _InapplicableError from error
            raise

    def _laid_out(self, call: WorkloadCall) -> Iterator[tuple[str, torch.Tensor | None]]:
        assert self.layout is not None
        changed = False
        for item in call.op.entry.inputs:
            tensor = call.inputs[item.name]
            fixed = item.host or (item.contiguous and self.layout is _strided)
            if tensor is not None and tensor.ndim and tensor.numel() and not fixed:
                tensor, changed = self.layout(tensor), True
            yield item.name, tensor
        if not changed:
            raise _InapplicableError

    # -- through the op

    def _serve(self, call: WorkloadCall, spec: CallSpec) -> Result:
        before = _cloned(tuple(call.inputs.values()))
        exact = _exact(call, spec, before)
        more = {"out": _nan_like(spec)} if self.with_out else {}
        with recording() as events:
            try:
                result = _tuple(call(**more))
                second = None if spec.written or more else _tuple(call())
            except OpNotAvailableError as declined:
                return self._declined(declined, any(event.kind == "plan" for event in events))
            except Exception as error:  # noqa: BLE001  (whatever a vendor's code raises)
                return self._result("fail", _failure(error))
        problems, note = self._judge(call, spec, before, exact, result)
        if second is not None and _storages(result) & _storages(second):
            problems.append("two calls returned the same memory: outputs must be fresh")
        elif second is not None and not _equal(result, second):
            note += "; differs from run to run"
        return self._result("fail" if problems else "pass", "; ".join(problems) or note)

    def _declined(self, error: OpNotAvailableError, ran: bool) -> Result:
        if ran:
            return self._result("fail", f"declined at run, not at build: {error.reason}")
        if (error.op, error.target) != (self.op, self.target):
            named = f"OpNotAvailableError({error.op!r}, {error.target!r}, ...)"
            return self._result("fail", f"declined with {named} for {self.op!r}, {self.target!r}")
        return self._result("decline", error.reason)

    def _judge(
        self, call: WorkloadCall, spec: CallSpec, before: Tensors, exact: Tensors, result: Tensors
    ) -> tuple[list[str], str]:
        """What is wrong, and how close the values are."""
        entry = call.op.entry
        written = [i for i, item in enumerate(entry.inputs) if item.name in spec.written]
        inputs = tuple(call.inputs.values())
        problems = []
        for item, old, new in zip(entry.inputs, before, inputs, strict=True):
            if item.name not in spec.written and not _equal((old,), (new,)):
                problems.append(f"the kernel wrote its input '{item.name}'")
        names = [f"output '{output.name}'" for output in entry.outputs]
        given = list(result[: len(names)]) + [inputs[i] for i in written]
        names += [f"written input '{entry.inputs[i].name}'" for i in written]
        worst = 0.0
        for name, actual, wanted in zip(names, given, exact, strict=True):
            if (actual is None) != (wanted is None):
                problems.append(f"{name} is {'missing' if actual is None else 'not None'}")
            elif actual is not None and wanted is not None:
                found = compare(actual, wanted, entry.kind)
                worst = max(worst, found.worst)
                if not found.ok:
                    problems.append(f"{name}: {found.text}")
                if not actual.is_contiguous() and not name.startswith("written"):
                    problems.append(f"{name} is not contiguous")
        return problems, f"largest error {worst:.2g} of its tolerance"

    # -- through the builder

    def _build_twice(self, call: WorkloadCall, spec: CallSpec) -> Result | None:
        """Equal specs must give equal decisions and interchangeable kernels."""
        build = targets.builder_of(self.target, self.op)
        if build is None:  # BUILTIN, whose kernels are built another way
            return None
        inputs = tuple(call.inputs.values())
        answers: list[Tensors | str] = []
        for _ in range(2):
            try:
                kernel = build(*spec.inputs.values(), **vars(spec.params))
                answers += self._runs(kernel, inputs, call.op.entry.has_out)
            except OpNotAvailableError as error:
                answers.append(error.reason)
            except Exception as error:  # noqa: BLE001  (whatever a vendor's code raises)
                return self._result("fail", _failure(error))
        if all(isinstance(answer, str) for answer in answers):
            return self._result("decline", str(answers[0]))
        if any(isinstance(answer, str) for answer in answers):
            return self._result("fail", "of two builds of one spec, one served and one declined")
        first, repeated, other, _ = (a for a in answers if not isinstance(a, str))
        if not _equal(first, repeated):
            return self._result("pass", "differs from run to run, so builds cannot be compared")
        if not _equal(first, other):
            return self._result("fail", "two builds of one spec gave kernels with other results")
        return self._result("pass", "two builds of one spec give the same bits")

    @staticmethod
    def _runs(kernel: Callable[..., Any], inputs: Tensors, has_out: bool) -> list[Tensors]:
        """What two runs return and leave in their inputs: the second tells whether it repeats."""
        runs = []
        for _ in range(2):
            given = _cloned(inputs)
            results = _tuple(kernel(*given, *((None,) if has_out else ())))
            runs.append((*_cloned(results), *given))
        return runs


def _failure(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, KernelBuildError) or not isinstance(error, BackendError):
        text += " (a target declines a call by raising OpNotAvailableError from build_kernel)"
    return text


def _exact(call: WorkloadCall, spec: CallSpec, inputs: Tensors) -> Tensors:
    """Outputs, then new values of written inputs, on the CPU: in float64, or in float32 where the
    op's definition holds on to it (its error is then like that which a kernel is allowed)."""
    op = call.op
    params = {name: _on_cpu(value) for name, value in op._params.items()}
    fault = None
    for wide in (torch.float64, torch.float32):
        try:
            result = _tuple(type(op).decomposition(*_widened(inputs, wide), **params))
            break
        except Exception as error:  # noqa: BLE001  (any op's definition)
            fault = error
    else:
        raise _UnansweredError(f"{type(fault).__name__}: {fault}") from fault
    written = [item for item in op.entry.inputs if item.name in spec.written]
    outputs = result[: len(op.entry.outputs)]
    rest = list(result[len(op.entry.outputs) :])
    returned = {o.is_input: position for position, o in enumerate(op.entry.outputs) if o.is_input}
    values = [outputs[returned[i.name]] if i.name in returned else rest.pop(0) for i in written]
    return (*outputs, *values)


def _widened(inputs: Tensors, wide: torch.dtype) -> Tensors:
    return tuple(
        None if t is None else t.cpu().to(wide if t.is_floating_point() else t.dtype)
        for t in inputs
    )


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _tuple(result: Any) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def _cloned(tensors: Sequence[torch.Tensor | None]) -> Tensors:
    return tuple(None if t is None else t.detach().clone() for t in tensors)


def _nan_like(spec: CallSpec) -> torch.Tensor:
    (output,) = spec.outputs.values()
    assert output is not None
    filler = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    return filler.fill_(float("nan") if output.dtype.is_floating_point else 85)


def _storages(tensors: Tensors) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()}


def _equal(one: Tensors, other: Tensors) -> bool:
    """Bit for bit."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return len(one) == len(other) and all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(bits(a), bits(b)))
        for a, b in zip(one, other, strict=True)
    )
