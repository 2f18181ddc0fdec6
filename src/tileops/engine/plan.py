"""One eager call's plan: made once per set of facts, then looked up.

A plan holds what was decided: checks passed, target, kernel entry, how outputs are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from tileops.engine import record, targets
from tileops.engine.boundary.growth import Growth
from tileops.engine.boundary.hot import keep_hot
from tileops.engine.boundary.instances import OpState
from tileops.engine.build import built, is_built
from tileops.engine.decomposition import decomposition_kernels
from tileops.engine.errors import (
    BackendError,
    ColdCaptureError,
    KernelBuildError,
    OpNotAvailableError,
    TileopsError,
)
from tileops.engine.finish import finisher
from tileops.engine.kernel import CallSpec, Entry, Kernel, TensorSpec
from tileops.engine.manifest.entry import Branch
from tileops.engine.select import Selection, claimants, load_kernel, select
from tileops.engine.settings import settings

__all__ = [
    "LastCall",
    "Plan",
    "build_artifact",
    "call_spec",
    "choose",
    "external",
    "grown_call",
    "in_tree_kernels",
    "make_plan",
    "resolve_entry",
    "tuning",
]


@dataclass(frozen=True)
class LastCall:
    """What served a call: ``target`` and who decided it, ``kernel``, its ``build`` identity, and
    ``refused``: each other kernel (or a target that was wanted) with its reason."""

    target: str
    decided_by: str
    kernel: str
    build: tuple[Any, ...]
    refused: tuple[tuple[str, str], ...]
    call: CallSpec

    def __str__(self) -> str:
        lines = [f"{self.call}: target {self.target} (by {self.decided_by}), kernel {self.kernel}"]
        lines += [f"  refused {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


@dataclass(eq=False, slots=True)
class Plan:
    """``run(*inputs, [out])`` gives what the op returns."""

    run: Callable[..., Any]
    made: LastCall
    bare: Callable[..., Any]
    """The kernel's own run."""
    finish: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Makes of that what a call needs."""
    epoch: int = -1
    """Of the targets, when it was made."""
    context: str | None = None
    """The target that the context asked for."""
    exact: bool = True
    """It serves the sizes of its call and no others."""
    dims: Mapping[str, Any] = field(default_factory=dict)
    region: Any = ()
    """What the op's ``region`` gave, which the sizes along growing dims must give as well."""
    hot: Any = None
    """Its guard, once it has been found a second time."""

    @property
    def trusted(self) -> Callable[..., Any]:
        """``run`` without what is asked of the first result only, once that has passed: a foreign
        kernel's keeps the signature, a decomposition's is its own, compiled code is entered at once."""
        found = getattr(self.bare, "trusted", None) if self.exact else None
        return self.run if found is None else self.finish(found)

    def blamed(self, error: Exception) -> Exception:
        """An error of ``run``, which says whose kernel raised it where that is not ours."""
        if self.made.target != targets.BUILTIN and not isinstance(error, TileopsError):
            error.add_note(
                f"raised by target {self.made.target!r} while it served {self.made.call}"
            )
        return error


def _branch(cls: Any, inputs: tuple[Any, ...], op: Any, out: Any) -> Branch:
    """The side-effect branch of a call."""
    entry = cls.entry
    passed = frozenset(
        item.name for item, value in zip(entry.inputs, inputs, strict=True) if value is not None
    )
    env = op._params

    def true(expr: Any) -> bool:
        return expr is not None and bool(expr.evaluate(env, passed))

    return Branch(
        tuple(i.name for i in entry.inputs if true(i.mutated)),
        out is not None,
        tuple(o.name for o in entry.outputs if true(o.nullable)),
    )


def call_spec(
    op: Any, inputs: tuple[Any, ...], out: Any, checked: Any = None
) -> tuple[CallSpec, Branch]:
    """Check a call and give its facts. Raises ``CheckError`` before any work.

    ``checked``: what the op's signature gave, where the caller has asked it already.
    """
    cls = type(op)
    entry = cls.entry
    outputs, dims, device = checked or cls._signature(op, *inputs, out)
    if device is None:
        device = op._params.get("device") or torch.get_default_device()
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    branch = _branch(cls, inputs, op, out)
    written = frozenset(branch.writes) | (frozenset({"out"}) if branch.out else frozenset())

    def spec(name: str, tensor: torch.Tensor | None) -> TensorSpec | None:
        if tensor is None:
            return None
        if tensor.is_contiguous() or name in branch.writes:
            return TensorSpec.of(tensor)
        return TensorSpec.contiguous_of(tuple(tensor.shape), tensor.dtype, tensor.device)

    def out_spec(index: int, value: Any) -> TensorSpec | None:
        if value is None:
            return None
        if out is not None and entry.outputs[index].buffer:
            return TensorSpec.of(out)
        return TensorSpec.contiguous_of(tuple(value[0]), value[1], device)

    call = CallSpec(
        op=entry.name,
        params=SimpleNamespace(**op._params),
        dims=dims,
        inputs={i.name: spec(i.name, t) for i, t in zip(entry.inputs, inputs, strict=True)},
        outputs={o.name: out_spec(n, outputs[n]) for n, o in enumerate(entry.outputs)},
        device=targets.device_facts(device),
        written=written,
        key=repr(op),
    )  # fmt: skip
    return call, branch


