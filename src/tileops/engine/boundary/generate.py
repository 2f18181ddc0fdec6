"""Generating an op class's call paths and its operators.

From one entry come: ``__call__`` (what a user calls), ``_call_boundary`` (what Dynamo traces: one
operator call), ``_run`` (plan lookup and run), and per side-effect branch an operator with its
schema, body, fake and Autograd kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileops.engine.boundary.autocast import give_autocast
from tileops.engine.boundary.batching import give_batching
from tileops.engine.boundary.branching import branching
from tileops.engine.boundary.compiled_calls import dispatched, give_call, node_lines, write_calls
from tileops.engine.boundary.dtensor import register_strategies
from tileops.engine.boundary.function import differentiable
from tileops.engine.boundary.gate import NAMES, QUIET, QUIET_BELOW, direct, keys_below_autograd
from tileops.engine.boundary.hot import ABSENT, HotLines, hot_lines, keep_hot
from tileops.engine.boundary.instances import live_states, resolve, resolve_fake
from tileops.engine.boundary.naming import operator_base_name
from tileops.engine.boundary.owners import Owner
from tileops.engine.boundary.refusals import (
    refuse_superfluous,
    refuse_without_storage,
    refuse_written_grad,
)
from tileops.engine.boundary.schema import call_signature, returned_of, schema_of
from tileops.engine.boundary.tangents import carrying, tangents_around
from tileops.engine.manifest.entry import Branch, Entry
from tileops.engine.manifest.expr import Expr
from tileops.engine.signature.generate import presence_lines
from tileops.engine.signature.runtime import HELPERS
from tileops.engine.signature.source import compile_source

__all__ = ["MISSING_ARGUMENT", "Boundary", "Operator", "make_calls"]


class _MissingArgument:
    def __repr__(self) -> str:
        return "<missing>"


MISSING_ARGUMENT: Any = _MissingArgument()


@dataclass(frozen=True)
class Operator:
    """One generated operator."""

    name: str
    schema: str
    branch: Branch
    overload: Any


@dataclass(frozen=True)
class Boundary:
    """The operators of a class; ``library`` keeps them registered."""

    operators: tuple[Operator, ...]
    library: Any


# ---- generated call paths ------------------------------------------------------------------------


def _parameters(entry: Entry) -> tuple[str, list[str]]:
    """The parameter list of ``__call__`` and the names in manifest order."""
    positional = [i for i in entry.inputs if not i.kw_only]
    keyword = [i for i in entry.inputs if i.kw_only]

    def declare(item: Any) -> str:
        # Every argument has a default, so that a missing one is our error and not Python's.
        return f"{item.name}={'None' if item.optional else '_MISSING'}"

    parts = [declare(i) for i in positional] + ["*_extra"] + [declare(i) for i in keyword]
    if entry.has_out:
        parts.append("out=None")
    return ", ".join([*parts, "**_unknown"]), [i.name for i in entry.inputs]


def _dynamo_call(entry: Entry, by_name: str) -> str:
    """What Dynamo goes into."""
    if entry.has_boundary:
        return f"self._call_boundary({by_name})"
    if not entry.composition:
        return f"self.forward({by_name})"
    given = [
        i.name if i.optional else f"None if {i.name} is _MISSING else {i.name}"
        for i in entry.inputs
    ]
    return f"self._call_stages(({', '.join(given)},), {'out' if entry.has_out else 'None'})"


def _presence(entry: Entry) -> list[str]:
    """What is no tensor, or is there when it must not be, is refused in the op's words before the
    operator is called: the schema would refuse it in torch's."""

    def rename(name: str) -> str:
        return f"self.{name}" if name in entry.shape_params else f"_dt_{name}"

    def source(expr: Expr) -> str:
        return expr.source(rename, lambda name: f"({name} is not None)")

    lines = []
    for item in entry.inputs:
        value = item.name if item.optional else f"None if {item.name} is _MISSING else {item.name}"
        lines += presence_lines(entry, item, source, value)
    if entry.has_out:
        lines.append(f"if out is not None and not isinstance(out, _Tensor): "
                     f"_must_be_tensor('{entry.name}', 'out', out, True)")  # fmt: skip
    return lines


