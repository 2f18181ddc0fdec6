"""What AOTAutograd made of a captured graph: functional, decomposed, split into forward and backward."""

from __future__ import annotations

import ast
import re

from tileops.engine.boundary.stamp import split_key
from tileops.explain import torch_private as private
from tileops.explain.model import (
    Decomposition,
    Graph,
    Kept,
    Line,
    Node,
    Normalisation,
    Partition,
    Rewrite,
)

STAGES = {
    "aot_joint_graph": "joint",
    "aot_forward_graph": "forward",
    "aot_backward_graph": "backward",
    "aot_inference_graph": "inference",
}
_IN_PLACE = re.compile(r"(?<![_\W])\w*[a-z0-9]_$")
_AUGMENTED = re.compile(
    r"operator\.i(add|sub|mul|truediv|floordiv|pow|and|or|xor|matmul|mod|lshift|rshift)"
)
_WRITTEN = re.compile(r"^\s*(\w+),\s*# InputMutationAOTOutput", re.MULTILINE)
_SAVED = re.compile(r"^\s*(\w+),\s*# SavedForBackwardsAOTOutput", re.MULTILINE)


def read_normalisation(graphs: list[Graph], capture: Graph | None) -> Normalisation:
    by_stage = {graph.stage: graph for graph in graphs}
    first = by_stage.get("forward") or by_stage.get("inference")
    made = _for_the_result(first) if first else []
    seen = [node for node in capture.nodes if _computes(node)] if capture else []
    copies = _copies(first) if first else []
    return Normalisation(
        graphs,
        _rewrites(seen, made, copies),
        copies,
        _decompositions(seen, made),
        _partition(by_stage),
    )


def _for_the_result(graph: Graph) -> list[Node]:
    """Its nodes without those that only backward needs."""
    saved = set(_SAVED.findall(graph.code))
    needed = {name for node in graph.nodes[-1:] for name in node.inputs if name not in saved}
    for node in reversed(graph.nodes[:-1]):
        if node.name in needed or node.target.startswith("torch.ops.aten.copy_."):
            needed.update([node.name, *node.inputs])
    return [node for node in graph.nodes if node.name in needed]


def _computes(node: Node) -> bool:
    return node.opcode in ("call_function", "call_method", "call_module")


def short(target: str) -> str:
    return target.removeprefix("torch.ops.").removesuffix(".default")


def _copies(graph: Graph) -> list[str]:
    """Writes to inputs: by ``copy_`` in the graph, or of a returned value, where the backend wants
    its graph without effects."""
    inside = [node.name for node in graph.nodes if node.target.startswith("torch.ops.aten.copy_.")]
    return inside + _WRITTEN.findall(graph.code)


def _place(line: Line | None) -> tuple[str, int] | None:
    return None if line is None else (line.file, line.number)


def writes(node: Node) -> bool:
    """Whether a captured node writes a tensor it was given."""
    name = node.target.rsplit(".", 1)[-1]
    if node.target == "operator.setitem" or _asked_to_write(node.args):
        return True
    if _AUGMENTED.fullmatch(node.target):
        return True
    if node.target.startswith("torch.ops."):
        return bool(private.written_arguments(node.target))
    return bool(_IN_PLACE.search(name)) and not name.startswith("__") and name != "requires_grad_"


def _rewrites(seen: list[Node], made: list[Node], copies: list[str]) -> list[Rewrite]:
    found = []
    written = set(copies) | {n for node in made if node.name in copies for n in node.inputs}
    for node in seen:
        if not writes(node):
            continue
        place = _place(node.line)
        after = [each for each in made if place and _place(each.line) == place and _computes(each)]
        # A copy back to an input has a line of its own or none: it is told by the value it copies.
        copy = any(each.name in written for each in after)
        forms = [f"{each.name} = {_called(each)}" for each in after]
        found.append(Rewrite(node.line, _as_written(node), forms, copy))
    return found


def _asked_to_write(args: str) -> bool:
    """By ``out=`` or ``inplace=True``; not by a string that holds such words."""
    try:
        call = ast.parse(f"f({args})", mode="eval").body
    except SyntaxError:
        return False
    given = {each.arg: ast.unparse(each.value) for each in getattr(call, "keywords", ())}
    return given.get("out", "None") != "None" or given.get("inplace") == "True"


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "pow": "**", "and": "&",
          "or": "|", "xor": "^", "matmul": "@", "mod": "%", "lshift": "<<", "rshift": ">>"}  # fmt: skip


def _as_written(node: Node) -> str:
    if node.target == "operator.setitem" or node.target.startswith("operator.i"):
        call = ast.parse(f"f({node.args})", mode="eval").body
        given = call.args if isinstance(call, ast.Call) else []
        first, *rest = [ast.unparse(each) for each in given] or [""]
        if node.target == "operator.setitem" and len(rest) == 2:
            return f"{first}[{_index(given[1])}] = {rest[1]}"
        augmented = _AUGMENTED.fullmatch(node.target)
        sign = _SIGNS[augmented[1]] if augmented else None
        if sign and len(rest) == 1:
            return f"{first} {sign}= {rest[0]}"
    if node.opcode != "call_method":
        return _called(node)
    own, _, args = node.args.partition(", ")
    return f"{own}.{node.target}({args})"


