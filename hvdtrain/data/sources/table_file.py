"""Files of tables, read by pyarrow: CSV, lines of JSON objects, Parquet and Arrow; and rows that Python holds."""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import DataError
from hvdtrain.config.registry import optional_package

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather")
LARGEST_BLOCK = 2**30
"""Bytes of lines of JSON that are parsed at a time: within one block, errors name the row."""


class TableFile:
    """A table whose columns are read by name.

    CSV and JSON are read by one thread, since only then errors name the row. Values of a CSV file are texts.

    Args:
        source: a file, of a kind by its suffix (CSV by default); the bytes of a CSV or JSON-lines file; or an Arrow
            table.
        delimiter: character between two values of a CSV file.
        name: its name in messages; the path by default.

    Raises:
        DataError: it cannot be read, or has two columns of one name.
    """

    def __init__(self, source: Any, delimiter: str = ",", name: str = "") -> None:
        optional_package("pyarrow", "tables", "A table")
        self.name = name or str(source)
        self.delimiter = delimiter
        self._source = source
        self._read: Callable[[list[str]], Any] = self._read_csv
        suffix = source.suffix.lower() if isinstance(source, Path) else ""
        if isinstance(source, bytes) and source.lstrip().startswith(b"{"):
            suffix = JSON_LINES[0]
        with self._errors_named():
            names = self._opened(suffix)
        self._raw = {column.strip(): column for column in names}
        if len(self._raw) < len(names):
            twice = next(column for place, column in enumerate(names) if column in names[:place])
            raise DataError(f"{self.name} has two columns {twice.strip()!r}.")

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in their order."""
        return list(self._raw)

    def read(self, columns: Sequence[str]) -> Any:
        """Return the `columns` as a pyarrow.Table.

        Raises:
            DataError: it lacks a column, or has a malformed row; names the row, from 1 below the header.
        """
        lacking = next((column for column in columns if column not in self._raw), None)
        if lacking is not None:
            raise DataError(f"{self.name} has no column {lacking!r}. It has: {', '.join(self._raw)}.")
        raw = [self._raw[column] for column in columns]
        with self._errors_named():
            return self._read(raw).select(raw).rename_columns(list(columns))

    def _opened(self, suffix: str) -> list[str]:
        """Open the file, and return its columns as they are spelled in it."""
        import pyarrow as pa

        if suffix in PARQUET:
            from pyarrow import parquet

            file = parquet.ParquetFile(self._source, memory_map=True)
            self._read = file.read
            return list(file.schema_arrow.names)
        table = None
        if isinstance(self._source, pa.Table):
            table = self._source
        elif suffix in JSON_LINES:
            table = self._read_json()
        elif suffix in ARROW:
            mapped = pa.memory_map(str(self._source))
            try:
                table = pa.ipc.open_file(mapped).read_all()
            except pa.ArrowInvalid:  # the format of a stream
                table = pa.ipc.open_stream(mapped).read_all()
        if table is not None:
            self._read = table.select
            return list(table.column_names)
        with io.TextIOWrapper(self._bytes(), encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            header = next((row for row in csv.reader(text, delimiter=self.delimiter) if row), None)
        if header is None:
            raise DataError(f"{self.name} is empty: it needs a line with the names of its columns.")
        "".join(header).encode()  # an error here is one of this line; pyarrow names the others' rows
        return header

    def _bytes(self) -> Any:
        return io.BytesIO(self._source) if isinstance(self._source, bytes) else open(self._source, "rb")

    def _read_csv(self, columns: list[str]) -> Any:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        malformed: list[Any] = []

        def refuse(row: Any) -> str:
            malformed.append(row)
            return "error"

        with self._bytes() as file:
            try:
                return arrow_csv.read_csv(
                    file,
                    read_options=arrow_csv.ReadOptions(use_threads=False),
                    parse_options=arrow_csv.ParseOptions(
                        delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=refuse
                    ),
                    convert_options=arrow_csv.ConvertOptions(
                        column_types=dict.fromkeys(columns, pa.string()), include_columns=columns
                    ),
                )
            except pa.ArrowInvalid:
                if not malformed:
                    raise
        (row,) = malformed
        raise DataError(
            f"{self.name}, row {row.number - 2}: it has {row.actual_columns} values; the header names "
            f"{row.expected_columns}."
        )

    def _read_json(self) -> Any:
        from pyarrow import json

        with self._bytes() as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            options = json.ReadOptions(use_threads=False, block_size=min(max(size, 2**16), LARGEST_BLOCK))
            return json.read_json(file, read_options=options)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (DataError, csv.Error) as error:
            raise error if isinstance(error, DataError) else DataError(f"{self.name} is damaged: {error}.") from None
        except ValueError as error:  # pyarrow.ArrowInvalid
            # pyarrow counts rows of JSON from 0, and the header of a CSV file as row 1.
            text = re.sub(r"Row #(\d+)", lambda row: f"row {int(row[1]) - 2}", str(error).splitlines()[0])
            raise DataError(f"{self.name} is damaged, or not what its name says: {text.rstrip('.')}.") from None
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror or error}.") from None


def rows_in_memory(given: Any) -> TableFile:
    """Return rows (mappings), or columns (a mapping of sequences, a pandas DataFrame), as a table.

    Raises:
        DataError: it is something else, columns of different lengths, or a column with values of different kinds.
    """
    pa = optional_package("pyarrow", "tables", "A table")
    if not isinstance(given, Sequence) and hasattr(given, "keys"):
        columns = {str(name): list(given[name]) for name in given.keys()}  # noqa: SIM118 (a DataFrame's keys)
    elif isinstance(given, Sequence) and given and all(isinstance(row, Mapping) for row in given):
        names = dict.fromkeys(name for row in given for name in row)
        columns = {str(name): [row.get(name) for row in given] for name in names}
    else:
        raise DataError(
            "Rows of a table are given as a list of dicts, a dict of columns, a DataFrame or the path of a CSV file. "
            f"Received: {type(given).__name__}."
        )
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        raise DataError(f"The columns differ in length: {', '.join(map(str, sorted(lengths)))} rows.")
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values, from_pandas=True)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"The column {name!r} holds values of different kinds: {error}.") from None
    return TableFile(pa.table(arrays), name="the rows given")
