"""Threads and processes, and what an op is: its identity, copies, key, record and bounds."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import random
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cases import distinct_classes, float32_calls, op_classes
from tests.contract.fresh import ROOT, clean_environment
from tests.oracle import call, check, exact, poisoned, same_bits
from tileops import BackendError, CheckError, recording, use_target
from tileops.attention import PagedKVCacheWriteFwdOp
from tileops.authoring import TensorSpec
from tileops.backend.tolerances import compare
from tileops.elementwise import AddFwdOp, AlibiFwdOp, GELUFwdOp, MulFwdOp, SiLUFwdOp
from tileops.engine.boundary.instances import _states, resolve
from tileops.engine.settings import settings
from tileops.engine.targets import context_target
from tileops.gemm import GEMMFwdOp
from tileops.moe import ContiguousLayoutSpec, MaskedLayoutSpec, MoEGroupedGEMMFwdOp
from tileops.norm import BatchNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp

NAMES = sorted(distinct_classes())
CALLED = [name for name in NAMES if op_classes()[name].entry.inputs]


def together(count, work):
    """``work(n)`` in ``count`` threads that start at once; their results, or the first error."""
    barrier = threading.Barrier(count)

    def run(n):
        barrier.wait()
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ---- threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLED)
def test_many_threads_on_a_cold_op_build_once(name, seed):
    # A key of this test's own: a target given by name is part of it.
    op = float32_calls(name, seed)[0].op
    fresh = type(op)(**op._params, target="builtin")
    inputs = dict(float32_calls(name, seed)[0].inputs)
    outputs, written = exact(fresh, inputs)
    assert fresh.last_call is None

    def work(_):
        own = {n: None if t is None else t.clone() for n, t in inputs.items()}
        result = call(fresh, own)
        return result if isinstance(result, tuple) else (result,), own

    with recording() as events, poisoned():
        everything = together(16, work)
    built = [e.data["identity"] for e in events if e.kind == "built"]
    assert len(built) == len(set(built)), "one identity was built twice"
    assert len(fresh._state.plans) <= 2, "a plan for each alignment"
    for results, own in everything:
        for given_, wanted in zip(results, outputs, strict=False):
            assert wanted is None or compare(given_, wanted, fresh.entry.kind).ok
        for n, wanted in written.items():
            assert compare(own[n], wanted, fresh.entry.kind).ok


def test_many_shapes_and_ops_in_many_threads(seed):
    ops = {
        "rms": (RMSNormFwdOp(8), lambda x: torch.nn.functional.rms_norm(x, (8,), eps=2.0**-23)),
        "layer": (LayerNormFwdOp(8), lambda x: torch.nn.functional.layer_norm(x, (8,))),
        "softmax": (SoftmaxFwdOp(-1), lambda x: torch.softmax(x, -1)),
        "add": (AddFwdOp(alpha=2), None),
        "silu": (SiLUFwdOp(), torch.nn.functional.silu),
        "gelu": (GELUFwdOp(), torch.nn.functional.gelu),
    }

    def work(n):
        draw = random.Random(seed + n)
        for _ in range(60):
            op, reference = ops[draw.choice(list(ops))]
            x = torch.randn(draw.randrange(6), draw.randrange(1, 7), 8)
            x = x.transpose(0, 1) if draw.random() < 0.3 else x
            if reference is None:
                torch.testing.assert_close(op(x, x), 3 * x)
            else:
                torch.testing.assert_close(op(x), reference(x), atol=1e-5, rtol=1e-5)
        return n

    assert together(12, work) == list(range(12))


def test_threads_that_write_do_not_mix():
    op, caches = SiLUFwdOp(inplace=True), [torch.randn(33, 7) for _ in range(12)]
    wanted = [torch.nn.functional.silu(c) for c in caches]
    together(12, lambda n: op(caches[n]))
    for ours, theirs in zip(caches, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_making_and_dropping_equal_ops_in_threads():
    x = torch.randn(4, 6)
    wanted = RMSNormFwdOp(6, 0.25)(x)

    def work(n):
        for turn in range(50):
            op = RMSNormFwdOp(6, 0.25 if turn % 2 else 0.25 + n)
            result = op(x)
            if turn % 2:
                assert torch.equal(result, wanted)
        return True

    assert all(together(8, work))


def test_a_context_is_a_thread_of_its_own():
    inside, x = threading.Barrier(8), torch.randn(3)

    def work(n):
        op = AddFwdOp(alpha=7 + n)  # a key of its own: equal ops share their last call
        inside.wait()
        if n % 2:
            with use_target("builtin"):
                inside.wait()
                op(x, x)
        else:
            inside.wait()
            op(x, x)
        return op.last_call.decided_by

    assert together(8, work) == ["builtin", "use_target"] * 4
    assert context_target() is None


def test_compiled_graphs_in_threads():
    op = RMSNormFwdOp(8, 0.125)
    graph = make_fx(op, tracing_mode="symbolic")(torch.randn(3, 8), torch.randn(8))

    def work(n):
        for rows in range(1, 20):
            x, weight = torch.randn(rows, 8), torch.randn(8)
            assert torch.equal(graph(x, weight), op(x, weight))
        return n

    together(8, work)


# ---- processes, and the compiled CPU kernel ----------------------------------------------------

_CHILD = """
import sys, torch
from tests.cases import op_classes, workload_call
from tests.oracle import check
for one in sys.argv[1].split(","):
    name, place = one.split(":")
    workload = op_classes()[name].entry.workloads[int(place)]
    made = workload_call(name, workload, 0, 512)
    check(made.op, dict(made.inputs))
    assert made.op.last_call.kernel == sys.argv[2], made.op.last_call
    for seed in (1, 2, 3):  # the last two are served as a repeated call is
        check(made.op, dict(workload_call(name, workload, seed, 512).inputs))
    print(one)
