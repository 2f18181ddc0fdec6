"""Memory of one compiled graph, from the code that allocates and launches."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

from tileops.explain import torch_private as private
from tileops.explain.model import Buffer, Graph, Node

_WIDTH = {"bool": 1, "float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1,
          "uint8": 1, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint16": 2,
          "uint32": 4, "uint64": 8}  # fmt: skip
_PARAMETERS = re.compile(r"\b(?:kernel|def \w+)\((.*?)\)", re.DOTALL)


class Memory:
    """Buffers in the order in which they are made; which of them are results; and the most that
    lives at one time."""

    def __init__(self, code: str, graph: Graph) -> None:
        self.buffers: list[Buffer] = []
        self.peak: int | None = 0
        self._nodes = graph.nodes
        self._bytes = {node.name: node.bytes for node in graph.nodes if node.dtype is not None}
        self._width = {node.name: _width_of(node) for node in graph.nodes}
        self._storage: dict[str, str] = {}
        """Whose memory a living name stands for."""
        self._memory: dict[str, str] = {}
        """The same of every buffer."""
        self._parts: dict[str, list[str]] = {}
        """Results of a library's call by the name it was given."""
        self._called: dict[str, str] = {}
        try:
            tree = ast.parse(code)
        except SyntaxError:
            self.peak = None
            return
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and re.match(
                r"call$|partition_", function.name
            ):
                statements = list(_flat(function.body))
                for number, statement in enumerate(statements):
                    self._statement(statement, statements[number + 1 : number + 2])

    def _statement(self, statement: ast.stmt, following: list[ast.stmt]) -> None:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._assigned(statement.targets[0].id, statement.value, following)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._storage.pop(ast.unparse(target), None)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            left = {node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name)}
            kept = {self._storage[name] for name in left if name in self._storage}
            for buffer in reversed(
                self.buffers
            ):  # the last that has the memory is what is returned
                if (memory := self._memory[buffer.name]) in kept:
                    kept.remove(memory)
                    buffer.kept = True
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if ast.unparse(call.func) == "assert_size_stride" and isinstance(
                call.args[0], ast.Name
            ):
                self._asserted(call.args[0].id, call.args[1], *call.args[3:4])

    def _assigned(self, name: str, value: ast.expr, following: list[ast.stmt]) -> None:
        function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Call) and function.startswith("empty_strided"):
            dtype = ast.unparse(value.args[2]).removeprefix("torch.")
            self._width[name] = _WIDTH.get(dtype, 1 if dtype.startswith("float8") else None)
            self._made(name, _times(_count(value.args[0]), self._width[name]), None)
        elif isinstance(value, ast.Call) and function == "alloc_from_pool":
            dtype = ast.unparse(value.args[2]).removeprefix("torch.")
            self._width[name] = _WIDTH.get(dtype)
            size = _times(_count(value.args[3]), self._width[name])
            pool = ast.unparse(value.args[0])
            self._made(name, size, self._storage.get(pool, pool), alone=False)
        elif source := _source(value, function):
            self._named_again(name, source, value, following)
        elif function.startswith(("torch.ops.", "aten.", "extern_kernels.", "mkldnn.")):
            self._parts[name] = []
            self._called[name] = function

    def _named_again(
        self, name: str, source: str, value: ast.expr, following: list[ast.stmt]
    ) -> None:
        if source in self._parts:  # a library's result, whose size an assertion tells
            self._parts[source].append(name)
            self._called[name] = self._called[source]
            return
        self._width[name] = self._width.get(source)
        size = (
            _times(_count(value.args[1]), self._width[name])
            if isinstance(value, ast.Call)
            else None
        )
        old = self._storage.get(source)
        self._bytes[name] = size if isinstance(value, ast.Call) else self._bytes.get(source)
        dies = [t for each in following if isinstance(each, ast.Delete) for t in each.targets]
        if old is None:
            return
        if source in map(ast.unparse, dies):
            self.buffers.append(Buffer(name, self._bytes[name], old))
            self._memory[name] = old
        self._storage[name] = old

    def _made(self, name: str, size: int | None, pool: str | None, *, alone: bool = True) -> None:
        self._bytes[name] = size
        self.buffers.append(Buffer(name, size, pool))
        self._storage[name] = self._memory[name] = name if alone else (pool or name)
        living = set(self._storage.values())
        sizes = [each.bytes for each in self.buffers if each.name in living]
        now = None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)
        self.peak = None if now is None or self.peak is None else max(self.peak, now)

    def _asserted(self, name: str, size: ast.expr, said: ast.expr | None = None) -> None:
        """Torch states size and operator of what a library made; the graph knows its dtype."""
        if name not in self._called or name in self._storage:
            return
        shape = _sizes(size)
        operator = self._called[name].removeprefix("torch.ops.")
        stated = said.value if isinstance(said, ast.Constant) else None
        makers = {n.name for n in self._nodes if operator in n.target or n.target == stated}
        widths = {
            self._width[node.name] for node in self._nodes
            if (node.name in makers or makers & set(node.inputs)) and node.shape == shape
        }  # fmt: skip
        self._width[name] = widths.pop() if len(widths) == 1 else None
        self._made(name, _times(_count(size), self._width[name]), None)

    def touched(self, line: str, source: str | None) -> int | None:
        """Bytes of the tensors that a launch is given and makes; twice what it reads and writes."""
        call = _call(line)
        if call is None:
            return None
        made, function, given = call
        parameters = enumerate(_parameters(source) if source else [])
        both = {number for number, name in parameters if name.startswith("in_out")}
        if source is None:
            both = _read_and_written(function)
        sizes: list[int | None] = []
        for number, argument in enumerate(given):
            size = self._argument(argument)
            sizes += [] if size == 0 else [size, size] if number in both else [size]
        if made is not None:
            sizes += [self._bytes.get(name) for name in self._parts.get(made, [made])]
        known = bool(sizes) and all(size is not None for size in sizes)
        return sum(size or 0 for size in sizes) if known else None

    def _argument(self, given: ast.expr) -> int | None:
        """0: it is no tensor."""
        if isinstance(given, ast.Name) and given.id in self._bytes:
            return self._bytes[given.id]
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "reinterpret_tensor":
            return _times(_count(given.args[1]), self._width.get(ast.unparse(given.args[0])))
        if isinstance(given, ast.List | ast.Tuple):
            sizes = [self._argument(each) for each in given.elts]
            return None if None in sizes else sum(size or 0 for size in sizes)
        tensor = isinstance(given, ast.Name) and re.match(r"buf\d|arg\d|primals_", given.id)
        return None if tensor else 0


