"""Every op under torch's transforms, modes, tracers and exporters: right, or a refusal naming it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.cases import distinct_classes, float32_calls, op_classes
from tests.oracle import call, check, exact, same_bits
from tileops import CheckError
from tileops.elementwise import AddFwdOp, AlibiFwdOp, SiLUAndMulFwdOp, SiLUFwdOp, SinusoidalFwdOp
from tileops.engine.errors import BackwardError
from tileops.gemm import GEMMFwdOp
from tileops.moe import MaskedLayoutSpec, MoEGroupedGEMMFwdOp
from tileops.norm import BatchNormFwdOp, FusedAddRMSNormFwdOp, RMSNormFwdOp

CALLED = sorted(name for name, cls in distinct_classes().items() if cls.entry.inputs)
WRITTEN = "modified by an inplace operation"


@pytest.fixture(params=CALLED)
def samples(request, seed):
    """The calls of one class, each as ``(op, inputs)``."""
    return [(made.op, dict(made.inputs)) for made in float32_calls(request.param, seed)]


def written(op, inputs):
    """Names of the inputs that this call writes."""
    passed = frozenset(n for n, t in inputs.items() if t is not None)
    return [
        i.name
        for i in op.entry.inputs
        if i.mutated is not None and i.mutated.evaluate(op._params, passed)
    ]


def floats(op, inputs):
    return [n for n, t in inputs.items() if t is not None and t.is_floating_point()]


def flowing(op, inputs):
    """The present inputs that a gradient flows to."""
    if not op.entry.differentiable_outputs:
        return []
    found = {item.name for item in op.entry.differentiable_inputs} - set(written(op, inputs))
    return [n for n in floats(op, inputs) if n in found]


def copies(inputs):
    return {n: None if t is None else t.clone() for n, t in inputs.items()}


def flat(result):
    return [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]


def operator_call(op, inputs):
    """A call that passes the direct way by."""
    return op._call_boundary(**inputs) if op.entry.has_boundary else call(op, inputs)


def expected(op, inputs):
    """Results, then written inputs, of a plain call on copies."""
    own = copies(inputs)
    results = [r.clone() for r in flat(call(op, own))]
    return results + [own[n] for n in written(op, inputs)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert same_bits(a, b), (a, b)


def operators(op):
    """The operators of an op, or of its stages."""
    classes = op_classes()
    stages = [classes[c] for c in op.entry.composition.values()] or [type(op)]
    return {o.overload for stage in stages for o in stage._boundary.operators}


def names_it(op, text):
    classes = (type(op).__name__, *op.entry.composition.values())
    return any(c in text for c in classes) or any(str(o.name()) in text for o in operators(op))


# ---- forward mode ------------------------------------------------------------------------------


def test_a_dual_level_without_tangents_changes_nothing(samples):
    for op, inputs in samples:
        with forward_ad.dual_level():
            ours = expected(op, inputs)
        assert_same(ours, expected(op, inputs))


# ---- functional gradients ----------------------------------------------------------------------


def carries(tensor):
    """Whether a gradient can arrive at a tensor of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def assert_same_gradient(ours, theirs, op, inputs, name):
    """Not the same bits: where a tensor begins decides how the CPU's kernels round. Where terms cancel
    (the gradient of a norm of two elements), within some times the error of the meaning in float32."""
    try:
        torch.testing.assert_close(ours, theirs)
    except AssertionError:

        def of_the_meaning():
            leaf = inputs[name].clone().requires_grad_()
            results = flat(exact(op, {**copies(inputs), name: leaf})[0])
            return torch.autograd.grad(sum(r.square().sum() for r in results), leaf)[0]

        exactly = of_the_meaning()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "double", torch.Tensor.float)
            rough = of_the_meaning()
        if not (ours - theirs).norm() <= 64 * (rough - exactly).norm():
            raise


