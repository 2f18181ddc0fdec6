"""Placements and collectives of DTensor calls, for many numbers of ranks, without processes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.fresh import fresh
from tileops.attention import GQADenseFwdOp, PagedKVCacheWriteFwdOp
from tileops.elementwise import AddFwdOp, MulFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import CumprodFwdOp, CumsumFwdOp, LogSoftmaxFwdOp, SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


@contextlib.contextmanager
def ranks(*sizes: int):
    """A mesh of ranks of which this process plays the first; the others do nothing."""
    count = 1
    for size in sizes:
        count *= size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def lay(mesh: Any, shape: tuple[int, ...], *placements: Any, dtype: Any = torch.float32) -> DTensor:
    """A DTensor of whole shape ``shape``: only the local part is made."""
    local, whole = list(shape), torch.Size(shape)
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // mesh.size(index))
    made = torch.zeros(local, dtype=dtype)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=whole, stride=stride)


def counted(op: Any, *args: Any) -> tuple[Any, dict[str, int]]:
    """The result, and how many collectives of each kind the call made."""
    with CommDebugMode() as seen:
        result = op(*args)
    return result, {str(k).rpartition(".")[2]: n for k, n in seen.get_comm_counts().items()}


# ---- one dim of ranks ----------------------------------------------------------------------------------

ROWS = (12, 8)
CASES: list[tuple[str, Any, list[tuple[tuple[int, ...], Any]], list[Any]]] = [
    ("rms_norm rows", RMSNormFwdOp((8,)), [(ROWS, S0), ((8,), R)], [S0]),
    ("rms_norm same", RMSNormFwdOp((8,)), [(ROWS, R), ((8,), R)], [R]),
    ("layer_norm rows", LayerNormFwdOp((8,)), [((4, 12, 8), S1), ((8,), R), ((8,), R)], [S1]),
    ("add_rms_norm", FusedAddRMSNormFwdOp(), [(ROWS, S0), (ROWS, S0), ((8,), R)], [S0, S0]),
    ("softmax rows", SoftmaxFwdOp(-1), [(ROWS, S0)], [S0]),
    ("softmax columns", SoftmaxFwdOp(0), [((8, 12), S1)], [S1]),
    ("log softmax columns", LogSoftmaxFwdOp(0), [((8, 12), S1)], [S1]),
    ("cumsum columns", CumsumFwdOp(0), [((8, 12), S1)], [S1]),
    ("cumprod columns", CumprodFwdOp(0), [((8, 12), S1)], [S1]),
    ("add", AddFwdOp(), [(ROWS, S0), (ROWS, S0)], [S0]),
    ("add bias", AddFwdOp(), [((8, 12), S1), ((12,), S0)], [S1]),
    ("add column", AddFwdOp(), [((12, 8), S0), ((12, 1), S0)], [S0]),
    ("add row", AddFwdOp(), [((12, 8), S0), ((1, 8), R)], [S0]),
    ("add partial", AddFwdOp(), [(ROWS, P), (ROWS, P)], [P]),
    ("mul partial", MulFwdOp(), [(ROWS, P), (ROWS, R)], [P]),
    ("silu_and_mul", SiLUAndMulFwdOp(), [((12, 16), S0)], [S0]),
    ("rope tokens", RoPENeoxPositionIdsFwdOp(64), [((12, 4, 8), S0), ((12,), S0)], [S0]),
    ("rope heads", RoPENeoxPositionIdsFwdOp(64), [((4, 12, 8), S1), ((4,), R)], [S1]),
    ("gemm rows", GEMMFwdOp(), [((12, 8), S0), ((8, 8), R)], [S0]),
    ("gemm columns", GEMMFwdOp(), [((8, 8), R), ((12, 8), S0)], [S1]),
    ("gemm columns, b as stored", GEMMFwdOp(False, False), [((8, 8), R), ((8, 12), S1)], [S1]),
    ("gemm inner", GEMMFwdOp(), [((8, 12), S1), ((8, 12), S1)], [P]),
    ("gemm partial", GEMMFwdOp(), [((8, 8), P), ((8, 8), R)], [P]),
    ("attention batch", GQADenseFwdOp(), [((12, 3, 4, 8), S0)] + [((12, 3, 2, 8), S0)] * 2, [S0]),
    ("attention heads", GQADenseFwdOp(), [((2, 3, 24, 8), S2)] + [((2, 3, 12, 8), S2)] * 2, [S2]),
]  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 4])
def test_no_collective_where_none_is_needed(count):
    """The placements that a plan of tensor or sequence parallelism meets go through as they are."""
    with ranks(count) as mesh:
        for label, op, inputs, expected in CASES:
            args = [
                lay(
                    mesh,
                    shape,
                    at,
                    dtype=torch.int64 if len(shape) == 1 and "rope" in label else torch.float32,
                )
                for shape, at in inputs
            ]
            result, seen = counted(op, *args)
            results = result if isinstance(result, tuple) else (result,)
            assert [r.placements[0] for r in results] == expected, label
            assert not seen, (label, seen)


def test_what_is_reduced_over_is_gathered_once():
    with ranks(2) as mesh:
        for op, inputs in (
            (RMSNormFwdOp((8,)), [(ROWS, S1), ((8,), R)]),
            (SoftmaxFwdOp(-1), [(ROWS, S1)]),
            (SoftmaxFwdOp(), [(ROWS, S0)]),
            (SiLUAndMulFwdOp(), [(ROWS, S1)]),
            (SiLUFwdOp(), [(ROWS, P)]),
        ):
            result, seen = counted(op, *(lay(mesh, shape, at) for shape, at in inputs))
            assert not result.placements[0].is_partial()
            assert sum(seen.values()) == 1, (op, seen)


def test_no_partial_sum_is_made_of_a_whole():
    """Halves would be rounded, integers would not stay integers."""
    with ranks(3) as mesh:
        result, seen = counted(AddFwdOp(), lay(mesh, ROWS, R), lay(mesh, ROWS, P))
        assert result.placements == (R,)
        assert sum(seen.values()) == 1


def test_a_partial_sum_of_bools_is_none():
    with ranks(2) as mesh:
        args = [lay(mesh, ROWS, P, dtype=torch.int32) for _ in range(2)]
        assert AddFwdOp()(*args).placements == (P,)
        from tileops.engine.manifest.entry import Branch
        from tileops.engine.signature.sharding import ways

        flags = {n: torch.empty(ROWS, dtype=torch.bool, device="meta") for n in ("input", "other")}
        assert not any("sum" in way.outputs.values() for way in ways(AddFwdOp(), Branch(), flags))


def test_ops_of_one_class_do_not_share_decisions():
    """DTensor keeps decisions; the parameters and what is absent belong to them."""
    with ranks(2) as mesh:
        a, b = lay(mesh, (8, 8), S1), lay(mesh, (8, 8), S0)
        assert GEMMFwdOp(False, False)(a, b).placements == (P,)
        assert GEMMFwdOp(True, True)(a, b).placements != (P,)
        x = lay(mesh, ROWS, S0)
        whole, cut = lay(mesh, (8,), R), lay(mesh, (8,), S0)
        op = LayerNormFwdOp((8,))
        assert counted(op, x, whole, None)[1] == {}
        assert counted(op, x, None, whole)[1] == {}
        assert sum(counted(op, x, cut, None)[1].values()) == 1
        assert sum(counted(op, x, None, cut)[1].values()) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "free"), [(12, 6, True), (6, 3, False), (8, 2, True), (10, 5, False)]
)
def test_heads_stay_with_their_group(heads, kv_heads, free):
    """Two ranks get whole groups of heads, or none is cut."""
    with ranks(2) as mesh:
        q = lay(mesh, (1, 3, heads, 8), S2)
        k, v = (lay(mesh, (1, 3, kv_heads, 8), S2) for _ in range(2))
        result, seen = counted(GQADenseFwdOp(), q, k, v)
        assert (result.placements == (S2,), not seen) == (free, free)


def test_fewer_rows_than_ranks_and_rows_that_do_not_divide():
    with ranks(4) as mesh:
        for rows in (1, 3, 5, 7):
            result, seen = counted(RMSNormFwdOp((8,)), lay(mesh, (rows, 8), S0), lay(mesh, (8,), R))
            assert result.placements == (S0,), rows
            assert result.shape == (rows, 8)
            assert not seen, rows


# ---- what is written -----------------------------------------------------------------------------------


def test_what_is_written_stays_where_it_is():
    with ranks(2) as mesh:
        x = lay(mesh, ROWS, S0)
        before = x._local_tensor.fill_(1.0).clone()
        result = SiLUFwdOp(inplace=True)(x)
        assert result is x
        torch.testing.assert_close(x._local_tensor, torch.nn.functional.silu(before))

        keys, values = (lay(mesh, (4, 2, 6, 8), S2) for _ in range(2))
        rows = [lay(mesh, (3, 6, 8), S1) for _ in range(2)]
        rows[0]._local_tensor.fill_(2.0)
        slots = lay(mesh, (3,), R, dtype=torch.int64)
        slots._local_tensor.copy_(torch.arange(3))
        _, seen = counted(PagedKVCacheWriteFwdOp(), *rows, keys, values, slots)
        assert not seen
        assert keys._local_tensor.sum() == 3 * 3 * 8 * 2.0
        # Rows that lie otherwise are brought to the cache, never the cache to them.
        rows = [lay(mesh, (3, 6, 8), S0) for _ in range(2)]
        _, seen = counted(PagedKVCacheWriteFwdOp(), *rows, keys, values, slots)
        assert sum(seen.values()) == 2
        assert keys.placements == (S2,)


def test_what_can_be_written_nowhere_is_refused():
    with ranks(2) as mesh:
        x = lay(mesh, ROWS, P)
        with pytest.raises(RuntimeError, match="SiLUFwdOp: argument 'input': given placements"):
            SiLUFwdOp(inplace=True)(x)
        norm = BatchNormFwdOp(training=True)
        mean, var = lay(mesh, (8,), S0), lay(mesh, (8,), S0)
        assert norm(lay(mesh, ROWS, S1), mean, var)[0].placements == (S1,)


# ---- meshes of two dims ----------------------------------------------------------------------------------


def test_two_dims_of_ranks():
    with ranks(2, 3) as mesh:
        x, w = lay(mesh, (12, 8), S0, S1), lay(mesh, (12, 8), R, S1)
        result, seen = counted(GEMMFwdOp(), x, w)
        assert (result.placements, seen) == ((S0, P), {})
        x, w = lay(mesh, (12, 8), S0, R), lay(mesh, (12, 8), R, S0)
        result, seen = counted(GEMMFwdOp(), x, w)
        assert (result.placements, seen) == ((S0, S1), {})
        x, w = lay(mesh, (5, 6, 8), S0, S1), lay(mesh, (8,), R, R)
        result, seen = counted(RMSNormFwdOp((8,)), x, w)
        assert (result.placements, seen) == ((S0, S1), {})
    with ranks(2, 2) as mesh:  # six heads divide by two, not by two twice
        for heads, free in ((6, False), (8, True)):
            q, k = lay(mesh, (1, 3, 2 * heads, 8), S2, S2), lay(mesh, (1, 3, heads, 8), S2, S2)
            result, seen = counted(GQADenseFwdOp(), q, k, k)
            assert (result.placements == (S2, S2), not seen) == (free, free)


# ---- where the strategies come from ------------------------------------------------------------------------


def test_nothing_of_a_decision_is_seen_by_modes():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with ranks(2) as mesh:
        x = lay(mesh, (10, 8), S0)
        with Seen():
            RMSNormFwdOp((8,), eps=0.125)(x)
    made = [name for name in names if "tileops" not in name]
    assert made == ["aten.empty_strided.default"], names  # DTensor's own, for the fake


def test_inference_mode_and_raw_operators():
    """No Autograd kernel runs there."""
    with ranks(2) as mesh, torch.inference_mode():
        x, op = lay(mesh, ROWS, S0), RMSNormFwdOp((8,), eps=0.25)
        assert op(x).placements == (S0,)
        raw = torch.ops.tileops.norm_rms_norm_fwd(x, None, op._instance_key)
        assert raw.placements == (S0,)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """DTensor is gone from the graph: the ranks' parts remain, and the collectives that are needed."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    norm, gemm = RMSNormFwdOp((8,), eps=0.5), GEMMFwdOp()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, w, weight: gemm(norm(x, w), weight),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=keep),
        dynamic=dynamic,
    )
    with ranks(2) as mesh:
        for rows in (12, 20, 28) if dynamic else (12,):
            args = lay(mesh, (rows, 8), S0), lay(mesh, (8,), R), lay(mesh, (16, 8), R)
            result = compiled(*args)
            assert (result.placements, result.shape) == ((S0,), (rows, 16))
        assert len(graphs) == 1
        (nodes,) = graphs
        assert nodes == ["tileops.norm_rms_norm_fwd.default", "tileops.gemm_fwd.default"]
        assert [node for node in nodes if "tileops" in node or "c10d" in node] == [
            "tileops.norm_rms_norm_fwd.default",
            "tileops.gemm_fwd.default",
        ]


# ---- gradients ---------------------------------------------------------------------------------------------


def test_the_gradient_of_a_weight_is_a_partial_sum():
    with ranks(2) as mesh:
        x, w = lay(mesh, ROWS, S0).requires_grad_(), lay(mesh, (8,), R).requires_grad_()
        weight = lay(mesh, (6, 8), S0).requires_grad_()
        with CommDebugMode() as seen:
            result = RMSNormFwdOp((8,))(x, w)
            result.backward(torch.ones_like(result))
        assert (x.grad.placements, w.grad.placements) == ((S0,), (P,))
        assert seen.get_total_counts() == 0
        x = lay(mesh, ROWS, R).requires_grad_()
        with CommDebugMode() as seen:
            result = GEMMFwdOp()(x, weight)
            result.backward(torch.ones_like(result))
        assert (x.grad.placements, weight.grad.placements) == ((P,), (S0,))
        assert seen.get_total_counts() == 0


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_is_used(used):
    with ranks(2) as mesh:
        args = [lay(mesh, ROWS, S0).requires_grad_() for _ in range(2)]
        w = lay(mesh, (8,), R).requires_grad_()
        result = FusedAddRMSNormFwdOp()(*args, w)[used]
        result.backward(torch.ones_like(result))
        assert [a.grad.placements for a in args] == [(S0,), (S0,)]


@fresh  # DTensor keeps specs with the mesh of an earlier test, which torch's partitioner takes for another
def test_compiled_training():
    from torch._dynamo.testing import CompileCounterWithBackend

    norm, gemm, add = RMSNormFwdOp((8,)), GEMMFwdOp(), AddFwdOp()

    def layer(x, w, weight):
        return add(x, gemm(norm(x, w), weight))

    with ranks(2) as mesh:
        results, counters = [], []
        for compiled in (
            False,
            True,
            True,
        ):  # twice: what the first compilation left behind is there
            call = layer
            if compiled:
                torch.compiler.reset()
                counters.append(CompileCounterWithBackend("aot_eager"))
                call = torch.compile(layer, fullgraph=True, backend=counters[-1])
            x, w = lay(mesh, ROWS, S0).requires_grad_(), lay(mesh, (8,), R).requires_grad_()
            weight = lay(mesh, (8, 8), R).requires_grad_()
            result = call(x, w, weight)
            result.backward(torch.ones_like(result))
            results.append([result.placements, *(t.grad.placements for t in (x, w, weight))])
        assert results == [[(S0,), (S0,), (P,), (P,)]] * 3
    assert [counter.frame_count for counter in counters] == [1, 1]
