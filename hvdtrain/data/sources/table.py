"""CSV files: the first line names the columns, one of which is the target and the others are inputs.

A column is numeric if its first value is a number, else categorical: the texts of the training rows are encoded as ids
from 1 on, and others as 0. Columns keep the order of the file.

    only numeric columns        inputs float32 [columns]
    only categorical columns    inputs int32 [columns]
    both                        inputs {"numeric": float32 [n], "categorical": int32 [m]}

A target of texts, or of integers from 0 on, is a label; other numbers are float32 [1].
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import suggestion
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.data.source import input_shape
from hvdtrain.data.sources.csv_file import Column, Table, header_of, read_table
from hvdtrain.data.sources.held_out import check_range, held_out_numbers
from hvdtrain.data.sources.table_inputs import check_present, encoded, learned
from hvdtrain.data.splits import DataSplits

FORMS = ("auto", "dict", "array")
TASKS = ("auto", "classification", "regression")


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
    """Load the rows of a CSV file; see the module for how columns are encoded.

    Args:
        path: the file, in UTF-8.
        target: name of the target column.
        columns: names of the input columns, separated by commas; "": all others.
        categorical: names of numeric columns to treat as categorical, separated by commas.
        inputs: `dict` or `array`; `auto`: see above.
        task: `classification` or `regression`; `auto`: by the target, see above.
        missing: value of a missing number; a missing category becomes 0. None refuses both.
        vocabulary: number of ids of a categorical column, for the most frequent texts, the rest being 0; 0: no limit.
        classes: number of classes; 0: one more than the highest label, or the number of texts.
        delimiter: character between two values; `tab` for a tab.
        validation: rows to hold out if there is no validation file; 0: one in ten.
        validation_path: a file of validation rows.

    Raises:
        ConfigError: arguments that do not match the file, or one another.
        DataError: a file does not exist, or cannot be used.
    """
    _check_choice("inputs", inputs, FORMS)
    _check_choice("task", task, TASKS)
    if validation and validation_path:
        raise ConfigError("csv takes rows for validation from validation_path, or holds them out: give one of both.")
    file, between = find_data(path), _delimiter(delimiter)
    names, texts = _chosen(
        file, header=header_of(file, between), target=target, columns=columns, categorical=categorical
    )
    table = read_table(
        file, {name: Column(name, False if name in texts else None) for name in (*names, target)}, between
    )
    own_rows = table.rows
    if validation_path:
        # Column kinds and text codes come from the training file.
        table = table.followed_by(read_table(find_data(validation_path), table.columns, between))
    check_present(table, (*names, target), missing, never=target)
    targets, known, texts_of_labels = _targets(table, target, task, classes)
    if validation_path:
        parts = np.arange(own_rows), np.arange(own_rows, table.rows)
    else:
        parts = held_out_numbers(table.rows, validation, None if known is None else targets, str(file))
    description = learned(
        [table.columns[name] for name in names],
        train=parts[0],
        form=inputs,
        missing=missing,
        vocabulary=vocabulary,
        target=target,
        delimiter=between,
    )
    nest = encoded(table.columns, description)
    preprocessing = Preprocessing(texts_of_labels, table=description)
    return _split(
        file,
        nest=nest,
        targets=targets,
        parts=parts,
        classes=known,
        preprocessing=preprocessing,
        has_validation=bool(validation_path),
    )


def _split(
    file: Path,
    nest: Any,
    targets: np.ndarray,
    parts: tuple[np.ndarray, np.ndarray],
    classes: int | None,
    preprocessing: Preprocessing,
    has_validation: bool,
) -> DataSplits:
    train, held = (
        ArraySource(_rows((nest, targets), rows), f"{file} ({what})")
        for rows, what in zip(parts, ("training", "validation"), strict=True)
    )
    return DataSplits(
        train, held, input_shape(train), classes, preprocessing=preprocessing, held_out=not has_validation
    )


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
        trained: what the run was trained with.
        classes: its number of classes; None: the target is a number to regress.
        path: as in `load`; so are the arguments below, of which those that the run has settled do nothing.
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
    between = _delimiter(delimiter or inputs.delimiter)
    files = [find_data(place) for place in (path, validation_path) if place]
    numeric = trained.class_names is None
    kinds = {column.name: column.vocabulary is None for column in inputs.columns} | {inputs.target: numeric}
    wanted = {name: Column(name, kind) for name, kind in kinds.items()}
    tables = [read_table(file, wanted, between) for file in files]
    table = tables[0] if len(tables) == 1 else tables[0].followed_by(tables[1])
    check_present(table, wanted, inputs.missing, never=inputs.target)
    targets = _known_targets(table, inputs.target, classes, trained.class_names)
    parts = (
        (np.arange(tables[0].rows), np.arange(tables[0].rows, table.rows))
        if validation_path
        else held_out_numbers(table.rows, validation, None if classes is None else targets, str(files[0]))
    )
    return _split(
        files[0],
        nest=encoded(table.columns, inputs),
        targets=targets,
        parts=parts,
        classes=classes,
        preprocessing=trained,
        has_validation=bool(validation_path),
    )


def _known_targets(table: Table, target: str, classes: int | None, names: tuple[str, ...] | None) -> np.ndarray:
    """Return labels [rows] int32 of the classes of a run, or numbers [rows, 1] float32."""
    column = table.columns[target]
    if classes is None:
        return column.values[:, np.newaxis].astype(np.float32)
    labels = column.values
    if names is not None:
        number = {name: place for place, name in enumerate(names)}
        codes = np.array([number.get(text, -1) for text in column.texts])
        strange = np.flatnonzero(codes[column.values] < 0)
        if len(strange):
            text = list(column.texts)[int(column.values[strange[0]])]
            raise DataError(
                f"{table.describe(int(strange[0]))}: the run was not trained on the label {text!r}. It knows: "
                f"{', '.join(names[:20])}."
            )
        labels = codes[column.values]
    check_range(labels.astype(np.int64), classes, table.describe)
    return labels.astype(np.int32)


def _chosen(
    file: Path, header: Sequence[str], target: str, columns: str, categorical: str
) -> tuple[list[str], list[str]]:
    """Return the names of the input columns in the file's order, and of the columns declared categorical."""
    if not target:
        raise ConfigError(f"csv needs --data-args target COLUMN. {file} has: {', '.join(header)}.")
    inputs, texts = _listed(columns), _listed(categorical)
    for name in (target, *inputs, *texts):
        if name not in header:
            raise ConfigError(f"{file} has no column {name!r}.{suggestion(name, dict.fromkeys(header, ''))}")
    chosen = [name for name in header if name != target and (not inputs or name in inputs)]
    if target in inputs or not chosen:
        raise ConfigError(f"The target {target!r} of {file} is no input: name other columns.")
    idle = next((name for name in texts if name not in chosen), None)
    if idle is not None:
        raise ConfigError(f"The column {idle!r} of {file} is categorical, but none of the inputs.")
    return chosen, texts


