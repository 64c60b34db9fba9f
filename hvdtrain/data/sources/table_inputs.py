"""Columns of a table as inputs of a model: vocabularies learned from training rows, and the encoding with them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.preprocessing import TableColumn, TableInputs
from hvdtrain.data.sources.csv_file import Column, Table


def learned(
    columns: Sequence[Column],
    train: np.ndarray,
    form: str,
    missing: float | None,
    vocabulary: int,
    target: str,
    delimiter: str,
) -> TableInputs:
    """Return the description of the input columns, with vocabularies from the rows `train`.

    Args:
        columns: the input columns, in the order of the inputs.
        train: numbers of the training rows.
        form: `dict`, `array` or `auto`.
        missing: value of a missing number; None if there is none.
        vocabulary: number of ids of a categorical column; 0: no limit.
        target: name of the target column.
        delimiter: character between two values.

    Raises:
        ConfigError: numbers and texts do not go into one array.
    """
    kinds = {bool(column.numeric) for column in columns}
    if form == "array" and len(kinds) > 1:
        raise ConfigError("inputs array takes columns of one kind: name them with columns, or take inputs dict.")
    described = tuple(
        TableColumn(column.name, None if column.numeric else _vocabulary(column, train, vocabulary))
        for column in columns
    )
    return TableInputs(
        columns=described, as_dict=form == "dict" or len(kinds) > 1, missing=missing, target=target, delimiter=delimiter
    )


def encoded(columns: Mapping[str, Column], inputs: TableInputs) -> Any:
    """Return the inputs of all rows: float32 [rows, n], int32 ids [rows, m], or a dict of both."""
    filled = np.nan if inputs.missing is None else inputs.missing
    numbers, texts = [], []
    for described in inputs.columns:
        column = columns[described.name]
        if described.vocabulary is None:
            numbers.append(np.where(np.isnan(column.values), filled, column.values))
        else:
            texts.append(_ids(column, described.vocabulary))
    blocks = {}
    if numbers:
        blocks["numeric"] = np.stack(numbers, axis=1).astype(np.float32)
    if texts:
        blocks["categorical"] = np.stack(texts, axis=1)
    return blocks if inputs.as_dict else next(iter(blocks.values()))


def check_present(table: Table, columns: Iterable[str], missing: float | None, *, never: str = "") -> None:
    """Refuse rows without a value where there is none for missing ones.

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
            fix = "" if name == never else " --data-args missing 0 would make it 0."
            raise DataError(f"{table.describe(int(places[0]))}: the column {name!r} has no value.{fix}")


def _vocabulary(column: Column, train: np.ndarray, limit: int) -> tuple[str, ...]:
    """Return the texts of the rows `train` in order of appearance, the most frequent ones if there is a limit."""
    found, counts = np.unique(column.values[train], return_counts=True)
    found, counts = found[found >= 0], counts[found >= 0]
    if limit:
        # Ties are broken by first appearance, which is the order of the codes.
        found = np.sort(found[np.argsort(-counts, kind="stable")][: max(limit - 1, 0)])
    texts = list(column.texts)
    return tuple(texts[code] for code in found)


def _ids(column: Column, vocabulary: Sequence[str]) -> np.ndarray:
    """Return int32 ids [rows]: from 1 on for the texts of `vocabulary`, 0 for others."""
    ids = np.zeros(len(column.texts) + 1, np.int32)  # the last place is that of a missing text, -1
    for place, text in enumerate(vocabulary, 1):
        if text in column.texts:
            ids[column.texts[text]] = place
    return ids[column.values]
