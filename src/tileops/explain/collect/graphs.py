"""From the code that torch prints of an FX graph to its nodes.

The text is what torch keeps with a cached graph too, so a warm run is explained like a cold one.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

from tileops.explain.model import Graph, Line, Node
from tileops.explain.torch_private import is_torch_file

_FRAME = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<number>\d+), in (?P<function>.+)$')
NODE_LINE = re.compile(
    r"\s*#(?: .*?)? File: (?P<file>.+?):(?P<number>\d+) in (?P<function>.+?)(?:, code: (?P<text>.*))?$"
)
"""Above a node in printed code. Annotations, and whether a checkpoint computes it again, stand before."""
_TENSOR = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<shape>.*?)\](?:\[(?P<stride>.*?)\])?(?P<device>\w+(?::\d+)?)?"
)
_PARAMETER = re.compile(r'(?P<name>\w+)(?:\s*:\s*"(?P<note>[^"]*)")?\s*,?\s*(?:#.*)?')


def read_graph(stage: str, code: str, lines: UserLines | None = None) -> Graph:
    """The first module in ``code``; modules of higher-order operators stand in the code alone."""
    graph = Graph(stage, code, _Reader(code).nodes)
    if lines is not None:
        lines.label(graph)
    return graph


class UserLines:
    """From the innermost line of a node, which is all that a printed graph has, to the user's."""

    def __init__(self) -> None:
        self.stacks: list[dict[str, str]] = []
        self._seen: dict[tuple[str, int], set[tuple[str, int]]] = {}
        self._lines: dict[tuple[str, int], Line] = {}

    def label(self, graph: Graph) -> None:
        """By the stacks of the graph's nodes; where it comes from a cache, by those of the captured
        graph, if they leave no choice."""
        names = {node.name for node in graph.nodes if node.line is not None}
        fits = (stacks for stacks in self.stacks if names <= stacks.keys())
        stacks = next(fits, {})
        for node in graph.nodes:
            if node.line is None:
                continue
            inner = (node.line.file, node.line.number)
            line = user_line(stacks.get(node.name, ""))
            if line is not None:
                place = (line.file, line.number)
                self._seen.setdefault(inner, set()).add(place)
                node.line = self._lines.setdefault(place, line)
            elif len(choice := self._seen.get(inner, set())) == 1:
                node.line = self._lines[next(iter(choice))]


def user_line(stack: str) -> Line | None:
    """The innermost line of a stack that is neither torch's nor this library's."""
    lines = stack.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        match = _FRAME.match(lines[number])
        if match and not is_foreign(match["file"]):
            text = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return Line(match["file"], int(match["number"]), match["function"], text)
    return None


def is_foreign(file: str) -> bool:
    own = str(Path(__file__).parents[2])
    return is_torch_file(file) or file.startswith((own, "tileops_generated"))


