"""The table of exported models: on the screen, and in the folder as `export.md` and `export.json`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from hvdtrain.export.exporter import Exported
from hvdtrain.observability.summary import replace_file, write_json

HEAD = ("file", "format", "precision", "size", "ms", "accuracy", "difference", "takes")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of exported models, which is aligned."""
    cells = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    accuracy, difference = row["accuracy"], row["difference"]
    return (
        row["path"] or ("" if row["name"] == "model" else "none"),
        row["name"],
        row["precision"],
        decimal(row["bytes"]) if row["bytes"] else "",
        "" if row["ms"] is None else f"{row['ms']:.3f}",
        "" if accuracy is None else f"{accuracy:.4f}",
        "" if difference is None else f"{difference:.1e}",
        row["takes"],
    )


def rows_of(found: Sequence[Exported]) -> list[dict[str, Any]]:
    """Return exported models as JSON has them, paths as names."""
    return [{**asdict(each), "path": None if each.path is None else each.path.name} for each in found]


def note(folder: Path, found: Sequence[Exported]) -> None:
    """Add exported models to the table in their folder, which has each of an earlier export, too."""
    file, rows = folder / "export.json", rows_of(found)
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))["models"]
    except (OSError, ValueError, KeyError):
        earlier = []
    keys = {(row["path"], row["name"], row["precision"]) for row in rows}
    kept = [row for row in earlier if (row["path"], row["name"], row["precision"]) not in keys]
    models = sorted([*kept, *rows], key=lambda row: row["name"] != "model")
    write_json(file, {"models": models})
    replace_file(folder / "export.md", f"{table(models)}\n")
