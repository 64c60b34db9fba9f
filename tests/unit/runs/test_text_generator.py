import keras
import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.model import Sampling
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, TextInputs
from hvdtrain.data.sources.tokenizers import ByteTokenizer
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.generate import TextGenerator, check_language_model, drawn

ALPHABET = "abcdefgh"


def description(tokenizer="chars", window=4, outputs="logits", **options):
    text = TextInputs(tokenizer, window, alphabet=ALPHABET if tokenizer == "chars" else "", **options)
    size = len(ALPHABET) if tokenizer == "chars" else 256
    signature = {"dtype": "int32", "shape": [window]}
    return RunDescription("text", signature, size, outputs, Preprocessing(text=text))


def successor_model(size, *, probabilities=False, back=0):
    """A model whose next token is the one after token `place - back`, counted in a circle."""

    def call(tokens, training=False):
        before = np.roll(np.eye(size, dtype=np.float32), 1, axis=1)  # row t is one-hot at t + 1
        shifted = keras.ops.concatenate([tokens[:, :1]] * back + [tokens[:, : tokens.shape[1] - back]], axis=1)
        scores = keras.ops.take(before, shifted, axis=0)
        return scores * 0.98 + 0.02 / size if probabilities else scores * 50

    return call


def continuation(model, what, prompt, **sampling):
    generator = TextGenerator(model, what)
    return "".join(generator.pieces(generator.encoded(prompt), Sampling(**sampling)))


def test_the_text_goes_on_beyond_the_window():
    text = continuation(successor_model(8), description(), "a", length=20, temperature=0)
    assert text == "bcdefghabcdefghabcde"
    # A prompt longer than the window: its end counts.
    assert continuation(successor_model(8), description(), "hhhhhhhc", length=3, temperature=0) == "def"


def test_probabilities_are_drawn_from_as_they_are():
    what = description(outputs="probabilities")
    assert continuation(successor_model(8, probabilities=True), what, "a", length=8, temperature=0.1) == "bcdefgha"


def test_the_window_slides_by_one_token():
    # Each token is the successor of the one two places before: a wrong position would show.
    text = continuation(successor_model(8, back=2), description(), "aceb", length=6, temperature=0)
    assert text == "dfcegd"


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        ({"temperature": 0.0}, {3}),
        ({"temperature": 5.0, "top_k": 1}, {3}),
        ({"temperature": 5.0, "top_k": 2}, {3, 1}),
        ({"temperature": 1e-6}, {3}),
        ({"temperature": 5.0}, {0, 1, 2, 3}),
        ({"temperature": 5.0, "top_k": 9}, {0, 1, 2, 3}),
    ],
)
def test_tokens_are_drawn_by_temperature_and_top_k(sampling, possible):
    draws = np.random.default_rng(0)
    found = {drawn(np.array([0.0, 2.0, 1.0, 3.0]), Sampling(**sampling), draws) for _ in range(200)}
    assert found == possible


def test_draws_follow_the_softmax():
    draws = np.random.default_rng(0)
    scores = np.log([0.1, 0.6, 0.3])
    counts = np.bincount([drawn(scores, Sampling(temperature=1.0), draws) for _ in range(20_000)]) / 20_000
    np.testing.assert_allclose(counts, [0.1, 0.6, 0.3], atol=0.015)
    sharper = np.bincount([drawn(scores, Sampling(temperature=0.5), draws) for _ in range(20_000)]) / 20_000
    np.testing.assert_allclose(sharper, np.array([0.01, 0.36, 0.09]) / 0.46, atol=0.015)


def test_the_seed_and_the_sample_decide():
    def flat(tokens, training=False):
        return keras.ops.zeros((*tokens.shape, 8))

    generator = TextGenerator(flat, description())
    given = generator.encoded("a")

    def text(seed, sample):
        return "".join(generator.pieces(given, Sampling(length=40, seed=seed), sample))

    assert text(1, 0) == text(1, 0)
    assert len({text(1, 0), text(1, 1), text(2, 0), text(0, 1)}) == 4


def test_characters_of_several_bytes_come_whole():
    octets = ByteTokenizer().encode("aé€b".encode())

    def spelling(tokens, training=False):
        """The next byte of aé€b, which has no byte twice."""
        after = np.zeros(256, np.int32)
        after[octets[:-1]] = octets[1:]
        return keras.ops.one_hot(keras.ops.take(after, tokens, axis=0), 256) * 50

    generator = TextGenerator(spelling, description("bytes", window=3))
    pieces = list(generator.pieces(generator.encoded("a"), Sampling(length=6, temperature=0)))
    assert pieces == ["é", "€", "b"]
    # What ends within a character is shown in the end.
    pieces = list(generator.pieces(generator.encoded("a"), Sampling(length=3, temperature=0)))
    assert pieces == ["é", "\ufffd"]


def test_a_model_that_looks_ahead_is_refused():
    def ahead(tokens, training=False):
        return keras.ops.one_hot(keras.ops.flip(tokens, axis=1), 8)

    with pytest.raises(DataError, match="not causal"):
        TextGenerator(ahead, description())


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        (description(masked=True), "masked language model"),
        (description(outputs="values"), "no logits of tokens"),
        (
            RunDescription("digits", {}, 10, "logits", Preprocessing(image=ImageInputs(8, 8, 1))),
            "runs/x is not a language model: it was trained on the data source 'digits'",
        ),
    ],
)
def test_other_models_are_refused(what, answer):
    with pytest.raises(DataError, match=answer):
        check_language_model(what, "runs/x")


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({"length": 0}, "length must be at least 1. Received: 0"),
        ({"temperature": -0.1}, "temperature must be at least 0. Received: -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0. Received: nan"),
        ({"top_k": 0}, "top-k must be at least 1. Received: 0"),
        ({"seed": -1}, "seed must not be negative. Received: -1"),
    ],
)
def test_values_out_of_range_are_refused(values, answer):
    with pytest.raises(ConfigError) as raised:
        Sampling(**values)
    assert answer in str(raised.value)
