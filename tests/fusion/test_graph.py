"""Reading Dynamo's graphs: one name for all spellings, and what is written between two nodes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tileops.fusion.graph import Edit, Memory, canonical, fake_mode_of, fusable, value_of


def captured(function, *inputs, **more):
    """The graph that Dynamo makes of a call."""
    graphs = []

    def keep(module, _):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, **more)(*inputs)
    return graphs[0]


SPELLINGS = {
    "add": [lambda x: x + x, lambda x: torch.add(x, x), lambda x: x.add(x), lambda x: torch.ops.aten.add(x, x), lambda x: 1 + x],
    "div": [lambda x: x / 2, lambda x: torch.true_divide(x, 2), lambda x: x.divide(2)],
    "mul": [lambda x: x * x, lambda x: torch.multiply(x, x), lambda x: torch.ops.aten.mul.Tensor(x, x)],
    "pow": [lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.pow(2)],
    "rsqrt": [torch.rsqrt, lambda x: x.rsqrt()],
    "softmax": [lambda x: F.softmax(x, -1), lambda x: torch.softmax(x, -1), lambda x: x.softmax(-1)],
    "silu": [F.silu, torch.nn.SiLU(), torch.ops.aten.silu],
    "to": [lambda x: x.float(), lambda x: x.to(torch.bfloat16), lambda x: x.type_as(x)],
    "linear": [lambda x: F.linear(x, x)],
    "reshape": [lambda x: x.view(-1), lambda x: x.reshape(-1), lambda x: x.flatten()],
    "transpose": [lambda x: x.transpose(0, 1), lambda x: torch.swapaxes(x, 0, 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_have_one_name(name):
    for function in SPELLINGS[name]:
        module = captured(function, torch.randn(4, 4, dtype=torch.float64))
        names = [canonical(n) for n in module.graph.nodes if n.op.startswith("call")]
        assert name in names, (name, [str(n) for n in module.graph.nodes])


def test_what_writes_has_no_name():
    def function(x):
        x = x + 1
        x.mul_(2)
        x += 3
        x[0] = 4
        torch.add(x, 1, out=x)
        F.silu(x, inplace=True)
        return F.silu(x, True)

    module = captured(function, torch.randn(4))
    names = [canonical(n) for n in module.graph.nodes if n.op.startswith("call")]
    assert names[0] == "add"
    assert not {"mul", "iadd", "setitem", "silu"} & set(names), names


def test_a_product_is_no_neighbour():
    module = captured(lambda x: torch.relu((x @ x).sum(-1)), torch.randn(4, 4))
    found = [fusable(n) for n in module.graph.nodes if n.op.startswith("call")]
    assert found == [False, True, True]


def test_memory_knows_what_is_written_through_views():
    def function(x):
        a = x + 1
        b = x * 2
        view = a[1:].transpose(0, 1)
        c = a.sum()
        view.add_(b[1:].t())
        return a, b, c, view

    module = captured(function, torch.randn(4, 4))
    memory, nodes = Memory(module.graph), list(module.graph.nodes)
    a, b = (next(n for n in nodes if n.target is t) for t in (operator.add, operator.mul))
    c = next(n for n in nodes if canonical(n) == "sum")
    assert memory.written(a)
    assert not memory.written(a, end=c)
    assert memory.written(a, start=c)
    assert not memory.written(b)


def shortened(x):
    a = x + 0
    F.embedding(torch.zeros(1, dtype=torch.int64), a, max_norm=0.1)
    return a


def counted(x):
    a = x + 0
    F.batch_norm(torch.ones(2, 3), a[0, :3], a[1, :3].exp(), training=True)
    return a


def listed(x):
    a = x + 0
    torch._foreach_add_([x[0], a[0]], 1.0)
    return a


def through_numpy(x):
    a = x + 0
    a.numpy()[0] = 3
    return a


@torch.compiler.allow_in_graph
def unknown(x):
    x.add_(1)


def in_a_function_of_the_user(x):
    a = x + 0
    unknown(a)
    return a


@pytest.mark.parametrize(
    "function", [shortened, counted, listed, through_numpy, in_a_function_of_the_user]
)
def test_memory_knows_what_no_first_argument_tells(function):
    module = captured(function, torch.randn(4, 4))
    memory, nodes = Memory(module.graph), {n.name: n for n in module.graph.nodes}
    assert memory.written(nodes["a"])


def test_an_embedding_reads_its_weight():
    module = captured(lambda x, i: F.embedding(i, x), torch.randn(4, 4), torch.zeros(1).long())
    assert not Memory(module.graph).written(next(iter(module.graph.nodes)))


def test_an_edit_that_differs_leaves_no_trace():
    module = captured(lambda x: (x * 2).sum(-1), torch.randn(4, 4))
    graph = module.graph
    before = str(graph)
    total = next(n for n in graph.nodes if canonical(n) == "sum")
    edit = Edit(graph, total, fake_mode_of(graph))
    new = edit.call(torch.sum, total.args[0], -1, keepdim=True)
    assert "shape (4, 1) instead of (4,)" in edit.replace({total: new})
    assert str(graph) == before
    new = edit.call(torch.ops.aten.sum.dim_IntList, total.args[0], [-1])
    assert edit.replace({total: new}) == ""
    assert value_of(new) is value_of(total)
    edit.erase_unused([total])
    graph.lint()
    assert "aten.sum" in str(graph)
