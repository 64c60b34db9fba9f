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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files import files_below, find_data
from hvdtrain.data.preprocessing import Preprocessing, TextInputs
from hvdtrain.data.source import DataSplits, Source
from hvdtrain.data.sources.tokenizers import Tokenizer, described, make_tokenizer, tokenizer_of

SEPARATOR = b"\n\n"
"""Separates the files of a folder, and the topics of Python's documentation."""
IGNORED = -1
"""Target at positions that were not chosen; the loss ignores it (`ignore_class`)."""
SHOWN_AS_MASK, SHOWN_AS_ANY = 0.8, 0.1
MASK_SEED = 1810
"""Fixed, not the run's seed: validation losses are compared between runs."""


class Corpus(NamedTuple):
    """A text, split into training and validation parts."""

    name: str
    train: bytes
    validation: bytes


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text, split into training and validation."""

    name: str
    train: np.ndarray
    """[n] tokens."""
    validation: np.ndarray
    tokenizer: Tokenizer
    inputs: TextInputs
    """Tokenizer and length of the windows that the tokens are cut into."""


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
    return _next_tokens(read_tokens(path, tokenizer, length, validation, vocabulary=vocabulary))


def load_like(trained: Preprocessing, classes: int | None, **arguments: Any) -> DataSplits:
    """Load another text for the model of a run, as `load` does, with the run's tokenizer and length.

    Raises:
        ConfigError: another tokenizer or length.
        DataError: no text, or one with characters that the run's has not.
    """
    return _next_tokens(_read_like(trained, **arguments))


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
        path: a text file, or a folder of .txt files; "": the documentation that comes with Python.
        tokenizer: `chars`, `bytes` or `sentencepiece`, as of `text`.
        length: tokens of a window.
        validation: fraction of the text, at its end, for validation.
        vocabulary: size of the sentencepiece vocabulary; 0: 2048.
        chosen: fraction of the positions of each window to predict, at least one.
        copies: samples of each window in an epoch, each with its own mask.

    Raises:
        ConfigError: arguments out of range, or a missing package.
        DataError: no text, or one that is too short.
    """
    text = read_tokens(path, tokenizer, length, validation, vocabulary=vocabulary)
    return _masked_tokens(text, chosen, copies)


def load_masked_like(
    trained: Preprocessing, classes: int | None, *, chosen: float = 0.15, copies: int = 10, **arguments: Any
) -> DataSplits:
    """Load another text for the model of a run, as `load_masked` does, with the run's tokenizer and length.

    Raises:
        ConfigError: another tokenizer or length, or arguments out of range.
        DataError: no text, or one with characters that the run's has not.
    """
    return _masked_tokens(_read_like(trained, **arguments), chosen, copies)


def _read_like(
    trained: Preprocessing,
    *,
    path: str = "",
    tokenizer: str = "",
    length: int = 0,
    validation: float = 0.1,
    vocabulary: int = 0,
) -> TokenizedText:
    known = trained.text
    assert known is not None, "asked by the caller"
    if tokenizer not in ("", known.tokenizer) or length not in (0, known.length):
        raise ConfigError(
            f"The run was trained on windows of {known.length} tokens by the tokenizer {known.tokenizer}: other text "
            f"is read likewise. Received: tokenizer={tokenizer!r}, length={length}. Leave them out."
        )
    return read_tokens(path, known.tokenizer, known.length, validation, known=known)


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
        inputs=described(tokenizer, made, length),
    )


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


def _next_tokens(text: TokenizedText) -> DataSplits:
    parts = ((text.train, "training"), (text.validation, "validation"))
    train, held = (TokenSource(tokens, text.inputs.length, f"{text.name} ({what})") for tokens, what in parts)
    return _splits(train, held, text.tokenizer.size, text.inputs)


def _masked_tokens(text: TokenizedText, chosen: float, copies: int) -> DataSplits:
    if not 0 < chosen <= 1 or copies < 1:
        raise ConfigError(
            "masked_text needs a share of chosen places in (0, 1] and at least one copy. "
            f"Received: chosen={chosen}, copies={copies}."
        )
    vocabulary, length = text.tokenizer.size, text.inputs.length
    facts = {"vocabulary": vocabulary, "positions": max(1, round(chosen * length))}
    train = MaskedSource(text.train, length, name=f"{text.name} (training)", copies=copies, **facts)
    held = MaskedSource(text.validation, length, name=f"{text.name} (validation)", **facts)
    return _splits(train, held, vocabulary + 1, replace(text.inputs, masked=True))