"""


def children(tmp_path, kernel, calls, processes=1):
    """``calls``: ``(class, place of its workload)``."""
    env = clean_environment(str(tmp_path), TILEOPS_CPU_KERNEL=kernel)
    served = {"plain": "decomposition", "inductor": "inductor"}[kernel]
    asked = [f"{name}:{place}" for name, place in calls]
    command = [sys.executable, "-c", _CHILD, ",".join(asked), served]
    running = [
        subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    for process in running:
        out, error = process.communicate()
        assert process.returncode == 0, f"{out[-300:]}{error[-3000:]}"
        assert out.split() == asked


def test_two_processes_compile_one_cpu_kernel(tmp_path):
    children(tmp_path, "inductor", [("RMSNormFwdOp", 0)], processes=2)


def test_the_plain_cpu_kernel(tmp_path):
    names = ["RMSNormFwdOp", "SiLUFwdOp", "SoftmaxFwdOp", "BatchNormFwdOp", "GEMMFwdOp"]
    children(tmp_path, "plain", [(name, 0) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_the_compiled_cpu_kernel(tmp_path, seed, half):
    """What is compiled without being asked to, in two workloads that differ in more than sizes; and of the
    rest, which goes the same way where the setting says so, some."""
    classes = {n: op_classes()[n] for n in CALLED if op_classes()[n].entry.kind != "template"}
    slots = {n: c.kernel for n, c in classes.items()
             if c.kernel is None or not c.kernel.cpu or c.kernel.compiled_from}  # fmt: skip
    default = {n for n, slot in slots.items() if slot and slot.compiled_from is not None}
    assert len(default) >= 8
    calls = []
    for name in sorted(default)[half::2]:
        told: dict[str, int] = {}
        for place, one in enumerate(classes[name].entry.workloads):
            told.setdefault(str((one.params, one.dtypes, one.passed)), place)
        calls += [(name, place) for place in list(told.values())[:2]]
    draw = random.Random(seed)
    for name in draw.sample(sorted(slots.keys() - default), 4):
        calls.append((name, draw.randrange(len(classes[name].entry.workloads))))
    children(tmp_path, "inductor", calls)


# ---- copies, equality, keys --------------------------------------------------------------------


def all_ops():
    for name, cls in op_classes().items():
        for workload in cls.entry.workloads:
            yield cls(**workload.params), name


def test_equal_parameters_make_equal_ops():
    for op, _ in all_ops():
        twin = type(op)(**op._params)
        assert op == twin
        assert hash(op) == hash(twin)
        assert op._state is twin._state
        assert len({op, twin}) == 1
        assert op != type(op)(**op._params, target="builtin")
        assert op != object()
        assert op != repr(op)
    assert (
        RMSNormFwdOp(4)
        == RMSNormFwdOp([4])
        == RMSNormFwdOp((4,))
        == RMSNormFwdOp(normalized_shape=4)
    )
    assert RMSNormFwdOp(4, 1) == RMSNormFwdOp(4, 1.0)
    assert RMSNormFwdOp(4) != LayerNormFwdOp(4)
    assert AddFwdOp() != MulFwdOp()
    assert SoftmaxFwdOp(0, dtype="float16") == SoftmaxFwdOp(0, dtype=torch.float16)


def test_a_key_makes_its_op_again():
    for op, name in all_ops():
        for one in (op, type(op)(**op._params, target="builtin")):
            assert repr(one).startswith(f"{name}(")
            key = one._instance_key
            assert repr(one) in key
            again = resolve(type(one), key).op
            assert again == one
            assert again._params == one._params
            assert again.target == one.target
            assert (repr(again), again._instance_key) == (repr(one), key)
            evaluated = eval(repr(one), {name: type(one), **_literals()})
            assert evaluated == one, "an op reads as the call that makes it"


def _literals():
    import tileops.moe as moe

    dtypes = {
        n: getattr(torch, n)
        for n in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8")
    }
    layouts = {n: getattr(moe, n) for n in dir(moe) if n.endswith("Spec")}
    return {**dtypes, **layouts, "inf": math.inf, "nan": math.nan}


@given(st.one_of(st.integers(), st.floats(allow_nan=True, allow_infinity=True)))
def test_any_number_survives_a_key(alpha):
    op = AddFwdOp(alpha=alpha)
    key = op._instance_key
    del op
    gc.collect(0)
    again = resolve(AddFwdOp, key).op.alpha
    assert type(again) is type(alpha)
    assert again == alpha or (again != again and alpha != alpha)
    assert str(again) == str(alpha) or again != again


@pytest.mark.parametrize("name", NAMES)
def test_copies(name, seed):
    made = float32_calls(name, seed)[0]
    op, inputs = made.op, dict(made.inputs)
    fresh = type(op)(**op._params)
    before = pickle.dumps(fresh)
    wanted = call(fresh, {n: None if t is None else t.clone() for n, t in inputs.items()})
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    copies_ = [
        copy.copy(fresh),
        copy.deepcopy(fresh),
        pickle.loads(before),
        pickle.loads(pickle.dumps(fresh)),
    ]
    buffer = io.BytesIO()
    torch.save(fresh, buffer)
    buffer.seek(0)
    copies_.append(torch.load(buffer, weights_only=False))
    aimed = type(op)(**op._params, target="builtin")
    assert pickle.loads(pickle.dumps(aimed)) == aimed
    for one in copies_:
        assert one == fresh
        assert hash(one) == hash(fresh)
        assert one._params == fresh._params
        again = call(one, {n: None if t is None else t.clone() for n, t in inputs.items()})
        again = again if isinstance(again, tuple) else (again,)
        assert all(a is b or same_bits(a, b) for a, b in zip(again, wanted, strict=True))


def test_a_module_that_holds_ops_is_copied():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = RMSNormFwdOp(4), torch.nn.Parameter(torch.randn(4))

        def forward(self, x):
            return self.norm(x, self.weight.detach())

    block, x = Block(), torch.randn(2, 4)
    twin = copy.deepcopy(block)
    assert twin.norm == block.norm
    with torch.no_grad():
        twin.weight.add_(1)
    assert not torch.equal(block(x), twin(x))
    assert list(block.state_dict()) == ["weight"]


def test_an_op_that_was_collected_still_runs_in_its_graph():
    op = RMSNormFwdOp(4, eps=0.015625)  # no other test has this key
    x, weight = torch.randn(3, 4), torch.randn(4)
    wanted = op(x, weight)
    key = op._instance_key
    graph = make_fx(op)(x, weight)
    seen = weakref.ref(op)
    del op
    gc.collect()
    assert seen() is None
    assert key not in _states[RMSNormFwdOp]
    assert torch.equal(graph(x, weight), wanted)
    assert torch.equal(graph(x, weight), wanted)


def test_a_compiled_graph_outlives_its_op():
    op = RMSNormFwdOp(4, eps=0.03125)
    x = torch.randn(3, 4)
    wanted, caught = op(x), []

    def backend(graph, _):
        caught.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda x: op(x), backend=backend, fullgraph=True)(x)
    del op
    torch._dynamo.reset()
    gc.collect()
    assert torch.equal(caught[0](x)[0], wanted)


# ---- what served a call --------------------------------------------------------------------------


def test_last_call():
    op = AddFwdOp(alpha=0.375)
    assert op.last_call is None
    assert op.serving_target is None
    op(torch.ones(2, 3), torch.ones(3))
    last = op.last_call
    assert (last.target, last.decided_by, last.kernel) == ("builtin", "builtin", "decomposition")
    assert op.serving_target == "builtin"
    assert last.call.op == "AddFwdOp"
    assert last.call.key == repr(op)
    assert last.call.params.alpha == 0.375
    assert last.call.inputs["input"].shape == (2, 3)
    assert last.call.outputs["output"].shape == (2, 3)
    assert last.call.device.type == "cpu"
    assert any(name == "inductor" and reason for name, reason in last.refused)
    assert "AddFwdOp(input=float32[2, 3], other=float32[3]) on cpu" in str(last)
    assert AddFwdOp(alpha=0.375).last_call is last, "equal ops share what they know"
    with use_target("builtin"):
        op(torch.ones(2), torch.ones(2))
    assert op.last_call.decided_by == "use_target"
    op._call_boundary(torch.ones(5), torch.ones(5))
    assert op.last_call.call.inputs["input"].shape == (5,)
    aimed = AddFwdOp(alpha=0.375, target="builtin")
    aimed(torch.ones(2), torch.ones(2))
    assert aimed.last_call.decided_by == "op"
    op(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    assert op.last_call.target == "meta"


def test_a_failed_call_leaves_the_last_one():
    op = AddFwdOp(alpha=0.4375)
    op(torch.ones(2), torch.ones(2))
    last, plans = op.last_call, len(op._state.plans)
    with pytest.raises(CheckError):
        op(torch.ones(2), torch.ones(3))
    assert op.last_call is last
    assert len(op._state.plans) == plans


@pytest.mark.parametrize("name", CALLED)
def test_tuning_keeps_calls_right(name, seed):
    for made in float32_calls(name, seed):
        op = type(made.op)(**made.op._params, target="builtin")
        op.request_tune()
        check(op, dict(made.inputs))
        check(op, dict(made.inputs))
        last = op.last_call
        if last is not None and name == "PagedKVCacheWriteFwdOp":
            assert any("tuned:" in reason for _, reason in last.refused)


def test_tuning_writes_once():
    op, x = SiLUFwdOp(inplace=True, target="builtin"), torch.randn(5)
    wanted = torch.nn.functional.silu(x)
    op.request_tune()
    op(x)
    torch.testing.assert_close(x, wanted)
    stats = torch.zeros(3), torch.ones(3)
    batch, rows = BatchNormFwdOp(training=True, momentum=1.0, target="builtin"), torch.randn(9, 3)
    batch.request_tune()
    batch(rows, *stats)
    torch.testing.assert_close(stats[0], rows.mean(0))


# ---- roofline ------------------------------------------------------------------------------------


def test_roofline():
    a, b = torch.randn(3, 5, dtype=torch.float16), torch.randn(4, 5, dtype=torch.float16)
    op = GEMMFwdOp(target="builtin")
    for method in (
        op.eval_roofline,
        op.eval_roofline_read_bytes,
        op.roofline_data_terms,
        op.roof_key,
    ):
        with pytest.raises(CheckError, match="no call yet"):
            method()
    wanted = (2 * 3 * 4 * 5, 2 * (15 + 20 + 12))
    assert op.eval_roofline(a, b) == wanted
    assert op.last_call is None, "asking is no call"
    specs = [TensorSpec.of(t) for t in (a, b)]
    assert op.eval_roofline(*specs) == wanted
    op(a, b)
    assert op.eval_roofline() == wanted
    assert op.eval_roofline_read_bytes() == 2 * (15 + 20)
    terms = op.roofline_data_terms()
    assert (terms.flops, terms.read_bytes, terms.write_bytes) == (120, 70, 24)
    assert op.roof_key() == ("template", "float16")
    assert op.kernel_config() == op.last_call.build == op.kernel_config(a, b)
    assert [k.name for k in op.iter_kernels("cpu")] == ["onednn_product", "decomposition"]


def test_roofline_of_a_cache_write_counts_rows_not_caches():
    cache = torch.zeros(100, 16, 2, 8)
    rows = torch.randn(3, 2, 8)
    op = PagedKVCacheWriteFwdOp()
    args = (rows, rows, cache, cache.clone(), torch.arange(3))
    terms = op.roofline_data_terms(*args)
    assert terms.read_bytes == 2 * rows.nbytes + 24
    assert terms.write_bytes == 2 * rows.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_roofline_of_every_class(name, seed):
    made = float32_calls(name, seed)[0]
    tensors = list(made.inputs.values())
    flops, moved = made.op.eval_roofline(*tensors)
    assert flops >= 0
    assert moved > 0
    assert made.op.eval_roofline_read_bytes(*tensors) <= moved
    kind, dtype = made.op.roof_key(*tensors)
    assert kind == made.op.entry.kind
    assert dtype


# ---- bounds --------------------------------------------------------------------------------------


@pytest.fixture
def four_plans(monkeypatch):
    monkeypatch.setenv("TILEOPS_PLAN_LIMIT", "4")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def test_plans_are_bounded(four_plans):
    op = AddFwdOp(alpha=0.6875)
    for size in [*range(1, 30), *range(1, 30)]:
        x = torch.randn(size)
        torch.testing.assert_close(op(x, x), 1.6875 * x)
        assert len(op._state.plans) <= 4

    def work(n):
        for size in range(1, 40):
            x = torch.randn(size + n)
            torch.testing.assert_close(op(x, x), 1.6875 * x)
        return n

    together(8, work)
    assert len(op._state.plans) <= 4


def test_plans_of_a_generator_are_bounded(four_plans):
    op = AlibiFwdOp(seq_len=2, num_heads=2)
    for _ in range(10):
        op()
    assert len(op._state.plans) <= 4


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_bad_plan_limit_is_named(monkeypatch, value):
    monkeypatch.setenv("TILEOPS_PLAN_LIMIT", value)
    settings.cache_clear()
    with pytest.raises(ValueError, match="TILEOPS_PLAN_LIMIT"):
        settings()
    monkeypatch.undo()
    settings.cache_clear()


def test_a_failing_build_leaves_no_trace(monkeypatch):
    op, x = GELUFwdOp(approximate="tanh", target="builtin"), torch.randn(3)
    kernel = list(op.iter_kernels("cpu"))[-1]
    real, calls = kernel.entry_for, []

    def failing(call_):
        calls.append(call_)
        raise BackendError("not now")

    monkeypatch.setattr(kernel, "entry_for", failing)
    for _ in range(2):
        with pytest.raises(BackendError, match="not now"):
            op(x)
    assert len(calls) == 2, "the second call decided afresh"
    monkeypatch.setattr(kernel, "entry_for", real)
    torch.testing.assert_close(op(x), torch.nn.functional.gelu(x, approximate="tanh"))


def test_layouts_are_parts_of_a_key():
    tight, masked = ContiguousLayoutSpec.tight_per_row(), MaskedLayoutSpec(3)
    keys = {repr(MoEGroupedGEMMFwdOp(layout)) for layout in (tight, masked, MaskedLayoutSpec(4))}
    assert len(keys) == 3
    assert MoEGroupedGEMMFwdOp(MaskedLayoutSpec(3)) == MoEGroupedGEMMFwdOp(masked)
    with poisoned():
        assert repr(masked) in repr(MoEGroupedGEMMFwdOp(masked))
