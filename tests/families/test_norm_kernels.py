"""RMSNorm kernels: numerics in Triton's interpreter against float64, regions, and what the
compiler says. On a card, what only a card can show: order of summation and 64-bit offsets.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.kernel_calls import builds_of, call_of, chosen, misaligned, poison, run_entry, shapes
from tests.triton_interpreter import interpreted
from tileops.authoring import DeviceFacts

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One rounding to the dtype; in float32 also the sum's own (a tree over at most 2^18 squares) and
# an approximate reciprocal square root, within 2^-22.
TOLERANCE = {
    torch.float16: {"rtol": 2**-10, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-30},
    torch.float32: {"rtol": 2e-6, "atol": 1e-30},
}
EPS32 = torch.finfo(torch.float32).eps


def kernels():
    from tileops.norm.kernels import rows

    return rows.ManyShortRows, rows.RegisterRow, rows.StreamedRow


def norm_call(x, weight=None, residual=None, eps=1e-6, rank=1, **facts):
    """From tensors, or from ``(shape, dtype)`` on a card that need not be there."""
    named = {"x": x, "weight": weight, "residual": residual}
    if not isinstance(x, torch.Tensor):
        named = shapes(**named)
    x, shape = named["x"], tuple(named["x"].shape)
    like = shapes(x.device, output=(shape, x.dtype))["output"]
    if residual is not None:
        inputs = {"input": x, "residual": named["residual"], "weight": named["weight"]}
        outputs = {"output": like, "residual_out": like}
        return call_of("FusedAddRMSNormFwdOp", inputs, outputs, params={"eps": eps}, **facts)
    params = {"normalized_shape": shape[len(shape) - rank :], "eps": eps}
    inputs = {"x": x, "weight": named["weight"]}
    return call_of("RMSNormFwdOp", inputs, {"output": like}, params=params, **facts)


def spec_call(count, length, dtype, *, weight=True, residual=False, aligned=True, **facts):
    row = ((count, length), dtype)
    given = ((length,), dtype) if weight or residual else None
    call = norm_call(row, given, row if residual else None, **facts)
    inputs = {
        name: None if spec is None else replace(spec, aligned=aligned)
        for name, spec in call.inputs.items()
    }
    return replace(call, inputs=inputs)


@interpreted
def run_norm(x, weight=None, residual=None, way=None, **options):
    """By the default entry, or by ``way``: a number of a candidate, or a method of the kernel."""
    call = norm_call(x, weight, residual, **options)
    kernel = chosen(call, *kernels())
    if way is None:
        entry = kernel.entry_for(call)
    elif isinstance(way, int):
        entry = kernel.candidates(call)[way]
    else:
        entry = getattr(kernel, way)(call)
    with poison():
        if residual is None:
            return run_entry(entry, call, x, weight)
        return run_entry(entry, call, x, residual, weight)


def norm64(x, weight=None, eps=1e-6, rank=1):
    values = x.double()
    dims = tuple(range(-rank, 0))
    result = values / (values.square().mean(dims, keepdim=True) + eps).sqrt()
    return result if weight is None else result * weight.double()


def check(actual, expected):
    torch.testing.assert_close(
        actual, expected.to(actual.dtype), equal_nan=True, **TOLERANCE[actual.dtype]
    )


def check_added(actual, x, residual, weight, eps=1e-6):
    output, total = actual
    if total.is_cuda or total.dtype is not torch.bfloat16:
        assert torch.equal(total, x + residual)
    else:  # the interpreter truncates to bfloat16 where a card rounds
        check(total, x.double() + residual.double())
    check(output, norm64(total, weight, eps))


# --- numerics -----------------------------------------------------------------------------------

# Both sides of every region's ends (1024; 65536 bytes; 16384 where rows begin anywhere), sizes of
# one, primes, powers of two and padded ones; rows that fill no tile, and more than one tile.
LENGTHS = [
    (1, 1),
    (3000, 1),
    (5, 2),
    (3, 3),
    (19, 127),
    (17, 128),
    (3, 1000),
    (3, 1024),
    (2, 1025),
    (2, 1031),
    (3, 4096),
    (2, 5120),
    (1, 16381),
    (2, 16384),
    (1, 16385),
    (1, 32768),
    (1, 32769),
    (2, 65537),
    (1, 81920),
]


@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_rms_norm(count, length):
    dtype = DTYPES[(LENGTHS.index((count, length)) + 0) % 3]
    x = torch.randn(count, length).to(dtype)
    weight = torch.randn(length).to(dtype)
    before = x.clone(), weight.clone()
    check(run_norm(x, weight), norm64(x, weight))
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize(("count", "length"), LENGTHS)
def test_fused_add_rms_norm(count, length):
    dtype = DTYPES[(LENGTHS.index((count, length)) + 1) % 3]
    x, residual = torch.randn(2, count, length).to(dtype).unbind()
    weight = torch.randn(length).to(dtype)
    before = x.clone(), residual.clone()
    check_added(run_norm(x, weight, residual), x, residual, weight)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("length", [96, 2048, 40000])
def test_no_weight_and_default_eps(length):
    x = torch.randn(2, length) * 1e-4  # so that epsilon counts
    check(run_norm(x, eps=None), norm64(x, eps=EPS32))


@pytest.mark.parametrize("length", [96, 2048, 40000])
def test_weight_of_another_type(length):
    x, weight = torch.randn(2, length).half(), torch.randn(length)
    check(run_norm(x, weight), norm64(x, weight))


def test_several_normalized_dimensions():
    x, weight = torch.randn(2, 3, 4, 50), torch.randn(4, 50)
    check(run_norm(x, weight, rank=2), norm64(x, weight, rank=2))


@pytest.mark.parametrize("length", [128, 4096, 70000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned(length, dtype):
    x = misaligned(torch.randn(2, length).to(dtype))
    weight = torch.randn(length).to(dtype)
    check(run_norm(x, weight), norm64(x, weight))


@pytest.mark.parametrize("length", [64, 3000, 70000])
def test_values_that_are_no_numbers(length):
    """NaN and infinity stay in their row and do there what torch does."""
    x = torch.randn(4, length)
    x[0, 1], x[1, 2], x[2] = float("nan"), float("inf"), 0
    check(run_norm(x), torch.nn.functional.rms_norm(x, (length,), eps=1e-6))


@pytest.mark.parametrize("shape", [(0, 128), (0, 4096), (0, 70000), (3, 0)])
def test_no_elements(shape):
    x, weight = torch.randn(shape), torch.randn(shape[1:])
    assert run_norm(x, weight).shape == shape
    output, total = run_norm(x, weight, x)
    assert output.shape == total.shape == shape


@pytest.mark.parametrize("length", [160, 2048])
@pytest.mark.parametrize("added", [False, True])
def test_every_candidate(length, added):
    """Among them programs that take several tiles each: one multiprocessor has fewer programs."""
    rows = 70 if length == 160 else 20
    x, weight = torch.randn(rows, length), torch.randn(length)
    residual = torch.randn(rows, length) if added else None
    call = norm_call(x, weight, residual)
    count = len(chosen(call, *kernels()).candidates(call))
    assert count > 4
    for way in range(added, count, 2):
        actual = run_norm(x, weight, residual, way, multiprocessors=1)
        if added:
            check_added(actual, x, residual, weight)
        else:
            check(actual, norm64(x, weight))


@pytest.mark.parametrize("length", [40000, 33001])
def test_split_rows_sum_as_whole_rows_do(length):
    x, residual, weight = torch.randn(2, length), torch.randn(2, length), torch.randn(length)
    assert torch.equal(run_norm(x, weight, way="split"), run_norm(x, weight, way="whole"))
    split = run_norm(x, weight, residual, way="split")
    whole = run_norm(x, weight, residual, way="whole")
    assert all(map(torch.equal, split, whole))


# --- regions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aligned", [True, False])
def test_regions_cover_every_length_once(dtype, aligned):
    short, held, streamed = kernels()
    ends = {1024, 16384, 32768}
    for length in sorted({n + d for n in ends for d in (-1, 0, 1)} | {0, 1, 3, 262144, 2**31}):
        expected = short if length <= 1024 else held
        apart = length % 2 or not aligned
        if length > (16384 if apart or dtype is torch.float32 else 32768):
            expected = streamed
        call = spec_call(3, length, dtype, aligned=aligned)
        assert chosen(call, short, held, streamed) is expected, length
        refusals = [k.refuses(call) for k in (short, held, streamed) if k is not expected]
        assert all(str(length) in reason for reason in refusals)


def test_float64_is_refused_by_all():
    for length in (64, 2048, 70000):
        call = spec_call(3, length, torch.float64)
        reasons = [kernel.refuses(call) for kernel in kernels()]
        assert None not in reasons
        assert "float64 is not one of float16, bfloat16, float32" in reasons


@pytest.mark.parametrize("length", [96, 2048, 7168, 16384])
def test_the_number_of_rows_changes_no_build(length):
    builds = set()
    for count in (1, 7, 2048, 10**6):
        call = spec_call(count, length, torch.float16)
        builds.add(chosen(call, *kernels()).entry_for(call).identity)
    assert len(builds) == 1


# --- what the compiler says ---------------------------------------------------------------------


def builds(call):
    """Those of the default entry, both ways of a streamed row included."""
    kernel = chosen(call, *kernels())
    if kernel is not kernels()[2]:
        return builds_of(kernel.entry_for(call))
    return builds_of(kernel.whole(call)) + builds_of(kernel.split(call))


WORKLOADS = [
    (2048, 4096, torch.bfloat16),
    (32768, 8192, torch.float16),
    (65536, 128, torch.bfloat16),
    (4, 262144, torch.float32),
]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("count", "length", "dtype"), WORKLOADS)
def test_fits(count, length, dtype, residual):
    arch = ARCHITECTURES[(WORKLOADS.index((count, length, dtype)) + residual) % 3]
    for build in builds(spec_call(count, length, dtype, residual=residual)):
        assert_fits(build, arch)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "residual"), [(128, False), (4096, True), (70000, True)])
def test_every_candidate_compiles(length, residual):
    call = spec_call(2048, length, torch.float16, residual=residual, arch=(9, 0))
    for entry in chosen(call, *kernels()).candidates(call):
        for build in builds_of(entry):
            assert build.compile_for((9, 0)).asm["cubin"]


# The most registers a region needs: near its longest row, padded, or with rows that begin anywhere.
TIGHT = [1, 127, 1001, 1025, 5120, 7168, 8191, 16381, 16384, 20001, 32766, 32768, 99991, 262144]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [False, True])
def test_fits_where_registers_are_tight(residual, dtype):
    cases = [*((length, True) for length in TIGHT), (6144, False), (16384, False)]
    for turn, (length, aligned) in enumerate(cases, start=residual + dtype.itemsize):
        arch = ARCHITECTURES[turn % 3]
        call = spec_call(9, length, dtype, residual=residual, aligned=aligned)
        for build in builds(call):
            assert_fits(build, arch)


@pytest.mark.parametrize(("count", "length", "dtype"), WORKLOADS)
def test_accesses_are_16_bytes_wide(count, length, dtype):
    for build in builds(spec_call(count, length, dtype)):
        accesses = re.findall(r"\b(?:LDG|STG)\.[.\w]+", sass(build, (9, 0)))
        narrow = {access[:3] for access in accesses if not access.endswith(".128")}
        # Sums of chunks are numbers, written by one kernel and read by the next.
        expected = {"chunk_sums": {"STG"}, "normalize_chunks": {"LDG"}}
        assert narrow == expected.get(build.fn.partition(":")[2], set()), accesses
        assert len(accesses) > len(narrow)


@pytest.mark.parametrize("length", [65536, 99991, 49154])
@pytest.mark.parametrize("aligned", [True, False])
def test_split_and_whole_rows_spread_alike(length, aligned):
    """The order of summation follows from how a chunk is spread over threads."""
    whole, sums, _ = builds(spec_call(3, length, torch.float16, aligned=aligned))
    spread = []
    for build in (whole, sums):
        code = build.compile_for((9, 0)).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked.*)$", code, re.MULTILINE))
        (summed,) = re.findall(r"\(tensor<\d+xf32, (#\w+)>\) -> f32", code)
        spread.append(layouts[summed])
    assert spread[0] == spread[1]


# --- on a card ----------------------------------------------------------------------------------


def on_card(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
    return pytest.mark.gpu(skip(test))


def card():
    from tileops.norm.kernels import rows

    assert rows
    about = torch.cuda.get_device_properties(0)
    return DeviceFacts(
        "cuda",
        0,
        (about.major, about.minor),
        about.name,
        about.multi_processor_count,
        about.shared_memory_per_block_optin,
    )


def on_device(x, weight=None, residual=None, way=None):
    call = replace(norm_call(x, weight, residual), device=card())
    kernel = chosen(call, *kernels())
    entry = kernel.entry_for(call) if way is None else getattr(kernel, way)(call)
    inputs = (x, weight) if residual is None else (x, residual, weight)
    return run_entry(entry, call, *inputs)


def fresh(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


@on_card
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "length"), [*LENGTHS, (2048, 4096), (300, 65536)])
def test_numerics_on_card(count, length, dtype):
    x, residual = fresh(count, length, dtype=dtype), fresh(count, length, dtype=dtype)
    weight = fresh(length, dtype=dtype)
    check(on_device(x, weight), norm64(x, weight))
    check(on_device(x), norm64(x))
    check_added(on_device(x, weight, residual), x, residual, weight)


@on_card
@pytest.mark.parametrize("length", [1, 96, 127, 1024, 2880, 4096, 8191, 16384, 40001, 65536])
def test_a_row_does_not_depend_on_its_neighbours(length):
    """Nor on how many there are, which decides grids and whether long rows are split."""
    x, residual = fresh(400, length, dtype=torch.bfloat16), fresh(400, length, dtype=torch.bfloat16)
    weight = fresh(length, dtype=torch.bfloat16)
    every, added = on_device(x, weight), on_device(x, weight, residual)
    for rows in (slice(0, 1), slice(8, 16), slice(392, 400), slice(0, 200)):
        assert torch.equal(on_device(x[rows], weight), every[rows])
        some = on_device(x[rows], weight, residual[rows])
        assert torch.equal(some[0], added[0][rows])
        assert torch.equal(some[1], added[1][rows])


@on_card
@pytest.mark.parametrize("length", [128, 8192, 65536])
def test_more_than_2_to_the_31_elements(length):
    count = 2**31 // length + 77
    x = torch.empty(count, length, device="cuda", dtype=torch.float16).normal_()
    y = on_device(x)
    for rows in (slice(0, 5), slice(count - 90, count)):
        check(y[rows], norm64(x[rows]))


@on_card
@pytest.mark.parametrize("length", [128, 4096, 65536])
def test_graph_capture(length):
    x, weight = fresh(20, length, dtype=torch.float16), fresh(length, dtype=torch.float16)
    on_device(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = on_device(x, weight)
    x.copy_(fresh(20, length, dtype=torch.float16))
    y.fill_(float("nan"))
    graph.replay()
    check(y, norm64(x, weight))
