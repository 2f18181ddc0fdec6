"""Generating an op class's check: one readable Python function from its entry.

``signature(op, <inputs>, out)`` checks a call and returns ``(outputs, dims)``: per declared output
``(shape, dtype)`` or None, and the named dims. It works on real, meta and fake tensors and on
SymInts, where an equality of sizes becomes a deferred runtime assertion instead of a guard.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tileops.engine.errors import ManifestError
from tileops.engine.manifest.entry import Entry, Input
from tileops.engine.manifest.expr import DTYPES, Expr
from tileops.engine.signature.construction import settled_at_construction
from tileops.engine.signature.patterns import is_call, multiple_of, sum_of
from tileops.engine.signature.runtime import HELPERS
from tileops.engine.signature.source import compile_source

__all__ = [
    "make_signature",
    "presence_lines",
    "signature_source",
]


# ---- emitting ---------------------------------------------------------------------------------


class _Emitter:
    """Writes the check of one entry. Dim state: unbound, maybe bound (on some path), bound."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.lines: list[str] = []
        self.level = 1
        self.state: dict[str, str] = {}
        self.params = entry.shape_params
        shape_names = {name for item in entry.inputs for name in item.shape.names}
        self.dims = frozenset(
            (shape_names - self.params - set(DTYPES) - set(entry.dtypes)) | set(entry.dims)
        )
        self.settled_dtypes: set[str] = set()
        self.told: list[Input] = []
        self.sure = False
        self.namespace: dict[str, Any] = dict(HELPERS)
        self.temporary = 0

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.level + text)

    def rename(self, name: str) -> str:
        if name in self.params:
            return f"op.{name}"
        if name in DTYPES and name not in self.entry.dtypes:
            return f"_dt_{name}"
        return name

    def source(self, expr: Expr) -> str:
        return expr.source(self.rename, lambda name: f"({name} is not None)")

    def operand(self, expr: Expr) -> str:
        """The source where an operator stands beside it."""
        return f"({self.source(expr)})"

    def fail_args(self, item: Input) -> str:
        return f"'{self.entry.name}', '{item.name}'"

    # -- shapes

    def pattern(self, item: Input) -> None:
        shape = item.shape.tree
        self.emit(f"s = {item.name}.shape")
        self._pattern_node(item, shape)

    def _pattern_node(self, item: Input, node: ast.expr) -> None:
        if isinstance(node, ast.IfExp):
            self._derive(Expr(ast.unparse(node.test)).names)
            before = dict(self.state)
            self.emit(f"if {self.source(Expr(ast.unparse(node.test)))}:")
            self._chosen(item, node.body)
            after, self.state = self.state, before
            self.emit("else:")
            self._chosen(item, node.orelse)
            for name in set(after) | set(self.state):
                one, other = after.get(name, "unbound"), self.state.get(name, "unbound")
                self.state[name] = one if one == other else "maybe"
            return
        assert isinstance(node, ast.Tuple | ast.List), item.shape.text  # names.py saw to it
        self._pattern_list(item, node.elts, f"[{', '.join(ast.unparse(e) for e in node.elts)}]")

    def _chosen(self, item: Input, node: ast.expr) -> None:
        """One of two lists. What it is made of may depend on the condition: it is asked for."""
        self.level += 1
        names = Expr(ast.unparse(node)).names if isinstance(node, ast.List) else frozenset()
        within = [e for e in getattr(node, "elts", ()) if not isinstance(e, ast.Name)]
        maybe = [n for n in sorted(names) if self.state.get(n) == "maybe"]
        for name in maybe:
            if any(name in Expr(f"[{ast.unparse(e)}]").names and is_call(e) for e in within):
                if self.sure:
                    self._unsolvable(item, node, f"{name} is not known in every call")
                self.emit(f"if {name} is None: _fail({self.fail_args(item)}, 'no {name}', "
                          f"{ast.unparse(node)!r})")  # fmt: skip
                self.state[name] = "bound"
        self._pattern_node(item, node)
        self.level -= 1

    def _ready(self, name: str) -> bool:
        """Whether a derived dim can be computed from what is bound."""
        sources = self.entry.dims[name].names & self.dims
        return all(
            self._ready(n) if n in self.entry.dims else self.state.get(n) == "bound"
            for n in sources
        )

    def _pattern_list(self, item: Input, elements: list[ast.expr], text: str) -> None:
        # What is known by then goes first, so that a refusal can show it.
        names = frozenset(n for e in elements for n in Expr(f"[{ast.unparse(e)}]").names)
        self._derive(frozenset(n for n in names & set(self.entry.dims) if self._ready(n)))
        unknown = [
            i
            for i, e in enumerate(elements)
            if isinstance(e, ast.Starred) and not self._known_splice(e)
        ]
        for index in unknown[1:]:
            self._unsolvable(
                item, elements[index], "one list can find the length of one splice, once"
            )
        splice = unknown[0] if unknown else None
        widths = [
            f"len({self.source(Expr(ast.unparse(e.value)))})" if isinstance(e, ast.Starred) else "1"
            for i, e in enumerate(elements)
            if i != splice
        ]
        fixed = sum_of(widths)
        compare = "<" if splice is not None else "!="
        known = self._known_for(elements)
        fail = f"_fail_shape({self.fail_args(item)}, {item.name}, {text!r}{known})"
        self.emit(f"if len(s) {compare} {fixed}: {fail}")
        position: list[str] = []
        for index, element in enumerate(elements):
            at = sum_of(position)
            if index == splice:
                assert isinstance(element, ast.Starred)
                if not isinstance(element.value, ast.Name):
                    self._unsolvable(item, element, "only a name can be found as a splice")
                name = ast.unparse(element.value)
                rest = sum_of(
                    [
                        f"len({self.source(Expr(ast.unparse(e.value)))})"
                        if isinstance(e, ast.Starred)
                        else "1"
                        for e in elements[index + 1 :]
                    ]
                )
                end = f"len(s) - {rest}" if rest != "0" else "len(s)"
                self._bind(name, f"tuple(s[{at}:{end}])", fail, splice=True)
                position = [f"len({name})", *position]
                continue
            if isinstance(element, ast.Starred):
                value = self.source(Expr(ast.unparse(element.value)))
                end = sum_of([*position, f"len({value})"])
                self.emit(f"if not _same_sizes(s[{at}:{end}], {value}): {fail}")
                position.append(f"len({value})")
                continue
            self._element(item, element, f"s[{at}]", fail)
            position.append("1")

    def _known_splice(self, element: ast.Starred) -> bool:
        names = Expr(ast.unparse(element.value)).names
        return all(name in self.params or self.state.get(name) == "bound" for name in names)

    def _known_for(self, elements: list[ast.expr]) -> str:
        names = sorted({n for e in elements for n in Expr(f"[{ast.unparse(e)}]").names})
        shown = [
            f", {name}={self.rename(name)}"
            for name in names
            if name in self.params or self.state.get(name) in ("bound", "maybe")
        ]
        return "".join(shown)

    def _unsolvable(self, item: Input, element: ast.expr, why: str) -> NoReturn:
        line = self.entry.line_of("signature", "inputs", item.name, "shape")
        raise ManifestError(
            f"{self.entry.path}:{line}",
            self.entry.name,
            f"inputs.{item.name}.shape: cannot solve {ast.unparse(element)!r}: {why}",
        )

    def _element(self, item: Input, element: ast.expr, size: str, fail: str) -> None:
        expr = Expr(ast.unparse(element))
        self._derive(expr.names)
        free = [n for n in expr.names if n not in self.params and self.state.get(n) != "bound"]
        if isinstance(element, ast.Name) and element.id not in self.params:
            self._bind(element.id, size, fail)
        elif not free:
            self.emit(f"if not _same({size}, {self.source(expr)}): {fail}")
        else:
            name, factor = multiple_of(element)
            if name is None or free != [name]:
                why = f"{', '.join(sorted(free))} not known by then; only <dim>, <int>*<dim> and "
                self._unsolvable(item, element, why + "<dim>*<int> find a dim")
            self.emit(f"if not _same({size} % {factor}, 0): {fail}")
            self._bind(name, f"{size} // {factor}", fail)

    def _bind(self, name: str, value: str, fail: str, splice: bool = False) -> None:
        state = self.state.get(name, "unbound")
        equal = "_same_sizes" if splice else "_same"
        if state == "unbound":
            self.emit(f"{name} = {value}")
        elif state == "bound":
            self.emit(f"if not {equal}({value}, {name}): {fail}")
        else:
            self.emit(f"if {name} is None: {name} = {value}")
            self.emit(f"elif not {equal}({value}, {name}): {fail}")
        self.state[name] = "bound"

    def _derive(self, names: frozenset[str]) -> None:
        for name in sorted(names & set(self.entry.dims)):
            if self.state.get(name) == "bound":
                continue
            expr = self.entry.dims[name]
            self._derive(expr.names)
            unbound = [n for n in sorted(expr.names & self.dims) if n not in self.state]
            if unbound:
                raise ManifestError(
                    f"{self.entry.path}:{self.entry.line_of('signature', 'dims', name)}",
                    self.entry.name,
                    f"dims.{name}: '{unbound[0]}' in {expr.text!r} is not known where {name} is "
                    "used first",
                )
            self.emit(f"{name} = {self.source(expr)}")
            self.state[name] = "bound"

    # -- one input

    def presence(self, item: Input) -> None:
        for line in presence_lines(self.entry, item, self.source, item.name):
            self.emit(line)

    def tensors(self) -> None:
        """In order; what needs to know what later inputs tell comes after them."""
        waiting = list(self.entry.inputs)
        while waiting:
            tries = ((item, sure) for sure in (True, False) for item in waiting)
            done = next((item for item, sure in tries if self._emitted(item, sure)), waiting[0])
            if done not in self.told:
                self.tensor(done)  # raises, or is of a dtype that nothing tells
            waiting.remove(done)

    def _emitted(self, item: Input, sure: bool) -> bool:
        """Whether all that its check needs was known, if ``sure`` in every call; then it stands."""
        self.sure = sure
        # What an input that must be passed will tell waits for it.
        certain = {
            o.dtype.text for o in self.entry.inputs if o.dtype is not None and not o.optional
        }
        told = {
            other.dtype.text
            for other in (*self.told, item)
            if other.dtype is not None
            and not (sure and other.optional and other is not item and other.dtype.text in certain)
        }
        if item.dtype is not None and item.dtype.names & set(self.entry.dtypes) - told:
            return False
        lines, level, temporary = len(self.lines), self.level, self.temporary
        state, settled = dict(self.state), set(self.settled_dtypes)
        try:
            self.tensor(item)
        except ManifestError:
            del self.lines[lines:]
            self.level, self.temporary = level, temporary
            self.state, self.settled_dtypes = state, settled
            return False
        self.told.append(item)
        return True

    def tensor(self, item: Input) -> None:
        name, args = item.name, self.fail_args(item)
        if item.optional:
            self.emit(f"if {name} is not None:")
            self.level += 1
        before = dict(self.state)
        settled = set(self.settled_dtypes)
        self.emit(f"if {name}.layout is not _strided: _fail({args}, f'layout {{{name}.layout}}', "
                  f"'a strided tensor')")  # fmt: skip
        self.dtype(item)
        if item.host:
            self.emit(f"if {name}.device.type != 'cpu': _fail({args}, "
                      f"f'device {{{name}.device}}', 'a tensor on the CPU')")  # fmt: skip
        else:
            self.emit(f"if device is None: device = {name}.device")
            self.emit(f"elif {name}.device != device: _fail({args}, "
                      f"f'device {{{name}.device}}', "
                      "f'device {device}, where the others are')")  # fmt: skip
        self.pattern(item)
        if item.contiguous:
            self.emit(f"if not {name}.is_contiguous(): _fail({args}, "
                      f"f'strides {{list({name}.stride())}}', 'a contiguous tensor')")  # fmt: skip
        if item.mutated is not None:
            self.emit(f"if {self.operand(item.mutated)} and not _writable({name}): _fail({args}, "
                      f"f'strides {{list({name}.stride())}} (it overlaps itself)', "
                      f"'a tensor without overlapping elements, since it is written')")  # fmt: skip
        if item.optional:
            self.level -= 1
            for dim in self.state:
                if before.get(dim, "unbound") != "bound":
                    self.state[dim] = "maybe"
            self.settled_dtypes = settled

    def dtype(self, item: Input) -> None:
        name, args = item.name, self.fail_args(item)
        if item.dtype is None:
            allowed = self.constant(frozenset(getattr(torch, d) for d in item.dtypes))
            self.emit(f"if {name}.dtype not in {allowed}: _fail_dtype({args}, {name}, {allowed})")
            return
        variable = item.dtype.text
        if variable in self.entry.dtypes and variable not in self.settled_dtypes:
            allowed = self.accepted(variable)
            self.emit(f"if {name}.dtype not in {allowed}: _fail_dtype({args}, {name}, {allowed})")
            self.emit(f"if {variable} is None: {variable} = {name}.dtype")
            self.emit(f"elif {name}.dtype != {variable}: _fail_dtype({args}, {name}, "
                      f"[{variable}], ', as {variable} of the earlier inputs')")  # fmt: skip
            self.settled_dtypes.add(variable)
        else:
            wanted = self.operand(item.dtype)
            for unknown in sorted(item.dtype.names & set(self.entry.dtypes) - self.settled_dtypes):
                allowed = self.accepted(unknown)  # where the expression is the variable itself
                self.emit(f"if {unknown} is None and {wanted} is None and {name}.dtype "
                          f"not in {allowed}: _fail_dtype({args}, {name}, {allowed})")  # fmt: skip
                # No earlier input is of it: what only an expression names follows from that.
                self.emit(f"if {unknown} is None: {unknown} = {name}.dtype")
            self.emit(f"if {name}.dtype != {wanted}: _fail_dtype({args}, {name}, [{wanted}], "
                      f"' (dtype {variable})')")  # fmt: skip

    def accepted(self, variable: str) -> str:
        return self.constant(frozenset(getattr(torch, d) for d in self.entry.dtypes[variable]))

    def constant(self, value: Any) -> str:
        self.temporary += 1
        name = f"_c{self.temporary}"
        self.namespace[name] = value
        return name

    # -- rules and outputs

    def rules(self) -> None:
        for rule in self.entry.rules:
            if settled_at_construction(self.entry, rule):
                continue
            self._derive(rule.require.names)
            shown = "".join(
                f", {name}={self.rename(name)}"
                for name in sorted(rule.require.names)
                if name not in DTYPES
            )
            shown += "".join(f", {n}_passed={n} is not None" for n in sorted(rule.require.presence))
            blame = rule.argument or self._blame(rule.require)
            met = f"_holds({self.source(rule.require)})"
            if rule.require.calls_of("bcast"):  # shapes that do not broadcast do not meet it
                self.emit("try:")
                self.emit(f"    _met = {met}")
                self.emit("except ValueError:")
                self.emit("    _met = False")
                met = "_met"
            self.emit(f"if not {met}: _fail_rule('{self.entry.name}', '{blame}', "
                      f"{rule.message!r}{shown})")  # fmt: skip

    def _blame(self, expr: Expr) -> str:
        params = sorted(expr.names & self.params)
        if params:
            return params[0]
        inputs = [
            i.name
            for i in self.entry.inputs
            if i.shape.names & expr.names or i.name in expr.presence
        ]
        return inputs[-1] if inputs else "the call"

    def broadcast_checks(self) -> None:
        for output in self.entry.outputs:
            if not output.shape.calls_of("bcast"):
                continue
            names = [i.name for i in self.entry.inputs]
            shapes = " and ".join(
                f"{{{i.name} if {i.name} is None else list({i.name}.shape)}}"
                if i.optional
                else f"{{list({i.name}.shape)}}"
                for i in self.entry.inputs
            )
            self.emit("try:")
            self.emit(f"    out_{output.name} = tuple({self.source(output.shape)})")
            self.emit("except ValueError:")
            self.emit(f"    _fail('{self.entry.name}', '{names[-1]}', f'shapes {shapes}', "
                      f"'shapes that broadcast')")  # fmt: skip

    def outputs(self) -> list[str]:
        parts = []
        for output in self.entry.outputs:
            self._derive(output.shape.names)
            if output.shape.calls_of("bcast"):
                shape = f"out_{output.name}"
            else:
                shape = f"tuple({self.source(output.shape)})"
            value = f"({shape}, {self.source(output.dtype)})"
            if output.nullable is not None:
                value = f"None if {self.operand(output.nullable)} else {value}"
            parts.append(value)
        return parts

    def out_buffer(self) -> None:
        if not self.entry.has_out:
            return
        name = self.entry.name
        self.emit("if out is not None:")
        self.emit("    want, dtype = outputs[0]")
        self.emit(
            f"    if not isinstance(out, _Tensor): _must_be_tensor('{name}', 'out', out, True)"
        )
        self.emit(f"    if out.dtype != dtype: _fail_dtype('{name}', 'out', out, [dtype])")
        self.emit(f"    if not _same_sizes(out.shape, want): _fail('{name}', 'out', "
                  f"f'shape {{list(out.shape)}}', f'shape {{list(want)}}')")  # fmt: skip
        self.emit(f"    if out.device != device: _fail('{name}', 'out', f'device {{out.device}}', "
                  f"f'device {{device}}')")  # fmt: skip
        self.emit(f"    if not out.is_contiguous(): _fail('{name}', 'out', "
                  f"f'strides {{list(out.stride())}}', 'a contiguous tensor')")  # fmt: skip


