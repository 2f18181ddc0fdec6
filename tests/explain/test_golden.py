"""What a report says of functions whose answers are known beforehand."""

from __future__ import annotations

import inspect

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import tileops
from tests.explain import golden


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def line_of(function, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)


# ---- capture and breaks --------------------------------------------------------------------------


def test_no_break():
    report = tileops.explain(golden.whole, torch.randn(4, 4), backend="eager")
    assert report.breaks == []
    assert [graph.stage for graph in report.graphs] == ["capture"]
    calls = [node for node in report.graphs[0].nodes if node.opcode.startswith("call")]
    assert [node.target for node in calls] == ["operator.mul", "operator.add", "torch.relu"]
    assert [node.inputs for node in calls] == [["l_x_"], ["mul"], ["add"]]
    place = (golden.__file__, line_of(golden.whole, "torch.relu"))
    assert {(node.line.file, node.line.number) for node in calls} == {place}
    assert {(node.dtype, tuple(node.shape), node.bytes) for node in calls} == {("f32", (4, 4), 64)}


def test_one_break():
    report = tileops.explain(golden.prints, torch.randn(4, 4), backend="eager")
    assert [each.kind for each in report.breaks] == ["print"]
    only = report.breaks[0]
    assert only.at.number == line_of(golden.prints, "print(")
    assert [(node.name, node.bytes) for node in only.crossing] == [("y", 64)]
    assert only.extra_launches == 1
    assert "print" in only.advice
    assert [one.resumes for one in report.compilations] == [False, True]


@pytest.mark.parametrize(
    ("function", "graphs", "added"),
    [(golden.prints, 2, [1]), (golden.breaks_below, 2, [1, 0]), (golden.breaks_at_once, 1, [0])],
)
def test_graphs_that_a_break_adds(function, graphs, added):
    report = tileops.explain(function, torch.randn(4, 4), backend="eager")
    assert len(report.graphs) == graphs
    assert [each.extra_launches for each in report.breaks] == added


def test_three_breaks():
    report = tileops.explain(golden.three_breaks, torch.randn(4, 4), backend="eager")
    expected = [("print", "print("), ("item", "scale ="), ("skipped", "hidden(y)")]
    assert [(each.kind, each.at.number) for each in report.breaks] == [
        (kind, line_of(golden.three_breaks, text)) for kind, text in expected
    ]
    assert len(report.graphs) == 4


def test_a_builtin_that_nobody_disabled():
    report = tileops.explain(golden.waits, torch.randn(4), backend="eager")
    assert [each.kind for each in report.breaks] == ["builtin"]
    assert "disable" not in report.breaks[0].advice


@pytest.mark.parametrize("sign", [1, -1])
def test_branch_on_data(sign):
    report = tileops.explain(golden.branches, sign * torch.ones(4, 4), backend="eager")
    assert [each.kind for each in report.breaks] == ["branch"]
    assert report.breaks[0].at.number == line_of(golden.branches, "if y")
    assert len(report.graphs) == 2
    last = [node.target for node in report.graphs[1].nodes if node.opcode.startswith("call")]
    assert last == ["operator.add" if sign > 0 else "operator.sub"]


def test_loop_unrolled():
    report = tileops.explain(golden.unrolls, torch.randn(4), backend="eager")
    only = report.compilations[0]
    assert [(loop.at.number, loop.times) for loop in only.loops] == [
        (line_of(golden.unrolls, "for _"), 3)
    ]
    assert [(each.function, each.times) for each in only.inlined] == [("helper", 3)]
    assert [n.target for n in only.capture.nodes].count("operator.mul") == 3


def test_loops_by_how_often_they_run():
    report = tileops.explain(golden.loops, torch.randn(4), backend="eager")
    counted = {loop.at.text: loop.times for loop in report.compilations[0].loops}
    assert counted == {
        "for i in range(6):": 6,
        "for _ in range(2):": 2,
        "for j in range(4):": 8,
        "for i in range(3):": 3,
        "while n < 2:": 2,
    }


