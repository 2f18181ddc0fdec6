"""Expressions mean what Python means by the same text: on ints, on tuples, on SymInts; evaluated, or
written into generated source.
"""

from __future__ import annotations

import ast
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tileops.engine.manifest.expr import DTYPES, FUNCTIONS, Expr, ExpressionError, broadcast, parse

NAMES = ("a", "b", "c")
SPLICES = ("S", "R")
PRESENT = frozenset({"x"})
FIELDS = SimpleNamespace(size=7, masked=True)

# ---- generated expressions -----------------------------------------------------------------------


LEAVES = ("layout.size", "len(S)", "prod(R)", "S[0]", "R[-1]", "passed(x) * 3")
FACTS = (
    "passed(x)", "passed(y)", "nothing is None", "mode == 'b'", "mode is not None", "S == R",
    "True", "False", "layout.masked", "(a, b) == (b, a)",
)  # fmt: skip
# Python's precedence is the language's: the forms without brackets are what tests it.
OPERATIONS = ("{} + {}", "{} - {}", "{} * {}", "{} // {}", "{} % {}", "({}) - ({})", "({}) * ({})",
              "({}) // ({})", "({}) % ({})", "max({}, {})", "min({}, *S, {})",
              "prod([{}, *R, {}])")  # fmt: skip
COMPARISONS = ("{} == {}", "{} != {}", "{} < {}", "{} <= {}", "{} > {}", "{} >= {}",
               "{0} <= {1} < 5 + {0}", "{} in [{}, *S]", "({0}) not in R")  # fmt: skip


@st.composite
def integers(draw, depth: int = 3) -> str:
    """The text of an integer expression: every operator and function that gives an integer."""
    kind = draw(st.integers(0, 7)) if depth else 0
    if kind == 0:
        return str(draw(st.one_of(st.integers(0, 20), st.sampled_from(NAMES + LEAVES))))
    first = draw(integers(depth - 1))
    if kind == 1:
        return draw(st.sampled_from(["-({})", "abs({})", "({})**2", "({})**0"])).format(first)
    second = draw(integers(depth - 1))
    if kind == 2:
        return f"({first} if {draw(conditions(depth - 1))} else {second})"
    return draw(st.sampled_from(OPERATIONS)).format(first, second)


@st.composite
def conditions(draw, depth: int = 3) -> str:
    """The text of a condition over integer expressions."""
    kind = draw(st.integers(0, 4)) if depth else 0
    if kind == 0:
        return draw(st.sampled_from(FACTS))
    if kind <= 2:
        pair = draw(integers(depth - 1)), draw(integers(depth - 1))
        return draw(st.sampled_from(COMPARISONS)).format(*pair)
    first, second = draw(conditions(depth - 1)), draw(conditions(depth - 1))
    joined = ["({}) and ({})", "{} or {}", "not ({})", "not ({}) or not ({})", "{} and {}"]
    return draw(st.sampled_from(joined)).format(first, second)


VALUES = st.fixed_dictionaries(
    {
        **{name: st.integers(-5, 20) for name in NAMES},
        **{
            name: st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple) for name in SPLICES
        },
        "mode": st.sampled_from(["a", "b", None]),
        "layout": st.just(FIELDS),
        "nothing": st.none(),
    }
)


def python(text: str, env: dict, namespace: dict | None = None):
    """Python's own value; lists are sizes here, and sizes are tuples."""

    class Lists(ast.NodeTransformer):
        def visit_List(self, node):
            self.generic_visit(node)
            return ast.copy_location(ast.Tuple(node.elts, node.ctx), node)

    tree = ast.fix_missing_locations(Lists().visit(ast.parse(text, mode="eval")))
    plain = {"prod": math.prod, "len": len, "min": min, "max": max, "abs": abs}
    presence = {"passed": lambda given: given, "x": True, "y": False}
    names = {"__builtins__": {}, **(namespace or {**plain, **presence})}
    return eval(compile(tree, "test", "eval"), names, env)


def outcome(function):
    """A value with its type, or the error's type."""
    try:
        value = function()
    except (ZeroDivisionError, IndexError) as error:
        return type(error)
    return (type(value), value)


@settings(max_examples=300, deadline=None)
@given(integers(), VALUES)
def test_integers_evaluate_as_in_python(text, env):
    _same_as_python(text, env)


