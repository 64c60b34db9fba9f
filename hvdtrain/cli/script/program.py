"""Scripts that are read together, and what their names stand for."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hvdtrain.cli.script.names import is_in
from hvdtrain.cli.script.scopes import Binding, Chain, Scope, Scopes, Target, chains, is_of_self
from hvdtrain.cli.script.source import Source, parse, read_source
from hvdtrain.config.errors import ConfigError

_NEVER_THE_USERS = {"horovod", "hvdtrain", "tensorflow", "keras", "tf_keras"}
_IMPORTERS = (("importlib", "import_module"), ("pytest", "importorskip"))


@dataclass(eq=False)
class Script:
    """A parsed script or notebook."""

    source: Source
    tree: ast.Module
    errors: list[str]
    is_given: bool
    """Whether the user named it; others are read because scripts import them."""

    @cached_property
    def scopes(self) -> Scopes:
        """Its namespaces."""
        return Scopes(self.tree)

    @cached_property
    def chains(self) -> list[Chain]:
        """Its dotted expressions, in no order."""
        return list(chains(self.tree, self.scopes))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[str, int, str]]:
        """Module, level and member (empty for `import module`) of every import."""
        found: list[tuple[str, int, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, 0, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.module or "", node.level, alias.name) for alias in node.names]
        return found


class Program:
    """Scripts and notebooks, tied together by their imports of one another."""

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self.scripts: dict[Path, Script] = {}
        self._roots = [root.resolve() for root in roots if root.is_dir()]
        self._found: dict[tuple[Path, str], Path | None] = {}
        self._resolvers: dict[Path, Resolver] = {}
        self.active: set[object] = set()
        """What is being resolved, so that names that stand for one another do not go round for ever."""

    def read(self, path: Path, *, is_given: bool = True) -> Script:
        """Add a script.

        Raises:
            ConfigError: it cannot be read or decoded.
        """
        source = read_source(path)
        tree, errors = parse(source)
        script = self.scripts[path.resolve()] = Script(source, tree, errors, is_given)
        return script

    def follow_imports(self) -> None:
        """Add the modules of the user's own that the scripts import, and those that these import."""
        pending = list(self.scripts)
        while pending:
            path = pending.pop()
            for found in self.imported_by(path):
                if found not in self.scripts:
                    try:
                        self.read(_shown(found), is_given=False)
                    except ConfigError:
                        continue
                    pending.append(found)

    def imported_by(self, path: Path) -> list[Path]:
        """Return the files of the user's own that a script imports."""
        found = []
        for module, level, member in self.scripts[path].imports:
            inner = f"{module}.{member}" if module else member
            found += [self.find(path, module, level), self.find(path, inner, level) if member else None]
        return [each for each in found if each is not None and each != path]

    def find(self, importer: Path, module: str, level: int) -> Path | None:
        """Return the file of a module of the user's own, as `importer` names it."""
        top = module.split(".")[0]
        if not module or top in _NEVER_THE_USERS:
            return None
        if level:
            folders = [importer.parents[level - 1]]
        else:
            named = [root for root in self._roots if root in importer.parents]
            folders = [importer.parent, *(each for each in importer.parents if any(map(each.is_relative_to, named)))]
        return next((found for folder in folders if (found := self._in(folder, module))), None)

    def _in(self, folder: Path, module: str) -> Path | None:
        key = folder, module
        if key not in self._found:
            path = folder.joinpath(*module.split("."))
            files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
            self._found[key] = next((file.resolve() for file in files if file.is_file()), None)
        return self._found[key]

    def resolver(self, path: Path) -> "Resolver":
        """Return what resolves the names of a script."""
        if path not in self._resolvers:
            self._resolvers[path] = Resolver(self, path)
        return self._resolvers[path]


