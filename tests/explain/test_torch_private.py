"""Each adapter to what torch keeps private, on the torch that is installed."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain.test_golden import fresh  # noqa: F401
from tileops.explain import torch_private as private


def records(function, *args, names, backend="eager", **options):
    seen = {name: [] for name in names}
    with private.tapped({name: seen[name].append for name in names}):
        torch.compile(function, backend=backend, **options)(*args)
    return seen


def test_structured_trace():
    seen = records(golden.whole, torch.randn(4), names=[private.TRACE])[private.TRACE]
    kinds = {key for record in seen for key in record.metadata}
    assert {"dynamo_start", "dynamo_output_graph", "dynamo_cpp_guards_str"} <= kinds
    assert {"frame_id", "frame_compile_id", "attempt"} <= kinds


def test_trace_of_source_and_calls():
    names = [private.TRACE_SOURCE, private.TRACE_CALL]
    seen = records(golden.unrolls, torch.randn(4), names=names)
    lines = [record.getMessage() for record in seen[private.TRACE_SOURCE]]
    assert any(line.startswith(f"TRACE starts_line {golden.__file__}:") for line in lines)
    calls = [record.getMessage() for record in seen[private.TRACE_CALL]]
    assert all(call.startswith("TRACE inlined call helper from ") for call in calls)


def test_scheduler():
    names = [private.FUSION, private.POST_FUSION]
    inputs = torch.randn(8, 8), torch.randn(8, 8)
    with private.untouched(cpu=True):
        seen = records(golden.interrupted, *inputs, names=names, backend="inductor")
    assert any("candidates" in record.getMessage() for record in seen[private.FUSION])
    (after,) = seen[private.POST_FUSION]
    assert after.getMessage().startswith("AFTER FUSION\n")


def test_cuda_graphs():
    seen = records(golden.whole, torch.randn(4), names=[private.CUDAGRAPHS], backend="cudagraphs")
    assert "skipping cudagraphs" in seen[private.CUDAGRAPHS][0].getMessage()


def test_rounds():
    """Of two sessions that overlap each hears all, and Dynamo's tables are as they were."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    before = list(InstructionTranslator.dispatch_table)
    first, second = [], []
    end_first = private.on_round(lambda code, head: first.append((code.co_name, head.opname)))
    end_second = private.on_round(lambda code, head: second.append(code.co_name))
    end_first()
    torch.compile(golden.unrolls, backend="eager")(torch.randn(4))
    assert (first, second) == ([], ["unrolls"] * 3)
    end_second()
    assert InstructionTranslator.dispatch_table == before
    torch._dynamo.reset()
    torch.compile(golden.unrolls, backend="eager")(torch.randn(4))
    assert len(second) == 3


def test_compile_place():
    places = []

    def backend(gm, inputs):
        places.append(private.compile_place())
        return gm

    assert private.compile_place() is None
    torch.compile(golden.whole, backend=backend)(torch.randn(4))
    assert places == [("0/0", 0)]


def test_recompiled_frame():
    found = []

    def take(record):
        if record.metadata.get("artifact", {}).get("name") == "recompile_reasons":
            found.append(private.recompiled_frame())

    compiled = torch.compile(golden.scaled, backend="eager", dynamic=False)
    with private.tapped({private.TRACE: take}):
        compiled(torch.randn(4), 2)
        compiled(torch.randn(4), 3)
    ((names, module, code),) = found
    assert names["factor"] == 3
    assert module is golden.scaled.__globals__
    assert code is golden.scaled.__code__
    assert private.recompiled_frame() is None


def test_global_state():
    """By the names that torch's guard gives, for each thing that it names."""
    assert private.global_state("grad_mode") is True
    with torch.no_grad(), torch.autocast("cpu"):
        assert private.global_state("grad_mode") is False
        assert private.global_state("autocast(cpu)_enabled") is True
    assert private.global_state("autocast(cpu)_enabled") is False
    assert private.global_state("default_dtype") is torch.float32
    assert private.global_state("something_new") is None