def test_loops_on_one_line():
    report = tileops.explain(golden.loops_on_one_line, torch.randn(4), backend="eager")
    only = report.compilations[0]
    assert [(loop.at.text.split("  #")[0], loop.times) for loop in only.loops] == [
        ("for i in range(5): x = x * i", 5),
        ("for i in range(3)", 3),
        ("for part in parts[:2]", 2),
        ("for (i, a) in enumerate(parts)", 3),
        ("for (j, b) in enumerate(parts[1:])", 6),
        ("for i in [2 * k for k in range(4)]: x = x + i", 4),
        ("for k in range(4)", 4),
        ("for i in range(9):", 7),
        ("while n < 2: x, n = x + 1, n + 1", None),
    ]
    numbers = [loop.at.number for loop in only.loops]
    assert numbers[0] == line_of(golden.loops_on_one_line, "range(5)")
    assert numbers == sorted(numbers)
    assert "<listcomp>" not in [each.function for each in only.inlined]


def test_loop_is_counted_once_though_traced_twice():
    report = tileops.explain(golden.unrolls_and_prints, torch.randn(4), backend="eager")
    assert [loop.times for loop in report.compilations[0].loops] == [3]
    assert [each.times for each in report.compilations[0].inlined] == [3]
    assert [each.kind for each in report.breaks] == ["print"]


# ---- normalisation -------------------------------------------------------------------------------

AOT = "aot_eager_decomp_partition"


def test_write_to_an_input_leaves_a_copy():
    x = torch.zeros(4)
    report = tileops.explain(golden.writes_input, x, backend=AOT)
    assert x.tolist() == [1.0] * 4
    made = report.compilations[0].normalisation
    assert len(made.copies) == 1
    (rewrite,) = made.rewrites
    assert rewrite.copy
    assert rewrite.before == "l_x_.add_(1)"
    assert any("aten.add.Tensor" in form for form in rewrite.after)
    assert rewrite.at.number == line_of(golden.writes_input, "add_")


def test_write_to_a_temporary_leaves_none():
    report = tileops.explain(golden.writes_temporary, torch.zeros(4), backend=AOT)
    made = report.compilations[0].normalisation
    assert made.copies == []
    assert [rewrite.copy for rewrite in made.rewrites] == [False]


def test_writes_to_parts_are_functional():
    report = tileops.explain(golden.writes_parts, torch.ones(4), backend=AOT)
    made = report.compilations[0].normalisation
    assert [rewrite.before for rewrite in made.rewrites] == ["y[0] = 5", "y += l_x_"]
    forms = [" ".join(rewrite.after) for rewrite in made.rewrites]
    assert "aten.select_scatter" in forms[0]
    assert "aten.add.Tensor" in forms[1]
    assert made.copies == []
    targets = [node.target for node in report.graphs[0].nodes if node.opcode.startswith("call")]
    assert targets == ["operator.mul", "operator.setitem", "operator.iadd"]


def test_writes_as_they_are_written():
    x = torch.arange(-3.0, 3.0)
    report = tileops.explain(golden.writes_slices, x, backend="aot_eager")
    assert x.tolist() == [0, 0, 0, 0, 1, 2]
    made = report.compilations[0].normalisation
    assert [(rewrite.before, rewrite.copy) for rewrite in made.rewrites] == [
        ("y[1:] = 5", False),
        ("y[::2, None] = 6", False),
        ("torch.nn.functional.relu(l_x_, inplace=True)", True),
        ("y += l_x_", False),
    ]
    assert len(made.copies) == 1
    assert {each.at.text.split(" ")[0] for each in made.decompositions} == {"y[1:]", "y[::2,"}


def test_writes_by_an_op_of_this_library():
    x = torch.tensor([-1.0, 2.0])
    report = tileops.explain(golden.written_by_an_op, x)
    assert x.tolist() == [0, 2]
    made = report.compilations[0].normalisation
    operator = "tileops.elementwise_relu_fwd_writes_input"
    assert [(each.before, each.copy) for each in made.rewrites] == [
        (f"{operator}(y)", False),
        (f"{operator}(l_x_)", True),
    ]
    texts = ["relu(y)", "relu(x)"]
    assert [each.at.text for each in made.rewrites] == texts
    assert all(f"torch.ops.{operator}.default" in each.after[0] for each in made.rewrites)
    assert len(made.copies) == 1
    assert made.decompositions == []
    written = [k for k in report.compilations[0].inductor[0].kernels if operator in k.name]
    assert [kernel.bytes for kernel in written] == [2 * 8, 2 * 8]  # read and written


