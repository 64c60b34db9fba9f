"""Tables in CSV, JSON-lines, Parquet and Arrow files: one column is the target, others are the inputs.

A column is numeric if its first value is a number, else categorical: the texts of the training rows are encoded as ids
from 1 on, and others as 0. Columns keep the order of the file.

    only numeric columns        inputs float32 [columns]
    only categorical columns    inputs int32 [columns]
    both                        inputs {"numeric": float32 [n], "categorical": int32 [m]}

A target of texts, or of integers from 0 on, is a label; other numbers are float32 [1].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import suggestion
from hvdtrain.data.arrays import ArraySource, check_range, held_out_numbers
from hvdtrain.data.files import find_data
from hvdtrain.data.preprocessing import Preprocessing, TableColumn, TableInputs
from hvdtrain.data.source import DataSplits, input_shape
from hvdtrain.data.sources.table_file import TableFile

FORMS = ("auto", "dict", "array")
TASKS = ("auto", "classification", "regression")
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Spellings of a missing value, in lower case."""
NO_TEXT = -1
"""Code of a missing text."""


@dataclass(frozen=True)
class Column:
    """One column: float64 numbers, NaN if missing, or int64 codes of `texts` in order of appearance."""

    name: str
    values: np.ndarray
    texts: tuple[str, ...] | None = None

    def missing(self) -> np.ndarray:
        """Return the indices of rows without a value."""
        return np.flatnonzero(np.isnan(self.values) if self.texts is None else self.values == NO_TEXT)


@dataclass(frozen=True)
class Table:
    """The rows of files with the same columns, one file after the other."""

    columns: dict[str, Column]
    files: Sequence[TableFile]
    counts: Sequence[int]
    """Rows of each file."""

    @property
    def rows(self) -> int:
        """Number of rows of all files."""
        return sum(self.counts)

    def describe(self, row: int) -> str:
        """Return file and number of a row, which counts from 0, as those of predictions."""
        for file, count in zip(self.files, self.counts, strict=True):
            if row < count:
                return f"{file.name}, row {row}"
            row -= count
        raise IndexError(row)


def read_table(files: Sequence[TableFile], wanted: dict[str, bool | None]) -> Table:
    """Read columns of several files.

    Args:
        files: the files; the first value that is present decides whether a column is numeric.
        wanted: for each column whether it is numeric, if that is known.

    Raises:
        DataError: a file cannot be read, lacks a column, has no rows, or a text in a numeric column.
    """
    parts = [file.read(list(wanted)) for file in files]
    empty = next((file for file, part in zip(files, parts, strict=True) if not part.num_rows), None)
    if empty is not None:
        raise DataError(f"{empty.name} has no rows below its header.")
    table = Table({}, files, [part.num_rows for part in parts])
    for name, numeric in wanted.items():
        table.columns[name] = _column(name, [part.column(name) for part in parts], numeric, table)
    return table


def _column(name: str, parts: Sequence[Any], numeric: bool | None, table: Table) -> Column:
    import pyarrow as pa
    import pyarrow.compute as pc

    if all(_holds_numbers(part.type) for part in parts) and numeric is not False:
        numbers = [pc.cast(part, pa.float64()).to_numpy() for part in parts]
        return Column(name, np.concatenate(numbers))
    try:
        texts = pa.chunked_array([chunk for part in parts for chunk in pc.cast(part, pa.string()).chunks], pa.string())
    except pa.ArrowNotImplementedError:
        raise DataError(f"The column {name!r} of {table.files[0].name} holds {parts[0].type}, not a value.") from None
    texts = pc.utf8_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(pc.utf8_lower(texts), pa.array(MISSING)), None, texts)
    known = numeric is not None
    if not known:
        present = texts.drop_null().slice(0, 1).to_pylist()
        numeric = not present or _is_number(present[0])
    if not numeric:
        codes = pc.dictionary_encode(texts).unify_dictionaries().combine_chunks()
        values = codes.indices.fill_null(NO_TEXT).to_numpy(zero_copy_only=False).astype(np.int64)
        return Column(name, values, tuple(codes.dictionary.to_pylist()))
    try:
        return Column(name, pc.cast(texts, pa.float64()).to_numpy())
    except pa.ArrowInvalid:
        given = texts.to_pylist()
        row = next(place for place, text in enumerate(given) if text is not None and not _is_number(text))
        advice = f"as its first value is. For a column of categories give --data-args categorical {name}."
        if known:
            advice = "as those are that the model was trained on."
        problem = f"{given[row]!r} in the column {name!r} is not a number"
        raise DataError(f"{table.describe(row)}: {problem}, {advice}") from None


