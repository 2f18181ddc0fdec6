"""``sharding`` of an entry: what it may say, and which ways follow."""

from __future__ import annotations

import pytest
import torch

from tests.manifests import entry_of, entry_text, marked_line, write_manifest
from tileops.engine.errors import ManifestError
from tileops.engine.manifest.catalog import load_family
from tileops.engine.manifest.entry import Branch
from tileops.engine.signature.generate import make_signature
from tileops.engine.signature.sharding import ways

_REST = "workloads:\n  - {label: one}\ncost:\n  flops: '1'\n"
SIGNATURE = """\
dims: {R: "N + 1"}
params:
  dim: {type: "int?", default: null}
  width: {type: int, default: 4}
  flag: {type: bool, default: false}
inputs:
  x: {dtype: [float32, float64], shape: "[*B, N]"}
  y: {dtype: float32, shape: "[M, width]", optional: true}
outputs:
  z: {dtype: float32, shape: "[*B, N]"}
"""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("B: any", "'any' is none of shard, replicate, sum"),
        ("B: '3'", "'3' is none of shard"),
        ("B: shard if flag else 1", "'1' is none of shard"),
        ("B: shard if other else sum", "unknown name 'other'"),
        ("B: shard if passed(other) else sum", "unknown name 'other'"),
        ("B: shard +", "does not parse"),
        ("K: shard", "'K' is no dim that a shape of an input finds"),
        ("R: shard", "'R' is no dim"),
        ("width: shard", "'width' is no dim"),
        ("'B, x': shard", "dims and inputs do not go together"),
        ("'x[dim]': sum", "'x' is no dim"),
        ("'B[other]': shard", "'other' is no parameter"),
        ("'B[dim], N': shard", "stands alone"),
        ("'B[0]': shard", "is no dim, <splice>[<param>], or list"),
        ("'': shard", "is no dim"),
    ],
)
def test_faults(tmp_path, line, problem):
    text = entry_text(SIGNATURE, f"sharding:\n  {line}  # here\n{_REST}")
    path = write_manifest(tmp_path, text)
    with pytest.raises(ManifestError) as caught:
        load_family(path)
    assert problem in caught.value.problem
    assert caught.value.where == f"{path}:{marked_line(text)}"


def found(tmp_path, signature, sharding="{}", kind="pointwise", name="ThingFwdOp", **inputs):
    """The ways but for the first, as text; tensors by name, the parameters as ``params``."""
    params = inputs.pop("params", {})
    text = entry_text(signature, f"sharding: {sharding}\n{_REST}", name)
    path = write_manifest(tmp_path, text.replace("kind: pointwise", f"kind: {kind}"))
    entry = load_family(path)[name]
    cls = type(name, (), {"_signature": staticmethod(make_signature(entry))})
    op = cls()
    op.entry, op._params = entry, {p.name: p.default for p in entry.params} | params
    op.__dict__.update(op._params)
    given = {
        item.name: None if item.name not in inputs
        else inputs[item.name] if isinstance(inputs[item.name], torch.Tensor)
        else torch.empty(inputs[item.name], device="meta")
        for item in entry.inputs
    }  # fmt: skip
    writes = tuple(i.name for i in entry.inputs if i.mutated is not None)
    return [
        (*way.inputs.values(), "->", *way.outputs.values(), *(["even"] if way.even else []))
        for way in ways(op, Branch(writes), given)[1:]
    ]


def io(inputs: str, outputs: str, more: str = "") -> str:
    """A signature of float32 tensors: ``x [N], y [N]``."""

    def section(text: str) -> str:
        parts = [part.split(" ", 1) for part in text.split("; ") if part]
        return "".join(f'  {n}: {{dtype: float32, shape: "{s}"}}\n' for n, s in parts) or "  {}\n"

    return f"{more}inputs:\n{section(inputs)}outputs:\n{section(outputs)}"


