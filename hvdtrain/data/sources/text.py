"""Text for language models: windows of tokens, with the tokens that follow or were masked as their targets.

    a window of length 4     t0 t1 t2 t3        the next one     t4 t5 t6 t7
    its targets (`text`)     t1 t2 t3 t4                         t5 t6 t7 t8

So every token is predicted once, except the first of a split and those of an incomplete last window, which is dropped.

`masked_text` is for models such as BERT (Devlin et al. 2019, arXiv:1810.04805, section 3.1): in every window 15 % of
the positions are chosen. Of these, 80 % show the mask token, 10 % a random token, and 10 % their own. The targets are
the original tokens at the chosen positions, and IGNORED elsewhere. The mask is a function of the sample's number alone,
so it depends neither on the order nor on the number of ranks. For several masks of a text, an epoch has `copies`
samples of each window, as BERT's data had. In validation every window comes once, always under the same mask.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files import files_below, find_data
from hvdtrain.data.preprocessing import Preprocessing, TextInputs
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.tokenizers import Tokenizer, described, make_tokenizer, tokenizer_of

SEPARATOR = b"\n\n"
"""Separates the files of a folder, and the topics of Python's documentation."""
IGNORED = -1
"""Target at positions that were not chosen; the loss ignores it (`ignore_class`)."""
SHOWN_AS_MASK, SHOWN_AS_ANY = 0.8, 0.1
MASK_SEED = 1810
"""Fixed, not the run's seed: validation losses are compared between runs."""


@dataclass(frozen=True)
class Corpus:
    """A text, split into training and validation parts."""

    name: str
    train: bytes
    validation: bytes


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text, split into training and validation, and the windows that they are cut into."""

    name: str
    train: np.ndarray
    """[n] tokens."""
    validation: np.ndarray
    tokenizer: Tokenizer
    length: int
    """Tokens of a window."""


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
    return _next_tokens(read_tokens(path, tokenizer, length, validation, vocabulary=vocabulary), tokenizer)


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
    """Load another text for the model of a run, as `load` does, with the run's tokenizer and length.

    Raises:
        ConfigError: another tokenizer or length.
        DataError: no text, or one with characters that the run's has not.
    """
    known = same_windows(trained, tokenizer, length)
    return _next_tokens(_read_like(path, validation, known), known.tokenizer)


def load_masked(
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
        path: as in `load`; so are the next four.
        tokenizer: `chars`, `bytes` or `sentencepiece`.
        length: tokens of a window.
        validation: fraction of the text for validation.
        vocabulary: size of the sentencepiece vocabulary.
        chosen: fraction of the positions of each window to predict, at least one.
        copies: samples of each window in an epoch, each with its own mask.

    Raises:
        ConfigError: arguments out of range, or a missing package.
        DataError: no text, or one that is too short.
    """
    _check_masks(chosen, copies)
    text = read_tokens(path, tokenizer, length, validation, vocabulary=vocabulary)
    return _masked_tokens(text, tokenizer, chosen, copies=copies)


def load_masked_like(
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
    """Load another text for the model of a run, as `load_masked` does, with the run's tokenizer and length.

    Raises:
        ConfigError: another tokenizer or length, or arguments out of range.
        DataError: no text, or one with characters that the run's has not.
    """
    _check_masks(chosen, copies)
    known = same_windows(trained, tokenizer, length)
    return _masked_tokens(_read_like(path, validation, known), known.tokenizer, chosen, copies=copies)


def same_windows(trained: Preprocessing, tokenizer: str, length: int) -> TextInputs:
    """Return the windows that a run was trained on.

    Raises:
        ConfigError: another `tokenizer` than the run's (or ""), or another `length` (or 0).
    """
    known = trained.text
    assert known is not None, "asked by the caller"
    if tokenizer not in ("", known.tokenizer) or length not in (0, known.length):
        raise ConfigError(
            f"The run was trained on windows of {known.length} tokens by the tokenizer {known.tokenizer}: other text "
            f"is read likewise. Received: tokenizer={tokenizer!r}, length={length}. Leave them out."
        )
    return known


def read_tokens(
    path: str, tokenizer: str, length: int, validation: float, *, vocabulary: int = 0, known: TextInputs | None = None
) -> TokenizedText:
    """Read and tokenize a text; the arguments are those of `load`, and `known` describes the tokenizer of a run.

    Raises:
        ConfigError: arguments that cannot work, or a missing package.
        DataError: there is no text.
    """
    if length < 1:
        raise ConfigError(f"--data-args length must be at least 1. Received: {length}.")
    corpus = read_corpus(path, validation, utf8=tokenizer != "bytes")
    made = (
        make_tokenizer(tokenizer, train=corpus.train, whole=corpus.train + corpus.validation, vocabulary=vocabulary)
        if known is None
        else tokenizer_of(known)
    )
    return TokenizedText(
        name=corpus.name,
        train=made.encode(corpus.train),
        validation=made.encode(corpus.validation),
        tokenizer=made,
        length=length,
    )


def _read_like(path: str, validation: float, known: TextInputs) -> TokenizedText:
    return read_tokens(path, known.tokenizer, known.length, validation, known=known)


def read_corpus(path: str, validation: float, *, utf8: bool) -> Corpus:
    """Read a text and hold out its end for validation.

    Args:
        path: a file; a folder, whose .txt files are joined recursively in the order of their paths; or "" for the
            documentation that comes with Python (465 kB in Python 3.11; others differ).
        validation: fraction of the text, in bytes, for validation.
        utf8: require UTF-8, and split between characters.

    Raises:
        ConfigError: a fraction outside (0, 1).
        DataError: there is no text, or it is not UTF-8.
    """
    if not 0 < validation < 1:
        raise ConfigError(f"--data-args validation must be a share of the text, in (0, 1). Received: {validation}.")
    if path:
        found = find_data(path)
        files = [found]
        if found.is_dir():
            files = sorted(file for file in files_below(found) if file.suffix == ".txt" and file.is_file())
        if not files:
            raise DataError(f"The folder {found} holds no .txt files. See --data-args path.")
        name, text = str(found), SEPARATOR.join(_read(file, utf8) for file in files)
    else:
        name, text = "Python's documentation", _documentation()
    cut = round(len(text) * (1 - validation))
    while utf8 and 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # within a character
        cut -= 1
    return Corpus(name, text[:cut], text[cut:])


def _read(file: Path, utf8: bool) -> bytes:
    try:
        text = file.read_bytes()
        if utf8:
            text.decode("utf-8")
        return text
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}). See --data-args tokenizer bytes."
        ) from None


