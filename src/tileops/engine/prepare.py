"""Kernels from shapes alone: what a call would use is found, compiled and kept before it is made."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tileops.engine import targets
from tileops.engine.asked import Build, asked_by
from tileops.engine.boundary.instances import OpState
from tileops.engine.cache.sources import UnknownSourceError
from tileops.engine.errors import BackendError, CheckError, KernelBuildError
from tileops.engine.kernel import CallSpec, TensorSpec
from tileops.engine.places import Place, place_of
from tileops.engine.plan import build_artifact, call_spec, choose, external
from tileops.engine.settings import settings
from tileops.engine.workers import Outcome, compile_all

__all__ = ["Prepared", "PreparedKernel", "Request", "compile_requests", "prepare_op", "request_for"]


_META = torch.device("meta")


@dataclass(frozen=True)
class PreparedKernel:
    """One kernel that a prepared call uses."""

    op: str
    """The op's key."""
    kernel: str
    """The kernel that serves the call."""
    function: str = ""
    """Its device function, ``package.module:function``; '' where it has none of ours."""
    arch: str = ""
    key: str | None = None
    """Its name in the cache."""
    origin: str = ""
    """``made`` (compiled now), ``disk`` or ``bundle``; '' where there is nothing to compile."""
    seconds: float = 0.0
    registers: int = 0
    """Of a thread."""
    stack: int = 0
    """Bytes that a thread spills or indexes in local memory."""
    note: str = ""
    """Why there is nothing to compile."""


