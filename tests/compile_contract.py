"""The compile contract's samples: at least one for every operator of every class with a boundary.

``@cold(class, operator)`` registers a function that takes a batch size and gives a call: the op and its
inputs. ``tests/contract/test_compile_contract.py`` compiles each in a process that has never called an
op; other modules of ``tests/contract`` use the same calls. What a call means says ``tests/oracle.py``.

A signature, an operator of a class with a sample, or a kind of signature that has no sample here fails
a test there. Classes with the signature of another are compiled there one after the other.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "CASES", "Call", "Case", "classes_with_a_boundary", "cold", "exact_call", "op_class", "signature",
]  # fmt: skip

Tensors = dict[str, "torch.Tensor | None"]


@dataclass
class Call:
    """One call of ``op`` with ``inputs`` by name, in manifest order (then ``out``, where given).

    ``returns``: what comes back, in order: a value, None for an output that does not exist, the name
    of the input (or ``out``) that is that output. ``written``: what inputs hold afterwards.
    """

    op: Any
    inputs: Tensors
    returns: tuple[torch.Tensor | str | None, ...] = ()
    written: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, as the entry wants them."""
        by_name = {item.name for item in self.op.entry.inputs if item.kw_only} | {"out"}
        positional = tuple(t for name, t in self.inputs.items() if name not in by_name)
        return positional, {name: t for name, t in self.inputs.items() if name in by_name}

    def run(self, function: Callable[..., Any] | None = None) -> Any:
        """The result of calling ``function``, or else the op."""
        args, kwargs = self.arguments
        return (function or self.op)(*args, **kwargs)

    def foreign_result(self, tensors: tuple[Any, ...]) -> Any:
        """What a kernel returns that knows the answer: own outputs; the rest it writes."""
        entry = self.op.entry
        names = [item.name for item in entry.inputs] + ["out"] * entry.has_out
        for name, value in self.written.items():
            tensors[names.index(name)].copy_(value)
        given = [self.inputs.get(item.name) for item in entry.inputs]
        specs = type(self.op)._signature(self.op, *given, self.inputs.get("out"))[0]
        results = tuple(
            None if value is None or isinstance(value, str) else value.to(spec[1]).contiguous()
            for value, spec in zip(self.returns, specs, strict=True)
        )
        return results if len(results) > 1 else (results or (None,))[0]

    def check(self, result: Any) -> None:
        """Raise ``AssertionError`` unless ``result`` and the written inputs are as declared."""
        results = result if isinstance(result, tuple) else (result,) if self.returns else ()
        assert self.returns or result is None, result
        assert len(results) == len(self.returns), result
        for given, wanted in zip(results, self.returns, strict=True):
            if isinstance(wanted, str):
                assert given is self.inputs[wanted], f"the output is not the tensor '{wanted}'"
            elif wanted is None:
                assert given is None
            else:
                _close(given, wanted)
        for name, wanted in self.written.items():
            given = self.inputs[name]
            assert given is not None
            _close(given, wanted)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # float32 sums of at most 64 terms of order 1: 64 * 2**-24, and as much again for the functions.
    # Statistics of nothing are NaN.
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True
    )


def exact_call(op: Any, inputs: Tensors) -> Call:
    """The call of ``op`` with these inputs, and what it must give."""
    from tests.oracle import EXACT

    entry = op.entry
    outputs, written = EXACT[entry.name](op, **{i.name: inputs.get(i.name) for i in entry.inputs})
    written = dict(written)
    if inputs.get("out") is not None:
        (written["out"],) = outputs
    returns = tuple(
        "out"
        if output.buffer and "out" in written
        else output.is_input
        if output.is_input in written
        else value
        for output, value in zip(entry.outputs, outputs, strict=True)
    )
    return Call(op, inputs, returns, written)


@dataclass(frozen=True)
class Case:
    """A registered sample. ``op``: ``family.Class``; ``operator``: without the namespace."""

    name: str
    op: str
    operator: str
    backend: str
    sample: Callable[..., Tensors]
    params: Mapping[str, Any]

    def make(self, batch: int) -> Call:
        """A new call, the same for the same batch."""
        params = {name: _literal(value) for name, value in self.params.items()}
        torch.manual_seed(batch)
        return exact_call(op_class(self.op)(**params), self.sample(batch))