def grown_call(op: Any, call: CallSpec, growth: Growth, sizes: Mapping[str, int]) -> CallSpec:
    """The facts of a call like ``call`` but for the sizes along growing dims."""
    given: list[torch.Tensor | None] = []
    for spec, names in zip(call.inputs.values(), growth.places, strict=True):
        if spec is not None:
            shape = [sizes.get(names.get(axis, ""), size) for axis, size in enumerate(spec.shape)]
            given.append(torch.empty(shape, dtype=spec.dtype, device="meta"))
        else:
            given.append(None)
    there = call_spec(op, tuple(given), None)[0]
    device = next(spec.device for spec in call.inputs.values() if spec is not None)

    def on(specs: Mapping[str, TensorSpec | None]) -> dict[str, TensorSpec | None]:
        return {name: s and replace(s, device=device) for name, s in specs.items()}

    return replace(call, dims=there.dims, inputs=on(there.inputs), outputs=on(there.outputs))


def _is_input(entry: Any) -> str:
    return next((o.is_input for o in entry.outputs if o.is_input), "")


def in_tree_kernels(cls: Any, device_type: str) -> list[type[Kernel]]:
    """The in-tree kernels of an op class for one device type, decomposition included."""
    interface = cls.kernel
    names = getattr(interface, device_type, ()) if interface is not None else ()
    kernels = [load_kernel(cls.kernel_package, name) for name in names]
    entry = cls.entry
    if cls.decomposition is not None:
        wanted = settings().cpu_kernel
        if wanted == "plain":
            kernels = [kernel for kernel in kernels if not kernel.compiles]
        pays = interface.compiled_from if interface is not None else None
        unless = interface.compiled_unless if interface is not None else None
        if wanted == "inductor" and entry.kind != "template":
            pays, unless = 0, None
        plain, inductor = decomposition_kernels(
            cls.decomposition, pays, entry.has_out, _is_input(entry), unless
        )
        beatable = all(kernel.general for kernel in kernels)
        if device_type == "cpu" and beatable and wanted != "plain" and entry.inputs:
            kernels.append(inductor)
        kernels.append(plain)
    return kernels


def resolve_entry(op: Any, call: CallSpec) -> tuple[Selection, Entry]:
    """The in-tree kernel and entry for a call, without building it."""
    selection = select(call, in_tree_kernels(type(op), call.device.type))
    return selection, selection.kernel.entry_for(call)


def _capturing(call: CallSpec) -> bool:
    return call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def choose(
    op: Any, call: CallSpec, state: OpState, inputs: tuple[Any, ...] | None
) -> tuple[Selection, Entry]:
    """The in-tree kernel and entry for a call: the fastest where tuning is asked for. Without
    ``inputs`` nothing is timed: a kept choice serves, or else the default."""
    wanted = tuning(state)
    if wanted == "off":
        return resolve_entry(op, call)
    from tileops.engine.tune import tuned

    kernels, refused = claimants(call, in_tree_kernels(type(op), call.device.type))
    timed = None if wanted == "stored" else inputs
    found = tuned(call, kernels, timed, type(op).entry.has_out)
    if found is None:
        return resolve_entry(op, call)
    kernel, entry, losers = found
    return Selection(kernel, (*refused, *losers)), entry


def tuning(state: OpState) -> str:
    """``off``, ``on`` or ``stored``."""
    return "on" if state.tune else settings().tune


def build_artifact(call: CallSpec, kernel: str, entry: Entry) -> Any:
    """What an entry builds, once in a process, on the call's device."""
    # A CUDA module is loaded into one device's context: another device builds its own.
    identity = (targets.BUILTIN, entry.identity, call.device.type, call.device.index)
    if _capturing(call) and not is_built(identity):
        raise ColdCaptureError(call.op)
    return built(identity, entry.build, op=call.op, target=targets.BUILTIN, kernel=kernel)


