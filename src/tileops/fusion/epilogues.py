"""Template ops take neighbours with them: what follows a matrix product element by element moves into the
product's epilogue, and a number that multiplies a query moves into attention's scale.

A chain of nodes that each have one user is read from a product on, as far as it has the form
``scale * activation(product + bias) + residual`` with casts between; then a cost rule decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from tileops.engine.errors import TileopsError
from tileops.engine.op import Op
from tileops.fusion import onednn
from tileops.fusion.cost import epilogue_loses, is_cpu
from tileops.fusion.graph import Edit, canonical, fusable, storages, value_of
from tileops.fusion.placement import Call, call_of, given_to, served_in_tree
from tileops.fusion.policies import policy_of
from tileops.fusion.rewrite import Rewrite

__all__ = ["take"]

PRODUCTS = ("linear", "matmul", "mm", "addmm")
ACTIVATIONS = ("relu", "gelu", "silu")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
OP = "GEMMEpilogueFwdOp"
LARGEST = torch.finfo(torch.float32).max
"""Of scales: the op multiplies in float32."""


def take(rewrite: Rewrite) -> None:
    """Let products take their epilogues, and attention its scale."""
    for node in list(rewrite.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if canonical(node) in PRODUCTS or _calls(node, "GEMMFwdOp"):
            _try_product(rewrite, node)
        elif _calls(node, "GQADenseFwdOp"):
            _scale_of_attention(rewrite, node)


def _calls(node: Node, name: str) -> bool:
    call = call_of(node)
    return call is not None and call.name == name


# ---- reading a chain -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    """A product and what follows it. Sizes: ``a`` is ``[*B, K]``, or ``[K, M]`` with ``trans_a``."""

    product: Node
    a: Node
    b: Node
    trans_a: bool
    trans_b: bool
    own: Op | None = None
    """The op that the product is a call of."""
    bias: Node | None = None
    activation: str | None = None
    scale: float = 1.0
    residual: Node | None = None
    stage: int = 0
    """How far the form has been read: 1 bias, 2 activation, 3 scale, 4 residual."""
    steps: tuple[Node, ...] = ()
    taken: tuple[str, ...] = ()
    """What the steps are, in words."""
    read: tuple[tuple[Node, Node], ...] = field(default=())
    """Each operand with the node that reads it."""

    @property
    def last(self) -> Node:
        return self.steps[-1] if self.steps else self.product

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = value_of(self.a).dtype
        return dtype

    def then(self, node: Node, what: str, stage: int, **more: Any) -> _Chain:
        """One step more."""
        taken = (*self.taken, what) if what else self.taken
        return replace(self, steps=(*self.steps, node), taken=taken, stage=stage, **more)


def _try_product(rewrite: Rewrite, node: Node) -> None:
    start = _start(node)
    if start is None:
        return
    chains: list[_Chain] = [start]
    while (longer := _longer(chains[-1])) is not None:
        chains.append(longer)
    said, by = policy_of(node, "auto", rewrite.policy)
    library = said == "auto" and is_cpu(value_of(node).device)
    chain = _of_library(chains) if library else chains[-1]
    beyond = [c for c in chains if not set(c.taken) <= {"bias"}]
    if not beyond and not library:
        return  # the library adds it
    reason, why = _settle(rewrite, chain, said, by)
    if not reason:
        takes = ", ".join(chain.taken) or "nothing"
        rewrite.report.add("fused", node, OP, takes=takes, why=why)
    elif beyond:
        takes = ", ".join(beyond[-1].taken)
        rewrite.report.add("declined", node, OP, reason=reason, takes=takes)


def _of_library(chains: list[_Chain]) -> _Chain:
    """The longest chain that oneDNN has in one call and Inductor does not compute as well with what
    follows."""

    def has(chain: _Chain) -> bool:
        if chain.stage < 2:
            return True
        there = chain.stage == 2 and chain.activation in onednn.FUSED
        return there and not onednn.swaps(value_of(chain.a)) and not _fuses_on(chain.last)

    return next(filter(has, reversed(chains)))


def _start(node: Node) -> _Chain | None:
    """The product that a node is; None where it is none that the op computes."""
    call = call_of(node)
    if call is not None:
        a, b = call.arguments
        op, given = call.op, call.op._params
        return _checked(
            _Chain(node, a, b, given["trans_a"], given["trans_b"], op, read=((a, node), (b, node)))
        )
    name, arguments = canonical(node), list(node.args)
    names = {"linear": ("input", "weight", "bias"), "addmm": ("input", "mat1", "mat2")}
    wanted = names.get(name or "", ("input", "other" if name == "matmul" else "mat2"))
    given = dict(zip(wanted, arguments, strict=False)) | dict(node.kwargs)
    if set(given) - set(wanted):
        return None  # beta and alpha of addmm, out_dtype of mm
    operands: list[Any] = [given.get(key) for key in wanted]
    bias = None
    if name == "linear":
        a, b, bias = operands
    elif name == "addmm":
        bias, a, b = operands
    else:
        a, b = operands
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    read = tuple((n, node) for n in (a, b, bias) if n is not None)
    return _checked(
        _Chain(
            node, a, b, False, name == "linear", bias=bias, stage=int(bias is not None), read=read
        )
    )


def _checked(chain: _Chain) -> _Chain | None:
    """With operands that lie as the op wants them, None where they do not."""
    values = [value_of(n) for n in (chain.product, chain.a, chain.b)]
    if not all(isinstance(v, FakeTensor) and v.layout is torch.strided for v in values):
        return None
    _, a, b = values
    if b.dim() != 2 or a.dim() < 2 or a.dtype not in FLOATS:
        return None
    if chain.own is None:
        turned = not a.is_contiguous()
        if turned and not (a.dim() == 2 and a.t().is_contiguous()):
            return None  # it would be copied
        chain = replace(chain, trans_a=turned)
        if not b.is_contiguous():
            if not b.t().is_contiguous():
                return None
            chain = replace(chain, trans_b=not chain.trans_b)
    if chain.bias is not None and not _is_bias(chain, chain.bias):
        return None
    return chain


def _is_bias(chain: _Chain, node: Any) -> bool:
    value, columns = value_of(node), value_of(chain.product).shape[-1]
    return (
        isinstance(node, Node)
        and isinstance(value, FakeTensor)
        and value.dtype is chain.dtype
        and value.dim() == 1
        and bool(value.shape[0] == columns)
    )


def _longer(chain: _Chain) -> _Chain | None:
    """The chain and its next step; None where that is the end of it."""
    users = list(chain.last.users)
    if len(users) != 1:
        return None
    (node,) = users
    name, value = canonical(node), value_of(node)
    if name is None or not isinstance(value, FakeTensor) or value.dtype not in FLOATS:
        return None
    if value.shape != value_of(chain.last).shape:
        return None
    if name in ACTIVATIONS:
        return _activation(chain, node, name)
    if name in ("mul", "div"):
        return _scale(chain, node, name)
    if name == "add":
        return _sum(chain, node)
    if name in ("to", "contiguous"):
        widened = value.dtype is not value_of(chain.last).dtype
        wide = value.dtype in (chain.dtype, torch.float32)
        return chain.then(node, "cast" * widened, chain.stage) if wide else None
    return None


def _activation(chain: _Chain, node: Node, name: str) -> _Chain | None:
    given = dict(node.kwargs)
    given.pop("inplace", None)
    if len(node.args) > 1 and node.args[1] is not False:
        given["approximate"] = node.args[1]
    word = given.pop("approximate", "none")
    if chain.stage > 1 or given or word not in ("none", "tanh"):
        return None
    name = "gelu_tanh" if word == "tanh" else name
    return chain.then(node, name, 2, activation=name)


def _scale(chain: _Chain, node: Node, name: str) -> _Chain | None:
    number = _number(node, chain.last, name)
    if number is None or chain.stage > 3 or abs(chain.scale * number) > LARGEST:
        return None
    return chain.then(node, "scale", 3, scale=chain.scale * number)


def _number(node: Node, of: Node, name: str) -> float | None:
    """The factor by which ``node`` multiplies ``of``."""
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if name == "mul" and second is of:
        first, second = second, first
    if first is not of or isinstance(second, bool) or not isinstance(second, int | float):
        return None
    if name == "div":
        return 1.0 / second if second else None
    return float(second)


def _sum(chain: _Chain, node: Node) -> _Chain | None:
    if len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1 or set(node.kwargs) - {"alpha"}:
        return None
    first, other = node.args if node.args[0] is chain.last else reversed(node.args)
    value = value_of(other)
    if first is not chain.last or other is chain.last or not isinstance(value, FakeTensor):
        return None
    if value.dtype is not chain.dtype or chain.stage > 3:
        return None
    assert isinstance(other, Node)
    read = (*chain.read, (other, node))
    if chain.stage == 0 and _is_bias(chain, other):
        return chain.then(node, "bias", 1, bias=other, read=read)
    whole = value.shape == value_of(node).shape and value.is_contiguous()
    if not whole or value.requires_grad:
        return None  # its gradient is free outside and would be copied by the op
    return chain.then(node, "residual", 4, residual=other, read=read)


# ---- deciding and changing -----------------------------------------------------------------------


def _settle(rewrite: Rewrite, chain: _Chain, said: str, by: str) -> tuple[str, str]:
    """``('', why)`` where the product took its epilogue, else the reason why not."""
    reason = _unable(rewrite, chain)
    if reason:
        return reason, ""
    if said == "never":
        return f"policy never, by {by}", ""
    try:
        op = _op(chain)
    except TileopsError as error:
        return str(error), ""
    library = said == "auto" and is_cpu(value_of(chain.product).device)
    if said == "auto":
        reason = _loses(rewrite, chain, op)
    problem = reason or _replace(rewrite, chain, op, library)
    why = f"policy always, by {by}" if said == "always" else "its kernel is faster than both apart"
    why = "oneDNN's product is faster" if library else why
    return (problem, "") if problem else ("", why)


def _keeps(chain: _Chain) -> bool:
    return chain.activation is not None and value_of(chain.product).requires_grad


def _op(chain: _Chain) -> Op:
    from tileops.gemm import GEMMEpilogueFwdOp

    dtype = value_of(chain.last).dtype
    return GEMMEpilogueFwdOp(
        chain.trans_a,
        chain.trans_b,
        activation=chain.activation,
        scale=chain.scale,
        out_dtype=None if dtype is chain.dtype else dtype,
        keeps_preactivation=_keeps(chain),
    )


def _loses(rewrite: Rewrite, chain: _Chain, op: Op) -> str:
    """Why the op would not be faster than what Inductor makes of the chain."""
    if rewrite.own_products and chain.own is None:
        return f"with {rewrite.own_products} Inductor has products of its own"
    if not is_cpu(value_of(chain.product).device):
        if _fuses_on(chain.last):
            return "Inductor fuses it with what follows"
    elif value_of(chain.product).requires_grad:
        return "a gradient is asked for"
    product, last = value_of(chain.product), value_of(chain.last)
    a, b = value_of(chain.a), value_of(chain.b)
    plain = chain.own is None
    inputs = {
        "a": a.t() if plain and chain.trans_a else a.flatten(0, -2) if a.dim() > 2 else a,
        "b": b.t() if plain and not b.is_contiguous() else b,
        "bias": value_of(chain.bias),
        "residual": None if chain.residual is None else product.flatten(0, -2),
    }
    kept = product.flatten(0, -2) if _keeps(chain) else None
    outputs = {"d": last.flatten(0, -2), "preactivation": kept}
    return epilogue_loses(op, inputs, outputs, product.device)


def _unable(rewrite: Rewrite, chain: _Chain) -> str:
    """Why a chain cannot become the op, whatever is wanted."""
    if rewrite.autocast:
        return "it is called under torch.autocast"
    if not rewrite.modes.one((chain.product, *chain.steps)):
        return "part of it is under torch.no_grad"
    if value_of(chain.product).dtype is not chain.dtype:
        return f"its product is {value_of(chain.product).dtype}"
    if chain.own is not None:
        served = served_in_tree(chain.own, value_of(chain.a).device)
        if served:
            return served
    for operand, reader in chain.read:
        if rewrite.memory.written(operand, start=reader, end=chain.last):
            return f"{operand.name} is written before {chain.last.name}"
        value = value_of(operand)
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return f"{operand.name} is no plain tensor"
    return ""


def _fuses_on(node: Node) -> bool:
    """Whether all that reads a node, through views of it, is work that Inductor fuses."""

    def fuses(user: Node) -> bool:
        if isinstance(value_of(user), torch.Tensor) and storages(user) == storages(node):
            return _fuses_on(user)
        return fusable(user)

    return bool(node.users) and all(map(fuses, node.users))


def _replace(rewrite: Rewrite, chain: _Chain, op: Op, library: bool) -> str:
    """'' where the op, or the library's call, stands for the chain, else why not."""
    edit = Edit(rewrite.graph, chain.last, rewrite.mode)
    try:
        result = _emit_call(edit, chain) if library else _emit(edit, op, chain)
    except TileopsError as error:
        edit.undo()
        return str(error)
    problem = edit.replace({chain.last: result})
    if problem:
        return problem
    edit.erase_unused([chain.product, *chain.steps])
    if chain.own is not None:
        rewrite.inlined.append((chain.own, value_of(chain.a).device))
    return ""