def test_pointwise_dims_are_free_where_they_are_dims(tmp_path):
    assert found(tmp_path, io("x [*B, N]", "z [*B, N]"), x=(4, 6)) == [(0, "->", 0), (1, "->", 1)]
    # What is computed from a dim does not follow it, neither does what a parameter fixes.
    assert found(tmp_path, io("x [M, 2*N]", "z [M, N]"), x=(4, 6)) == [(0, "->", 0)]
    biased = io("x [M, 2*N]; y [N]", "z [M, N]")
    assert found(tmp_path, biased, x=(4, 6), y=(3,)) == [(0, "replicate", "->", 0)]
    assert found(tmp_path, io("x [M, N]", "z [M, N + 1]"), x=(4, 6)) == [(0, "->", 0)]
    derived = io("x [M, N]", "z [M, R]", "dims: {R: 'N // 2'}\n")
    assert found(tmp_path, derived, x=(4, 6)) == [(0, "->", 0)]
    fixed = io("x [M, width]", "z [M, width]", "params: {width: {type: int, default: 6}}\n")
    assert found(tmp_path, fixed, x=(4, 6)) == [(0, "->", 0)]
    # A tensor that has a dim twice cannot be cut along it.
    assert found(tmp_path, io("x [M, M, N]", "z [M, M, N]"), x=(4, 4, 6)) == [(2, "->", 2)]


def test_what_is_lost_is_no_way_unless_it_is_a_sum(tmp_path):
    assert found(tmp_path, io("x [M, N]", "z [M]"), x=(4, 6)) == [(0, "->", 0)]
    assert found(tmp_path, io("x [M, N]", "z [M]"), "{N: sum}", x=(4, 6)) == [
        (0, "->", 0),
        (1, "->", "sum"),
    ]
    both = io("x [M, N]", "z [M]; total []")
    assert found(tmp_path, both, "{M: sum}", x=(4, 6)) == [(0, "->", 0, "sum")]
    flags = io("x [M, N]", "z [M]").replace("z: {dtype: float32", "z: {dtype: bool")
    assert found(tmp_path, flags, "{N: sum}", x=(4, 6)) == [(0, "->", 0)]


def test_broadcast_axes_go_together(tmp_path):
    signature = io("x [*A]; y [*B]", "z [*bcast(A, B)]")
    assert found(tmp_path, signature, x=(4, 6), y=(6,)) == [
        (0, "replicate", "->", 0),
        (1, 0, "->", 1),
    ]
    assert found(tmp_path, signature, x=(4, 1), y=(1, 6)) == [
        (0, "replicate", "->", 0),
        ("replicate", 1, "->", 1),
    ]
    assert found(tmp_path, signature, x=(1, 6), y=(1, 6)) == [(0, 0, "->", 0), (1, 1, "->", 1)]


def test_a_reduction_has_its_leading_dims_free(tmp_path):
    rows = io("x [*B, N]; w [N]", "z [*B, N]")
    assert found(tmp_path, rows, kind="reduction", x=(4, 6), w=(6,)) == [(0, "replicate", "->", 0)]
    every = io("x [*S]", "z [*S]", "params: {dim: {type: 'ints|int?', default: null}}\n")
    assert found(tmp_path, every, kind="reduction", x=(4, 6)) == []
    said = "{S: shard, 'S[dim]': replicate}"
    for dim, free in ((-1, [0]), (0, [1]), (None, []), ((), [0, 1]), ((0, -1), [])):
        ways = found(tmp_path, every, said, "reduction", x=(4, 6), params={"dim": dim})
        assert ways == [(axis, "->", axis) for axis in free], dim


def test_a_template_says_everything(tmp_path):
    signature = io("x [M, K]; y [K, N]", "z [M, N]")
    assert found(tmp_path, signature, kind="template", x=(4, 6), y=(6, 8)) == []
    assert found(tmp_path, signature, "{M: shard}", "template", x=(4, 6), y=(6, 8)) == [
        (0, "replicate", "->", 0)
    ]


