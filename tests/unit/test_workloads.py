"""Calls made from workloads: the tensors an entry declares, and smaller ones for tests."""

from __future__ import annotations

import itertools
import sys
from textwrap import dedent

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tileops.engine.errors import CheckError, ManifestError
from tileops.engine.manifest.catalog import families, load_family
from tileops.engine.validate.find import load, scan
from tileops.engine.validate.report import Report
from tileops.engine.workloads import presence_of, scaled, workload_inputs

MANIFEST = """\
GatherFwdOp:
  status: implemented
  reference: own
  kind: template
  signature:
    dims: {H: N // 2}
    dtypes: {T: [float16, float32, float8_e4m3fn, bool], I: [int32]}
    params: {pages: {type: int, default: 4}, rows: {type: bool, default: false}}
    inputs:
      x: {dtype: T, shape: "[*B, N]"}
      ids: {dtype: I, shape: "[M]", content: {min: -1, max: pages * M - 1}}
      small: {dtype: uint8, shape: "[M]"}
      host: {dtype: [int64, int32], shape: "[3]", device: cpu, content: {min: 5}}
      half: {dtype: "float64 if rows else float32", shape: "[H]", optional: true}
      last: {dtype: float32, shape: "[M]", optional: passed(next)}
      next: {dtype: float32, shape: "[M, 2*K] if rows else [M, K]", optional: rows, kw_only: true}
    outputs:
      y: {dtype: float32, shape: "[*B, H]"}
    rules: [{require: "M % 2 == 0", message: even}]
  workloads:
    - {label: plain, dims: {B: [3], N: 64, M: 50}, passed: [half], dtypes: {T: float32}}
    - label: rows
      dims: {B: [], N: 6, M: 4, K: 3}
      params: {rows: true, pages: 2}
      dtypes: {T: float8_e4m3fn, host: int32}
    - {label: empty, dims: {B: [0], N: 2, M: 0}, params: {pages: 0}, dtypes: {T: bool}}
    - {label: impossible, dims: {B: [0], N: 2, M: 2}, params: {pages: -1}, dtypes: {T: float16}}
    - {label: silent, dims: {B: [0], N: 2, M: 2}}
  cost: {flops: N}
"""

MODULE = """\
import torch
from tileops.authoring import Op


class GatherFwdOp(Op):
    @staticmethod
    def decomposition(x, ids, small, host, half, last, next, *, pages, rows):
        return torch.zeros(*x.shape[:-1], x.shape[-1] // 2)

    def fill_workload(self, inputs):
        if self.pages == 4:
            inputs["small"].copy_(torch.arange(inputs["small"].numel()))
"""

_numbers = itertools.count()


@pytest.fixture
def gather(tmp_path):
    folder = tmp_path / f"gather{next(_numbers)}"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "manifest.yaml").write_text(dedent(MANIFEST))
    (folder / "ops.py").write_text(dedent(MODULE))
    report = Report()
    op_cls = load(scan(folder / "manifest.yaml", report)["GatherFwdOp"], report)
    assert report.faults == []
    yield op_cls
    sys.path.remove(str(tmp_path))


def workload(op_cls, label: str):
    return next(w for w in op_cls.entry.workloads if w.label == label)


def test_a_call_is_what_the_workload_says(gather):
    call = workload_inputs(gather, workload(gather, "plain"))
    assert repr(call.op) == "GatherFwdOp(pages=4, rows=False)"
    facts = {n: None if t is None else (t.dtype, tuple(t.shape)) for n, t in call.inputs.items()}
    assert facts == {
        "x": (torch.float32, (3, 64)),
        "ids": (torch.int32, (50,)),
        "small": (torch.uint8, (50,)),
        "host": (torch.int64, (3,)),
        "half": (torch.float32, (32,)),
        "last": None,
        "next": None,
    }
    assert list(call.inputs) == [item.name for item in gather.entry.inputs]
    assert len(call.args) == 6
    assert list(call.kwargs) == ["next"]
    assert call().shape == (3, 32)
    assert call.workload is workload(gather, "plain")


def test_conditions_decide_what_is_passed_whatever_their_order(gather):
    row = workload(gather, "rows")
    call = workload_inputs(gather, row)
    assert call.inputs["last"].shape == (4,)
    assert call.inputs["next"].shape == (4, 6)
    assert call.inputs["half"] is None
    assert call.inputs["host"].dtype == torch.int32
    assert call.inputs["x"].dtype == torch.float8_e4m3fn
    passed = presence_of(gather.entry, row, call.op._params)
    assert passed == {"x", "ids", "small", "host", "last", "next"}


