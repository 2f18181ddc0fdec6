"""The gradients of attention on a card against float64."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import nearer
from tests.oracle_attention import ROUNDING
from tileops.attention import GQADenseBwdOp, GQADenseFwdOp
from tileops.backend.tolerances import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

HALF, BRAIN, WIDE = torch.float16, torch.bfloat16, torch.float32


def draw(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def plain(op, q, k, v):
    group, (s_q, s_kv) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if op.softcap is not None:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    distance = torch.arange(s_kv, device="cuda") - torch.arange(s_q, device="cuda")[:, None]
    distance = distance - (s_kv - s_q)
    seen = (distance <= 0) if op.is_causal else torch.ones_like(distance, dtype=torch.bool)
    if op.window_size_left >= 0:
        seen = seen & (distance >= -op.window_size_left)
    if op.window_size_right >= 0:
        seen = seen & (distance <= op.window_size_right)
    shares = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("bhij,bjhd->bihd", shares, v)


def hold(op, made, found):
    leaves = [t.double().requires_grad_() for t in made[1:]]
    expected = torch.autograd.grad(plain(op, *leaves), leaves, made[0].double())
    names = ("grad_o", "q", "k", "v")
    rounding = ROUNDING["GQADenseBwdOp"](op, **dict(zip(names, made, strict=True)))
    for name, wanted, given, allowance in zip(names[1:], expected, found, rounding, strict=False):
        assert (given is not None) == getattr(op, f"wants_{name}")
        if given is not None:
            assert given.is_contiguous()
            result = compare(nearer(given, wanted, allowance), wanted, "template")
            assert result.ok, f"{op!r}: grad_{name}: {result.text}"


CALLS = [
    # batch, queries, keys, heads, key heads, features, parameters, dtype
    (1, 512, 512, 8, 2, 128, {"is_causal": True}, BRAIN),
    (2, 300, 300, 6, 3, 64, {}, HALF),
    (1, 257, 257, 4, 2, 256, {"is_causal": True}, BRAIN),
    (1, 100, 100, 4, 2, 20, {"is_causal": True}, BRAIN),
    (1, 64, 64, 4, 2, 512, {"is_causal": True}, BRAIN),
    (2, 100, 333, 8, 2, 128, {"is_causal": True}, BRAIN),
    (1, 100, 333, 4, 2, 20, {"is_causal": True}, HALF),
    (1, 400, 400, 4, 2, 64, {"window_size_left": 50, "window_size_right": 60}, HALF),
    (3, 1, 333, 8, 2, 128, {"is_causal": True, "window_size_left": 100}, BRAIN),
    (1, 200, 200, 4, 2, 64, {"is_causal": True}, WIDE),
    (1, 200, 300, 4, 1, 128, {"is_causal": True, "window_size_left": 30}, WIDE),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients(call):
    batch, s_q, s_kv, heads, kv_heads, size, params, dtype = call
    shapes = [(s_q, heads)] * 2 + [(s_kv, kv_heads)] * 2
    made = [draw(batch, *shape, size, dtype=dtype) for shape in shapes]
    for wants in ({}, {"wants_q": False}, {"wants_k": False, "wants_v": False}):
        op = GQADenseBwdOp(**params, **wants)
        hold(op, made, op(*made))
        assert op.last_call.kernel == "sdpa_gradient"
    made[0] = torch.ones((), device="cuda", dtype=dtype).expand(made[0].shape)
    hold(op, made, op(*made))


def test_what_torch_has_no_kernel_for():
    op = GQADenseBwdOp(is_causal=True, softcap=5.0)
    made = [draw(1, 100, heads, 64, dtype=BRAIN) for heads in (4, 4, 2, 2)]
    hold(op, made, op(*made))
    assert op.last_call.kernel == "decomposition"


@pytest.mark.parametrize("captured", [False, True])
def test_through_the_forward(captured):
    op = GQADenseFwdOp(is_causal=True)
    made = [draw(1, 256, heads, 128, dtype=BRAIN) for heads in (8, 8, 2, 2)]
    leaves = [t.requires_grad_() for t in made[1:]]

    def step():
        return torch.autograd.grad(op(*leaves), leaves, made[0])

    found = step()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        graph.replay()
        torch.cuda.synchronize()
    hold(GQADenseBwdOp(is_causal=True), [t.detach() for t in made], found)
