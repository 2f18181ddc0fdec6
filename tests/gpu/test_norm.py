"""The norm family on a card: every workload, kernels against float64, batch invariance, large sizes.

What takes time here is compiling, so tests that need a kernel share lengths and dtypes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tileops.norm
from tests.cases import op_classes, workload_cases
from tests.families.test_norm_rows import steps_off
from tests.oracle import exact
from tileops.backend.tolerances import compare
from tileops.engine.workloads import workload_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
MOST = 1 << 18
"""Elements of the largest tensor of a workload."""


@pytest.fixture(autouse=True)
def _poison() -> None:
    torch.manual_seed(torch.seed() % 2**31)
    junk = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(4, 24)]
    del junk


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def call(op, inputs):
    items = op.entry.inputs
    named = {i.name: inputs[i.name] for i in items if i.kw_only and inputs.get(i.name) is not None}
    return op(*(inputs.get(i.name) for i in items if not i.kw_only), **named)


def check(op, inputs, kernel="triton"):
    """Call on the card; hold outputs and written inputs to the oracle, in float64 on the card."""
    before = {n: None if t is None else t.clone() for n, t in inputs.items()}
    result = call(op, inputs)
    assert op.last_call.kernel.startswith(kernel), (op.last_call.kernel, op.last_call.refused)
    results = result if isinstance(result, tuple) else (result,) if op.entry.outputs else ()
    wanted, written = exact(op, before)
    for given, value in zip(results, wanted, strict=True):
        assert (given is None) == (value is None)
        if value is None:
            continue
        if "quant_dtype" in op._params and given is results[0]:
            off = steps_off(given, value)
            assert (off <= 1).all()
            assert (off > 0).sum() <= off.numel() // 100
            continue
        found = compare(given, value, "reduction")
        assert found.ok, (str(op), found.text)
    for name, value in written.items():
        found = compare(inputs[name], value, "reduction")
        assert found.ok, (str(op), name, found.text)
    return results


def workloads():
    """As the manifest has them, and of each class the first in every dtype."""
    for case in workload_cases("norm"):
        name, workload = case.values
        known = op_classes()[name].entry.workloads
        if workload.label == known[0].label or workload in known:
            yield case


@pytest.mark.parametrize(("name", "workload"), list(workloads()))
def test_workloads(name, workload):
    cls = op_classes()[name]
    made = workload_inputs(cls, workload, "cuda", scale_to=MOST)
    inputs = dict(made.inputs)
    if inputs.get("running_var") is not None:
        inputs["running_var"].abs_().add_(0.1)
    dtypes = set(workload.dtypes.values())
    kernel = "triton"
    if "float64" in dtypes:
        kernel = "decomposition"
    check(made.op, inputs, kernel)


# --- rows ---------------------------------------------------------------------------------------

ROW_KINDS = [(96, torch.bfloat16), (127, torch.bfloat16), (1031, torch.float16), (4096, torch.bfloat16),
             (8191, torch.bfloat16), (8192, torch.float32), (16384, torch.bfloat16), (40001, torch.bfloat16)]  # fmt: skip


def row_inputs(name, count, length, dtype, **params):
    """An op and its inputs."""
    cls = getattr(tileops.norm, name)
    if any(param.name == "normalized_shape" for param in cls.entry.params):
        params["normalized_shape"] = (length,)
    vectors = ("weight", "bias")
    inputs = {
        item.name: draw(length if item.name in vectors else count * length, dtype=dtype)
        for item in cls.entry.inputs
    }
    shaped = {n: t if n in vectors else t.view(count, length) for n, t in inputs.items()}
    return cls(eps=1e-3, **params), shaped


ROWS = [
    "LayerNormFwdOp",
    "AdaLayerNormFwdOp",
    "AdaLayerNormZeroFwdOp",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormPerTokenQuantFwdOp",
]
BACKWARD = ["RMSNormBwdOp", "LayerNormBwdOp", "FusedAddRMSNormBwdOp"]


@pytest.mark.parametrize("name", [*ROWS, *BACKWARD])
def test_rows(name):
    for length, dtype in ROW_KINDS:
        if "Quant" in name and length * dtype.itemsize > 32768:
            continue
        for count in (1, 3, 300 if length < 9000 else 20):
            check(*row_inputs(name, count, length, dtype))


def test_quantised_to_int8():
    for length in (96, 4096):
        check(*row_inputs(ROWS[-1], 40, length, torch.bfloat16, quant_dtype=torch.int8))


@pytest.mark.parametrize("name", [*ROWS, *BACKWARD])
@pytest.mark.parametrize("length", [96, 4096, 16384, 40001])
def test_a_row_does_not_depend_on_its_neighbours(name, length):
    if "Quant" in name and length > 32768:
        pytest.skip("the decomposition's")
    op, inputs = row_inputs(name, 400, length, torch.bfloat16)
    whole = call(op, inputs)
    whole = whole if isinstance(whole, tuple) else (whole,)
    for rows in (slice(0, 1), slice(7, 9), slice(399, 400), slice(100, 300)):
        some = call(op, {n: t[rows] if t.ndim > 1 else t for n, t in inputs.items()})
        some = some if isinstance(some, tuple) else (some,)
        for one, every, output in zip(some, whole, op.entry.outputs, strict=True):
            if output.name not in ("grad_weight", "grad_bias"):
                assert torch.equal(one.view(torch.uint8), every[rows].view(torch.uint8))


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("length", [96, 4096, 16384])
def test_gradients_are_the_same_every_time(name, length):
    op, inputs = row_inputs(name, 3000, length, torch.bfloat16)
    first = call(op, inputs)
    for _ in range(5):
        assert all(map(torch.equal, call(op, inputs), first))


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_many_rows(name):
    """The weight's gradient over 32768 rows, in float64 on the card."""
    op, inputs = row_inputs(name, 32768, 4096, torch.bfloat16)
    results = call(op, inputs)
    x = inputs[op.entry.inputs[-2].name].double()
    weight = inputs["weight"].double().requires_grad_()
    if name == "LayerNormBwdOp":
        y = F.layer_norm(x, (4096,), weight, None, 1e-3)
    else:
        y = F.rms_norm(x, (4096,), weight, 1e-3)
    (wanted,) = torch.autograd.grad(y, weight, inputs["grad_output"].double())
    at = [output.name for output in op.entry.outputs].index("grad_weight")
    found = compare(results[at], wanted, "reduction")
    assert found.ok, found.text


