"""Grouped heads with a mask that is data: on a card cuDNN reads them uncopied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.fusion.test_grouped import by_expand, heads, meaning, visible
from tileops.backend.tolerances import compare
from tileops.fusion import backend, last_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]


def attention(q, k, v, mask):
    return F.scaled_dot_product_attention(q, by_expand(k), by_expand(v), attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 128])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_is_copied(dtype, queries, training, dynamic):
    torch._dynamo.reset()
    q = heads(24, queries, width=128, dtype=dtype).cuda().requires_grad_(training)
    k, v = (
        heads(8, 1024, width=128, dtype=dtype).cuda().requires_grad_(training) for _ in range(2)
    )
    mask = visible(queries, 1024).cuda()
    run = torch.compile(attention, backend=backend, fullgraph=True, dynamic=dynamic)
    result = run(q, k, v, mask)
    report = last_report()
    takes = torch.backends.cuda.can_use_cudnn_attention(
        torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, False, True)
    )
    assert takes == (torch.cuda.get_device_capability() >= (9, 0))
    assert report.events[-1].data["op"] == "scaled_dot_product_attention"
    assert report.events[-1].kind == ("substituted" if takes else "declined")
    exact = [t.detach().double().requires_grad_(training) for t in (q, k, v)]
    wanted = meaning(*exact, mask)
    found = compare(result.detach(), wanted.detach(), "template")
    assert found.ok, found.text
    if training:
        weight = torch.randn_like(result)
        ours = torch.autograd.grad(result, (q, k, v), weight)
        theirs = torch.autograd.grad(wanted, exact, weight.double())
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other).norm() <= 2e-2 * other.norm()
    elif takes:
        run(q, k, v, mask)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(q, k, v, mask)
        copied = 3 * k.numel() * k.itemsize
        assert torch.cuda.max_memory_allocated() - before < copied