def _builtin(
    op: Any, call: CallSpec, decision: targets.Decision, state: OpState, inputs: Any
) -> Any:
    selection, entry = choose(op, call, state, None if _capturing(call) else inputs)
    try:
        artifact = build_artifact(call, selection.kernel.name, entry)
    except KernelBuildError as error:
        if not _lacks_triton(error):
            raise
        selection, entry, artifact = _without_triton(op, call, selection.kernel)
    refused = selection.refused
    run = artifact if entry.bind is None else entry.bind(artifact, call)
    if decision.skipped:
        refused = ((f"target {decision.skipped.split(':')[0]}", decision.skipped), *refused)
    made = LastCall(
        targets.BUILTIN, decision.by, selection.kernel.name, entry.identity, refused, call
    )
    return run, made


def _lacks_triton(error: KernelBuildError) -> bool:
    cause = error.__cause__
    return isinstance(cause, ModuleNotFoundError) and (cause.name or "").split(".")[0] == "triton"


def _without_triton(op: Any, call: CallSpec, first: type[Kernel]) -> tuple[Selection, Entry, Any]:
    """What serves where Triton is not installed and neither the cache nor a bundle has the code."""
    kernels, lacking = in_tree_kernels(type(op), call.device.type), [first]
    while True:
        selection = select(call, [kernel for kernel in kernels if kernel not in lacking])
        entry = selection.kernel.entry_for(call)
        try:
            artifact = build_artifact(call, selection.kernel.name, entry)
        except KernelBuildError as error:
            if not _lacks_triton(error):
                raise
            lacking.append(selection.kernel)
            continue
        reasons = tuple((kernel.name, "Triton is not installed") for kernel in lacking)
        return Selection(selection.kernel, (*reasons, *selection.refused)), entry, artifact


def external(op: Any, call: CallSpec, decision: targets.Decision) -> Any:
    """The run of a foreign target and what it is."""
    build_kernel = targets.builder_of(decision.target, call.op)
    assert build_kernel is not None
    specs = tuple(call.inputs.values())
    registration = targets.registration_of(decision.target, call.op)
    identity = (decision.target, registration, call.key, specs, call.written)
    if _capturing(call) and not is_built(identity):
        raise ColdCaptureError(call.op)

    def build() -> Any:
        kernel = build_kernel(*specs, **vars(call.params))
        if not callable(kernel):
            raise TypeError(f"build_kernel returned {type(kernel).__name__}, not a callable")
        return kernel

    name = getattr(build_kernel, "__qualname__", repr(build_kernel))
    kernel = built(identity, build, op=call.op, target=decision.target, kernel=name)
    made = LastCall(decision.target, decision.by, name, identity, (), call)
    return _verified(kernel, call, decision.target, type(op).entry), made


def _verified(kernel: Any, call: CallSpec, target: str, entry: Any) -> Callable[..., Any]:
    """Check the first result of a foreign kernel against the signature, then trust it."""
    alone = len(entry.outputs) == 1
    carried = "out" if "out" in call.written else _is_input(entry)
    written = carried in call.written
    place = len(call.inputs) if carried == "out" else [*call.inputs, ""].index(carried)
    checked = not entry.outputs

    def run(*args: Any) -> Any:
        nonlocal checked
        result = kernel(*args)
        if not checked:
            if written:
                _check_written(call, target, result, carried, args[place])
            else:
                _check_result(call, target, result, args)
            checked = True
            if not (alone and isinstance(result, tuple)):
                vars(run)["trusted"] = kernel  # see Plan.trusted
        return result[0] if alone and isinstance(result, tuple) else result

    return run


def _check_written(call: CallSpec, target: str, result: Any, name: str, given: Any) -> None:
    """Raises ``BackendError`` where a kernel returned what it should have written."""
    value = result[0] if isinstance(result, tuple) and len(result) == 1 else result
    if isinstance(value, torch.Tensor) and _storage(value) != _storage(given):
        raise BackendError(
            f"{call.op}: target {target!r} returned a new tensor instead of writing '{name}'"
        )


