"""The order of dispatch keys as told, beside the order in which kernels at those keys are called."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tileops.explain.collect.dispatch import read_dispatch
from tileops.explain.model import Graph, Node

LOG: list[tuple[str, frozenset[str]]] = []
"""Key of each kernel called, and the keys of the set that it was called with."""
KEYS = ("AutocastCPU", "AutogradCPU", "Functionalize", "CPU")


@pytest.fixture(scope="module")
def noted():
    """An operator with a kernel at each key, which notes its call and redispatches below its key."""
    library = torch.library.Library("explain_truth", "DEF")
    library.define("noted(Tensor x) -> Tensor")

    def kernel_at(name):
        key = torch._C._dispatch_key_parse(name)
        below = torch._C._dispatch_keyset_full_after(key)

        def kernel(keys, x):
            LOG.append(
                (
                    name,
                    frozenset(
                        each for each in KEYS if keys.has(torch._C._dispatch_key_parse(each))
                    ),
                )
            )
            overload = torch.ops.explain_truth.noted.default
            return x.clone() if name == "CPU" else overload.redispatch(keys & below, x)

        library.impl("noted", kernel, name, with_keyset=True)

    for name in KEYS:
        kernel_at(name)
    yield torch.ops.explain_truth.noted.default
    library._destroy()


def told():
    node = Node(
        "noted", "call_function", "torch.ops.explain_truth.noted.default", "x", device="cpu"
    )
    (found,) = read_dispatch([Graph("capture", "", [node])])
    return found


@pytest.mark.parametrize(
    ("mode", "wrap", "expected"),
    [
        (contextlib.nullcontext, torch.clone, ["AutogradCPU", "CPU"]),
        (contextlib.nullcontext, lambda x: x.clone().requires_grad_(), ["AutogradCPU", "CPU"]),
        (torch.no_grad, torch.clone, ["AutogradCPU", "CPU"]),
        (torch.inference_mode, torch.clone, ["CPU"]),
        (lambda: torch.autocast("cpu"), torch.clone, ["AutocastCPU", "AutogradCPU", "CPU"]),
        (
            contextlib.nullcontext,
            torch._to_functional_tensor,
            ["AutogradCPU", "Functionalize", "CPU"],
        ),
    ],
    ids=["plain", "gradient", "no_grad", "inference", "autocast", "functional"],
)
def test_order(noted, mode, wrap, expected):
    with mode():
        x = wrap(torch.ones(3))
        LOG.clear()
        noted(x)
        seen = told()
    steps = seen.functional if wrap is torch._to_functional_tensor else seen.visited
    assert [key for key, _ in LOG] == expected
    assert [step.key for step in steps if step.what == "kernel"] == expected
    # What a step excludes is gone from the set that the next kernel is called with.
    kernels = [step for step in steps if step.what == "kernel"]
    for step, (_, keys) in zip(kernels, LOG[1:], strict=False):
        assert not keys & set(step.excludes)
        assert set(expected[expected.index(step.key) + 1 :]) <= keys


def test_where_a_kernel_was_registered(noted):
    entries = {entry.key: entry.registered_at for entry in told().table}
    assert entries["AutogradCPU"].split(":")[0] == __file__
    node = Node("relu", "call_function", "torch.ops.aten.relu.default", "x", device="cpu")
    (relu,) = read_dispatch([Graph("capture", "", [node])])
    places = {entry.key: entry.registered_at for entry in relu.table}
    assert "build/aten/src/ATen/RegisterCPU" in places["CPU"]


def test_an_operator_of_no_table():
    node = Node("x", "call_function", "torch.ops.aten.there_is_no_such.default", "x", device="cpu")
    (found,) = read_dispatch([Graph("capture", "", [node])])
    assert (found.table, found.visited, found.functional) == ([], None, None)
