"""Real model classes compiled by ``backend="tileops"``, against themselves run eagerly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.models.zoo import VOCAB, ZOO, ids
from tileops.backend.tolerances import UNIT_ROUNDOFF, compare
from tileops.fusion import backend

pytestmark = pytest.mark.slow
IN_BFLOAT16 = ("llama", "gemma", "bert")
"""Each casts elsewhere in its norms."""
TRAINED = ("llama", "qwen3", "mixtral", "bert")
"""A gate of SiLU, norms of heads, experts, and dropout that is off."""


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, **more):
    return torch.compile(model, backend=backend, fullgraph=True, **more)


def off(given, exact):
    """Root mean square of the difference over that of the exact value."""
    difference = given.double() - exact.double()
    return float(difference.square().mean().sqrt() / exact.double().square().mean().sqrt())


@pytest.mark.parametrize("name", ZOO)
def test_it_says_the_same(name):
    """At lengths that one graph serves."""
    kind = ZOO[name]
    model = kind.make()
    run = compiled(model, dynamic=True)
    for length in (7, 12, 5):
        text = ids(2, length)
        with torch.no_grad():
            found = compare(kind.run(run, text), kind.run(model, text), "template")
        assert found.ok, f"{length} tokens: {found.text}"


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_it_is_as_near_in_bfloat16(name):
    """To the same weights in float32, as the eager model is: both round at every layer, so one bound
    of an op's own would hold neither. 1.25 is for where they round, and one rounding of the result."""
    kind = ZOO[name]
    model, text = kind.make(torch.bfloat16), ids(2, 9)
    with torch.no_grad():
        given, eager = kind.run(compiled(model), text), kind.run(model, text)
        exact = kind.run(model.float(), text)
    assert given.dtype is torch.bfloat16
    allowed = 1.25 * off(eager, exact) + UNIT_ROUNDOFF[torch.bfloat16]
    assert off(given, exact) <= allowed


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_is_the_same(name):
    """The loss, and the gradient of every weight."""
    kind = ZOO[name]
    model, text = kind.make(), ids(2, 9)
    parameters = dict(model.named_parameters())

    def step(called):
        result = kind.run(called, text)
        if kind.output == "logits":
            loss = F.cross_entropy(result[:, :-1].reshape(-1, VOCAB), text[:, 1:].reshape(-1))
        else:
            loss = result.square().mean()
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return loss.detach(), dict(zip(parameters, found, strict=True))

    wanted_loss, wanted = step(model)
    loss, gradients = step(compiled(model))
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0)
    assert sum(g is not None for g in wanted.values()) > 10
    for parameter, gradient in wanted.items():
        given = gradients[parameter]
        if (
            gradient is None
        ):  # BERT's pooler, which the loss does not see: compiled code gives zeros
            assert given is None or not given.any(), parameter
        else:
            assert given is not None, parameter
            # Sums of some hundred float32 products, added up in another order through two layers.
            error = float((given - gradient).norm())
            assert error <= 2e-5 * float(gradient.norm()) + 1e-7, parameter
