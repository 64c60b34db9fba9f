"""Results of a run as JSON, and their statistics."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def json_safe(value: Any) -> Any:
    """Return `value` as plain JSON types, arrays as lists; NaN and infinities, which JSON lacks, become None.

    Raises:
        TypeError: an object without a JSON form.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write `data` to `path` atomically."""
    target = Path(path)
    text = json.dumps(json_safe(data), indent=2, allow_nan=False) + "\n"
    replace_file(target, text)


def replace_file(target: Path, text: str) -> None:
    """Replace the file `target` by `text` atomically."""
    with draft_of(target) as draft, draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """Yield a path beside `target`, with the same suffix; the file written there replaces `target` at the end."""
    draft = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield draft
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def median_p90(samples: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 90th percentile (linear between samples), both None without samples."""
    if not len(samples):
        return {"median": None, "p90": None}
    median, p90 = np.percentile(samples, [50, 90])
    return {"median": float(median), "p90": float(p90)}