def _facts(entry: Entry, names: list[str]) -> str:
    """The facts of a call that a plan depends on, as one tuple expression."""
    parts = ["_epoch.now", "_context()"]
    optional = {i.name for i in entry.inputs if i.optional}
    mutated = {i.name for i in entry.inputs if i.mutated is not None}
    conjugated = {i.name for i in entry.inputs if entry.may_be_complex(i)}
    for name in [*names, *(["out"] if entry.has_out else [])]:
        # Whether a written tensor overlaps itself depends on all its strides.
        layout = "stride()" if name in mutated else "is_contiguous()"
        facts = (
            f"{name}.shape, {name}.dtype, {name}.device, {name}.{layout}, "
            f"{name}.data_ptr() & 15, {name}.is_neg()"
        )
        if name in conjugated:
            facts += f", {name}.is_conj()"
        if name in optional or name == "out":
            parts.append(f"None if {name} is None else ({facts})")
        else:
            parts.append(facts)
    return f"({', '.join(parts)})"


def calls_source(entry: Entry, branches: tuple[Branch, ...], growing: bool) -> str:
    """Source of ``__call__``, ``_call_boundary`` and ``_run`` of one class."""
    parameters, names = _parameters(entry)
    buffers = [*names, *(["out"] if entry.has_out else [])]
    passed = ", ".join(buffers)
    by_name = ", ".join(
        [*(i.name for i in entry.positional_inputs)]
        + [f"{i.name}={i.name}" for i in entry.inputs if i.kw_only]
        + (["out=out"] if entry.has_out else [])
    )
    optional = {i.name for i in entry.inputs if i.optional} | {"out"}
    exact = " and ".join(
        (f"({n} is None or type({n}) in _EXACT)" if n in optional else f"type({n}) in _EXACT")
        for n in buffers
    )
    grads, nested = (
        " or ".join(
            f"({n} is not None and {n}.{fact})" if n in optional else f"{n}.{fact}" for n in buffers
        )
        for fact in ("requires_grad", "is_nested")
    )
    lines = [
        f"# Generated from {entry.family}/manifest.yaml, entry {entry.name}: its call paths.",
        f"def __call__(self, {parameters}):",
        "    if _is_dynamo_compiling():",
        "        if _extra or _unknown: _superfluous(self, _extra, _unknown)",
        f"        return {_dynamo_call(entry, by_name)}",
    ]
    hot = hot_lines(entry, names, growing)
    if entry.has_boundary:
        lines += [
            f"    if not _extra and not _unknown and {QUIET}:",
            "        _shared = self._state",
            *(f"        {line}" for line in hot.all),
            f"    if {exact} and not _extra and not _unknown:",
            "        if _direct():",
            f"            if _grad_enabled() and ({grads}): return _graded(self, {passed})",
            f"            return _run(self._state, {passed})",
        ]
    lines.append(
        f"    return self._call_checked(_extra, _unknown, ({passed}{',' if passed else ''}))"
    )
    if not entry.has_boundary:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"def _run(_shared, {passed}):",
        *(f"    {line}" for line in hot.all),
        "    try:",
        f"        facts = {_facts(entry, names)}",
        "    except RuntimeError:",
        f"        _refuse_without_storage(_cls, {_mapping(buffers)})",
        "        raise",
        "    plan = _shared.plans.get(facts)",
        "    if plan is None:",
        f"        plan = _make_plan(_shared, facts, ({passed},))",
        "    else:",
        f"        _keep_hot(_shared, plan, ({passed},), _growth)",
        "    _shared.last = plan",
        f"    try: return plan.run({passed})",
        "    except Exception as error: raise plan.blamed(error)",
        "",
        f"def _call_boundary(self, {_boundary_parameters(entry)}):",
        *(f"    {line}" for line in _presence(entry)),
        *branching(entry, names, "_op"),
        "",
        # Where the dispatcher would go, without it; nested tensors have another kernel there.
        f"def _graded(self, {passed}):",
        f"    if {nested}: _refuse_without_storage(_cls, {_mapping(buffers)})",
        *(f"    {line}" for line in _presence(entry)),
        *branching(entry, names, "_autograd"),
    ]
    for index, branch in enumerate(branches):
        lines += ["", *_operator_source(entry, branch, index, names, hot)]
        inside = hot_lines(entry, names, growing, _give(entry, branch))
        lines += ["", *node_lines(entry, branch, index, names, inside.all)]
    return "\n".join(lines) + "\n"


def _boundary_parameters(entry: Entry) -> str:
    parts = [i.name + ("=None" if i.optional else "") for i in entry.positional_inputs]
    keyword = [i.name + ("=None" if i.optional else "") for i in entry.inputs if i.kw_only]
    if entry.has_out:
        keyword.append("out=None")
    return ", ".join([*parts, *(["*", *keyword] if keyword else [])])


