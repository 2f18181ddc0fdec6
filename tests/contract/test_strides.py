"""Convention 2, for every op: any strides go in, contiguous outputs come out, what is written keeps
its memory and layout, and the fake says so beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.compile_contract import CASES, Call, exact_call
from tests.contract.fresh import fresh
from tests.contract.strides import LAYOUTS, arrange, check_call, fake_of, layout_of, own_outputs

BATCH = 6


def arranged(name: str, layout: str) -> Call | None:
    """The case with its inputs in ``layout`` and the results that these inputs give."""
    call = CASES[name].make(BATCH)
    return exact_call(call.op, call.inputs) if arrange(call, layout) else None


def check_layouts(name: str, backend: str) -> None:
    done = 0
    for layout in LAYOUTS:
        first, second = arranged(name, layout), arranged(name, layout)
        if first is None or second is None:
            continue
        done += 1
        mode = FakeTensorMode()
        fake = Call(first.op, fake_of(mode, first.inputs), first.returns)
        before = {n: layout_of(t) for n, t in fake.inputs.items() if t is not None}
        with mode:
            promised = own_outputs(fake, fake.run())
        assert {n: layout_of(t) for n, t in fake.inputs.items() if t is not None} == before
        assert check_call(first, first.op) == promised, layout
        torch._dynamo.reset()
        compiled = torch.compile(second.op, backend=backend, fullgraph=True)
        assert check_call(second, compiled) == promised, layout
    assert done >= 2


@pytest.mark.parametrize("name", CASES)
@fresh
def test_strides(name):
    check_layouts(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@fresh
def test_strides_under_inductor(name):
    check_layouts(name, "inductor")


@pytest.mark.parametrize("layout", ["transposed", "sliced", "channels_last"])
@fresh
def test_a_kernel_is_given_contiguous_tensors(layout):
    """Those that it writes too: what it wrote is copied back."""
    import tileops
    from tileops.backend import register_kernel_builder

    served = []

    def builder_for(call: Call) -> Any:
        def kernel(*tensors: torch.Tensor | None) -> Any:
            assert all(t is None or t.is_contiguous() for t in tensors)
            served.append(call.op)
            return call.foreign_result(tensors)

        return lambda *specs, **params: kernel

    for name, case in CASES.items():
        call = arranged(name, layout)
        if call is None:
            continue
        register_kernel_builder("strict", case.op.split(".")[1], builder_for(call))
        with tileops.use_target("strict"):
            check_call(call, call.op)
        assert served[-1] is call.op
    assert len(served) >= 5


@fresh
def test_a_tensor_that_must_be_contiguous_is_refused_by_name():
    from tileops import CheckError

    for case in CASES.values():
        call = case.make(BATCH)
        for item in (*call.op.entry.inputs, None):
            name = "out" if item is None else item.name
            tensor = call.inputs.get(name)
            must = item is None or item.contiguous
            if tensor is None or not must or tensor.ndim < 2:
                continue
            call.inputs[name] = LAYOUTS["sliced"](tensor)
            with pytest.raises(CheckError, match=f"'{name}'.*contiguous"):
                call.run()
            call.inputs[name] = tensor


@fresh
def test_a_written_tensor_that_overlaps_itself_is_refused():
    from tileops import CheckError

    for case in CASES.values():
        call = case.make(BATCH)
        must = {item.name for item in call.op.entry.inputs if item.contiguous} | {"out"}
        for name in set(call.written) - must:
            tensor = call.inputs[name]
            call.inputs[name] = LAYOUTS["expanded"](tensor)
            for function in (call.op, torch.compile(call.op, backend="aot_eager")):
                with pytest.raises(
                    (CheckError, torch._dynamo.exc.TorchRuntimeError), match="overlap"
                ):
                    call.run(function)
            call.inputs[name] = tensor