def _shown(path: Path) -> Path:
    """Return a path as the user would write it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


class Resolver:
    """Resolves expressions of a script to dotted names."""

    def __init__(self, program: Program, path: Path) -> None:
        self._program = program
        self._path = path
        self._scopes = program.scripts[path].scopes
        self._active = program.active
        self._known: dict[tuple[Scope, str], frozenset[Target]] = {}

    def targets(self, node: ast.expr, scope: Scope) -> frozenset[Target]:
        """Return everything that an expression may stand for; empty if that is unknown."""
        if isinstance(node, ast.Name):
            return self._name(node.id, scope)
        if isinstance(node, ast.Attribute):
            values = self._self_values(node) if is_of_self(node) else frozenset()
            bases = self.targets(node.value, scope)
            return values.union(*(self._attribute(base, node.attr) for base in bases))
        if isinstance(node, ast.IfExp):
            return self.targets(node.body, scope) | self.targets(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*(self.targets(value, scope) for value in node.values))
        if isinstance(node, ast.Call):
            module = self.imported(node, scope)
            return frozenset({tuple(module.split("."))}) if module else self._returned(node.func, scope)
        return frozenset()

    def _returned(self, function: ast.expr, scope: Scope) -> frozenset[Target]:
        """Return what a function of the script may return, such as the Horovod that it has imported."""
        where = scope.find(function.id) if isinstance(function, ast.Name) else None
        found: frozenset[Target] = frozenset()
        for binding in where.bindings[function.id] if where and isinstance(function, ast.Name) else ():
            if binding.function is None or binding.function in self._active:
                continue
            self._active.add(binding.function)
            values = [each.value for each in ast.walk(binding.function) if isinstance(each, ast.Return) and each.value]
            inside = self._scopes.of[binding.function]
            found = found.union(*(self.targets(value, inside) for value in values))
            self._active.remove(binding.function)
        return found

    def imported(self, call: ast.Call, scope: Scope) -> str:
        """Return the module that `import_module("…")` or `__import__("…")` gives; empty for other calls."""
        constant = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if not isinstance(constant, str) or not self.is_importer(call, scope):
            return ""
        if isinstance(call.func, ast.Name) and call.func.id == "__import__" and not has_fromlist(call):
            return constant.split(".")[0]
        return constant

    def is_importer(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call imports the module that its argument names."""
        if isinstance(call.func, ast.Name) and call.func.id == "__import__":
            return True
        return not self.targets(call.func, scope).isdisjoint(_IMPORTERS)

    def made_by(self, node: ast.expr, scope: Scope) -> frozenset[Target]:
        """Return the functions and classes whose result an expression may be."""
        if isinstance(node, ast.Call):
            return self.targets(node.func, scope)
        made: frozenset[Target] = frozenset()
        for value, where in self.values(node, scope):
            key = "made", value
            if key not in self._active:
                self._active.add(key)
                made |= self.made_by(value, where)
                self._active.remove(key)
        return made

    def constant(self, node: ast.expr, scope: Scope) -> str | None:
        """Return the string of an expression, as far as its end is known."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return self.constant(node.values[-1], scope) if node.values else ""
        if isinstance(node, ast.BinOp):
            return self.constant(node.left if isinstance(node.op, ast.Mod) else node.right, scope)
        if isinstance(node, ast.Call):
            return self._constant_of_call(node, scope)
        values = self.values(node, scope)
        return self.constant(*values[0]) if len(values) == 1 and values[0][0] is not node else None

    def _constant_of_call(self, node: ast.Call, scope: Scope) -> str | None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method == "format" and isinstance(node.func, ast.Attribute):
            return self.constant(node.func.value, scope)
        is_path = method in ("join", "joinpath") or (
            isinstance(node.func, ast.Name) and node.func.id in ("str", "Path")
        )
        return self.constant(node.args[-1], scope) if is_path and node.args else None

    def values(self, node: ast.expr, scope: Scope) -> list[tuple[ast.expr, Scope]]:
        """Return the expressions that a name or an attribute of `self` is assigned."""
        if isinstance(node, ast.Name) and (found := scope.find(node.id)):
            return [(each.value, found) for each in found.bindings[node.id] if each.value is not None]
        return self._scopes.attributes[node.attr] if isinstance(node, ast.Attribute) and is_of_self(node) else []

    def _name(self, name: str, scope: Scope) -> frozenset[Target]:
        found = scope.find(name)
        if found is None:
            return self._of_stars(name)
        key = found, name
        if key not in self._known:
            if key in self._active:
                return frozenset()
            self._active.add(key)
            self._known[key] = frozenset().union(*(self._bound(each, found) for each in found.bindings[name]))
            self._active.remove(key)
        return self._known[key]

    def _of_stars(self, name: str) -> frozenset[Target]:
        """Return what `from module import *` may have bound to a name."""
        found: frozenset[Target] = frozenset()
        for module, level in self._scopes.module.stars:
            local = self._program.find(self._path, module, level)
            if local is not None:
                found |= self._member(local, name)
            elif is_in(module, name):
                found |= {(*module.split("."), name)}
        return found

    def _bound(self, binding: Binding, scope: Scope) -> frozenset[Target]:
        if binding.value is not None:
            return self.targets(binding.value, scope)
        local = self._program.find(self._path, binding.module, binding.level) if binding.module else None
        if binding.level and not binding.module:
            local = self._path.parents[binding.level - 1] / "__init__.py"
        if local is None:
            return frozenset({binding.target}) if binding.target else frozenset()
        return self._member(local, binding.member) if binding.member else frozenset({(str(local),)})

    def _attribute(self, base: Target, name: str) -> frozenset[Target]:
        if len(base) == 1 and base[0].endswith(".py"):
            return self._member(Path(base[0]), name)
        return frozenset({(*base, name)})

    def _member(self, path: Path, name: str) -> frozenset[Target]:
        """Return what a name of another module of the user's stands for: a value, or a module below it."""
        below = self._program._in(path.parent, name) if path.name == "__init__.py" else None
        if below is not None:
            return frozenset({(str(below),)})
        if path not in self._program.scripts or ("member", path, name) in self._active:
            return frozenset()
        self._active.add(("member", path, name))
        found = self._program.resolver(path)._name(name, self._program.scripts[path].scopes.module)
        self._active.remove(("member", path, name))
        return found

    def _self_values(self, node: ast.Attribute) -> frozenset[Target]:
        """Return what is assigned to an attribute of `self` anywhere in the script."""
        key = "self", self._path, node.attr
        if key in self._active:
            return frozenset()
        self._active.add(key)
        values = self._scopes.attributes.get(node.attr, [])
        found = frozenset().union(*(self.targets(value, scope) for value, scope in values))
        self._active.remove(key)
        return found


def has_fromlist(call: ast.Call) -> bool:
    """Whether a call of `__import__` gives the module itself and not its top package."""
    return len(call.args) > 3 or any(keyword.arg == "fromlist" for keyword in call.keywords)