def test_another_name_is_no_decomposition():
    report = tileops.explain(golden.names_operators, torch.randn(4), backend="aot_eager")
    assert report.compilations[0].normalisation.decompositions == []


def test_linear_decomposes():
    inputs = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    report = tileops.explain(golden.decomposes, *inputs, backend=AOT)
    (change,) = report.compilations[0].normalisation.decompositions
    assert change.before == ["torch._C._nn.linear"]
    assert change.after == ["aten.permute", "aten.addmm"]


def test_recomputed():
    x = torch.randn(8, 8, requires_grad=True)
    report = tileops.explain(golden.recomputes, x, training=True, backend=AOT)
    assert x.grad is None
    part = report.compilations[0].normalisation.partition
    assert [kept.name for kept in part.saved] == ["primals_1"]
    assert "aten.sin" in [kept.target for kept in part.recomputed]
    assert part.saved_bytes == 256
    assert part.save_all_bytes > part.saved_bytes


def test_saved():
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4)
    report = tileops.explain(golden.saves, x, w, training=True, backend=AOT)
    part = report.compilations[0].normalisation.partition
    saved = {kept.target: kept.bytes for kept in part.saved}
    assert saved["aten.exp"] == 8 * 4 * 4
    assert "aten.mm" not in [kept.target for kept in part.recomputed]


def test_lines_and_inputs_of_what_a_checkpoint_computes_again(capsys):
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    report = tileops.explain(golden.checkpointed, x, w, training=True, backend=AOT)
    (one,) = report.compilations
    part = one.normalisation.partition
    again = {each.target: each.at and each.at.number for each in part.recomputed}
    number = line_of(golden.checkpointed, "checkpoint(")
    assert again["aten.mm"] == again["aten.relu"] == number
    for graph in one.normalisation.graphs:
        lines = {n.target: n.line and n.line.number for n in graph.nodes}
        assert lines.get("torch.ops.aten.cos.default", number) == number
        assert lines.get("torch.ops.aten.mm.default", number) == number
    report.show("aten", width=200)
    shown = capsys.readouterr().out
    assert "primals_1 = primals_1, 64 B  an input" in shown
    assert "aten.mm, 64 B  golden.py" in shown


def test_lines_that_torch_does_not_keep(capsys):
    """A module of torch's own has no line of the user's, and what it computes is no input."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    x = torch.randn(2, 4, requires_grad=True)
    report = tileops.explain(layers, x, training=True, backend=AOT)
    assert "the user's lines of some nodes" in [each.what for each in report.unknown]
    report.show("aten", width=200)
    shown = capsys.readouterr().out
    saved = [line for line in shown.splitlines() if line.strip().startswith("save ")]
    assert [line.endswith("an input") for line in saved] == ["primals" in line for line in saved]
    report = tileops.explain(lambda x: layers(x), x, backend=AOT)
    assert "the user's lines of some nodes" not in [each.what for each in report.unknown]


def test_bytes_of_what_is_kept():
    """Against what autograd's node really holds, and the sizes that the partitioned graphs give."""
    made = {}

    def seen(graph, inputs):
        made.update(
            (node.name, node.meta["val"]) for node in graph.graph.nodes if "val" in node.meta
        )
        return make_boxed_func(graph.forward)

    def nbytes(value):
        return value.numel() * value.element_size()

    partitioned = aot_autograd(
        fw_compiler=seen, bw_compiler=seen, partition_fn=min_cut_rematerialization_partition
    )
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    report = tileops.explain(golden.keeps_several, x, w, backend=partitioned)
    part = report.compilations[0].normalisation.partition
    held = report.result.grad_fn.saved_tensors
    assert sorted(each.bytes for each in part.saved) == sorted(map(nbytes, held))
    assert part.saved_bytes == sum(map(nbytes, held))
    assert len(part.recomputed) > 2
    for each in part.recomputed:
        assert each.bytes == nbytes(made[each.name]), each
    assert part.save_all_bytes > part.saved_bytes