@settings(max_examples=300, deadline=None)
@given(conditions(), VALUES)
def test_conditions_evaluate_as_in_python(text, env):
    _same_as_python(text, env)


def _parse(text: str) -> Expr:
    try:
        return parse(text)
    except ExpressionError as error:
        assume("deeply" not in str(error) and "characters" not in str(error))
        raise


def _same_as_python(text: str, env: dict) -> None:
    expr = _parse(text)
    assert outcome(lambda: expr.evaluate(env, PRESENT)) == outcome(lambda: python(text, env))


@settings(max_examples=300, deadline=None)
@given(st.one_of(integers(), conditions()), VALUES)
def test_source_means_the_same(text, env):
    """What goes into a generated check: names renamed, presence and functions spelt out."""
    expr = _parse(text)
    source = expr.source(lambda name: f"op.{name}", lambda name: f"(t_{name} is not None)")
    namespace = {f"_f_{name}": function for name, function in FUNCTIONS.items()}
    namespace |= {"op": SimpleNamespace(**env), "t_x": 0, "t_y": None}
    assert outcome(lambda: python(source, {}, namespace)) == outcome(
        lambda: expr.evaluate(env, PRESENT)
    )
    same = Expr(expr.source(lambda name: name, lambda name: f"passed({name})").replace("_f_", ""))
    assert same.names == expr.names
    assert same.presence == expr.presence
    assert outcome(lambda: same.evaluate(env, PRESENT)) == outcome(
        lambda: expr.evaluate(env, PRESENT)
    )


# ---- SymInts -------------------------------------------------------------------------------------


def symbols(**hints: int) -> dict[str, torch.SymInt]:
    env = ShapeEnv()
    found = {}
    for name, hint in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(
            hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
        )
        found[name] = env.create_symintnode(symbol, hint=hint, source=source)
    return found


@settings(max_examples=60, deadline=None)
@given(integers(), st.tuples(*[st.integers(2, 20)] * 3), VALUES)
def test_symints_evaluate_as_their_hints(text, hints, env):
    given = dict(zip(NAMES, hints, strict=True))
    plain = {**env, **given}
    wanted = outcome(lambda: parse(text).evaluate(plain, PRESENT)) if _parse(text) else None
    assume(wanted is not ZeroDivisionError)
    # Python's error is the symbol's too, where it depends on no symbol.
    symbolic = {**env, **symbols(**given)}
    try:
        value = outcome(lambda: parse(text).evaluate(symbolic, PRESENT))
    except TypeError as error:
        assume("BooleanAtom" not in str(error))  # torch's symbols take no bool for a number
        raise
    if isinstance(wanted, type):
        assert value is wanted
    else:
        assert int(value[1]) == wanted[1]


def test_a_symbol_stays_a_symbol():
    env = symbols(a=6, b=4)
    value = parse("2 * a + b // 2").evaluate(env)
    assert isinstance(value, torch.SymInt)
    assert int(value) == 14
    shape = parse("[*S, 2*a]").evaluate({**env, "S": (env["b"], 3)})
    assert shape[0] is env["b"]
    assert isinstance(shape[2], torch.SymInt)


def test_broadcast_keeps_equal_symbols_without_a_guard():
    a = symbols(a=6)["a"]
    assert broadcast((a, 1), (a, 5))[0] is a
    assert not a.node.shape_env.guards


# ---- functions -----------------------------------------------------------------------------------