def test_functional_gradients(samples):
    """As autograd's; refused where none flows. Their values: test_gradients.py."""
    for op, inputs in samples:
        for name in floats(op, inputs):

            def loss(tensor, op=op, name=name, inputs=inputs):
                result = call(op, {**copies(inputs), name: tensor})
                return sum((r.double().square().sum() for r in flat(result)), tensor.sum() * 0)

            if not any(map(carries, expected(op, inputs))):  # truths and indices: as a constant
                assert not torch.func.grad(loss)(inputs[name]).any()
                continue
            if name not in flowing(op, inputs):
                with pytest.raises((BackwardError, CheckError)) as caught:
                    torch.func.grad(loss)(inputs[name])
                assert names_it(op, str(caught.value))
                continue
            leaf = inputs[name].clone().requires_grad_()
            (wanted,) = torch.autograd.grad(loss(leaf), leaf)
            ours = torch.func.grad(loss)(inputs[name])
            value, pull = torch.func.vjp(loss, inputs[name])
            (pulled,) = pull(torch.ones_like(value))
            for found in (ours, pulled):
                assert_same_gradient(found, wanted, op, inputs, name)


def test_functional_gradients_beside_an_op():
    op, x = RMSNormFwdOp(4), torch.randn(3, 4)

    def loss(tensor):
        return (tensor * op(tensor.detach())).sum(), op(tensor)  # the second is not differentiated

    grad, aux = torch.func.grad(loss, has_aux=True)(x)
    assert torch.equal(grad, op(x))
    assert torch.equal(aux, op(x))


def test_functionalize_is_right_or_refused(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        own = copies(inputs)
        names = [n for n, t in own.items() if t is not None]

        def function(*tensors, op=op, names=names):
            return tuple(flat(call(op, dict(zip(names, tensors, strict=True)))))

        before = copies(own)
        try:
            ours = torch.func.functionalize(function)(*(own[n] for n in names))
        except RuntimeError as error:
            assert written(op, inputs)
            assert names_it(op, str(error))
            assert all(same_bits(own[n], before[n]) for n in names)
            continue
        assert_same([*ours, *(own[n] for n in written(op, inputs))], theirs)


# ---- modes and subclasses ----------------------------------------------------------------------


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, Listening])
def test_a_mode_sees_the_operator(samples, mode):
    for op, inputs in samples:
        theirs, own = expected(op, inputs), copies(inputs)
        with mode() as watch:
            result = call(op, own)
        seen = [f for f in watch.seen if f in operators(op)]
        assert len(seen) == max(len(op.entry.composition), 1), watch.seen
        assert_same(
            [*flat(result), *(own[n] for n in written(op, inputs) if own[n] is not None)], theirs
        )


