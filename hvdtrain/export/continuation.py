"""The loop that continues a text by a language model, as a graph: exported models have it in themselves."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.preprocessing import TextInputs


class Continuation(tf.Module):
    """Continues a text by a causal model from tokens [n, window] to scores [n, window, vocabulary].

    Args:
        model: the model.
        text: its tokens.
        logits: whether scores are logits, not probabilities.
    """

    def __init__(self, model: keras.Model, text: TextInputs, *, logits: bool) -> None:
        super().__init__()
        self._model, self._window, self._logits = model, text.length, logits
        self._chars = text.tokenizer == "chars"
        self.speaks = self._chars or text.tokenizer == "bytes"
        """Whether it takes and returns texts; with sentencepiece, whose tokenizer no graph has, tokens."""
        if self._chars:
            self._pieces = tf.strings.unicode_split(text.alphabet, "UTF-8")
        elif self.speaks:
            self._pieces = tf.constant([bytes([value]) for value in range(256)])
        prompt = tf.TensorSpec([], tf.string) if self.speaks else tf.TensorSpec([None], tf.int32)
        self.signature = [
            _named(prompt, "prompt"),
            tf.TensorSpec([], tf.int32, "length"),
            tf.TensorSpec([], tf.float32, "temperature"),
            tf.TensorSpec([], tf.int32, "seed"),
        ]

    def continued(self, prompt: Any, length: Any, temperature: Any, seed: Any) -> Any:
        """Return what follows a prompt: a string, or tokens [length].

        Args:
            prompt: the text, or its tokens [n]; not empty.
            length: tokens to generate.
            temperature: divides the logits; 0 takes the likeliest token.
            seed: of the draws.
        """
        given = self._tokens(prompt) if self.speaks else prompt
        with tf.control_dependencies([tf.debugging.assert_positive(tf.size(given), "A prompt needs a character.")]):
            begin = tf.identity(given[-self._window :])

        def step(place: Any, context: Any, made: Any) -> tuple[Any, ...]:
            size = tf.size(context)
            padded = tf.pad(context, [[0, self._window - size]])
            scores = tf.cast(self._model(padded[None], training=False)[0, size - 1], tf.float32)
            token = drawn(
                scores if self._logits else tf.math.log(tf.maximum(scores, 1e-30)), temperature, [seed, place]
            )
            return place + 1, tf.concat([context, [token]], 0)[-self._window :], made.write(place, token)

        made = tf.TensorArray(tf.int32, length, element_shape=[])
        _, _, made = tf.while_loop(
            lambda place, *_: place < length,
            step,
            (tf.constant(0), begin, made),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape(None)),
        )
        tokens = made.stack()
        return tf.strings.reduce_join(tf.gather(self._pieces, tokens)) if self.speaks else tokens

    def _tokens(self, prompt: Any) -> Any:
        if not self._chars:
            return tf.cast(tf.io.decode_raw(prompt, tf.uint8), tf.int32)
        characters = tf.strings.unicode_split(prompt, "UTF-8")
        same = characters[:, None] == self._pieces
        known = tf.debugging.Assert(tf.reduce_all(tf.reduce_any(same, 1)), ["not in the alphabet:", prompt])
        with tf.control_dependencies([known]):
            return tf.argmax(same, 1, tf.int32)


def _named(spec: tf.TensorSpec, name: str) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, spec.dtype, name)


def drawn(scores: Any, temperature: Any, seed: Any) -> Any:
    """Return a token drawn by the softmax of `scores` [vocabulary] divided by `temperature`; the likeliest for 0."""
    heat = tf.maximum(temperature, np.finfo(np.float32).tiny)
    # The highest becomes 0 first: a tiny temperature must not make infinities.
    shares = (scores - tf.reduce_max(scores)) / heat
    random = tf.random.stateless_categorical(shares[None], 1, tf.stack(seed), tf.int32)[0, 0]
    return tf.where(temperature > 0, random, tf.argmax(scores, output_type=tf.int32))
