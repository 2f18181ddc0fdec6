"""Which ops melt into the graph: an op of pointwise or reduction work that is served in tree may become
its decomposition, so that Inductor fuses across it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from tileops.engine import targets
from tileops.engine.boundary.instances import resolve
from tileops.engine.errors import BackendError
from tileops.engine.manifest.entry import Branch, Entry
from tileops.engine.op import Op
from tileops.engine.trace import owner_of
from tileops.fusion.cost import estimate, slowly_wide
from tileops.fusion.graph import Edit, tensors_of, value_of
from tileops.fusion.policies import policy_of
from tileops.fusion.rewrite import Rewrite

__all__ = ["Call", "call_of", "conclude", "place"]


@dataclass(frozen=True)
class Call:
    """A node that calls an op: the op and its branch."""

    node: Node
    op: Op
    branch: Branch

    @property
    def arguments(self) -> tuple[Any, ...]:
        """For each input of the op, what the node is given now: a node, or None."""
        given = given_to(self.node)
        return tuple(given.get(item.name) for item in self.entry.inputs)

    @property
    def entry(self) -> Entry:
        return self.op.entry

    @property
    def name(self) -> str:
        return type(self.op).__name__

    @property
    def device(self) -> torch.device:
        found: torch.device = tensors_of([value_of(a) for a in self.arguments])[0].device
        return found


def given_to(node: Node) -> dict[str, Any]:
    """The arguments of a call of an operator by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def call_of(node: Node) -> Call | None:
    """The call of an op that a node is, None for any other node."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "tileops":
        return None
    key = given_to(node).get("instance_key")
    if not isinstance(key, str):
        return None  # an operator of the engine's own
    cls = owner_of(target)
    branch = next(o.branch for o in cls._boundary.operators if o.overload is target)
    op = resolve(cls, key).op
    return Call(node, op, branch)


def served_in_tree(op: Op, device: torch.device) -> str:
    """'' where in-tree kernels would serve a call now, else who would."""
    try:
        decision = targets.decide(type(op).__name__, op.target, device)
    except BackendError as error:
        return str(error)  # the call itself will say so
    return "" if decision.target == targets.BUILTIN else f"target {decision.target!r} serves it"


def place(rewrite: Rewrite) -> None:
    """Inline what may and should be."""
    calls = [call for node in rewrite.graph.nodes if (call := call_of(node)) is not None]
    able: list[Call] = []
    for call in calls:
        if call.entry.kind == "template":
            rewrite.templates[call.node] = call.name
            continue
        reason = _unable(call, rewrite)
        if reason:
            rewrite.report.add("declined", call.node, call.name, reason=reason)
        else:
            able.append(call)
    melting = frozenset(call.node for call in able)
    for call in able:
        said, by = policy_of(call.node, call.entry.fusion, rewrite.policy)
        costs = estimate(call.node, call.entry.kind, melting)
        if said == "never":
            reason = f"policy never, by {by}"
        elif said == "auto" and not costs.inlining_pays:
            reason = f"its own kernel is faster: {costs}"
        else:
            why = f"policy always, by {by}" if said == "always" else str(costs)
            reason = _inline(call, rewrite, why, said == "auto")
        if reason:
            rewrite.report.add("declined", call.node, call.name, reason=reason)


def conclude(rewrite: Rewrite) -> None:
    """Say of the templates that no pass has changed or spoken of that they stay."""
    said = {data["node"] for kind in ("declined", "fused") for data in rewrite.report.of(kind)}
    for node in rewrite.graph.nodes:
        if node in rewrite.templates and node.name not in said:
            name = rewrite.templates[node]
            rewrite.report.add("declined", node, name, reason="a template keeps its kernel")


def _unable(call: Call, rewrite: Rewrite) -> str:
    """Why a call cannot be inlined, whatever is wanted."""
    entry = call.entry
    if type(call.op).decomposition is None:
        return "it has no decomposition"
    if type(call.op).random:
        return "it draws random numbers"
    if call.branch.writes or call.branch.out:
        written = ", ".join((*call.branch.writes, *(["out"] if call.branch.out else [])))
        return f"it writes {written}"
    if rewrite.autocast:
        return "it is called under torch.autocast"
    for item, argument in zip(entry.inputs, call.arguments, strict=True):
        value = value_of(argument)
        if argument is None:
            continue
        if not isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(
            value
        ):
            return f"{item.name} is no plain tensor"
        flows = item in entry.differentiable_inputs and entry.differentiable_outputs
        if value.requires_grad and not flows:
            return f"it declares no gradient for {item.name}, which asks for one"
    return served_in_tree(call.op, call.device)


def _inline(call: Call, rewrite: Rewrite, why: str, if_cheap: bool) -> str:
    """'' where the call has become its decomposition, else why not."""
    node, device = call.node, call.device
    given = [a for a in call.arguments if a is not None]
    try:
        traced = _traced(call, [value_of(a) for a in given], rewrite)
    except Exception as error:  # noqa: BLE001  (whatever a decomposition raises while it is traced)
        return f"its decomposition cannot be traced: {type(error).__name__}: {error}"
    if any(n.op not in ("placeholder", "call_function", "output") for n in traced.graph.nodes):
        return "its decomposition holds constants"
    steps = [n.meta.get("val") for n in traced.graph.nodes]
    if if_cheap and slowly_wide(device, [value_of(a) for a in given], steps):
        return "its own kernel is faster: its decomposition computes in float64"
    edit = Edit(rewrite.graph, node, rewrite.mode)
    results = _paste(traced, edit, given)
    pairs: dict[Node, Node] = {}
    if isinstance(value_of(node), torch.Tensor):
        pairs[node] = results[0]
    else:
        for user in list(node.users):
            if user.target is not getitem:
                edit.undo()
                return f"{user.name} takes its results as one"
            place = user.args[1]
            assert isinstance(place, int)
            pairs[user] = results[place]
    problem = edit.replace(pairs)
    if problem:
        return f"inlined, {problem}"
    rewrite.report.add("inlined", node, call.name, why=why)
    edit.erase_unused([*edit.added, node, *pairs])
    if node not in rewrite.substituted:
        rewrite.inlined.append((call.op, device))
    return ""


def _traced(call: Call, values: list[Any], rewrite: Rewrite) -> GraphModule:
    """The decomposition in aten operators, from the passed inputs to the results of the operator."""
    op, entry = call.op, call.entry
    presence = [argument is not None for argument in call.arguments]
    decomposition: Callable[..., Any] | None = type(op).decomposition
    assert decomposition is not None
    with_gradient = {output.name for output in entry.differentiable_outputs}

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        inputs = [next(rest) if there else None for there in presence]
        result = decomposition(*inputs, **op._params)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(
            _own(value, tensors, output.name in with_gradient)
            for output, value in zip(entry.outputs, results, strict=False)
            if value is not None
        )

    with rewrite.mode, torch.enable_grad():
        traced = make_fx(function, pre_dispatch=True)(*values)
    traced.graph.eliminate_dead_code()
    return traced


def _own(
    value: torch.Tensor, inputs: tuple[torch.Tensor, ...], differentiable: bool
) -> torch.Tensor:
    """``value`` as what the op promises: contiguous memory of its own, a gradient where declared."""
    if not differentiable:
        value = value.detach()
    own = value.untyped_storage()._cdata
    if any(own == t.untyped_storage()._cdata for t in inputs):
        return value.clone(memory_format=torch.contiguous_format)
    return value.contiguous()


def _paste(traced: GraphModule, edit: Edit, given: list[Any]) -> list[Node]:
    """The nodes of a traced graph, before the anchor; returns those of its results."""
    known: dict[Node, Any] = {}
    arguments = iter(given)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(arguments)
        elif node.op == "output":
            return [known[result] for result in node.args[0]]
        else:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = edit.add(node.target, args, kwargs, node.meta.get("val"))
    raise AssertionError("a traced graph has an output")
