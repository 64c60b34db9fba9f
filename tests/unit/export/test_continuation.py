"""The graph that continues a text draws what `generate` draws where nothing is random, and never what it cannot."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.model import Sampling
from hvdtrain.data.preprocessing import Preprocessing, TextInputs
from hvdtrain.export.continuation import Continuation, drawn
from hvdtrain.models.transformer import build
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.generate import TextGenerator

ALPHABET = "abcdeü\n"


def greedy(continuation, prompt, length, temperature=0.0, seed=0):
    call = tf.function(continuation.continued, input_signature=continuation.signature)
    given = prompt.encode() if continuation.speaks else tf.constant(prompt, tf.int32)
    return call(given, length, temperature, seed).numpy()


@pytest.mark.parametrize("tokenizer", ["chars", "bytes"])
@pytest.mark.parametrize("prompt", ["a", "abcü\nabcü"])
def test_the_likeliest_text_is_that_of_generate(tokenizer, prompt):
    text = TextInputs(tokenizer, 6, alphabet="".join(sorted(ALPHABET)) if tokenizer == "chars" else "")
    size = len(ALPHABET) if tokenizer == "chars" else 256
    model = build((6,), size, seed=3, depth=1, width=16, heads=2)
    for weight in model.trainable_variables:  # larger steps between tokens than rounding
        weight.assign(weight * 20)
    described = RunDescription("text", {"dtype": "int32", "shape": [6]}, size, "logits", Preprocessing(text=text))
    generator = TextGenerator(model, described)
    tokens = list(generator._tokens(generator.encoded(prompt), Sampling(20, 0.0), 0))
    assert len(set(tokens)) > 1
    continuation = Continuation(model, text, logits=True)
    mine = greedy(continuation, prompt, 20)
    assert mine.decode("utf-8", "replace") == generator.tokenizer.decode(tokens)


def test_a_seed_repeats_its_text_and_another_draws_another():
    text = TextInputs("chars", 6, alphabet="abcdefgh")
    continuation = Continuation(build((6,), 8, seed=0, depth=1, width=16, heads=2), text, logits=True)
    first = greedy(continuation, "ab", 40, 1.0, seed=1)
    assert first == greedy(continuation, "ab", 40, 1.0, seed=1) != greedy(continuation, "ab", 40, 1.0, seed=2)
    assert set(first.decode()) <= set("abcdefgh")


def test_what_is_no_prompt_is_refused():
    text = TextInputs("chars", 6, alphabet="ab")
    continuation = Continuation(build((6,), 2, seed=0, depth=1, width=16, heads=2), text, logits=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in the alphabet"):
        greedy(continuation, "abx", 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="A prompt needs a character"):
        greedy(continuation, "", 3)


def test_tokens_are_taken_where_no_graph_has_the_tokenizer():
    size = 12
    before = np.roll(np.eye(size, dtype=np.float32), 1, axis=1)
    tokens = keras.Input((4,), dtype="int32")
    model = keras.Model(tokens, keras.ops.take(before, tokens, axis=0) * 0.9 + 0.1 / size)
    continuation = Continuation(model, TextInputs("sentencepiece", 4), logits=False)
    np.testing.assert_array_equal(greedy(continuation, [3], 4), [4, 5, 6, 7])


def test_draws_follow_the_softmax():
    scores = tf.math.log(tf.constant([0.6, 0.3, 0.1]))
    tokens = [int(drawn(scores, tf.constant(1.0), [seed, 0])) for seed in range(2000)]
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / 2000, [0.6, 0.3, 0.1], atol=0.04)
    assert {int(drawn(scores, tf.constant(heat), [seed, 0])) for seed in range(20) for heat in (0.0, 1e-30)} == {0}
