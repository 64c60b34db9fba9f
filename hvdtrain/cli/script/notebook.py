"""Code cells of Jupyter notebooks, and where the file keeps them."""

import ast
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import ConfigError

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_PYTHON_CELL_MAGICS = {"time", "timeit", "capture", "prun", "px", "snapshot"}
"""Cell magics whose cell is Python code."""
_LINE_MAGIC = re.compile(r"\s*(?:%%?[A-Za-z]|!|\?|[\w.]+\?\??\s*$)")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w.,\[\] ]+?=\s*)[%!](?!=)")


@dataclass(frozen=True)
class Fragment:
    """A string of the file that holds code of a cell: the place of its literal, quotes included, and its value."""

    begin: int
    end: int
    value: str


def code_cells(path: Path, text: str) -> Iterator[tuple[int, str, tuple[Fragment, ...]]]:
    """Yield number, Python code and fragments of each code cell of a notebook in format 4.

    Raises:
        ConfigError: `text` is not such a notebook.
    """
    try:
        cells = json.loads(text)["cells"]
        spans = _elements(text, _members(text, 0)["cells"])
        for number, (cell, span) in enumerate(zip(cells, spans, strict=True), 1):
            if cell["cell_type"] == "code":
                fragments = tuple(_fragments(text, _members(text, span)["source"]))
                yield number, _python("".join(fragment.value for fragment in fragments)), fragments
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"--script {path} is not a Jupyter notebook of format 4: {error}.") from error


def _members(text: str, begin: int) -> dict[str, int]:
    """Return the position of each member's value of the JSON object at `begin`."""
    members = {}
    at = _skip(text, _skip(text, begin) + 1)
    while text[at] == '"':
        name, at = _DECODER.raw_decode(text, at)
        members[name] = at = _skip(text, _skip(text, at) + 1)
        at = _after_comma(text, _end(text, at))
    return members


def _elements(text: str, begin: int) -> list[int]:
    """Return the position of each element of the JSON array at `begin`."""
    elements = []
    at = _skip(text, begin + 1)
    while text[at] != "]":
        elements.append(at)
        at = _after_comma(text, _end(text, at))
    return elements


def _fragments(text: str, begin: int) -> Iterator[Fragment]:
    """Yield the strings of a cell's source: one, or a list of them."""
    for at in _elements(text, begin) if text[begin] == "[" else [begin]:
        value, end = _DECODER.raw_decode(text, at)
        yield Fragment(at, end, value)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _end(text: str, begin: int) -> int:
    end: int = _DECODER.raw_decode(text, begin)[1]
    return end


def _after_comma(text: str, at: int) -> int:
    at = _skip(text, at)
    return _skip(text, at + 1) if text[at] == "," else at


def _python(code: str) -> str:
    """Blank out magics and shell commands, line by line, so that positions stay the same."""
    if _is_python(code):
        return code
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "").strip()
    if first.startswith("%%") and not _is_python_cell(first):
        return "\n".join("" for _ in lines)
    blanked: list[str] = []
    is_continued = False
    for line in lines:
        is_magic = is_continued or bool(_LINE_MAGIC.match(line))
        blanked.append("" if is_continued else _blank(line) if is_magic else _without_assigned_magic(line))
        is_continued = is_magic and line.rstrip().endswith("\\")
    return "\n".join(blanked)


def _is_python(code: str) -> bool:
    """Whether code needs no blanking: a line that starts with `%` may continue an expression."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _is_python_cell(magic: str) -> bool:
    """Whether a cell under a cell magic is Python: run as it is, or written into a Python file."""
    words = magic[2:].split()
    name = words[0] if words else ""
    return name in _PYTHON_CELL_MAGICS or (name in ("writefile", "file") and words[-1].endswith(".py"))


def _blank(line: str) -> str:
    """Return a statement without effect at the line's indentation; a magic may be all of a block."""
    indentation = line[: len(line) - len(line.lstrip())]
    return f"{indentation}pass"


def _without_assigned_magic(line: str) -> str:
    match = _ASSIGNED_MAGIC.match(line)
    return f"{match[1]}None" if match else line


def edited_literal(fragment: Fragment, literal: str, value: str) -> str:
    """Return the JSON literal of a fragment's new value, with non-ASCII characters escaped as in the old one."""
    is_escaped = literal.isascii() and not fragment.value.isascii()
    return json.dumps(value, ensure_ascii=is_escaped)
