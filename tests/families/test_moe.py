"""The moe family on the CPU against loops over rows in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cases import workload_call, workload_cases
from tests.oracle import check, poisoned, strided
from tileops import CheckError
from tileops.moe import (
    ContiguousLayoutSpec,
    MaskedLayoutSpec,
    MoEExpertMLPFwdOp,
    MoEGroupedGEMMFwdOp,
    MoEPostPermuteFwdOp,
    RoutingEpilogueSpec,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ACTIVATIONS = [None, "silu_and_mul", "gelu_and_mul", "swigluoai"]
LAYOUTS = [
    ContiguousLayoutSpec.tight_physical_psum(),
    ContiguousLayoutSpec.tight_per_row(),
    ContiguousLayoutSpec.aligned_physical_psum(4),
    ContiguousLayoutSpec.aligned_per_row(4),
    MaskedLayoutSpec(5),
]
COUNTS = [
    [3, 2, 4],
    [0, 5, 0, 1],  # experts without a row, first and last of those with one
    [0, 0, 3],
    [4],
    [0, 0],
    [1, 1, 1, 1, 1],
]


@pytest.mark.parametrize(("name", "workload"), workload_cases("moe"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed)
    check(made.op, dict(made.inputs))


def metadata(layout, counts, tail=0):
    """(rows in memory, the layout's metadata); ``tail``: as many alignments of padding at the end."""
    if layout.masked:
        return (len(counts), layout.max_m), torch.tensor(counts, dtype=torch.int32)
    step, ends, owners = layout.alignment, [], []
    for expert, count in enumerate(counts):
        owners += [-1] * (-len(owners) % step)
        owners += [expert] * count
        ends.append(len(owners))
    owners += [-1] * (-len(owners) % step + tail * step)
    values = owners if layout.metadata_kind == "per_row" else ends
    return (len(owners),), torch.tensor(values, dtype=torch.int32)


def gemm_call(layout, counts, activation=None, bias=True, dtype=torch.float32, k=6, n=3, tail=0):
    rows, meta = metadata(layout, counts, tail)
    width = n if activation is None else 2 * n
    made = {
        "a": torch.randn(*rows, k).to(dtype),
        "b": torch.randn(len(counts), width, k).to(dtype),
        "layout_metadata": meta,
    }
    if bias:
        made["bias"] = torch.randn(len(counts), width).to(dtype)
    return made


# ---- GroupedGEMM -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grouped_gemm(layout, activation, dtype):
    for counts in COUNTS:
        for bias, out_dtype in ((False, None), (True, torch.float32)):
            op = MoEGroupedGEMMFwdOp(layout, activation=activation, out_dtype=out_dtype)
            made = gemm_call(layout, counts, activation, bias, dtype)
            shape = (*made["a"].shape[:-1], 3)
            out = torch.full(shape, math.nan, dtype=out_dtype or dtype)
            check(op, made, out=out if len(counts) % 2 == bias else None)


@pytest.mark.parametrize("tail", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_rows_of_no_expert_give_0(layout, tail):
    made = gemm_call(layout, [3, 0, 2], tail=tail)
    owned = 5
    made["a"][:] = torch.where(made["a"] > 0, made["a"], -made["a"])
    result = check(MoEGroupedGEMMFwdOp(layout), made)
    assert int(result.any(1).sum()) == owned
    # Whatever the padding of ``a`` holds.
    rows, _ = metadata(layout, [3, 0, 2], tail)
    padding = ~result.any(1)
    made["a"][padding] = math.nan
    result = check(MoEGroupedGEMMFwdOp(layout), made)
    assert not result[padding].any()
    assert rows == (len(result),)


def test_masked_rows_give_0_whatever_they_hold():
    layout = MaskedLayoutSpec(4)
    made = gemm_call(layout, [1, 4, 0])
    made["a"][0, 1:], made["a"][2] = math.inf, math.nan
    result = check(MoEGroupedGEMMFwdOp(layout, activation=None), made)
    assert not result[0, 1:].any()
    assert not result[2].any()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_experts_do_not_mix(layout):
    made = gemm_call(layout, [2, 3, 1])
    first = MoEGroupedGEMMFwdOp(layout)(**made)
    changed = {**made, "b": made["b"].clone(), "bias": made["bias"].clone()}
    changed["b"][1] += 1
    changed["bias"][1] += 1
    second = MoEGroupedGEMMFwdOp(layout)(**changed)
    differ = (first != second).any(-1).flatten()
    if layout.masked:
        assert differ.nonzero().flatten().tolist() == [5, 6, 7]
    else:
        assert int(differ.sum()) == 3


def test_per_row_metadata_need_not_be_sorted():
    made = gemm_call(LAYOUTS[1], [2, 2, 2])
    made["layout_metadata"] = torch.tensor([2, 0, -1, 1, 0, 2], dtype=torch.int32)
    check(MoEGroupedGEMMFwdOp(LAYOUTS[1]), made)


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_no_rows_at_all(layout):
    made = gemm_call(layout, [0, 0])
    assert made["a"].shape[0] == 0
    check(MoEGroupedGEMMFwdOp(layout), made)
    check(MoEGroupedGEMMFwdOp(layout), made, out=torch.empty(0, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_columns(dtype):
    made = gemm_call(LAYOUTS[0], [2, 1], n=0, dtype=dtype)
    check(MoEGroupedGEMMFwdOp(LAYOUTS[0]), made)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swigluoai_clamps(dtype):
    # One expert, one weight: the gate is a[0] and the value a[1].
    layout = LAYOUTS[0]
    gates = torch.tensor([-100.0, -7.0, 0.0, 6.5, 7.0, 8.0, 1000.0])
    pairs = torch.cartesian_prod(gates, gates).to(dtype)
    made = {
        "a": pairs,
        "b": torch.eye(2, dtype=dtype)[None],
        "layout_metadata": torch.tensor([len(pairs)], dtype=torch.int32),
    }
    result = check(
        MoEGroupedGEMMFwdOp(layout, activation="swigluoai", out_dtype=torch.float32), made
    )
    for (gate, up), found in zip(pairs.double().tolist(), result.flatten().tolist(), strict=True):
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        wanted = gate / (1 + math.exp(-1.702 * gate)) * (up + 1)
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_special_values_stay_in_their_rows(layout):
    made = gemm_call(layout, [3, 3])
    flat = made["a"].view(-1, 6)
    flat[0, 0], flat[1, 1] = math.nan, math.inf
    result = check(MoEGroupedGEMMFwdOp(layout), made)
    assert int((~result.isfinite()).any(-1).sum()) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_accumulates_in_float32(dtype):
    made = {
        "a": torch.ones(2, 4096, dtype=dtype),
        "b": torch.ones(1, 2, 4096, dtype=dtype),
        "layout_metadata": torch.tensor([2], dtype=torch.int32),
    }
    assert (MoEGroupedGEMMFwdOp(LAYOUTS[0])(**made) == 4096).all()


def test_misaligned_inputs():
    made = gemm_call(LAYOUTS[0], [2, 3])
    for name, tensor in made.items():
        _, moved = next(strided(tensor))
        check(MoEGroupedGEMMFwdOp(LAYOUTS[0]), {**made, name: moved})
    with poisoned():
        out = torch.empty(5 * 3 + 1)[1:].view(5, 3)
    check(MoEGroupedGEMMFwdOp(LAYOUTS[0]), made, out=out)


def refused(op, made, argument, **more):
    with pytest.raises(CheckError) as caught:
        op(**made, **more)
    assert caught.value.op == type(op).__name__
    assert caught.value.argument == argument, str(caught.value)


def test_grouped_gemm_domain():
    tight, masked = LAYOUTS[0], MaskedLayoutSpec(4)
    op, made = MoEGroupedGEMMFwdOp(tight), gemm_call(tight, [2, 3])
    refused(op, {**made, "a": torch.randn(5, 12)[:, ::2]}, "a")
    refused(op, {**made, "b": torch.randn(2, 6, 3).transpose(1, 2)}, "b")
    refused(op, {**made, "b": torch.randn(2, 3, 5)}, "b")
    refused(op, {**made, "b": torch.randn(2, 3, 6).half()}, "b")
    refused(op, {**made, "layout_metadata": torch.tensor([2, 5])}, "layout_metadata")
    refused(
        op, {**made, "layout_metadata": torch.tensor([5], dtype=torch.int32)}, "layout_metadata"
    )
    refused(op, {**made, "bias": torch.randn(2, 4)}, "bias")
    refused(op, {**made, "bias": torch.randn(3)}, "bias")
    refused(op, {**made, "a": torch.randn(5, 0), "b": torch.randn(2, 3, 0)}, "a")
    nobody = {"b": torch.randn(0, 3, 6), "layout_metadata": torch.empty(0, dtype=torch.int32)}
    refused(op, {"a": made["a"], **nobody}, "b")
    for out in (
        torch.empty(5, 4),
        torch.empty(5, 3).half(),
        torch.empty(3, 5).t(),
        torch.empty(5, 3, device="meta"),
    ):
        refused(op, made, "out", out=out)
    refused(op, made, "out", out=made["b"].view(-1)[:15].view(5, 3))
    refused(MoEGroupedGEMMFwdOp(tight, activation="silu_and_mul"), made, "b")
    refused(MoEGroupedGEMMFwdOp(ContiguousLayoutSpec.aligned_per_row(4)), made, "layout_metadata")
    aligned = gemm_call(ContiguousLayoutSpec.aligned_physical_psum(4), [2, 3])
    refused(MoEGroupedGEMMFwdOp(ContiguousLayoutSpec.aligned_physical_psum(5)), aligned, "a")
    refused(MoEGroupedGEMMFwdOp(MaskedLayoutSpec(3)), gemm_call(masked, [2, 3]), "a")
    refused(
        MoEGroupedGEMMFwdOp(masked), {**gemm_call(masked, [2, 3]), "a": torch.randn(3, 4, 6)}, "b"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContiguousLayoutSpec("loose", "per_row"),
        lambda: ContiguousLayoutSpec("tight", "rows"),
        lambda: ContiguousLayoutSpec("tight", "per_row", 2),
        lambda: ContiguousLayoutSpec("aligned", "per_row", 1),
        lambda: ContiguousLayoutSpec("aligned", "per_row", 0),
        lambda: ContiguousLayoutSpec("aligned", "per_row", 2.0),
        lambda: ContiguousLayoutSpec("aligned", "per_row", True),
        lambda: MaskedLayoutSpec(0),
        lambda: MaskedLayoutSpec(-1),
        lambda: MaskedLayoutSpec(1.0),
        lambda: RoutingEpilogueSpec(math.inf),
        lambda: RoutingEpilogueSpec(math.nan),
        lambda: RoutingEpilogueSpec("2"),
        lambda: RoutingEpilogueSpec(True),
        lambda: MoEGroupedGEMMFwdOp(),
        lambda: MoEGroupedGEMMFwdOp(None),
        lambda: MoEGroupedGEMMFwdOp("tight"),
        lambda: MoEGroupedGEMMFwdOp(RoutingEpilogueSpec()),
        lambda: MoEGroupedGEMMFwdOp(LAYOUTS[0], activation="relu"),
        lambda: MoEGroupedGEMMFwdOp(LAYOUTS[0], out_dtype=torch.float16),
        lambda: MoEExpertMLPFwdOp(LAYOUTS[0], activation=None),
        lambda: MoEPostPermuteFwdOp(LAYOUTS[0], epilogue=2.0),
        lambda: MoEPostPermuteFwdOp(LAYOUTS[0], out_dtype=torch.float64),
    ],
)
def test_constructor_domain(make):
    with pytest.raises(CheckError):
        make()


# ---- ExpertMLP ---------------------------------------------------------------------------------


def mlp_call(layout, counts, bias, dtype, h=5, f=3):
    rows, meta = metadata(layout, counts, tail=0 if layout.masked else 1)
    made = {
        "expert_input": torch.randn(*rows, h).to(dtype),
        # Gates of about 1: far below it GELU is what is left of a difference.
        "w_gate_up": (torch.randn(len(counts), 2 * f, h) / math.sqrt(h)).to(dtype),
        "w_down": torch.randn(len(counts), h, f).to(dtype),
        "layout_metadata": meta,
    }
    if bias:
        made["b_gate_up"] = torch.randn(len(counts), 2 * f).to(dtype)
        made["b_down"] = torch.randn(len(counts), h).to(dtype)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_expert_mlp(layout, activation, dtype):
    op = MoEExpertMLPFwdOp(layout, activation)
    for counts in ([3, 0, 2], [0, 1]):
        for bias in (False, True):
            made = mlp_call(layout, counts, bias, dtype)
            check(op, made)
            check(op, made, out=torch.full_like(made["expert_input"], math.nan))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_composition_is_its_stages(layout, dtype):
    op, made = MoEExpertMLPFwdOp(layout, "swigluoai"), mlp_call(layout, [3, 0, 2], True, dtype)
    assert op.compile_op_names == ()
    up = MoEGroupedGEMMFwdOp(layout, activation="swigluoai")
    down = MoEGroupedGEMMFwdOp(layout)
    assert (op.gate_up, op.down) == (up, down)
    hidden = up(
        made["expert_input"], made["w_gate_up"], made["layout_metadata"], bias=made["b_gate_up"]
    )
    wanted = down(hidden, made["w_down"], made["layout_metadata"], bias=made["b_down"])
    assert torch.equal(op(**made), wanted)


def test_expert_mlp_domain():
    tight = LAYOUTS[1]
    op, made = MoEExpertMLPFwdOp(tight), mlp_call(tight, [2, 1], True, torch.float32)
    refused(op, {**made, "w_down": torch.randn(2, 4, 3)}, "w_down")
    refused(op, {**made, "w_down": torch.randn(2, 5, 4)}, "w_down")
    # Row metadata name no expert of which w_down has none, so no stage would notice.
    refused(op, {**made, "w_down": torch.randn(3, 5, 3)}, "w_down")
    refused(op, {**made, "w_gate_up": torch.randn(2, 5, 5)}, "w_gate_up")
    refused(op, {**made, "b_down": torch.randn(2, 4)}, "b_down")
    refused(op, made, "out", out=torch.empty(made["expert_input"].shape[0], 4))
    refused(op, {k: v for k, v in made.items() if k != "w_down"}, "w_down")


# ---- PostPermute -------------------------------------------------------------------------------


def permute_call(layout, tokens=4, chosen=2, hidden=5, dtype=torch.float32, spare=3):
    if layout.masked:
        experts = math.ceil(tokens * chosen / layout.max_m) + 1
        rows, total = (experts, layout.max_m), experts * layout.max_m
    else:
        total = tokens * chosen + spare
        rows = (total,)
    return {
        "expert_output": torch.randn(*rows, hidden).to(dtype),
        "topk_weights": torch.rand(tokens, chosen),
        "inverse_indices": torch.randperm(total)[: tokens * chosen].int(),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("epilogue", [None, RoutingEpilogueSpec(), RoutingEpilogueSpec(2.5)])
def test_post_permute(layout, epilogue, out_dtype, dtype):
    op = MoEPostPermuteFwdOp(layout, epilogue, out_dtype)
    for sizes in ({}, {"tokens": 1, "chosen": 1, "hidden": 1}, {"tokens": 37, "chosen": 8}):
        made = permute_call(layout, **sizes, dtype=dtype)
        check(op, made)
        shape = (made["topk_weights"].shape[0], made["expert_output"].shape[-1])
        check(op, made, out=torch.full(shape, math.nan, dtype=out_dtype or dtype))


@pytest.mark.parametrize(
    "sizes", [{"tokens": 0}, {"chosen": 0}, {"tokens": 0, "chosen": 0, "spare": 0}]
)
def test_post_permute_of_nothing(sizes):
    made = permute_call(LAYOUTS[0], **sizes)
    result = check(MoEPostPermuteFwdOp(LAYOUTS[0]), made)
    assert not result.any()


def test_a_row_may_be_taken_twice_and_weights_may_be_0():
    made = permute_call(LAYOUTS[0])
    made["inverse_indices"][:] = 3
    made["topk_weights"][0] = 0.0
    made["topk_weights"][1] = -1.0
    result = check(MoEPostPermuteFwdOp(LAYOUTS[0]), made)
    assert not result[0].any()


def test_special_values_stay_in_their_tokens():
    made = permute_call(LAYOUTS[0], spare=0)
    made["expert_output"][int(made["inverse_indices"][0]), 1] = math.nan
    made["topk_weights"][2, 1] = math.inf
    result = check(MoEPostPermuteFwdOp(LAYOUTS[0]), made)
    assert result[0].isnan().tolist() == [False, True, False, False, False]
    assert result[2].isinf().all()
    assert result[[1, 3]].isfinite().all()


def test_post_permute_accumulates_in_float32():
    tokens, chosen = 1, 4096
    made = {
        "expert_output": torch.ones(1, 2, dtype=torch.float16),
        "topk_weights": torch.ones(tokens, chosen),
        "inverse_indices": torch.zeros(chosen, dtype=torch.int32),
    }
    assert (MoEPostPermuteFwdOp(LAYOUTS[0])(**made) == 4096).all()


def test_post_permute_domain():
    op, made = MoEPostPermuteFwdOp(LAYOUTS[0]), permute_call(LAYOUTS[0])
    refused(op, {**made, "inverse_indices": made["inverse_indices"].long()}, "inverse_indices")
    refused(op, {**made, "inverse_indices": made["inverse_indices"][:7]}, "inverse_indices")
    refused(op, {**made, "topk_weights": made["topk_weights"].half()}, "topk_weights")
    refused(op, {**made, "topk_weights": torch.rand(2, 4).t()}, "topk_weights")
    refused(op, {**made, "expert_output": torch.randn(11, 0)}, "expert_output")
    refused(op, {**made, "expert_output": torch.randn(11, 10)[:, ::2]}, "expert_output")
    refused(op, made, "out", out=torch.empty(4, 6))
    masked = MoEPostPermuteFwdOp(MaskedLayoutSpec(4))
    refused(masked, made, "expert_output")
    refused(masked, permute_call(MaskedLayoutSpec(5)), "expert_output")


def test_routing_through_experts_and_back():
    # Tokens are sent to experts, multiplied, and brought back: the whole of an MoE layer.
    tokens, chosen, experts, hidden = 7, 2, 4, 6
    layout = LAYOUTS[0]
    x, b = torch.randn(tokens, hidden), torch.randn(experts, hidden, hidden)
    picks = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
    weights = torch.rand(tokens, chosen)
    order = picks.flatten().argsort(stable=True)
    inverse = order.argsort().int()
    ends = picks.flatten().bincount(minlength=experts).cumsum(0).int()
    rows = MoEGroupedGEMMFwdOp(layout)(x[order // chosen].contiguous(), b, ends)
    result = MoEPostPermuteFwdOp(layout)(rows, weights, inverse)
    wanted = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for n in range(chosen):
            wanted[t] += weights[t, n] * (b[picks[t, n]] @ x[t])
    torch.testing.assert_close(result, wanted)