@dataclass(frozen=True)
class Prepared:
    """What was prepared. ``str()`` of it is a table."""

    device: str
    kernels: tuple[PreparedKernel, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """Kernels that were compiled now."""
        return len({k.key or k for k in self.kernels if k.origin == "made"})

    @property
    def found(self) -> int:
        """Kernels that a cache or a bundle had."""
        return len({k.key for k in self.kernels if k.origin in ("disk", "bundle")})

    @property
    def spilling(self) -> tuple[PreparedKernel, ...]:
        """Kernels whose threads need local memory."""
        return tuple(k for k in self.kernels if k.stack)

    @property
    def keys(self) -> frozenset[str]:
        """The names of the kernels in the cache."""
        return frozenset(k.key for k in self.kernels if k.key is not None)

    def __str__(self) -> str:
        rows = []
        for one in self.kernels:
            if one.note:
                rows.append(f"{one.op}  {one.kernel}: {one.note}")
            else:
                spills = f", {one.stack} bytes spilled" if one.stack else ""
                rows.append(
                    f"{one.op}  {one.kernel}: {one.function.partition(':')[2]}, "
                    f"{one.registers} registers{spills}, {_ORIGINS[one.origin]}"
                    f"{f' in {one.seconds:.2f} s' if one.origin == 'made' else ''}"
                )
        counts = f"{self.compiled} compiled, {self.found} found"
        if self.spilling:
            counts += f", {len(self.spilling)} with spills"
        return "\n".join([*rows, f"{self.device}: {counts} in {self.seconds:.2f} s"])


_ORIGINS = {"made": "compiled", "disk": "found in the cache", "bundle": "found in a bundle"}


@dataclass
class Request:
    """One call of one op, on one device."""

    op: Any
    call: CallSpec
    kernel: str
    builds: Sequence[Build]
    load: Callable[[], Any] | None
    """Makes the artifact on a device that is here."""
    note: str = ""
    codes: list[Outcome] = field(default_factory=list)


# ---- from specs to requests --------------------------------------------------------------------------


def _meta(spec: Any, host: bool, op: str, name: str) -> torch.Tensor:
    """A tensor without data. An input that stays on the host is a real one: its device is checked."""
    if isinstance(spec, TensorSpec):
        shape, strides, dtype = spec.shape, spec.strides, spec.dtype
    elif isinstance(spec, torch.Tensor):
        shape, strides, dtype = tuple(spec.shape), tuple(spec.stride()), spec.dtype
    else:
        raise CheckError(op, name, type(spec).__name__, "a TensorSpec, a tensor or None")
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu" if host else "meta")


def _aligned(spec: Any) -> bool:
    if isinstance(spec, TensorSpec):
        return spec.aligned
    real = type(spec) in (torch.Tensor, torch.nn.Parameter) and spec.device.type != "meta"
    return not real or spec.data_ptr() % 16 == 0


def _bound(entry: Any, specs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Each input's spec by name, None where it is not given. Raises ``CheckError``."""
    names = [item.name for item in entry.positional_inputs]
    every = [item.name for item in entry.inputs]
    if len(specs) > len(names):
        raise CheckError(entry.name, f"positional {len(names) + 1}", type(specs[len(names)]).__name__,
                         f"{len(names)} positional arguments, of {', '.join(every)}")  # fmt: skip
    given = dict(zip(names, specs, strict=False))
    for name, spec in named.items():
        if name not in every or name in given:
            raise CheckError(
                entry.name, name, type(spec).__name__, f"inputs {', '.join(every)}, once each"
            )
        given[name] = spec
    return {name: given.get(name) for name in every}


def request_for(
    state: OpState, specs: Sequence[Any], named: Mapping[str, Any], out: Any, place: Place
) -> Request:
    """What a call with such inputs would use on ``place``, or where the op's own ``device`` is of another
    type, there. Raises ``CheckError`` before any work."""
    op = state.op
    entry = type(op).entry
    wanted = None if entry.inputs else op._params.get("device")
    if wanted is not None and wanted.type != place.device.type:
        place = place_of(wanted)
    if out is not None and not entry.has_out:
        raise CheckError(entry.name, "out", type(out).__name__, "nothing: it has no such buffer")
    given = _bound(entry, specs, named)
    host = {item.name for item in entry.inputs if item.host}
    inputs = tuple(
        None if spec is None else _meta(spec, name in host, entry.name, name)
        for name, spec in given.items()
    )
    buffer = None if out is None else _meta(out, False, entry.name, "out")
    outputs, dims, device = type(op)._signature(op, *inputs, buffer)
    call, _ = call_spec(op, inputs, buffer, (outputs, dims, device or _META))

    def there(name: str, spec: TensorSpec | None) -> TensorSpec | None:
        if spec is None or name in host:
            return spec
        original = given.get(name, out)
        kept = name in call.written or name not in given or inputs_contiguous[name]
        return replace(
            spec, device=place.device, aligned=not kept or original is None or _aligned(original)
        )

    inputs_contiguous = {
        name: tensor is not None and tensor.is_contiguous()
        for name, tensor in zip(given, inputs, strict=True)
    }
    call = replace(
        call,
        inputs={name: there(name, spec) for name, spec in call.inputs.items()},
        outputs={
            name: spec and replace(spec, device=place.device) for name, spec in call.outputs.items()
        },
        device=place.facts,
    )
    return _decided(state, call, place)


def _decided(state: OpState, call: CallSpec, place: Place) -> Request:
    op = state.op
    decision = targets.decide(call.op, op.target, place.device)
    if decision.target != targets.BUILTIN:
        note = f"target {decision.target!r} builds it"
        if place.present:
            load: Callable[[], Any] = partial(external, op, call, decision)
            return Request(op, call, decision.target, (), load, note)
        return Request(op, call, decision.target, (), None, note + " at the first call")
    selection, entry = choose(op, call, state, None)
    name = selection.kernel.name
    builds: Sequence[Build] = ()
    if call.device.type == "cuda" and not settings().triton_interpret:
        try:
            builds = asked_by(entry.build)
        except UnknownSourceError as unseen:
            raise KernelBuildError(call.op, targets.BUILTIN, name, str(unseen)) from unseen
    note = "" if builds else "nothing to compile: torch's own kernels"
    if name == "inductor":
        note = "compiled at the first call"
    here = partial(build_artifact, call, name, entry) if place.present else None
    return Request(op, call, name, builds, here, note)


# ---- from requests to machine code ---------------------------------------------------------------------


class _Progress:
    """A bar on a terminal, one line at the end elsewhere; on standard error."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.count, self.shown = total, 0, shown and total > 0
        self.bar = self.shown and sys.stderr.isatty()
        self._begin = time.perf_counter()
        self._lock = threading.Lock()
        self._show()

    def step(self) -> None:
        with self._lock:
            self.count += 1
            self._show()

    def _show(self) -> None:
        if self.bar:
            filled = 24 * self.count // self.total
            bar = "#" * filled + "." * (24 - filled)
            sys.stderr.write(f"\rtileops: [{bar}] {self.count}/{self.total} kernels")
            sys.stderr.flush()

    def close(self) -> None:
        if self.bar:
            sys.stderr.write("\r\033[K")
        if self.shown:
            seconds = time.perf_counter() - self._begin
            sys.stderr.write(f"tileops: {self.count} kernels compiled in {seconds:.1f} s\n")
            sys.stderr.flush()


def compile_requests(
    requests: Sequence[Request], place: Place, jobs: int | None, progress: bool
) -> Prepared:
    """Compile what no cache has, each kernel once, and load all of it where the device is here.

    Raises ``KernelBuildError`` for the first kernel that failed, when all others are done, and
    ``ValueError`` for fewer than one job.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs}: accepted is at least 1")
    begin = time.perf_counter()
    arch = place.facts.arch
    slots: dict[Any, list[tuple[Request, int]]] = {}
    distinct: list[Build] = []
    for request in requests:
        request.codes = [None] * len(request.builds)
        for index, build in enumerate(request.builds):
            try:
                key: Any = build.key_for(arch)
            except UnknownSourceError:
                key = build
            if key not in slots:
                distinct.append(build)
            slots.setdefault(key, []).append((request, index))
    outcomes: dict[int, Outcome] = {
        n: build.code_for(arch, False) for n, build in enumerate(distinct)
    }
    missing = [n for n, outcome in outcomes.items() if outcome is None]
    bar = _Progress(len(missing), progress)

    def done(index: int, outcome: Outcome) -> None:
        outcomes[missing[index]] = outcome
        bar.step()

    try:
        processes = settings().jobs if jobs is None else jobs
        compile_all([(distinct[n], arch) for n in missing], processes, done)
    finally:
        bar.close()
    for n, users in enumerate(slots.values()):
        for request, index in users:
            request.codes[index] = outcomes[n]
    _raise_first(requests)
    for request in requests:
        if request.load is not None:
            there = request.call.device
            with torch.cuda.device(there.index) if there.type == "cuda" else nullcontext():
                request.load()
    rows = [row for request in requests for row in _rows(request)]
    return Prepared(str(place), tuple(dict.fromkeys(rows)), time.perf_counter() - begin)


def _raise_first(requests: Sequence[Request]) -> None:
    for request in requests:
        for outcome in request.codes:
            if isinstance(outcome, BackendError):
                raise outcome
            if isinstance(outcome, Exception):
                problem = f"{type(outcome).__name__}: {outcome}"
                raise KernelBuildError(
                    request.call.op, targets.BUILTIN, request.kernel, problem
                ) from outcome


def _rows(request: Request) -> list[PreparedKernel]:
    if request.note:
        return [PreparedKernel(request.call.key, request.kernel, note=request.note)]
    return [
        PreparedKernel(
            request.call.key,
            request.kernel,
            build.fn,
            request.call.device.arch_name,
            code.key,
            code.origin,
            code.seconds,
            code.registers,
            code.stack,
        )
        for build, code in zip(request.builds, request.codes, strict=True)
    ]


def prepare_op(
    op: Any, specs: Sequence[Any], named: Mapping[str, Any], out: Any, device: Any, jobs: int | None
) -> Prepared:
    """``Op.prepare``."""
    place, entry = place_of(device), type(op).entry
    if entry.composition:
        from tileops.engine.trace import prepare

        given = named if out is None else {**named, "out": out}
        return prepare(op, *specs, device=device, jobs=jobs, progress=False, **given)
    return compile_requests([request_for(op._state, specs, named, out, place)], place, jobs, False)
