"""What the graph tells of a tensor is what it holds, in every element, also where sizes are symbolic."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.fusion.test_graph import captured
from tileops.fusion.graph import Memory
from tileops.fusion.positions import Affine
from tileops.fusion.told import Told


def told(function, *inputs, **more):
    """For each result of ``function``: what is told, and a number for each symbol."""
    graph = captured(function, *inputs, **more).graph
    output = next(node for node in graph.nodes if node.op == "output")
    reader = Told(graph, Memory(graph))
    return [reader.of(node) for node in output.args[0]]


def number(size):
    return size if isinstance(size, int) else size.node.hint


def at(value, index):
    """A told value at an index of the tensor."""
    if isinstance(value, Affine):
        steps = sum(number(step) * index[d] for d, step in value.steps.items())
        return number(value.start) + steps
    inside = all(at(condition, index) >= 0 for condition in value.conditions)
    return value.inside if inside else value.outside


def holds(function, *inputs, **more):
    """Every result is told, and is what it is told to be."""
    results = function(*inputs)
    for place, (value, result) in enumerate(
        zip(told(function, *inputs, **more), results, strict=True)
    ):
        assert value is not None, f"result {place} is not told"
        for index in itertools.product(*map(range, result.shape)):
            assert at(value, index) == result[index].item(), f"result {place} at {index}"


def triangles(x):
    rows, columns = x.shape
    ones = torch.ones(rows, columns)
    return (
        ones.tril(), ones.triu(1), torch.tril(ones, -1).bool(), torch.triu(ones.bool(), diagonal=2),
        torch.full((rows, columns), -torch.inf).triu(1), torch.full_like(x, torch.finfo(torch.float32).min).triu(columns - rows + 1),
        x.new_ones((rows, columns)).tril() == 0, ~ones.tril().bool(), 1 - ones.tril(),
        (1.0 - ones.tril()) * -1e4, torch.zeros(rows, columns).masked_fill(ones.triu(1) == 1, -torch.inf),
        torch.where(ones.tril() > 0, 0.0, torch.finfo(torch.float32).min), torch.where(ones.tril() == 1, torch.tensor(0.0), -torch.inf),
        torch.logical_not(ones.triu(1)), ones.tril().to(torch.int64), ones.tril().mul(2).add(-1),
        torch.full((rows, columns), -1e30).half().triu(1), ones.tril().T, -ones.tril()[1:, :-1],
        ones.tril()[None, None, :, :2].expand(2, 3, -1, -1), ones.tril().view(1, rows, 1, columns),
    )  # fmt: skip


def positions(x):
    rows, columns = x.shape
    i, j = torch.arange(rows), torch.arange(columns)
    row, column, shift = i[:, None], j[None, :], columns - rows
    return (
        i, i + 3, 2 * i - 1, torch.arange(1, columns), torch.arange(0, columns, 2), -j, i.unsqueeze(-1) - j,
        column <= row, column < row + shift, row >= column, row > column - 1, row == column, row != column,
        (column <= row) & (column > row - 3), torch.logical_and(column <= row, row - column < 2),
        ~((column > row) | (column < row - 2)), (column > row).logical_or(column < row - 2),
        row >= 0, column < columns, (column <= row) | (column > row), i.expand(2, -1),
        i.view(1, rows, 1) + j, row - column, i[1:], i[None, 1::2],
        i[-2:], j[..., :3], (column <= row)[None, None, :, 1:], (column - row).transpose(0, 1),
        (column - row).permute(1, 0), (column - row).t(), (column - row).mT, i.long(), i.int() * 2,
        torch.diff(i), torch.diff(i, prepend=i[:1] - 1), torch.ones(rows, dtype=torch.int64).cumsum(0),
        (torch.diff(i, prepend=i[:1] - 1) != 1).cumsum(-1), i.expand(2, -1)[torch.arange(2)[:, None], i[None]],
        (j <= 3).to(x.device), column.clone().contiguous() <= row, (row - column)[0], (row - column)[:, 0],
        torch.where(column <= row, 0, 5), (column <= row).float(), (column <= row).int(), torch.zeros_like(x), x.new_zeros(2), x.new_full((2,), 0.5),
    )  # fmt: skip


@pytest.mark.parametrize("sizes", [(5, 5), (4, 7), (1, 1), (2, 1)])
@pytest.mark.parametrize("function", [triangles, positions])
def test_what_is_told_holds(function, sizes):
    if function is positions and sizes[0] == 1:
        sizes = (2, 3)  # a slice of what is not there
    holds(function, torch.randn(sizes))


@pytest.mark.parametrize("function", [triangles, positions])
def test_it_holds_where_sizes_are_symbolic(function):
    holds(function, torch.randn(5, 7), dynamic=True)


def packed(ids):
    """As ``transformers`` makes a mask of positions, for texts that are not packed."""
    batch, length = ids.shape
    places = torch.arange(length).unsqueeze(0).expand(batch, -1)
    text = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b, q = torch.arange(batch)[:, None, None, None], torch.arange(length)[None, None, :, None]
    k = torch.arange(length)[None, None, None, :]
    seen = q.new_ones((), dtype=torch.bool) & (places[b, k] <= places[b, q])
    seen = (seen & (text[b, q] == text[b, k])).expand(batch, -1, length, length)
    return seen, torch.where(seen, torch.zeros(()), torch.finfo(torch.float32).min)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_of_transformers(dynamic):
    holds(packed, torch.zeros(2, 6), dynamic=dynamic)


def test_what_is_not_told():
    """Data, random numbers, what is written, what other dtypes may not hold, and unions of bands."""

    def untold(x, n):
        i = torch.arange(6)
        written = torch.zeros(6, 6)
        written[2] = 1
        filled = torch.ones(6, 6)
        filled.triu_(1)
        row, column = i[:, None], i[None]
        return (
            x, x > 0, torch.rand(6), written, filled, filled[1:], torch.arange(6.0), i.to(torch.int8) + i.to(torch.int8),
            torch.where(column <= row, x, 0.0),
            ((column <= row) & (row - column < 3)) | (column == 0), i * i, i.float(), i[n], i.roll(1), i.flip(0),
            i.remainder(2), x[:, :1] + i, torch.cumsum(i, 0), i.view(2, 3), i[x[0].long()],
            torch.where(column <= row, row, column), torch.sub(i, i, alpha=2), i.half() + 1,
        )  # fmt: skip

    values = told(untold, torch.randn(6, 6), torch.tensor([1, 0, 2]))
    assert [place for place, value in enumerate(values) if value is not None] == []
