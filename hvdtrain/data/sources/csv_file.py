"""Reading a CSV file into columns: numbers, or texts that are numbered as they are met."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""What stands for a missing value, in any case of letters."""
NO_TEXT = -1
"""The number of a missing text."""
ROWS_AT_A_TIME = 65536


@dataclass
class Column:
    """One column: float64 numbers with NaN where one is missing, or numbers of `texts`."""

    name: str
    numeric: bool | None = None
    """None until the first value that is not missing decides."""
    texts: dict[str, int] = field(default_factory=dict)
    """The texts, numbered in the order in which they were met; shared by the files of one data set."""
    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    """[rows] float64, or int64 numbers of `texts` and NO_TEXT."""

    def missing(self) -> np.ndarray:
        """Return the places of rows without a value."""
        return np.flatnonzero(np.isnan(self.values) if self.numeric else self.values == NO_TEXT)


@dataclass(frozen=True)
class Table:
    """What CSV files of the same columns hold, one after the other."""

    columns: dict[str, Column]
    files: list[Path]
    lines: list[np.ndarray]
    """For each file [rows]: the line on which each row ends, from 1."""

    @property
    def rows(self) -> int:
        """Number of rows of all files."""
        return sum(map(len, self.lines))

    def describe(self, row: int) -> str:
        """Say where a row is."""
        for file, lines in zip(self.files, self.lines, strict=True):
            if row < len(lines):
                return f"{file}, line {lines[row]}"
            row -= len(lines)
        raise IndexError(row)

    def followed_by(self, other: "Table") -> "Table":
        """Return the rows of both; the numbers of texts must be the same in both."""
        columns = {
            name: replace(column, values=np.concatenate([mine.values, column.values]))
            for (name, column), mine in zip(other.columns.items(), self.columns.values(), strict=True)
        }
        return Table(columns, self.files + other.files, self.lines + other.lines)


def header_of(path: Path, delimiter: str) -> list[str]:
    """Return the names of the columns, in the first line.

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


def read_table(path: Path, wanted: Mapping[str, Column], delimiter: str) -> Table:
    """Read the columns `wanted`.

    Args:
        path: the file; its first line names the columns.
        wanted: by name, what is known of them: whether they are numeric, and texts that have numbers already.
        delimiter: what stands between two values.

    Raises:
        DataError: the file cannot be read, lacks a column, or has a row that does not fit; file and line are named.
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
        # Until the first value was met, what is missing is NaN in a column of texts as well.
        column.values = values if column.numeric else np.nan_to_num(values, nan=NO_TEXT).astype(np.int64)
    return Table(columns, [path], [np.array(lines)])


def _values(column: Column, texts: Sequence[str], chunk: Table) -> np.ndarray:
    """Return the values of some rows; the first that is there decides whether the column is numeric."""
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
    """Tell whether `text` is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _chunks(path: Path, delimiter: str, width: int) -> Iterator[list[tuple[int, list[str]]]]:
    """Return lines and values of the rows below the header, many at a time."""
    rows = _rows(path, delimiter)
    next(rows, None)
    while part := list(islice(rows, ROWS_AT_A_TIME)):
        for line, row in part:
            if len(row) != width:
                raise DataError(f"{path}, line {line}: the row has {len(row)} values; the header names {width}.")
        yield part


def _rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Return each row that is not blank, and the line on which it ends."""
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
