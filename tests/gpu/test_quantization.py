"""Quantisation on a card, through the public ops: the bits that the CPU gives."""

from __future__ import annotations

import pytest
import torch

from tests.cases import op_classes, workload_cases
from tests.families.test_quantization_kernels import OPS, hostile, made, op_of, plain
from tests.oracle import call, same_bits
from tileops.engine.workloads import workload_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def held(op, inputs):
    wanted = call(op, inputs)
    given = call(op, {name: tensor.cuda() for name, tensor in inputs.items()})
    assert not op.last_call.kernel.startswith("decomposition")
    for one, other in zip(given, wanted, strict=True):
        assert same_bits(plain(one.cpu()), plain(other)), op


@pytest.mark.parametrize(("name", "workload"), workload_cases("quantization"))
def test_workloads(name, workload):
    made = workload_inputs(op_classes()[name], workload, scale_to=1 << 22)
    held(made.op, dict(made.inputs))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("length", [1, 127, 1001, 4096, 16384, 70001])
def test_lengths(name, length):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        held(*made(name, (131, length), dtype))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("eps", [1e-10, 0.0, 1e-30])
def test_hostile_rows(name, eps):
    for row in hostile(eps).split(1):
        op = op_of(name, eps=eps)
        inputs = {op.entry.inputs[0].name: row}
        if name == "SmoothQuantFwdOp":
            inputs["smooth"] = torch.rand(130) + 0.5
        held(op, inputs)


def test_in_a_cuda_graph():
    op, inputs = made("INT8QuantPerTensorFwdOp", (300, 500), torch.bfloat16)
    x = inputs["x"].cuda()
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = op(x)
    x.mul_(3)
    graph.replay()
    for one, other in zip((q, scale), op(x), strict=True):
        assert torch.equal(one, other)
