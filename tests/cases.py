"""Calls of every op, from the manifests: each class, its workloads scaled down, in every dtype."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from functools import cache
from typing import Any

from tileops import CheckError, Op
from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import families, load_family
from tileops.engine.manifest.entry import Workload
from tileops.engine.workloads import WorkloadCall, workload_inputs

__all__ = [
    "distinct_classes", "float32_calls", "op_classes", "workload_call", "workload_cases", "workloads_in_every_dtype",
]  # fmt: skip


@cache
def op_classes() -> dict[str, type[Op]]:
    """Every implemented op class by name."""
    found = {}
    for family, path in families().items():
        module = importlib.import_module(f"tileops.{family}")
        for name, entry in load_family(path).items():
            if entry.status == "implemented":
                found[name] = getattr(module, name)
    return found


def signature_text(entry: Any) -> str:
    """What generated code follows from, with names that say only their place."""
    names = [*(i.name for i in entry.inputs), *entry.dtypes, *(p.name for p in entry.params)]
    names += sorted({name for i in entry.inputs for name in i.shape.names} - set(names))
    text = repr((
        entry.kind, len(entry.composition), bool(entry.backward),
        [(i.name, str(i.dtype and i.dtype.text), i.dtypes, i.shape.text, str(i.optional),
          i.mutated and i.mutated.text, i.passed_when and i.passed_when.text, i.contiguous, i.host,
          i.kw_only, i.content is None) for i in entry.inputs],
        [(str(o.dtype.text), o.shape.text, o.nullable and o.nullable.text, o.buffer, o.is_input)
         for o in entry.outputs],
    ))  # fmt: skip
    places: dict[str, str] = {}

    def place(word: re.Match[str]) -> str:
        known = word[0] in names
        return places.setdefault(word[0], f"<{len(places)}>") if known else word[0]

    return re.sub(r"[A-Za-z_]\w*", place, text)


@cache
def distinct_classes() -> dict[str, type[Op]]:
    """One class, the first in its manifest, for each signature: classes that differ from it in names,
    dtypes, rules and meaning alone go through the same generated code."""
    first: dict[str, str] = {}
    for name, cls in op_classes().items():
        first.setdefault(f"{signature_text(cls.entry)} {cls.grows} {cls.random}", name)
    return {name: op_classes()[name] for name in first.values()}


def workloads_in_every_dtype(name: str) -> list[tuple[str, Workload]]:
    """Each workload of a class in each combination of dtypes that its rules allow."""
    cls = op_classes()[name]
    found: dict[tuple[Any, ...], tuple[str, Workload]] = {}
    for workload in cls.entry.workloads:
        for dtypes in itertools.product(*cls.entry.dtypes.values()):
            chosen = dict(zip(cls.entry.dtypes, dtypes, strict=True))
            changed = dataclasses.replace(workload, dtypes=chosen)
            label = "-".join((workload.label, *dtypes))
            if dict(workload.dtypes) == chosen or _binds(cls, changed):
                found[workload.label, dtypes] = (label, changed)
    used = [{w.dtypes[v] for _, w in found.values()} for v in cls.entry.dtypes]
    assert used == [set(d) for d in cls.entry.dtypes.values()], f"{name}: a dtype has no workload"
    return list(found.values())


def _binds(cls: type[Op], workload: Workload) -> bool:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        made = workload_inputs(cls, workload, "cpu", FakeTensorMode())
        cls._signature(made.op, *made.inputs.values(), None)
    except (CheckError, ManifestError):
        return False
    return True


def workload_cases(family: str) -> list[Any]:
    """Parameters ``(class name, workload)`` of every workload of a family in every dtype."""
    import pytest

    return [
        pytest.param(name, workload, id=f"{name}-{label}")
        for name, cls in op_classes().items()
        if cls.entry.family == family
        for label, workload in workloads_in_every_dtype(name)
    ]


def workload_call(
    name: str, workload: Workload, seed: int, most: int | None = 4096
) -> WorkloadCall:
    """A call of at most ``most`` elements a tensor, variances and scales positive."""
    made = workload_inputs(op_classes()[name], workload, scale_to=most, seed=seed)
    fill = _FILL.get(name)
    if fill is not None:
        fill(made)
    return made


def _positive(*names: str) -> Any:
    def fill(made: WorkloadCall) -> None:
        for name in names:
            tensor = made.inputs[name]
            if tensor is not None:
                tensor.abs_().add_(0.1)

    return fill


def _angles(made: WorkloadCall) -> None:
    cos, sin = made.inputs["rope_cos"], made.inputs["rope_sin"]
    if cos is not None and sin is not None:
        sin.copy_(cos.sin())
        cos.cos_()


_FILL: dict[str, Any] = {
    "BatchNormFwdOp": _positive("running_var"),
    "InstanceNormFwdOp": _positive("running_var"),
    "GQADenseBwdOp": _angles,
    "GQADenseFwdOp": _positive("q_scale", "k_scale", "v_scale"),
    "PagedKVCacheWriteFwdOp": _positive("k_scale", "v_scale"),
}
"""What a normal distribution gives wrong: a variance, a scale, tables that stretch where they should turn."""


def float32_calls(name: str, seed: int, most: int = 96) -> list[WorkloadCall]:
    """The workloads of a class in float32, small, one for each presence of inputs and write."""
    return [workload_call(name, workload, seed, None) for workload in _float32(name, most)]


@cache
def _float32(name: str, most: int) -> list[Workload]:
    cls, found = op_classes()[name], {}
    for _, workload in workloads_in_every_dtype(name):
        if all(d == "float32" for d in workload.dtypes.values() if "float" in d):
            made = workload_call(name, workload, 0, most)
            present = tuple(t is not None for t in made.inputs.values())
            written = tuple(bool(i.mutated) and str(made.op._params) for i in cls.entry.inputs)
            floating = "float32" in workload.dtypes.values()
            found.setdefault((present, written, floating), made.workload)
    assert found, f"{name}: no workload in float32"
    return list(found.values())