def _emit(edit: Edit, op: Op, chain: _Chain) -> Node:
    """The call of the op before the chain's end, and its result in the chain's shape."""
    product = value_of(chain.product)
    flat = product.dim() > 2

    def matrix(node: Node | None, turned: bool = False) -> Node | None:
        if node is None:
            return None
        if turned:
            return edit.call(torch.t, node)
        return edit.call(torch.flatten, node, 0, -2) if flat and node is not chain.b else node

    plain = chain.own is None
    a = matrix(chain.a, plain and chain.trans_a)
    b = matrix(chain.b, plain and not value_of(chain.b).is_contiguous())
    branch = next(
        o.overload
        for o in type(op)._boundary.operators
        if o.branch.without == (() if _keeps(chain) else ("preactivation",))
    )
    result = edit.call(branch, a, b, chain.bias, matrix(chain.residual), op._instance_key)
    if _keeps(chain):
        result = edit.call(getitem, result, 0)
    return edit.call(torch.unflatten, result, 0, _leading(edit, chain)) if flat else result


def _emit_call(edit: Edit, chain: _Chain) -> Node:
    """oneDNN's call before the chain's end. The kernel of the op takes rows by rows only."""
    a, b = chain.a, chain.b
    if chain.own is not None:
        a, b = (edit.call(torch.ops.aten.contiguous.default, n) for n in (a, b))
    elif not value_of(b).is_contiguous():
        b = edit.call(torch.t, b)
    return onednn.emit(edit, a, b, chain.bias, chain.activation)


