"""The gradient of an op, as an entry: derived from the forward's, or held against it.

A backward op takes the gradients of the forward's outputs and what was saved of the forward, has the
forward's parameters and one ``wants_<input>`` for each input that may have a gradient, and gives these
gradients. It is an op like any other.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Container, Iterable
from dataclasses import dataclass

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.entry import (
    Cost,
    Entry,
    Input,
    Output,
    Param,
    ParamType,
    Rule,
    branches_of,
    has_gradient,
)
from tileops.engine.manifest.expr import DTYPES, Expr

__all__ = ["Wiring", "backward_name", "dedicated_wiring", "derived_backward", "faults_of_backward"]


@dataclass(frozen=True)
class Wiring:
    """How a forward's autograd node calls its backward op. All are names, in the backward's order."""

    outputs: tuple[str, ...]
    """The forward's outputs whose gradients are its first inputs."""
    saved: tuple[str, ...]
    """The forward's inputs and outputs that are its other inputs."""
    params: tuple[str, ...]
    """The forward's parameters that it has too."""
    wants: tuple[str, ...]
    """Its parameters that say which gradients are wanted, one for each of ``inputs``."""
    inputs: tuple[str, ...]
    """The forward's inputs whose gradients are its outputs."""
    results: tuple[int, ...]
    """For each of ``inputs`` which of its outputs that is: equal gradients may be one."""


def backward_name(name: str, taken: Container[str] = ()) -> str:
    """``RMSNormFwdOp`` → ``RMSNormBwdOp`` → ``RMSNormBwdBwdOp``; ``BatchNormFwdOp`` →
    ``BatchNormFwdBwdOp`` where ``BatchNormBwdOp`` is ``taken`` by an entry that is something else."""
    base = name.removesuffix("Op")
    found = base.removesuffix("Fwd") + "BwdOp"
    return f"{base}BwdOp" if found in taken else found


def _taken(entry: Entry) -> set[str]:
    """The forward's names, which what is new must not have."""
    shapes = {name for item in entry.inputs for name in item.shape.names}
    inputs = {item.name for item in entry.inputs}
    return shapes | inputs | entry.shape_params | set(entry.dims) | set(entry.dtypes)


def _prefixed(prefix: str, names: Iterable[str], taken: set[str]) -> tuple[str, ...]:
    """The names with a prefix, once more where that is taken."""
    found: list[str] = []
    for name in names:
        result = prefix + name
        while result in taken or result in found:
            result = prefix + result
        found.append(result)
    return tuple(found)


def wiring_of(entry: Entry, saved: tuple[str, ...], params: tuple[str, ...]) -> Wiring:
    """The wiring of a backward op that takes ``saved`` and has ``params`` of the forward."""
    taken = _taken(entry)
    inputs = tuple(item.name for item in entry.differentiable_inputs)
    return Wiring(
        tuple(output.name for output in entry.differentiable_outputs),
        saved,
        params,
        _prefixed("wants_", inputs, taken),
        inputs,
        tuple(range(len(inputs))),
    )


def _gradients(entry: Entry, wiring: Wiring) -> list[Input]:
    """The gradients that come in. Of several outputs each may be absent, which is as good as zero."""
    names = _prefixed("grad_", wiring.outputs, _taken(entry))
    found = []
    for name, output in zip(names, entry.differentiable_outputs, strict=True):
        text = output.dtype.text
        optional = len(wiring.outputs) > 1 or output.nullable is not None
        found.append(Input(
            name=name,
            dtype=None if text in DTYPES else output.dtype,
            dtypes=(text,) if text in DTYPES else (),
            shape=output.shape, optional=optional, passed_when=None, mutated=None,
            contiguous=False, kw_only=False, host=False, content=None, line=entry.line,
        ))  # fmt: skip
    return found


def _gradient_names(entry: Entry, wiring: Wiring) -> tuple[str, ...]:
    """Of the outputs, one for each of the inputs."""
    return _prefixed("grad_", wiring.inputs, _taken(entry))


def _given(entry: Entry, wiring: Wiring) -> list[Output]:
    """The gradients that go out."""
    names = _gradient_names(entry, wiring)
    found = []
    for own, want, name in zip(names, wiring.wants, wiring.inputs, strict=True):
        item = entry.input(name)
        there = want
        if item.optional and name in wiring.saved:
            there = f"({want} and passed({name}))"
        found.append(Output(
            name=own,
            dtype=item.dtype or Expr(item.dtypes[0]),
            shape=item.shape, nullable=Expr(f"not {there}"), buffer=False, is_input=None,
            line=entry.line,
        ))  # fmt: skip
    return found