def test_modes_that_only_look(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        for mode in (FlopCounterMode(display=False), torch.device("meta"), torch.inference_mode()):
            own = copies(inputs)
            with mode:
                result = call(op, own)
            assert_same([*flat(result), *(own[n] for n in written(op, inputs))], theirs)


class Plain(torch.Tensor):
    """Its operations are torch's, its results are its own kind."""


def test_a_plain_subclass(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        own = {n: None if t is None else t.clone().as_subclass(Plain) for n, t in inputs.items()}
        result = call(op, own)
        ours = [*flat(result), *(own[n] for n in written(op, inputs))]
        assert all(type(t) is Plain for t in ours)
        assert_same([t.as_subclass(torch.Tensor) for t in ours], theirs)


def test_a_dispatching_subclass(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        own = {n: None if t is None else TwoTensor(t.clone(), t.clone()) for n, t in inputs.items()}
        result = call(op, own)
        ours = [*flat(result), *(own[n] for n in written(op, inputs))]
        assert all(type(t) is TwoTensor for t in ours)
        assert_same([t.a for t in ours], theirs)
        assert_same([t.b for t in ours], theirs)


def test_lazily_negated_views(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        for run in (call, operator_call):
            own = copies(inputs)
            for n in floats(op, inputs):
                own[n] = torch._neg_view(-own[n])
                assert own[n].is_neg()
            results = flat(run(op, own))
            assert not any(r.is_neg() for r in results if all(r is not t for t in own.values()))
            assert_same([*results, *(own[n] for n in written(op, inputs))], theirs)


def test_views_of_a_conjugate():
    z = torch.randn(3, 4, dtype=torch.complex64)
    for view in (torch.imag(z.conj()), torch.view_as_real(z.conj().resolve_conj())[..., 1]):
        check(RMSNormFwdOp(4), {"x": view.clone(), "weight": None})
        assert torch.equal(RMSNormFwdOp(4)(view), RMSNormFwdOp(4)(view.clone()))
    buffer = torch.randn(3, 4, dtype=torch.complex64)
    wanted = torch.complex(buffer.real, -torch.nn.functional.silu(-buffer.imag))
    SiLUFwdOp(inplace=True)(torch.imag(buffer.conj()))
    torch.testing.assert_close(buffer, wanted)


def test_fake_tensors_have_the_real_facts(samples):
    for op, inputs in samples:
        results = flat(call(op, copies(inputs)))
        mode = FakeTensorMode()
        fakes = {n: None if t is None else mode.from_tensor(t) for n, t in inputs.items()}
        with mode:
            given = flat(call(op, fakes))
        for real, fake in zip(results, given, strict=True):
            facts = (fake.shape, fake.stride(), fake.dtype, fake.device)
            assert facts == (real.shape, real.stride(), real.dtype, real.device)


# ---- tracers -----------------------------------------------------------------------------------


def traced(op, inputs):
    """``(function of the present tensors, its names)``; the function returns results and writes."""
    names = [n for n, t in inputs.items() if t is not None]
    changed = written(op, inputs)

    def function(*tensors):
        own = dict(zip(names, tensors, strict=True))
        result = call(op, own)
        return tuple([*flat(result), *(own[n] * 1 for n in changed)])

    return function, names


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx(samples, mode, pre_dispatch):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        function, names = traced(op, inputs)
        own = copies(inputs)
        graph = make_fx(function, tracing_mode=mode, pre_dispatch=pre_dispatch)(
            *(own[n] for n in names)
        )
        nodes = [n for n in graph.graph.nodes if n.target in operators(op)]
        assert len(nodes) == max(len(op.entry.composition), 1), graph.code
        if mode != "real":
            assert all(same_bits(own[n], inputs[n]) for n in names), "tracing wrote a real tensor"
        own = copies(inputs)
        ours = graph(*(own[n] for n in names))
        assert_same(list(ours), [*theirs])


def test_make_fx_with_symbolic_sizes_serves_other_sizes():
    op = RMSNormFwdOp(4)
    graph = make_fx(op, tracing_mode="symbolic")(torch.randn(3, 4), torch.randn(4))
    x, weight = torch.randn(7, 4), torch.randn(4)
    assert torch.equal(graph(x, weight), op(x, weight))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        function, names = traced(op, inputs)
        program = torch.jit.trace(
            function, tuple(copies(inputs)[n] for n in names), check_trace=False
        )
        called = [n.kind() for n in program.graph.nodes() if n.kind().startswith("tileops::")]
        assert len(called) == max(len(op.entry.composition), 1), program.graph
        buffer = io.BytesIO()
        torch.jit.save(program, buffer)
        buffer.seek(0)
        for one in (program, torch.jit.load(buffer)):
            own = copies(inputs)
            ours = one(*(own[n] for n in names))
            assert_same(list(ours), theirs)


class Holder(torch.nn.Module):
    def __init__(self, op, names):
        super().__init__()
        self.op, self.names = op, names

    def forward(self, *tensors):
        own = dict(zip(self.names, tensors, strict=True))
        result = call(self.op, own)
        changed = written(self.op, own)
        return tuple([*flat(result), *(own[n] * 1 for n in changed)])


def exported(op, inputs, strict, dynamic):
    names = [n for n, t in inputs.items() if t is not None]
    own = copies(inputs)
    shapes = None
    if dynamic:
        auto = {n: dict.fromkeys(range(own[n].ndim), torch.export.Dim.AUTO) for n in names}
        shapes = {"tensors": tuple(auto[n] for n in names)}
    given = tuple(own[n] for n in names)
    return names, torch.export.export(
        Holder(op, names), given, strict=strict, dynamic_shapes=shapes
    )


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(samples, strict, dynamic):
    check_export(samples[:2], strict, dynamic)


# A composition, one that writes its input, one with optional inputs.
@pytest.mark.parametrize("name", ["MoEExpertMLPFwdOp", "SiLUFwdOp", "LayerNormFwdOp"])
def test_strict_export_in_the_first_tier(name, seed):
    check_export([(m.op, dict(m.inputs)) for m in float32_calls(name, seed)[:2]], True, True)


def check_export(samples, strict, dynamic):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        names, program = exported(op, inputs, strict, dynamic)
        targets = [n.target for n in program.graph.nodes]
        count = max(len(op.entry.composition), 1)
        assert sum(t in operators(op) for t in targets) == count, program.graph
        for form in (program.module(), program.run_decompositions().module()):
            own = copies(inputs)
            assert_same(list(form(*(own[n] for n in names))), theirs)
            for n in written(op, inputs):
                assert not same_bits(own[n], inputs[n]), "a write is a write after export too"


@pytest.mark.slow
def test_an_exported_program_runs_in_a_new_process(seed, tmp_path):
    """Every class in one file each; the process that loads them has made no op."""
    count = 0
    for name in CALLED:
        for made in float32_calls(name, seed)[:1]:
            op, inputs = made.op, dict(made.inputs)
            names, program = exported(op, inputs, strict=False, dynamic=True)
            torch.export.save(program, tmp_path / f"{name}.pt2")
            given = [inputs[n].clone() for n in names]
            torch.save((given, expected(op, inputs)), tmp_path / f"{name}.tensors")
            count += 1
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.strip() == str(count)


_LOAD = """
import sys, pathlib, importlib, torch
for family in ("norm", "elementwise", "reduction", "rope", "gemm", "attention", "moe", "quantization"):
    module = importlib.import_module(f"tileops.{family}")
    [getattr(module, name) for name in dir(module)]
count = 0
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.pt2")):
    given, wanted = torch.load(path.with_suffix(".tensors"))
    found = torch.export.load(path).module()(*given)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b), (path.name, a, b)
    count += 1
print(count)
"""


# ---- contexts ------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4), requires_grad=False)
        self.linear = torch.nn.Linear(4, 8)
        self.norm, self.gate = RMSNormFwdOp(4), SiLUAndMulFwdOp()

    def forward(self, x):
        return self.gate(self.linear(self.norm(x, self.weight)))


@torch.no_grad()
def test_functional_call_and_an_ensemble():
    layers, x = [Layer() for _ in range(3)], torch.randn(5, 4)
    wanted = [layer(x) for layer in layers]
    swapped = torch.func.functional_call(layers[0], dict(layers[1].named_parameters()), (x,))
    assert torch.equal(swapped, wanted[1])
    parameters, buffers = torch.func.stack_module_state(layers)

    def one(parameters, buffers):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    for run in (torch.vmap(one), torch.compile(torch.vmap(one), backend="aot_eager")):
        torch.testing.assert_close(run(parameters, buffers), torch.stack(wanted))
    torch._dynamo.reset()


def test_inference_mode_and_no_grad(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        own = copies(inputs)
        with torch.inference_mode():
            results = flat(call(op, own))
            for result in results:
                assert result.is_inference() or any(result is t for t in own.values())
        assert_same([*results, *(own[n] for n in written(op, inputs))], theirs)
        own = {n: None if t is None else t.clone() for n, t in inputs.items()}
        for n in floats(op, inputs):
            if n not in written(op, inputs):
                own[n].requires_grad_()
        with torch.no_grad():
            results = flat(call(op, own))
        assert not any(r.requires_grad or r.grad_fn for r in results)
        assert_same([*results, *(own[n] for n in written(op, inputs))], theirs)


def test_inference_tensors_outside_their_mode(samples):
    for op, inputs in samples:
        theirs = expected(op, inputs)
        with torch.inference_mode():
            own = copies(inputs)
        if not written(op, inputs):
            results = flat(call(op, own))
            assert not any(r.is_inference() for r in results)
            assert_same(results, theirs)
            continue
        with pytest.raises(CheckError, match="an inference tensor") as caught:
            call(op, own)
        assert caught.value.argument in written(op, inputs)
        assert all(same_bits(own[n], inputs[n]) for n in written(op, inputs))


# ---- gradients -----------------------------------------------------------------------------------


def test_a_gradient_that_does_not_flow_is_refused(samples):
    """At once where the tensor would be written, else when the gradient arrives; compiled too."""
    for op, inputs in samples:
        theirs = expected(op, inputs)
        for name in set(floats(op, inputs)) - set(flowing(op, inputs)):
            own = copies(inputs)
            own[name].requires_grad_()
            if name in written(op, inputs):
                with pytest.raises(CheckError, match="requires grad") as caught:
                    call(op, own)
                assert caught.value.argument == name
                continue
            if not op.entry.outputs:
                with pytest.raises(BackwardError, match=type(op).__name__):
                    call(op, own)
                continue
            function, names = traced(op, inputs)
            for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
                own = copies(inputs)
                own[name].requires_grad_()
                results = run(*(own[n] for n in names))
                assert_same([r.detach() for r in results], theirs)
                if not any(map(carries, results)):
                    assert not any(r.requires_grad for r in results)
                    continue
                with pytest.raises(BackwardError, match=f"argument '{name}'") as caught:
                    next(filter(carries, results)).float().sum().backward()  # float8 has no sum
                assert names_it(op, str(caught.value))
                assert own[name].grad is None
            torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_beside_an_op(backend):
    op = RMSNormFwdOp(4)
    weight = torch.nn.Parameter(torch.randn(4))

    def function(x):
        return x * weight, op(x.detach(), weight.detach())

    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        x = torch.randn(3, 4, requires_grad=True)
        product, normal = run(x)
        assert not normal.requires_grad
        product.sum().backward()
        assert torch.allclose(x.grad, weight.detach().expand(3, 4))


def test_a_write_spoils_what_autograd_saved():
    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(3, 4)
    product = weight * x  # saves x for weight's gradient
    SiLUFwdOp(inplace=True)(x)
    with pytest.raises(RuntimeError, match=WRITTEN):
        product.sum().backward()


def test_an_out_buffer_takes_no_gradient():
    op = MoEGroupedGEMMFwdOp(MaskedLayoutSpec(2))
    a, b, counts = torch.randn(2, 2, 4), torch.randn(2, 5, 4), torch.tensor([1, 2]).int()
    out = torch.zeros(2, 2, 5)
    with pytest.raises(BackwardError, match="MoEGroupedGEMMFwdOp"):
        op(a.requires_grad_(), b, counts, out=out)
    assert not out.any(), "refused before any work"
    with pytest.raises(CheckError, match="'out'"):
        op(a.detach(), b, counts, out=out.clone().requires_grad_())
    with torch.no_grad():
        assert op(a, b, counts, out=out) is out
    assert out.any()
    assert not out.requires_grad


def test_a_leaf_view_is_not_written():
    leaf = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(CheckError, match="requires grad"):
        SiLUFwdOp(inplace=True)(leaf[0])
    with torch.no_grad():
        SiLUFwdOp(inplace=True)(leaf[0])


def test_a_parameter_is_a_tensor():
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4), requires_grad=False)
    check(RMSNormFwdOp(4), {"x": x, "weight": weight})


# ---- generators ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op", [AlibiFwdOp(seq_len=3, num_heads=2), SinusoidalFwdOp(seq_len=3, d_model=4)]
)
def test_generators_under_tracers(op):
    wanted = op()
    compiled = torch.compile(lambda: op() + 0, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(), wanted)
    with FakeTensorMode():
        fake = op()
    assert type(fake) is FakeTensor
    assert (fake.shape, fake.dtype) == (wanted.shape, wanted.dtype)
    assert torch.equal(make_fx(lambda: op())()(), wanted)
    assert torch.equal(op(), wanted), "a tracer's result was kept"
    assert type(op()) is torch.Tensor


# ---- combinations --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_transforms():
    op, x = AddFwdOp(), torch.randn(5, 3)
    ours = torch.vmap(torch.func.functionalize(lambda a: op(a, a)))(x)
    assert torch.equal(ours, 2 * x)
    graph = make_fx(torch.vmap(lambda a: op(a, a)))(x)
    assert torch.equal(graph(x), 2 * x)
    ours = torch.func.jacrev(lambda a: GEMMFwdOp()(a, a))(x)
    assert torch.allclose(ours, torch.func.jacrev(lambda a: a @ a.t())(x), atol=1e-5)
    forward = torch.func.jacfwd(lambda a: GEMMFwdOp()(a, a))(x)
    assert torch.allclose(forward, ours, atol=1e-5)
    fused = FusedAddRMSNormFwdOp()
    ours = torch.func.grad(lambda a: torch.vmap(lambda r: fused(r, r, x[0])[0])(a).sum())(x)
    theirs = torch.func.grad(lambda a: F.rms_norm(2 * a, (3,), x[0], 1e-6).sum())(x)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_training_statistics_under_a_mode():
    op, x = BatchNormFwdOp(training=True), torch.randn(4, 3)
    plain, watched = [(torch.zeros(3), torch.ones(3)) for _ in range(2)]
    first = op(x, *plain)
    with Watching() as watch:
        second = op(x, *watched)
    assert_same([*first, *plain], [*second, *watched])
    assert len([f for f in watch.seen if "batch_norm" in str(f)]) == 1
