"""Shape patterns: what generated checks bind and refuse, against an interpreter written here."""

from __future__ import annotations

import ast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.signatures import Check, zeros

SINGLE = ("M", "N", "K")
SPLICED = ("B", "S")


@st.composite
def patterns(draw) -> list[list[str]]:
    """One to three lists of dims that a check can solve: each has at most one new splice, once, and
    products of known dims only."""
    known: set[str] = set()
    lists = []
    for _ in range(draw(st.integers(1, 3))):
        elements, new_splice = [], ""
        for _ in range(draw(st.integers(0, 4))):
            choices = [*SINGLE, *(f"2*{n}" for n in SINGLE), *(f"{n}*3" for n in SINGLE), "4"]
            choices += [f"*{n}" for n in SPLICED if n in known - {new_splice} or not new_splice]
            choices += [f"{a}*{b}" for a in SINGLE for b in SINGLE if {a, b} <= known]
            choices += [f"{a} + 1" for a in SINGLE if a in known]
            choices += ["prod(B)"] if "B" in known else []
            element = draw(st.sampled_from(choices))
            name = element.removeprefix("*")
            if element.startswith("*") and name not in known:
                new_splice = name
                known.add(name)
            elements.append(element)
            known |= set(SINGLE) & set(element.replace("*", " ").split()) - {"+"}
        lists.append(elements)
    return lists


def size_of(element: str, env: dict):
    """The value of an element, or None where a name of it is unknown."""
    node = ast.parse(element, mode="eval").body

    def value(node):
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return env[node.id]
            case ast.BinOp():
                left, right = value(node.left), value(node.right)
                return left * right if isinstance(node.op, ast.Mult) else left + right
            case ast.Call():
                return torch.Size(value(node.args[0])).numel()

    try:
        return value(node)
    except KeyError:
        return None


def bind(lists: list[list[str]], shapes: list[tuple[int, ...]]) -> dict | None:
    """The dims that ``shapes`` give to ``lists``, or None where they do not fit."""
    env: dict = {}
    for elements, shape in zip(lists, shapes, strict=True):
        unknown = [e for e in elements if e.startswith("*") and e[1:] not in env]
        fixed = sum(
            len(env[e[1:]]) if e.startswith("*") else 1 for e in elements if e not in unknown
        )
        rest = len(shape) - fixed
        if rest < 0 or (rest and not unknown):
            return None
        place = 0
        for element in elements:
            if element.startswith("*"):
                name = element[1:]
                length = len(env[name]) if name in env else rest
                part = tuple(shape[place : place + length])
                place += length
                if env.setdefault(name, part) != part:
                    return None
                continue
            size = shape[place]
            place += 1
            value = size_of(element, env)
            if value is None:
                (name,) = [n for n in SINGLE if n in element]
                factor = int(element.replace(name, "").replace("*", "") or 1)
                if size % factor:
                    return None
                env[name], value = size // factor, size
            if value != size:
                return None
    return env


SIZES = st.integers(0, 6)


@settings(max_examples=300, deadline=None)
@given(patterns(), st.data())
def test_patterns(tmp_path_factory, lists, data):
    """Shapes made from dims, some changed afterwards: the check and the interpreter agree on which
    fit, and on every dim."""
    env = {name: data.draw(SIZES, name) for name in SINGLE}
    env |= {name: data.draw(st.lists(SIZES, max_size=2).map(tuple), name) for name in SPLICED}
    shapes = []
    for elements in lists:
        shape: list[int] = []
        for element in elements:
            if element.startswith("*"):
                shape += env[element[1:]]
            else:
                shape.append(size_of(element, env))
        shapes.append(shape)
    change = data.draw(st.sampled_from(["none", "none", "size", "longer", "shorter"]), "change")
    shape = data.draw(st.sampled_from(shapes), "changed shape")
    if change == "size" and shape:
        shape[data.draw(st.integers(0, len(shape) - 1))] += 1
    elif change == "longer":
        shape.insert(data.draw(st.integers(0, len(shape))), data.draw(SIZES))
    elif change == "shorter" and shape:
        shape.pop()
    names = sorted({n for elements in lists for e in elements for n in _names(e)})
    dtypes = "dtypes: {T: [float32]}\n"
    inputs = "".join(
        f"  x{n}: {{dtype: T, shape: '[{', '.join(elements)}]'}}\n"
        for n, elements in enumerate(lists)
    )
    outputs = f"outputs: {{y: {{dtype: T, shape: '[{', '.join(_spelt(n) for n in names)}]'}}}}\n"
    check = Check(tmp_path_factory.mktemp("p"), dtypes + "inputs:\n" + inputs + outputs)
    given = {f"x{n}": torch.empty(shape, device="meta") for n, shape in enumerate(shapes)}
    wanted = bind(lists, [tuple(shape) for shape in shapes])
    if wanted is None:
        assert check.refusal(given).given.startswith("shape [")
    else:
        outputs, dims, device = check(given)
        assert dims == wanted
        flat = [s for n in names for s in (wanted[n] if n in SPLICED else (wanted[n],))]
        assert outputs == ((tuple(flat), torch.float32),)
        assert device == torch.device("meta")
        if change == "none":
            assert {name: env[name] for name in wanted} == wanted or any("*" in e for e in names)


