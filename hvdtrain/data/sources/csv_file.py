"""Reads CSV files, or lines of JSON objects, into columns of numbers, or of texts encoded as integers."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.errors import DataError

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Spellings of a missing value, in lower case."""
NO_TEXT = -1
"""Code of a missing text."""
ROWS_AT_A_TIME = 65536
JSON_LINES = (".jsonl", ".ndjson")
"""Ends of the names of files that hold one JSON object in each line: {"COLUMN": value, …}."""


@dataclass(frozen=True)
class TextInMemory:
    """A text that is read like a file.

    Args:
        text: its contents.
        name: its name in messages.
    """

    text: str
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """What a file of such contents would end in."""
        return JSON_LINES[0] if self.text.lstrip().startswith("{") else ".csv"

    def open(self, encoding: str, newline: str) -> io.StringIO:
        """Return the text as an open file."""
        return io.StringIO(self.text, newline=newline)


Readable = Path | TextInMemory


@dataclass
class Column:
    """One column: float64 numbers, NaN if missing, or integer codes of `texts`."""

    name: str
    numeric: bool | None = None
    """None until the first value that is present decides."""
    texts: dict[str, int] = field(default_factory=dict)
    """Code of each text, in order of appearance; shared by the files of a data set."""
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[rows] float64, or int64 codes of `texts` and NO_TEXT."""

    def missing(self) -> np.ndarray:
        """Return the indices of rows without a value."""
        return np.flatnonzero(np.isnan(self.values) if self.numeric else self.values == NO_TEXT)


@dataclass(frozen=True)
class Table:
    """The rows of CSV files with the same columns, concatenated."""

    columns: dict[str, Column]
    files: list[Readable]
    lines: list[np.ndarray]
    """For each file, [rows]: the line on which each row ends, from 1."""

    @property
    def rows(self) -> int:
        """Number of rows of all files."""
        return sum(map(len, self.lines))

    def describe(self, row: int) -> str:
        """Describe where a row is: file and line."""
        for file, lines in zip(self.files, self.lines, strict=True):
            if row < len(lines):
                return f"{file}, line {lines[row]}"
            row -= len(lines)
        raise IndexError(row)

    def followed_by(self, other: "Table") -> "Table":
        """Concatenate two tables that share their text codes."""
        columns = {
            name: replace(column, values=np.concatenate([mine.values, column.values]))
            for (name, column), mine in zip(other.columns.items(), self.columns.values(), strict=True)
        }
        return Table(columns, self.files + other.files, self.lines + other.lines)


def header_of(path: Readable, delimiter: str) -> list[str]:
    """Return the names of the columns, in the first line or the first object.

    Raises:
        DataError: the file cannot be read, is empty, or names a column twice.
    """
    names = next((row for _, row in _rows(path, delimiter)), None)
    if names is None:
        raise DataError(f"{path} is empty: it needs a line with the names of its columns.")
    names = [name.strip() for name in names]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}.")
    return names


def read_table(path: Readable, wanted: Mapping[str, Column], delimiter: str) -> Table:
    """Read the columns `wanted`.

    Args:
        path: the file; its first line names the columns, or each line is a JSON object (.jsonl).
        wanted: columns by name, whose kind and text codes may be set already.
        delimiter: character between two values.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a malformed row; names file and line.
    """
    header = header_of(path, delimiter)
    lacking = next((name for name in wanted if name not in header), None)
    if lacking is not None:
        raise DataError(f"{path} has no column {lacking!r}. It has: {', '.join(header)}.")
    columns = {name: Column(name, known.numeric, known.texts) for name, known in wanted.items()}
    chunks: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    lines: list[int] = []
    for part in _chunks(path, delimiter, len(header)):
        chunk = Table(columns, [path], [np.array([line for line, _ in part])])
        by_place = list(zip(*(row for _, row in part), strict=True))
        for name, column in columns.items():
            chunks[name].append(_values(column, by_place[header.index(name)], chunk))
        lines.extend(line for line, _ in part)
    if not lines:
        raise DataError(f"{path} has no rows below its header.")
    for name, column in columns.items():
        values = np.concatenate(chunks[name])
        column.numeric = column.numeric is not False
        # Before the first value, missing ones were encoded as NaN in a column of texts as well.
        column.values = values if column.numeric else np.nan_to_num(values, nan=NO_TEXT).astype(np.int64)
    return Table(columns, [path], [np.array(lines)])


def _values(column: Column, texts: Sequence[str], chunk: Table) -> np.ndarray:
    """Encode the values of some rows; the first one present decides whether the column is numeric."""
    stripped = [text.strip() for text in texts]
    missing = [text.lower() in MISSING for text in stripped]
    if column.numeric is None:
        first = next((text for text, gone in zip(stripped, missing, strict=True) if not gone), None)
        column.numeric = None if first is None else is_number(first)
    if column.numeric is False:
        known = column.texts
        return np.array(
            [
                NO_TEXT if gone else known.setdefault(text, len(known))
                for text, gone in zip(stripped, missing, strict=True)
            ]
        )
    try:
        return np.array([np.nan if gone else float(text) for text, gone in zip(stripped, missing, strict=True)])
    except ValueError:
        places = range(len(stripped))
        row = next(place for place in places if not missing[place] and not is_number(stripped[place]))
        raise DataError(
            f"{chunk.describe(row)}: {stripped[row]!r} in the column {column.name!r} is no number, as its first value "
            f"is. For a column of categories give --data-args categorical {column.name}."
        ) from None


def is_number(text: str) -> bool:
    """Whether `text` is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _chunks(path: Readable, delimiter: str, width: int) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield lines and values of the rows below the header, in chunks."""
    rows = _rows(path, delimiter)
    next(rows, None)
    while part := list(islice(rows, ROWS_AT_A_TIME)):
        for line, row in part:
            if len(row) != width:
                raise DataError(f"{path}, line {line}: the row has {len(row)} values; the header names {width}.")
        yield part


def _rows(path: Readable, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and each row that is not blank, and the line on which it ends."""
    if path.suffix.lower() in JSON_LINES:
        yield from _json_rows(path)
        return
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for row in reader:
                line = reader.line_num
                if row:
                    yield line, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}, after line {line}: it is no CSV file in UTF-8, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _json_rows(path: Readable) -> Iterator[tuple[int, list[str]]]:
    """Yield the keys of the first object as a header, then the values of each; a missing key is an empty text."""
    names: list[str] | None = None
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                values = json.loads(text)
                if not isinstance(values, dict):
                    raise DataError(f"{path}, line {line}: it must be a JSON object. Received: {text.strip()[:80]!r}.")
                if names is None:
                    names = list(values)
                    yield 0, names
                yield line, [_json_text(values.get(name)) for name in names]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}, line {line}: it is no JSON, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _json_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