def _called(node: Node) -> str:
    """Without the key of an op of this library, which spells its parameters and a stamp."""
    target = short(node.target)
    try:
        call = ast.parse(f"f({node.args})", mode="eval").body
    except SyntaxError:
        return f"{target}({node.args})"
    assert isinstance(call, ast.Call)
    call.args = [each for each in call.args if not _is_key(each)]
    call.keywords = [each for each in call.keywords if not _is_key(each.value)]
    return target + ast.unparse(call)[1:]


def _is_key(given: ast.expr) -> bool:
    text = given.value if isinstance(given, ast.Constant) else None
    return isinstance(text, str) and bool(split_key(text)[2])


def _index(given: ast.expr) -> str:
    """``1:`` of ``slice(1, None, None)``, as it was written."""
    if isinstance(given, ast.Tuple) and given.elts:
        return ", ".join(map(_index, given.elts))
    if not (isinstance(given, ast.Call) and ast.unparse(given.func) == "slice"):
        return ast.unparse(given)
    start, stop, step = ("" if text == "None" else text for text in map(ast.unparse, given.args))
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _decompositions(seen: list[Node], made: list[Node]) -> list[Decomposition]:
    """Lines where the operators differ in number or kind: what a line says → what ATen runs."""
    lines: dict[tuple[str, int], Decomposition] = {}
    # The functional form of an operator that writes, and its results: no decomposition, but a rewrite.
    wrappers = [node for node in made if "auto_functionalized" in node.target]
    written = {node.args.split(",", 1)[0] for node in wrappers}
    names = {node.name for node in wrappers}
    results = {n.name for n in made if n.target == "operator.getitem" and names & set(n.inputs)}
    for node in seen:
        if (place := _place(node.line)) is not None and node.target not in written:
            lines.setdefault(place, Decomposition(node.line, [], [])).before.append(node.target)
    for node in made:
        place = _place(node.line)
        # A copy back to an input is a write that remains, and no part of an operator.
        apart = node.name in names | results or short(node.target) == "aten.copy_"
        if place in lines and _computes(node) and not apart:
            lines[place].after.append(short(node.target))
    return [each for each in lines.values() if each.after and not _same(each.before, each.after)]


def _operator_name(target: str) -> str:
    """``add`` of ``torch.ops.aten.add.Tensor``, ``operator.iadd``, ``torch.add`` and ``add_``."""
    if augmented := _AUGMENTED.fullmatch(target):
        return augmented[1]
    parts = target.split(".")
    name = parts[3] if target.startswith("torch.ops.") and len(parts) > 3 else parts[-1]
    return name.strip("_")


def _same(before: list[str], after: list[str]) -> bool:
    """Whether each operator became the one ATen operator of its name."""
    names = [_operator_name(name) for name in before]
    aten = [_operator_name(f"torch.ops.{name}") for name in after]
    aliases = {"matmul": "mm", "truediv": "div", "t": "permute", "floordiv": "floor_divide",
               "mod": "remainder", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
               "xor": "bitwise_xor", "operator_abs": "abs"}  # fmt: skip
    return [aliases.get(name, name) for name in names] == aten


# ---- min-cut -------------------------------------------------------------------------------------


def _partition(by_stage: dict[str, Graph]) -> Partition | None:
    forward, backward = by_stage.get("forward"), by_stage.get("backward")
    if forward is None or backward is None:
        return None
    known = {node.name: node for node in forward.nodes}
    names = _SAVED.findall(forward.code)
    given = [node.name for node in backward.nodes if node.opcode == "placeholder"]
    if not names:  # a release that does not mark them: what backward is given and forward makes
        names = [name for name in given if name in known]
    computed = {node.name for node in backward.nodes if _computes(node)}
    again = [name for name in known if name in computed and _computes(known[name])]
    saved = [_kept(known[name]) for name in names if name in known]
    joint = by_stage.get("joint")
    return Partition(
        saved,
        [_kept(known[name]) for name in again],
        _total(saved),
        None if joint is None else _save_all(joint),
    )


def _kept(node: Node) -> Kept:
    return Kept(node.name, short(node.target), node.bytes, node.line)


def _total(kept: list[Kept]) -> int | None:
    sizes = [each.bytes for each in kept]
    return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)


def _save_all(joint: Graph) -> int | None:
    """Bytes of every forward value that a backward node of the joint graph reads."""
    later: set[str] = set()
    read: dict[str, Node] = {}
    known = {node.name: node for node in joint.nodes}
    for node in joint.nodes:
        backward = node.name.startswith("tangents") or any(name in later for name in node.inputs)
        if node.opcode == "output":
            continue
        if backward:
            later.add(node.name)
            read.update({name: known[name] for name in node.inputs if name not in later})
    sizes = [node.bytes for node in read.values() if node.dtype is not None]
    return None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)
