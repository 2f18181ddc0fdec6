"""Programs that nearly mean an op: right whatever is made of them.

Each is one of the spellings below with steps put in at random, which write, cast, detach or rearrange what
is there. Whether something is matched is not said; what comes out is.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.rewriting import rewritten
from tests.substituting import ONLY

pytestmark = pytest.mark.slow

SPELLINGS = {
    "rms_norm": [
        "a = x.{wide}", "b = a.pow(2)", "m = b.mean(-1, keepdim=True)", "r = torch.rsqrt(m + 1e-2)",
        "n = a * r", "h = n.{own}", "y = h * w.{own}",
    ],
    "layer_norm": [
        "a = x.{wide}", "u = a.mean(-1, keepdim=True)", "d = a - u", "v = (d * d).mean(-1, keepdim=True)",
        "n = d / torch.sqrt(v + 1e-2)", "h = n.{own}", "y = h * w.{own} + b.{own}",
    ],
    "add and norm": [
        "t = (x + z).{own}", "a = t.float()", "m = (a * a).sum(-1, keepdim=True) / 8",
        "r = (m + 1e-2) ** -0.5", "h = (a * r).{own}", "y = w.{own} * h", "q = t + 1",
    ],
    "add and torch's norm": ["t = x + z", "n = F.rms_norm(t, (8,), w, 1e-2)", "y = n", "q = t.abs()"],
    "rotation": [
        "a = x.{wide}", "c = z.{wide}", "u = a[..., :4]", "t = a[..., 4:]", "r = torch.cat((-t, u), -1)",
        "m = a * c", "n = r * (c + 1)", "y = (m + n).{own}",
    ],
    "rotation of pairs": [
        "a = x.{wide}", "c = z.{wide}[..., :4]", "u = a[..., ::2]", "t = a[..., 1::2]", "m = u * c - t * c",
        "n = t * c + u * c", "y = torch.stack((m, n), -1).flatten(-2).{own}",
    ],
    "gate": ["a = x.{wide}", "g = a[..., :4]", "u = a[..., 4:]", "e = F.silu(g)", "y = e * u"],
}  # fmt: skip
STEPS = [
    "{v}.add_(0.5)", "{v}.mul_({u})", "{v} = {v}.bfloat16().float()", "{v} = {v}.half()", "{v} = {v}.float()",
    "{v} = {v}.t()", "{v} = {v}.detach()", "{v} = {v} + {u}", "{v} = {v}.clone()", "{v} = -{v}",
    "{v} = {v}.view(-1).view({v}.shape)", "{v} = {v}[:]", "{v} = {v} * 2", "{v} = {v}.unsqueeze(0)[0]",
    "{v} = {v}.transpose(0, 1).transpose(0, 1)", "{u} = {v}", "x.zero_()", "w.add_(1)", "z.mul_(2)", "a = {v}",
]  # fmt: skip
CASTS = [
    ("float()", "float()"),
    ("float()", "bfloat16()"),
    ("double()", "float()"),
    ("float()", "half()"),
]


def program(draw: random.Random) -> tuple[str, Any]:
    """Its text and the function."""
    wide, own = draw.choice(CASTS)
    lines = [s.format(wide=wide, own=own) for s in draw.choice(list(SPELLINGS.values()))]
    for _ in range(draw.choice([0, 1, 1, 2, 2, 3])):
        place = draw.randrange(1, len(lines) + 1)
        names = [*_assigned(lines[:place]), "x", "w", "z"]
        lines.insert(place, draw.choice(STEPS).format(v=draw.choice(names), u=draw.choice(names)))
    made = _assigned(lines)
    results = sorted({*draw.sample(made, min(2, len(made))), "y", draw.choice("xy")})
    body = ["x, z, w = x + 0, z + 0, w + 0", *lines, f"return {', '.join(results)},"]
    text = "def function(x, z, w, b):\n    " + "\n    ".join(body)
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(text, "<program>", "exec"), space)
    return text, space["function"]


def _assigned(lines: list[str]) -> list[str]:
    return [line[0] for line in lines if line[1:4] == " = "]


@pytest.mark.parametrize("part", range(3))
def test_programs_that_nearly_mean_an_op(part, seed):
    draw, matched = random.Random(seed + part), 0
    for _ in range(50):
        text, function = program(draw)
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16])
        rows = draw.choice([(8, 8), (4, 8)])
        inputs = [torch.randn(shape).to(dtype) for shape in (rows, rows, (8,), (8,))]
        try:
            expected = function(*(t.clone() for t in inputs))
        except (RuntimeError, IndexError):
            continue  # shapes that do not fit, a dtype that cannot be written
        run, seen = rewritten(function, "always", ONLY)
        results = run(*(t.clone() for t in inputs))
        matched += len(seen.substituted())
        narrow = dtype is torch.bfloat16 or "half" in text or "bfloat16" in text
        for given, wanted in zip(results, expected, strict=True):
            assert (given.dtype, given.shape, given.stride()) == (
                wanted.dtype,
                wanted.shape,
                wanted.stride(),
            )
            error = (given.double() - wanted.double()).norm()
            assert error <= (4e-2 if narrow else 1e-4) * wanted.double().norm() + 1e-6 or (
                wanted.isnan().any() and torch.equal(given.isnan(), wanted.isnan())
            ), text
    assert matched > 10
