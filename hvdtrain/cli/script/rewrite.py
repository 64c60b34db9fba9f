"""Rewriting the imports of scripts: byte for byte the same otherwise, and all files or none."""

import contextlib
import difflib
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.cli.script.finding import Replacement
from hvdtrain.cli.script.notebook import Fragment, edited_literal
from hvdtrain.cli.script.source import Cell, Source
from hvdtrain.config.errors import ConfigError

_WRITABLE = 0o222
Edit = tuple[int, int, str]
"""Begin and end in characters, and the new text."""


@dataclass(frozen=True)
class Change:
    """A file before and after."""

    source: Source
    after: bytes

    def difference(self) -> str:
        """Return the change as a unified diff."""
        old, new = (raw.decode(self.source.encoding).splitlines(keepends=True) for raw in (self.source.raw, self.after))
        lines = difflib.unified_diff(old, new, str(self.source.path), str(self.source.path))
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def changes_of(replaced: Iterable[tuple[Source, Sequence[Replacement]]]) -> list[Change]:
    """Apply replacements, which must not overlap, to sources; unchanged ones are left out.

    Raises:
        ConfigError: a file cannot be rewritten safely.
    """
    changes = [Change(source, rewritten(source, replacements)) for source, replacements in replaced if replacements]
    for change in changes:
        _check(change.source)
    return changes


def rewritten(source: Source, replacements: Sequence[Replacement]) -> bytes:
    """Return the bytes of a file after `replacements`."""
    edits: dict[Cell, list[Edit]] = {}
    for each in replacements:
        cell = source.cell_at(each.line)
        edits.setdefault(cell, []).append((*source.offsets(cell, each), each.text))
    whole = [
        edit for cell, inner in edits.items() for edit in (_in_notebook(source, cell, inner) if cell.number else inner)
    ]
    return _applied(source.text, whole).encode(source.encoding)


def _applied(text: str, edits: Iterable[Edit]) -> str:
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _in_notebook(source: Source, cell: Cell, edits: Sequence[Edit]) -> list[Edit]:
    """Return the edits of the file's text for edits of a cell: whole literals of JSON, where something changes."""
    result = []
    start = 0
    for fragment in cell.fragments:
        inner = [_clipped(edit, start, fragment) for edit in edits]
        value = _applied(fragment.value, [edit for edit in inner if edit])
        if value != fragment.value:
            literal = source.text[fragment.begin : fragment.end]
            result.append((fragment.begin, fragment.end, edited_literal(fragment, literal, value)))
        start += len(fragment.value)
    return result


def _clipped(edit: Edit, start: int, fragment: Fragment) -> Edit | None:
    """Return the part of an edit that falls into a fragment; the new text goes where the edit begins."""
    begin, end, new = edit[0] - start, edit[1] - start, edit[2]
    if end <= 0 or begin >= len(fragment.value):
        return None
    return max(begin, 0), min(end, len(fragment.value)), new if begin >= 0 else ""


def _check(source: Source) -> None:
    """Refuse files that cannot be replaced by others that differ in the imports only."""
    path = source.path
    if source.text.encode(source.encoding) != source.raw:
        raise ConfigError(f"--write cannot keep the bytes of {path}, in {source.encoding}. Save it as UTF-8.")
    if not path.stat().st_mode & _WRITABLE or not os.access(path, os.W_OK):
        raise ConfigError(f"--write: {path} is read-only. Nothing was written.")
    if path.read_bytes() != source.raw:
        raise ConfigError(f"--write: {path} has changed while it was read. Nothing was written.")


def write(changes: Sequence[Change]) -> None:
    """Replace all files: every new one is written aside before the first takes its place.

    Mode and links stay as they are.

    Raises:
        ConfigError: a file cannot be written; then none is changed.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for change in changes:
            target = change.source.path.resolve()
            written.append((_written_aside(target, change.after), target))
        for aside, target in written:
            os.replace(aside, target)
    except OSError as error:
        raise ConfigError(f"--write: {error.filename}: {error.strerror}. Nothing was written.") from error
    finally:
        for aside, _ in written:
            aside.unlink(missing_ok=True)


def _written_aside(target: Path, content: bytes) -> Path:
    """Write a file beside `target`, with its mode and owner."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        status = target.stat()
        with contextlib.suppress(PermissionError):
            os.chown(aside, status.st_uid, status.st_gid)
        shutil.copymode(target, aside)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside
