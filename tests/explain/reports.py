"""Reports written by hand, for what shows them: a small one, a hostile one, a long one, a full one."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from typing import Any

from tileops.explain import model
from tileops.explain.model import (
    Break,
    Compilation,
    Graph,
    Group,
    Guard,
    Guards,
    Inductor,
    Kernel,
    Line,
    Node,
    Normalisation,
    Phase,
    Report,
    Unfused,
)  # fmt: skip

FILE = "/home/user/model.py"
SOURCE = """\
import torch


def block(x):
    y = x * 2
    print("between")
    return torch.relu(y)
"""
CODE = """\
#include <vector>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
    // twice, "quoted" & <bracketed>
    for (int i = 0; i < 64; i++) out_ptr0[i] = in_ptr0[i] * 2.0f;
}"""


def at(number: int, file: str = FILE, source: str = SOURCE) -> Line:
    return Line(file, number, "block", source.splitlines()[number - 1].strip())


def node(name: str, target: str, args: str, inputs: list[str], line: Line | None) -> Node:
    return Node(name, "call_function", target, args, inputs, line, "f32", [4, 4], [4, 1], "cpu", 64)


def small() -> Report:
    """Line 5 is node ``mul`` and kernel ``cpp_fused_mul_0``; line 6 breaks; line 7 is what follows."""
    x = Node("x", "placeholder", "L_x_", "", dtype="f32", shape=[4, 4], bytes=64)
    mul = node("mul", "operator.mul", "x, 2", ["x"], at(5))
    aten = node("mul", "torch.ops.aten.mul.Tensor", "x, 2", ["x"], at(5))
    code = f'def forward(self, x):\n    # File: {FILE}:5 in block, code: y = x * 2\n    mul: "f32[4, 4]" = x * 2'
    kernel = Kernel(
        "cpp_fused_mul_0", "pointwise", "cpp", [Group("op0", "pointwise", ["pointwise"], ["mul"], ["buf0"])],
        ["mul"], [at(5)], CODE, {"threads": 1},
    )  # fmt: skip
    unfused = Unfused("passes", "op0", "op1", ["mul"], ["relu"], "no shared data")
    first = Compilation(
        "0/0", "block", at(4), False, Graph("capture", code, [x, mul]),
        breaks=[Break("print", "print is no operation", at(6), [at(6)], "Print outside.", [], [mul], 1)],
        guards=Guards([Guard("tensor", "TENSOR_MATCH", "L['x']", "check", at(5), {"dtype": "float32"})], 3.5),
        normalisation=Normalisation([Graph("inference", code, [x, aten])], [], [], [], None),
        inductor=[Inductor("inference", [kernel], [unfused], [], [], CODE, None)],
        phases=[Phase("capture", 0.25), Phase("code", 1.5)],
    )  # fmt: skip
    relu = node("relu", "torch.relu", "y", ["y"], at(7))
    rest = Compilation("1/0", "block", at(6), True, Graph("capture", "", [relu]))
    return Report("block", "2.13.0", "cpu", {"mode": None}, [first, rest], sources={FILE: SOURCE})


HOSTILE = "</script><img src=x onerror=\"hacked='yes'\"><script>hacked='yes'</script>'&amp; – ✓ {{ 7 * 7 }}"


def hostile() -> Report:
    """Every text of the full report, and the user's code, would break out of a page that lets it."""
    report = filled(Report, text=lambda _: HOSTILE)
    report.sources = {HOSTILE: f"{HOSTILE}\n" * 20}
    return report


def long(count: int) -> Report:
    """``count`` nodes of forty lines, each with a kernel that has code."""
    source = "".join(f"    x = x * {k}\n" for k in range(40))
    lines = [at(k + 1, source=source) for k in range(40)]
    names = ["x", *(f"mul_{k}" for k in range(count))]
    pairs = list(itertools.pairwise(names))
    nodes = [
        node(new, "torch.ops.aten.mul.Tensor", f"{old}, 2", [old], lines[k % 40])
        for k, (old, new) in enumerate(pairs)
    ]
    code = "\n".join(f'    {new}: "f32[4, 4]" = {old} * 2' for old, new in pairs)
    kernels = [
        Kernel(f"cpp_fused_mul_{k}", "pointwise", "cpp", [], [each.name], [each.line], CODE, {})
        for k, each in enumerate(nodes)
        if each.line
    ]
    graphs = [Graph("inference", code, nodes)]
    one = Compilation(
        "0/0", "block", lines[0], False, Graph("capture", code, nodes),
        normalisation=Normalisation(graphs, [], [], [], None),
        inductor=[Inductor("inference", kernels, [], [], [], code, None)],
    )  # fmt: skip
    return Report("block", "2.13.0", "cpu", {}, [one], sources={FILE: source})


def filled(cls: Any, owner: str = "", text: Any = lambda path: f"«{path}»") -> Any:
    """A value with every field set; ``text`` makes its strings of the names of owner and field."""
    hints = typing.get_type_hints(cls, vars(model))
    return cls(**{
        each.name: _value(hints[each.name], f"{owner}{cls.__name__}.{each.name}", text)
        for each in dataclasses.fields(cls)
        if each.name != "result"
    })  # fmt: skip


def _value(hint: Any, path: str, text: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return _value(hint.__args__[0], path, text)
    if dataclasses.is_dataclass(hint):
        return filled(hint, path.rsplit(" ", 1)[-1] + " ", text)
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is list:
        return [_value(inner[0], path, text)]
    if kind is dict:
        return {text(f"{path} key"): _value(inner[1], path, text)}
    return {int: 7, float: 7.5, bool: True}.get(hint) or text(path)
