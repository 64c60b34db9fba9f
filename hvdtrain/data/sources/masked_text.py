"""Text for masked language models, as BERT was trained on (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

Of every window 15 % of the places are chosen. Of these, 80 % show the mask token in place of their own, 10 % a token
drawn from the vocabulary, and 10 % their own. The targets are the tokens of the chosen places; all others are IGNORED.

Which places are chosen is a function of the sample's number alone, so it depends neither on the order nor on the number
of ranks. To show a text under several masks, an epoch has it `copies` times, each time as a sample of its own: that is
what BERT's data were, too. In validation every window comes once, always under the same mask.
"""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.sources.text import gather_windows, read_tokens, windows_in
from hvdtrain.data.splits import DataSplits

IGNORED = -1
"""The target of a place that was not chosen: the loss leaves it out (`ignore_class`)."""
SHOWN_AS_MASK, SHOWN_AS_ANY = 0.8, 0.1
MASK_SEED = 1810
"""Masks must not depend on a run's seed: a validation loss is compared between runs."""


def load(
    *,
    path: str = "",
    tokenizer: str = "chars",
    length: int = 128,
    validation: float = 0.1,
    vocabulary: int = 0,
    chosen: float = 0.15,
    copies: int = 10,
) -> DataSplits:
    """Return windows of tokens [length] with places masked, and the tokens [length] that were there as targets.

    The number of classes is one more than the tokenizer's: the last one is the mask.

    Args:
        path: a text file, or a folder of .txt files; "": the documentation that comes with Python.
        tokenizer: `chars`, `bytes` or `sentencepiece`; see `hvdtrain.data.sources.text`.
        length: tokens of a window.
        validation: share of the text, at its end, that is for validation.
        vocabulary: tokens of sentencepiece; 0: 2048.
        chosen: share of the places of each window that are to be predicted; at least one is.
        copies: how often an epoch shows each window, each time under another mask.

    Raises:
        ConfigError: arguments that cannot work, or a missing package.
        DataError: there is no text, or it is too short.
    """
    if not 0 < chosen <= 1 or copies < 1:
        raise ConfigError(
            "masked_text needs a share of chosen places in (0, 1] and at least one copy. "
            f"Received: chosen={chosen}, copies={copies}."
        )
    text = read_tokens(path, tokenizer, length, validation, vocabulary)
    size, places = text.tokenizer.size, max(1, round(chosen * length))
    return DataSplits(
        train=MaskedSource(text.train, length, size, places, f"{text.name} (training)", copies=copies),
        validation=MaskedSource(text.validation, length, size, places, f"{text.name} (validation)"),
        sample_shape=(length,),
        classes=size + 1,
    )


class MaskedSource:
    """Windows of one sequence of tokens, some of whose places are masked; see `Source`.

    Args:
        tokens: [n] integers below `vocabulary`.
        length: tokens of a window; those at the end that do not fill one are left out.
        vocabulary: number of tokens; the mask is the token of that number.
        places: places of each window that are to be predicted.
        name: what messages call it.
        copies: how many samples there are of each window, each under a mask of its own.

    Raises:
        DataError: too few tokens for one window.
    """

    finite = True
    heavy = False

    def __init__(
        self, tokens: np.ndarray, length: int, vocabulary: int, places: int, name: str, *, copies: int = 1
    ) -> None:
        self.name = name
        self.size = windows_in(tokens, length, length, name) * copies
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._windows = self.size // copies
        self._length = length
        self._vocabulary = vocabulary
        self._places = places

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        numbers = tf.cast(numbers, tf.int64)
        tokens = gather_windows(self.tokens, numbers % self._windows, self._length, self._length)
        draws = tf.map_fn(self._draws, numbers, fn_output_signature=tf.TensorSpec([3, self._length], tf.float32))
        return self._masked(tokens, *tf.unstack(draws, axis=1))

    def describe(self, number: int) -> str:
        """See `Source`."""
        copy, window = divmod(number, self._windows)
        begin = window * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length - 1}, copy {copy}"

    def fingerprint(self) -> bytes:
        """See `Source`."""
        facts = f"masked {self._length} {self._vocabulary} {self._places} {self.size}\0".encode()
        return hashlib.sha256(facts + self.tokens.numpy().tobytes()).digest()

    def _draws(self, number: tf.Tensor) -> tf.Tensor:
        """Return numbers in [0, 1), [3, length], that are those of one sample."""
        return tf.random.stateless_uniform([3, self._length], tf.stack([tf.constant(MASK_SEED, tf.int64), number]))

    def _masked(self, tokens: tf.Tensor, place: tf.Tensor, way: tf.Tensor, other: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return inputs and targets [n, length] of windows of tokens; the draws are [n, length] each."""
        ranks = tf.argsort(tf.argsort(place, axis=1), axis=1)
        picked = ranks < self._places
        drawn = tf.cast(other * self._vocabulary, tf.int32)
        unmasked = tf.where(way < SHOWN_AS_MASK + SHOWN_AS_ANY, drawn, tokens)
        shown = tf.where(way < SHOWN_AS_MASK, self._vocabulary, unmasked)
        return tf.where(picked, shown, tokens), tf.where(picked, tokens, IGNORED)