def test_differentiated():
    x = torch.ones(2, requires_grad=True)
    older = (x * 2).grad_fn
    now = private.differentiated_so_far()
    newer = (x * 2).grad_fn
    assert private.differentiated(None) < private.differentiated(older) < now
    assert now < private.differentiated(newer)


def test_limit():
    assert private.limit() == torch._dynamo.config.recompile_limit


def test_computed_table():
    assert "CPU: registered at" in private.computed_table("aten::relu")
    assert private.computed_table("aten::there_is_no_such") is None


def test_keys_and_redispatch():
    def names(**more):
        return [key for key, _ in private.redispatch(private.key_set("cpu", **more))]

    assert names() == ["AutogradCPU", "ADInplaceOrView", "CPU"]
    assert names(functional=True) == ["AutogradCPU", "ADInplaceOrView", "Functionalize", "CPU"]
    with torch.autocast("cpu"):
        assert names()[0] == "AutocastCPU"
    with torch.inference_mode():
        assert names() == ["ADInplaceOrView", "CPU"]  # of a normal tensor: it can be written here


def test_untouched_forgets_code():
    def function(x):
        return x + 1

    with private.untouched(cpu=False):
        torch.compile(function, backend="eager")(torch.randn(4))
        assert private.compiled_times(function.__code__) == 1
    assert private.compiled_times(function.__code__) == 0


def test_a_tap_that_fails_says_so_and_ends_nothing(capsys):
    def take(record):
        raise ValueError("not understood")

    with private.tapped({private.TRACE_SOURCE: take}):
        logging.getLogger(private.TRACE_SOURCE).debug("hello")
    assert "not understood" in capsys.readouterr().err


def test_torch_files():
    assert private.is_torch_file(torch.nn.__file__)
    assert not private.is_torch_file(golden.__file__)
    assert not private.is_torch_file(pytest.__file__)


def test_node_stacks():
    found = []

    def take(record):
        if "dynamo_output_graph" in record.metadata:
            found.extend(private.node_stacks())

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with private.tapped({private.TRACE: take}):
        torch.compile(lambda x: model(x) + 1, backend="eager")(torch.randn(2, 4))
    (stacks,) = found
    assert len(stacks) >= 2  # the layer and the addition
    assert all(__file__ in stack for stack in stacks.values())


def test_autotune():
    from torch._inductor.select_algorithm import get_algorithm_selector_cache

    class Choice:
        name = "triton_mm_3"

    seen = []
    cache = get_algorithm_selector_cache()
    before = list(cache.feedback_saver_fns)
    end = private.on_autotune(lambda name, times: seen.append((name, times)))
    for saver in cache.feedback_saver_fns[len(before) :]:
        saver({Choice(): 0.5}, "mm", [], [], dict, {})
    end()
    assert seen == [("mm", {"triton_mm_3": 0.5})]
    assert cache.feedback_saver_fns == before


# ---- a torch that lacks what an adapter names -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compile_place", ()),
        ("limit", ()),
        ("computed_table", ("aten::relu",)),
        ("key_set", ("cpu",)),
        ("redispatch", (None,)),
        ("node_stacks", ()),
        ("memory_gbps", ()),
        ("_is_profiling", ()),
    ],
)
def test_what_is_lacking_is_unknown(name, arguments, monkeypatch):
    bare = types.SimpleNamespace(
        __version__="2.99", cuda=types.SimpleNamespace(is_available=lambda: True)
    )
    monkeypatch.setattr(private, "torch", bare)
    monkeypatch.setattr(private, "missing", {})
    assert getattr(private, name)(*arguments) is None
    ((what, why),) = private.missing.items()
    assert what
    assert why.startswith("torch 2.99: ")


def test_modules_that_are_lacking(monkeypatch):
    monkeypatch.setattr(private, "missing", {})
    monkeypatch.setitem(sys.modules, "torch._inductor.select_algorithm", None)
    assert private.on_autotune(lambda *_: None) is None
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", types.ModuleType("codecache"))
    assert private.generated_names("x.py") is None
    assert private.library("x.py", "kernel") is None
    assert len(private.missing) == 2