def test_rules_and_groups_ask_for_even_parts(tmp_path):
    ruled = io("x [M, N]", "z [M, N]", "rules: [{require: 'N > 0', message: m}]\n")
    assert found(tmp_path, ruled, x=(4, 6)) == [(0, "->", 0), (1, "->", 1, "even")]
    counted = io("x [*B, N]", "z [*B, N]", "rules: [{require: 'len(B) > 0', message: m}]\n")
    assert found(tmp_path, counted, x=(4, 6)) == [(0, "->", 0), (1, "->", 1)]
    group = io("x [H]; y [G]", "z [H]")
    assert found(tmp_path, group, "{'H, G': shard}", "template", x=(8,), y=(4,)) == [
        (0, 0, "->", 0, "even")
    ]


def test_linear_inputs_pass_sums_on(tmp_path):
    signature = io("x [N]; y [N]", "z [N]")
    assert found(tmp_path, signature, "{N: replicate, 'x, y': sum}", x=(4,), y=(4,)) == [
        ("sum", "sum", "->", "sum")
    ]
    assert found(tmp_path, signature, "{N: replicate, x: sum, y: sum}", x=(4,), y=(4,)) == [
        ("sum", "replicate", "->", "sum"),
        ("replicate", "sum", "->", "sum"),
    ]


def test_what_is_written_is_cut_like_the_rest(tmp_path):
    signature = """\
    inputs:
      x: {dtype: float32, shape: "[M, N]"}
      seen: {dtype: float32, shape: "[N]", mutated: true}
    outputs: {}
    """
    assert found(tmp_path, signature, x=(4, 6), seen=(6,)) == [(1, 0, "->")]


def test_gradients(tmp_path):
    """What a gradient lacks of a free dim is summed over it; sums that come in go through."""
    signature = io("grad_z [*B, N]; x [*B, N]; w [N]", "grad_x [*B, N]; grad_w [N]")
    assert found(
        tmp_path, signature, kind="reduction", name="ThingBwdOp", grad_z=(4, 6), x=(4, 6), w=(6,)
    ) == [
        (0, 0, "replicate", "->", 0, "sum"),
        ("sum", "replicate", "replicate", "->", "sum", "sum"),
    ]
    gated = io("grad_z [M, N]; x [M, 2*N]", "grad_x [M, 2*N]")
    assert found(tmp_path, gated, name="ThingBwdOp", grad_z=(4, 3), x=(4, 6)) == [
        (0, 0, "->", 0),
        ("sum", "replicate", "->", "sum"),
    ]
    # A mean over M: its gradient does not say so, but what comes in lacks M.
    mean = io("grad_z [N]; x [M, N]", "grad_x [M, N]")
    assert found(tmp_path, mean, name="ThingBwdOp", grad_z=(6,), x=(4, 6)) == [
        (0, 1, "->", 1),
        ("sum", "replicate", "->", "sum"),
    ]
    # Linear in what comes in, not in the first gradient that was saved.
    second = io("grad_grad_x [N]; grad_z [N]; x [N]", "grad_grad_z [N]; grad_x [N]")
    assert found(tmp_path, second, name="ThingBwdBwdOp", grad_grad_x=(6,), grad_z=(6,), x=(6,)) == [
        (0, 0, 0, "->", 0, 0),
        ("sum", "replicate", "replicate", "->", "sum", "sum"),
    ]


def test_a_gradient_shares_what_its_forward_says(tmp_path):
    forward = entry_text(
        io("x [N, D]", "z [N, D]", "params: {flag: {type: bool, default: true}}\n"),
        'backward: ThingBwdOp\nsharding: {D: "replicate if flag else shard"}\n' + _REST,
    )
    params = "params: {flag: {type: bool, default: true}, wants_x: {type: bool, default: true}}\n"
    for head, shared in (
        (params, True),
        ("params: {wants_x: {type: bool, default: true}}\n", False),
    ):
        backward = entry_text(io("grad_z [N, D]", "grad_x [N, D]", head), _REST, "ThingBwdOp")
        path = write_manifest(tmp_path, forward + backward)
        if shared:
            entries = load_family(path)
            assert entries["ThingBwdOp"].sharding == entries["ThingFwdOp"].sharding
        else:
            with pytest.raises(ManifestError, match="that of ThingFwdOp asks for 'flag'"):
                load_family(path)


def test_entry_without_sharding(tmp_path):
    assert entry_of(tmp_path, SIGNATURE).sharding == ()