def _splits(train: Source, held: Source, classes: int, inputs: TextInputs) -> DataSplits:
    return DataSplits(train, held, (inputs.length,), classes, preprocessing=Preprocessing(text=inputs), held_out=True)


class _Windows:
    """A source of windows of one sequence of tokens, int32 [length], with targets of the same shape.

    Args:
        tokens: [n] integers.
        length: tokens of a window, and from one window to the next.
        needed: tokens that a window and its targets take; an incomplete last window is dropped.
        name: its name in messages.

    Raises:
        DataError: too few tokens for one window.
    """

    finite = True
    heavy = False

    def __init__(self, tokens: np.ndarray, length: int, needed: int, name: str) -> None:
        self.name = name
        self.size = (len(tokens) - needed) // length + 1
        if self.size < 1:
            raise DataError(
                f"{name} is too short: it has {len(tokens)} tokens, and a window needs {needed}. See --data-args "
                "length, validation and path."
            )
        self.spec = (tf.TensorSpec([length], tf.int32), tf.TensorSpec([length], tf.int32))
        self.tokens = tf.constant(tokens)
        self._length = length
        self._needed = needed

    def _windows(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the windows `numbers` [n] as int32 [n, needed]."""
        begins = tf.cast(numbers, tf.int64)[:, tf.newaxis] * self._length
        return tf.cast(tf.gather(self.tokens, begins + tf.range(self._needed, dtype=tf.int64)), tf.int32)

    def _hash(self, facts: str) -> bytes:
        return hashlib.sha256(f"{facts}\0".encode() + self.tokens.numpy().tobytes()).digest()


class TokenSource(_Windows):
    """A source of windows of tokens, with the tokens that follow as targets; see `_Windows`."""

    def __init__(self, tokens: np.ndarray, length: int, name: str) -> None:
        super().__init__(tokens, length, length + 1, name)

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        window = self._windows(numbers)
        return window[:, :-1], window[:, 1:]

    def describe(self, number: int) -> str:
        begin = number * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length}"

    def fingerprint(self) -> bytes:
        return self._hash(f"next {self._length}")


class MaskedSource(_Windows):
    """A source of masked windows of tokens; see `_Windows`.

    Args:
        tokens: [n] integers below `vocabulary`.
        length: tokens of a window.
        vocabulary: number of tokens; also the number of the mask token.
        positions: positions of each window to predict.
        name: its name in messages.
        copies: samples of each window, each with its own mask.
    """

    def __init__(
        self, tokens: np.ndarray, length: int, *, vocabulary: int, positions: int, name: str, copies: int = 1
    ) -> None:
        super().__init__(tokens, length, length, name)
        self._count = self.size
        self.size *= copies
        self._vocabulary = vocabulary
        self._positions = positions

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        numbers = tf.cast(numbers, tf.int64)

        def draws(number: tf.Tensor) -> tf.Tensor:
            return tf.random.stateless_uniform([3, self._length], tf.stack([tf.constant(MASK_SEED, tf.int64), number]))

        drawn = tf.map_fn(draws, numbers, fn_output_signature=tf.TensorSpec([3, self._length], tf.float32))
        place, way, other = tf.unstack(drawn, axis=1)
        tokens = self._windows(numbers % self._count)
        picked = tf.argsort(tf.argsort(place, axis=1), axis=1) < self._positions
        unmasked = tf.where(way < SHOWN_AS_MASK + SHOWN_AS_ANY, tf.cast(other * self._vocabulary, tf.int32), tokens)
        shown = tf.where(way < SHOWN_AS_MASK, self._vocabulary, unmasked)
        return tf.where(picked, shown, tokens), tf.where(picked, tokens, IGNORED)

    def describe(self, number: int) -> str:
        copy, window = divmod(number, self._count)
        begin = window * self._length
        return f"{self.name}, tokens {begin} to {begin + self._length - 1}, copy {copy}"

    def fingerprint(self) -> bytes:
        return self._hash(f"masked {self._length} {self._vocabulary} {self._positions} {self.size}")
