"""Rows of a table to predict: CSV files, lines of JSON, or Python's own rows and columns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.prediction.samples import PredictionSamples, rows_of
from hvdtrain.data.preprocessing import TableInputs
from hvdtrain.data.sources.csv_file import Column, Readable, TextInMemory, read_table
from hvdtrain.data.sources.table_inputs import check_present, encoded


def table_rows(file: Readable, table: TableInputs) -> PredictionSamples:
    """Return the rows of a file with the columns that the model takes; others, such as the target, are not read.

    Raises:
        DataError: a missing column or value, or a malformed row.
    """
    columns = {column.name: Column(column.name, column.vocabulary is None) for column in table.columns}
    rows = read_table(file, columns, table.delimiter)
    check_present(rows, columns, table.missing)
    inputs = encoded(rows.columns, table)
    return rows_of(inputs, len(tf.nest.flatten(inputs)[0]), str(file))


def rows_in_memory(given: Any) -> TextInMemory:
    """Return rows (mappings), or columns (a mapping of sequences, a pandas DataFrame), as a text.

    Raises:
        DataError: it is something else, or columns of different lengths.
    """
    if not isinstance(given, Sequence) and hasattr(given, "keys"):
        given = {str(name): list(given[name]) for name in given.keys()}  # noqa: SIM118 (a DataFrame's keys)
    if isinstance(given, Mapping):
        lengths = {len(values) for values in given.values()}
        if len(lengths) != 1:
            raise DataError(f"The columns differ in length: {', '.join(map(str, sorted(lengths)))} rows.")
        given = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    if not isinstance(given, Sequence) or not given or not all(isinstance(row, Mapping) for row in given):
        raise DataError(
            "Rows of a table are given as a list of dicts, a dict of columns, a DataFrame or the path of a CSV file. "
            f"Received: {type(given).__name__}."
        )
    names = dict.fromkeys(name for row in given for name in row)
    lines = [json.dumps({name: _plain(row.get(name)) for name in names}, ensure_ascii=False) for row in given]
    return TextInMemory("\n".join(lines), "the rows given")


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and np.isnan(value) else value