def _operator_source(
    entry: Entry, branch: Branch, index: int, names: list[str], hot: HotLines
) -> list[str]:
    """Body, fake and Autograd kernel of one branch."""
    tensors = [*names, *(["out"] if branch.out else [])]
    arguments = ", ".join([*tensors, "instance_key"])
    passed = ", ".join([*names, *([("out" if branch.out else "None")] if entry.has_out else [])])
    returned = returned_of(entry, branch)
    give = f"    {_give(entry, branch)}"
    optional = {i.name for i in entry.inputs if i.optional}
    may_be_none = [n for n in tensors if n in optional and n not in branch.writes]

    def each(test: str, joiner: str) -> str:
        return joiner.join(
            f"({n} is None or {test.format(n)})" if joiner == " and " and n in may_be_none
            else f"({n} is not None and {test.format(n)})" if n in may_be_none
            else test.format(n)
            for n in tensors
        )  # fmt: skip

    written = [*branch.writes, *(["out"] if branch.out else [])]
    checked = passed if entry.has_out else f"{passed}, None"
    bump = [f"    _bump_version({n})" for n in written]
    state = [
        "    _ref = _live(instance_key)",
        "    _shared = (_ref and _ref()) or _resolve(_cls, instance_key)",
    ]
    shortcut = [
        f"    if {QUIET_BELOW}:",
        *(f"    {line}" for line in state),
        "        _hots = _shared.hots",  # nested tensors have an Autograd kernel of their own
        *(["        out = None"] if entry.has_out else []),
        *(f"        {line}" for line in (*hot.absent, *hot.run)),
    ]
    lines = [
        f"def _body_{index}({arguments}):",
        *state,
        "    if _autocast():",  # what is cast is what the caller casts
        f"        with _without_autocast(): r = _run(_shared, {passed})",
        f"    else: r = _run(_shared, {passed})",
        give,
        "",
        f"def _fake_{index}({arguments}):",
        "    _register_strategies(_cls)",  # DTensor comes here before it asks for them
        f"    _write_calls(_op_{index})",  # and Inductor before it writes
        f"    outputs, _, device = _signature(_resolve_fake(_cls, instance_key), {checked})",
        f"    return {_fake_result(returned)}",
        "",
        f"def _autograd_{index}({arguments}):",
        # What compiled code calls: where a guard takes the call there is nothing to decide.
        *(shortcut if len(returned) == len(entry.outputs) and not written else []),
    ]
    lines += [
        "    if _tangents_around():",
        f"        r = _carried_{index}({arguments})",
        "        if r is not NotImplemented: return r",
    ]
    if written or returned:
        lines.append(f"    if _grad_enabled() and ({each('{}.requires_grad', ' or ')}):")
    if written:
        lines.append(
            f"        _refuse_written_grad(_cls, {_mapping(written)}, {_mapping(tensors)})"
        )
    if returned:
        lines.append(f"        return _differentiable_{index}({arguments})")
    lines += [
        f"    if {each('type({}) in _EXACT', ' and ')} and _direct():",
        f"        return _body_{index}({arguments})",
        "    with _below_autograd():",
        f"        r = _op_{index}.redispatch(_keys_below_autograd(({', '.join(tensors)},)), {arguments})",
        *bump,
        "    return r",
    ]
    return lines


def _give(entry: Entry, branch: Branch) -> str:
    """What an operator of this branch returns of a plan's result ``r``."""
    returned = returned_of(entry, branch)
    if not returned:
        return "return None"
    if len(returned) == len(entry.outputs):
        return "return r"
    picked = ", ".join(f"r[{position}]" for position in returned)
    return f"return {picked if len(returned) == 1 else f'({picked})'}"


def _mapping(names: list[str]) -> str:
    return "{" + ", ".join(f"'{n}': {n}" for n in names) + "}"


def _fake_result(returned: list[int]) -> str:
    empties = [f"_empty(outputs[{i}][0], dtype=outputs[{i}][1], device=device)" for i in returned]
    if not empties:
        return "None"
    return empties[0] if len(empties) == 1 else f"({', '.join(empties)})"


# ---- defining them -------------------------------------------------------------------------------


