"""The tensor-parallel example: it checks itself; here it runs, on ranks that do not divide the tokens."""

from __future__ import annotations

import pytest

from examples.tensor_parallel import Sizes, run

GROUPED = Sizes(hidden=96, intermediate=160, heads=12, kv_heads=6, max_position=64)


@pytest.mark.slow
def test_a_layer_on_ranks(capfd):
    run(3, sizes=GROUPED, tokens=7)
    said = capfd.readouterr().out
    assert "collectives of the layer: 2 all_gather_into_tensor, 2 reduce_scatter_tensor" in said


def test_ranks_that_do_not_divide_the_heads():
    with pytest.raises(SystemExit, match="4 ranks do not divide 12 and 6 heads"):
        run(4, sizes=GROUPED)
