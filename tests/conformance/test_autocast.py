"""Every op under ``torch.autocast``: a rule, the same eager and compiled, torch's where torch has one."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import float32_calls, op_classes
from tests.oracle import call, same_bits
from tileops import CheckError
from tileops.attention import GQADenseFwdOp
from tileops.elementwise import AddFwdOp, GELUFwdOp, MulFwdOp, SiLUAndMulFwdOp, SiLUFwdOp
from tileops.engine.boundary.autocast import FLOAT32, autocast_rule, autocasts
from tileops.gemm import GEMMFwdOp
from tileops.moe import MaskedLayoutSpec, MoEExpertMLPFwdOp, MoEGroupedGEMMFwdOp
from tileops.norm import FusedAddRMSNormFwdOp, LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp

CALLED = sorted(name for name, cls in op_classes().items() if cls.entry.inputs)
LOW = torch.bfloat16
F32, F64 = torch.float32, torch.float64
REGISTERED = frozenset(
    name.split(".")[0].removeprefix("aten::")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
)
"""Functions that torch treats under autocast on CUDA."""
LATER = frozenset({"rms_norm"})
"""Which torch lists since 2.12, and tileops on every release."""
PROMOTED = frozenset(
    {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add",
     "grid_sampler", "tensordot", "vdot", "linalg_vecdot"}
)  # fmt: skip
"""Those of them that it runs in the widest dtype of their inputs."""
LOWERED = frozenset({"mm", "bmm", "matmul", "linear", "prelu", "scaled_dot_product_attention"})


def flat(result):
    return [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]


def copies(inputs):
    return {n: None if t is None else t.clone() for n, t in inputs.items()}


@pytest.fixture(params=CALLED)
def samples(request, seed):
    return [(made.op, dict(made.inputs)) for made in float32_calls(request.param, seed)]


@contextlib.contextmanager
def cuda_autocast(dtype=LOW):
    """CUDA's autocast without a card: fake tensors have its keys."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# ---- every class ---------------------------------------------------------------------------------


def test_eager_and_compiled_agree(samples):
    for op, inputs in samples:
        names = [n for n, t in inputs.items() if t is not None]

        def function(*tensors, op=op, names=names):
            own = dict(zip(names, tensors, strict=True))
            return (*flat(call(op, own)), *(t * 1 for t in own.values()))

        given = [copies(inputs)[n] for n in names], [copies(inputs)[n] for n in names]
        torch._dynamo.reset()
        with torch.autocast("cpu", dtype=LOW):
            eager = function(*given[0])
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*given[1])
        assert len(eager) == len(compiled)
        for a, b in zip(eager, compiled, strict=True):
            assert same_bits(a, b)
        torch._dynamo.reset()


def test_a_call_is_one_with_inputs_cast_by_the_rule(samples):
    for op, inputs in samples:
        entry = type(op).entry
        rule = autocast_rule(entry)
        asked = any(isinstance(value, torch.dtype) for value in op._params.values())
        writes = any(i.mutated is not None for i in entry.inputs)
        cast = copies(inputs)
        wanted = {"low": LOW, "float32": F32}.get(rule)
        if wanted and not asked and not writes:
            for item in entry.inputs:
                tensor = cast[item.name]
                fixed = item.dtype is None or not item.dtype.names & set(entry.dtypes)
                if tensor is not None and tensor.dtype == F32 and not fixed:
                    cast[item.name] = tensor.to(wanted)
        theirs = flat(call(op, cast))
        with torch.autocast("cpu", dtype=LOW):
            ours = flat(call(op, copies(inputs)))
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert same_bits(a, b)