def make_calls(
    cls: Any,
    entry: Entry,
    owner: Owner,
    make_plan: Callable[..., Any],
    epoch: Any,
    context_target: Callable[[], str | None],
    gradient_of: Callable[[Any], Any],
) -> Boundary:
    """Define the operators of ``cls`` and give it its generated methods.

    ``make_plan``, ``epoch`` (its ``now``), ``context_target`` and ``gradient_of`` are handed in: the
    boundary knows no targets and makes no classes.
    """
    branches = entry.branches if entry.has_boundary else ()
    source = calls_source(entry, branches, cls._growth is not None)
    base = operator_base_name(entry.family, entry.name)
    filename = f"tileops_generated/{entry.family}/{base}_boundary{owner.suffix}.py"
    namespace: dict[str, Any] = {
        "_cls": cls,
        "_MISSING": MISSING_ARGUMENT,
        "_EXACT": frozenset({torch.Tensor, torch.nn.Parameter}),
        "_is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "_direct": direct,
        "_grad_enabled": torch.is_grad_enabled,
        "_superfluous": refuse_superfluous,
        **HELPERS,
        "_epoch": epoch,
        "_context": context_target,
        "_make_plan": make_plan,
        "_gradient_of": gradient_of,
        "_keep_hot": keep_hot,
        "_ABSENT": ABSENT,
        "_growth": cls._growth,
        **NAMES,
        "_resolve": resolve,
        "_resolve_fake": resolve_fake,
        "_signature": cls._signature,
        "_empty": torch.empty,
        "_bump_version": torch.autograd.graph.increment_version,
        "_refuse_without_storage": refuse_without_storage,
        "_refuse_written_grad": refuse_written_grad,
        "_tangents_around": tangents_around,
        "_below_autograd": torch._C._AutoDispatchBelowAutograd,
        "_autocast": torch._C._is_any_autocast_enabled,
        "_without_autocast": torch._C._DisableAutocast,
        "_keys_below_autograd": keys_below_autograd,
        "_live": live_states(cls).get,
        "_register_strategies": register_strategies,
        "_write_calls": write_calls,
        "_owner": owner,
        "_generation": owner.generation,
    }
    namespace = compile_source(source, filename, namespace)
    cls.__call__ = namespace["__call__"]
    cls.__call__.__signature__ = call_signature(entry)
    cls.__call__.__qualname__ = f"{cls.__qualname__}.__call__"
    if not entry.has_boundary:
        return Boundary((), None)
    cls._call_boundary = namespace["_call_boundary"]
    cls._run = staticmethod(namespace["_run"])
    boundary = _define(cls, entry, branches, base, namespace)
    owner.library = boundary.library
    return boundary


def _refusing_nested(cls: Any, overload: Any) -> Callable[..., None]:
    names = [argument.name for argument in overload._schema.arguments]

    def refuse_nested(*args: Any) -> None:
        refuse_without_storage(cls, dict(zip(names, args, strict=True)))

    return refuse_nested


def _define(
    cls: Any, entry: Entry, branches: tuple[Branch, ...], base: str, namespace: dict[str, Any]
) -> Boundary:
    library = torch.library.Library("tileops", "FRAGMENT")
    operators = []
    # Else a compiler takes two equal calls for one, and may repeat one in the backward pass.
    tags = (torch.Tag.nondeterministic_seeded,) if cls.random else ()
    for index, branch in enumerate(branches):
        name = base + branch.suffix
        schema = schema_of(entry, branch)
        library.define(name + schema, tags=tags)
        overload = getattr(torch.ops.tileops, name).default
        library.impl(name, namespace[f"_body_{index}"], "CompositeExplicitAutograd")
        torch.library.register_fake(f"tileops::{name}", namespace[f"_fake_{index}"], lib=library)
        library.impl(name, namespace[f"_autograd_{index}"], "Autograd")
        library.impl(name, _refusing_nested(cls, overload), "AutogradNestedTensor")
        give_batching(cls, branch, overload, library, name)
        give_autocast(cls, branch, overload, library, name)
        namespace[f"_op_{index}"] = overload
        namespace[f"_dispatched_{index}"] = dispatched(name)
        give_call(name, namespace[f"_node_{index}"])
        namespace[f"_carried_{index}"] = carrying(cls, branch)
        namespace[f"_differentiable_{index}"] = differentiable(
            cls, overload, branch, namespace[f"_body_{index}"], namespace["_gradient_of"]
        )
        operators.append(Operator(f"tileops::{name}", schema, branch, overload))
    return Boundary(tuple(operators), library)