def _holds_numbers(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_number(text: str) -> bool:
    import pyarrow as pa

    try:
        pa.scalar(text).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def load(
    *,
    path: str = "",
    target: str = "",
    columns: str = "",
    categorical: str = "",
    inputs: str = "auto",
    task: str = "auto",
    missing: float | None = None,
    vocabulary: int = 0,
    classes: int = 0,
    delimiter: str = ",",
    validation: int = 0,
    validation_path: str = "",
) -> DataSplits:
    """Load the rows of a table; see the module for how columns are encoded.

    Args:
        path: the file: .csv, .jsonl, .parquet or .arrow.
        target: name of the target column.
        columns: names of the input columns, separated by commas; "": all others.
        categorical: names of numeric columns to treat as categorical, separated by commas.
        inputs: `dict` or `array`; `auto`: a dict where some columns are numeric and others categorical.
        task: `classification` or `regression`; `auto`: texts and integers from 0 on are classes.
        missing: value of a missing number; a missing category becomes 0. None refuses both.
        vocabulary: number of ids of a categorical column, for the most frequent texts, the rest being 0; 0: no limit.
        classes: number of classes; 0: one more than the highest label, or the number of texts.
        delimiter: character between two values of a CSV file; `tab` for a tab.
        validation: rows to hold out if there is no validation file; 0: one in ten.
        validation_path: a file of validation rows.

    Raises:
        ConfigError: arguments that do not match the file, or one another.
        DataError: a file does not exist, or cannot be used.
    """
    for option, value, choices in (("inputs", inputs, FORMS), ("task", task, TASKS)):
        if value not in choices:
            raise ConfigError(f"csv: {option} must be one of {', '.join(choices)}. Received: {value!r}.")
    if validation and validation_path:
        raise ConfigError("csv takes rows for validation from validation_path, or holds them out: give one of both.")
    files = _files(path, validation_path, delimiter)
    names, texts = _chosen(files[0], target=target, columns=columns, categorical=categorical)
    table = read_table(files, {name: False if name in texts else None for name in (*names, target)})
    check_present(table, (*names, target), missing, never=target)
    targets, known, labels = _targets(table, target, task, classes)
    parts = _parts(table, validation, targets if known is not None else None)
    kinds = {table.columns[name].texts is None for name in names}
    if inputs == "array" and len(kinds) > 1:
        raise ConfigError("inputs array takes columns of one kind: name them with columns, or take inputs dict.")
    description = TableInputs(
        columns=tuple(TableColumn(name, _vocabulary(table.columns[name], parts[0], vocabulary)) for name in names),
        as_dict=inputs == "dict" or len(kinds) > 1,
        missing=missing,
        target=target,
        delimiter=files[0].delimiter,
    )
    return _splits(table, targets, parts, classes=known, preprocessing=Preprocessing(labels, table=description))


def load_like(
    trained: Preprocessing,
    classes: int | None,
    *,
    path: str = "",
    target: str = "",
    delimiter: str = "",
    validation: int = 0,
    validation_path: str = "",
    **_: Any,
) -> DataSplits:
    """Load other rows for the model of a run: with its columns, vocabularies, labels and value of missing numbers.

    Args:
        trained: the run's preprocessing.
        classes: its number of classes; None: the target is a number to regress.
        path: as in `load`; arguments that the run has settled have no effect.
        target: the run's, or "".
        delimiter: as in `load`; "": the run's.
        validation: as in `load`.
        validation_path: as in `load`.

    Raises:
        ConfigError: another target.
        DataError: a file lacks a column, or has a label that the run does not know.
    """
    inputs = trained.table
    assert inputs is not None, "asked by the caller"
    if target not in ("", inputs.target):
        raise ConfigError(f"The run's target is {inputs.target!r}. Received: target={target!r}. Leave it out.")
    kinds: dict[str, bool | None] = {column.name: column.vocabulary is None for column in inputs.columns}
    kinds[inputs.target] = trained.class_names is None
    table = read_table(_files(path, validation_path, delimiter or inputs.delimiter), kinds)
    check_present(table, kinds, inputs.missing, never=inputs.target)
    targets = _known_targets(table, inputs.target, classes, trained.class_names)
    parts = _parts(table, validation, None if classes is None else targets)
    return _splits(table, targets, parts, classes=classes, preprocessing=trained)


def _files(path: str, validation_path: str, delimiter: str) -> list[TableFile]:
    between = "\t" if delimiter == "tab" else delimiter
    if len(between) != 1:
        raise ConfigError(f"csv takes one character as delimiter, or tab. Received: {delimiter!r}.")
    paths = [path, validation_path] if validation_path else [path]
    return [TableFile(find_data(each), between) for each in paths]


def _parts(table: Table, validation: int, labels: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and the validation rows."""
    if len(table.files) == 1:
        return held_out_numbers(table.rows, validation, labels, table.files[0].name)
    return np.arange(table.counts[0]), np.arange(table.counts[0], table.rows)


def _splits(
    table: Table,
    targets: np.ndarray,
    parts: tuple[np.ndarray, np.ndarray],
    classes: int | None,
    preprocessing: Preprocessing,
) -> DataSplits:
    assert preprocessing.table is not None, "a table's"
    elements = encoded(table, preprocessing.table), targets

    def part(rows: np.ndarray, what: str) -> ArraySource:
        return ArraySource(
            tf.nest.map_structure(lambda array: array[rows], elements), f"{table.files[0].name} ({what})"
        )

    train, held = part(parts[0], "training"), part(parts[1], "validation")
    return DataSplits(
        train, held, input_shape(train), classes, preprocessing=preprocessing, held_out=len(table.files) == 1
    )


def encoded(table: Table, inputs: TableInputs) -> Any:
    """Return the inputs of all rows: float32 [rows, n], int32 ids [rows, m], or a dict of both."""
    filled = np.nan if inputs.missing is None else inputs.missing
    numbers, ids = [], []
    for described in inputs.columns:
        column = table.columns[described.name]
        if described.vocabulary is None:
            numbers.append(np.where(np.isnan(column.values), filled, column.values))
            continue
        places = {text: place for place, text in enumerate(described.vocabulary, 1)}
        known = [places.get(text, 0) for text in column.texts or ()]
        ids.append(np.array([*known, 0], np.int32)[column.values])  # the last place is that of a missing text, -1
    blocks = {}
    if numbers:
        blocks["numeric"] = np.stack(numbers, axis=1).astype(np.float32)
    if ids:
        blocks["categorical"] = np.stack(ids, axis=1)
    return blocks if inputs.as_dict else next(iter(blocks.values()))


def check_present(table: Table, columns: Iterable[str], missing: float | None, *, never: str = "") -> None:
    """Refuse rows that lack a value, unless `missing` replaces it.

    Args:
        table: the rows.
        columns: names of the columns to look at.
        missing: value of a missing number; None refuses missing ones.
        never: a column that must have values in any case.

    Raises:
        DataError: names the row and the column.
    """
    for name in columns:
        places = table.columns[name].missing()
        if len(places) and (missing is None or name == never):
            fix = "" if name == never else " Training with --data-args missing 0 makes it 0."
            raise DataError(f"{table.describe(int(places[0]))}: the column {name!r} has no value.{fix}")


def _vocabulary(column: Column, train: np.ndarray, limit: int) -> tuple[str, ...] | None:
    """Return the texts of the rows `train` in order of appearance, the most frequent ones if there is a limit."""
    if column.texts is None:
        return None
    found, counts = np.unique(column.values[train], return_counts=True)
    found, counts = found[found >= 0], counts[found >= 0]
    if limit:
        # Ties are broken by first appearance, which is the order of the codes.
        found = np.sort(found[np.argsort(-counts, kind="stable")][: max(limit - 1, 0)])
    return tuple(column.texts[code] for code in found)


def _chosen(file: TableFile, target: str, columns: str, categorical: str) -> tuple[list[str], list[str]]:
    """Return the names of the input columns in the file's order, and of the columns declared categorical."""
    if not target:
        raise ConfigError(f"csv needs --data-args target COLUMN. {file.name} has: {', '.join(file.columns)}.")
    inputs, texts = ([name.strip() for name in names.split(",") if name.strip()] for names in (columns, categorical))
    for name in (target, *inputs, *texts):
        if name not in file.columns:
            hint = suggestion(name, dict.fromkeys(file.columns, ""))
            raise ConfigError(f"{file.name} has no column {name!r}.{hint}")
    chosen = [name for name in file.columns if name != target and (not inputs or name in inputs)]
    if target in inputs or not chosen:
        raise ConfigError(f"The target {target!r} of {file.name} is not an input: name other columns.")
    idle = next((name for name in texts if name not in chosen), None)
    if idle is not None:
        raise ConfigError(f"The column {idle!r} of {file.name} is categorical, but none of the inputs.")
    return chosen, texts


def _targets(
    table: Table, target: str, task: str, classes: int
) -> tuple[np.ndarray, int | None, tuple[str, ...] | None]:
    """Return labels [rows] int32, the number of classes and their texts, or numbers [rows, 1] float32 and None."""
    texts: tuple[str, ...] | None = None
    column, file = table.columns[target], table.files[0].name
    if column.texts is not None:
        if task == "regression":
            raise ConfigError(f"The target {target!r} of {file} is not a number: it cannot be regressed.")
        # Not of texts that only the validation file has: codes are in order of appearance.
        texts = tuple(sorted(column.texts[: column.values[: table.counts[0]].max() + 1]))
        labels, found = _named_labels(table, column, texts), len(texts)
    else:
        fractions = np.flatnonzero(column.values % 1 != 0)
        if task == "regression" or (task == "auto" and len(fractions)):
            if classes:
                raise ConfigError(f"The target {target!r} of {file} is not a label: leave out classes.")
            return column.values[:, np.newaxis].astype(np.float32), None, None
        if len(fractions):
            row = int(fractions[0])
            raise DataError(f"{table.describe(row)}: label {column.values[row]:g} is not an integer.")
        labels = column.values
        found = int(labels.max()) + 1
    known = classes or found
    check_range(labels.astype(np.int64), max(known, 1), table.describe)
    return labels.astype(np.int32), known, texts if texts is not None and len(texts) == known else None


def _named_labels(table: Table, column: Column, names: tuple[str, ...]) -> np.ndarray:
    """Return the labels [rows] of texts that are among `names`."""
    texts, numbers = column.texts or (), {name: place for place, name in enumerate(names)}
    labels = np.array([numbers.get(text, -1) for text in texts])[column.values]
    strange = np.flatnonzero(labels < 0)
    if len(strange):
        row = int(strange[0])
        raise DataError(
            f"{table.describe(row)}: the label {texts[column.values[row]]!r} is not among those trained on: "
            f"{', '.join(names[:20])}."
        )
    return labels


def _known_targets(table: Table, target: str, classes: int | None, names: tuple[str, ...] | None) -> np.ndarray:
    """Return labels [rows] int32 of the classes of a run, or numbers [rows, 1] float32."""
    column = table.columns[target]
    if classes is None:
        return column.values[:, np.newaxis].astype(np.float32)
    labels = column.values if names is None or column.texts is None else _named_labels(table, column, names)
    check_range(labels.astype(np.int64), classes, table.describe)
    return labels.astype(np.int32)
