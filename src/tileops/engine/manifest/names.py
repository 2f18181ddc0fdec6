"""What an entry's names may be, and that every expression uses names that are known by then.

Shapes bind dims from left to right over the inputs; presence and writes are decided before any
tensor is looked at, from params alone.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from tileops.engine.manifest.document import Located
from tileops.engine.manifest.expr import DTYPES, Expr

if TYPE_CHECKING:
    from tileops.engine.manifest.entry import Entry

__all__ = ["check_names"]

_RESERVED = frozenset({"self", "out", "target", "instance_key"})
"""Taken by every op's constructor, call or operator."""
_GENERATED = frozenset(
    {"op", "s", "device", "outputs", "want", "dtype", "facts", "plan", "r", "keyset"}
    | {"len", "tuple", "list", "isinstance", "type", "getattr"}
)
"""Local names of the generated checks and calls: no input, dim or dtype variable may have them."""


def check_names(fail: Callable[[Located, str], NoReturn], node: Located, entry: Entry) -> None:
    """Raise through ``fail`` at the first name that is taken, misplaced or unknown."""
    check = _Check(fail, node, entry)
    check.declared()
    check.order()
    check.dims()
    check.inputs()
    check.outputs()
    check.rules_and_cost()
    check.sharding()


class _Check:
    def __init__(
        self, fail: Callable[[Located, str], NoReturn], node: Located, entry: Entry
    ) -> None:
        self.fail, self.node, self.entry = fail, node, entry
        self.params = set(entry.shape_params)
        self.variables = set(entry.dtypes)
        self.input_names = {item.name for item in entry.inputs}
        self.bound = {
            n for item in entry.inputs for n in _pattern_names(item.shape.tree)
        } - self.params
        self.all_dims = self.bound | set(entry.dims)
        self.before = self.params | set(DTYPES)
        """Known before a call; then ``settled`` with the dtypes, then everything."""
        self.settled = self.before | self.variables
        self.known = self.settled | self.all_dims

    def at(self, *path: str | int) -> Located:
        """The innermost field of ``path`` that is written."""
        return self.node.find("signature", *path)

    # -- names

    def declared(self) -> None:
        entry = self.entry
        params = [p.name for p in entry.params]
        taken: dict[str, str] = {}
        for section, names, reserved in (
            ("params", params, _RESERVED),
            ("dtypes", entry.dtypes, _RESERVED | _GENERATED),
            ("inputs", self.input_names, _RESERVED | _GENERATED),
            ("dims", entry.dims, _RESERVED | _GENERATED),
        ):
            for name in names:
                self._name(section, name, reserved)
                if name in taken:
                    self._fail((section, name), f"the name is used twice (first in {taken[name]})")
                taken[name] = section
        for output in entry.outputs:
            self._name("outputs", output.name, _RESERVED)
        for item in entry.inputs:
            for name in sorted(_pattern_names(item.shape.tree) - self.params - set(entry.dims)):
                where = ("inputs", item.name, "shape")
                if name in taken:
                    self._fail(where, f"dim '{name}' has the name of another in {taken[name]}")
                if name in _RESERVED | _GENERATED or name in DTYPES:
                    self._fail(where, f"dim '{name}': the name is reserved")

    def _name(self, section: str, name: str, reserved: frozenset[str]) -> None:
        if name in reserved or keyword.iskeyword(name):
            self._fail((section, name), "the name is reserved")
        if name in DTYPES:
            self._fail((section, name), "the name is that of a dtype")

    def _fail(self, path: tuple[str, ...], problem: str) -> NoReturn:
        self.fail(self.at(*path), f"{'.'.join(path)}: {problem}")

    def order(self) -> None:
        """What a caller may leave out comes last among the positional."""
        from tileops.engine.manifest.entry import MISSING

        params = [(p.name, p.default is not MISSING) for p in self.entry.params if not p.kw_only]
        inputs = [(i.name, i.optional) for i in self.entry.positional_inputs]
        for section, items in (("params", params), ("inputs", inputs)):
            omitted = ""
            for name, may_be_omitted in items:
                if omitted and not may_be_omitted:
                    problem = f"is required and follows '{omitted}', which is not; "
                    self._fail((section, name), problem + "reorder them or make one kw_only")
                omitted = name if may_be_omitted else omitted

    # -- expressions

    def resolve(self, path: tuple[str | int, ...], expr: Expr | None, known: Iterable[str]) -> None:
        if expr is None:
            return
        at, label = self.at(*path), ".".join(map(str, path))
        unknown = sorted(expr.names - set(known))
        if unknown:
            late = " here" if unknown[0] in self.known else ""
            self.fail(at, f"{label}: unknown name '{unknown[0]}'{late} in {expr.text!r}")
        absent = sorted(expr.presence - self.input_names)
        if absent:
            self.fail(at, f"{label}: passed({absent[0]}) names no input")
        fieldless = sorted(expr.bases - self.params)
        if fieldless:
            self.fail(at, f"{label}: '{fieldless[0]}' is no parameter, so it has no fields")

    def dims(self) -> None:
        for name, expr in self.entry.dims.items():
            self.resolve(("dims", name), expr, self.before | self.all_dims)
            seen, ahead = set(), {name}
            while ahead:
                seen |= ahead
                ahead = {
                    n
                    for known in ahead
                    for n in self.entry.dims[known].names & set(self.entry.dims)
                }
                if name in ahead:
                    self._fail(("dims", name), f"is derived from itself in {expr.text!r}")
                ahead -= seen

    def inputs(self) -> None:
        for item in self.entry.inputs:
            path = ("inputs", item.name)
            self.resolve((*path, "dtype"), item.dtype, self.settled)
            self.resolve((*path, "optional"), item.passed_when, self.before)
            self.resolve((*path, "mutated"), item.mutated, self.before)
            self.resolve((*path, "shape"), item.shape, self.known)
            if not _is_pattern(item.shape.tree):
                self._fail((*path, "shape"), f"{item.shape.text!r} is no list of dims")
            if item.content is not None:
                self.resolve((*path, "content", "min"), item.content.min, self.known)
                self.resolve((*path, "content", "max"), item.content.max, self.known)

    def outputs(self) -> None:
        outputs = self.entry.outputs
        for output in outputs:
            path = ("outputs", output.name)
            self.resolve((*path, "shape"), output.shape, self.known)
            self.resolve((*path, "dtype"), output.dtype, self.settled)
            self.resolve((*path, "nullable"), output.nullable, self.before)
            if output.is_input is None:
                continue
            if output.is_input not in self.input_names:
                self._fail((*path, "is_input"), f"unknown input '{output.is_input}'")
            if self.entry.input(output.is_input).mutated is None:
                self._fail((*path, "is_input"), f"input '{output.is_input}' is never written")
        if any(output.buffer for output in outputs) and len(outputs) != 1:
            self.fail(self.at("outputs"), "outputs: 'buffer: out' is for an op with one output")

    def rules_and_cost(self) -> None:
        entry = self.entry
        for index, rule in enumerate(entry.rules):
            at = self.at("rules", index)
            self.resolve(("rules", index, "require"), rule.require, self.known)
            if rule.argument is not None and rule.argument not in self.input_names | self.params:
                self.fail(at, f"rules.{index}.argument: '{rule.argument}' is no input or parameter")
        tensors = self.input_names | {output.name for output in entry.outputs}
        known = self.before | self.all_dims | {f"nbytes_{name}" for name in tensors}
        costs: tuple[tuple[str, Any], ...] = (
            ("flops", entry.cost.flops),
            ("read_bytes", entry.cost.read_bytes),
            ("write_bytes", entry.cost.write_bytes),
        )
        for name, expr in costs:
            if expr is None:
                continue
            unknown = sorted(expr.names - known)
            at = self.node.find("cost", name)
            if unknown:
                self.fail(at, f"cost.{name}: unknown name '{unknown[0]}' in {expr.text!r}")
            absent = sorted(expr.presence - self.input_names)
            if absent:
                self.fail(at, f"cost.{name}: passed({absent[0]}) names no input")

    def sharding(self) -> None:
        dims = self.bound - set(self.entry.dims)
        for rule in self.entry.sharding:
            at, label, names = self.node.find("sharding", rule.key), rule.key, set(rule.names)
            wrong = sorted(names - dims - (set() if rule.at else self.input_names))
            if wrong:
                self.fail(at, f"sharding.{label}: '{wrong[0]}' is no dim that a shape of an input finds"
                              + ("" if rule.at else ", and no input"))  # fmt: skip
            if names & dims and not names <= dims:
                self.fail(at, f"sharding.{label}: dims and inputs do not go together")
            if rule.at is not None and rule.at not in self.params:
                self.fail(at, f"sharding.{label}: '{rule.at}' is no parameter")
            for condition in rule.conditions:
                unknown = sorted(
                    condition.names - self.known | condition.presence - self.input_names
                )
                if unknown:
                    text = condition.text
                    self.fail(at, f"sharding.{label}: unknown name '{unknown[0]}' in {text!r}")


def _pattern_names(tree: ast.expr) -> set[str]:
    """The names that stand in a list of dims, not those that only choose between lists."""
    if isinstance(tree, ast.IfExp):
        return _pattern_names(tree.body) | _pattern_names(tree.orelse)
    return set(Expr(ast.unparse(tree)).names)


def _is_pattern(tree: ast.expr) -> bool:
    if isinstance(tree, ast.IfExp):
        return _is_pattern(tree.body) and _is_pattern(tree.orelse)
    return isinstance(tree, ast.Tuple | ast.List)