class _Reader:
    def __init__(self, code: str) -> None:
        self.nodes: list[Node] = []
        self.known: dict[str, Node] = {}
        self.line: Line | None = None
        lines = code.splitlines()
        start = next((i for i, text in enumerate(lines) if "def forward(" in text), None)
        if start is None:
            return
        body = self._signature(lines, start)
        self._body(lines[body:])

    def _signature(self, lines: list[str], start: int) -> int:
        """Make the placeholders; the number of the first line after the signature."""
        text = lines[start].split("def forward(", 1)[1]
        end = start
        while not lines[end].rstrip().endswith("):"):
            end += 1
            text += "\n" + lines[end]
        text = text.rstrip().removesuffix("):")
        for match in _PARAMETER.finditer(text):
            if match["name"] not in ("self", "primals", "tangents"):
                self._add(Node(match["name"], "placeholder", match["name"], ""), match["note"])
        return end + 1

    def _add(self, node: Node, note: str | None) -> None:
        if note:
            describe(node, note)
        self.nodes.append(node)
        self.known[node.name] = node

    def _body(self, lines: list[str]) -> None:
        returned: list[str] = []
        for text in lines:
            bare = text.strip()
            if returned:
                returned.append(bare)
            elif bare.startswith("class "):
                break
            elif match := NODE_LINE.match(bare):
                self.line = Line(
                    match["file"], int(match["number"]), match["function"], match["text"] or ""
                )
            elif bare.startswith("#") and "No stacktrace found" in bare:
                self.line = None
            elif bare.startswith("return "):
                returned.append(bare)
            elif bare and not bare.startswith("#"):
                self._statement(bare)
            if returned and _closed(returned):
                break
        if returned:
            text = re.sub(r"\s*#[^\n]*", "", "\n".join(returned)).removeprefix("return ")
            self.nodes.append(
                Node("output", "output", "output", " ".join(text.split()), self._inputs(text))
            )

    def _inputs(self, text: str) -> list[str]:
        """Names in a text without function names."""
        names = dict.fromkeys(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))
        return [name for name in names if name in self.known]

    def _statement(self, text: str) -> None:
        try:
            first, *after = ast.parse(text).body
        except SyntaxError:
            self._unparsed(text)
            return
        if isinstance(first, ast.AugAssign) or (
            isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Subscript)
        ):
            self._write(first, after)
        elif isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name):
            note = ast.unparse(first.annotation).strip("'\"")
            if first.value is None:
                self._add(Node(first.target.id, "placeholder", first.target.id, ""), note)
            else:
                self._assigned(first.target.id, first.value, note)
        elif isinstance(first, ast.Assign) and isinstance(first.targets[0], ast.Name):
            self._assigned(first.targets[0].id, first.value, None)

    def _write(self, write: ast.AugAssign | ast.Assign, after: list[ast.stmt]) -> None:
        """``y += 1;  y_1: "f32[4]" = y`` and ``y[0] = 1;  setitem = y``: the name follows."""
        name, note = "setitem", None
        if after and isinstance(after[0], ast.AnnAssign):
            name, note = ast.unparse(after[0].target), ast.unparse(after[0].annotation).strip("'\"")
        elif after and isinstance(after[0], ast.Assign):
            name = ast.unparse(after[0].targets[0])
        value = ast.unparse(write.value)
        if isinstance(write, ast.AugAssign):
            given: list[ast.expr] = [write.target]
            target = f"operator.i{_operator_name(write.op).strip('_')}"
        else:
            subscript = write.targets[0]
            assert isinstance(subscript, ast.Subscript)
            target, given = "operator.setitem", [subscript.value, subscript.slice]
        args = ", ".join([*map(ast.unparse, given), value])
        inputs = self._inputs(args)
        self._add(Node(name, "call_function", target, args, inputs, self.line), note)

    def _assigned(self, name: str, value: ast.expr, note: str | None) -> None:
        if isinstance(value, ast.Constant) and value.value is None:
            return
        if isinstance(value, ast.Name) and value.id in self.known:  # a parameter under its own name
            node = self.known.pop(value.id)
            node.name = name
            self.known[name] = node
            return
        opcode, target, args = _read_expression(value, self.known)
        inputs = self._inputs(ast.unparse(value))  # `torch` is no node, and `.mul` is no name
        self._add(Node(name, opcode, target, args, inputs, self.line), note)

    def _unparsed(self, text: str) -> None:
        """A value whose text is no Python, such as ``<object at ...>``."""
        match = re.match(r'(\w+)(?::\s*"([^"]*)")?\s*=\s*([\w.]+)\((.*)\)', text)
        if match:
            inputs = self._inputs(match[4])
            self._add(
                Node(match[1], "call_function", match[3], match[4], inputs, self.line), match[2]
            )


def _closed(lines: list[str]) -> bool:
    text = re.sub(r"#[^\n]*", "", "\n".join(lines))
    return text.count("(") + text.count("[") == text.count(")") + text.count("]")


def _read_expression(value: ast.expr, known: dict[str, Node]) -> tuple[str, str, str]:
    if isinstance(value, ast.Call):
        args = ", ".join(
            [*map(ast.unparse, value.args), *(ast.unparse(each) for each in value.keywords)]
        )
        function = ast.unparse(value.func)
        if isinstance(value.func, ast.Attribute):
            root = value.func.value
            if isinstance(root, ast.Name) and root.id in known:
                return "call_method", value.func.attr, f"{root.id}, {args}" if args else root.id
        if function.startswith("self."):
            return "call_module", function.removeprefix("self."), args
        return "call_function", function, args
    if isinstance(value, ast.Attribute) and ast.unparse(value).startswith("self."):
        return "get_attr", ast.unparse(value).removeprefix("self."), ""
    names = {ast.BinOp: "op", ast.UnaryOp: "op", ast.Compare: "ops"}
    for kind, where in names.items():
        if isinstance(value, kind):
            operator = getattr(value, where)
            operator = operator[0] if isinstance(operator, list) else operator
            name = _operator_name(operator)
            parts = [child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr)]
            return "call_function", f"operator.{name}", ", ".join(map(ast.unparse, parts))
    if isinstance(value, ast.Subscript):
        args = f"{ast.unparse(value.value)}, {ast.unparse(value.slice)}"
        return "call_function", "operator.getitem", args
    return "call_function", ast.unparse(value), ""


def _operator_name(operator: ast.AST) -> str:
    return _OPERATORS.get(type(operator).__name__, type(operator).__name__.lower())


_OPERATORS = {
    "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "MatMult": "matmul", "USub": "neg",
    "LShift": "lshift", "RShift": "rshift", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor",
    "NotEq": "ne", "LtE": "le", "GtE": "ge", "Invert": "invert",
}  # fmt: skip


def describe(node: Node, note: str) -> None:
    """Fill dtype, shape, stride, device and bytes from torch's ``f32[8, 16][16, 1]cpu``."""
    match = _TENSOR.fullmatch(note.strip())
    if match is None:
        return
    node.dtype, node.device = match["dtype"], match["device"]
    node.shape = _sizes(match["shape"])
    node.stride = None if match["stride"] is None else _sizes(match["stride"])
    width = re.search(r"\d+", match["dtype"])
    if width and all(isinstance(size, int) for size in node.shape):
        node.bytes = math.prod(int(size) for size in node.shape) * max(1, int(width[0]) // 8)


def _sizes(text: str) -> list[int | str]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return [int(part) if part.lstrip("-").isdigit() else part for part in parts]
