"""Whether an op's own kernel or its decomposition, fused with what stands round it, is faster.

The work of pointwise and reduction ops is moving bytes. Inlined, what an op exchanges with a fusable
neighbour stays in registers; kept, its own kernel moves its bytes faster by some share than the code
that Inductor makes of the decomposition, and costs the host the call of an operator. So an op is inlined
where ``saved + OVERHEAD >= ADVANTAGE * moved``, in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Node

from tileops.engine.kernel import CallSpec, TensorSpec
from tileops.engine.manifest.entry import Entry
from tileops.engine.op import Op
from tileops.engine.pattern import Pattern
from tileops.engine.plan import in_tree_kernels
from tileops.engine.select import select
from tileops.engine.targets import device_facts
from tileops.fusion.graph import fusable, hint_of, tensors_of, value_of
from tileops.fusion.reading import fixed

__all__ = [
    "ADVANTAGE",
    "APART",
    "LONGEST_ROW",
    "ON_ONE_CORE",
    "OVERHEAD",
    "Estimate",
    "brings_nothing",
    "epilogue_loses",
    "estimate",
    "is_cpu",
    "one_row_pays",
    "slowly_wide",
    "takes_groups",
    "written_out_wins",
]

ADVANTAGE = {"cuda": {"pointwise": 0.0, "reduction": 0.1}}
"""By device and kind: the share of its bytes' time by which an own kernel beats Inductor's of the same
decomposition. Elsewhere 0: the CPU's own kernels are the decomposition itself."""
OVERHEAD = {"cuda": 4 << 20}
"""What the call of an operator costs the host, in bytes that the device could have moved meanwhile."""

LONGEST_ROW = {torch.float32: 1536, torch.bfloat16: 4096}
"""By dtype: elements of a matrix's row up to which a product of one row is faster on one core of a CPU as
a loop of Inductor's than as the library's product: then the row that is multiplied no longer stays in the
first cache. In float16 the library is faster, float64 was not measured."""
ON_ONE_CORE = (torch.float32,)
"""Dtypes in which the library's product of one row takes one core, however many there are."""

SCORES = {
    ("cpu", torch.float32): (256 * 256, 1024 * 1024),
    ("cpu", torch.bfloat16): (1024 * 1024, 1024 * 1024),
    ("cuda", torch.float16): (64 * 64, 64 * 64),
    ("cuda", torch.bfloat16): (64 * 64, 64 * 64),
}
"""By device and dtype: scores of one head from which torch's attention is faster than Inductor's code for
one that is written out; without a gradient, and with one. On an H200, in bfloat16, it was for the fewest
that were tried. In float32 torch's kernels for CUDA may round to TF32; what is written out does not."""

FLASH_HEAD, FLASH_ARCH = 128, (8, 0)
"""Features of a head up to which FlashAttention serves, gradients included, and the compute capability from
which it does."""

SLOW_IN_FLOAT64 = ("cuda",)
"""Where float64 costs so much that bytes no longer say what work costs."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a call moves by itself, and those of them that fusion saves."""

    moved: int
    saved: int
    device: str
    kind: str

    @property
    def inlining_pays(self) -> bool:
        """The rule."""
        advantage = ADVANTAGE.get(self.device, {}).get(self.kind, 0.0)
        return self.saved + OVERHEAD.get(self.device, 0) >= advantage * self.moved

    def __str__(self) -> str:
        return f"fusion saves {self.saved} of {self.moved} bytes"


def estimate(node: Node, kind: str, melting: frozenset[Node]) -> Estimate:
    """The estimate for the call of an op; ``melting``: calls of other ops that may be inlined too."""
    moved = saved = 0
    values = tensors_of([value_of(n) for n in node.all_input_nodes])
    device = values[0].device.type

    def melts(other: Node) -> bool:
        return other in melting or fusable(other)

    for source in node.all_input_nodes:
        size = _nbytes(value_of(source))
        moved += size
        if _producer(source, melts):
            # Read from registers; not written either where nobody else reads it.
            saved += size * (2 if len(source.users) == 1 else 1)
    for output in _outputs(node):
        size = _nbytes(value_of(output))
        moved += size
        users = list(output.users)
        near = [user for user in users if melts(user)]
        if near:
            saved += size * (2 if len(near) == len(users) else 1)
    return Estimate(moved, saved, device, kind)


def _producer(source: Node, melts: Any) -> bool:
    if source.op not in ("call_function", "call_method"):
        return False
    getitem = (
        source.target.__class__ is not str and getattr(source.target, "__name__", "") == "getitem"
    )
    if getitem and isinstance(source.args[0], Node) and isinstance(value_of(source.args[0]), tuple):
        return melts(source.args[0])
    return melts(source)


def _outputs(node: Node) -> list[Node]:
    if not isinstance(value_of(node), tuple | list):
        return [node]
    return [user for user in node.users if user.op == "call_function"]


def _nbytes(value: Any) -> int:
    return sum(hint_of(t.numel()) * t.dtype.itemsize for t in tensors_of(value))


