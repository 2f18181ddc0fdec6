"""Targets that other distributions bring: found by entry point, chosen per call, isolated when
they are at fault.

Every distribution here is installed by pip, and every body runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import threading
import warnings

import pytest
import torch

from tests.contract.children import (
    BACKENDS,
    BROKEN,
    CPU,
    EPS,
    close,
    control,
    in_child,
    refused,
    rms,
    warned,
)

# ---- who decides -------------------------------------------------------------------------------


def _explicit_target_in_first_compiled_call(backend: str) -> None:
    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS, target="testcpu")
    plain = RMSNormFwdOp(8, EPS)
    compiled = torch.compile(lambda x, w: (op(x, w), plain(x, w)), backend=backend, fullgraph=True)
    marked, unmarked = compiled(x, weight)
    close(marked, expected + 1)
    close(unmarked, expected)
    assert (op.serving_target, plain.serving_target) == ("testcpu", "builtin")
    assert op.last_call.decided_by == "op"
    assert control().builds == {"RMSNormFwdOp": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_explicit_target_holds_in_the_first_compiled_call(backend):
    in_child(_explicit_target_in_first_compiled_call, backend)


def _explicit_target_wins() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    tileops.set_default_target("testcpu")
    with tileops.use_target("testcpu"):
        close(RMSNormFwdOp(8, EPS, target=tileops.BUILTIN)(x, weight), expected)
        close(RMSNormFwdOp(8, EPS)(x, weight), expected + 1)
    with tileops.use_target(tileops.BUILTIN):
        close(RMSNormFwdOp(8, EPS)(x, weight), expected)
        close(RMSNormFwdOp(8, EPS, target="testcpu")(x, weight), expected + 1)


def test_an_explicit_target_wins_over_context_and_default():
    in_child(_explicit_target_wins)


def _context_nests() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS)
    with tileops.use_target("testcpu"):
        close(op(x, weight), expected + 1)
        with tileops.use_target(tileops.BUILTIN):
            close(op(x, weight), expected)
        close(op(x, weight), expected + 1)
        with pytest.raises(KeyError), tileops.use_target(tileops.BUILTIN):
            raise KeyError
        close(op(x, weight), expected + 1)
        refused(tileops.UnknownTargetError, lambda: tileops.use_target("nobody").__enter__())
        close(op(x, weight), expected + 1)
        assert op.last_call.decided_by == "use_target"
    close(op(x, weight), expected)
    close(tileops.use_target("testcpu")(op)(x, weight), expected + 1)  # as a decorator
    assert op.serving_target == "testcpu"


def test_the_context_nests_and_survives_exceptions():
    in_child(_context_nests)


def _context_is_of_a_thread() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS)
    both = threading.Barrier(2)
    results = {}

    def work(target: str) -> None:
        with tileops.use_target(target):
            for _ in range(20):
                both.wait(60)
                results.setdefault(target, []).append(op(x, weight))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("testcpu", "builtin")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(results[name]) for name in ("testcpu", "builtin")] == [20, 20]
    for result in results["testcpu"]:
        close(result, expected + 1)
    for result in results["builtin"]:
        close(result, expected)
    close(op(x, weight), expected)


def test_the_context_belongs_to_a_thread():
    in_child(_context_is_of_a_thread)


def _context_is_of_a_task() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS)

    async def work(target: str, offset: int) -> None:
        with tileops.use_target(target):
            for _ in range(5):
                close(op(x, weight), expected + offset)
                await asyncio.sleep(0)

    async def run() -> None:
        with tileops.use_target("testcpu"):
            inherits = asyncio.create_task(inside())
        await asyncio.gather(work("testcpu", 1), work("builtin", 0), inherits)
        close(op(x, weight), expected)

    async def inside() -> None:
        close(op(x, weight), expected + 1)

    asyncio.run(run())


def test_the_context_belongs_to_an_asyncio_task():
    in_child(_context_is_of_a_task)


def _process_default() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS)
    close(op(x, weight), expected)
    tileops.set_default_target("testcpu")
    assert tileops.default_target() == "testcpu"
    results = []
    thread = threading.Thread(target=lambda: results.append(op(x, weight)))
    thread.start()
    thread.join()
    close(results[0], expected + 1)
    assert op.last_call.decided_by == "default"
    tileops.set_default_target(None)
    assert tileops.default_target() is None
    close(op(x, weight), expected)
    refused(tileops.UnknownTargetError, lambda: tileops.set_default_target("nobody"))
    close(op(x, weight), expected)
    tileops.set_default_target("testcpu")
    close(op(x, weight), expected + 1)
    # What was built stays built: the default changed, not the target.
    assert control().builds == {"RMSNormFwdOp": 1}


def test_the_process_default():
    in_child(_process_default)


def _environment_sets_the_default() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    assert tileops.default_target() == "testcpu"
    op = RMSNormFwdOp(8, EPS)
    close(op(x, weight), expected + 1)
    with tileops.use_target(tileops.BUILTIN):
        close(op(x, weight), expected)
    tileops.set_default_target(None)
    close(op(x, weight), expected)


def _environment_names_nobody() -> str:
    import tileops

    RMSNormFwdOp, x, weight, _ = rms()
    return refused(tileops.UnknownTargetError, lambda: RMSNormFwdOp(8, EPS)(x, weight))


def test_the_environment_sets_the_default():
    in_child(_environment_sets_the_default, env={"TILEOPS_TARGET": "testcpu"})
    text = in_child(_environment_names_nobody, env={"TILEOPS_TARGET": "nobody"})
    assert "'nobody'" in text
    assert "TILEOPS_TARGET" in text


def _detector() -> None:
    import tileops

    RMSNormFwdOp, x, weight, expected = rms()
    control().behaviour = "mark"
    op = RMSNormFwdOp(8, EPS)
    close(op(x, weight), expected + 1)
    assert (op.serving_target, op.last_call.decided_by) == ("testcpu", "detector")
    from tileops.reduction import SoftmaxFwdOp

    with warned() as texts:  # nobody asked by name, so nobody is warned
        softmax = SoftmaxFwdOp(-1)
        close(softmax(x), x.softmax(-1))
    assert texts == []
    assert softmax.serving_target == "builtin"
    with tileops.use_target(tileops.BUILTIN):
        close(op(x, weight), expected)


def test_one_detector_makes_its_target_the_default():
    in_child(_detector, env={"TESTCPU_DETECT": "1"})


def _two_detectors() -> None:
    import tileops
    from tileops.backend import register_detector

    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS)
    close(op(x, weight), expected)
    assert op.serving_target == "testcpu"
    register_detector("other", lambda device: device.type == "cpu")
    text = refused(tileops.AmbiguousTargetError, lambda: op(x, weight))
    assert "'other', 'testcpu'" in text
    assert "device cpu" in text
    with tileops.use_target("testcpu"):
        close(op(x, weight), expected)
    close(RMSNormFwdOp(8, EPS, target="testcpu")(x, weight), expected)
    tileops.set_default_target("testcpu")
    close(op(x, weight), expected)


def test_two_detectors_of_one_device_are_ambiguous():
    in_child(_two_detectors, env={"TESTCPU_DETECT": "1"})


def _broken_detector() -> None:
    import tileops
    from tileops.backend import register_detector

    RMSNormFwdOp, x, weight, expected = rms()

    def claims(device: torch.device) -> bool:
        raise OSError("no driver")

    register_detector("other", claims)
    with warned() as texts:
        close(RMSNormFwdOp(8, EPS)(x, weight), expected)
        close(RMSNormFwdOp(8, EPS)(x[:2], weight), expected[:2])
    assert len(texts) == 1
    assert "'other'" in texts[0]
    assert "no driver" in texts[0]
    assert "no driver" in tileops.load_failures()["other"]


def test_a_detector_that_raises_is_isolated():
    in_child(_broken_detector)


# ---- who is known ------------------------------------------------------------------------------


def _unknown_target() -> tuple[str, ...]:
    import tileops

    RMSNormFwdOp = rms()[0]
    with warned() as texts:
        known = tileops.registered_targets()
        again = tileops.registered_targets()
    assert known == again == ("builtin", "testcpu")
    assert len(texts) == 1, texts
    with warned() as later:
        messages = (
            refused(tileops.UnknownTargetError, lambda: RMSNormFwdOp(8, target="nobody")),
            refused(
                tileops.UnknownTargetError, lambda: tileops.use_target("testbroken").__enter__()
            ),
            refused(tileops.UnknownTargetError, lambda: tileops.set_default_target("testbroken")),
        )
    assert later == []
    assert list(tileops.load_failures()) == ["testbroken"]
    close(rms()[0](8, EPS, target="testcpu")(*rms()[1:3]), rms()[3])  # the others are unharmed
    return texts[0], *messages


def test_a_broken_plugin_is_isolated_and_named():
    warning, *messages = in_child(_unknown_target, installed=(CPU, BROKEN))
    assert "'testbroken'" in warning
    assert "'tileops-target-testbroken'" in warning
    for text in (warning, *messages):
        assert "OSError: libtestbroken.so.1: cannot open" in text
    for text in messages:
        assert "builtin, testcpu" in text
        assert "failed to load" in text
    assert "'nobody'" in messages[0]


def _fails_at_load() -> str:
    import tileops

    with warned() as texts:
        assert tileops.registered_targets() == ("builtin",)
    assert len(texts) == 1
    assert "'testcpu'" in texts[0]
    RMSNormFwdOp, x, weight, expected = rms()
    close(RMSNormFwdOp(8, EPS)(x, weight), expected)
    return refused(tileops.UnknownTargetError, lambda: tileops.use_target("testcpu").__enter__())


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("no licence", "RuntimeError: no licence"), ("exit", "SystemExit: 3")],
)
def test_a_plugin_that_fails_at_load(reason, shown):
    text = in_child(_fails_at_load, env={"TESTCPU_FAIL_AT_LOAD": reason})
    assert f"tileops-target-testcpu: {shown}" in text


def _warnings_are_errors() -> None:
    import tileops

    warnings.simplefilter("error")
    assert "testbroken" in refused(RuntimeWarning, tileops.registered_targets)
    assert tileops.registered_targets() == ("builtin", "testcpu")


def test_the_report_of_a_broken_plugin_may_be_an_error():
    in_child(_warnings_are_errors, installed=(CPU, BROKEN))


def _registering() -> None:
    import tileops
    from tileops.backend import BackendError, register_kernel_builder

    RMSNormFwdOp, x, weight, expected = rms()
    op = RMSNormFwdOp(8, EPS, target="testcpu")
    close(op(x, weight), expected)
    register_kernel_builder("testcpu", "RMSNormFwdOp", lambda *specs, **params: lambda x, w: x * 0)
    close(op(x, weight), expected * 0)  # plans and builds of the old builder are gone
    for name in ("builtin", "two words", 3):
        refused(BackendError, lambda name=name: register_kernel_builder(name, "AddFwdOp", print))
    refused(BackendError, lambda: register_kernel_builder("testcpu", "AddFwdOp", "no callable"))
    assert tileops.registered_targets() == ("builtin", "testcpu")


def test_a_builder_registered_later_replaces_the_first():
    in_child(_registering)