def _names(element: str) -> list[str]:
    return [n for n in (*SINGLE, *SPLICED) if n in element.replace("prod", "")]


def _spelt(name: str) -> str:
    return f"*{name}" if name in SPLICED else name


@pytest.mark.parametrize(
    ("shape", "size", "dims"),
    [
        ("[*B, N]", (2, 3, 4), {"B": (2, 3), "N": 4}),
        ("[*B, N]", (4,), {"B": (), "N": 4}),
        ("[N, *B]", (4, 2), {"N": 4, "B": (2,)}),
        ("[M, *B, N]", (1, 2, 3, 4), {"M": 1, "B": (2, 3), "N": 4}),
        ("[2*N]", (8,), {"N": 4}),
        ("[N*2]", (0,), {"N": 0}),
        ("[N, N]", (3, 3), {"N": 3}),
        ("[*B, 2*N, N]", (5, 6, 3), {"B": (5,), "N": 3}),
        ("[N, 2*N + 1]", (3, 7), {"N": 3}),
        ("[]", (), {}),
        ("[3]", (3,), {}),
        ("[M, N] if M > 2 else [M]", None, None),
    ],
)
def test_one_list(tmp_path, shape, size, dims):
    signature = f"inputs: {{x: {{dtype: float32, shape: '{shape}'}}}}\noutputs: {{}}\n"
    if size is None:
        # What chooses between lists must be known before: here it is what the list would find.
        with pytest.raises(TypeError):
            Check(tmp_path, signature)({"x": zeros(1, 2)})
    else:
        assert Check(tmp_path, signature).dims({"x": zeros(*size)}) == dims


@pytest.mark.parametrize(
    ("shape", "size"),
    [("[*B, N]", ()), ("[2*N]", (7,)), ("[N, N]", (3, 4)), ("[N]", (3, 4)), ("[*B, 2*N, N]", (5, 7, 3)),
     ("[3]", (4,)), ("[]", (1,)), ("[N, 2*N + 1]", (3, 6))],
)  # fmt: skip
def test_one_list_refuses(tmp_path, shape, size):
    signature = f"inputs: {{x: {{dtype: float32, shape: '{shape}'}}}}\noutputs: {{}}\n"
    error = Check(tmp_path, signature).refusal({"x": zeros(*size)})
    assert (error.argument, error.given) == ("x", f"shape {list(size)}")
    # As Python writes it: 2 * N for 2*N.
    assert error.accepted.replace(" ", "").startswith("shape" + shape.replace(" ", ""))


def test_a_refusal_shows_what_is_known(tmp_path):
    signature = """\
    params: {width: {type: ints}}
    inputs:
      x: {dtype: float32, shape: "[*B, *width]"}
      y: {dtype: float32, shape: "[*B, K]"}
    outputs: {}
    """
    check = Check(tmp_path, signature)
    error = check.refusal({"x": zeros(2, 3, 4), "y": zeros(2, 9, 1)}, width=4)
    assert error.argument == "y"
    assert error.accepted == "shape [*B, K] with B=[2, 3]"
    error = check.refusal({"x": zeros(2, 5), "y": zeros(2, 1)}, width=4)
    assert error.accepted == "shape [*B, *width] with width=[4]"


def test_dims_with_the_names_of_helpers(tmp_path):
    """What a message shows is given by name: no dim may collide with the helper's own."""
    signature = """\
    params: {argument: {type: int}}
    inputs:
      x: {dtype: float32, shape: "[message, name, tensor, pattern, 2]"}
      y: {dtype: float32, shape: "[name, tensor, pattern]"}
    outputs: {}
    rules: [{require: "argument < message + name", message: "small"}]
    """
    check = Check(tmp_path, signature)
    error = check.refusal({"x": zeros(1, 1, 1, 1, 3), "y": zeros(1, 1, 1)}, argument=1)
    assert error.accepted.startswith("shape [message, name, tensor, pattern, 2]")
    error = check.refusal({"x": zeros(1, 1, 1, 1, 2), "y": zeros(1, 1, 2)}, argument=1)
    assert error.accepted == "shape [name, tensor, pattern] with name=1, pattern=1, tensor=1"
    error = check.refusal({"x": zeros(1, 1, 1, 1, 2), "y": zeros(1, 1, 1)}, argument=5)
    assert (error.argument, error.given) == ("argument", "argument=5, message=1, name=1")
