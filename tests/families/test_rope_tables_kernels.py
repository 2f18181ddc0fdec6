"""The rotation by tables: numerics in Triton's interpreter against float64, and what the compiler says."""

from __future__ import annotations

import pytest
import torch

from tests.aot import ARCHITECTURES, assert_fits, sass
from tests.families.test_rope_kernels import DTYPES, check
from tests.kernel_calls import builds_of, call_of, misaligned, poison, run_entry, shapes
from tests.oracle_rope import by_tables
from tests.triton_interpreter import interpreted

LAYOUTS = ["neox", "interleaved"]
WAYS = {"Fwd": ("x", "output"), "Bwd": ("grad_output", "grad_x")}


def tables_call(x, cos, sin, layout="neox", way="Fwd", **facts):
    """Of tensors, or of ``(shape, dtype)`` each."""
    turned, result = WAYS[way]
    real = isinstance(x, torch.Tensor)
    shape, dtype = (tuple(x.shape), x.dtype) if real else x
    out = shapes(x.device if real else torch.device("cuda", 0), out=(shape, dtype))["out"]
    inputs = {turned: x, "cos": cos, "sin": sin}
    inputs = inputs if real else shapes(**inputs)
    params = {"rope_layout": layout, **({"wants_x": True} if way == "Bwd" else {})}
    return call_of(f"RoPETables{way}Op", inputs, {result: out}, params=params, **facts)


@interpreted
def run(x, cos, sin, layout="neox", way="Fwd", candidate=0, multiprocessors=132):
    from tileops.rope.kernels.rotate_by_tables import RotateByTables

    call = tables_call(x, cos, sin, layout, way, multiprocessors=multiprocessors)
    assert RotateByTables.refuses(call) is None
    with poison():
        return run_entry(RotateByTables.candidates(call)[candidate], call, x, cos, sin)


def held(lead, tables, width, dtype, layout, pairs=False, wide=False, **more):
    """The kernel of a random call, both ways, against complex arithmetic in float64."""
    x = torch.randn(*lead, width).to(dtype)
    table = (*tables, width // (1 + pairs))
    cos, sin = (torch.rand(table).mul(2).sub(1) for _ in range(2))
    cos, sin = (cos, sin) if wide else (cos.to(dtype), sin.to(dtype))
    for way in WAYS:
        before = x.clone()
        check(run(x, cos, sin, layout, way, **more), by_tables(x, cos, sin, layout, way == "Bwd"))
        assert torch.equal(x, before)


CASES = [
    ((2, 5, 3), (2, 5, 1), 8),  # positions, heads
    ((2, 3, 5), (2, 1, 5), 8),  # heads, positions
    ((2, 3, 41), (1, 1, 41), 24),  # tables of one sequence for all; neither half is a power of two
    ((2, 70, 3), (70, 1), 64),
    ((7, 19, 1), (7, 1, 1), 128),  # a decode step
    ((3, 37, 1), (1, 1, 1), 64),  # in which all are at one position
    ((33,), (33,), 2),  # nothing is broadcast
    ((3, 4, 5, 2), (3, 1, 5, 1), 8),  # two groups of each kind
    ((3, 4, 5, 2), (4, 1, 2), 8),
    ((2, 0, 3), (2, 0, 1), 8),
    ((), (), 6),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("lead", "tables", "width"), CASES, ids=str)
def test_shapes(lead, tables, width, layout):
    held(lead, tables, width, torch.float32, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, pairs, layout):
    for wide in {False, dtype is not torch.float32}:
        held((2, 5, 3), (2, 5, 1), 40, dtype, layout, pairs, wide)


@pytest.mark.parametrize(("candidate", "multiprocessors"), [(0, 1), (0, 132), (1, 132), (2, 132)])
def test_candidates_and_parts(candidate, multiprocessors):
    for tables in ((20, 1), (1, 1), (1, 19)):
        more = {"candidate": candidate, "multiprocessors": multiprocessors}
        held((20, 19), tables, 128, torch.float32, "neox", True, **more)


def test_memory_that_is_not_aligned():
    x, cos, sin = (misaligned(torch.rand(5, 8)) for _ in range(3))
    check(run(x, cos, sin), by_tables(x, cos, sin, "neox"))


def test_refusals():
    from tileops.rope.kernels.rotate_by_tables import RotateByTables

    def refused(lead, tables, width=8, dtype=torch.float32):
        call = tables_call(((*lead, width), dtype), *(((*tables, width), dtype),) * 2)
        return str(RotateByTables.refuses(call))

    assert "float64" in refused((2,), (2,), dtype=torch.float64)
    assert "at most 4096" in refused((2,), (2,), 4098)
    assert "more than two places" in refused((2,) * 6, (2, 1) * 3)
    assert "more than 2147483647" in refused((1 << 16, 1 << 16), (1, 1))
    assert refused((2, 2, 1, 2, 2), (2, 2, 1, 1, 2)) == "None"


def build(
    lead, tables, width, dtype, layout="neox", pairs=False, way="Fwd", arch=(9, 0), wide=False
):
    from tileops.rope.kernels.rotate_by_tables import RotateByTables

    table = ((*tables, width // (1 + pairs)), torch.float32 if wide else dtype)
    call = tables_call(((*lead, width), dtype), table, table, layout, way, arch=arch)
    return [builds_of(entry)[0] for entry in RotateByTables.candidates(call)]


def test_batch_and_length_are_not_in_the_identity():
    def identity(batch, length, heads=32):
        lead, tables = (batch, length, heads), (batch, length, 1)
        return build(lead, tables, 128, torch.bfloat16)[0].identity

    assert identity(1, 4096) == identity(3, 17) == identity(64, 1, 8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pairs", [False, True])
def test_compiles_to_wide_accesses(pairs, layout, arch):
    for lead, tables in (((1, 4096, 32), (1, 4096, 1)), ((64, 32, 1), (1, 1, 1))):
        one = build(lead, tables, 128, torch.bfloat16, layout, pairs, arch=arch)[0]
        assert_fits(one, arch)
        code = sass(one, arch)
        assert "LDG.E.128" in code
        assert "STG.E.128" in code


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [64, 96, 576, 4096])
def test_compiles(width, layout, dtype, arch):
    for one in build(
        (2, 2048, 8), (2, 2048, 1), width, dtype, layout, way="Bwd", arch=arch, wide=True
    ):
        assert_fits(one, arch)