def _literal(value: Any) -> Any:
    if not (isinstance(value, str) and value.endswith(")")):
        return value
    import tileops.moe.layouts  # noqa: F401  (defines what a layout's text names)
    from tileops.engine.signature.literal import read

    return read(value)


CASES: dict[str, Case] = {}


def cold(op: str, operator: str, backend: str = "aot_eager", **params: Any) -> Any:
    """Register a sample of ``op`` that takes the branch whose operator is ``operator``.

    The op is made with ``params``; one that is text ending in ``)`` is a literal. Sizes that follow
    ``batch`` are free: one graph must serve any.
    """

    def register(sample: Callable[[int], Tensors]) -> Callable[[int], Tensors]:
        name = sample.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, op, operator, backend, sample, params)
        return sample

    return register


def op_class(path: str) -> Any:
    """The class ``family.Class``."""
    family, name = path.split(".")
    return getattr(importlib.import_module(f"tileops.{family}"), name)


def classes_with_a_boundary() -> set[str]:
    """``family.Class`` of every implemented entry of the package that has a boundary."""
    from tileops.engine.manifest.catalog import families, load_family

    return {
        f"{family}.{entry.name}"
        for family, path in families().items()
        for entry in load_family(path).values()
        if entry.status == "implemented" and entry.has_boundary
    }


def signature(path: str) -> str:
    """What the generated code of ``family.Class`` follows from: see ``tests.cases.signature_text``."""
    from tests.cases import signature_text
    from tileops.engine.manifest.catalog import families, load_family

    family, name = path.split(".")
    return signature_text(load_family(families()[family])[name])


# ---- elementwise ---------------------------------------------------------------------------------


@cold("elementwise.AddFwdOp", "elementwise_add_fwd", "inductor", alpha=0.5)
def add(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "other": torch.randn(8)}


@cold("elementwise.MulFwdOp", "elementwise_mul_fwd")
def mul(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "other": torch.randn(batch, 1)}


@cold("elementwise.EqFwdOp", "elementwise_eq_fwd")
def equal(batch: int) -> Tensors:
    return {"input": torch.randint(3, (batch, 8)).float(), "other": torch.randint(3, (8,)).float()}


@cold("elementwise.ReciprocalFwdOp", "elementwise_reciprocal_fwd")
def reciprocal(batch: int) -> Tensors:
    return {"input": torch.rand(batch, 8) + 0.5}


@cold("elementwise.LogicalNotFwdOp", "elementwise_logical_not_fwd")
def logical_not(batch: int) -> Tensors:
    return {"input": torch.randint(2, (batch, 8)).float()}


@cold("elementwise.WhereFwdOp", "elementwise_where_fwd")
def where(batch: int) -> Tensors:
    return {
        "condition": torch.rand(batch, 8) < 0.5,
        "input": torch.randn(batch, 8),
        "other": torch.randn(8),
    }


@cold("elementwise.ClampTensorFwdOp", "elementwise_clamp_tensor_fwd")
def clamp_tensor(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "min": -torch.rand(8), "max": torch.rand(8)}


@cold("elementwise.LerpTensorFwdOp", "elementwise_lerp_tensor_fwd")
def lerp_tensor(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "end": torch.randn(batch, 8), "weight": torch.rand(8)}


@cold("elementwise.MaskedFillTensorFwdOp", "elementwise_masked_fill_tensor_fwd")
def masked_fill_tensor(batch: int) -> Tensors:
    return {
        "input": torch.randn(batch, 8),
        "mask": torch.rand(batch, 8) < 0.5,
        "value": torch.tensor(0.25),
    }


@cold("elementwise.MaskedFillScalarFwdOp", "elementwise_masked_fill_scalar_fwd", value=0.25)
def masked_fill_scalar(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "mask": torch.rand(batch, 8) < 0.5}


@cold("elementwise.PReLUFwdOp", "elementwise_prelu_fwd")
def prelu(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "weight": torch.rand(8)}


