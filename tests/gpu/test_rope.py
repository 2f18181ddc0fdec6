"""Rotations on a card against float64: every workload and candidate, far offsets, batch invariance."""

from __future__ import annotations

import pytest
import torch

from tests.cases import workload_call, workload_cases
from tests.oracle import exact, nearer, same_bits, strided
from tileops.backend.tolerances import compare
from tileops.engine.plan import call_spec, in_tree_kernels
from tileops.rope import RoPEBwdOp, RoPEFwdOp, RoPENeoxPositionIdsFwdOp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

LAYOUTS = ["neox", "interleaved"]


def on_card(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def hold(op, inputs, result):
    (wanted,), _ = exact(op, inputs)
    if result.dtype is torch.float64 and not by_tables(op):
        result = nearer(result, wanted, angles_rounding(op, inputs))
    found = compare(result, wanted, "pointwise")
    assert found.ok, f"{op!r}: {found.text}"


def by_tables(op):
    """It is given sines and cosines, and takes none."""
    return type(op).__name__.startswith("RoPETables")


def angles_rounding(op, inputs):
    """How far float64 angles move a result, by token, since float64 has no wider type to take them in.

    An angle is a position times a rate of at most 1. Units of 2**-52 in which a rate may be off: 2 for
    a power on the card and 1 on the host (the oracle's), a half for each rounding after that, of which
    the spectra and their oracles have up to 6 each; and a half for each of the two products: 10. The
    position multiplies them, and the pair's length of at most sqrt(2) times its largest entry, and the
    factor on lengths, turn the angle into a distance.
    """
    x, *positions = inputs.values()
    token = 0 if x.ndim < 4 else 1
    places = positions[0] if positions else torch.arange(x.shape[token], device=x.device)
    reach = (2**0.5 * x.abs()).amax(dim=-1, keepdim=True) * LONGEST
    return 10 * 2.0**-52 * reach * places.double().view(-1, *[1] * (x.ndim - token - 1))


LONGEST = 1.5
"""More than any workload's factor on lengths: 0.1 ln(16) + 1 and 1.19."""


@pytest.mark.parametrize(("name", "workload"), workload_cases("rope"))
def test_workloads(name, workload, seed):
    made = workload_call(name, workload, seed, 1 << 20)
    inputs = on_card(made.inputs)
    hold(made.op, inputs, made.op(*inputs.values()))
    narrow = next(iter(inputs.values())).dtype is not torch.float64
    kernel = "triton_rotate_by_tables" if by_tables(made.op) else "triton_rotate"
    assert made.op.last_call.kernel == (kernel if narrow else "decomposition")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2049, 64), (1000, 96), (2, 333, 3, 80), (3, 1000, 1, 128)], ids=str
)
def test_candidates(shape, layout):
    op = RoPEFwdOp(layout, "1d" if len(shape) == 2 else "2d")
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    call, _ = call_spec(op, (x,), None)
    (kernel,) = [k for k in in_tree_kernels(RoPEFwdOp, "cuda") if k.name == "triton_rotate"]
    for entry in kernel.candidates(call):
        hold(op, {"x": x}, entry.bind(entry.build(), call)(x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op_class", [RoPEFwdOp, RoPEBwdOp])
def test_views(op_class, layout):
    x = torch.randn(4, 65, 6, 64, device="cuda")
    op = op_class(layout, "2d")
    name = op.entry.inputs[0].name
    for _, view in strided(x):
        hold(op, {name: view}, op(view))
    expanded = x[:1, :1].expand_as(x)
    hold(op, {name: expanded}, op(expanded))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_invariance(layout):
    x = torch.randn(8, 700, 8, 128, device="cuda", dtype=torch.bfloat16)
    op = RoPEFwdOp(layout, "2d")
    whole = op(x)
    for batch, end in ((1, 1), (1, 699), (3, 128), (8, 17)):
        assert torch.equal(op(x[:batch, :end]), whole[:batch, :end])
    alone = RoPEFwdOp(layout)(x[5, :, 3])
    assert torch.equal(RoPEFwdOp(layout)(x[5, :17, 3]), alone[:17])
    places, op = torch.arange(700, device="cuda"), RoPENeoxPositionIdsFwdOp(700)
    assert torch.equal(op(x[2, 600:], places[600:]), op(x[2], places)[600:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [((1 << 24) + 3, 128), (1, (1 << 19) + 3, 32, 128)], ids=str)
def test_beyond_two_gi_elements(shape, layout):
    x = torch.zeros(shape, device="cuda", dtype=torch.float16)
    rows = x if len(shape) == 2 else x[0]
    places = [0, len(rows) // 2, len(rows) - 4, len(rows) - 3, len(rows) - 1]
    rows[places] = torch.randn(5, *shape[2 if len(shape) == 4 else 1 :], device="cuda").half()
    result = RoPEFwdOp(layout, "1d" if len(shape) == 2 else "2d")(x)
    result = result if len(shape) == 2 else result[0]
    some = rows[places].double().cpu()
    rates = 10000.0 ** (torch.arange(64, dtype=torch.float64) / -64)
    angles = torch.tensor(places, dtype=torch.float64)[:, None] * rates
    pick = (
        (slice(0, None, 2), slice(1, None, 2)) if layout != "neox" else (slice(64), slice(64, None))
    )
    cosine, sine = angles.cos(), angles.sin()
    if len(shape) == 4:
        cosine, sine = cosine[:, None], sine[:, None]
    left, right = some[..., pick[0]], some[..., pick[1]]
    wanted = torch.empty_like(some)
    wanted[..., pick[0]] = left * cosine - right * sine
    wanted[..., pick[1]] = right * cosine + left * sine
    found = compare(result[places], wanted, "pointwise")
    assert found.ok, found.text


def test_positions_of_both_types_and_one_plan_for_growing_batches():
    op = RoPENeoxPositionIdsFwdOp(1 << 20)
    for tokens in (1, 2, 131, 5000):
        for kind in (torch.int32, torch.int64):
            x = torch.randn(tokens, 8, 64, device="cuda", dtype=torch.bfloat16)
            places = torch.randint(0, 1 << 20, (tokens,), device="cuda", dtype=kind)
            hold(op, {"x": x, "positions": places}, op(x, places))


def test_bits_of_a_repeated_call():
    x = torch.randn(3000, 128, device="cuda", dtype=torch.float16)
    op = RoPEFwdOp("interleaved")
    one, other = op(x).cpu(), op(x).cpu()
    assert same_bits(one, other)
