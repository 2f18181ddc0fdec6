"""Real model classes through the passes of ``backend="tileops"``, the graphs then run as they stand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.models.zoo import ZOO, ids
from tests.rewriting import rewritten
from tileops.backend.tolerances import compare

LENGTHS = (7, 12, 5)
ONE_FAST = [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def counted(called):
    """``called`` compiled without a compiler, and the list of its graphs."""
    graphs = []

    def keep(module, _):
        graphs.append(module)
        return module

    torch._dynamo.reset()
    return torch.compile(called, backend=keep, fullgraph=True), graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_a_rewritten_model_says_the_same_at_every_length(name):
    """In one graph, and no more graphs than Dynamo makes for plain ``torch.compile``."""
    kind = ZOO[name]
    model = kind.make()
    texts = [ids(2, length) for length in LENGTHS]
    with torch.no_grad():
        expected = [kind.run(model, text) for text in texts]
        plain, graphs = counted(model)
        for text in texts:
            kind.run(plain, text)
        run, seen = rewritten(model)
        for text, wanted in zip(texts, expected, strict=True):
            found = compare(kind.run(run, text), wanted, "template")
            assert found.ok, f"{name}, {text.shape[1]} tokens: {found.text}"
    assert len(seen.graphs) == len(graphs)


@pytest.mark.parametrize("name", ONE_FAST)
def test_one_row_of_a_model_says_the_same(name):
    """A text of one token: every product is of one row, every mask of one element."""
    kind = ZOO[name]
    model, text = kind.make(), ids(1, 1) + 1
    with torch.no_grad():
        expected = kind.run(model, text)
        run, seen = rewritten(model)
        found = compare(kind.run(run, text), expected, "template")
    assert found.ok, f"{name}: {found.text}"
    assert len(seen.graphs) == 1


SPELLED = [
    (name, spelled) if (name, spelled) == ("llama", "sdpa")
    else pytest.param(name, spelled, marks=pytest.mark.slow)
    for name in ZOO for spelled in ("sdpa", "eager")
]  # fmt: skip


@pytest.mark.parametrize(("name", "spelled"), SPELLED)
def test_what_the_mask_of_a_model_becomes(name, spelled):
    """A mask of positions goes, at a fixed length and at any; windows and data stay."""
    kind, texts = ZOO[name], [ids(2, length) for length in LENGTHS[:2]]
    model = kind.make()
    model.set_attn_implementation(spelled)
    with torch.no_grad():
        run, seen = rewritten(model)
        for text in texts:
            found = compare(kind.run(run, text), kind.run(model, text), "template")
            assert found.ok, f"{text.shape[1]} tokens: {found.text}"
    if name in ("bert", "mistral"):
        reason = "does not tell what it hides" if name == "bert" else "no such window"
    else:
        reason = "faster for fewer than" if spelled == "eager" else ""
    for report in seen.reports:
        calls = [d["call"] for d in report.of("substituted") if "attention" in d["op"]]
        events = [d for k in ("declined", "near miss") for d in report.of(k)]
        said = [d["reason"] for d in events if d["op"] == "GQADenseFwdOp"]
        # A window stays a mask; heads are given as they are all the same.
        grouped = [call for call in calls if "is_causal" not in call]
        assert len(grouped) == (LAYERS if (name, spelled) == ("mistral", "sdpa") else 0)
        calls = [call for call in calls if call not in grouped]
        assert len(calls) == (0 if reason else LAYERS)
        assert len(said) == (LAYERS if reason else 0)
        assert all("is_causal=True" in call for call in calls)
        assert all(reason in each for each in said)


NORMS = ("RMSNormFwdOp", "FusedAddRMSNormFwdOp")
LAYERS = 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZOO)
def test_what_is_recognised_in_a_layer(name, dtype):
    """Each layer has two norms, one after attention's sum and one after its predecessor's, and the model
    one more; queries and keys are turned. Qwen3 normalises these too; BERT its embeddings first and sums
    after, and turns nothing."""
    kind = ZOO[name]
    model, text = kind.make(dtype), ids(2, 7)
    with torch.no_grad():
        expected = kind.run(model, text)
        run, seen = rewritten(model, "always")
        result = kind.run(run, text)
    found = Counter(data["op"] for data in seen.report.of("substituted"))
    if name == "bert":
        assert found["LayerNormFwdOp"] == 2 * LAYERS + 1
        assert not found["RoPETablesFwdOp"]
    else:
        assert found["RoPETablesFwdOp"] == 2 * LAYERS
        on_heads = 2 * LAYERS if name == "qwen3" else 0
        assert sum(found[norm] for norm in NORMS) == 2 * LAYERS + 1 + on_heads
        if name != "gemma":  # whose 1 + weight is of the norm alone
            assert found["FusedAddRMSNormFwdOp"] >= 2 * LAYERS - 1
    # BERT's mask is data: which tokens are padding.
    assert found["GQADenseFwdOp"] == (0 if name == "bert" else LAYERS)
    if dtype is torch.float32:
        same = compare(result, expected, "template")
        assert same.ok, same.text
    else:  # an op rounds once where its plain spelling rounds at steps
        error = (result.float() - expected.float()).norm() / expected.float().norm()
        assert error <= 2.0**-5
