"""Text for masked language models, as BERT was trained on (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

In every window 15 % of the positions are chosen. Of these, 80 % show the mask token, 10 % a random token, and 10 %
their own. The targets are the original tokens at the chosen positions, and IGNORED elsewhere.

The mask is a function of the sample's number alone, so it depends neither on the order nor on the number of ranks. For
several masks of a text, an epoch has `copies` samples of each window, as BERT's data had. In validation every window
comes once, always under the same mask.
"""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.data.sources.text import TokenizedText, gather_windows, read_tokens, same_windows, windows_in
from hvdtrain.data.sources.tokenizers import described
from hvdtrain.data.splits import DataSplits

IGNORED = -1
"""Target at positions that were not chosen; the loss ignores it (`ignore_class`)."""
SHOWN_AS_MASK, SHOWN_AS_ANY = 0.8, 0.1
MASK_SEED = 1810
"""Fixed, not the run's seed: validation losses are compared between runs."""


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
    """Load masked windows of tokens [length], with the original tokens [length] as targets.

    There is one class more than the tokenizer has: the mask, which is the last.

    Args:
        path: a text file, or a folder of .txt files; "": the documentation that comes with Python.
        tokenizer: `chars`, `bytes` or `sentencepiece`; see `hvdtrain.data.sources.text`.
        length: tokens of a window.
        validation: fraction of the text, at its end, for validation.
        vocabulary: size of the sentencepiece vocabulary; 0: 2048.
        chosen: fraction of the positions of each window to predict, at least one.
        copies: samples of each window in an epoch, each with its own mask.

    Raises:
        ConfigError: arguments out of range, or a missing package.
        DataError: no text, or one that is too short.
    """
    _check(chosen, copies)
    return _splits(
        read_tokens(path, tokenizer=tokenizer, length=length, validation=validation, vocabulary=vocabulary),
        tokenizer=tokenizer,
        length=length,
        chosen=chosen,
        copies=copies,
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
    chosen: float = 0.15,
    copies: int = 10,
) -> DataSplits:
    """Load another text for the model of a run; see `hvdtrain.data.sources.text.load_like`.

    Raises:
        ConfigError: another tokenizer or length, or arguments out of range.
        DataError: no text, or one with characters that the run's has not.
    """
    _check(chosen, copies)
    known = same_windows(trained, tokenizer, length)
    text = read_tokens(
        path, tokenizer=known.tokenizer, length=known.length, validation=validation, vocabulary=vocabulary, known=known
    )
    return _splits(text, tokenizer=known.tokenizer, length=known.length, chosen=chosen, copies=copies)


def _check(chosen: float, copies: int) -> None:
    if not 0 < chosen <= 1 or copies < 1:
        raise ConfigError(
            "masked_text needs a share of chosen places in (0, 1] and at least one copy. "
            f"Received: chosen={chosen}, copies={copies}."
        )


def _splits(text: TokenizedText, tokenizer: str, length: int, chosen: float, copies: int) -> DataSplits:
    size, positions = text.tokenizer.size, max(1, round(chosen * length))
    return DataSplits(
        train=MaskedSource(
            tokens=text.train,
            length=length,
            vocabulary=size,
            positions=positions,
            name=f"{text.name} (training)",
            copies=copies,
        ),
        validation=MaskedSource(
            tokens=text.validation,
            length=length,
            vocabulary=size,
            positions=positions,
            name=f"{text.name} (validation)",
        ),
        sample_shape=(length,),
        classes=size + 1,
        preprocessing=Preprocessing(text=described(tokenizer, text.tokenizer, length, masked=True)),
        held_out=True,
    )


class MaskedSource:
    """A source of masked windows of one sequence of tokens; see `Source`.

    Args:
        tokens: [n] integers below `vocabulary`.
        length: tokens of a window; an incomplete last window is dropped.
        vocabulary: number of tokens; also the number of the mask token.
        positions: positions of each window to predict.
        name: its name in messages.
        copies: samples of each window, each with its own mask.

    Raises:
        DataError: too few tokens for one window.
    """

    finite = True
    heavy = False

    def __init__(
        self, tokens: np.ndarray, length: int, vocabulary: int, positions: int, name: str, *, copies: int = 1
    ) -> None:
        self.name = name
        self.size = windows_in(tokens, length, length, name) * copies
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._windows = self.size // copies
        self._length = length
        self._vocabulary = vocabulary
        self._positions = positions

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
        facts = f"masked {self._length} {self._vocabulary} {self._positions} {self.size}\0".encode()
        return hashlib.sha256(facts + self.tokens.numpy().tobytes()).digest()

    def _draws(self, number: tf.Tensor) -> tf.Tensor:
        """Return the random numbers [3, length] in [0, 1) of one sample."""
        return tf.random.stateless_uniform([3, self._length], tf.stack([tf.constant(MASK_SEED, tf.int64), number]))

    def _masked(self, tokens: tf.Tensor, place: tf.Tensor, way: tf.Tensor, other: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Mask windows of tokens [n, length] using random numbers [n, length]; return inputs and targets."""
        ranks = tf.argsort(tf.argsort(place, axis=1), axis=1)
        picked = ranks < self._positions
        drawn = tf.cast(other * self._vocabulary, tf.int32)
        unmasked = tf.where(way < SHOWN_AS_MASK + SHOWN_AS_ANY, drawn, tokens)
        shown = tf.where(way < SHOWN_AS_MASK, self._vocabulary, unmasked)
        return tf.where(picked, shown, tokens), tf.where(picked, tokens, IGNORED)