def test_a_report_says_what_is_lacking(monkeypatch):
    monkeypatch.setattr(private, "missing", {})
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    monkeypatch.delattr(torch._C, "_dispatch_dump_table")
    report = tileops.explain(golden.whole, torch.randn(4), backend="aot_eager", measure=True)
    assert all(each.visited is None and each.table == [] for each in report.dispatch)
    said = {each.what: each.why for each in report.unknown}
    assert any("a line for each dispatch key" in what for what in said)
    assert all(
        "_dispatch_dump_table" in why for what, why in said.items() if "a line for each" in what
    )
    assert report.compilations[0].capture is not None


# ---- kernels on a GPU ----------------------------------------------------------------------------


def module_of(path, **names):
    made = types.ModuleType("generated")
    made.__file__ = path
    vars(made).update(names)
    return made


def test_launched_with(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    config = types.SimpleNamespace(kwargs={"XBLOCK": 1024}, num_warps=8, num_stages=3)
    launcher = types.SimpleNamespace(config=config, n_regs=32, n_spills=0, shared=None)
    one = types.SimpleNamespace(launchers=[launcher])
    several = types.SimpleNamespace(launchers=[launcher, launcher])  # nothing is chosen yet
    module = module_of("/x.py", one=one, several=several)
    monkeypatch.setattr(PyCodeCache, "modules", [module])
    expected = {"XBLOCK": 1024, "num_warps": 8, "num_stages": 3, "n_regs": 32, "n_spills": 0}
    assert private.launched_with("/x.py", "one") == expected
    assert private.launched_with("/x.py", "several") == {}
    assert private.launched_with("/x.py", "none") == {}
    assert private.launched_with("/y.py", "one") == {}


def test_memory_gbps(monkeypatch):
    """An H200's figures: 3.201 GHz on 6144 lines, twice a cycle, are 4.9 TB/s."""
    facts = types.SimpleNamespace(memory_clock_rate=3_201_000, memory_bus_width=6144)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: facts)
    assert private.memory_gbps() == pytest.approx(4916.7, abs=0.1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: types.SimpleNamespace())
    assert private.memory_gbps() is None


def test_the_profilers_own_work_launches_nothing(monkeypatch):
    """On a card it may take a buffer within a launch, and counts the launch's kernel as its own too."""

    def event(name):
        return SimpleNamespace(
            name=name, kernels=[SimpleNamespace(name="k", duration=5.0)], thread=1,
            time_range=SimpleNamespace(start=0.0, end=9.0),
            device_type=SimpleNamespace(name="CPU"),
        )  # fmt: skip

    class Profiler(contextlib.nullcontext):
        function_events = (event("aten::copy_"), event("Activity Buffer Request"))

    monkeypatch.setattr(torch.autograd.profiler, "profile", lambda **_: Profiler())
    with private.profiled() as seen:
        pass
    assert [span.kernels for span in seen.host] == [(("k", 5.0),), ()]


def test_profiled():
    with private.profiled() as seen, private.span("mine"):
        torch.ones(3).sum().item()
    names = {each.name for each in seen.host}
    assert {"mine", "aten::sum", "aten::_local_scalar_dense"} <= names
    (mine,) = [each for each in seen.host if each.name == "mine"]
    (own,) = [each for each in seen.host if each.name == "aten::sum"]
    assert mine.start <= own.start
    assert own.end <= mine.end
    assert seen.why is None
    assert seen.device == []


def test_plain_of():
    model = torch.nn.Linear(2, 2)
    assert private.plain_of(torch.compile(model, backend="eager")) is model
    assert private.plain_of(torch.compile(golden.whole, backend="eager")) is golden.whole
    assert private.plain_of(golden.whole) is golden.whole
    report = tileops.explain(
        torch.compile(golden.whole, backend="eager"), torch.ones(2), backend="eager"
    )
    assert (report.title, len(report.graphs)) == ("whole", 1)
