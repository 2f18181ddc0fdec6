"""Calls of DTensors on real ranks: what each process of a group runs, on the CPU or on cards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tileops.backend.tolerances import compare
from tileops.elementwise import AddFwdOp, SiLUAndMulFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import LayerNormFwdOp, RMSNormFwdOp
from tileops.reduction import SoftmaxFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp

__all__ = ["CASES", "spawn"]

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


@dataclass(frozen=True)
class Case:
    """One op, what it means in PyTorch, and how its inputs may lie.

    ``layouts``: a placement for each input, that of the result, and how many collectives bring the
    inputs there.
    """

    label: str
    op: Any
    shapes: tuple[tuple[int, ...], ...]
    meaning: Callable[..., torch.Tensor]
    layouts: tuple[tuple[tuple[Any, ...], Any, int], ...]
    integers: frozenset[int] = field(default_factory=frozenset)


def _rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[:, None, None] * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# Sizes divide by neither 2 nor 3: parts are uneven.
CASES = (
    Case(
        "RMSNorm", RMSNormFwdOp((64,), eps=1e-5), ((7, 5, 64), (64,)),
        lambda x, w: F.rms_norm(x, (64,), w, 1e-5),
        (((S0, R), S0, 0), ((S1, R), S1, 0), ((R, R), R, 0), ((S2, R), None, 1), ((S2, S0), None, 2)),
    ),
    Case(
        "LayerNorm", LayerNormFwdOp((64,)), ((7, 5, 64), (64,), (64,)),
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        (((S0, R, R), S0, 0), ((S1, R, R), S1, 0), ((R, R, R), R, 0), ((S2, R, R), None, 1)),
    ),
    Case(
        "SiLUAndMul", SiLUAndMulFwdOp(), ((7, 5, 128),), _silu_and_mul,
        (((S0,), S0, 0), ((S1,), S1, 0), ((R,), R, 0), ((S2,), None, 1), ((P,), None, 1)),
    ),
    Case(
        "RoPE", RoPENeoxPositionIdsFwdOp(64), ((7, 5, 16), (7,)), _rope,
        (((S0, S0), S0, 0), ((S1, R), S1, 0), ((R, R), R, 0), ((P, R), P, 0), ((S2, R), None, 1)),
        frozenset({1}),
    ),
    Case(
        "Softmax", SoftmaxFwdOp(-1), ((7, 5, 64),), lambda x: x.softmax(-1),
        (((S0,), S0, 0), ((S1,), S1, 0), ((R,), R, 0), ((S2,), None, 1)),
    ),
    Case(
        "GEMM", GEMMFwdOp(), ((7, 11), (5, 11)), lambda a, b: a @ b.T,
        (((S0, R), S0, 0), ((R, S0), S1, 0), ((S1, S1), P, 0), ((R, R), R, 0), ((P, R), P, 0),
         ((S1, R), P, 0)),
    ),
    Case(
        "Add", AddFwdOp(alpha=2), ((7, 5, 64), (5, 64)), lambda x, y: x + 2 * y,
        (((S0, R), S0, 0), ((S1, S0), S1, 0), ((S2, S1), S2, 0), ((R, R), R, 0), ((P, P), P, 0)),
    ),
    Case(
        "one row", RMSNormFwdOp((64,)), ((1, 64), (64,)), lambda x, w: F.rms_norm(x, (64,), w),
        (((S0, R), S0, 0),),
    ),
)  # fmt: skip


def _lay(tensor: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    """``tensor`` as it lies on the ranks; as a partial sum each has a part of another size."""
    if placement != P:
        return distribute_tensor(tensor, mesh, [placement])
    rank, count = mesh.get_local_rank(), mesh.size()
    share = tensor * (rank + 1) * 2 / (count * (count + 1))
    return DTensor.from_local(share, mesh, [P], run_check=False)


def _inputs(case: Case, device: str, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Equal on every rank."""
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 64, shape, generator=random).to(device)
        if index in case.integers
        else torch.randn(shape, generator=random).to(device, dtype)
        for index, shape in enumerate(case.shapes)
    ]


def check_case(case: Case, mesh: Any, device: str, dtype: torch.dtype, seed: int) -> None:
    """Every layout of one case: values and collectives."""
    inputs = _inputs(case, device, dtype, seed)
    wide = [t if i in case.integers else t.double() for i, t in enumerate(inputs)]
    for index, tensor in enumerate(wide):
        tensor.requires_grad_(index not in case.integers)
    leaves = [tensor for tensor in wide if tensor.requires_grad]
    expected = case.meaning(*wide)
    (arriving,) = _inputs(replace(case, shapes=(tuple(expected.shape),)), device, dtype, seed + 1)
    gradients = torch.autograd.grad(expected, leaves, arriving.double())
    for placements, result_at, collectives in case.layouts:
        narrow = dtype.itemsize < 4
        if narrow and P in (*placements, result_at):
            continue  # parts are rounded to the dtype before they are summed
        label = f"{case.label} {placements}"
        args = [_lay(t, mesh, at) for t, at in zip(inputs, placements, strict=True)]
        with CommDebugMode() as seen:
            result = case.op(*args)
        assert seen.get_total_counts() == collectives, (label, seen.get_comm_counts())
        assert result_at is None or result.placements == (result_at,), (label, result.placements)
        _assert_close(label, result.full_tensor(), expected, case)
        if P not in placements and not narrow:
            at = result.placements[0]
            grad = distribute_tensor(arriving, mesh, [R if at == P else at])
            _check_gradients(label, case, args, grad, gradients, collectives == 0)


def _check_gradients(
    label: str,
    case: Case,
    args: list[DTensor],
    grad: DTensor,
    expected: tuple[torch.Tensor, ...],
    free: bool,
) -> None:
    """A gradient comes without a collective where the result did: of a weight as partial sums."""
    leaves = [arg.detach().requires_grad_() for n, arg in enumerate(args) if n not in case.integers]
    rest = iter(leaves)
    result = case.op(*(a if n in case.integers else next(rest) for n, a in enumerate(args)))
    with CommDebugMode() as seen:
        found = torch.autograd.grad(result, leaves, grad)
    assert not free or seen.get_total_counts() == 0, (label, seen.get_comm_counts())
    for one, other in zip(found, expected, strict=True):
        _assert_close(f"{label} gradient", one.full_tensor(), other, case)


def _assert_close(label: str, found: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    verdict = compare(found, expected, case.op.entry.kind)
    assert verdict.ok, f"{label}: {verdict.text}"


# ---- processes -----------------------------------------------------------------------------------------


def _main(rank: int, count: int, backend: str, store: str, seed: int) -> None:
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=120),
    )
    try:
        mesh = init_device_mesh(device.partition(":")[0], (count,))
        for dtype in (torch.float32,) if backend == "gloo" else (torch.float32, torch.bfloat16):
            for case in CASES:
                check_case(case, mesh, device, dtype, seed)
    finally:
        dist.destroy_process_group()


def spawn(count: int, backend: str, folder: Any, seed: int) -> None:
    """Run all cases on ``count`` ranks, each a process; raises what the first to fail raised."""
    store = folder / "store"
    torch.multiprocessing.spawn(_main, (count, backend, str(store), seed), nprocs=count)
