"""Scripts read together as one program, and the dotted names that their expressions stand for."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeGuard

import libcst as cst
from libcst.metadata import (
    Assignment,
    ExpressionContextProvider,
    ImportAssignment,
    MetadataWrapper,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from hvdtrain.cli.migrate.packages import COUNTERPARTS, members_of
from hvdtrain.cli.migrate.source import Source, parse, read_source
from hvdtrain.config.errors import ConfigError

Chain = cst.Name | cst.Attribute
"""A dotted expression, such as `hvd.callbacks.MetricAverageCallback`, or a single name."""
Targets = frozenset[str]
"""Dotted names; a module of the user's own goes by the path of its file."""
UNKNOWN: Targets = frozenset()
_LIBRARIES = {"horovod", "hvdtrain", "tensorflow", "keras", "tf_keras"}
_IMPORTERS = {"importlib.import_module", "pytest.importorskip"}


def _cached(unknown: Any) -> Callable[..., Any]:
    """Cache a method of `Script` by its arguments; for names that stand for one another it returns `unknown`."""

    def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def cached(script: "Script", *arguments: object) -> Any:
            key = method, *arguments
            if key not in script.known:
                script.known[key] = unknown
                script.known[key] = method(script, *arguments)
            return script.known[key]

        return cached

    return decorated


class _Replacer(cst.CSTTransformer):
    def __init__(self, edits: Mapping[cst.CSTNode, Any]) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        return self._edits.get(original_node, updated_node)


class Code:
    """The concrete syntax of a script: its dotted expressions, calls, imports and assignments."""

    def __init__(self, code: str) -> None:
        # LibCST keeps a form feed at the end of a line, not at its start.
        module = cst.parse_module(re.sub(r"(\r\n|\n|\r)\f", r"\f\1", code))
        self.wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.scopes = self.wrapper.resolve(ScopeProvider)
        self.contexts = self.wrapper.resolve(ExpressionContextProvider)
        nodes: list[Any] = list(self.scopes)
        inner = {node.value for node in nodes if isinstance(node, cst.Attribute)}
        self.chains: list[Chain] = [each for each in nodes if isinstance(each, Chain) and each in self.contexts]
        self.chains = [node for node in self.chains if node not in inner]
        self.imports = [node for node in nodes if isinstance(node, cst.Import | cst.ImportFrom)]
        self.calls = {node.func: node for node in nodes if isinstance(node, cst.Call)}
        self.decorators = {node.decorator for node in nodes if isinstance(node, cst.Decorator)}
        self.values: dict[object, cst.BaseExpression] = {}
        self.of_self: dict[str, list[cst.BaseExpression]] = defaultdict(list)
        self.returned: dict[object, list[cst.BaseExpression]] = defaultdict(list)
        for node in nodes:
            if isinstance(node, cst.Return) and node.value:
                self.returned[getattr(self.scopes[node], "node", None)].append(node.value)
            elif isinstance(node, cst.Assign | cst.AnnAssign | cst.NamedExpr) and node.value:
                for target in node.targets if isinstance(node, cst.Assign) else [node]:
                    self._assign(target.target, node.value)

    def imported_names(self) -> Iterator[tuple[cst.Import | cst.ImportFrom, str, str]]:
        """Yield each absolute import with its module and member, which is empty for `import module`."""
        for node in self.imports:
            if isinstance(node, cst.Import):
                yield from ((node, alias.evaluated_name, "") for alias in node.names)
            elif node.module and not node.relative:
                module, star = text_of(node.module), isinstance(node.names, cst.ImportStar)
                yield from ((node, module, each) for each in (["*"] if star else members_imported(node)))

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        if isinstance(target, cst.Name):
            self.values[target] = value
        elif is_of_self(target):
            self.of_self[target.attr.value].append(value)
        elif isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Tuple | cst.List):
            is_pairwise = len(target.elements) == len(value.elements)
            for each, its in zip(target.elements, value.elements, strict=True) if is_pairwise else ():
                self._assign(each.value, its.value)

    def rewritten(self, edits: Mapping[cst.CSTNode, Any]) -> str:
        """Return the code with other nodes in the place of some."""
        module = self.wrapper.module.visit(_Replacer(edits)) if edits else self.wrapper.module
        return re.sub(r"\f(\r\n|\n|\r)", r"\1\f", module.code)


