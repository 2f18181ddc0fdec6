"""What a report says of code for a card, with a description in the place of one."""

from __future__ import annotations

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain.described_card import on_a_card

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a card is there: tests/gpu/test_tour.py asks it"
)


def softmax(x, w):
    return torch.softmax(torch.relu(x @ w), -1)


def test_triton_with_its_schedule():
    with on_a_card():
        x = torch.empty(512, 64, device="cuda", dtype=torch.bfloat16)
        w = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
        report = tileops.explain(softmax, x, w)
    assert report.device == "NVIDIA H200"
    (lowered,) = report.compilations[0].inductor
    product, rows = lowered.kernels
    assert (product.kind, product.language) == ("extern", "extern")
    assert (rows.kind, rows.language) == ("reduction", "triton")
    assert "tl.store" in rows.code
    assert rows.schedule["reduction_hint"] == "ReductionHint.INNER"
    assert rows.schedule["size_hints"] == "{'x': 512, 'r0_': 256}"
    # Read by the product, written by it and read again, written over.
    assert product.bytes == 2 * (512 * 64 + 64 * 256 + 512 * 256)
    assert rows.bytes == 2 * 2 * 512 * 256
    assert rows.schedule["R0_BLOCK"] == "256"
    assert [(each.reuses, each.kept) for each in lowered.buffers] == [
        (None, False), (lowered.buffers[0].name, True),
    ]  # fmt: skip
    assert lowered.peak_bytes == 2 * 512 * 256


def test_what_somebody_could_mend_of_what_did_not_fuse():
    with on_a_card():
        x, w = torch.empty(2048, 2048, device="cuda"), torch.empty(2048, 2048, device="cuda")
        report = tileops.explain(golden.passes_through_memory, x, w)
    (lowered,) = report.compilations[0].inductor
    libraries = {"mm"}
    for each in lowered.unfused:
        touches = libraries & {*each.first_nodes, *each.second_nodes}
        around = "relu" in each.first_nodes and "relu_1" in each.second_nodes
        assert (each.relation == "opaque") == bool(touches or around), each
    assert report.unfused
    assert {each.relation for each in report.unfused} == {"passes"}
    assert all(len({*each.first_nodes, *each.second_nodes}) > 1 for each in report.unfused)


def test_the_machine_is_as_before():
    from triton.runtime import driver

    before = (driver._active, torch.version.cuda)
    with on_a_card():
        assert torch.cuda.is_available()
        assert torch.empty(3, device="cuda").device.type == "cuda"
    assert not torch.cuda.is_available()
    assert (driver._active, torch.version.cuda) == before
    assert not torch.utils._triton.has_triton()
    assert torch.ones(3).sum().item() == 3