def _leading(edit: Edit, chain: _Chain) -> list[Any]:
    """The sizes of the leading dims, as numbers or nodes."""
    sizes = value_of(chain.product).shape[:-1]
    return [
        size if isinstance(size, int) else edit.call(torch.Tensor.size, chain.a, place)
        for place, size in enumerate(sizes)
    ]


# ---- attention -----------------------------------------------------------------------------------


def _scale_of_attention(rewrite: Rewrite, node: Node) -> None:
    """``attention(q * c, k, v)`` is ``attention(q, k, v)`` at ``c`` times the scale; so for ``k``."""
    for place in ("q", "k"):
        call = call_of(node)
        assert call is not None
        for factor, inner in _factors(call.arguments[("q", "k").index(place)]):
            changed, reason = _moved(rewrite, call, place, factor, inner)
            takes = f"scale of {place}"
            if reason:
                rewrite.report.add("declined", node, call.name, reason=reason, takes=takes)
            else:
                rewrite.report.add("fused", changed, call.name, why=f"times {factor}", takes=takes)
            node = changed
            break


def _factors(scaled: Any) -> Iterator[tuple[float, Node]]:
    """The number and the node that ``scaled`` is the product of, if it is used once."""
    if isinstance(scaled, Node) and len(scaled.users) == 1:
        name = canonical(scaled)
        for inner in scaled.all_input_nodes if name in ("mul", "div") else ():
            factor = _number(scaled, inner, name or "")
            if factor is not None:
                yield factor, inner