def written(line: str, source: str) -> set[str]:
    """Names of the tensors that a launch of a generated kernel writes, by what it calls them."""
    call = _call(line)
    given = call[2] if call else []
    return {
        ast.unparse(
            argument.args[0] if isinstance(argument, ast.Call) and argument.args else argument
        )
        for argument, name in zip(given, _parameters(source), strict=False)
        if name.startswith(("out_ptr", "in_out_ptr"))
    }


def _read_and_written(function: str) -> set[int]:
    """Places of the arguments that a library's function changes; what it is to fill is called ``out``."""
    target = f"torch.ops.{function}" if function.startswith("aten.") else function
    changed = private.written_arguments(target) or {}
    return {number for number, name in changed.items() if not name.startswith("out")}


def _call(line: str) -> tuple[str | None, str, list[ast.expr]] | None:
    """What a call's value is named, what is called, and what it is given."""
    try:
        statement = ast.parse(line.strip()).body[0]
    except SyntaxError:
        return None
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if not isinstance(value, ast.Call):
        return None
    made = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    given = [*value.args, *(each.value for each in value.keywords)]
    return made, ast.unparse(value.func), given


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.With | ast.If | ast.For):
            yield from _flat(statement.body)


def _source(value: ast.expr, function: str) -> str | None:
    """The name whose memory this is another name of."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
        return value.value.id
    named = isinstance(value, ast.Call) and function == "reinterpret_tensor"
    return ast.unparse(value.args[0]) if named and isinstance(value, ast.Call) else None


def _parameters(source: str) -> list[str]:
    found = _PARAMETERS.search(source)
    parts = found[1].split(",") if found else []
    return [re.sub(r"[:=].*", "", part).split()[-1].lstrip("*") for part in parts if part.split()]


def _width_of(node: Node) -> int | None:
    digits = re.search(r"\d+", node.dtype or "")
    return max(1, int(digits[0]) // 8) if digits else None


def _sizes(size: ast.expr) -> list[int | str]:
    parts = size.elts if isinstance(size, ast.Tuple) else []
    return [each.value if isinstance(each, ast.Constant) else ast.unparse(each) for each in parts]  # type: ignore[misc]


def _count(size: ast.expr) -> int | None:
    sizes = _sizes(size)
    return (
        math.prod(int(each) for each in sizes)
        if all(isinstance(each, int) for each in sizes)
        else None
    )


def _times(count: int | None, width: int | None) -> int | None:
    return None if count is None or width is None else count * width