def test_training_with_what_backward_may_overwrite():
    """Torch refuses a backward that would keep such a graph; it has one where sizes vary."""
    x = torch.randn(6, 8, requires_grad=True)
    report = tileops.explain(golden.masks, x, training=True, dynamic=True, backend=AOT)
    made = report.compilations[0].normalisation
    assert [graph.stage for graph in made.graphs] == ["joint", "forward", "backward"]
    assert "aten.le.Scalar" in [kept.target for kept in made.partition.saved]
    assert made.partition.saved_bytes is None  # a size is a name


# ---- CUDA graphs ---------------------------------------------------------------------------------


def test_cuda_graphs_skipped_on_the_cpu():
    report = tileops.explain(golden.whole, torch.randn(4), backend="cudagraphs")
    told = report.compilations[0].cuda_graphs
    assert told.used is False
    assert "cpu device" in told.reason


# ---- Inductor ------------------------------------------------------------------------------------


def test_neighbours_fused():
    report = tileops.explain(golden.fuses, torch.randn(64, 64))
    (lowered,) = report.compilations[0].inductor
    (kernel,) = lowered.kernels
    assert kernel.kind == "pointwise"
    assert len(kernel.groups) == 1
    assert set(kernel.nodes) >= {"mul", "add", "relu", "mul_1"}
    assert [line.number for line in kernel.lines] == [line_of(golden.fuses, "torch.relu")]
    assert kernel.schedule["loops"][0]["end"] == 64 * 64
    assert lowered.unfused == []
    assert report.unfused == []


def test_neighbours_apart():
    report = tileops.explain(golden.interrupted, torch.randn(8, 8), torch.randn(8, 8))
    (lowered,) = report.compilations[0].inductor
    assert [kernel.kind for kernel in lowered.kernels] == ["pointwise", "extern", "pointwise"]
    pairs = [(each.first_nodes, each.second_nodes) for each in lowered.unfused]
    assert (["relu", "mul"], ["mm"]) in pairs
    assert (["mm"], ["relu_1"]) in pairs
    assert all(each.reason for each in lowered.unfused)
    assert {each.relation for each in lowered.unfused} == {"opaque"}
    assert report.unfused == []  # nobody could mend it


def test_parts_of_one_tensor_need_no_kernel_of_their_own():
    """The joining of halves that one kernel writes; what reads the whole is the library's product."""
    report = tileops.explain(golden.joins, torch.randn(8, 8), torch.randn(8, 8))
    (lowered,) = report.compilations[0].inductor
    made, product = lowered.kernels
    assert [group.nodes for group in made.groups if not group.nodes] == []
    assert (made.kind, product.kind) == ("pointwise", "extern")
    assert len(product.groups) == 1
    assert {each.relation for each in lowered.unfused} == {"opaque"}


def test_kernels_that_only_change_inputs():
    report = tileops.explain(golden.changes_inputs, torch.randn(8, 8), torch.randn(8, 8))
    kernels = report.compilations[0].inductor[0].kernels
    assert all(each.groups and each.nodes for each in kernels)
    multiplied, sort = (line_of(golden.changes_inputs, text) for text in ("x.mul_", "y.copy_"))
    lines = {each.name: {line.number for line in each.lines} for each in kernels}
    assert set().union(*lines.values()) == {multiplied, sort}
    assert [lines[name] for name in lines if "sort" in name] == [{sort}]


def test_cold_and_warm_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(32, 16)
    outcomes = []
    for _ in range(2):
        torch._dynamo.reset()
        with tileops.explaining() as report:
            torch.compile(golden.fuses)(x)
        (one,) = report.compilations
        outcomes.append({lookup.level: lookup.outcome for lookup in one.caches})
        assert all(lookup.key for lookup in one.caches)
        assert [kernel.kind for kernel in one.inductor[0].kernels] == ["pointwise"]
    # Dynamo's cache is the function's own, and was reset.
    assert outcomes == [
        {"dynamo": "miss", "aot_autograd": "miss", "fx_graph": "miss", "code": "miss"},
        {"dynamo": "miss", "aot_autograd": "hit", "fx_graph": "hit", "code": "hit"},
    ]
    assert one.inductor[0].unfused is None  # nothing was scheduled, so nothing is known
    assert one.inductor[0].candidates is None
    assert "fusion groups, reasons and autotuning" in [each.what for each in report.unknown]
