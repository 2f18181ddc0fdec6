"""The base class of every op."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tileops.engine import targets
from tileops.engine.asked import noted
from tileops.engine.boundary.autocast import cast_inputs
from tileops.engine.boundary.batching import takes_a_batch
from tileops.engine.boundary.gate import direct
from tileops.engine.boundary.generate import MISSING_ARGUMENT, Boundary, make_calls
from tileops.engine.boundary.growth import Growth, growth_of
from tileops.engine.boundary.instances import OpState, state_of
from tileops.engine.boundary.owners import claim
from tileops.engine.boundary.refusals import refuse_superfluous, refuse_without_storage
from tileops.engine.boundary.stamp import operator_key
from tileops.engine.content import check_content
from tileops.engine.errors import CheckError, ImmutableOpError, ManifestError
from tileops.engine.gradient import gradient_of
from tileops.engine.kernel import CallSpec, Kernel, KernelInterface, TensorSpec
from tileops.engine.manifest.catalog import family_file, load_family
from tileops.engine.manifest.entry import Entry, Param
from tileops.engine.plan import (
    LastCall,
    Plan,
    call_spec,
    grown_call,
    in_tree_kernels,
    make_plan,
    resolve_entry,
)
from tileops.engine.roofline import Roofline, roofline_of
from tileops.engine.settings import settings
from tileops.engine.signature.construction import make_constructor_check
from tileops.engine.signature.generate import make_signature
from tileops.engine.signature.params import bind_params, key_of

if TYPE_CHECKING:
    from tileops.engine.prepare import Prepared

__all__ = ["Op"]


def _plan(state: OpState, facts: Any, arguments: tuple[Any, ...]) -> Plan:
    plan = make_plan(state, facts, arguments)
    if settings().validate_inputs:
        state.forget()  # what index inputs hold is a fact of each call
        check_content(state.op, plan.made.call, arguments)
    return plan


class Op:
    """An operator as an immutable object: parameters at construction, tensors at the call.

    A subclass has one manifest entry of its name, a ``decomposition`` (static, pure PyTorch:
    ``decomposition(<inputs>, **params)`` returns the outputs, then the new value of each written
    input that is not itself an output) and a ``kernel`` slot. A composition or an op without
    call-time tensors may write ``forward`` instead, and ``setup`` to make its sub-ops.

    Every constructor also takes keyword-only ``target=None``: the name of the target that must
    serve this op. Raises ``CheckError`` for parameters outside the entry and
    ``UnknownTargetError``.
    """

    entry: ClassVar[Entry]
    """The class's manifest entry."""
    compile_op_names: ClassVar[tuple[str, ...]] = ()
    """The torch operators of the class, one per side-effect branch; () when it has no boundary."""
    kernel: ClassVar[KernelInterface | None] = None
    decomposition: ClassVar[Callable[..., Any] | None] = None
    grows: ClassVar[tuple[str, ...]] = ()
    """Dims whose sizes calls need not share to share a plan, such as a sequence's length: every kernel
    of the class reads them from the tensors it is given. See ``region``."""
    random: ClassVar[bool] = False
    """A call may draw from torch's generator, so two equal calls are not one."""
    kernel_package: ClassVar[str]
    _boundary: ClassVar[Boundary]
    _growth: ClassVar[Growth | None]
    _signature: ClassVar[Callable[..., Any]]
    _check_params: ClassVar[Callable[[dict[str, Any]], None]]

    _params: dict[str, Any]
    _text: str
    _instance_key: str
    """``_text`` as it stands in graphs: see ``stamp``."""
    _state: OpState
    target: str | None

    def __init_subclass__(cls, entry: Entry | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        module = sys.modules[cls.__module__]
        cls.entry = entry or _entry_of(cls, module)
        taken = sorted({param.name for param in cls.entry.params} & set(dir(Op)))
        if taken:
            raise ManifestError(
                cls.entry.where,
                cls.__name__,
                f"parameter '{taken[0]}' has the name of a member of Op",
            )
        owner = claim(cls, cls.entry)
        cls.kernel_package = module.__name__.rpartition(".")[0]
        cls._signature = staticmethod(make_signature(cls.entry, owner.suffix))
        cls._check_params = staticmethod(make_constructor_check(cls.entry))
        if "__init__" not in cls.__dict__:
            _give_constructor(cls)
        regions = cls.region is not Op.region
        cls._growth = growth_of(cls.entry, tuple(cls.grows), regions, owner.suffix)
        cls._boundary = make_calls(
            cls, cls.entry, owner, _plan, targets.epoch, targets.context_target, gradient_of
        )
        cls.compile_op_names = tuple(o.name for o in cls._boundary.operators)

    def __init__(self, *args: Any, target: str | None = None, **kwargs: Any) -> None:
        self._construct(args, {**kwargs, "target": target})

    # -- construction ---------------------------------------------------------------------------

    def _construct(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = kwargs.pop("target", None)
        params = bind_params(type(self).entry, args, kwargs)
        type(self)._check_params(params)
        if target is not None:
            target = targets.check_target(target)
        text, canonical = key_of(type(self).__name__, params, target)
        self._settle(params, target, text, canonical)

    def _settle(
        self, params: dict[str, Any], target: str | None, text: str, canonical: bool
    ) -> None:
        own = self.__dict__
        own.update(params)
        key = operator_key(type(self), text)
        own.update(_params=params, target=target, _text=text, _instance_key=key)
        self.setup()

        def twin() -> Op:
            # The op that shared work runs on. Not self: the state must not keep its users alive. And
            # without the state: the two would be a cycle.
            other = object.__new__(type(self))
            other.__dict__.update(own)
            return other

        own["_state"] = state_of(type(self), key, canonical, twin)

    def setup(self) -> None:
        """Hook of a subclass: derive constants or sub-ops from the parameters with ``settle``."""

    def region(self, dims: Mapping[str, Any]) -> Hashable | None:
        """Hook of a subclass that ``grows``: calls share a plan where this agrees, and all that a
        kernel's ``refuses``, ``entry_for`` and ``bind`` branch on must be in it. None: not this call."""
        return ()

    def batched(self, ranks: Mapping[str, int]) -> Op | None:
        """Hook: the op that does along a new first axis, slice by slice, what this one does; ``ranks``:
        dims of each passed input of a slice. None: ``vmap`` calls this op for each slice."""
        return self if takes_a_batch(self.entry) and not self.random else None

    @property
    def draws(self) -> bool:
        """Whether a call takes numbers from torch's generator."""
        return self.random

    def settle(self, **attributes: Any) -> None:
        """Set attributes during ``setup``; afterwards an op is immutable."""
        if "_state" in self.__dict__:
            raise ImmutableOpError(type(self).__name__, next(iter(attributes), ""))
        self.__dict__.update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ImmutableOpError(type(self).__name__, name)

    def __delattr__(self, name: str) -> None:
        raise ImmutableOpError(type(self).__name__, name)

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._instance_key == other._instance_key

    def __hash__(self) -> int:
        return hash(self._instance_key)

    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self  # immutable, and equal ops share all state

    def __reduce__(self) -> tuple[Any, ...]:
        params = dict(self._params)
        if self.target is not None:
            params["target"] = self.target
        return (_reconstruct, (type(self), params))

    # -- calls ----------------------------------------------------------------------------------

    __call__: Callable[..., Any]
    _call_boundary: Callable[..., Any]
    _run: ClassVar[Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a call means: the slot for an op with a boundary; the decomposition for an op
        without call-time tensors; a composition writes its own."""
        entry = self.entry
        if entry.composition:
            raise NotImplementedError(f"{entry.name}: a composition must define forward")
        if entry.inputs:
            return self(*args, **kwargs)
        if not torch.compiler.is_dynamo_compiling() and direct():
            device = self._params.get("device") or torch.get_default_device()
            if getattr(type(self).kernel, device.type, ()):
                return self._generated(device)
        decomposition = type(self).decomposition
        assert decomposition is not None
        return decomposition(**self._params)

    def _generated(self, device: torch.device) -> Any:
        """The call of an op without call-time tensors where it has kernels of its own."""
        state = self._state
        index = torch.cuda.current_device() if device.index is None else device.index
        facts = (targets.epoch.now, targets.context_target(), device.type, index)
        plan = state.plans.get(facts) or _plan(state, facts, ())
        state.last = plan
        return plan.run()

    def _call_checked(
        self, extra: tuple[Any, ...], unknown: dict[str, Any], arguments: tuple[Any, ...]
    ) -> Any:
        """The careful path: faults are named; modes, transforms, gradients and subclasses go
        through the operator; ops without a boundary run here."""
        if extra or unknown:
            refuse_superfluous(self, extra, unknown)
        entry = self.entry
        arguments = tuple(None if a is MISSING_ARGUMENT else a for a in arguments)
        count = len(entry.inputs)
        inputs, out = arguments[:count], arguments[count] if entry.has_out else None
        names = [*(i.name for i in entry.inputs), *(["out"] if entry.has_out else [])]
        refuse_without_storage(type(self), dict(zip(names, (*inputs, out), strict=False)))
        for item, value in zip(entry.inputs, inputs, strict=True):
            if not isinstance(value, torch.Tensor) and not (value is None and item.optional):
                type(self)._signature(self, *inputs, out)  # raises
        if out is not None and not isinstance(out, torch.Tensor):
            type(self)._signature(self, *inputs, out)
        if entry.has_boundary:
            return self._call_boundary(**dict(zip(names, arguments, strict=True)))
        if entry.composition:
            return self._call_stages(inputs, out)
        state = self._state
        if torch.compiler.is_compiling() or noted(state):
            return self.forward()  # an exporter that runs this sees what Dynamo sees: plain PyTorch
        facts = (targets.epoch.now, targets.context_target(), torch.get_default_device())
        plan = state.plans.get(facts) or _plan(state, facts, ())
        state.last = plan
        return plan.run()

    def _call_stages(self, inputs: tuple[Any, ...], out: Any) -> Any:
        """A composition checks its whole signature, since its stages would check less, and is cast
        as a whole: stages that autocast casts one by one would not fit together."""
        device = next((t.device.type for t in inputs if isinstance(t, torch.Tensor)), "cpu")
        if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
            return self._run_stages(inputs, out)
        writes = out is not None or any(item.mutated is not None for item in self.entry.inputs)
        given = inputs if writes else cast_inputs(self, inputs, device)
        with torch.autocast(device, enabled=False):
            return self._run_stages(given, out)

    def _run_stages(self, inputs: tuple[Any, ...], out: Any) -> Any:
        type(self)._signature(self, *inputs, out)
        entry = self.entry
        named = dict(zip([item.name for item in entry.inputs], inputs, strict=True))
        return self.forward(**named, **({"out": out} if entry.has_out else {}))

    @classmethod
    def backward_class(cls) -> type[Op] | None:
        """The class of the op that computes this one's gradient: what the entry names, else derived
        from the decomposition. None where no gradient flows."""
        gradient = gradient_of(cls)
        return None if gradient is None else gradient.cls

    def compile(self, **kwargs: Any) -> Callable[..., Any]:
        """``torch.compile`` of this op alone, with a frame of its own.

        Ops compiled one by one as ``torch.compile(op)`` share their class's frame and with it one
        recompile limit. ``kwargs`` go to ``torch.compile``. Compiling a function that uses many
        ops is the normal way.
        """

        def call(*args: Any, **named: Any) -> Any:
            return self(*args, **named)

        own = types.FunctionType(
            call.__code__.replace(), call.__globals__, type(self).__name__, None, call.__closure__
        )
        return torch.compile(own, **kwargs)

    # -- what served, what would serve, what it costs ------------------------------------------------

    @property
    def last_call(self) -> LastCall | None:
        """What served the last call of this op or of an equal one, None before the first."""
        state = self._state
        plan, growth = state.last, type(self)._growth
        if plan is None or growth is None or plan.exact:
            return None if plan is None else plan.made
        grown = dict(zip(growth.names, state.sizes, strict=True))
        if all(plan.dims[name] == size for name, size in grown.items()):
            return plan.made
        return replace(plan.made, call=grown_call(self, plan.made.call, growth, grown))

    @property
    def serving_target(self) -> str | None:
        """The target of the last call, None before the first."""
        last = self.last_call
        return None if last is None else last.target

    def request_tune(self) -> None:
        """Time all candidate kernels at the next call of each shape and keep the fastest, in this
        process and in the kernel cache; a choice that is kept there already is used untimed.

        Never inside a CUDA graph capture. Plans made before are dropped.
        """
        with self._state.lock:
            self._state.tune = True
            self._state.forget()

    def prepare(
        self,
        *specs: TensorSpec | torch.Tensor | None,
        out: TensorSpec | torch.Tensor | None = None,
        device: str | torch.device | None = None,
        jobs: int | None = None,
        **named: TensorSpec | torch.Tensor | None,
    ) -> Prepared:
        """Build every kernel that a call with such inputs would use, without calling.

        Inputs in call order or by name: ``tileops.spec(...)``, or tensors, of which shape, strides
        and dtype count; None for one that is omitted. ``device``: where the call will be: a torch
        device, ``"cuda:sm_90"`` (or ``"cuda:sm_90:114"``, with that many multiprocessors) for a card
        that need not be here, or None for the current one. On a device that is here the kernels are
        loaded too, so that a first call may be captured into a CUDA graph. ``jobs``: processes that
        compile. Raises ``CheckError`` for what the call would refuse, and ``KernelBuildError``.
        """
        from tileops.engine.prepare import prepare_op

        return prepare_op(self, specs, named, out, device, jobs)

    def _spec(self, arguments: tuple[Any, ...]) -> CallSpec:
        if not arguments and (self.entry.inputs or self._state.last is not None):
            last = self.last_call
            if last is None:
                raise CheckError(type(self).__name__, self.entry.inputs[0].name, "no call yet",
                                 "inputs here, or a call before")  # fmt: skip
            return last.call
        tensors = tuple(
            torch.empty_strided(a.shape, a.strides, dtype=a.dtype, device=a.device)
            if isinstance(a, TensorSpec)
            else a
            for a in arguments
        )
        padded = tensors + (None,) * (len(self.entry.inputs) - len(tensors))
        return call_spec(self, padded, None)[0]

    def iter_kernels(self, device_type: str = "cuda") -> Iterator[type[Kernel]]:
        """The in-tree kernels of this op for a device type."""
        yield from in_tree_kernels(type(self), device_type)

    def kernel_config(self, *inputs: Any) -> tuple[Any, ...]:
        """The build identity that serves ``inputs`` in tree (the last call's without inputs)."""
        last = self.last_call
        if not inputs and last is not None:
            return last.build
        return resolve_entry(self, self._spec(inputs))[1].identity

    def roofline_data_terms(self, *inputs: Any) -> Roofline:
        """Operations and bytes of a call with ``inputs`` (of the last call without)."""
        return roofline_of(self.entry, self._spec(inputs))

    def eval_roofline(self, *inputs: Any) -> tuple[int, int]:
        """``(flops, bytes moved)`` of a call: every byte read and written once."""
        terms = self.roofline_data_terms(*inputs)
        return terms.flops, terms.read_bytes + terms.write_bytes

    def eval_roofline_read_bytes(self, *inputs: Any) -> int:
        """Bytes that a call must read."""
        return self.roofline_data_terms(*inputs).read_bytes

    def roof_key(self, *inputs: Any) -> tuple[str, str]:
        """Which roof bounds the call: ``(kind of op, dtype of its first tensor)``."""
        call = self._spec(inputs)
        spec = next(s for s in (*call.inputs.values(), *call.outputs.values()) if s is not None)
        return self.entry.kind, str(spec.dtype).removeprefix("torch.")


def _entry_of(cls: type[Op], module: types.ModuleType) -> Entry:
    path = family_file(getattr(module, "__file__", None) or "")
    if path is None:
        raise ManifestError(
            f"{getattr(module, '__file__', cls.__module__)}:1",
            cls.__name__,
            "no manifest.yaml beside the module or in the packages above it; an op class needs "
            "an entry of its name there",
        )
    entries = load_family(path)
    if cls.__name__ not in entries:
        raise ManifestError(f"{path}:1", cls.__name__, "the file has no entry of this name")
    return entries[cls.__name__]


def _reconstruct(cls: type[Op], params: dict[str, Any]) -> Op:
    return cls(**params)


def _give_constructor(cls: type[Op]) -> None:
    """The constructor an entry implies, with a signature a reader can use."""

    def construct(self: Op, *args: Any, **kwargs: Any) -> None:
        self._construct(args, kwargs)

    construct.__name__ = "__init__"
    construct.__qualname__ = f"{cls.__qualname__}.__init__"
    construct.__signature__ = constructor_signature(cls.entry)  # type: ignore[attr-defined]
    cls.__init__ = construct  # type: ignore[method-assign]


def constructor_signature(entry: Entry) -> inspect.Signature:
    """``(self, <params>, *, <keyword params>, target=None)``."""

    def parameter(param: Param, kind: Any) -> inspect.Parameter:
        from tileops.engine.manifest.entry import MISSING

        default = inspect.Parameter.empty if param.default is MISSING else param.default
        return inspect.Parameter(param.name, kind, default=default)

    parts = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parts += [
        parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in entry.params if not p.kw_only
    ]
    parts += [parameter(p, inspect.Parameter.KEYWORD_ONLY) for p in entry.params if p.kw_only]
    parts.append(inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature(parts)