def presence_lines(
    entry: Entry, item: Input, source: Callable[[Expr], str], value: str
) -> list[str]:
    """Source that refuses an input that is no tensor, or is there or not against its condition."""
    facts, lines = f"'{entry.name}', '{item.name}'", []
    if item.passed_when is not None:
        text = repr(item.passed_when.text)
        lines += [
            f"if {source(item.passed_when)}:",
            f"    if {item.name} is None: _refuse_absent({facts}, {text})",
            f"elif {item.name} is not None: _refuse_present({facts}, {text})",
        ]
    test = f"not isinstance({item.name}, _Tensor)"
    if item.optional:
        test = f"{item.name} is not None and {test}"
    return [*lines, f"if {test}: _must_be_tensor({facts}, {value}, {item.optional})"]


def signature_source(entry: Entry) -> tuple[str, dict[str, Any]]:
    """The source of ``signature`` and the names it needs."""
    e = _Emitter(entry)
    names = ", ".join(item.name for item in entry.inputs)
    dims = sorted(e.dims)
    for name in (*dims, *entry.dtypes, "device"):
        e.emit(f"{name} = None")
    for item in entry.inputs:
        e.presence(item)
    e.tensors()
    e._derive(frozenset(entry.dims))
    e.broadcast_checks()
    e.rules()
    e.emit(f"outputs = ({''.join(part + ', ' for part in e.outputs())})")
    e.out_buffer()
    shown = ", ".join(f"'{name}': {name}" for name in dims)
    e.emit(f"return outputs, {{{shown}}}, device")
    head = f"def signature(op{', ' + names if names else ''}, out=None):\n"
    title = f"# Generated from {entry.family}/manifest.yaml, entry {entry.name}: its check.\n"
    return title + head + "\n".join(e.lines) + "\n", e.namespace


def make_signature(entry: Entry, suffix: str = "") -> Callable[..., Any]:
    """The compiled ``signature`` function of an entry; ``suffix`` tells definitions apart."""
    source, namespace = signature_source(entry)
    filename = f"tileops_generated/{entry.family}/{_snake(entry.name)}_signature{suffix}.py"
    function: Callable[..., Any] = compile_source(source, filename, namespace)["signature"]
    return function


def _snake(name: str) -> str:
    text = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()