@cold("elementwise.SiLUFwdOp", "elementwise_silu_fwd")
def silu(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8)}


@cold("elementwise.SiLUFwdOp", "elementwise_silu_fwd_writes_input", "inductor", inplace=True)
def silu_inplace(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8)}


@cold("elementwise.SiLUAndMulFwdOp", "elementwise_silu_and_mul_fwd")
def silu_and_mul(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 16)}


@cold("elementwise.SiLUAndMulBwdOp", "elementwise_silu_and_mul_bwd", "inductor")
def silu_and_mul_backward(batch: int) -> Tensors:
    return {"grad_output": torch.randn(batch, 8), "input": torch.randn(batch, 16)}


@cold("elementwise.GELUFwdOp", "elementwise_gelu_fwd")
def gelu(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8)}


# ---- norm ----------------------------------------------------------------------------------------


@cold("norm.RMSNormFwdOp", "norm_rms_norm_fwd", "inductor", normalized_shape=(8,), eps=1e-5)
def rms_norm(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 8), "weight": torch.randn(8)}


@cold("norm.RMSNormFwdOp", "norm_rms_norm_fwd", normalized_shape=(3, 8))
def rms_norm_without_weight(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 3, 8), "weight": None}


@cold("norm.LayerNormFwdOp", "norm_layer_norm_fwd", normalized_shape=(8,))
def layer_norm(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 8), "weight": None, "bias": torch.randn(8)}


@cold("norm.FusedAddRMSNormFwdOp", "norm_fused_add_rms_norm_fwd", "inductor")
def fused_add_rms_norm(batch: int) -> Tensors:
    x, residual = torch.randn(2, batch, 8)
    return {"input": x, "residual": residual, "weight": torch.randn(8)}


def _norm_backward(op: str, names: tuple[str, ...], several: dict[str, tuple[str, ...]]) -> None:
    """A sample for each choice of gradients of ``op``; ``several``: the choices' ``wants_`` that are
    false, by the sample's name."""
    base = "norm_" + {"RMSNormBwdOp": "rms_norm", "LayerNormBwdOp": "layer_norm"}.get(
        op, "fused_add_rms_norm"
    )

    shared = {"input", "residual"} if op.startswith("Fused") else set()

    def tensors(batch: int) -> Tensors:
        return {**{name: torch.randn(batch, 8) for name in names}, "weight": torch.randn(8)}

    for name, absent in several.items():

        def sample(batch: int) -> Tensors:
            return tensors(batch)

        sample.__name__ = f"{base}_backward_{name}"
        shape = {} if op.startswith("Fused") else {"normalized_shape": (8,)}
        params = {**shape, "eps": 1e-3, **{f"wants_{gradient}": False for gradient in absent}}
        # The gradient of a residual is also that of what it is added to.
        made = shared if len(shared & set(absent)) < 2 else {"residual"}
        lacking = [gradient for gradient in absent if gradient not in made]
        suffix = "".join(f"_without_grad_{gradient}" for gradient in lacking)
        cold(f"norm.{op}", f"{base}_bwd{suffix}", **params)(sample)


_norm_backward(
    "RMSNormBwdOp",
    ("grad_output", "x"),
    {"whole": (), "of_the_weight": ("x",), "of_x": ("weight",)},
)
_norm_backward(
    "LayerNormBwdOp",
    ("grad_output", "input"),
    {
        "whole": (),
        "of_weight_and_bias": ("input",),
        "of_input_and_bias": ("weight",),
        "of_input_and_weight": ("bias",),
        "of_the_bias": ("input", "weight"),
        "of_the_weight": ("input", "bias"),
        "of_the_input": ("weight", "bias"),
    },
)
_norm_backward(
    "FusedAddRMSNormBwdOp",
    ("grad_output", "grad_residual_out", "residual_out"),
    {
        "whole": (),
        "of_residual_and_weight": ("input",),
        "of_input_and_residual": ("weight",),
        "of_the_weight": ("input", "residual"),
        "of_the_residual": ("input", "weight"),
    },
)


