"""Inspection of text and of tables."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.packing.inspection_report import Report
from hvdtrain.data.sources.csv_file import Column, header_of, read_table

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Delimiter of a table, by its file's suffix."""
_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Surrogates, into which errors="surrogateescape" decodes bytes that are not UTF-8."""


def inspect_texts(path: Path, files: Sequence[Path]) -> Report:
    """Inspect text files as one corpus.

    Raises:
        DataError: a file is not text.
    """
    report = Report("text", str(path))
    size, characters, lines, different = 0, 0, 0, set[str]()
    for file in files:
        text, strange = _read(file)
        size += file.stat().st_size
        characters += len(text)
        lines += len(text.splitlines())
        different |= set(text)
        report.damaged += [f"{file}, line {number}: bytes that are no UTF-8" for number in strange]
    if len(files) > 1:
        report.facts["files"] = f"{len(files):,}"
    report.facts["size"] = f"{size:,} bytes"
    report.facts["characters"] = f"{characters:,}, {len(different):,} different ones"
    report.facts["lines"] = f"{lines:,}"
    return report


def inspect_table(path: Path) -> Report:
    """Inspect a CSV file with a header line."""
    report = Report("table", str(path))
    try:
        delimiter = DELIMITERS[path.suffix.lower()]
        table = read_table(path, {name: Column(name) for name in header_of(path, delimiter)}, delimiter)
    except DataError as error:
        report.damaged.append(str(error))
        return report
    report.facts["rows"] = f"{table.rows:,}"
    report.facts |= {f"column {name}": _described(column) for name, column in table.columns.items()}
    return report


def _read(file: Path) -> tuple[str, list[int]]:
    """Return a file's text, and the lines that are not UTF-8."""
    data = file.read_bytes()
    if b"\0" in data:
        raise DataError(
            f"{file} is none of what data inspect knows: a packed folder, TFRecord files, class folders of images, a "
            "tar file of them, MNIST's or CIFAR's files, .npz or .npy files, a .csv table, or text."
        )
    text = data.decode(errors="surrogateescape")
    return text, [number for number, line in enumerate(text.splitlines(), 1) if _NO_UTF8.search(line)]


def _described(column: Column) -> str:
    missing = len(column.missing())
    gaps = f", {missing:,} missing" if missing else ""
    if not column.numeric:
        return f"{len(column.texts):,} different texts{gaps}"
    if missing == len(column.values):
        return "nothing"
    return f"numbers from {np.nanmin(column.values):.6g} to {np.nanmax(column.values):.6g}{gaps}"
