"""Reading and changing a Dynamo graph: what a node computes, what memory it shares, and edits that
are taken back where they would change what a node is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node, map_arg
from torch.utils._pytree import tree_leaves

__all__ = [
    "Edit",
    "Memory",
    "Modes",
    "canonical",
    "difference",
    "fusable",
    "hint_of",
    "idle",
    "is_pointwise",
    "storages",
    "tensors_of",
    "value_of",
]

# ---- values --------------------------------------------------------------------------------------


def value_of(node: Any) -> Any:
    """The fake value of a node; anything else is its own."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value."""
    if isinstance(value, torch.Tensor):
        return [value]  # most are: a tree costs much more
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def hint_of(size: Any) -> int:
    """A number for a size that may be symbolic; no guard comes of it."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else None
        return 1 << 20 if hint is None else int(hint)
    return int(size)


def difference(old: Any, new: Any) -> str:
    """Why ``new`` cannot stand for ``old``: shape, dtype, strides or device differ; '' if it can."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        for name, a, b in (
            ("dtype", old.dtype, new.dtype),
            ("device", old.device, new.device),
            ("shape", tuple(old.shape), tuple(new.shape)),
            ("strides", old.stride(), new.stride()),
        ):
            if a != b:
                return f"{name} {b} instead of {a}"
        return ""
    if isinstance(old, tuple | list) and isinstance(new, tuple | list) and len(old) == len(new):
        return next(filter(None, map(difference, old, new)), "")
    return "" if type(old) is type(new) and old == new else f"{new!r} instead of {old!r}"


# ---- meaning -------------------------------------------------------------------------------------

_SYNONYMS = {
    "absolute": "abs",
    "bfloat16": "to",
    "bool": "to",
    "char": "to",
    "clamp_max": "minimum",
    "clamp_min": "maximum",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "double": "to",
    "flatten": "reshape",
    "float": "to",
    "half": "to",
    "int": "to",
    "long": "to",
    "multiply": "mul",
    "negative": "neg",
    "softmax_": "softmax",
    "special_expit": "sigmoid",
    "special_softmax": "softmax",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "to_copy": "to",
    "true_divide": "div",
    "truediv": "div",
    "type": "to",
    "type_as": "to",
    "unsafe_view": "reshape",
    "view": "reshape",
    "view_as": "reshape",
}
"""Names of one meaning; what their arguments are remains the reader's to see."""
_VIEWS = frozenset(
    {
        "T",
        "alias",
        "chunk",
        "contiguous",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "getattr",
        "getitem",
        "imag",
        "mT",
        "moveaxis",
        "movedim",
        "narrow",
        "permute",
        "real",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "tensor_split",
        "to",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view_as_complex",
        "view_as_real",
    }
)
"""What may return memory of its argument and writes none."""
_REDUCTIONS = frozenset(
    {
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "argmin",
        "layer_norm",
        "log_softmax",
        "logsumexp",
        "max",
        "mean",
        "min",
        "norm",
        "prod",
        "rms_norm",
        "softmax",
        "std",
        "sum",
        "var",
        "var_mean",
    }
)
_MORE_POINTWISE = frozenset({"dropout", "masked_fill", "where"})
_MODULES = ("torch", "_operator", "math", "builtins")