def _documentation() -> bytes:
    """Return the texts of Python's help() topics, in order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("This Python comes without its documentation: give a text with --data-args path.") from None
    return SEPARATOR.join(topics[name].encode() for name in sorted(topics))


def _next_tokens(text: TokenizedText, tokenizer: str) -> DataSplits:
    return DataSplits(
        train=TokenSource(text.train, text.length, f"{text.name} (training)"),
        validation=TokenSource(text.validation, text.length, f"{text.name} (validation)"),
        sample_shape=(text.length,),
        classes=text.tokenizer.size,
        preprocessing=Preprocessing(text=described(tokenizer, text.tokenizer, text.length)),
        held_out=True,
    )


def _check_masks(chosen: float, copies: int) -> None:
    if not 0 < chosen <= 1 or copies < 1:
        raise ConfigError(
            "masked_text needs a share of chosen places in (0, 1] and at least one copy. "
            f"Received: chosen={chosen}, copies={copies}."
        )


def _masked_tokens(text: TokenizedText, tokenizer: str, chosen: float, *, copies: int) -> DataSplits:
    size, length = text.tokenizer.size, text.length

    def source(tokens: np.ndarray, what: str, copies: int) -> MaskedSource:
        positions = max(1, round(chosen * length))
        return MaskedSource(
            tokens=tokens,
            length=length,
            vocabulary=size,
            positions=positions,
            name=f"{text.name} ({what})",
            copies=copies,
        )

    return DataSplits(
        train=source(text.train, "training", copies),
        validation=source(text.validation, "validation", 1),
        sample_shape=(length,),
        classes=size + 1,
        preprocessing=Preprocessing(text=described(tokenizer, text.tokenizer, length, masked=True)),
        held_out=True,
    )


class TokenSource:
    """A source of windows of one sequence of tokens.

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
        self.size = _windows_in(tokens, length, length + 1, name)
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._length = length

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        window = _gather_windows(self.tokens, numbers, self._length, self._length + 1)
        return window[:, :-1], window[:, 1:]

    def describe(self, number: int) -> str:
        begin = number * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length}"

    def fingerprint(self) -> bytes:
        return hashlib.sha256(f"next {self._length}\0".encode() + self.tokens.numpy().tobytes()).digest()


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
        self.size = _windows_in(tokens, length, length, name) * copies
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._windows = self.size // copies
        self._length = length
        self._vocabulary = vocabulary
        self._positions = positions

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        numbers = tf.cast(numbers, tf.int64)
        tokens = _gather_windows(self.tokens, numbers % self._windows, self._length, self._length)
        draws = tf.map_fn(self._draws, numbers, fn_output_signature=tf.TensorSpec([3, self._length], tf.float32))
        return self._masked(tokens, *tf.unstack(draws, axis=1))

    def describe(self, number: int) -> str:
        copy, window = divmod(number, self._windows)
        begin = window * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length - 1}, copy {copy}"

    def fingerprint(self) -> bytes:
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


def _windows_in(tokens: np.ndarray, stride: int, needed: int, name: str) -> int:
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


def _gather_windows(tokens: tf.Tensor, numbers: tf.Tensor, stride: int, needed: int) -> tf.Tensor:
    """Return the windows `numbers` [n] of `tokens`, one every `stride`, as int32 [n, needed]."""
    begins = tf.cast(numbers, tf.int64)[:, tf.newaxis] * stride
    return tf.cast(tf.gather(tokens, begins + tf.range(needed, dtype=tf.int64)), tf.int32)