@pytest.mark.parametrize("name", ["LayerNormFwdOp", *BACKWARD[:2]])
@pytest.mark.parametrize("length", [1024, 16384])
def test_more_than_2_to_the_31_elements(name, length):
    count = 2**31 // length + 77
    inputs = {}
    op, few = row_inputs(name, 1, length, torch.float16)
    for n, t in few.items():
        shape = (count, length) if t.ndim > 1 else (length,)
        inputs[n] = torch.empty(shape, device="cuda", dtype=torch.float16).normal_()
    result = call(op, inputs)
    first = result[0] if isinstance(result, tuple) else result
    for rows in (
        slice(0, 3),
        slice(2**31 // length - 2, 2**31 // length + 2),
        slice(count - 3, count),
    ):
        part = {n: t[rows] if t.ndim > 1 else t for n, t in inputs.items()}
        wanted, _ = exact(op, part)
        found = compare(first[rows], wanted[0], "reduction")
        assert found.ok, found.text


# --- channels -----------------------------------------------------------------------------------

CHANNELS = [(32, 64), (3, 5), (5000, 40), (2, 3, 4), (32, 64, 56, 56), (4, 7, 9001)]


@pytest.mark.parametrize("shape", CHANNELS)
def test_batch_norm(shape):
    dtype = FLOATS[CHANNELS.index(shape) % 3]
    channels = shape[1]
    x = draw(*shape, dtype=dtype)
    running = lambda: {"running_mean": draw(channels), "running_var": draw(channels).abs() + 0.1}  # noqa: E731
    affine = {"weight": draw(channels), "bias": draw(channels)}
    train, evaluate = tileops.norm.BatchNormFwdOp(training=True), tileops.norm.BatchNormFwdOp()
    check(train, {"input": x, **running(), **affine})
    check(train, {"input": x})
    check(evaluate, {"input": x, **running(), **affine})
    _, mean, invstd = train(x)
    saved = {"save_mean": mean, "save_invstd": invstd}
    inputs = {"doutput": draw(*shape, dtype=dtype), "input": x, **saved}
    check(tileops.norm.BatchNormBwdOp(), {**inputs, "weight": affine["weight"]})


@pytest.mark.parametrize(
    ("shape", "groups", "dtype"),
    [
        ((8, 128, 32, 32), 32, torch.bfloat16),
        ((2, 6, 5), 3, torch.float32),
        ((2, 320, 64, 64), 32, torch.float16),
        ((3, 64, 28, 28), 8, torch.bfloat16),
        ((3, 64, 3), 8, torch.float16),
    ],
)
def test_groups(shape, groups, dtype):
    x, weight, bias = draw(*shape, dtype=dtype), *draw(2, shape[1], dtype=dtype)
    inputs = {"input": x, "weight": weight, "bias": bias}
    check(tileops.norm.GroupNormFwdOp(groups), inputs)
    check(tileops.norm.InstanceNormFwdOp(), inputs)


def test_channels_of_more_than_2_to_the_31_elements():
    x = torch.empty(2**31 // 4096 + 9, 4096, device="cuda", dtype=torch.float16).normal_()
    y, mean, invstd = tileops.norm.BatchNormFwdOp(training=True)(x)
    for rows in (slice(0, 2), slice(-2, None)):
        wanted = (x[rows].double() - mean.double()) * invstd.double()
        assert compare(y[rows], wanted, "reduction").ok
    assert mean.abs().max() < 0.02
    assert (invstd - 1).abs().max() < 0.02


# --- queries and keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["neox", "interleaved"])
@pytest.mark.parametrize(
    ("size", "turned"), [(128, 128), (128, 64), (96, 96), (80, 32), (256, 256)]
)
def test_qk_norm_rope(size, turned, layout):
    dtype = FLOATS[(size + turned) // 16 % 3]
    for tokens in (1, 7):
        inputs = {
            "qkv": draw(tokens, 9 * size, dtype=dtype),
            "q_weight": draw(size, dtype=dtype),
            "k_weight": draw(size, dtype=dtype),
            "cos_sin_cache": draw(50, turned, dtype=torch.float32),
            "positions": torch.randint(0, 50, (tokens,), device="cuda"),
        }
        check(tileops.norm.FusedQKNormRoPEFwdOp(5, 2, rope_layout=layout), inputs)


# --- graphs -------------------------------------------------------------------------------------


def test_graph_capture():
    for name in (*ROWS, *BACKWARD):
        op, inputs = row_inputs(name, 20, 96, torch.bfloat16)
        call(op, inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(op, inputs)
        for tensor in inputs.values():
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        again = call(op, inputs)
        pairs = zip(result, again, strict=True) if isinstance(result, tuple) else [(result, again)]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