def test_the_rule_of_a_class_is_torchs(seed):
    """Of the reference, where that is torch's."""
    assert {"layer_norm", "softmax", "mm"} <= REGISTERED
    for name, cls in op_classes().items():
        module, _, function = cls.entry.reference.rpartition(".")
        if not module.startswith("torch") or not cls.entry.inputs or not autocasts(cls.entry):
            continue
        base = f"{module.split('.')[-1]}_{function}" if module == "torch.linalg" else function
        rule = autocast_rule(cls.entry)
        if base not in REGISTERED | LATER or base in PROMOTED:
            assert rule in ("widest", "none"), (name, base, rule)
        elif base in LOWERED:
            assert rule == "low", (name, base, rule)
        else:
            assert rule == "float32", (name, base, rule)


def test_what_is_listed_as_float32_is_torchs():
    aliases = {"softmin": "softmax", "linalg.matrix_norm": "linalg_matrix_norm",
               "linalg.vector_norm": "linalg_vector_norm"}  # fmt: skip
    for reference in FLOAT32:
        name = reference.removeprefix("torch.").removeprefix("nn.functional.")
        name = aliases.get(name, name)
        assert name in (REGISTERED | LATER) - PROMOTED - LOWERED, reference


# ---- against torch's functions -----------------------------------------------------------------------

PAIRS = {
    "layer_norm": (LayerNormFwdOp(4), lambda x: F.layer_norm(x, (4,))),
    "softmax": (SoftmaxFwdOp(-1), lambda x: F.softmax(x, -1)),
    "softmax to": (SoftmaxFwdOp(-1, dtype=LOW), lambda x: F.softmax(x, -1, dtype=LOW)),
    "silu": (SiLUFwdOp(), F.silu),
    "gelu": (GELUFwdOp(), F.gelu),
    "mm": (GEMMFwdOp(), lambda x, w: x @ w.t()),
    "add": (AddFwdOp(), torch.add),
    "mul": (MulFwdOp(), torch.mul),
}
if "rms_norm" in REGISTERED:
    PAIRS["rms_norm"] = (RMSNormFwdOp(4), lambda x: F.rms_norm(x, (4,)))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtypes", [(LOW, F32), (F32, LOW), (F32, F32), (LOW, LOW), (F64, F64)])
def test_dtypes_are_those_of_the_reference(name, dtypes):
    op, reference = PAIRS[name]
    with cuda_autocast():
        tensors = [torch.empty(3, 4, device="cuda", dtype=dtype) for dtype in dtypes]
        tensors = tensors[: len(op.entry.inputs) if name in ("mm", "add", "mul") else 1]
        ours, theirs = op(*tensors), reference(*tensors)
    assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_values_on_the_cpu(low):
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", dtype=low):
        assert torch.equal(GEMMFwdOp()(x, w), x @ w.t())
        normed = RMSNormFwdOp(4)(x.to(low), w[0])
    torch.testing.assert_close(normed, F.rms_norm(x.to(low).float(), (4,), w[0]))


# ---- what is left alone ------------------------------------------------------------------------------


def test_what_was_asked_for_by_a_parameter_is_kept():
    q = torch.randn(1, 3, 2, 8)
    with torch.autocast("cpu", dtype=LOW):
        assert GQADenseFwdOp()(q, q, q).dtype == LOW
        assert GQADenseFwdOp(out_dtype=F32)(q, q, q).dtype == F32
        assert SoftmaxFwdOp(0, dtype=torch.float16)(q).dtype == torch.float16


def test_a_call_that_writes_is_left_alone():
    x = torch.randn(3, 4, dtype=LOW)
    op = MoEGroupedGEMMFwdOp(MaskedLayoutSpec(2))
    a, b, counts = torch.randn(2, 2, 4), torch.randn(2, 5, 4), torch.tensor([1, 2]).int()
    with torch.autocast("cpu", dtype=LOW):
        assert SiLUFwdOp(inplace=True)(x) is x
        out = torch.zeros(2, 2, 5)
        assert op(a, b, counts, out=out) is out
        with pytest.raises(CheckError, match="out"):
            op(a, b, counts, out=out.to(LOW))
        assert op(a, b, counts).dtype == LOW