def _targets(
    table: Table, target: str, task: str, classes: int
) -> tuple[np.ndarray, int | None, tuple[str, ...] | None]:
    """Return labels [rows] int32, the number of classes and their texts, or numbers [rows, 1] float32 and None."""
    texts: tuple[str, ...] | None = None
    column = table.columns[target]
    if not column.numeric:
        if task == "regression":
            raise ConfigError(f"The target {target!r} of {table.files[0]} is no number: it cannot be regressed.")
        labels, texts = _sorted_labels(table, column)
        found = len(texts)
    else:
        fractions = np.flatnonzero(column.values % 1 != 0)
        if task == "regression" or (task == "auto" and len(fractions)):
            if classes:
                raise ConfigError(f"The target {target!r} of {table.files[0]} is no label: leave out classes.")
            return column.values[:, np.newaxis].astype(np.float32), None, None
        if len(fractions):
            row = int(fractions[0])
            raise DataError(f"{table.describe(row)}: the label {column.values[row]:g} is no whole number.")
        labels = column.values
        found = int(labels.max()) + 1
    known = classes or found
    check_range(labels.astype(np.int64), max(known, 1), table.describe)
    return labels.astype(np.int32), known, texts if texts is not None and len(texts) == known else None


def _sorted_labels(table: Table, column: Column) -> tuple[np.ndarray, tuple[str, ...]]:
    """Encode label texts in sorted order; refuse a text that only the validation file has."""
    first = column.values[: len(table.lines[0])]
    own = [text for text, number in column.texts.items() if number <= first.max()]
    strange = np.flatnonzero(column.values > first.max())
    if len(strange):
        text = list(column.texts)[int(column.values[strange[0]])]
        raise DataError(f"{table.describe(int(strange[0]))}: the label {text!r} is not in {table.files[0]}.")
    places = {text: place for place, text in enumerate(sorted(own))}
    return np.array([places[text] for text in own])[column.values], tuple(sorted(own))


def _rows(nest: Any, rows: np.ndarray) -> Any:
    return tf.nest.map_structure(lambda array: array[rows], nest)


def _delimiter(delimiter: str) -> str:
    between = "\t" if delimiter == "tab" else delimiter
    if len(between) != 1:
        raise ConfigError(f"csv takes one character as delimiter, or tab. Received: {delimiter!r}.")
    return between


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"csv: {name} must be one of {', '.join(choices)}. Received: {value!r}.")
