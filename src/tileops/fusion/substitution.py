"""Plain PyTorch that means an op becomes the op.

Each pattern has a hint, such as the mean of squares plus a number. From a node that matches it, the nodes
that it leads to are tried as the end of one of the pattern's meanings, the furthest first. What matches
must then prove that it is the op: see ``proof``. Where nothing does, the report says how far it came.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import getitem

import torch
from torch.fx import Node

from tileops.engine.errors import TileopsError
from tileops.engine.manifest.entry import Branch
from tileops.engine.op import Op
from tileops.engine.pattern import Call, NoMatchError, Number, Pattern, Product, Sum, Term
from tileops.fusion.cost import brings_nothing
from tileops.fusion.graph import Edit, canonical, difference, is_pointwise, storages, value_of
from tileops.fusion.matching import Binding, Matcher
from tileops.fusion.patterns import Known, known
from tileops.fusion.placement import served_in_tree
from tileops.fusion.plain import plainly
from tileops.fusion.policies import policy_of
from tileops.fusion.proof import Proof, permuted, prove
from tileops.fusion.reading import equal_shapes, transparent
from tileops.fusion.rewrite import Rewrite

__all__ = ["substitute"]

REACH = 24
"""How many nodes that a hint leads to are tried."""
PROVING = 100
"""What has been read whole came further than what has not."""


def substitute(rewrite: Rewrite) -> None:
    """Put ops where plain PyTorch means them."""
    if not any(n.op in ("call_function", "call_method") for n in rewrite.graph.nodes):
        return
    work = _Pass(rewrite)
    for node in list(rewrite.graph.nodes):
        if node.op in ("call_function", "call_method") and not _gone(node):
            work.at(node)


class _Pass:
    def __init__(self, rewrite: Rewrite) -> None:
        self.rewrite = rewrite
        self.known = [(k, k.pattern) for k in known()]
        self.covered: set[Node] = set()
        """Steps of what has been matched already: they hint at nothing more."""

    def at(self, node: Node) -> None:
        """All patterns that ``node`` hints at: the first that holds is taken."""
        name = canonical(node)
        if name is None or node in self.covered:
            return
        best: tuple[int, Known, Node, str] | None = None
        for one, pattern in self.known:
            hints = pattern.hint if isinstance(pattern.hint, tuple) else (pattern.hint,)
            if name not in pattern.calls and not any(
                self._hinted(hint, name, node) for hint in hints
            ):
                continue
            score, where, reason = self._attempt(one, node)
            if not reason:
                return
            if score >= 0 and (best is None or score > best[0]):
                best = (score, one, where, reason)
        if best is not None:
            _, one, where, reason = best
            self.rewrite.report.add("near miss", where, one.entry.name, reason=reason)

    def _hinted(self, hint: Term, name: str, node: Node) -> bool:
        if name not in _beginnings(hint):
            return False
        loose = Matcher(self.rewrite.memory, self.rewrite.told, loose=True)
        return next(loose.matches(hint, node), None) is not None

    def _attempt(self, one: Known, hint: Node) -> tuple[int, Node, str]:
        """How far it came, where, and '' or why not further."""
        pattern, score, where = one.pattern, -1, hint
        reason = "no step beyond it is the op's"
        reached = list(_reached(hint))
        for root in reached:
            end = _before_cast(root, pattern.result)
            if end is None:
                continue
            for place, meaning in enumerate(pattern.meanings):
                matcher = Matcher(self.rewrite.memory, self.rewrite.told)
                for binding in matcher.matches(meaning, end):
                    try:
                        terms = {name: terms[place] for name, terms in pattern.beside.items()}
                        beside = self._beside(terms, reached, root, binding)
                        proof = prove(self.rewrite, pattern, meaning, root, binding, beside)
                        if hint not in proof.region and hint is not root:
                            raise NoMatchError(f"{hint.name} is no part of it")
                        self._settle(one, proof)
                        return binding.score, root, ""
                    except NoMatchError as error:
                        matcher.note(replace(binding, score=binding.score + PROVING), str(error))
                if matcher.score > score and matcher.reason:
                    score, where, reason = matcher.score, root, matcher.reason
        return score, where, reason

    def _beside(
        self, terms: Mapping[str, Term], reached: list[Node], root: Node, binding: Binding
    ) -> dict[Node, str]:
        """What among ``reached`` stands for outputs of the op that are no steps on the way to ``root``."""
        matcher = Matcher(self.rewrite.memory, self.rewrite.told)
        return {
            node: name
            for name, term in terms.items()
            for node in reached
            if node is not root
            and not transparent(node)
            and next(matcher.matches(term, node, binding), None) is not None
        }

    def _settle(self, one: Known, proof: Proof) -> None:
        """Replace what is proved, or say why not. Raises ``NoMatchError`` where the op refuses."""
        cls, root = one.op, proof.root
        try:
            op = cls(**proof.params)
        except TileopsError as error:
            raise NoMatchError(str(error)) from None
        inputs = _inputs(op, proof)
        _check_outputs(op, proof)
        reason = self._unwanted(op, one.pattern, proof)
        if reason == one.pattern.no_gain and one.pattern.plain is not None:
            reason = self._by_torch(one.pattern, proof)
            if not reason:
                return
        if reason:
            self.covered |= proof.region
            self.rewrite.report.add("declined", root, one.entry.name, reason=reason)
            return
        edit = Edit(self.rewrite.graph, proof.anchor, self.rewrite.mode)
        try:
            call, results = _call(edit, op, proof, inputs)
        except TileopsError as error:
            edit.undo()
            raise NoMatchError(str(error)) from None
        self._put(edit, proof, call, results, (one.entry.name, repr(op)))

    def _put(
        self,
        edit: Edit,
        proof: Proof,
        call: Node,
        results: Mapping[Node, Node],
        named: tuple[str, str],
    ) -> None:
        """Let a call take the place of what is proved. Raises ``NoMatchError`` where it cannot."""
        problem = edit.replace(results)
        if problem:
            raise NoMatchError(problem)
        self.covered |= proof.region
        self.rewrite.substituted.add(call)
        op, text = named
        self.rewrite.report.substituted(call, op, text, proof.region)
        _sweep(self.rewrite, proof.region)

    def _by_torch(self, pattern: Pattern, proof: Proof) -> str:
        """'' where a function of torch has taken the place of what is proved, else why not."""
        edit = Edit(self.rewrite.graph, proof.anchor, self.rewrite.mode)
        found = plainly(edit, pattern, proof)
        if isinstance(found, str):
            return found
        call, text = found
        results = {proof.root: _alike(edit, proof.root, call, proof.layout)}
        self._put(edit, proof, call, results, (canonical(call) or "", text))
        return ""

    def _unwanted(self, op: Op, pattern: Pattern, proof: Proof) -> str:
        """Why plain PyTorch should stay."""
        said, by = policy_of(proof.root, "auto", self.rewrite.policy)
        if said == "never":
            return f"policy never, by {by}"
        if said == "always" or served_in_tree(op, proof.device):
            return ""
        if proof.shared is not None:
            return f"{proof.shared.name} is used beyond it and would be computed twice"
        gradient = value_of(proof.root).requires_grad
        return brings_nothing(op.entry, pattern, proof.device.type, gradient)


def _before_cast(root: Node, dtype: str) -> Node | None:
    """Where a meaning ends whose result is cast to a dtype; ``root`` where it is not cast; None where it
    should be."""
    if not dtype:
        return root
    value, source = value_of(root), root.args[0] if root.args else None
    cast = canonical(root) == "to" and str(value.dtype) == f"torch.{dtype}"
    return source if cast and isinstance(source, Node) else None


def _check_outputs(op: Op, proof: Proof) -> None:
    """Raises ``NoMatchError`` where a gradient is asked of what has none."""
    names = {output.name for output in op.entry.differentiable_outputs}
    for node, name in proof.outputs.items():
        given = name or op.entry.outputs[0].name
        if value_of(node).requires_grad and given not in names:
            raise NoMatchError(f"the op has no gradient of {given}, of which one is asked")


def _call(
    edit: Edit, op: Op, proof: Proof, inputs: tuple[str | None, ...]
) -> tuple[Node, dict[Node, Node]]:
    """The call of the op, and what stands for each output that was found."""
    overload = next(o.overload for o in op._boundary.operators if o.branch == Branch())
    call = edit.call(overload, *(proof.as_input(edit, n) for n in inputs), op._instance_key)
    names = [output.name for output in op.entry.outputs]
    results = {"": call} if len(names) == 1 else {}
    found: dict[Node, Node] = {}
    for node, name in proof.outputs.items():
        if name not in results:
            results[name] = edit.call(getitem, call, names.index(name) if name else 0)
        found[node] = _laid_out(edit, node, results[name])
    if proof.layout:
        turned = permuted(edit, results[""], proof.layout)
        found[proof.root] = _alike(edit, proof.root, turned, proof.layout)
    return call, found


def _laid_out(edit: Edit, node: Node, result: Node) -> Node:
    """A result of the op with the dims of size 1 that what it stands for has."""
    wanted, given = value_of(node), value_of(result)
    if equal_shapes(wanted.shape, (*given.shape, 1)):
        return edit.call(torch.unsqueeze, result, -1)
    if wanted.dim() != given.dim() and wanted.numel() == given.numel() == 1:
        return edit.call(torch.reshape, result, tuple(wanted.shape))
    return result


def _alike(edit: Edit, old: Node, new: Node, layout: tuple[int, ...]) -> Node:
    """``new``, copied where it does not lie as ``old`` does: contiguous, or so in the op's layout."""
    if not difference(value_of(old), value_of(new)):
        return new
    order = tuple(range(len(layout))) if value_of(old).is_contiguous() else layout
    back = tuple(order.index(d) for d in range(len(order)))
    turned = permuted(edit, new, order)
    copied = edit.call(torch.clone, turned, memory_format=torch.contiguous_format)
    return permuted(edit, copied, back)