class Script:
    """A script or notebook of a program; the user named it, or a script imports it."""

    def __init__(self, scripts: Mapping[Path, "Script"], roots: Sequence[Path], source: Source, is_given: bool) -> None:
        self.source = source
        self.is_given = is_given
        self.path = source.path.resolve()
        self.nodes = list(ast.walk(parse(source.code)))
        self.known: dict[object, object] = {}
        self._scripts = scripts
        roots = [root.resolve() for root in roots if root.resolve() in self.path.parents]
        self._folders = [self.path.parent, *(p for p in self.path.parents if any(map(p.is_relative_to, roots)))]

    @cached_property
    def code(self) -> Code:
        """The concrete syntax, which takes ten times as long to read as the abstract one."""
        try:
            return Code(self.source.code)
        except cst.ParserSyntaxError as error:
            self.source.errors.append(f"{self.source.place(error.raw_line)}: LibCST cannot read it: {error.message}.")
            return Code("")

    @cached_property
    def imported(self) -> set[Path]:
        """The files of the user's own that it imports."""
        found: set[Path | None] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {self.find(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = f"{node.module}." if node.module else ""
                names = (node.module or "", *(f"{inner}{alias.name}" for alias in node.names))
                found |= {self.find(name, node.level) for name in names}
        return {each for each in found if each is not None and each != self.path}

    def find(self, module: str, level: int = 0) -> Path | None:
        """Return the file of a module of the user's own, as this script names it."""
        if not module or module.split(".")[0] in _LIBRARIES:
            return None
        folders = [self.path.parents[level - 1]] if level else self._folders
        return next((found for folder in folders if (found := _file_in(folder, module))), None)

    def line(self, node: cst.CSTNode) -> int:
        """Return the line on which a node begins."""
        return self.code.wrapper.resolve(PositionProvider)[node].start.line

    @_cached(UNKNOWN)
    def targets(self, node: cst.BaseExpression) -> Targets:
        """Return the dotted names that an expression may stand for."""
        if isinstance(node, cst.Name):
            return self._of_name(self.code.scopes.get(node), node.value)
        if isinstance(node, cst.Attribute):
            values = self.code.of_self[node.attr.value] if is_of_self(node) else []
            members = (self._member(base, node.attr.value) for base in self.targets(node.value))
            return UNKNOWN.union(*map(self.targets, values), *members)
        if isinstance(node, cst.IfExp):
            return self.targets(node.body) | self.targets(node.orelse)
        if isinstance(node, cst.BooleanOperation):
            return self.targets(node.left) | self.targets(node.right)
        if isinstance(node, cst.Call) and node.args and self.is_importer(node):
            name = node.args[0].value
            module = str(name.evaluated_value) if isinstance(name, cst.SimpleString) else ""
            is_top = name_of(node.func) == "__import__" and not has_fromlist(node)
            return frozenset({module.split(".")[0] if is_top else module}) if module else UNKNOWN
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):  # a function that returns a module
            functions = (each.node for each in self._assignments(self.code.scopes.get(node.func), node.func.value))
            return UNKNOWN.union(*(self.targets(value) for each in functions for value in self.code.returned[each]))
        return UNKNOWN

    def is_importer(self, call: cst.Call) -> bool:
        """Return whether a call imports the module that its argument names."""
        return name_of(call.func) == "__import__" or not self.targets(call.func).isdisjoint(_IMPORTERS)

    @_cached(UNKNOWN)
    def made_by(self, node: cst.BaseExpression) -> Targets:
        """Return the functions and classes whose result an expression may be."""
        if isinstance(node, cst.Call):
            return self.targets(node.func)
        return UNKNOWN.union(*map(self.made_by, self.values(node)))

    def values(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return the expressions that a name or an attribute of `self` is assigned."""
        if isinstance(node, cst.Name):
            assignments = self._assignments(self.code.scopes.get(node), node.value)
            return [value for each in assignments if (value := self.code.values.get(each.node))]
        return self.code.of_self[node.attr.value] if is_of_self(node) else []

    @_cached("")
    def constant(self, node: cst.BaseExpression) -> str:
        """Return the string of an expression, as far as its end is known; else an empty one."""
        if isinstance(node, cst.SimpleString):
            return node.evaluated_value if isinstance(node.evaluated_value, str) else ""
        if isinstance(node, cst.FormattedString):
            return getattr(node.parts[-1], "value", "") if node.parts else ""
        if isinstance(node, cst.ConcatenatedString | cst.BinaryOperation):
            is_format = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo)
            return self.constant(node.left if is_format else node.right)
        if isinstance(node, cst.Call) and name_of(node.func) == "format" and isinstance(node.func, cst.Attribute):
            return self.constant(node.func.value)
        if isinstance(node, cst.Call):
            is_path = name_of(node.func) in ("join", "joinpath", "str", "Path")
            return self.constant(node.args[-1].value) if is_path and node.args else ""
        values = self.values(node)
        return self.constant(values[0]) if len(values) == 1 else ""

    def _assignments(self, scope: Scope | None, name: str) -> list[Assignment]:
        return [each for each in scope[name] if isinstance(each, Assignment)] if scope else []

    def _of_name(self, scope: Scope | None, name: str) -> Targets:
        assignments = self._assignments(scope, name)
        return UNKNOWN.union(*map(self._bound, assignments)) if assignments else self._of_stars(name)

    @_cached(UNKNOWN)
    def _bound(self, assignment: Assignment) -> Targets:
        if not isinstance(assignment, ImportAssignment):
            value = self.code.values.get(assignment.node)
            return self.targets(value) if value else UNKNOWN
        name = next(iter(assignment.get_qualified_names_for(assignment.name))).name
        if isinstance(assignment.node, cst.Import):
            return frozenset({str(self.find(name) or name)})
        level = len(name) - len(name.lstrip("."))
        module, _, member = name[level:].rpartition(".")
        file = self.find(module, level) if module else self.path.parents[level - 1] / "__init__.py"
        return self._member(str(file), member) if file else UNKNOWN if level else frozenset({name})

    def _of_stars(self, name: str) -> Targets:
        """Return what `from module import *` may bind a name to."""
        found: Targets = UNKNOWN
        for node in self.code.imports:
            if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
                module = text_of(node.module) if node.module else ""
                if file := self.find(module, len(node.relative)):
                    found |= self._member(str(file), name)
                elif not name.startswith("_") and name in members_of(COUNTERPARTS.get(module, module)):
                    found |= {f"{module}.{name}"}
        return found

    def _member(self, base: str, name: str) -> Targets:
        """Return what `base.name` stands for: in a module of the user's a value, or a module below it."""
        if not base.endswith(".py"):
            return frozenset({f"{base}.{name}"})
        path = Path(base)
        below = _file_in(path.parent, name) if path.name == "__init__.py" else None
        script = self._scripts.get(path)
        return frozenset({str(below)}) if below else script.exported(name) if script else UNKNOWN

    @_cached(UNKNOWN)
    def exported(self, name: str) -> Targets:
        """Return what a name of the module stands for."""
        return self._of_name(self.code.scopes[self.code.wrapper.module], name)


def read_program(paths: Sequence[Path], given: Sequence[Path]) -> tuple[dict[Path, Script], dict[Path, list[str]]]:
    """Read the scripts `given`, which lie under `paths`, and the modules of the user's own that they import.

    Returns:
        The scripts by their files, and the errors of each of `given` that cannot be read.
    """
    scripts: dict[Path, Script] = {}
    errors: dict[Path, list[str]] = {}
    here, roots = Path.cwd(), [path for path in paths if path.is_dir()]
    pending = {path.resolve(): (path, True) for path in given}
    while pending:
        file = next(iter(pending))
        path, is_given = pending.pop(file)
        try:
            scripts[file] = Script(scripts, roots, read_source(path), is_given)
        except ConfigError as error:
            errors |= {path: [error.message]} if is_given else {}
            continue
        for each in scripts[file].imported - scripts.keys() - pending.keys():
            pending[each] = each.relative_to(here) if each.is_relative_to(here) else each, False
    return scripts, errors


def _file_in(folder: Path, module: str) -> Path | None:
    """Return the file of a module below a folder."""
    path = folder.joinpath(*module.split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file.resolve() for file in files if file.is_file()), None)


def name_of(node: cst.BaseExpression) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return node.attr.value if isinstance(node, cst.Attribute) else node.value if isinstance(node, cst.Name) else ""


def is_of_self(node: cst.CSTNode) -> TypeGuard[cst.Attribute]:
    """Return whether an expression is `self.NAME`."""
    return isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value in ("self", "cls")


def members_imported(node: cst.ImportFrom) -> list[str]:
    """Return the names that `from module import …` takes; none for a star."""
    return [] if isinstance(node.names, cst.ImportStar) else [each.evaluated_name for each in node.names]


def has_fromlist(call: cst.Call) -> bool:
    """Return whether a call of `__import__` gives the module itself and not its top package."""
    return len(call.args) > 3 or any(arg.keyword and arg.keyword.value == "fromlist" for arg in call.args)


def text_of(node: cst.CSTNode) -> str:
    """Return the code of an expression or a small statement on one line."""
    code = cst.Module([]).code_for_node(node)
    is_expression = isinstance(node, cst.BaseExpression)
    return ast.unparse(ast.parse(f"({code}\n)", mode="eval") if is_expression else ast.parse(code))