def _check_result(call: CallSpec, target: str, result: Any, args: tuple[Any, ...]) -> None:
    """Raises ``BackendError``, naming the target, where a result breaks the signature."""
    start = f"{call.op}: target {target!r}"
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(call.outputs):
        raise BackendError(f"{start} returned {len(results)} outputs, not {len(call.outputs)}")
    taken = {id_: "an input or a view of it" for id_ in map(_storage, args) if id_}
    for (name, spec), value in zip(call.outputs.items(), results, strict=True):
        if (value is None) != (spec is None):
            problem = "missing" if value is None else "not None"
            raise BackendError(f"{start}: output '{name}' is {problem}")
        if spec is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise BackendError(f"{start}: output '{name}' is a {type(value).__name__}, no tensor")
        facts = (tuple(value.shape), value.dtype, value.device.type, value.is_contiguous())
        if facts != (spec.shape, spec.dtype, spec.device.type, True):
            raise BackendError(
                f"{start}: output '{name}' is {value.dtype}{list(value.shape)} with strides "
                f"{list(value.stride())} on {value.device}; the signature says contiguous "
                f"{spec.dtype}{list(spec.shape)} on {spec.device}"
            )
        if value.requires_grad or value.is_neg():
            problem = "requires grad" if value.requires_grad else "is a lazily negated view"
            raise BackendError(
                f"{start}: output '{name}' {problem}; a kernel returns plain results"
            )
        storage = _storage(value)
        if storage in taken:
            raise BackendError(f"{start}: output '{name}' is {taken[storage]}")
        if storage:
            taken[storage] = f"output '{name}' or a view of it"


def _storage(tensor: torch.Tensor | None) -> int:
    """Where the memory of a tensor begins; 0 for none and for an empty one."""
    if tensor is None or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def _place(op: Any, facts: Any, arguments: tuple[Any, ...], dims: Any) -> tuple[Any, Any]:
    """Where the plan of a call stands, and the region that it is for: all facts of the call, or those
    that remain where the op grows."""
    grows = type(op).grows
    region = op.region(dims) if grows else None
    if region is None:
        return facts, ()
    seen = tuple(
        None
        if t is None
        else (t.dtype, t.device, t.is_contiguous(), t.data_ptr() & 15, t.is_neg(), t.is_conj())
        for t in arguments
    )
    fixed = tuple(size for name, size in dims.items() if name not in grows)
    return (facts[0], facts[1], seen, fixed, region), region


def make_plan(state: OpState, facts: Any, arguments: tuple[Any, ...]) -> Plan:
    """Check, decide, build, store. Nothing is stored when anything fails."""
    op = state.op
    cls = type(op)
    entry = cls.entry
    count = len(entry.inputs)
    inputs, out = arguments[:count], arguments[count] if entry.has_out else None
    checked = cls._signature(op, *inputs, out)
    dims = checked[1]
    place, region = _place(op, facts, arguments, dims)
    known = state.plans.get(place)
    if known is not None:
        state.sizes = tuple(dims[name] for name in cls.grows)
        keep_hot(state, known, arguments, cls._growth)
        return known
    call, branch = call_spec(op, inputs, out, checked)
    run, made = _meta(call) if call.device.type == "meta" else _serve(op, call, state, inputs)
    # A foreign kernel is built for exact sizes, and a tuned one was timed at them.
    exact = place is facts or made.target != targets.BUILTIN or tuning(state) != "off"
    finish = finisher(op, call, branch, arguments)
    plan = Plan(finish(run), made, run, finish, facts[0], facts[1], exact, dims, region)
    state.sizes = tuple(dims[name] for name in cls.grows)
    with state.lock:
        while len(state.plans) >= settings().plan_limit:
            state.plans.pop(next(iter(state.plans)))
        state.plans[facts if exact else place] = plan
    if record.listening():
        record.emit("plan", op=call.op, key=call.key, target=made.target, kernel=made.kernel,
                    decided_by=made.decided_by, refused=made.refused)  # fmt: skip
    return plan


def _meta(call: CallSpec) -> tuple[Callable[..., Any], LastCall]:
    """Meta tensors return at the fake: shapes only, nothing decided, nothing built."""
    specs = list(call.outputs.values())

    def run(*args: Any) -> Any:
        if call.written and "out" in call.written:
            return None
        results = tuple(
            None if s is None else torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs
        )
        return results[0] if len(results) == 1 else (results or None)

    return run, LastCall("meta", "device", "fake", (), (), call)


def _serve(op: Any, call: CallSpec, state: OpState, inputs: tuple[Any, ...]) -> Any:
    device = next(
        (s.device for s in (*call.outputs.values(), *call.inputs.values()) if s is not None),
        torch.device("cpu"),
    )
    decision = targets.decide(call.op, op.target, device)
    if decision.target != targets.BUILTIN:
        try:
            return external(op, call, decision)
        except OpNotAvailableError as declined:
            if decision.by == "op":
                raise
            decision = targets.skip(call.op, decision.target, decision.by, declined.reason)
    return _builtin(op, call, decision, state, inputs)