def _batch_norm(batch: int, running: bool) -> Tensors:
    weight, bias, mean = torch.randn(3, 3)
    inputs: Tensors = {"input": torch.randn(batch, 3, 5), "running_mean": None, "running_var": None}
    if running:
        inputs |= {"running_mean": mean, "running_var": torch.rand(3) + 0.5}
    return {**inputs, "weight": weight, "bias": bias}


@cold("norm.BatchNormFwdOp", "norm_batch_norm_fwd", training=True)
def batch_norm_of_the_batch(batch: int) -> Tensors:
    return _batch_norm(batch, running=False)


@cold(
    "norm.BatchNormFwdOp",
    "norm_batch_norm_fwd_writes_running_mean_writes_running_var",
    training=True,
    momentum=0.25,
)
def batch_norm_training(batch: int) -> Tensors:
    return _batch_norm(batch, running=True)


@cold(
    "norm.BatchNormFwdOp",
    "norm_batch_norm_fwd_without_save_mean_without_save_invstd",
    "inductor",
)
def batch_norm_evaluation(batch: int) -> Tensors:
    return _batch_norm(batch, running=True)


@cold("norm.BatchNormBwdOp", "norm_batch_norm_bwd")
def batch_norm_backward(batch: int) -> Tensors:
    doutput, x = torch.randn(2, batch, 3, 5)
    inputs: Tensors = {"doutput": doutput, "input": x, "save_mean": torch.randn(3)}
    return {**inputs, "save_invstd": torch.rand(3) + 0.5, "weight": torch.randn(3)}


@cold("norm.AdaLayerNormFwdOp", "norm_ada_layer_norm_fwd")
def ada_layer_norm(batch: int) -> Tensors:
    return {name: torch.randn(batch, 8) for name in ("x", "scale", "shift")}


@cold("norm.AdaLayerNormZeroFwdOp", "norm_ada_layer_norm_zero_fwd")
def ada_layer_norm_zero(batch: int) -> Tensors:
    return {name: torch.randn(batch, 8) for name in ("x", "scale", "shift", "gate")}


@cold("norm.FusedAddLayerNormFwdOp", "norm_fused_add_layer_norm_fwd")
def fused_add_layer_norm(batch: int) -> Tensors:
    x, residual = torch.randn(2, batch, 8)
    return {"x": x, "residual": residual, "weight": torch.randn(8), "bias": torch.randn(8)}


@cold("norm.FusedAddRMSNormPerTokenQuantFwdOp", "norm_fused_add_rms_norm_per_token_quant_fwd")
def fused_add_rms_norm_quant(batch: int) -> Tensors:
    return fused_add_rms_norm(batch)


@cold("norm.GroupNormFwdOp", "norm_group_norm_fwd", num_groups=2)
def group_norm(batch: int) -> Tensors:
    return {"input": torch.randn(batch, 4, 5), "weight": torch.randn(4), "bias": None}


@cold("norm.InstanceNormFwdOp", "norm_instance_norm_fwd")
def instance_norm(batch: int) -> Tensors:
    return _batch_norm(batch, running=False)


@cold(
    "norm.InstanceNormFwdOp",
    "norm_instance_norm_fwd_writes_running_mean_writes_running_var",
    "inductor",
)
def instance_norm_training(batch: int) -> Tensors:
    return _batch_norm(batch, running=True)


@cold(
    "norm.FusedQKNormRoPEFwdOp",
    "norm_fused_qk_norm_rope_fwd_writes_qkv",
    num_heads=2,
    num_kv_heads=1,
)
def fused_qk_norm_rope(batch: int) -> Tensors:
    inputs: Tensors = {"qkv": torch.randn(batch, 32), "q_weight": torch.randn(8)}
    inputs |= {"k_weight": torch.randn(8), "cos_sin_cache": torch.randn(256, 6)}
    return {**inputs, "positions": torch.arange(batch) * 3}


# ---- reduction, rope, gemm -----------------------------------------------------------------------


