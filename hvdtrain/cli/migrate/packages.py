"""Names that installed packages offer, read from their sources: importing TensorFlow would take seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Found = tuple[Literal["exists", "missing", "unknown"], str, str]
"""A status, the module where a name is defined, and its name there; empty for the module itself."""

FACE = "hvdtrain.horovod"
_BOTH = ("", ".callbacks", ".elastic")
_OF_TENSORFLOW = (
    *("", ".compression", ".elastic", ".functions", ".gradient_aggregation", ".gradient_aggregation_eager"),
    *(".mpi_ops", ".sync_batch_norm", ".util"),
)
COUNTERPARTS = {
    **{f"horovod.tensorflow{below}": f"{FACE}{below}" for below in _OF_TENSORFLOW},
    **{f"horovod.tensorflow.keras{below}": f"{FACE}.keras{below}" for below in _BOTH},
    **{f"horovod.keras{below}": f"{FACE}.keras{below}" for below in _BOTH},
}
"""Our module for each module of Horovod 0.28.1 for TensorFlow and Keras, but for `COMPUTE_SERVICE`."""
COMPUTE_SERVICE = "horovod.tensorflow.data"
FACES = {ours: theirs for theirs, ours in reversed(COUNTERPARTS.items())}


@cache
def find(name: str) -> Found:
    """Follow a dotted name through the sources and their imports.

    A name is "unknown" where its package is not installed or makes names as it runs. Members of classes are not read.
    """
    module, *parts = name.split(".")
    if not file_of(module):
        return "unknown", "", ""
    for part in parts:
        members = members_of(module)
        definition = members.get(part)
        if isinstance(definition, ast.Import | ast.ImportFrom):
            module, member = _imported(definition, part, module)
            if not file_of(module):
                return "unknown", "", ""
            if member:
                return "exists", module, member
        elif definition is not None:
            return "exists", module, part
        elif file_of(f"{module}.{part}"):
            module = f"{module}.{part}"
        elif not part.startswith("__"):
            return ("unknown" if "*" in members or "__getattr__" in members else "missing"), "", ""
    return "exists", module, ""


def is_missing(name: str) -> bool:
    """Return whether an installed package lacks a name for certain."""
    return find(name)[0] == "missing"


def face_has(module: str, name: str) -> bool:
    """Return whether a module of `FACES` has a name; one that it makes as it runs has those of Horovod's module."""
    if f"{FACES[module]}.{name}" == COMPUTE_SERVICE:
        return False
    status = find(f"{module}.{name}")[0]
    return not is_missing(f"{FACES[module]}.{name}") if status == "unknown" else status == "exists"


def split_module(name: str) -> tuple[str, list[str]]:
    """Split a dotted name into the module of Horovod or its counterpart and the rest; other names have no module."""
    if f"{name}.".startswith(f"{FACE}.tensorflow."):  # the same modules by Horovod's names
        name = FACE + name.removeprefix(f"{FACE}.tensorflow")
    parts = name.split(".")
    modules = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    module = next((each for each in modules if each in COUNTERPARTS or each in FACES), "")
    return module, parts[module.count(".") + 1 if module else 0 :]


def parameters_of(name: str) -> ast.arguments | None:
    """Return the parameters of a function, or of a class's own `__init__`; None if its sources do not show them."""
    _, module, member = find(name)
    definition = members_of(module).get(member) if member else None
    while isinstance(definition, ast.Import | ast.ImportFrom):
        before = module, member
        module, member = _imported(definition, member, module)
        definition = members_of(module).get(member) if file_of(module) and (module, member) != before else None
    if isinstance(definition, ast.ClassDef):
        definition = next((each for each in definition.body if getattr(each, "name", "") == "__init__"), None)
    return definition.args if isinstance(definition, ast.FunctionDef) else None


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module; None if it is not installed."""
    package, _, name = module.rpartition(".")
    if package:
        file = file_of(package)
        if file is None or file.name != "__init__.py":
            return None
        candidates = (file.parent / name / "__init__.py", file.parent / f"{name}.py")
        return next((each for each in candidates if each.is_file()), None)
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@cache
def members_of(module: str) -> dict[str, ast.stmt]:
    """Return the last statement that binds each top-level name of a module; "*" stands for a star import."""
    file = file_of(module)
    members: dict[str, ast.stmt] = {}
    pending = list(reversed(ast.parse(file.read_bytes()).body)) if file else []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            members[node.name] = node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            members |= {alias.asname or alias.name.split(".")[0]: node for alias in node.names}
            package = _package(node, module) if isinstance(node, ast.ImportFrom) else ""
            if node.names[0].name == "*" and package.startswith(FACE):
                members |= {name: each for name, each in members_of(package).items() if not name.startswith("_")}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each for target in targets for each in ast.walk(target))
            members |= {each.id: node for each in names if isinstance(each, ast.Name)}
        for block in ("finalbody", "handlers", "orelse", "body"):
            pending += reversed(getattr(node, block, []))
    return members


def _imported(node: ast.Import | ast.ImportFrom, name: str, module: str) -> tuple[str, str]:
    """Return the module that an import in `module` binds `name` to, and the member of it, if it is one."""
    alias = next(each for each in node.names if name in (each.asname, each.name, each.name.split(".")[0]))
    if isinstance(node, ast.Import):
        return (alias.name if alias.asname else name), ""
    package = _package(node, module)
    binding = members_of(package).get(alias.name)
    is_module = binding is None or (isinstance(binding, ast.ImportFrom) and _package(binding, package) == package)
    if is_module and file_of(f"{package}.{alias.name}"):
        return f"{package}.{alias.name}", ""
    return package, alias.name


def _package(node: ast.ImportFrom, module: str) -> str:
    """Return the absolute name of the module from which an import in `module` takes names."""
    file = file_of(module)
    above = node.level - (file is not None and file.name == "__init__.py")
    parts = module.split(".")[: len(module.split(".")) - above] if node.level else []
    return ".".join([*parts, *([node.module] if node.module else [])])
