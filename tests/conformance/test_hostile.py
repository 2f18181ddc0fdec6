"""Degenerate and hostile calls of every op, made from its entry: right, or refused by one class.

A refusal is a ``CheckError`` that names op, argument, what was given and what is accepted; nothing
is written; the op works afterwards; a compiled call refuses in the same words.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from tests.cases import distinct_classes, op_classes, workload_call
from tests.oracle import EXACT, call, check, same_bits, strided
from tileops import CheckError, Op, UnknownTargetError
from tileops.engine.boundary import instances
from tileops.engine.errors import ImmutableOpError, ManifestError
from tileops.engine.manifest.entry import MISSING
from tileops.engine.settings import settings

NAMES = sorted(op_classes())
CALLED = [name for name in sorted(distinct_classes()) if op_classes()[name].entry.inputs]
INPUTS = [
    pytest.param(name, item.name, id=f"{name}-{item.name}")
    for name in CALLED
    for item in op_classes()[name].entry.inputs
]
CONTENT = [
    pytest.param(name, item.name, id=f"{name}-{item.name}")
    for name in CALLED
    for item in op_classes()[name].entry.inputs
    if item.content is not None
]


def test_every_class_has_an_oracle():
    assert set(EXACT) == set(NAMES)


def sample(name, seed, most=256, passing=None):
    """A valid call, as its first workload that passes ``passing`` has it."""
    cls = op_classes()[name]
    for workload in cls.entry.workloads:
        made = workload_call(name, workload, seed, most)
        if passing is None or made.inputs[passing] is not None:
            return made.op, dict(made.inputs)
    item = cls.entry.input(passing)
    assert item.passed_when is not None, f"{name}: no workload passes {passing}"
    pytest.skip(f"no workload passes {passing}")


def refusal(op, inputs, argument=None, **more):
    """The error of a call that must be refused; nothing is written, and the op works afterwards."""
    before = {n: t.clone() for n, t in inputs.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(CheckError) as caught:
        call(op, inputs, **more)
    error = caught.value
    # What only a stage can know, its refusal names.
    assert error.op in (type(op).__name__, *op.entry.composition.values())
    names = [*(item.name for item in op.entry.inputs), "out", *op._params]
    assert error.argument in names, str(error)
    if argument is not None:
        assert error.argument == argument, str(error)
    for part in (error.op, f"'{error.argument}'", "given ", "accepted: "):
        assert part in str(error)
    for name, tensor in before.items():
        assert tensor.is_meta or same_bits(inputs[name], tensor), f"{name} was written"
    return error


def compiled_refusal(op, inputs, error, *, fullgraph=True, **more):
    """The same call, compiled, is refused in the same words."""
    torch._dynamo.reset()

    def function(inputs, more):
        return call(op, inputs, **more)

    with pytest.raises(Exception) as caught:
        torch.compile(function, backend="eager", fullgraph=fullgraph)(inputs, more)
    words = f"argument '{error.argument}': given {error.given}"
    assert words in str(caught.value).replace("\\'", "'"), (words, str(caught.value)[:2000])


def right_or_refused(op, inputs):
    try:
        works(op, inputs)
    except CheckError as error:
        assert error.op == type(op).__name__


def works(op, inputs):
    check(op, inputs, both_paths=False)


# ---- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_what_is_no_tensor(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    item, good = op.entry.input(argument), inputs[argument]
    odd = [[1.0, 2.0], [good, good], 1.0, 3, "x", object(), torch.float32, {"a": good}, (good,)]
    if good.dtype is not torch.bfloat16 and good.dtype.itemsize > 1:
        odd.append(good.numpy())
    odd.append(np.float32(1.0))
    for value in odd:
        error = refusal(op, {**inputs, argument: value}, argument)
        assert type(value).__name__ in error.given
        assert "a torch.Tensor" in error.accepted
        assert ("or None" in error.accepted) == item.optional
    value = random.choice(odd[:3])
    if not item.optional and random.random() < 0.5:
        value = None
        assert refusal(op, {**inputs, argument: None}, argument).given == "nothing"
    error = refusal(op, {**inputs, argument: value}, argument)
    compiled_refusal(op, {**inputs, argument: value}, error)
    works(op, inputs)


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_dtypes_that_are_not_accepted(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    no_number = (
        torch.uint32 if op.entry.may_be_complex(op.entry.input(argument)) else torch.complex64
    )
    for dtype in (no_number, torch.uint16):
        changed = {**inputs, argument: torch.zeros_like(inputs[argument], dtype=dtype)}
        error = refusal(op, changed, argument)
        assert str(dtype).removeprefix("torch.") in error.given
    compiled_refusal(op, changed, error)
    other = torch.float64 if inputs[argument].dtype is not torch.float64 else torch.float32
    right_or_refused(op, {**inputs, argument: inputs[argument].to(other)})
    works(op, inputs)


@pytest.mark.filterwarnings("ignore:.*(prototype|beta) s:UserWarning")
@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_layouts_that_are_not_strided(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    tensor = inputs[argument]
    odd = [torch.zeros(tensor.shape, dtype=torch.float32).to_sparse().to(tensor.dtype)]
    if tensor.ndim == 2 and tensor.dtype is torch.float32:
        odd += [tensor.to_sparse_csr(), tensor.to_mkldnn()]
    if tensor.ndim:
        odd.append(torch.nested.nested_tensor([tensor, tensor]))
        odd.append(torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged))
    for value in odd:
        with pytest.raises(CheckError) as caught:
            call(op, {**inputs, argument: value})
        assert caught.value.argument == argument, str(caught.value)
        assert caught.value.op == name
    works(op, inputs)


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_tensors_of_several_devices(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    if sum(t is not None for t in inputs.values()) == 1:
        found = call(op, {argument: inputs[argument].to("meta")})
        results = found if isinstance(found, tuple) else (found,)
        assert {result.device.type for result in results} == {"meta"}
        return
    changed = {**inputs, argument: inputs[argument].to("meta")}
    error = refusal(op, changed)
    assert "meta" in str(error)
    compiled_refusal(op, changed, error)
    works(op, inputs)


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_ranks(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    good = inputs[argument]
    refused = []
    for value in (good[None], good[None, None], good[0] if good.ndim else good, good.flatten()[0]):
        changed = {**inputs, argument: value}
        if _rank_is_fixed(op, argument) and value.ndim != good.ndim:
            refused.append((changed, refusal(op, changed)))
        else:
            right_or_refused(op, changed)
    if refused:
        compiled_refusal(op, *random.choice(refused))
    works(op, inputs)


def _rank_is_fixed(op, argument):
    return not any(
        isinstance(n, ast.Starred) for n in ast.walk(op.entry.input(argument).shape.tree)
    )


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_missing_arguments(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    item = op.entry.input(argument)
    rest = {n: t for n, t in inputs.items() if n != argument and t is not None}
    if item.optional and item.passed_when is None:
        try:
            op(**rest)
        except CheckError as error:  # what depends on it, or what a rule asks for
            assert error.op == name
        return
    with pytest.raises(CheckError) as caught:
        op(**rest)
    assert caught.value.op == name
    compiled = torch.compile(lambda **given: op(**given), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=f"argument .{caught.value.argument}.*: given ") as again:
        compiled(**rest)
    assert "nothing" in str(again.value) or item.optional
    works(op, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_superfluous_arguments(name, seed):
    op, inputs = sample(name, seed)
    given = [inputs[i.name] for i in op.entry.positional_inputs]
    named = {i.name: inputs[i.name] for i in op.entry.inputs if i.kw_only}
    extra = torch.ones(1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **k: op(*a, **k), backend="eager", fullgraph=True)
    for target in (op, compiled):
        with pytest.raises(Exception, match=f"{name}: argument .*positional {len(given) + 1}"):
            target(*given, extra, **named)
        with pytest.raises(Exception, match=f"{name}: argument .*no_such_argument"):
            target(*given, **named, no_such_argument=extra)
        if not op.entry.has_out:
            with pytest.raises(Exception, match=f"{name}: argument .*out.*: given Tensor"):
                target(*given, **named, out=extra)
    with pytest.raises(CheckError):
        op(*given, extra, **named)
    with pytest.raises(CheckError):
        op(*given, **named, no_such_argument=extra)
    if op.entry.inputs:
        works(op, inputs)


@pytest.mark.parametrize("name", [n for n in CALLED if op_classes()[n].entry.has_out])
def test_out_buffers(name, seed):
    op, inputs = sample(name, seed)
    good = call(op, inputs)
    bad = [
        [1.0],
        good.double(),
        good[None],
        good.flatten(),
        good.to("meta"),
        good.to_sparse(),
        torch.cat((good, good), -1)[..., ::2],
        good.new_empty(good.shape[:-1] + (good.shape[-1] + 1,)),
        good.clone().requires_grad_(),
    ]
    for out in bad:
        error = refusal(op, inputs, "out", out=out)
        if isinstance(out, torch.Tensor) and out.layout is torch.strided and not out.requires_grad:
            compiled_refusal(op, inputs, error, out=out)
    check(op, inputs, out=torch.full_like(good, math.nan))


def test_a_compiled_composition_checks_its_whole_signature(seed):
    # Metadata by row name no expert of w_down, so no stage would notice that one is missing.
    made = workload_call("MoEExpertMLPFwdOp", _by_row(), seed, 256)
    inputs = dict(made.inputs)
    changed = {**inputs, "w_down": inputs["w_down"][:1].contiguous(), "b_down": None}
    compiled_refusal(made.op, changed, refusal(made.op, changed, "w_down"))
    works(made.op, inputs)


def _by_row():
    workloads = op_classes()["MoEExpertMLPFwdOp"].entry.workloads
    return next(w for w in workloads if "per_row" in str(w.params["layout"]))


# ---- sizes and strides -------------------------------------------------------------------------


CENTRED = {"AdaLayerNormFwdOp", "AdaLayerNormZeroFwdOp", "FusedAddLayerNormFwdOp"}
"""A row of one is itself less itself, which torch.layer_norm computes as a difference of products."""


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_every_dim_of_size(name, size, seed):
    done = 0
    for workload in op_classes()[name].entry.workloads:
        small = workload_call(name, workload, seed, 128).workload
        for dim, value in small.dims.items():
            for changed in _resized(value, size):
                if size == 1 and dim == "N" and name in CENTRED:
                    continue
                resized = dataclasses.replace(small, dims={**small.dims, dim: changed})
                try:
                    made = workload_call(name, resized, seed, None)
                except (ManifestError, RuntimeError):
                    continue  # an index into nothing, a division among nobody: there is no sample
                right_or_refused(made.op, dict(made.inputs))
                done += 1
    assert done


def _resized(value, size):
    if isinstance(value, int):
        return [size]
    return [(*value[:i], size, *value[i + 1 :]) for i in range(len(value))] + [(), (size,)]


@pytest.mark.parametrize(("name", "argument"), INPUTS)
def test_every_stride(name, argument, seed):
    op, inputs = sample(name, seed, passing=argument)
    item = op.entry.input(argument)
    writes = item.mutated is not None
    for label, view in strided(inputs[argument]):
        changed = {**inputs, argument: view}
        if item.contiguous and not view.is_contiguous():
            error = refusal(op, changed, argument)
            assert "contiguous" in error.accepted, label
            compiled_refusal(op, changed, error)
        else:
            check(op, changed)
    if inputs[argument].shape[:1] > (1,) and not item.contiguous and not writes:
        check(op, {**inputs, argument: inputs[argument][:1].expand(inputs[argument].shape)})


def off_the_mean(tensor):
    """Of alternating signs: whether an element is its row's mean, and an infinite weight makes it NaN, is
    else a matter of rounding."""
    if tensor is None or not tensor.is_floating_point():
        return tensor
    signs = 1 - 2 * (torch.arange(tensor.shape[-1]) % 2)
    return (signs * (1 + torch.rand(tensor.shape) / 4)).to(tensor.dtype)


@pytest.mark.parametrize(("name", "argument"), INPUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_everywhere(name, argument, value, seed):
    op, inputs = sample(name, seed, passing=argument)
    tensor = inputs[argument]
    if not tensor.is_floating_point() or (tensor.dtype.itemsize == 1 and not math.isnan(value)):
        pytest.skip("it has no such value")
    if name == "BatchNormFwdOp" and math.isinf(value):
        pytest.skip("the mean of infinities is NaN by torch.var_mean and infinite by torch.mean")
    if name in ("GroupNormFwdOp", "InstanceNormFwdOp") and argument == "weight":
        pytest.skip(
            "torch.group_norm multiplies the mean by the weight too: infinity less infinity"
        )
    if "LayerNorm" in name and math.isinf(value):
        inputs |= {n: off_the_mean(t) for n, t in inputs.items() if n != argument}
    if (name == "GELUFwdOp" and value > 0) or (name == "GEMMEpilogueFwdOp" and math.isinf(value)):
        pytest.skip("torch 2.13's vectorised gelu gives NaN for infinity on the CPU")
    check(op, {**inputs, argument: torch.full_like(tensor, value)})
    one = tensor.clone()
    one.flatten()[-1:].fill_(value)
    check(op, {**inputs, argument: one})


# ---- constructors ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_constructors(name, seed):
    cls = op_classes()[name]
    op, _ = sample(name, seed)
    params = dict(op._params)
    for bad in (object(), {"a": 1}, lambda: 1, torch.ones(2, 2), 1j, b"x"):
        for param in cls.entry.params:
            with pytest.raises(CheckError) as caught:
                cls(**{**params, param.name: bad})
            assert (caught.value.op, caught.value.argument) == (name, param.name)
    for param in cls.entry.params:
        rest = {k: v for k, v in params.items() if k != param.name}
        if param.default is MISSING:
            with pytest.raises(CheckError) as caught:
                cls(**rest)
            assert (caught.value.argument, caught.value.given) == (param.name, "nothing")
        if not param.type.nullable:
            with pytest.raises(CheckError):
                cls(**rest, **{param.name: None})
    with pytest.raises(CheckError, match="no_such_parameter"):
        cls(**params, no_such_parameter=1)
    positional = [params[p.name] for p in cls.entry.params if not p.kw_only]
    named = {p.name: params[p.name] for p in cls.entry.params if p.kw_only}
    assert cls(*positional, **named) == op
    with pytest.raises(CheckError, match=f"positional {len(positional) + 1}"):
        cls(*positional, 1, **named)
    if positional:
        first = next(p.name for p in cls.entry.params if not p.kw_only)
        with pytest.raises(CheckError, match="it twice"):
            cls(*positional, **named, **{first: positional[0]})
    for target in ("no_such_target", 3, ""):
        with pytest.raises(UnknownTargetError, match="builtin"):
            cls(**params, target=target)
    assert cls(**params, target="builtin") != op


@pytest.mark.parametrize("name", NAMES)
def test_an_op_is_immutable(name, seed):
    op, _ = sample(name, seed)
    key = repr(op)
    for attribute in ("target", "_params", "_instance_key", "new", *op._params):
        with pytest.raises(ImmutableOpError, match=attribute):
            setattr(op, attribute, 1)
        with pytest.raises(ImmutableOpError, match=attribute):
            delattr(op, attribute)
    with pytest.raises(ImmutableOpError):
        op.settle(new=1)
    assert repr(op) == key
    assert instances.resolve(type(op), op._instance_key).op == op


def test_a_class_without_an_entry():
    from tests import cases

    with pytest.raises(ManifestError):
        type("StrayFwdOp", (Op,), {"__module__": cases.__name__})


# ---- content -----------------------------------------------------------------------------------


@pytest.fixture
def validating(monkeypatch):
    monkeypatch.setenv("TILEOPS_VALIDATE_INPUTS", "1")
    settings.cache_clear()
    for found in [ref for of in instances._states.values() for ref in of.values()]:
        if (state := found()) is not None:
            state.forget()  # of calls made without the setting
    yield
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize(("name", "argument"), CONTENT)
def test_content_is_checked_where_asked_for(name, argument, seed, validating):
    op, inputs = sample(name, seed, passing=argument)
    works(op, inputs)
    works(op, inputs)
    for value in (-2, torch.iinfo(inputs[argument].dtype).max):
        changed = {**inputs, argument: inputs[argument].clone()}
        changed[argument].flatten()[-1:].fill_(value)
        error = refusal(op, changed, argument)
        assert str(value) in error.given
        assert "values from" in error.accepted
        torch._dynamo.reset()
        compiled = torch.compile(lambda given: call(op, given), backend="aot_eager", fullgraph=True)
        with pytest.raises(CheckError, match="values from"):
            compiled(changed)
    works(op, inputs)


def test_content_is_not_read_unasked(seed):
    assert not settings().validate_inputs
    op, inputs = sample("RoPENeoxPositionIdsFwdOp", seed)
    inputs["positions"][0] = 2**30  # beyond max_position, but no memory is read by it
    check(op, inputs)


def test_nothing_to_check_in_an_empty_index(seed, validating):
    op, inputs = sample("RoPENeoxPositionIdsFwdOp", seed)
    works(op, {"x": inputs["x"][:0], "positions": inputs["positions"][:0]})
