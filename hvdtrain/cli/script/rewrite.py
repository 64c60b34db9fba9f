"""Rewriting the imports of a script."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from hvdtrain.cli.script.imports import Replacement


def rewritten(source: bytes, replacements: Iterable[Replacement]) -> bytes:
    """Apply replacements, which must not overlap, to `source`."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for each in sorted(replacements, key=lambda r: (r.line, r.begin), reverse=True):
        begin, end = starts[each.line - 1] + each.begin, starts[each.end_line - 1] + each.end
        source = source[:begin] + each.text.encode() + source[end:]
    return source


def difference(path: Path, before: bytes, after: bytes) -> str:
    """Return the changes as a unified diff."""
    old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
    return "".join(difflib.unified_diff(old, new, str(path), str(path)))