def _reduction(cls: str, operator: str, params: Mapping[str, Any], inputs: tuple[str, ...]) -> None:
    def sample(batch: int) -> Tensors:
        return {name: torch.randn(batch, 4, 8) for name in inputs}

    sample.__name__ = operator
    cold(f"reduction.{cls}", f"reduction_{operator}", **params)(sample)


for _cls, _operator, _params, *_inputs in (  # every signature
    ("SoftmaxFwdOp", "softmax_fwd", {"dim": -1}, "x"),
    ("SoftmaxBwdOp", "softmax_bwd", {"dim": -1}, "grad_output", "output"),
    ("LogSumExpFwdOp", "log_sum_exp_fwd", {"dim": (1, -1)}, "input"),
    ("MeanFwdOp", "mean_fwd", {"dim": -1, "keepdim": True}, "input"),
    ("ProdFwdOp", "prod_fwd", {"dim": 1}, "input"),
    ("VarMeanFwdOp", "var_mean_fwd", {"dim": -1, "correction": 0}, "input"),
    ("ArgmaxFwdOp", "argmax_fwd", {"dim": -1}, "input"),
    ("AllFwdOp", "all_fwd", {"dim": -1}, "input"),
    ("AnyFwdOp", "any_fwd", {"dim": ()}, "input"),
    ("CountNonzeroFwdOp", "count_nonzero_fwd", {"dim": 1}, "input"),
    ("CumsumFwdOp", "cumsum_fwd", {"dim": 1}, "input"),
    ("CumprodBwdOp", "cumprod_bwd", {"dim": -1}, "grad_output", "input"),
):
    _reduction(_cls, _operator, _params, tuple(_inputs))


@cold("rope.RoPENeoxPositionIdsFwdOp", "rope_neox_position_ids_fwd", max_position=256, rotary_dim=6)
def rope(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 2, 8), "positions": torch.arange(batch) * 3}


@cold("rope.RoPENeoxPositionIdsBwdOp", "rope_neox_position_ids_bwd", max_position=256, rotary_dim=6)
def rope_gradient(batch: int) -> Tensors:
    return {"grad_output": torch.randn(batch, 2, 8), "positions": torch.arange(batch) * 3}


@cold("rope.RoPEFwdOp", "rope_fwd", "inductor", rope_layout="interleaved")
def rope_of_rows(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 8)}


@cold("rope.RoPEBwdOp", "rope_bwd", input_layout="2d")
def rope_of_rows_gradient(batch: int) -> Tensors:
    return {"grad_output": torch.randn(batch, 3, 2, 8)}


@cold("rope.RoPETablesFwdOp", "rope_tables_fwd", rope_layout="interleaved")
def rope_by_tables(batch: int) -> Tensors:
    return {
        "x": torch.randn(batch, 3, 2, 8),
        "cos": torch.randn(3, 1, 8),
        "sin": torch.randn(3, 1, 8),
    }


@cold("rope.RoPETablesBwdOp", "rope_tables_bwd")
def rope_by_tables_gradient(batch: int) -> Tensors:
    tables = {name: torch.randn(batch, 1, 4) for name in ("cos", "sin")}
    return {"grad_output": torch.randn(batch, 2, 8), **tables}


@cold("rope.LongRoPEFwdOp", "rope_long_rope_fwd", rescale_factors=(1.0, 1.5, 3.0, 8.0))
def long_rope(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 8)}


@cold("gemm.GEMMFwdOp", "gemm_fwd", "inductor")
def gemm(batch: int) -> Tensors:
    return {"a": torch.randn(batch, 8), "b": torch.randn(6, 8)}


@cold("gemm.GEMMBwdOp", "gemm_bwd", "inductor")
def gemm_gradients(batch: int) -> Tensors:
    return {"grad_d": torch.randn(batch, 6), "a": torch.randn(batch, 8), "b": torch.randn(6, 8)}


@cold("gemm.GEMMBwdOp", "gemm_bwd_without_grad_b", wants_b=False)
def gemm_gradient_of_a(batch: int) -> Tensors:
    return {"grad_d": torch.randn(batch, 6), "a": torch.randn(batch, 8), "b": torch.randn(6, 8)}


