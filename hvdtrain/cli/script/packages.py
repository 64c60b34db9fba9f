"""What installed packages offer, read from their sources: importing TensorFlow would take seconds."""

import ast
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Status = Literal["exists", "missing", "unknown"]


@dataclass(frozen=True)
class Place:
    """Where a dotted name leads: a module's file, and a name in it (empty for the module itself)."""

    file: Path
    name: str = ""


@dataclass(frozen=True)
class Members:
    """The top-level names of a module."""

    definitions: dict[str, ast.stmt]
    """The last statement that binds each name."""
    is_open: bool
    """Whether there may be more: `from … import *` or a `__getattr__`."""


@cache
def lookup(parts: tuple[str, ...]) -> tuple[Status, Place | None]:
    """Follow a dotted name through the sources, and imports in them.

    Returns:
        "exists" with its place; "missing"; or "unknown", where the package is not installed or makes names as it runs.
        The members of a class or function are not looked at.
    """
    file = module_file(parts[0])
    if file is None:
        return "unknown", None
    for index, part in enumerate(parts[1:], 1):
        members = members_of(file)
        definition = members.definitions.get(part)
        if isinstance(definition, (ast.ImportFrom, ast.Import)):
            place = _imported(definition, part, file)
            if place is None:
                return "unknown", None
            if place.name:
                return "exists", place
            file = place.file
        elif definition is not None:
            return "exists", Place(file, part)
        elif (below := _submodule(file, part)) is not None:
            file = below
        elif part.startswith("__") and index == len(parts) - 1:
            return "exists", Place(file)
        else:
            return ("unknown" if members.is_open else "missing"), None
    return "exists", Place(file)


@cache
def module_file(dotted: str) -> Path | None:
    """Return the file of a module; None if it is not installed. Nothing is imported."""
    top, *below = dotted.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    file: Path | None = Path(spec.origin)
    for part in below:
        file = _submodule(file, part) if file else None
    return file


@cache
def _submodule(file: Path, name: str) -> Path | None:
    """Return the file of a module below a package; a folder without `__init__.py` counts as an empty file in it."""
    if file.name != "__init__.py":
        return None
    candidates = (file.parent / name / "__init__.py", file.parent / f"{name}.py")
    return next((each for each in candidates if each.is_file()), None)


@cache
def members_of(file: Path) -> Members:
    """Return the top-level names of a module."""
    definitions: dict[str, ast.stmt] = {}
    is_open = False
    pending = list(reversed(ast.parse(file.read_bytes()).body))
    while pending:
        node = pending.pop()
        for name in _names_bound_by(node):
            definitions[name] = node
        is_open |= "*" in definitions or "__getattr__" in definitions
        for block in ("finalbody", "handlers", "orelse", "body"):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                pending += reversed(getattr(node, block, []))
    return Members(definitions, is_open)


def _names_bound_by(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def _imported(node: ast.ImportFrom | ast.Import, name: str, file: Path) -> Place | None:
    """Return where an import leads; None if outside of what can be read."""
    if isinstance(node, ast.Import):
        alias = next(each for each in node.names if name in (each.asname, each.name.split(".")[0]))
        found = module_file(alias.name if alias.asname else name)
        return Place(found) if found else None
    alias = next(each for each in node.names if name in (each.asname, each.name))
    source = module_file(node.module or "") if not node.level else _relative(file, node)
    if source is None:
        return None
    below = _submodule(source, alias.name)
    if below is not None and _is_its_own(source, alias.name):
        return Place(below)
    return Place(source, alias.name)


def _is_its_own(package: Path, name: str) -> bool:
    """Whether a package binds a name to nothing else than its submodule."""
    definition = members_of(package).definitions.get(name)
    if not isinstance(definition, ast.ImportFrom):
        return definition is None
    return (_relative(package, definition) if definition.level else module_file(definition.module or "")) == package


def _relative(file: Path, node: ast.ImportFrom) -> Path | None:
    found: Path | None = file.parents[node.level - 1] / "__init__.py"
    for part in (node.module or "").split(".") if node.module else ():
        found = _submodule(found, part) if found else None
    return found


def _through(place: Place) -> Place:
    """Follow a name that its module has imported from another."""
    definition = members_of(place.file).definitions.get(place.name)
    while isinstance(definition, (ast.ImportFrom, ast.Import)):
        following = _imported(definition, place.name, place.file)
        if following is None or following == place:
            break
        place = following
        definition = members_of(place.file).definitions.get(place.name)
    return place


def arguments_of(place: Place) -> ast.arguments | None:
    """Return the parameters of a function, or of a class's own `__init__`; None if they are not to be seen there."""
    place = _through(place)
    definition = members_of(place.file).definitions.get(place.name)
    if isinstance(definition, ast.ClassDef):
        inits = [each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return inits[0].args if inits else None
    return definition.args if isinstance(definition, ast.FunctionDef) else None
