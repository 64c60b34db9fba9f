"""Plain text: a file, a folder of them, or the text that comes with Python."""

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.files.walking import files_below

SEPARATOR = b"\n\n"
"""Separates the files of a folder, and the topics of Python's documentation."""


@dataclass(frozen=True)
class Corpus:
    """A text, split into training and validation parts."""

    name: str
    train: bytes
    validation: bytes


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
        name, text = str(found), SEPARATOR.join(_read(file, utf8) for file in _files(found))
    else:
        name, text = "Python's documentation", _documentation()
    cut = round(len(text) * (1 - validation))
    while utf8 and 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # within a character
        cut -= 1
    return Corpus(name, text[:cut], text[cut:])


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in files_below(path) if file.suffix == ".txt" and file.is_file())
    if not files:
        raise DataError(f"The folder {path} holds no .txt files. See --data-args path.")
    return files


def _read(file: Path, utf8: bool) -> bytes:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    try:
        if utf8:
            text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}). See --data-args tokenizer bytes."
        ) from None
    return text


def _documentation() -> bytes:
    """Return the texts of Python's help() topics, in order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("This Python comes without its documentation: give a text with --data-args path.") from None
    return SEPARATOR.join(topics[name].encode() for name in sorted(topics))
