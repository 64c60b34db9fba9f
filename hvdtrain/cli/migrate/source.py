"""Scripts and notebooks as files: which there are, their Python code, and rewriting them byte for byte."""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from hvdtrain.config.errors import ConfigError

_NOT_THE_USERS = re.compile(r"\..*|.*\.egg-info|__pycache__|node_modules|site-packages")
_CELL = "#hvdtrain:cell "
"""Line before each code cell of a notebook."""
_MAGIC = "#hvdtrain:magic "
"""Comment in which a magic is kept."""
_LINE_MAGIC = re.compile(r"(\s*)((?:%%?[A-Za-z]|!|\?|[\w.]+\?\??\s*$).*)")
_ASSIGNED_MAGIC = re.compile(r"(\s*[\w.,\[\] ]+?=\s*)([%!](?!=).*)")
_PYTHON_CELL = re.compile(
    r"\s*(?!%%)|\s*%%(?:(?:time|timeit|capture|prun|px|snapshot)\b|(?:writefile|file)\b.*\.py\s*$)"
)


def scripts_under(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and the scripts below the folders among them, each once, sorted.

    Raises:
        ConfigError: a path does not exist, or a folder has no script.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--script {path}: No such file or directory.")
        scripts = list(_walk(path)) if path.is_dir() else [path]
        if not scripts:
            raise ConfigError(f"--script {path}: the folder has no Python script (.py) and no notebook (.ipynb).")
        found = {script.resolve(): script for script in scripts} | found
    return sorted(found.values())


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not _NOT_THE_USERS.fullmatch(name)
            and not any(Path(where, name, mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))
        ]
        yield from (Path(where, name) for name in files if name.endswith((".py", ".ipynb")) and name[0] != ".")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A script or notebook. Lines count from 1, through all cells."""

    path: Path
    raw: bytes
    encoding: str
    code: str
    """Python code: of a notebook all code cells, each after a line with its number, and magics in comments."""
    errors: list[str]
    """Files or cells that are not Python 3; they are left out of `code`."""

    def place(self, line: int) -> str:
        """Format a line's place: `train.py:12`, `train.ipynb:cell 3:2`."""
        lines = enumerate(self.code.split("\n")[:line], 1)
        start, cell = ([(0, "")] + [(at, f"cell {text[15:]}:") for at, text in lines if text.startswith(_CELL)])[-1]
        return f"{self.path}:{cell}{line - start}"

    def rewritten(self, code: str) -> bytes:
        """Return the bytes of the file with other code.

        Raises:
            ConfigError: the file cannot be replaced by one that differs in its code only.
        """
        text = self.raw.decode(self.encoding)
        if text.encode(self.encoding) != self.raw:
            raise ConfigError(f"--write cannot keep the bytes of {self.path}, in {self.encoding}. Save it as UTF-8.")
        if not self.path.stat().st_mode & 0o222 or not os.access(self.path, os.W_OK):
            raise ConfigError(f"--write: {self.path} is read-only. Nothing was written.")
        if self.path.read_bytes() != self.raw:
            raise ConfigError(f"--write: {self.path} has changed while it was read. Nothing was written.")
        return (_with_cells(text, code) if self.path.suffix == ".ipynb" else code).encode(self.encoding)


def read_source(path: Path) -> Source:
    """Read a script or a notebook (`.ipynb`).

    Raises:
        ConfigError: it cannot be read, decoded or is not a notebook.
    """
    try:
        raw = path.read_bytes()
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        text = raw.decode(encoding)
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--script {path} cannot be decoded: {error}. Save it as UTF-8.") from error
    if path.suffix != ".ipynb":
        errors = _error_of(text, f"{path}")
        return Source(path=path, raw=raw, encoding=encoding, code="" if errors else text, errors=errors)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without an id, which older versions of Jupyter wrote
            notebook = nbformat.reads(text, as_version=nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
        cells = [(n, each.source) for n, each in enumerate(notebook.cells, 1) if each.cell_type == "code"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, nbformat.ValidationError) as error:
        raise ConfigError(f"--script {path} is not a Jupyter notebook of format 4: {error}.") from error
    code, errors = "", []
    for number, cell in cells:
        python = _without_magics(cell)
        found = _error_of(python, f"{path}:cell {number}")
        errors += found
        code += f"{_CELL}{number}\n{_commented(python) if found else python}\n"
    return Source(path=path, raw=raw, encoding=encoding, code=code, errors=errors)


def _error_of(code: str, place: str) -> list[str]:
    """Return the error of code that is not Python 3."""
    try:
        parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) and error.lineno else 1
        reason = error.msg.rstrip(".") if isinstance(error, SyntaxError) else f"{error}" or "it is nested too deeply"
        return [f"{place}:{line}: not Python 3: {reason}."]
    return []


def parse(code: str) -> ast.Module:
    """Parse code without warnings about the user's strings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _with_cells(text: str, code: str) -> str:
    """Return a notebook with other code in its cells, in its own layout of JSON if that is a common one."""
    notebook, end = json.loads(text), text[len(text.rstrip("\n")) :]
    layouts = [(indent, is_ascii) for indent in (1, 2, 4, None) for is_ascii in (False, True)]
    dumped = ((json.dumps(notebook, indent=each[0], ensure_ascii=each[1]), each) for each in layouts)
    indent, is_ascii = next((layout for each, layout in dumped if each + end == text), layouts[0])
    _, *cells = re.split(rf"^{_CELL}(\d+)\n", code, flags=re.MULTILINE)
    for number, cell in zip(cells[::2], cells[1::2], strict=True):
        source = re.sub(f"(?:pass|None)?{_MAGIC}", "", cell.removesuffix("\n"))
        before = notebook["cells"][int(number) - 1]
        if "".join(before["source"]) != source:
            before["source"] = source.splitlines(keepends=True) if isinstance(before["source"], list) else source
    return json.dumps(notebook, indent=indent, ensure_ascii=is_ascii) + end


def _without_magics(code: str) -> str:
    """Keep magics and shell commands in comments, line by line."""
    if not _error_of(code, ""):  # a line that starts with % may continue an expression
        return code
    if not _PYTHON_CELL.match(code.strip().split("\n")[0]):
        return _commented(code)
    lines, is_continued = code.split("\n"), False
    for index, line in enumerate(lines):
        if found := _LINE_MAGIC.match(line):  # a statement without effect: a magic may be all of a block
            lines[index] = f"{found[1]}pass{_MAGIC}{found[2]}"
        else:
            lines[index] = f"{_MAGIC}{line}" if is_continued else _ASSIGNED_MAGIC.sub(rf"\1None{_MAGIC}\2", line)
        is_continued = (is_continued or found is not None) and line.rstrip().endswith("\\")
    return "\n".join(lines)


def _commented(code: str) -> str:
    return "\n".join(f"{_MAGIC}{line}" for line in code.split("\n"))


def write(changed: Sequence[tuple[Path, bytes]]) -> None:
    """Replace all files or none; mode, owner and links stay.

    Raises:
        ConfigError: a file cannot be written; then none is changed.
    """
    drafts: list[tuple[Path, Path]] = []
    try:
        for path, content in changed:
            target = path.resolve()
            handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            drafts.append((Path(draft), target))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            with contextlib.suppress(PermissionError):
                os.chown(draft, target.stat().st_uid, target.stat().st_gid)
            shutil.copymode(target, draft)
        for each, target in drafts:
            os.replace(each, target)
    except OSError as error:
        raise ConfigError(f"--write: {error.filename}: {error.strerror}. Nothing was written.") from error
    finally:
        for each, _ in drafts:
            each.unlink(missing_ok=True)
