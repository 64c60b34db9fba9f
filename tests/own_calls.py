"""Calls of hvdtrain's own functions and classes in its sources, with the parameters that their arguments go to."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "hvdtrain"


@dataclass(frozen=True)
class OwnCall:
    """A call whose function is known."""

    file: Path
    node: ast.Call
    parameters: tuple[str, ...]
    """Those that may be given by position."""
    is_class: bool
    """Whether an object is made."""

    @property
    def positional(self) -> int:
        """Number of arguments by position."""
        return len(self.node.args)

    @property
    def starred(self) -> bool:
        """Whether some come from a sequence."""
        return any(isinstance(each, ast.Starred) for each in self.node.args)

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno}: {ast.unparse(self.node.func)}"


@dataclass(frozen=True)
class Module:
    """A source file: what it defines at its top, and what its names mean that it imports from the package."""

    file: Path
    tree: ast.Module
    defined: Mapping[str, ast.FunctionDef | ast.ClassDef]
    imported: Mapping[str, tuple[str, str]]
    """By name, the module and the name in it."""


class Sources:
    """The modules below some folders, by their dotted names."""

    def __init__(self, root: Path, folders: Sequence[str]) -> None:
        files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
        self._modules = {_dotted(file.relative_to(root)): _module(file) for file in files}

    def calls(self) -> Iterator[OwnCall]:
        """Yield every call of a function or class of the package whose definition can be found."""
        for module in self._modules.values():
            for node, around in _calls(module.tree, None):
                found = self._called(module, node.func, around)
                if found is not None:
                    parameters = self._parameters(*found, method=isinstance(node.func, ast.Attribute))
                    if parameters is not None:
                        yield OwnCall(module.file, node, parameters, isinstance(found[1], ast.ClassDef))

    def _called(
        self, module: Module, function: ast.expr, around: ast.ClassDef | None
    ) -> tuple[Module, ast.FunctionDef | ast.ClassDef] | None:
        if isinstance(function, ast.Name):
            return self._named(module, function.id)
        if around is None or not isinstance(function, ast.Attribute):
            return None
        if isinstance(function.value, ast.Name) and function.value.id == "self":
            return self._method(module, around, function.attr)
        return None

    def _named(self, module: Module, name: str) -> tuple[Module, ast.FunctionDef | ast.ClassDef] | None:
        if name in module.defined:
            return module, module.defined[name]
        if name in module.imported:
            there, original = module.imported[name]
            if there in self._modules:
                return self._named(self._modules[there], original)
        return None

    def _method(self, module: Module, kind: ast.ClassDef, name: str) -> tuple[Module, ast.FunctionDef] | None:
        for each in kind.body:
            if isinstance(each, ast.FunctionDef) and each.name == name:
                return module, each
        for base in kind.bases:
            found = self._named(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                method = self._method(found[0], found[1], name)
                if method is not None:
                    return method
        return None

    def _parameters(
        self, module: Module, definition: ast.FunctionDef | ast.ClassDef, *, method: bool
    ) -> tuple[str, ...] | None:
        """Return the names of what may be given by position; None where that is not known."""
        if isinstance(definition, ast.FunctionDef):
            if any(ast.unparse(each) == "staticmethod" for each in definition.decorator_list):
                method = False
            elif definition.decorator_list and not method:
                return None
            names = [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]
            if definition.args.vararg is not None or definition.args.posonlyargs:
                return None
            return tuple(names[1:] if method else names)
        init = self._method(module, definition, "__init__")
        if init is not None:
            return self._parameters(*init, method=True)
        if not _has_fields(definition):
            return None
        inherited: tuple[str, ...] = ()
        for base in definition.bases:
            found = self._named(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited += self._parameters(*found, method=False) or ()
        own = []
        for each in definition.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                if ast.unparse(each.annotation) in ("KW_ONLY", "dataclasses.KW_ONLY"):
                    break
                if not ast.unparse(each.annotation).startswith("ClassVar"):
                    own.append(each.target.id)
        return (*inherited, *(name for name in own if name not in inherited))


def _has_fields(kind: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass or a named tuple."""
    decorators = [ast.unparse(each).partition("(")[0] for each in kind.decorator_list]
    named = any(ast.unparse(base) in ("NamedTuple", "typing.NamedTuple") for base in kind.bases)
    return named or any(each in ("dataclass", "section") for each in decorators)


def _calls(node: ast.AST, around: ast.ClassDef | None) -> Iterator[tuple[ast.Call, ast.ClassDef | None]]:
    if isinstance(node, ast.Call):
        yield node, around
    if isinstance(node, ast.ClassDef):
        around = node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, around)


def _module(file: Path) -> Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    defined = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    imported = {
        each.asname or each.name: (node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{PACKAGE}.")
        for each in node.names
    }
    return Module(file, tree, defined, imported)


def _dotted(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
