"""What a report says of guards and recompilations, for functions whose answers are known beforehand."""

from __future__ import annotations

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain.test_golden import fresh, line_of  # noqa: F401


def test_three_recompilations():
    compiled = torch.compile(golden.scaled, backend="eager", dynamic=False)
    with tileops.explaining() as report:
        compiled(torch.randn(4), 2)
        compiled(torch.randn(5), 2)
        compiled(torch.randn(4, dtype=torch.float64), 2)
        compiled(torch.randn(4), 3)
    assert len(report.recompiles) == 3
    seen = [
        (f.property, f.expected, f.actual)
        for one in report.recompiles
        for f in one.recompile.failures
        if f.compile_id == report.compilations[0].id
    ]
    assert seen == [("size[0]", "4", "5"), ("dtype", "Float", "Double"), ("value", "2", "3")]
    assert "mark_dynamic(x, 0)" in report.recompiles[0].recompile.failures[0].advice
    assert [one.recompile.count for one in report.recompiles] == [2, 3, 4]
    assert report.recompiles[0].recompile.limit == torch._dynamo.config.recompile_limit


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ([1, 2], [1, 2, 3], ("given", "length", "2", "3")),
        ([1, 2], (1, 2), ("given", "type", "list", "tuple")),
        (torch.float64, torch.int32, ("given", "value", "torch.float64", "torch.int32")),
        (slice(0, 2), slice(0, 3), ("given.stop", "value", "2", "3")),
        (
            golden.helper,
            golden.whole,
            ("given.__code__", "identity", ("one code", "helper"), "whole"),
        ),
        (
            torch.ones(4),
            torch.ones(4).requires_grad_(),
            ("given", "requires_grad", "False", "True"),
        ),
    ],
)
def test_recompiled_with_both_values(first, then, expected):
    report = tileops.explain(
        golden.takes, torch.ones(4), first, then=[(torch.ones(4), then)], backend="eager"
    )
    (failure,) = report.recompiles[0].recompile.failures
    source = failure.source.removeprefix("L['").replace("']", "")
    about, what, before, now = expected
    assert (source, failure.property, failure.actual) == (about, what, now)
    # Of what it knows by identity torch names the type, before 2.13 the object.
    assert failure.expected in (before if isinstance(before, tuple) else (before,))


def test_recompiled_by_the_state_of_the_thread():
    step = torch.compile(golden.whole, backend="eager")
    with tileops.explaining() as report:
        step(torch.ones(4))
        with torch.no_grad(), torch.autocast("cpu"):
            step(torch.ones(4))
    (failure,) = report.recompiles[0].recompile.failures
    assert set(failure.expected.split(", ")) == {"grad_mode=True", "autocast(cpu)_enabled=False"}
    assert set(failure.actual.split(", ")) == {"grad_mode=False", "autocast(cpu)_enabled=True"}


def test_guards_by_group():
    report = tileops.explain(golden.scaled, torch.randn(4), 2, backend="eager", dynamic=False)
    guards = report.compilations[0].guards
    (tensor,) = [guard for guard in guards.guards if guard.kind == "TENSOR_MATCH"]
    assert (tensor.group, tensor.source) == ("tensor", "L['x']")
    assert tensor.properties["size"] == [4]
    assert tensor.properties["stride"] == [1]
    assert tensor.properties["dtype"] == "float32"
    assert any(g.group == "identity" and g.source == "L['factor']" for g in guards.guards)
    assert any(g.group == "global" and g.kind == "GLOBAL_STATE" for g in guards.guards)
    assert guards.check_us > 0


def test_dynamic_size_is_a_range():
    report = tileops.explain(golden.whole, torch.randn(6, 4), backend="eager", dynamic=True)
    shapes = [g for g in report.compilations[0].guards.guards if g.group == "shape"]
    assert any("size()[0]" in guard.code for guard in shapes)
    assert any(isinstance(size, str) for size in report.graphs[0].nodes[-2].shape)