def derived_backward(entry: Entry) -> tuple[Entry, Wiring] | None:
    """The entry of an op's default gradient, which saves every input; None where no gradient flows."""
    if not (entry.has_boundary and entry.differentiable_inputs and entry.differentiable_outputs):
        return None
    wiring = wiring_of(
        entry,
        tuple(item.name for item in entry.inputs),
        tuple(param.name for param in entry.params),
    )
    grads = _gradients(entry, wiring)
    kept = [dataclasses.replace(item, mutated=None, line=entry.line) for item in entry.inputs]
    absent = [
        Rule(Expr(f"not passed({grad.name}) or not ({output.nullable.text})"),
             f"an output that is None ({output.name}) has no gradient", grad.name, entry.line)
        for grad, output in zip(grads, entry.differentiable_outputs, strict=True)
        if output.nullable is not None
    ]  # fmt: skip
    always = {
        grad.name
        for grad, output in zip(grads, entry.differentiable_outputs, strict=True)
        if grad.optional and output.nullable is None
    }
    dtypes = _floating(entry)
    backward = dataclasses.replace(
        entry,
        name=backward_name(entry.name, load_family(entry.path)),
        reference="own",
        dtypes=dtypes,
        params=(*entry.params, *(_wish(name, entry.line) for name in wiring.wants)),
        inputs=_callable([*grads, *kept]),
        outputs=tuple(_given(entry, wiring)),
        rules=(*entry.rules, *absent),
        backward=None,
        workloads=tuple(
            dataclasses.replace(w, passed=w.passed | always)
            for w in entry.workloads
            if all(w.dtypes.get(v, accepted[0]) in accepted for v, accepted in dtypes.items())
        ),
        # The forward again, and twice its work for two operands.
        cost=Cost(Expr(f"3 * ({entry.cost.flops.text})"), None, None),
        node=None,
    )
    object.__setattr__(backward, "branches", branches_of(backward))
    return backward, wiring


def _floating(entry: Entry) -> dict[str, tuple[str, ...]]:
    """The dtype variables; of those that what is differentiated has, no integers."""
    dtypes = [i.dtype for i in entry.differentiable_inputs if i.dtype is not None]
    dtypes += [output.dtype for output in entry.differentiable_outputs]
    used = {name for dtype in dtypes for name in dtype.names}
    return {
        variable: tuple(filter(has_gradient, accepted)) if variable in used else accepted
        for variable, accepted in entry.dtypes.items()
    }


def _wish(name: str, line: int) -> Param:
    return Param(name, ParamType("bool", (("bool", ()),), False), True, True, line)


def _callable(inputs: list[Input]) -> tuple[Input, ...]:
    """What may be left out and stands before what may not is passed by name."""
    last = max((n for n, i in enumerate(inputs) if not (i.optional or i.kw_only)), default=-1)
    return tuple(
        dataclasses.replace(item, kw_only=True) if item.optional and n < last else item
        for n, item in enumerate(inputs)
    )


# ---- a dedicated backward op ---------------------------------------------------------------------


def _text(dtype: Expr | None, dtypes: tuple[str, ...]) -> str:
    return ", ".join(dtypes) if dtype is None else dtype.text


def _same(first: Expr | None, second: Expr | None) -> bool:
    if first is None or second is None:
        return first is second
    return ast.dump(first.tree) == ast.dump(second.tree)


def dedicated_wiring(entry: Entry, backward: Entry) -> Wiring:
    """The wiring of the op that an entry names as its ``backward``. Raises ``ManifestError``."""
    faults = faults_of_backward(entry, backward)
    if faults:
        raise ManifestError(
            backward.where, backward.name, f"as backward of {entry.name}: {faults[0]}"
        )
    grads = len(entry.differentiable_outputs)
    wiring = wiring_of(
        entry,
        tuple(item.name for item in backward.inputs[grads:]),
        tuple(p.name for p in backward.params if p.name in entry.shape_params),
    )
    return dataclasses.replace(wiring, results=_results(entry, backward, wiring))


def _results(entry: Entry, backward: Entry, wiring: Wiring) -> tuple[int, ...]:
    """For each of the forward's inputs the output that is its gradient: that of its name, else the one
    that its wish makes appear; -1 where there is none."""
    places = {output.name: n for n, output in enumerate(backward.outputs)}
    asked = [() if o.nullable is None else o.nullable.names for o in backward.outputs]
    found = []
    for own, want in zip(_gradient_names(entry, wiring), wiring.wants, strict=True):
        others = (n for n, names in enumerate(asked) if want in names)
        found.append(places[own] if own in places else next(others, -1))
    return tuple(found)


def faults_of_backward(entry: Entry, backward: Entry) -> list[str]:
    """Where a backward op's entry breaks the convention of ``docs/manifest.md``."""
    if not (entry.has_boundary and entry.differentiable_inputs and entry.differentiable_outputs):
        return [f"{entry.name} has no input and output that a gradient flows between"]
    wiring = wiring_of(entry, (), ())
    return [
        *_input_faults(entry, backward, _gradients(entry, wiring)),
        *_param_faults(entry, backward, wiring),
        *_output_faults(entry, backward, wiring),
    ]


