"""Kernels of the product with an epilogue: numerics in Triton's interpreter, and what the compiler says."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, poison, run_entry, shapes
from tests.op_kernels import check_kernel, prepared
from tests.oracle import exact
from tests.triton_interpreter import interpreted
from tileops.backend.tolerances import compare
from tileops.elementwise import ExpFwdOp, SigmoidFwdOp, SiLUFwdOp
from tileops.gemm import GEMMEpilogueBwdOp, GEMMEpilogueFwdOp

CUDA = torch.device("cuda", 0)
LAYOUTS = [(False, True), (False, False), (True, True), (True, False)]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
KERNELS = ["CublasThenFinish", "TritonEpilogue", "PersistentEpilogue"]
TILE = (16, 32, 16, 4, 2)
SIZE = (40, 72, 56)
"""Three by three tiles; all rows begin at multiples of 16 bytes, no edge at one of a tile."""


def call_like(m, n, k, dtype, *, bias=True, residual=True, device=CUDA, arch=(9, 0), **params):
    defaults = {"trans_a": False, "trans_b": True, "activation": "gelu", "scale": 1.0,
                "out_dtype": None, "keeps_preactivation": False}  # fmt: skip
    params = defaults | params
    out = params["out_dtype"] or dtype
    specs = shapes(
        device,
        a=((k, m) if params["trans_a"] else (m, k), dtype),
        b=((n, k) if params["trans_b"] else (k, n), dtype),
        bias=((n,), dtype) if bias else None,
        residual=((m, n), dtype) if residual else None,
        d=((m, n), out),
        preactivation=((m, n), dtype) if params["keeps_preactivation"] else None,
    )
    outputs = {name: specs.pop(name) for name in ("d", "preactivation")}
    return call_of("GEMMEpilogueFwdOp", specs, outputs, params=params, arch=arch)


@interpreted
def run(kernel, inputs, size, parts, params):
    from tileops.gemm.kernels import epilogue, gemm

    a = inputs["a"]
    call = call_like(
        *size,
        a.dtype,
        bias=inputs["bias"] is not None,
        residual=inputs["residual"] is not None,
        device=a.device,
        **params,
    )
    chosen = getattr(epilogue, kernel)
    if kernel == "TritonEpilogue":
        entry = chosen.entry_of(call, gemm.Tile(*TILE), parts)
    elif kernel == "PersistentEpilogue":
        entry = chosen.entry_of(call, epilogue.PersistentTile(*TILE, parts=parts, group=2))
    else:
        entry = chosen.entry_for(call)
    with poison():
        return run_entry(entry, call, *inputs.values())


def hold(
    kernel, size, dtype=torch.float16, bias=True, residual=True, parts=1, inputs=None, **params
):
    m, n, k = size
    op = GEMMEpilogueFwdOp(**params)
    if inputs is None:
        inputs = {
            "a": torch.randn((k, m) if op.trans_a else (m, k)).to(dtype),
            "b": torch.randn((n, k) if op.trans_b else (k, n)).to(dtype),
            "bias": torch.randn(n).to(dtype) if bias else None,
            "residual": torch.randn(m, n).to(dtype) if residual else None,
        }
    results = run(kernel, inputs, size, parts, params)
    for given, wanted in zip(results, exact(op, inputs)[0], strict=True):
        assert (given is None) == (wanted is None)
        if given is not None:
            assert given.is_contiguous()
            found = compare(given, wanted, "template")
            assert found.ok, f"{kernel} {op!r}: {found.text}"
    return results


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_part_of_the_epilogue(kernel, activation):
    several = itertools.product((True, False), (True, False), (1.0, -0.75))
    for number, (bias, residual, scale) in enumerate(several):
        hold(
            kernel,
            SIZE,
            bias=bias,
            residual=residual,
            parts=1 + number % 2,
            activation=activation,
            scale=scale,
            keeps_preactivation=activation is not None and residual,
        )


@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_and_parts(kernel, trans_a, trans_b):
    for parts in (1, 2):
        hold(kernel, SIZE, parts=parts, trans_a=trans_a, trans_b=trans_b, activation="silu")


@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_librarys_epilogue(activation, trans_a, trans_b):
    # Its GELU is by tanh on a card and exact on the CPU: tests/gpu/test_gemm_epilogue.py holds it.
    params = {"activation": activation, "trans_a": trans_a, "trans_b": trans_b}
    hold("CublasEpilogue", SIZE, residual=False, **params)


@pytest.mark.parametrize("kernel", KERNELS[:2])
@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (17, 33, 129)])
def test_sizes(kernel, size):
    for dtype in (torch.float16, torch.float32):
        hold(kernel, size, dtype, activation="gelu", scale=0.5)


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_a_wider_result_is_not_rounded_before(kernel):
    (d, _) = hold(kernel, SIZE, activation="gelu", out_dtype=torch.float32)
    assert d.dtype is torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity(kernel, activation):
    m, n, k = SIZE
    inputs = {
        "a": torch.rand(m, k).half(),
        "b": torch.rand(n, k).half(),
        "bias": torch.randn(n).half(),
        "residual": torch.randn(m, n).half(),
    }
    inputs["a"][3, 4], inputs["bias"][5], inputs["residual"][7, 8] = (
        torch.nan,
        torch.inf,
        -torch.inf,
    )
    hold(kernel, SIZE, inputs=inputs, activation=activation)


# ---- which serves --------------------------------------------------------------------------------


def served(call):
    from tileops.engine.select import select
    from tileops.gemm.kernels import epilogue

    names = ("CublasEpilogue", *KERNELS)
    selection = select(call, [getattr(epilogue, name) for name in names])
    return selection.kernel.name, dict(selection.refused)


def test_the_librarys_epilogue_serves_what_it_has():
    size, half = (4096, 4096, 4096), torch.bfloat16
    for activation in (None, "relu", "gelu_tanh"):
        name, _ = served(call_like(*size, half, residual=False, activation=activation))
        assert name == "cublas_epilogue"
    for params in ({"activation": "gelu"}, {"activation": "relu", "scale": 2.0},
                   {"activation": "relu", "residual": True}, {"activation": "relu", "bias": False},
                   {"activation": "relu", "keeps_preactivation": True},
                   {"activation": "relu", "out_dtype": torch.float32}):  # fmt: skip
        name, refused = served(call_like(*size, half, **({"residual": False} | params)))
        assert name != "cublas_epilogue"
        assert "library" in refused["cublas_epilogue"] or "bias" in refused["cublas_epilogue"]


def test_float64_is_left_to_the_decomposition():
    from tileops.engine.errors import NoKernelError

    with pytest.raises(NoKernelError, match="float64"):
        served(call_like(64, 64, 64, torch.float64))


def test_descriptors_need_aligned_rows_and_hopper():
    half = torch.float16
    assert "16 bytes" in served(call_like(512, 500, 512, half))[1]["persistent_epilogue"]
    assert "(9, 0)" in served(call_like(512, 512, 512, half, arch=(8, 0)))[1]["persistent_epilogue"]
    assert "few rows" in served(call_like(8, 512, 512, half))[1]["persistent_epilogue"]
    assert "float32" in served(call_like(512, 512, 512, torch.float32))[1]["persistent_epilogue"]


# In benchmarks/results/epilogue_nvidia_h200.json: the size, what differs from bias and GELU, the fastest.
FASTEST = [
    ((4096, 4096, 4096), {}, "persistent_epilogue"),
    ((4096, 4096, 1024), {}, "persistent_epilogue"),
    ((4096, 16384, 4096), {}, "persistent_epilogue"),
    ((4096, 4096, 4096), {"activation": "silu", "bias": False}, "persistent_epilogue"),
    ((4096, 4096, 4096), {"keeps_preactivation": True}, "persistent_epilogue"),
    ((4096, 4096, 4096), {"activation": None, "bias": False, "residual": True}, "persistent_epilogue"),
    ((512, 4096, 4096), {}, "cublas_then_finish"),
    ((16, 4096, 4096), {}, "triton_epilogue"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "params", "kernel"), FASTEST, ids=str)
def test_what_was_fastest_on_an_h200_serves(size, params, kernel):
    call = call_like(*size, torch.bfloat16, **({"residual": False} | params))
    assert served(call)[0] == kernel


def test_the_first_tile_was_the_fastest():
    from tileops.gemm.kernels.epilogue import PersistentEpilogue

    def first(*size, **params):
        tiles = PersistentEpilogue.tiles(call_like(*size, torch.bfloat16, **params))
        assert len(set(tiles)) == len(tiles)
        return tiles[0].rows, tiles[0].columns, tiles[0].warps, tiles[0].stages, tiles[0].beside

    assert first(4096, 4096, 4096, residual=False) == (128, 128, 4, 3, 2)
    assert first(4096, 4096, 4096, residual=True) == (128, 256, 8, 3, 1)
    assert first(512, 4096, 4096, residual=False) == (128, 128, 8, 4, 1)


# ---- machine code --------------------------------------------------------------------------------

WHOLE = {"activation": "gelu", "scale": 0.5, "keeps_preactivation": True}


def compiled(kernel, arch, every, rows=4096, dtype=torch.bfloat16, **params):
    from tileops.gemm.kernels import epilogue

    call = call_like(rows, 4096, 4096, dtype, arch=arch, **(WHOLE | params))
    chosen = getattr(epilogue, kernel)
    entries = chosen.candidates(call) if every else [chosen.entry_for(call)]
    builds = [build for entry in entries for build in builds_of(entry)]
    for build in builds:
        assert_fits(build, arch)
    return builds


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_to_tensor_cores(arch):
    mnemonic = {(8, 0): "HMMA", (9, 0): "HGMMA", (10, 0): "UTCHMMA"}[arch]
    (build,) = compiled("TritonEpilogue", arch, False)
    assert mnemonic in sass(build, arch)
    compiled("CublasThenFinish", arch, False)
    if arch >= (9, 0):
        (build,) = compiled("PersistentEpilogue", arch, False)
        code = sass(build, arch)
        assert mnemonic in code
        assert "UTMALDG" in code  # the bulk copy engine
        assert "UTMASTG" in code


def test_two_programs_fit_on_a_multiprocessor_where_that_is_asked():
    from tileops.gemm.kernels import epilogue

    call = call_like(4096, 4096, 4096, torch.bfloat16, residual=False)
    for tile in epilogue.PERSISTENT_TILES:
        if tile.beside > 1:
            found = assert_fits(epilogue._persistent(call, tile), (9, 0))
            assert tile.beside * (found.shared + 1024) <= 228 << 10
            assert tile.beside * found.registers * tile.warps * 32 <= 1 << 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_every_candidate(kernel, activation, arch):
    if kernel == "PersistentEpilogue" and arch < (9, 0):
        pytest.skip("it is for compute capability 9.0")
    compiled(kernel, arch, True, activation=activation)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
def test_compiles_every_layout(trans_a, trans_b, arch):
    for rows in (16, 4096):
        compiled("TritonEpilogue", arch, False, rows, trans_a=trans_a, trans_b=trans_b)
    if arch >= (9, 0):
        compiled("PersistentEpilogue", arch, False, trans_a=trans_a, trans_b=trans_b)


# ---- the gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("keeps", [False, True])
def test_gradients(activation, keeps):
    if keeps and activation is None:
        return
    m, n, k = 13, 37, 9
    for (trans_a, trans_b), bias, scale in zip(LAYOUTS, (0, 1, 1, 0), (1, 1, 0.5, 2), strict=True):
        dtype = torch.float32 if trans_a else torch.float16
        made = {
            "grad_d": torch.randn(m, n).to(dtype),
            "grad_preactivation": torch.randn(m, n).to(dtype) if keeps and bias else None,
            "a": torch.randn((k, m) if trans_a else (m, k)).to(dtype),
            "b": torch.randn((n, k) if trans_b else (k, n)).to(dtype),
            "bias": torch.randn(n).to(dtype) if bias else None,
            "preactivation": torch.randn(m, n).to(dtype) if keeps else None,
        }
        op = GEMMEpilogueBwdOp(
            trans_a, trans_b, activation=activation, scale=float(scale), wants_residual=trans_b
        )
        check_kernel(op, made)


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1)])
def test_gradients_of_few_elements(size):
    m, n, k = size
    made = {"grad_d": torch.randn(m, n), "a": torch.randn(m, k), "b": torch.randn(n, k)}
    check_kernel(GEMMEpilogueBwdOp(activation="gelu"), made | {"bias": torch.randn(n)})


@pytest.mark.parametrize("wanted", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_gradients_that_are_wanted(wanted):
    names = ("wants_a", "wants_b", "wants_bias", "wants_residual")
    wants = {name: bool(one) for name, one in zip(names, wanted, strict=True)}
    made = {"grad_d": torch.randn(3, 4), "a": torch.randn(3, 5), "b": torch.randn(4, 5)}
    check_kernel(GEMMEpilogueBwdOp(activation="silu", **wants), made | {"bias": torch.randn(4)})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradient_compiles(arch):
    for workload in GEMMEpilogueBwdOp.entry.workloads[:2]:
        prepared(GEMMEpilogueBwdOp, workload, arch)


@pytest.mark.parametrize(
    "op", [SiLUFwdOp(), ExpFwdOp(), SigmoidFwdOp()], ids=lambda op: type(op).__name__
)
def test_powers_of_e_beyond_float32_are_infinite(op):
    # e**88.8 is the first that is; what corrects the rounding of a power must leave that one alone.
    x = torch.linspace(80.0, 110.0, 2000)
    check_kernel(op, {next(i.name for i in op.entry.inputs): torch.cat((x, -x))})


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_slopes_far_from_zero(activation):
    inner = torch.linspace(-120.0, 120.0, 4 * 512).view(4, 512)
    made = {"grad_d": torch.randn(4, 512), "a": torch.eye(4), "b": torch.ones(512, 4)}
    op = GEMMEpilogueBwdOp(activation=activation, wants_b=False, wants_residual=False)
    check_kernel(op, made | {"preactivation": inner})
