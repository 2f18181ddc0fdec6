"""An entry's workloads as calls: an op and its input tensors.

The one maker of inputs from workloads, for the validator, tests and benchmarks. What integers must
hold beyond their bounds (offsets that ascend, slots that differ) only the class knows: it may
define ``fill_workload(self, inputs)``, which rewrites the made tensors in place, by input name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tileops.engine.errors import CheckError, ManifestError
from tileops.engine.manifest.entry import Entry, Input, Workload
from tileops.engine.manifest.expr import Expr
from tileops.engine.op import Op
from tileops.engine.signature.runtime import DTYPE_VALUES

__all__ = ["WorkloadCall", "presence_of", "scaled", "workload_inputs"]


@dataclass(frozen=True)
class WorkloadCall:
    """One call: ``inputs`` by name in manifest order, None where absent; ``workload`` as made (its
    sizes are smaller than declared where ``scale_to`` was given)."""

    op: Any
    workload: Workload
    inputs: Mapping[str, torch.Tensor | None]

    @property
    def args(self) -> tuple[torch.Tensor | None, ...]:
        """What is passed by position."""
        return tuple(self.inputs[item.name] for item in self.op.entry.positional_inputs)

    @property
    def kwargs(self) -> dict[str, torch.Tensor | None]:
        """What is passed by keyword."""
        return {i.name: self.inputs[i.name] for i in self.op.entry.inputs if i.kw_only}

    def __call__(self, **more: Any) -> Any:
        """Call the op; ``out=`` may be added."""
        return self.op(*self.args, **self.kwargs, **more)


def workload_inputs(
    op_cls: type[Op],
    workload: Workload,
    device: torch.device | str = "cpu",
    fake: Any = None,
    *,
    scale_to: int | None = None,
    target: str | None = None,
    seed: int = 0,
) -> WorkloadCall:
    """The op and the inputs of one workload of its entry.

    Floats are normal, integers lie within the input's ``content``; equal seeds give equal tensors.
    ``fake``: a ``FakeTensorMode`` that the tensors are made in. ``scale_to``: the most elements a
    tensor should have; see ``scaled``. Raises ``ManifestError`` where the workload does not say
    what is needed, ``CheckError`` where it breaks the op's parameters.
    """
    if scale_to is not None:
        workload = scaled(op_cls, workload, scale_to)
    op = op_cls(**workload.params, target=target)
    make = _Maker(op, workload, torch.device(device), fake, seed)
    inputs = make.inputs()
    fill = getattr(op, "fill_workload", None)
    if fill is not None and fake is None and make.device.type != "meta":
        fill(inputs)
    return WorkloadCall(op, workload, inputs)


def presence_of(entry: Entry, workload: Workload, params: Mapping[str, Any]) -> frozenset[str]:
    """The inputs that a workload passes: required, named, or passed by their condition."""
    passed = {i.name for i in entry.inputs if not i.optional}
    passed |= {i.name for i in entry.inputs if i.passed_when is None and i.name in workload.passed}
    conditional = [item for item in entry.inputs if item.passed_when is not None]
    for _ in conditional:  # a condition may ask for the presence of another such input
        for item in conditional:
            assert item.passed_when is not None
            if item.passed_when.evaluate({**DTYPE_VALUES, **params}, frozenset(passed)):
                passed.add(item.name)
    return frozenset(passed)


class _Maker:
    def __init__(
        self, op: Any, workload: Workload, device: torch.device, fake: Any, seed: int
    ) -> None:
        self.op, self.entry, self.workload = op, op.entry, workload
        self.device, self.fake, self.seed = device, fake, seed
        self.passed = presence_of(self.entry, workload, op._params)
        self.env: dict[str, Any] = {**DTYPE_VALUES, **op._params, **workload.dims}
        for name, accepted in self.entry.dtypes.items():
            dtype = workload.dtypes.get(name, accepted[0] if len(accepted) == 1 else None)
            if dtype is not None:
                self.env[name] = DTYPE_VALUES[dtype]
        self.derive()

    def derive(self) -> None:
        """Add the derived dims whose sources this workload has."""
        missing = dict(self.entry.dims)
        for _ in self.entry.dims:
            for name, expr in list(missing.items()):
                with contextlib.suppress(KeyError):
                    self.env[name] = expr.evaluate(self.env, self.passed)
                    del missing[name]

    def fail(self, what: str, problem: str) -> ManifestError:
        entry, workload = self.entry, self.workload
        where = f"{entry.path}:{workload.line}"
        return ManifestError(where, entry.name, f"workload '{workload.label}': {what}: {problem}")

    def value(self, what: str, expr: Expr) -> Any:
        try:
            return expr.evaluate(self.env, self.passed)
        except KeyError as error:
            missing = error.args[0]
            field = "dtypes" if missing in self.entry.dtypes else "dims"
            raise self.fail(f"{field}.{missing}", f"is missing; {what} needs it") from None

    def inputs(self) -> dict[str, torch.Tensor | None]:
        random = None
        if self.fake is None and self.device.type != "meta":
            random = torch.Generator(self.device).manual_seed(self.seed)
        return {
            item.name: self.tensor(item, random) if item.name in self.passed else None
            for item in self.entry.inputs
        }

    def tensor(self, item: Input, random: torch.Generator | None) -> torch.Tensor:
        shape = self.value(f"input {item.name}", item.shape)
        dtype = self.dtype(item)
        device = torch.device("cpu") if item.host else self.device
        if random is None:
            with self.fake or contextlib.nullcontext():
                return torch.empty(shape, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            wide = dtype if dtype.itemsize > 1 else torch.float32
            tensor = torch.empty(shape, dtype=wide, device=random.device).normal_(generator=random)
            return tensor.to(device, dtype)
        low, high = self.bounds(item, dtype)
        if low > high and 0 not in shape:
            raise self.fail(f"input {item.name}", f"no value lies between {low} and {high}")
        wide = torch.uint8 if dtype is torch.bool else dtype
        tensor = torch.empty(shape, dtype=wide, device=random.device)
        if tensor.numel():
            tensor.random_(low, high + 1, generator=random)
        return tensor.to(device, dtype)

    def dtype(self, item: Input) -> torch.dtype:
        if item.dtype is None:
            return DTYPE_VALUES[self.workload.dtypes.get(item.name, item.dtypes[0])]
        dtype: torch.dtype = self.value(f"input {item.name}", item.dtype)
        return dtype

    def bounds(self, item: Input, dtype: torch.dtype) -> tuple[int, int]:
        """Inclusive; small numbers where the entry states none."""
        if dtype is torch.bool:
            return 0, 1
        info = torch.iinfo(dtype)
        what = f"content of {item.name}"
        least = None if item.content is None else item.content.min
        most = None if item.content is None else item.content.max
        low = max(-8, info.min) if least is None else self.value(what, least)
        high = max(low, 8) if most is None else self.value(what, most)
        if least is None:
            low = min(low, high)
        return max(low, info.min), min(high, info.max, 2**62)


# ---- smaller workloads -----------------------------------------------------------------------


def scaled(op_cls: type[Op], workload: Workload, most: int) -> Workload:
    """``workload`` with its largest sizes halved until no tensor has more than ``most`` elements,
    as far as the entry's rules allow.

    Only sizes that the workload states change: dims first, then parameters that shapes use. Equal
    sizes that must stay equal are halved together.
    """
    while True:
        for names in _too_large(op_cls, workload, most):
            smaller = _smaller(op_cls, workload, names)
            if smaller is not None:
                workload = smaller
                break
        else:
            return workload


def _smaller(op_cls: type[Op], workload: Workload, names: frozenset[str]) -> Workload | None:
    """``workload`` with a size halved that a shape of ``names`` uses, or None where none may be."""
    for places in _choices(op_cls.entry, workload, names):
        smaller = workload
        for place in places:
            smaller = _halved(smaller, *place)
        if _binds(op_cls, smaller):
            return smaller
    return None


def _choices(entry: Entry, workload: Workload, names: frozenset[str]) -> Iterator[list[Any]]:
    """What to halve, best first: the largest size alone, with those of its size, the next."""
    everywhere = frozenset(workload.dims) | frozenset(workload.params)
    equal = list(_sizes(entry, workload, everywhere))
    places = sorted(_sizes(entry, workload, names), key=lambda p: (p[0] != "dims", -p[3]))
    for alike, group in itertools.groupby(places, key=lambda p: (p[0], p[3])):
        yield from ([place] for place in group)
        yield [other for other in equal if (other[0], other[3]) == alike]


def _too_large(op_cls: type[Op], workload: Workload, most: int) -> list[frozenset[str]]:
    """For each tensor of more than ``most`` elements, the largest first: what its shape is made of."""
    entry = op_cls.entry
    outputs, call = _checked(op_cls, workload)
    found: list[tuple[int, frozenset[str]]] = []
    for item in entry.inputs:
        tensor = call.inputs[item.name]
        if tensor is not None:
            found.append((tensor.numel(), item.shape.names))
    for output, spec in zip(entry.outputs, outputs, strict=True):
        if spec is not None:
            found.append((torch.Size(spec[0]).numel(), output.shape.names))
    found.sort(key=lambda pair: -pair[0])
    return [_sources(entry, names) for size, names in found if size > most]


def _sources(entry: Entry, names: frozenset[str]) -> frozenset[str]:
    """``names`` and what derived dims among them are made of."""
    for _ in entry.dims:
        names |= {n for dim in names & set(entry.dims) for n in entry.dims[dim].names}
    return names


def _checked(op_cls: type[Op], workload: Workload) -> tuple[Any, WorkloadCall]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = workload_inputs(op_cls, workload, "cpu", FakeTensorMode())
    return op_cls._signature(call.op, *call.inputs.values(), None)[0], call


def _binds(op_cls: type[Op], workload: Workload) -> bool:
    try:
        _checked(op_cls, workload)
    except (CheckError, ManifestError):
        return False
    return True


def _sizes(
    entry: Entry, workload: Workload, names: frozenset[str]
) -> Iterator[tuple[str, str, int, int]]:
    """Sizes above 1 that a shape of ``names`` uses: (section, name, position or -1, size)."""
    counts = {p.name for p in entry.params if p.type.alternatives[0][0] in ("int", "ints", "tuple")}
    for section, given, wanted in (
        ("dims", workload.dims, names),
        ("params", workload.params, names & counts),
    ):
        for name in sorted(wanted & set(given)):
            value = given[name]
            for index, size in enumerate(value) if isinstance(value, tuple) else [(-1, value)]:
                if isinstance(size, int) and size > 1:
                    yield section, name, index, size


def _halved(workload: Workload, section: str, name: str, index: int, size: int) -> Workload:
    given = dict(getattr(workload, section))
    if index < 0:
        given[name] = size // 2
    else:
        given[name] = (*given[name][:index], size // 2, *given[name][index + 1 :])
    changed: dict[str, Any] = {section: given}
    return dataclasses.replace(workload, **changed)