def test_a_range_of_sizes():
    x, y = torch.randn(6, 4), torch.randn(3, 8)
    report = tileops.explain(golden.bounded, x, y, backend="eager", dynamic=True)
    guards = report.compilations[0].guards.guards
    ranges = {g.source: g.properties for g in guards if g.group == "shape" and g.properties}
    assert ranges["L['x'].size()[0]"] == {"dimension": 0, "min": 2, "max": 64}
    assert ranges["L['y'].size()[0]"] == {"dimension": 0, "min": 2}
    (multiple,) = [g for g in guards if "% 4" in g.code]
    assert (multiple.group, multiple.properties) == ("shape", {})
    assert multiple.at.number == line_of(golden.bounded, "% 4")
    (tensor,) = [g for g in guards if g.kind == "TENSOR_MATCH" and g.source == "L['x']"]
    assert (tensor.properties["size"], tensor.properties["device"]) == ([None, None], "cpu")


def test_ranges_layouts_and_aliases_that_recompile():
    """Each with both values, and what can be done about it."""
    wide = torch.randn(8, 8)
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    calls = {
        "range": [
            (torch._dynamo.maybe_mark_dynamic(x, 0) or x, 2) for x in (wide, torch.ones(1, 8))
        ],
        "stride": [(one, 2), (one.t(), 2)],
        "alias": [(one, one), (one, other)],
        "duplicate": [(one, other), (one, one)],
    }
    seen = {}
    for name, given in calls.items():
        torch._dynamo.reset()
        dynamic = None if name == "range" else False
        compiled = torch.compile(golden.scaled, backend="eager", dynamic=dynamic)
        with tileops.explaining() as report:
            for args in given:
                compiled(*args)
        seen[name] = report.recompiles[-1].recompile.failures[0]
    told = {name: (f.source, f.property, f.expected, f.actual) for name, f in seen.items()}
    assert told == {
        "range": ("x.size()[0]", "range", "2 <= x.size()[0]", "1"),
        "stride": ("x", "stride[0]", "4", "1"),
        "alias": ("x", "identity", "the same object as factor", "another"),
        "duplicate": ("x and factor", "identity", "tensors of their own", "one tensor"),
    }
    assert "contiguous()" in seen["stride"].advice
    assert "x and factor" in seen["alias"].advice
    assert "mark_dynamic" not in seen["range"].advice


def test_limit_of_recompilations():
    """Of three versions at most the fourth call finds no room, and runs uncompiled."""
    with torch._dynamo.config.patch(recompile_limit=3), tileops.explaining() as report:
        compiled = torch.compile(golden.scaled, backend="eager", dynamic=False)
        for size in (2, 3, 4, 5, 6):
            compiled(torch.ones(size), 2)
    versions = [one.recompile for one in report.recompiles]
    assert [(each.count, each.limit, each.gave_up) for each in versions] == [
        (2, 3, False), (3, 3, False), (3, 3, True),
    ]  # fmt: skip
    refused = report.compilations[-1]
    assert refused.function == "scaled"
    assert refused.at.number == golden.scaled.__code__.co_firstlineno
    assert "recompile" in refused.error
    newest = versions[-1].failures[0]
    assert (newest.property, newest.expected, newest.actual) == ("size[0]", "4", "5")


class Bypassed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.off = False

    def forward(self, x):
        return x if self.off else x + 1


def test_a_version_without_work_is_shown(capsys):
    """Dynamo looks at the function again, and finds nothing to capture."""
    model = Bypassed()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2)
    with tileops.explaining() as report:
        compiled(x)
        model.off = True
        assert compiled(x) is x
    first, again = report.compilations
    assert (first.capture is None, again.capture is None) == (False, True)
    (failure,) = again.recompile.failures
    assert (failure.expected, failure.actual) == ("False", "True")
    report.show("guards", width=200)
    assert "captured nothing: no work on tensors" in capsys.readouterr().out
