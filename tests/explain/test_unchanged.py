"""A session changes nothing, whatever goes on around it and in it."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

import tileops
from tests.explain import golden
from tests.explain import raises as raises_of
from tests.explain.test_golden import fresh  # noqa: F401
from tests.explain.test_session import LOGGERS, state_of_torch
from tileops.explain import torch_private as private


@pytest.fixture
def unchanged(tmp_path, monkeypatch):
    """Fails where the test leaves torch, the environment or the folder of temporary files changed. Sizes
    that compiled calls teach torch and numbers that the test draws itself are its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch._inductor.runtime.cache_dir_utils.cache_dir()  # torch sets its variable at first use,
    torch.compile(golden.helper, backend="eager")(torch.ones(2))  # and sorts its handlers out
    torch._dynamo.reset()
    before = state_of_torch()
    yield
    after = state_of_torch()
    for name in before.keys() - {"sizes", "random"}:
        assert after[name] == before[name], name
    left = [each.name for each in tmp_path.iterdir() if not each.name.startswith("torchinductor_")]
    assert left == []


def fails(gm, inputs):
    raise KeyboardInterrupt


def raises(x):
    y = torch.sin(x)
    print("before")
    raise ZeroDivisionError(y.shape)


def test_a_call_that_raises(unchanged):
    before = state_of_torch()
    with pytest.raises(ZeroDivisionError):
        tileops.explain(raises, torch.ones(3), backend="eager")
    assert private.compiled_times(raises.__code__) == 0
    after = state_of_torch()
    assert (after["sizes"], after["random"]) == (before["sizes"], before["random"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_block_that_is_interrupted(unchanged, error):
    def interrupted():
        torch.compile(golden.whole, backend="eager")(torch.ones(3))
        raise error

    with pytest.raises(error), tileops.explaining() as report:
        interrupted()
    assert len(report.graphs) == 1


def test_a_compiler_that_is_interrupted(unchanged):
    with pytest.raises(KeyboardInterrupt), tileops.explaining() as report:
        torch.compile(golden.whole, backend=fails)(torch.ones(3))
    assert len(report.graphs) == 1
    report = tileops.explain(golden.whole, torch.ones(3), backend="eager")  # torch has recovered
    assert len(report.graphs) == 1


def test_inside_each_other(unchanged):
    with tileops.explaining() as outer:
        torch.compile(golden.whole, backend="eager")(torch.ones(3))
        with tileops.explaining() as inner:
            torch.compile(golden.fuses, backend="eager")(torch.ones(3))
            within = tileops.explain(golden.prints, torch.ones(3), backend="eager")
        torch.compile(golden.unrolls, backend="eager")(torch.ones(3))
    names = [[one.function for one in report.compilations] for report in (within, inner, outer)]
    assert names[0] == ["prints", "prints"]
    assert names[1] == ["fuses", "prints", "prints"]
    assert names[2] == ["whole", "fuses", "prints", "prints", "unrolls"]


def test_sessions_that_overlap(unchanged):
    """One begins while another runs and ends after it."""
    first, second = tileops.explaining(), tileops.explaining()
    one = first.__enter__()
    other = second.__enter__()
    torch.compile(golden.whole, backend="eager")(torch.ones(3))
    first.__exit__(None, None, None)
    torch.compile(golden.fuses, backend="eager")(torch.ones(3))
    second.__exit__(None, None, None)
    assert [each.function for each in one.compilations] == ["whole"]
    assert [each.function for each in other.compilations] == ["whole", "fuses"]


def test_threads_at_the_same_time(unchanged):
    """Each explains a function of its own; none sees another's cache directory go."""
    functions = [golden.whole, golden.fuses, golden.unrolls, golden.prints]
    reports: dict[str, tileops.explain.model.Report] = {}

    def work(function):
        reports[function.__name__] = tileops.explain(function, torch.ones(3), backend="aot_eager")

    threads = [threading.Thread(target=work, args=(each,)) for each in functions]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(reports) == sorted(each.__name__ for each in functions)
    for function in functions:
        own = [
            one
            for one in reports[function.__name__].compilations
            if one.function == function.__name__
        ]
        assert own[0].capture is not None


def test_a_logger_that_somebody_resets():
    """Whoever sets up torch's loggers inside the block has the last word."""
    logger = logging.getLogger(private.TRACE_CALL)
    before = (logger.level, logger.propagate, list(logger.handlers))
    try:
        with tileops.explaining():
            logger.handlers[:] = [logging.NullHandler()]
            logger.setLevel(logging.WARNING)
            mine = list(logger.handlers)
        assert logger.handlers == mine
        assert logger.level == logging.WARNING
    finally:
        logger.level, logger.propagate, logger.handlers = before
        logger.manager._clear_cache()


def test_a_handler_that_somebody_adds(unchanged):
    logger, own = logging.getLogger(private.TRACE_CALL), logging.NullHandler()
    with tileops.explaining():
        logger.addHandler(own)
    assert own in logger.handlers
    logger.removeHandler(own)


def test_settings_of_the_user_are_read_and_kept(unchanged):
    """Also those that are patched for the time, and the numbers that random functions draw."""

    def draws(x):
        return x + torch.rand(3)

    torch.manual_seed(7)
    plain = torch.compile(draws, backend="aot_eager")(torch.zeros(3))
    follows = torch.rand(1)
    torch._dynamo.reset()
    torch.manual_seed(7)
    with torch._dynamo.config.patch(recompile_limit=3):
        report = tileops.explain(draws, torch.zeros(3), backend="aot_eager", measure=True)
        assert torch._dynamo.config.recompile_limit == 3
    assert torch.equal(report.result, plain)
    assert torch.equal(torch.rand(1), follows)
    torch.manual_seed(0)


def test_gradients_and_modes(unchanged):
    model = torch.nn.Linear(3, 3)
    model.weight.grad = torch.full((3, 3), 5.0)
    hooked = []
    model.weight.register_hook(hooked.append)
    with torch.no_grad():
        report = tileops.explain(model, torch.ones(2, 3), backend="aot_eager", training=True)
        assert not torch.is_grad_enabled()
    assert torch.equal(model.weight.grad, torch.full((3, 3), 5.0))
    assert model.bias.grad is None
    assert model.training
    assert report.result.requires_grad
    with torch.inference_mode():
        assert tileops.explain(model, torch.ones(2, 3), backend="eager").result.is_inference()


def test_user_caches_and_place_of_the_cache(unchanged, tmp_path):
    place = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with pytest.raises(ZeroDivisionError):
        tileops.explain(raises, torch.ones(3), backend="aot_eager")
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == place
    assert not list(Path(tmp_path).glob("tmp*"))


def test_loggers_are_named_once():
    assert len(set(LOGGERS)) == len(LOGGERS)


@pytest.mark.parametrize("target", [raises_of.Scaled, torch.nn.ReLU, 3])
def test_what_is_no_target(unchanged, target):
    """torch.compile would replace the class's ``__call__``, for good."""
    before = getattr(target, "__call__", None)  # noqa: B004
    with pytest.raises(TypeError, match="explain: target is .*; accepted is a function, a module"):
        tileops.explain(target, 2, backend="eager")
    assert getattr(target, "__call__", None) == before  # noqa: B004
