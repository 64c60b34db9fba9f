"""The source text of a script: its bytes, encoding and Python code, with the places of its lines."""

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hvdtrain.cli.script.finding import Replacement
from hvdtrain.cli.script.notebook import Fragment, code_cells
from hvdtrain.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A piece of code that is parsed by itself: a cell of a notebook, or the whole script."""

    number: int
    """From 1 among all cells of the notebook, as it is shown; 0 for a script."""
    code: str
    """Python code; magics of a notebook are blanked out."""
    start: int
    """Lines of code before it."""
    fragments: tuple[Fragment, ...] = ()
    """Where a notebook keeps the code."""

    @property
    def text(self) -> str:
        """The code as the file has it, with magics."""
        return "".join(fragment.value for fragment in self.fragments) if self.number else self.code


@dataclass(frozen=True)
class Source:
    """A script or notebook. Lines count from 1, through all cells."""

    path: Path
    raw: bytes
    encoding: str
    cells: tuple[Cell, ...]

    @cached_property
    def text(self) -> str:
        """The decoded file."""
        return self.raw.decode(self.encoding)

    def place(self, line: int) -> str:
        """Format a line's place: `train.py:12`, `train.ipynb:cell 3:2`."""
        cell = self.cell_at(line)
        where = f"cell {cell.number}:" if cell.number else ""
        return f"{self.path}:{where}{line - cell.start}"

    def cell_at(self, line: int) -> Cell:
        """Return the cell of a line."""
        return max((cell for cell in self.cells if cell.start < line), key=lambda cell: cell.start)

    def offsets(self, cell: Cell, replacement: Replacement) -> tuple[int, int]:
        """Return begin and end of a replacement, in characters of the cell."""
        return (
            _offset(cell.text, replacement.line - cell.start, replacement.begin),
            _offset(cell.text, replacement.end_line - cell.start, replacement.end),
        )

    def text_between(self, replacement: Replacement) -> str:
        """Return the code that would be replaced."""
        cell = self.cell_at(replacement.line)
        begin, end = self.offsets(cell, replacement)
        return cell.text[begin:end]


def _offset(code: str, line: int, column: int) -> int:
    """Return the offset in characters of a line (from 1) and column in UTF-8 bytes."""
    lines = lines_of_code(code)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def lines_of_code(code: str) -> list[str]:
    """Split code at Python's ends of lines; `str.splitlines` knows more of them."""
    lines = io.StringIO(code, newline="").readlines()
    return lines or [""]


def read_source(path: Path) -> Source:
    """Read a script or a notebook (`.ipynb`).

    Raises:
        ConfigError: it cannot be read, decoded or is not a notebook.
    """
    try:
        raw = path.read_bytes()
        is_notebook = path.suffix == ".ipynb"
        encoding = _encoding_of_json(raw) if is_notebook else tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        text = raw.decode(encoding)
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--script {path} cannot be decoded: {error}. Save it as UTF-8.") from error
    return Source(
        path, raw, encoding, tuple(_cells(path, text)) if is_notebook else (Cell(number=0, code=text, start=0),)
    )


def _encoding_of_json(raw: bytes) -> str:
    return "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8"


def _cells(path: Path, text: str) -> Iterator[Cell]:
    start = 0
    for number, code, fragments in code_cells(path, text):
        yield Cell(number=number, code=code, start=start, fragments=fragments)
        start += len(lines_of_code(code))


def parse(source: Source) -> tuple[ast.Module, list[str]]:
    """Parse all cells; return one tree and an error for each cell that is not Python 3."""
    body: list[ast.stmt] = []
    errors = []
    for cell in source.cells:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the user's strings: not of interest here
                tree = ast.parse(cell.code)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            errors.append(f"{_reason(source, cell, error)}.")
            continue
        ast.increment_lineno(tree, cell.start)
        body += tree.body
    return ast.Module(body, []), errors


def _reason(source: Source, cell: Cell, error: BaseException) -> str:
    """Format an error of the parser with its place."""
    line = error.lineno if isinstance(error, SyntaxError) and error.lineno else 1
    said = error.msg.rstrip(".") if isinstance(error, SyntaxError) else f"{error}" or "it is nested too deeply"
    return f"{source.place(cell.start + line)}: not Python 3: {said}"