@lru_cache(maxsize=4096)
def _name(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        full = target._qualified_op_name if hasattr(target, "_qualified_op_name") else str(target)
        namespace, _, name = full.replace(".", "::", 1).partition("::")
        return name.partition(".")[0] if namespace == "aten" else None
    if isinstance(target, str):
        return target
    module = getattr(target, "__module__", None) or "torch"  # torch.add and its like have none
    name = getattr(target, "__name__", None)
    return name if module.split(".")[0] in _MODULES else None


def canonical(node: Node) -> str | None:
    """The primitive that a node computes, by one name for all its spellings (operators, functions,
    methods, aten operators): ``add``, ``mul``, ``rsqrt``, ``to``, ``reshape``, ``linear``, ...

    None for what is no primitive, and for what writes a tensor.
    """
    try:
        return _names[node]
    except KeyError:
        return _names.setdefault(node, _primitive(node))


_names: weakref.WeakKeyDictionary[Node, str | None] = weakref.WeakKeyDictionary()
"""Patterns ask for each node's name hundreds of times. A node keeps its target, and its arguments what they
are: what stands for another node has that one's value."""


def _primitive(node: Node) -> str | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = _name(node.target)
    if name is None or _writes(node, name):
        return None
    name = _plain(name)
    return None if name not in _VIEWS and _returns_argument(node) and not idle(node) else name


def idle(node: Node) -> bool:
    """Whether a node is dropout that drops nothing, and so may return its argument."""
    if _name(node.target) != "dropout":
        return False
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
    training = given.get("training", given.get("train", True))
    return training is False or bool(given.get("p", 0.5) == 0)


def _plain(name: str) -> str:
    bare = name.strip("_")
    return _SYNONYMS.get(bare, bare)


def _returns_argument(node: Node) -> frozenset[int]:
    """The memory that a value has in common with an argument."""
    return storages(node) & storages(node.all_input_nodes)


_KEYWORDS = ("and_", "is_", "not_", "or_")
"""Functions of ``operator`` whose underscore keeps a keyword of Python's apart."""


def _writes(node: Node, name: str) -> bool:
    target = node.target
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if name in _KEYWORDS and getattr(target, "__module__", "") == "_operator":
        return False
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        return True
    if getattr(target, "__module__", "") == "_operator" and name.startswith("i"):
        return name not in ("invert", "index", "indexOf", "inv", "is_", "is_not")
    return False


@lru_cache(maxsize=1024)
def _is_pointwise(name: str) -> bool:
    if name in _MORE_POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def is_pointwise(node: Node) -> bool:
    """Whether each element of the result needs one element of each argument."""
    name = canonical(node)
    if name in ("max", "min"):  # of two tensors
        return all(isinstance(value_of(a), torch.Tensor) for a in node.args) and len(node.args) == 2
    return name is not None and (name == "to" or _is_pointwise(name))


def fusable(node: Node) -> bool:
    """Whether Inductor can compute the node in one kernel with a neighbour: pointwise, a reduction, or
    a rearrangement."""
    name = canonical(node)
    return name is not None and (
        is_pointwise(node) or name in _REDUCTIONS or name in _VIEWS or name in ("cat", "stack")
    )


# ---- memory --------------------------------------------------------------------------------------


def storages(argument: Any) -> frozenset[int]:
    """The memory of the tensors that an argument's nodes stand for."""
    if isinstance(argument, Node):
        nodes = [argument]
    else:
        nodes = []
        map_arg(argument, nodes.append)
    return frozenset(
        _unwrapped(t).untyped_storage()._cdata for node in nodes for t in tensors_of(value_of(node))
    )


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What the transforms of ``torch.func`` wrap, whose memory it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


_STATE = {
    "batch_norm": {"running_mean": 1, "running_var": 2},
    "embedding": {"weight": 1},
    "embedding_bag": {"weight": 1},
    "instance_norm": {"running_mean": 1, "running_var": 2},
}
"""What functions may write that no name tells of, and at which place it is given: an embedding with
``max_norm`` shortens rows of its weight."""


def _state(node: Node, name: str) -> list[Any]:
    given = dict(enumerate(node.args))
    if name.startswith("embedding") and node.kwargs.get("max_norm", given.get(3)) is None:
        return []
    return [node.kwargs.get(key, given.get(place)) for key, place in _STATE[name].items()]


class Memory:
    """Which nodes of a graph write memory, and whose. Made once, of the graph as it was captured.

    Fake values share storage where real ones will, so a value, its views and what was written in place
    are one memory.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {node: n for n, node in enumerate(graph.nodes)}
        self._writes: list[tuple[int, frozenset[int]]] = []
        for node, place in self._order.items():
            written = self._written(node)
            if written:
                self._writes.append((place, written))

    def _written(self, node: Node) -> frozenset[int]:
        if node.op not in ("call_function", "call_method"):
            return frozenset()
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            schema = target._schema
            if not schema.is_mutable:
                return frozenset()
            given = dict(zip((a.name for a in schema.arguments), node.args, strict=False))
            given.update(node.kwargs)
            return storages(
                [
                    given.get(a.name)
                    for a in schema.arguments
                    if a.alias_info is not None and a.alias_info.is_write
                ]
            )
        name = _name(target)
        module = getattr(target, "__module__", None) or ""
        if (
            name is None
            or isinstance(target, torch._ops.HigherOrderOperator)
            or module.startswith("torch._dynamo")  # numpy's functions and methods
        ):
            return storages(node.all_input_nodes)  # what it does with its arguments is not known
        if name in _STATE:
            return storages(_state(node, name))
        if _writes(node, name):
            return storages([node.args[:1], node.kwargs.get("out")])
        if idle(node) or _plain(name) in _VIEWS:
            return frozenset()
        return _returns_argument(node)  # silu(x, inplace=True)

    def written(self, node: Node, start: Node | None = None, end: Node | None = None) -> bool:
        """Whether the memory of a node's value is written after ``start`` (by default the node) and
        before ``end`` (by default the end). A node that was not captured counts as if it were."""
        own = storages(node)
        first = self._order.get(start or node, -1)
        last = len(self._order) if end is None else self._order.get(end, len(self._order))
        return any(first < n < last and own & written for n, written in self._writes)


# ---- gradient modes ------------------------------------------------------------------------------


class Modes:
    """Under which gradient mode each node runs. Made once, of the graph as it was captured."""

    def __init__(self, graph: Graph) -> None:
        self._of: dict[Node, tuple[Any, ...]] = {}
        names = {node: getattr(node.target, "__name__", "") for node in graph.nodes}
        first = next((n for n, name in names.items() if name == "_set_grad_enabled"), None)
        # A mode is set to what it was not.
        enabled, other = None if first is None else not first.args[0], None
        for node, name in names.items():
            if name == "_set_grad_enabled":
                enabled = bool(node.args[0])
            elif name.startswith(("_enter_", "_exit_")):
                other = node
            self._of[node] = (enabled, other)

    def one(self, nodes: Iterable[Node]) -> bool:
        """Whether all run under one."""
        return len({self._at(node) for node in nodes}) <= 1

    def _at(self, node: Node) -> tuple[Any, ...] | None:
        while node not in self._of and node.op != "root":
            node = node.prev  # it was put where the node before it runs
        return self._of.get(node)


# ---- edits ---------------------------------------------------------------------------------------


class Edit:
    """New nodes before ``anchor``, each with its fake value, and what they stand for.

    ``replace`` compares first; where it refuses, and after ``undo``, the graph is as it was.
    """

    def __init__(self, graph: Graph, anchor: Node, mode: FakeTensorMode) -> None:
        self.graph, self.anchor, self.mode = graph, anchor, mode
        self.added: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function or operator. Raises what the call raises."""
        with self.mode, torch.enable_grad():
            given = map_arg((args, kwargs), value_of)
            value = target(*given[0], **given[1])
        return self.add(target, args, kwargs, value)

    def add(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        value: Any,
    ) -> Node:
        """A call whose fake value is known."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, dict(kwargs))
        for key in ("stack_trace", "source_fn_stack", "nn_module_stack", "custom"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        node.meta["example_value"] = value
        self.added.append(node)
        return node

    def replace(self, pairs: Mapping[Node, Node]) -> str:
        """Let new nodes stand for old ones. '' where it is done, else why it is not."""
        for old, new in pairs.items():
            problem = difference(value_of(old), value_of(new))
            if problem:
                self.undo()
                return f"{old.name} would have {problem}"
        for old, new in pairs.items():
            old.replace_all_uses_with(new, propagate_meta=False)
            # Whoever reads on sees the memory that the graph was captured with.
            new.meta["example_value"] = value_of(old)
        return ""

    def undo(self) -> None:
        """Take the new nodes back."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
        self.added.clear()

    def erase_unused(self, nodes: Iterable[Node]) -> None:
        """Erase those of the given pure nodes that nothing uses any more."""
        wanted = dict.fromkeys(nodes)
        for node in reversed(list(self._in_order(wanted))):
            if not node.users:
                self.graph.erase_node(node)

    def _in_order(self, wanted: Mapping[Node, None]) -> Iterator[Node]:
        return (node for node in self.graph.nodes if node in wanted)


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """The mode of the graph's fake values; None where it has no tensors."""
    for node in graph.nodes:
        for tensor in tensors_of(node.meta.get("example_value")):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return None
