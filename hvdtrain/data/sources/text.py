"""Text for language models: windows of tokens, each with the tokens that follow as its targets.

    a window of length 4     t0 t1 t2 t3        the next one     t4 t5 t6 t7
    its targets              t1 t2 t3 t4                         t5 t6 t7 t8

So every token is predicted once, except the first of a split and those of an incomplete last window, which is dropped.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.preprocessing import Preprocessing, TextInputs
from hvdtrain.data.sources.corpus import read_corpus
from hvdtrain.data.sources.tokenizers import Tokenizer, described, make_tokenizer, tokenizer_of
from hvdtrain.data.splits import DataSplits


def load(
    *, path: str = "", tokenizer: str = "chars", length: int = 128, validation: float = 0.1, vocabulary: int = 0
) -> DataSplits:
    """Load windows of tokens [length], with the next tokens [length] as targets.

    Args:
        path: a text file, or a folder of .txt files; "": the documentation that comes with Python.
        tokenizer: `chars`, the Unicode characters that occur in the text; `bytes`, all 256 of them; `sentencepiece`,
            byte pair encoding learned from the training split, which needs the package sentencepiece.
        length: tokens of a window.
        validation: fraction of the text, at its end, for validation.
        vocabulary: size of the sentencepiece vocabulary; 0: 2048.

    Raises:
        ConfigError: arguments out of range, or a missing package.
        DataError: no text, or one that is too short.
    """
    return _splits(
        read_tokens(path, tokenizer=tokenizer, length=length, validation=validation, vocabulary=vocabulary),
        tokenizer,
        length,
    )


def load_like(
    trained: Preprocessing,
    classes: int | None,
    *,
    path: str = "",
    tokenizer: str = "",
    length: int = 0,
    validation: float = 0.1,
    vocabulary: int = 0,
) -> DataSplits:
    """Load another text for the model of a run: with its tokenizer, in windows of its length.

    Args:
        trained: what the run was trained with.
        classes: its number of tokens.
        path: as in `load`.
        tokenizer: the run's, or "".
        length: the run's, or 0.
        validation: as in `load`.
        vocabulary: without effect, as the vocabulary is the run's.

    Raises:
        ConfigError: another tokenizer or length.
        DataError: no text, or one with characters that the run's has not.
    """
    known = same_windows(trained, tokenizer, length)
    text = read_tokens(
        path, tokenizer=known.tokenizer, length=known.length, validation=validation, vocabulary=vocabulary, known=known
    )
    return _splits(text, known.tokenizer, known.length)


def same_windows(trained: Preprocessing, tokenizer: str, length: int) -> TextInputs:
    """Return the windows that a run was trained on.

    Args:
        trained: what the run was trained with.
        tokenizer: the run's, or "".
        length: the run's, or 0.

    Raises:
        ConfigError: another tokenizer or length.
    """
    known = trained.text
    assert known is not None, "asked by the caller"
    if tokenizer not in ("", known.tokenizer) or length not in (0, known.length):
        raise ConfigError(
            f"The run was trained on windows of {known.length} tokens by the tokenizer {known.tokenizer}: other text "
            f"is read likewise. Received: tokenizer={tokenizer!r}, length={length}. Leave them out."
        )
    return known


def _splits(text: "TokenizedText", tokenizer: str, length: int) -> DataSplits:
    return DataSplits(
        train=TokenSource(text.train, length, f"{text.name} (training)"),
        validation=TokenSource(text.validation, length, f"{text.name} (validation)"),
        sample_shape=(length,),
        classes=text.tokenizer.size,
        preprocessing=Preprocessing(text=described(tokenizer, text.tokenizer, length)),
        held_out=True,
    )


class TokenSource:
    """A source of windows of one sequence of tokens; see `Source`.

    Args:
        tokens: [n] integers.
        length: tokens of a window.
        name: its name in messages.

    Raises:
        DataError: too few tokens for one window.
    """

    finite = True
    heavy = False

    def __init__(self, tokens: np.ndarray, length: int, name: str) -> None:
        self.name = name
        self.size = windows_in(tokens, length, length + 1, name)
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._length = length

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        window = gather_windows(self.tokens, numbers, self._length, self._length + 1)
        return window[:, :-1], window[:, 1:]

    def describe(self, number: int) -> str:
        """See `Source`."""
        begin = number * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length}"

    def fingerprint(self) -> bytes:
        """See `Source`."""
        return hashlib.sha256(f"next {self._length}\0".encode() + self.tokens.numpy().tobytes()).digest()


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text, split into training and validation."""

    name: str
    train: np.ndarray
    """[n] tokens."""
    validation: np.ndarray
    tokenizer: Tokenizer


def read_tokens(
    path: str, tokenizer: str, length: int, validation: float, vocabulary: int, known: TextInputs | None = None
) -> TokenizedText:
    """Read and tokenize a text; the arguments are those of `load`, and `known` describes the tokenizer of a run.

    Raises:
        ConfigError: arguments that cannot work, or a missing package.
        DataError: there is no text.
    """
    if length < 1:
        raise ConfigError(f"--data-args length must be at least 1. Received: {length}.")
    corpus = read_corpus(path, validation, utf8=tokenizer != "bytes")
    whole = corpus.train + corpus.validation
    made = (
        make_tokenizer(tokenizer, train=corpus.train, whole=whole, vocabulary=vocabulary)
        if known is None
        else tokenizer_of(known)
    )
    return TokenizedText(corpus.name, made.encode(corpus.train), made.encode(corpus.validation), made)


def windows_in(tokens: np.ndarray, stride: int, needed: int, name: str) -> int:
    """Return the number of windows of `needed` tokens, one every `stride`, in `tokens` [n].

    Raises:
        DataError: there are none.
    """
    count = (len(tokens) - needed) // stride + 1
    if count < 1:
        raise DataError(
            f"{name} is too short: it has {len(tokens)} tokens, and a window needs {needed}. See --data-args length, "
            "validation and path."
        )
    return count


def gather_windows(tokens: tf.Tensor, numbers: tf.Tensor, stride: int, needed: int) -> tf.Tensor:
    """Return the windows `numbers` [n] of `tokens`, one every `stride`, as int32 [n, needed]."""
    begins = tf.cast(numbers, tf.int64)[:, tf.newaxis] * stride
    return tf.cast(tf.gather(tokens, begins + tf.range(needed, dtype=tf.int64)), tf.int32)