SHAPES = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3))
def test_broadcast_agrees_with_torch(shapes):
    try:
        wanted = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast(*shapes)
    else:
        assert broadcast(*shapes) == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_div(a, 4)", 3), ("ceil_div(8, 4)", 2), ("ceil_div(0, 4)", 0),
        ("prod([])", 1), ("prod(S)", 6), ("len(S)", 2), ("min(a, 2)", 2), ("max(*S, 1)", 3),
        ("abs(-a)", 9), ("float(a)", 9.0), ("isfinite(f)", True), ("isfinite(inf)", False),
        ("is_int(a)", True), ("is_int(f)", False), ("is_int(True)", False),
        ("type_name(layout)", "SimpleNamespace"), ("bcast(S, [3])", (2, 3)),
        ("[*bcast(S, (1, 3)), a]", (2, 3, 9)), ("(a,)", (9,)), ("[]", ()), ("S[0]", 2),
        ("S[-1] if a > 3 else 0", 3), ("float32", "float32"), ("mode in ('x', 'y')", False),
        ("None if a is None else a", 9), ("a if passed(x) and not passed(y) else 0", 9),
        ("0 or a", 9), ("a and 0", 0), ("1 < 2 < 3 > 0", True),
    ],
)  # fmt: skip
def test_each_function_and_form(text, value):
    env = {"a": 9, "S": (2, 3), "f": 0.5, "inf": math.inf, "layout": FIELDS, "mode": "z"}
    result = parse(text).evaluate(env, PRESENT)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("dim", "rank", "good"),
    [
        (None, 0, True), (0, 0, True), (-1, 0, True), (1, 0, False), ((0, -1), 0, False),
        ((), 3, True), ((0, 2), 3, True), ((-1, 0), 3, True), ((0, -3), 3, False), (3, 3, False),
        (-4, 3, False), ((1, 1), 3, False),
    ],
)  # fmt: skip
def test_axes(dim, rank, good):
    assert parse("is_axes(dim, rank)").evaluate({"dim": dim, "rank": rank}) is good


@pytest.mark.parametrize(
    ("shape", "dim", "sizes", "dropped", "kept"),
    [
        ((2, 3, 5), None, (2, 3, 5), (), (1, 1, 1)), ((2, 3, 5), (), (), (2, 3, 5), (2, 3, 5)),
        ((2, 3, 5), -1, (5,), (2, 3), (2, 3, 1)), ((2, 3, 5), (-1, 0), (2, 5), (3,), (1, 3, 1)),
        ((), 0, (), (), ()), ((), None, (), (), ()), ((0, 3), (0,), (0,), (3,), (1, 3)),
    ],
)  # fmt: skip
def test_reduced_shapes(shape, dim, sizes, dropped, kept):
    env = {"S": shape, "dim": dim}
    assert parse("along(S, dim)").evaluate(env) == sizes
    assert parse("reduced(S, dim, False)").evaluate(env) == dropped
    assert parse("reduced(S, dim, True)").evaluate(env) == kept


def test_the_list_of_functions_is_closed():
    assert sorted(FUNCTIONS) == [
        "abs", "along", "bcast", "ceil_div", "float", "is_axes", "is_int", "isfinite", "len", "max",
        "min", "prod", "reduced", "type_name",
    ]  # fmt: skip
    with pytest.raises(ExpressionError, match="calls an unknown function; known: abs, along"):
        parse("sum(S)")


# ---- what an expression says about itself --------------------------------------------------------


def test_names_presence_and_fields():
    expr = parse("a if passed(x) and len(S) else layout.size + min(b, float16)")
    assert expr.names == {"a", "S", "layout", "b", "float16"}
    assert expr.presence == {"x"}
    assert expr.bases == {"layout"}


def test_atoms_are_what_no_logic_joins():
    atoms = parse("not a and (b > 1 or passed(x)) and not (c == 2)").atoms()
    assert [atom.text for atom in atoms] == ["a", "b > 1", "passed(x)", "c == 2"]


def test_an_unknown_name_has_no_value():
    with pytest.raises(KeyError, match="missing"):
        parse("missing + 1").evaluate({})
    assert [parse(name).evaluate({}) for name in DTYPES] == list(DTYPES)
    assert parse("float16").evaluate({"float16": torch.float16}) is torch.float16


def test_unevaluated_branches_need_no_value():
    assert parse("1 if True else missing").evaluate({}) == 1
    assert parse("True or missing").evaluate({}) is True
    assert parse("False and missing").evaluate({}) is False


def test_source_refuses_what_the_language_refuses():
    with pytest.raises(ExpressionError, match="outside the language"):
        Expr("__import__('os')").source(str, str)


def test_limits_leave_room_for_what_people_write():
    parse(" and ".join(["a > 1"] * 60))
    parse(" + ".join(["a"] * 30))
    with pytest.raises(ExpressionError, match=r"nested too deeply \(at most 40\)"):
        parse(" + ".join(["a"] * 45))
    with pytest.raises(ExpressionError, match=r"has 1003 characters \(at most 1000\)"):
        parse("a " * 501 + "a")