_BEGINNINGS: dict[type, tuple[str, ...]] = {
    Sum: ("add", "sub", "rsub"),
    Product: ("mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "silu"),
    Number: (),
}
_SPELLED = {"amax": ("amax", "getitem", "max"), "join": ("cat", "reshape")}
"""The nodes that a primitive may be, where its name is not that of the one."""


def _beginnings(hint: Term) -> tuple[str, ...]:
    """The names of the nodes at which a hint is looked for."""
    if isinstance(hint, Call):
        return _SPELLED.get(hint.name, (hint.name,))
    return _BEGINNINGS.get(type(hint), ())


def _inputs(op: Op, proof: Proof) -> tuple[str | None, ...]:
    """For each input of the op the hole that stands for it. Raises ``NoMatchError``."""
    gradients = op.entry.differentiable_inputs
    names: list[str | None] = []
    for item in op.entry.inputs:
        there = item.name in proof.inputs
        if there:
            value = value_of(proof.inputs[item.name].node)
            asked = value.requires_grad and value_of(proof.root).requires_grad
            if asked and item not in gradients:
                raise NoMatchError(f"the op has no gradient for {item.name}, which asks for one")
        elif not item.optional and item.passed_when is None:
            raise NoMatchError(f"nothing stands for {item.name}")
        names.append(item.name if there else None)
    return tuple(names)


def _reached(hint: Node) -> Iterator[Node]:
    """What ``hint`` leads to step by step, the furthest first."""
    found, queue = {hint: None}, [hint]
    while queue and len(found) < REACH:
        for user in queue.pop(0).users:
            if user not in found and (is_pointwise(user) or transparent(user)):
                found[user] = None
                queue.append(user)
    for node in sorted(found, reverse=True):
        value = value_of(node)
        if isinstance(value, torch.Tensor) and not _same_memory(node):
            yield node


def _same_memory(node: Node) -> bool:
    """Whether a node is a view or a cast that need not be one: what it is of stands for it."""
    if not transparent(node):
        return False
    return storages(node.args[0]) == storages(node)


def _gone(node: Node) -> bool:
    return bool(getattr(node, "_erased", False))


def _sweep(rewrite: Rewrite, region: set[Node]) -> None:
    """Erase the steps that nothing uses any more, and what only they used."""
    waiting = sorted(region)
    while waiting:
        node = waiting.pop()
        if _gone(node) or node.users or canonical(node) is None or canonical(node) == "dropout":
            continue
        waiting += sorted(node.all_input_nodes)
        rewrite.graph.erase_node(node)
