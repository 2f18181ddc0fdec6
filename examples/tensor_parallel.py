"""A decoder layer of SmolLM2 on several ranks: tileops operators on DTensors.

    python -m examples.tensor_parallel                # two processes on the CPU
    python -m examples.tensor_parallel --ranks 4      # any number that divides the heads

The layer is written as for one device. ``PLAN`` says how its modules lie on the ranks, in the words of
``torch.distributed.tensor.parallel``: tokens are split between the layer's big matrices (sequence
parallelism), heads and the wide dim of the feed-forward net within them (tensor parallelism). Each
rank runs the very same operators on its part. Every rank then checks result and gradients against the
layer on one device.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tileops.attention import GQADenseFwdOp
from tileops.elementwise import AddFwdOp, MulFwdOp, SiLUFwdOp
from tileops.gemm import GEMMFwdOp
from tileops.norm import RMSNormFwdOp
from tileops.rope import RoPENeoxPositionIdsFwdOp


@dataclass(frozen=True)
class Sizes:
    """Of SmolLM2-1.7B: 32 heads, each with keys and values of its own."""

    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    kv_heads: int = 32
    max_position: int = 8192
    rope_base: float = 130000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Linear(nn.Linear):
    """``x @ weight.T``; ``x``: [N, in]."""

    gemm = GEMMFwdOp()

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gemm(x, self.weight)


class Norm(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.hidden))
        self.op = RMSNormFwdOp((sizes.hidden,), sizes.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.kv_heads * sizes.head_dim
        self.q, self.k = Linear(sizes.hidden, sizes.hidden), Linear(sizes.hidden, width)
        self.v, self.o = Linear(sizes.hidden, width), Linear(sizes.hidden, sizes.hidden)
        self.rope = RoPENeoxPositionIdsFwdOp(sizes.max_position, sizes.rope_base)
        self.attend = GQADenseFwdOp(is_causal=True)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = (x.shape[0], -1, self.sizes.head_dim)
        query = self.rope(self.q(x).view(heads), positions)
        key = self.rope(self.k(x).view(heads), positions)
        value = self.v(x).view(heads)
        mixed = self.attend(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0))
        return self.o(mixed.view(x.shape[0], -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = Linear(sizes.hidden, sizes.intermediate)
        self.up = Linear(sizes.hidden, sizes.intermediate)
        self.down = Linear(sizes.intermediate, sizes.hidden)
        self.silu, self.mul = SiLUFwdOp(), MulFwdOp()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mul(self.silu(self.gate(x)), self.up(x)))


class Layer(nn.Module):
    """``x``: [N, hidden], the tokens of one text; ``positions``: int64 [N]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = Norm(sizes), Norm(sizes)
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes)
        self.add = AddFwdOp()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.add(x, self.attention(self.attn_norm(x), positions))
        return self.add(x, self.feed_forward(self.ffn_norm(x)))


_COLUMNS = ColwiseParallel(use_local_output=False)
_ROWS = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
PLAN = {
    "attn_norm": SequenceParallel(sequence_dim=0),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(0), Replicate()), desired_input_layouts=(Replicate(), Replicate())
    ),
    **dict.fromkeys(("attention.q", "attention.k", "attention.v"), _COLUMNS),
    "attention.o": _ROWS,
    "ffn_norm": SequenceParallel(sequence_dim=0),
    "feed_forward": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    **dict.fromkeys(("feed_forward.gate", "feed_forward.up"), _COLUMNS),
    "feed_forward.down": _ROWS,
}


def compare(rank: int, ranks: int, device: str, store: str, sizes: Sizes, tokens: int) -> None:
    """What each process runs."""
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        device_id=where if device == "cuda" else None,
    )
    try:
        torch.manual_seed(0)  # equal weights and inputs on every rank
        torch.set_default_device(where)
        torch.set_num_threads(1)
        mesh = init_device_mesh(device, (ranks,))
        layer = Layer(sizes)
        x = torch.randn(tokens, sizes.hidden, requires_grad=True)
        positions = torch.arange(tokens)
        wanted = layer(x, positions)
        arriving = torch.randn_like(wanted)
        gradients = torch.autograd.grad(wanted, [x, *layer.parameters()], arriving)

        parallelize_module(layer, mesh, PLAN)
        split = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as seen:
            result = layer(split, positions)
        counts = {str(op).rpartition(".")[2]: n for op, n in seen.get_comm_counts().items()}
        result.backward(distribute_tensor(arriving, mesh, [Shard(0)]))
        whole = result.full_tensor()
        difference = (whole - wanted).abs().max()
        torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
        for leaf, gradient in zip([split, *layer.parameters()], gradients, strict=True):
            found = leaf.grad
            assert isinstance(found, DTensor)
            torch.testing.assert_close(found.full_tensor(), gradient, rtol=1e-3, atol=1e-3)
        if rank == 0:
            part = layer.attention.q.weight
            assert isinstance(part, DTensor)
            print(f"{ranks} ranks, {tokens} tokens, {sizes.heads} heads")
            print(f"rank 0 holds {part.to_local().shape[0]} of {part.shape[0]} rows of q")
            print("collectives of the layer: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
            print(f"largest difference to one device: {difference:.1e}")
    finally:
        dist.destroy_process_group()


def run(ranks: int, device: str = "cpu", sizes: Sizes | None = None, tokens: int = 31) -> None:
    """Start the processes and wait for them; raises what the first to fail raised."""
    sizes = sizes or Sizes()
    if ranks < 1 or sizes.heads % ranks or sizes.kv_heads % ranks:
        raise SystemExit(f"{ranks} ranks do not divide {sizes.heads} and {sizes.kv_heads} heads")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(compare, (ranks, device, store, sizes, tokens), nprocs=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes; they divide the heads")
    parser.add_argument("--tokens", type=int, default=31, help="need not divide by the ranks")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a card a rank"
    )
    given = parser.parse_args()
    run(given.ranks, given.device, tokens=given.tokens)


if __name__ == "__main__":
    main()