def test_integers_lie_within_their_content(gather):
    seen: set[int] = set()
    for seed in range(20):
        call = workload_inputs(gather, workload(gather, "rows"), seed=seed)
        seen |= set(call.inputs["ids"].tolist())
        assert call.inputs["host"].min() >= 5
        assert call.inputs["small"].max() <= 8
    assert seen == set(range(-1, 8)), "both ends are reached"
    assert workload_inputs(gather, workload(gather, "empty")).inputs["ids"].shape == (0,)
    with pytest.raises(ManifestError, match="input ids: no value lies between -1 and -3") as caught:
        workload_inputs(gather, workload(gather, "impossible"))
    line = workload(gather, "impossible").line
    assert caught.value.where == f"{gather.entry.path}:{line}"


def test_the_class_may_fill_what_bounds_do_not_say(gather):
    call = workload_inputs(gather, workload(gather, "plain"))
    assert call.inputs["small"].tolist() == list(range(50))
    fake = workload_inputs(gather, workload(gather, "plain"), fake=FakeTensorMode())
    assert isinstance(fake.inputs["small"], FakeTensor)
    assert workload_inputs(gather, workload(gather, "plain"), "meta").inputs["small"].is_meta


def test_seeds(gather):
    row = workload(gather, "plain")
    one, again, other = (workload_inputs(gather, row, seed=seed).inputs for seed in (1, 1, 2))
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    workload_inputs(gather, row)
    assert torch.equal(torch.rand(1), before), "the global generator is left alone"
    for name in ("x", "ids", "half"):
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])
    assert abs(float(one["x"].mean())) < 0.5
    assert 0.7 < float(one["x"].std()) < 1.3
    flags = workload_inputs(gather, workload(gather, "empty")).inputs["x"]
    assert flags.dtype == torch.bool


def test_devices_and_fake_tensors(gather):
    """A card that is not there: fake tensors have its device, host inputs stay."""
    call = workload_inputs(gather, workload(gather, "plain"), "cuda", FakeTensorMode())
    assert call.inputs["x"].device.type == "cuda"
    assert call.inputs["host"].device.type == "cpu"
    call = workload_inputs(gather, workload(gather, "plain"), "meta", target="builtin")
    assert call.inputs["x"].device.type == "meta"
    assert call.inputs["host"].device.type == "cpu"
    assert call.op.target == "builtin"


def test_what_a_workload_must_say(gather):
    with pytest.raises(ManifestError, match=r"dtypes\.T: is missing; input x needs it"):
        workload_inputs(gather, workload(gather, "silent"))
    import dataclasses

    row = dataclasses.replace(workload(gather, "plain"), dims={"B": (2,), "M": 2})
    with pytest.raises(ManifestError, match=r"dims\.N: is missing; input x needs it"):
        workload_inputs(gather, row)
    row = dataclasses.replace(workload(gather, "plain"), params={"pages": "many"})
    with pytest.raises(CheckError, match="pages"):
        workload_inputs(gather, row)


def test_scaling_halves_the_largest_and_keeps_rules(gather):
    row = workload(gather, "plain")
    small = scaled(gather, row, 32)
    # x had 192 elements, and has 24; M may not be halved to 25.
    assert small.dims == {"B": (3,), "N": 8, "M": 50}
    assert (small.label, small.params, small.passed) == (row.label, row.params, row.passed)
    assert workload_inputs(gather, row, scale_to=32).workload == small
    assert scaled(gather, row, 10**6) is row


@pytest.mark.parametrize("family", families())
def test_in_tree_workloads_scale(family):
    """Every workload in the tree fits a test, and its op accepts it."""
    import importlib

    module = importlib.import_module(f"tileops.{family}")
    for name, entry in load_family(families()[family]).items():
        op_cls = getattr(module, name)
        for row in entry.workloads:
            call = workload_inputs(op_cls, row, scale_to=1 << 13, fake=FakeTensorMode())
            outputs = op_cls._signature(call.op, *call.inputs.values(), None)[0]
            sizes = [tensor.numel() for tensor in call.inputs.values() if tensor is not None]
            sizes += [torch.Size(spec[0]).numel() for spec in outputs if spec is not None]
            assert max(sizes) <= 1 << 13, (name, row.label, call.workload)


def test_sizes_that_must_agree_are_halved_together():
    from tileops.elementwise import AddFwdOp

    row = next(w for w in AddFwdOp.entry.workloads if w.dims["A"] == w.dims["B"])
    small = scaled(AddFwdOp, row, 4096)
    assert small.dims["A"] == small.dims["B"]
    assert all(size > 1 for size in small.dims["A"])


def test_parameters_that_make_shapes_are_halved_last():
    from tileops.norm import RMSNormFwdOp

    row = next(w for w in RMSNormFwdOp.entry.workloads if w.label == "long-row")
    assert scaled(RMSNormFwdOp, row, 1 << 18).params == {"normalized_shape": (262144,)}
    small = scaled(RMSNormFwdOp, row, 1 << 12)
    assert small.dims == {"B": (1,)}
    assert small.params == {"normalized_shape": (4096,)}