def _moved(
    rewrite: Rewrite, call: Call, place: str, factor: float, inner: Node
) -> tuple[Node, str]:
    """The call whose scale has taken the factor of an input, or the same call and why not."""
    node, op, scaled = call.node, call.op, call.arguments[("q", "k").index(place)]
    width, given_scale = value_of(scaled).shape[-1], op._params["sm_scale"]
    said, by = policy_of(node, call.entry.fusion, rewrite.policy)
    if said == "never":
        return node, f"policy never, by {by}"
    if rewrite.autocast:
        return node, "it is called under torch.autocast"
    if not rewrite.modes.one((scaled, node)):
        return node, f"{place} is scaled under another gradient mode"
    if value_of(inner).dtype is not value_of(scaled).dtype:
        return node, f"{place} is {value_of(inner).dtype} before it is scaled"
    if rewrite.memory.written(inner, start=scaled, end=node):
        return node, f"{inner.name} is written before {node.name}"
    if given_scale is None and not isinstance(width, int):
        return node, "the scale follows from a size that is not known"
    scale = (1 / math.sqrt(width or 1) if given_scale is None else given_scale) * factor
    if not (math.isfinite(scale) and scale > 0):
        return node, f"attention takes no scale of {scale}"
    changed = type(op)(**{**op._params, "sm_scale": scale}, target=op.target)
    given = given_to(node) | {place: inner, "instance_key": changed._instance_key}
    edit = Edit(rewrite.graph, node, rewrite.mode)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    result = edit.call(node.target, *map(given.get, names))  # type: ignore[arg-type]
    problem = edit.replace({node: result})
    if problem:
        return node, problem
    edit.erase_unused([scaled, node])
    return result, ""