def _input_faults(entry: Entry, backward: Entry, grads: list[Input]) -> list[str]:
    faults = []
    names = [item.name for item in backward.inputs]
    wanted = [grad.name for grad in grads]
    if names[: len(grads)] != wanted:
        return [f"its first inputs are {', '.join(wanted)}; given {', '.join(names) or 'none'}"]
    for grad, item in zip(grads, backward.inputs, strict=False):
        faults += _differences(grad.dtype, grad.dtypes, grad.shape, item, "the output")
    outputs = {output.name: output for output in entry.outputs}
    inputs = {item.name: item for item in entry.inputs}
    for item in backward.inputs[len(grads) :]:
        if item.name in inputs:
            own = inputs[item.name]
            faults += _differences(own.dtype, own.dtypes, own.shape, item, "the forward's input")
            if own.optional != item.optional or not _same(own.passed_when, item.passed_when):
                faults.append(f"inputs.{item.name}: it is optional as the forward's input is")
        elif item.name in outputs:
            kept = outputs[item.name]
            fixed = (kept.dtype.text,) if kept.dtype.text in DTYPES else ()
            dtype = None if fixed else kept.dtype
            faults += _differences(dtype, fixed, kept.shape, item, "the output")
        else:
            faults.append(f"inputs.{item.name}: {entry.name} has no input or output of this name")
    faults += [
        f"inputs.{i.name}: a backward op writes no input" for i in backward.inputs if i.mutated
    ]
    return faults


def _differences(
    dtype: Expr | None, dtypes: tuple[str, ...], shape: Expr, item: Input | Output, of: str
) -> list[str]:
    """Where ``item`` is of another dtype or shape than what it belongs to."""
    section = "inputs" if isinstance(item, Input) else "outputs"
    fixed = item.dtypes if isinstance(item, Input) else ()
    given = _text(item.dtype, fixed)
    faults = []
    if given != _text(dtype, dtypes):
        faults.append(
            f"{section}.{item.name}.dtype: given {given}; accepted: {_text(dtype, dtypes)}, as {of}"
        )
    if not _same(shape, item.shape):
        faults.append(
            f"{section}.{item.name}.shape: given {item.shape.text!r}; accepted: {shape.text!r}, as {of}"
        )
    return faults


def _param_faults(entry: Entry, backward: Entry, wiring: Wiring) -> list[str]:
    own = {param.name: param for param in entry.params}
    faults = []
    for param in backward.params:
        forward = own.get(param.name)
        if param.name in wiring.wants:
            if (param.type.text, param.default, param.kw_only) != ("bool", True, True):
                faults.append(f"params.{param.name}: it is a bool, kw_only, of default true")
        elif forward is None:
            faults.append(f"params.{param.name}: {entry.name} has no parameter of this name")
        elif (forward.type.text, forward.default) != (param.type.text, param.default):
            faults.append(f"params.{param.name}: its type and default are the forward's")
    names = [param.name for param in backward.params if param.name in wiring.wants]
    if tuple(names) != wiring.wants:
        faults.append(f"its last params are {', '.join(wiring.wants)}")
    return faults


def _output_faults(entry: Entry, backward: Entry, wiring: Wiring) -> list[str]:
    saved = tuple(item.name for item in backward.inputs)
    each = _given(entry, dataclasses.replace(wiring, saved=saved))
    results = _results(entry, backward, wiring)
    groups = [
        [ours for ours, place in zip(each, results, strict=True) if place == n]
        for n in range(len(backward.outputs))
    ]
    names = [output.name for output in backward.outputs]
    if -1 in results or names != [group[0].name for group in groups if group]:
        accepted = ", ".join(output.name for output in each)
        return [f"its outputs are {accepted}; given {', '.join(names) or 'none'}"]
    faults = []
    for group, given in zip(groups, backward.outputs, strict=True):
        for ours in group:
            faults += _differences(ours.dtype, (), ours.shape, given, "the input")
        alone = len(each) == 1 and given.nullable is None  # it is wanted, or nobody calls
        wanted = _nullable(group)
        if not alone and not _same(wanted, given.nullable):
            faults.append(f"outputs.{given.name}.nullable: accepted: {wanted.text!r}")
    return faults


def _nullable(group: list[Output]) -> Expr:
    """When nobody wants an output that is the gradient of each of these."""
    texts = [output.nullable.text for output in group if output.nullable is not None]
    if len(texts) == 1:
        return Expr(texts[0])
    return Expr(f"not ({' or '.join(text.removeprefix('not ') for text in texts)})")