@cold("gemm.GEMMBwdOp", "gemm_bwd_without_grad_a", wants_a=False)
def gemm_gradient_of_b(batch: int) -> Tensors:
    return {"grad_d": torch.randn(batch, 6), "a": torch.randn(batch, 8), "b": torch.randn(6, 8)}


@cold("gemm.GEMMEpilogueFwdOp", "gemm_epilogue_fwd_without_preactivation", "inductor", scale=0.5)
def gemm_epilogue(batch: int) -> Tensors:
    a, residual = torch.randn(batch, 8), torch.randn(batch, 6)
    return {"a": a, "b": torch.randn(6, 8), "bias": torch.randn(6), "residual": residual}


@cold("gemm.GEMMEpilogueFwdOp", "gemm_epilogue_fwd", activation="silu", keeps_preactivation=True)
def gemm_epilogue_that_keeps(batch: int) -> Tensors:
    return {"a": torch.randn(batch, 8), "b": torch.randn(6, 8)}


def _gradients(path: str, base: str, tensors: Callable[[int], Tensors], names: Sequence[str],
               **params: Any) -> None:  # fmt: skip
    """A sample for each choice of gradients."""
    for count in range(len(names)):
        for absent in itertools.combinations(names, count):

            def sample(batch: int) -> Tensors:
                return tensors(batch)

            sample.__name__ = "_".join((tensors.__name__, *absent))
            suffix = "".join(f"_without_grad_{name}" for name in absent)
            wants = {f"wants_{name}": False for name in absent}
            cold(path, f"{base}{suffix}", **params, **wants)(sample)


def gemm_epilogue_backward(batch: int) -> Tensors:
    given = {"grad_d": torch.randn(batch, 6), "a": torch.randn(batch, 8)}
    return {**given, "b": torch.randn(6, 8), "bias": torch.randn(6)}


_gradients("gemm.GEMMEpilogueBwdOp", "gemm_epilogue_bwd", gemm_epilogue_backward,
           ("a", "b", "bias", "residual"), activation="gelu")  # fmt: skip


# ---- attention -----------------------------------------------------------------------------------


@cold("attention.GQADenseFwdOp", "attention_gqa_dense_fwd", is_causal=True)
def gqa_dense(batch: int) -> Tensors:
    k, v = torch.randn(2, batch, 5, 2, 8)
    inputs: Tensors = {"q": torch.randn(batch, 3, 4, 8), "k": k, "v": v}
    absent = ("q_scale", "k_scale", "v_scale", "rope_cos", "rope_sin", "sinks")
    return {**inputs, **dict.fromkeys(absent)}


def gqa_dense_backward(batch: int) -> Tensors:
    k, v = torch.randn(2, batch, 5, 2, 8)
    q, grad_o = torch.randn(2, batch, 3, 4, 8)
    inputs: Tensors = {"grad_o": grad_o, "q": q, "k": k, "v": v, "rope_cos": None, "rope_sin": None}
    return {**inputs, "sinks": torch.randn(4)}


_gradients("attention.GQADenseBwdOp", "attention_gqa_dense_bwd", gqa_dense_backward,
           ("q", "k", "v", "sinks"), is_causal=True)  # fmt: skip


@cold(
    "attention.PagedKVCacheWriteFwdOp",
    "attention_paged_kv_cache_write_fwd_writes_k_cache_writes_v_cache",
    "inductor",
)
def paged_kv_cache_write(batch: int) -> Tensors:
    k, v = torch.randn(2, batch, 2, 4)
    k_cache, v_cache = torch.randn(2, 64, 2, 2, 4)
    slots = torch.arange(batch) * 2 + 1
    slots[:1] = -1
    inputs: Tensors = {"k": k, "v": v, "k_cache": k_cache.clone(), "v_cache": v_cache.clone()}
    return {**inputs, "slot_mapping": slots, "k_scale": None, "v_scale": None}


# ---- mixture of experts --------------------------------------------------------------------------

TIGHT = "ContiguousLayoutSpec(packing='tight', metadata_kind='per_row')"


