"""Tokenizers: text to integers and back."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import optional_package, suggestion
from hvdtrain.data.files import cache_folder, made_once
from hvdtrain.data.preprocessing import TextInputs

NAMES = ("bytes", "chars", "sentencepiece")
PIECES = 2048
"""Default size of a sentencepiece vocabulary: about 3 characters per token in a megabyte of English."""
LONGEST_LINE = 2**20
"""Bytes; sentencepiece skips longer lines when it learns its vocabulary."""


class Tokenizer(Protocol):
    """Encodes text as integers."""

    @property
    def size(self) -> int:
        """Number of distinct tokens."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens [n] of `text`, in the smallest integer dtype."""

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of `tokens` [n]."""


class ByteTokenizer:
    """Every byte is a token: fits any text, with no vocabulary to learn or keep."""

    size = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of `tokens` [n]; invalid UTF-8 becomes replacement characters."""
        return np.asarray(tokens, np.uint8).tobytes().decode("utf-8", "replace")


class CharTokenizer:
    """Every Unicode character of an alphabet is a token, in the order of code points.

    Args:
        text: the text, in UTF-8, whose characters are the alphabet.
    """

    def __init__(self, text: bytes) -> None:
        self._alphabet = np.unique(_code_points(text))

    @property
    def alphabet(self) -> str:
        """All characters, in the order of their tokens."""
        return self.decode(range(self.size))

    @property
    def size(self) -> int:
        return len(self._alphabet)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens [n] of `text`; a character outside the alphabet is a DataError."""
        points = _code_points(text)
        tokens = np.minimum(np.searchsorted(self._alphabet, points), max(0, self.size - 1))
        strange = points[self._alphabet[tokens] != points] if self.size else points
        if len(strange):
            raise DataError(f"The character {chr(strange[0])!r} is not in the alphabet of {self.size} characters.")
        return tokens.astype(smallest_type(self.size))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return self._alphabet[np.asarray(tokens, np.int64)].astype("<u4").tobytes().decode("utf-32-le")


class SentencePieceTokenizer:
    """Byte pair encoding by the package sentencepiece, with bytes as a fallback for unknown characters.

    Args:
        model: a model file with byte fallback and without normalization.
    """

    def __init__(self, model: Path) -> None:
        self.model = model
        self._processor = _package().SentencePieceProcessor(model_file=str(model))
        self._newline = self._processor.piece_to_id("<0x0A>")

    @property
    def size(self) -> int:
        return int(self._processor.get_piece_size())

    def encode(self, text: bytes) -> np.ndarray:
        tokens: list[int] = []
        # Line by line: no piece spans a line break.
        for line in self._processor.encode(text.decode("utf-8").split("\n")):
            tokens += [*line, self._newline]
        return np.array(tokens[:-1], smallest_type(self.size))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        return str(self._processor.decode([int(token) for token in tokens]))


def make_tokenizer(name: str, *, train: bytes, whole: bytes, vocabulary: int = 0) -> Tokenizer:
    """Return the tokenizer `name`.

    Args:
        name: one of `NAMES`. `chars` covers the whole text, so that validation has no unknown character;
            `sentencepiece` learns from the training split alone.
        train: the training split of the text.
        whole: the whole text.
        vocabulary: size of the sentencepiece vocabulary; 0: 2048.

    Raises:
        ConfigError: an unknown name, a vocabulary without effect or of an impossible size, or a missing package.
    """
    if name not in NAMES:
        raise ConfigError(f"There is no tokenizer {name!r}.{suggestion(name, dict.fromkeys(NAMES, ''))}")
    if name == "sentencepiece":
        return SentencePieceTokenizer(_learned(train, vocabulary or PIECES))
    if vocabulary:
        raise ConfigError(
            f"--data-args vocabulary {vocabulary} has no effect with the tokenizer {name!r}: leave it out, or use "
            "tokenizer sentencepiece."
        )
    return ByteTokenizer() if name == "bytes" else CharTokenizer(whole)


def described(name: str, tokenizer: Tokenizer, length: int) -> TextInputs:
    """Return the description of windows of `length` tokens that the tokenizer `name` makes."""
    alphabet = tokenizer.alphabet if isinstance(tokenizer, CharTokenizer) else ""
    model = str(tokenizer.model) if isinstance(tokenizer, SentencePieceTokenizer) else ""
    return TextInputs(tokenizer=name, length=length, alphabet=alphabet, model=model)


def tokenizer_of(text: TextInputs) -> Tokenizer:
    """Return the tokenizer that `text` describes.

    Raises:
        ConfigError: a missing package.
        DataError: its file is missing.
    """
    if text.tokenizer == "bytes":
        return ByteTokenizer()
    if text.tokenizer == "chars":
        return CharTokenizer(text.alphabet.encode())
    if not Path(text.model).is_file():
        raise DataError(f"The tokenizer's file {text.model} is missing: text cannot be encoded without it.")
    return SentencePieceTokenizer(Path(text.model))


def smallest_type(size: int) -> type[np.integer[Any]]:
    """Return the smallest integer dtype that holds 0 … size - 1."""
    return np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.int32


def _code_points(text: bytes) -> np.ndarray:
    return np.frombuffer(text.decode("utf-8").encode("utf-32-le"), "<u4")


def _package() -> Any:
    return optional_package("sentencepiece", "text", "--data-args tokenizer sentencepiece")


def _learned(text: bytes, vocabulary: int) -> Path:
    """Return the file of a model learned from `text`, once per host."""
    package = _package()
    facts = f"bpe {vocabulary} {package.__version__}\0".encode()
    target = cache_folder() / f"{hashlib.sha256(facts + text).hexdigest()[:24]}-sentencepiece.model"
    with made_once(target) as draft:
        if draft is not None:
            draft.write_bytes(_learn(package.SentencePieceTrainer, text, vocabulary))
    return target


def _learn(trainer: Any, text: bytes, vocabulary: int) -> bytes:
    model = io.BytesIO()
    try:
        trainer.train(
            sentence_iterator=iter(text.decode("utf-8").split("\n")),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            byte_fallback=True,
            # No normalization, so that decoding inverts encoding.
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=LONGEST_LINE,
            bos_id=-1,
            eos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"sentencepiece cannot learn {vocabulary} tokens from this text of {len(text)} bytes: {error} "
            "See --data-args vocabulary."
        ) from None
    return model.getvalue()