def test_float64_integers_and_other_devices_are_left_alone():
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=LOW):
        assert GEMMFwdOp()(x.double(), x.double()).dtype == F64
        assert LayerNormFwdOp(4)(x.double()).dtype == F64
        assert AddFwdOp()(torch.arange(3), torch.arange(3)).dtype == torch.int64
        with pytest.raises(CheckError, match="other"):
            AddFwdOp()(x, x.double())
        with torch.autocast("cpu", enabled=False):
            assert GEMMFwdOp()(x, x).dtype == F32
            with pytest.raises(CheckError):
                AddFwdOp()(x, x.to(LOW))
    with torch.autocast("cpu", dtype=LOW), FakeTensorMode():
        there = torch.empty(3, 4, device="cuda")
        assert GEMMFwdOp()(there, there).dtype == F32


def test_what_has_nothing_to_cast_has_no_kernel():
    for cls, there in ((SiLUFwdOp, False), (SiLUAndMulFwdOp, False), (GEMMFwdOp, True)):
        for name in cls.compile_op_names:
            for key in ("AutocastCPU", "AutocastCUDA"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key) == there


# ---- models ----------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """float32 parameters beside what autocast makes bfloat16."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.rand(8))
        self.norm, self.add = FusedAddRMSNormFwdOp(), AddFwdOp()
        self.gate, self.softmax = SiLUAndMulFwdOp(), SoftmaxFwdOp(-1)

    def forward(self, x):
        hidden = self.down(self.gate(self.up(x)))
        normed, residual = self.norm(hidden, x, self.scale)
        return self.add(hidden, normed), self.softmax(hidden), residual


@torch.no_grad()
def test_a_model_of_mixed_dtypes():
    block, x = Block(), torch.randn(3, 8)
    wanted = block(x)
    with torch.autocast("cpu", dtype=LOW):
        ours = block(x)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    assert [t.dtype for t in ours] == [F32, F32, F32]
    for a, b, c in zip(ours, compiled, wanted, strict=True):
        assert same_bits(a, b)
        torch.testing.assert_close(a, c, rtol=0.1, atol=0.1)


class Inside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.product, self.norm = GEMMFwdOp(), RMSNormFwdOp(4)

    def forward(self, x, w):
        with torch.autocast("cpu", dtype=LOW):
            return self.norm(self.product(x, w), w[0])


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    module, x, w = Inside(), torch.randn(3, 4), torch.randn(4, 4)
    program = torch.export.export(module, (x, w), strict=strict)
    wanted = module(x, w)
    assert wanted.dtype == F32
    for form in (program, program.run_decompositions()):
        assert same_bits(form.module()(x, w), wanted)


@torch.no_grad()
def test_a_composition_is_cast_as_a_whole():
    op = MoEExpertMLPFwdOp(MaskedLayoutSpec(2))
    x, counts = torch.randn(2, 2, 4), torch.tensor([1, 2]).int()
    up, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    low = [t.to(LOW) for t in (x, up, down)]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: op(*t, counts), backend="aot_eager", fullgraph=True)
    for run in (lambda *t: op(*t, counts), compiled):
        with torch.autocast("cpu", dtype=LOW):
            mixed = run(low[0], up, down)
        assert same_bits(mixed, op(*low, counts))
    out = torch.zeros(2, 2, 4)
    with torch.autocast("cpu", dtype=LOW):
        assert op(x, up, down, counts, out=out) is out
    assert torch.equal(out, op(x, up, down, counts))
    torch._dynamo.reset()


def test_under_vmap():
    x, w = torch.randn(6, 3, 4), torch.randn(4)
    with torch.autocast("cpu", dtype=LOW):
        ours = torch.vmap(RMSNormFwdOp(4), in_dims=(0, None))(x.to(LOW), w)
        products = torch.vmap(GEMMFwdOp(), in_dims=(0, None))(x, x[0])
    assert ours.dtype == F32
    torch.testing.assert_close(ours, F.rms_norm(x.to(LOW).float(), (4,), w))
    assert products.dtype == LOW