@cold("moe.MoEGroupedGEMMFwdOp", "moe_grouped_gemm_fwd", layout=TIGHT)
def grouped_gemm(batch: int) -> Tensors:
    experts = torch.arange(batch) * 3 // max(batch, 1)
    inputs: Tensors = {"a": torch.randn(batch, 8), "b": torch.randn(3, 6, 8)}
    return {**inputs, "layout_metadata": experts.int(), "bias": torch.randn(3, 6)}


@cold("moe.MoEGroupedGEMMFwdOp", "moe_grouped_gemm_fwd_out", "inductor", layout=TIGHT)
def grouped_gemm_out(batch: int) -> Tensors:
    return {**grouped_gemm(batch), "out": torch.full((batch, 6), -1.0)}


@cold("moe.MoEGroupedGEMMFwdOp", "moe_grouped_gemm_fwd", layout="MaskedLayoutSpec(max_m=4)")
def grouped_gemm_masked(batch: int) -> Tensors:
    counts = torch.arange(batch, dtype=torch.int32) % 5
    inputs: Tensors = {"a": torch.randn(batch, 4, 8), "b": torch.randn(batch, 6, 8)}
    return {**inputs, "layout_metadata": counts, "bias": None}


@cold("moe.MoEPostPermuteFwdOp", "moe_post_permute_fwd", layout=TIGHT)
def post_permute(batch: int) -> Tensors:
    order = torch.arange(2 * batch, dtype=torch.int32).flip(0)
    inputs: Tensors = {"expert_output": torch.randn(2 * batch, 8)}
    return {**inputs, "topk_weights": torch.randn(batch, 2), "inverse_indices": order}


@cold("moe.MoEPostPermuteFwdOp", "moe_post_permute_fwd_out", layout=TIGHT)
def post_permute_out(batch: int) -> Tensors:
    return {**post_permute(batch), "out": torch.full((batch, 8), -1.0)}


# ---- quantization --------------------------------------------------------------------------------


@cold("quantization.INT8QuantPerChannelFwdOp", "quantization_int8_quant_per_channel_fwd")
def int8_by_rows(batch: int) -> Tensors:
    return {"w": torch.randn(batch, 8)}


@cold("quantization.FP8QuantPerTokenGroupFwdOp", "quantization_fp8_quant_per_token_group_fwd")
def fp8_by_rows(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 2, 8)}


@cold("quantization.INT8QuantPerTensorFwdOp", "quantization_int8_quant_per_tensor_fwd")
def int8_of_a_tensor(batch: int) -> Tensors:
    return {"x": torch.randn(batch + 1, 10)}


@cold("quantization.INT8QuantPerTokenGroupFwdOp", "quantization_int8_quant_per_token_group_fwd")
def int8_by_groups(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 130)}


@cold("quantization.SmoothQuantFwdOp", "quantization_smooth_quant_fwd")
def smooth_quant(batch: int) -> Tensors:
    return {"x": torch.randn(batch, 8), "smooth": torch.rand(8) + 0.5}


@cold("quantization.FP8QuantPerBlockFwdOp", "quantization_fp8_quant_per_block_fwd")
def fp8_by_blocks(batch: int) -> Tensors:
    return {"w": torch.randn(batch, 130)}


@cold(
    "quantization.INT8DequantPerTensorFwdOp",
    "quantization_int8_dequant_per_tensor_fwd",
    out_dtype=torch.float32,
)
def dequantised_tensor(batch: int) -> Tensors:
    return {"q": _int8(batch, 8), "scale": torch.rand(1)}


@cold(
    "quantization.INT8DequantPerChannelFwdOp",
    "quantization_int8_dequant_per_channel_fwd",
    out_dtype=torch.float32,
)
def dequantised_rows(batch: int) -> Tensors:
    return {"q": _int8(batch, 8), "scale": torch.rand(batch)}


@cold(
    "quantization.INT8DequantPerBlockFwdOp",
    "quantization_int8_dequant_per_block_fwd",
    out_dtype=torch.float32,
)
def dequantised_groups(batch: int) -> Tensors:
    return {"q": _int8(batch, 130), "scale": torch.rand(batch, 2)}


def _int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)