def one_row_pays(dtype: torch.dtype, length: int) -> str:
    """'' where a product of one row of ``length`` elements is faster as a loop, else why it is not."""
    longest = LONGEST_ROW.get(dtype)
    if longest is None:
        return f"the library's product serves {dtype}"
    if length <= longest or (dtype in ON_ONE_CORE and torch.get_num_threads() > 1):
        return ""
    return f"the library's product is faster for more than {longest} elements a row, here {length}"


def slowly_wide(device: torch.device, inputs: list[Any], steps: list[Any]) -> bool:
    """Whether a decomposition takes steps in float64 that its inputs do not ask for, where those are slow.
    An own kernel reaches that accuracy otherwise, and Inductor would take the steps for each element."""
    wide = torch.float64
    given = any(t.dtype is wide for t in tensors_of(inputs))
    return (
        device.type in SLOW_IN_FLOAT64
        and not given
        and any(t.dtype is wide for t in tensors_of(steps))
    )


def brings_nothing(entry: Entry, pattern: Pattern, device: str, gradient: bool) -> str:
    """Why an op that in-tree kernels would serve should not take the place of plain PyTorch that means it;
    '' where it should. ``gradient``: one will be asked for."""
    if pattern.no_gain:
        return pattern.no_gain
    if entry.kind == "template":
        derived = gradient and entry.backward is None
        return "its gradient would be that of its decomposition" if derived else ""
    if ADVANTAGE.get(device, {}).get(entry.kind, 0.0) > 0.0:
        return ""
    return f"on {device} its own kernel is no faster than Inductor's code"


# ---- attention -----------------------------------------------------------------------------------


def written_out_wins(result: torch.Tensor, keys: Any) -> str:
    """Why attention that is written out should stay so; '' where torch's function is faster. ``result``:
    its fake value."""
    limits = SCORES.get((result.device.type, result.dtype))
    if limits is None:
        return (
            f"torch's attention was not seen to be faster on {result.device.type} in {result.dtype}"
        )
    scores, least = hint_of(result.shape[-2]) * hint_of(keys), limits[result.requires_grad]
    if scores >= least:
        return ""
    return f"Inductor's code is faster for fewer than {least} scores a head, here {scores}"


def takes_groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
) -> bool:
    """Whether torch's attention reads grouped heads uncopied, as FlashAttention does where there is no mask
    and cuDNN's where that takes the call. ``[B, H, S, D]`` each, fake values."""
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda":
        return False
    able = device_facts(q.device).arch >= FLASH_ARCH and torch.backends.cuda.flash_sdp_enabled()
    if mask is None and able and q.dtype.itemsize == 2 and q.shape[-1] <= FLASH_HEAD:
        return True
    if not torch.cuda.is_available():
        return False
    given: list[Any] = [None if t is None else _hinted(t) for t in (q, k, v, mask)]
    params = torch.backends.cuda.SDPAParams(*given, dropout, causal, True)  # type: ignore[call-arg]
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _hinted(fake: Any) -> Any:
    """A fake value of the sizes that are hinted where they are symbolic: no guard comes of asking it."""
    if all(fixed(n) is not None for n in fake.shape):
        return fake
    sizes, strides = map(hint_of, fake.shape), map(hint_of, fake.stride())
    with fake.fake_mode:
        made = torch.empty_strided(
            tuple(sizes), tuple(strides), dtype=fake.dtype, device=fake.device
        )
    return made.requires_grad_(fake.requires_grad)


# ---- epilogues of products -----------------------------------------------------------------------

APART = ("cublas_then_finish", "product_then_steps")
"""The kernels that do what Inductor does: the library's product, then others over its result."""


def is_cpu(device: torch.device) -> bool:
    """Whether products are those of a CPU's libraries."""
    return device_facts(device).type == "cpu"


def epilogue_loses(
    op: Op, inputs: Mapping[str, Any], outputs: Mapping[str, Any], device: torch.device
) -> str:
    """Why the op of a product with an epilogue would not be faster than both apart; '' where it would.

    By the times that its in-tree kernels declare. ``inputs`` and ``outputs``: fake values by name; their
    symbolic sizes count as hinted.
    """
    facts = device_facts(device)
    call = CallSpec(
        type(op).__name__, SimpleNamespace(**op._params), {},
        {name: _spec(value) for name, value in inputs.items()},
        {name: _spec(value) for name, value in outputs.items()}, facts,
    )  # fmt: skip
    found = select(call, in_tree_kernels(type(op), facts.type))
    if found.kernel.name not in APART and not found.kernel.last_resort:
        return ""
    others = "; ".join(f"{name}: {why}" for name, why in found.refused if name != "decomposition")
    return f"the library's product and a kernel after it are as fast ({others})"


def _spec(value: Any) -> TensorSpec | None:
    if value is None:
        return None
    return TensorSpec.contiguous_of(tuple(map(hint_of, value.shape)), value.dtype, value.device)
