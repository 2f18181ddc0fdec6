"""Which dims ``vmap`` may put a batch in front of, read from entries."""

from __future__ import annotations

import pytest

from tests.manifests import entry_of, entry_text, write_manifest
from tileops.engine.boundary.batching import leading, takes_a_batch
from tileops.engine.manifest.catalog import load_family

ROW = """
dtypes: {T: [float32]}
inputs:
  x: {dtype: T, shape: "[*B, N]"}
  w: {dtype: T, shape: "[N]", optional: true}
outputs:
  y: {dtype: T, shape: "[*B, N]"}
"""


def of_kind(folder, signature, kind):
    text = entry_text(signature).replace("kind: pointwise", f"kind: {kind}")
    return load_family(write_manifest(folder, text))["ThingFwdOp"]


@pytest.mark.parametrize("kind", ["pointwise", "reduction", "template"])
def test_rows_are_free(kind, tmp_path):
    entry = of_kind(tmp_path, ROW, kind)
    found = leading(entry, entry.branches[0])
    assert found.names == ("B",)
    assert found.of_input == {"x": "B"}
    assert takes_a_batch(entry)


def test_all_dims_of_a_reduction_are_not(tmp_path):
    signature = ROW.replace("[*B, N]", "[*B]").replace("[N]", "[2]")
    assert takes_a_batch(of_kind(tmp_path, signature, "pointwise"))
    assert not takes_a_batch(of_kind(tmp_path, signature, "reduction"))


@pytest.mark.parametrize(
    "more",
    [
        'rules: [{require: "len(B) < 3", message: few}]',
        'rules: [{require: "B[0] > 1", message: many, argument: x}]',
        "dims: {P: prod(B)}",
    ],
)
def test_what_an_entry_looks_at_is_not_free(more, tmp_path):
    entry = entry_of(tmp_path, f"{ROW}{more}\n")
    assert leading(entry, entry.branches[0]) is not None
    assert not takes_a_batch(entry)


@pytest.mark.parametrize(
    ("x", "w", "y"),
    [
        ("[*B, N]", "[N]", "[N]"),  # summed over
        ("[*B, N]", "[N, *B]", "[*B, N]"),  # not first in all
        ("[*B, N]", "[N]", "[N, *B]"),
        ("[*B, N]", "[N]", "[*B, *B]"),
        ("[B, N]", "[N]", "[B, N]"),  # no splice: batch or sequence, nobody says
        ("[*B, N]", "[*B]", "[*B] if passed(w) else []"),
        ("[*A]", "[N, *B]", "[*bcast(A, B)]"),
    ],
)
def test_what_is_not_in_front_everywhere_is_not_free(x, w, y, tmp_path):
    signature = ROW.replace(
        'y: {dtype: T, shape: "[*B, N]"}', f'y: {{dtype: T, shape: "{y}"}}'
    ).replace('x: {dtype: T, shape: "[*B, N]"}', f'x: {{dtype: T, shape: "{x}"}}')
    signature = signature.replace('shape: "[N]"', f'shape: "{w}"')
    entry = entry_of(tmp_path, signature)
    assert leading(entry, entry.branches[0]) is None
    assert not takes_a_batch(entry)


def test_a_parameters_dims_are_not_free(tmp_path):
    signature = """
    dtypes: {T: [float32]}
    params: {S: {type: ints}}
    inputs: {x: {dtype: T, shape: "[*S]"}}
    outputs: {y: {dtype: T, shape: "[*S]"}}
    """
    assert not takes_a_batch(entry_of(tmp_path, signature))


def test_shapes_that_broadcast(tmp_path):
    signature = ROW.replace('w: {dtype: T, shape: "[N]"', 'w: {dtype: T, shape: "[*C, N]"')
    signature = signature.replace('y: {dtype: T, shape: "[*B, N]"}',
                                  'y: {dtype: T, shape: "[*bcast(B, C), N]"}')  # fmt: skip
    entry = entry_of(tmp_path, signature)
    found = leading(entry, entry.branches[0])
    assert found.names == ("B", "C")
    assert found.trailing == {"x": 1, "w": 1}
    assert found.broadcast
    assert takes_a_batch(entry)


def test_a_branch_without_the_output_that_is_summed(tmp_path):
    signature = ROW.replace("outputs:", "params: {both: {type: bool}}\noutputs:")
    signature += '  z: {dtype: T, shape: "[N]", nullable: not both}\n'
    entry = entry_of(tmp_path, signature)
    by_suffix = {b.suffix: leading(entry, b) for b in entry.branches}
    assert by_suffix[""] is None
    assert by_suffix["_without_z"].names == ("B",)
    assert takes_a_batch(entry)
