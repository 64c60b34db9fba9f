"""Scopes of a script, and the names that its statements bind in them."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

Target = tuple[str, ...]
"""What a name stands for: the parts of its dotted name. A module of the user's own has its path as the first part."""


@dataclass(frozen=True, eq=False)
class Binding:
    """A statement that binds a name: to `target`, to the value of an expression, or to something unknown."""

    target: Target = ()
    value: ast.expr | None = None
    function: ast.AST | None = None
    """Definition of a function."""
    module: str = ""
    """Module that the user's own may be, for `import helper` and `from helper import hvd`."""
    member: str = ""
    """Name that is imported from `module`; empty for `import module`."""
    level: int = 0
    """Leading dots of a relative import."""


@dataclass(eq=False)
class Scope:
    """A namespace of a script: of the module, a class, or a function."""

    parent: "Scope | None" = None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    stars: list[tuple[str, int]] = field(default_factory=list)
    """Module and level of each `from module import *`."""

    def find(self, name: str) -> "Scope | None":
        """Return the nearest scope that binds `name`; functions do not see the names of the class around them."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


class Scopes(ast.NodeVisitor):
    """All scopes of a script; `of` holds those of functions and classes by their node."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = self._scope = Scope()
        self.of: dict[ast.AST, Scope] = {}
        self.attributes: dict[str, list[tuple[ast.expr, Scope]]] = defaultdict(list)
        """Values assigned to `self.NAME`, with the scope in which to resolve them."""
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        """Bind modules; without `as` the top package."""
        for alias in node.names:
            top = alias.name.split(".")[0]
            module = alias.name if alias.asname else top
            self._bind(alias.asname or top, Binding(tuple(module.split(".")), module=module))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Bind members of a module."""
        module = node.module or ""
        for alias in node.names:
            if alias.name == "*":
                self._scope.stars.append((module, node.level))
                continue
            target = () if node.level else (*module.split("."), alias.name)
            bound = Binding(target, module=module, member=alias.name, level=node.level)
            self._bind(alias.asname or alias.name, bound)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Bind the function in its scope, and its parameters in a scope of its own."""
        self._bind(node.name, Binding(function=node))
        self._enter(node, is_class=False)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Bind the parameters in a scope of its own."""
        self._enter(node, is_class=False)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bind the class, and its body in a scope of its own."""
        self._bind(node.name, Binding())
        self._enter(node, is_class=True)

    def visit_arg(self, node: ast.arg) -> None:
        """Bind a parameter."""
        self._bind(node.arg, Binding())

    def visit_Assign(self, node: ast.Assign) -> None:
        """Bind names and attributes of `self` to an expression."""
        for target in node.targets:
            self._assign(target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Bind as an assignment does."""
        if node.value is not None:
            self._assign(node.target, node.value)
            self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        """Bind as an assignment does."""
        self._assign(node.target, node.value)
        self.visit(node.value)

    def visit_Global(self, node: ast.Global) -> None:
        """Let later bindings of these names count for the module."""
        for name in node.names:
            self._scope.bindings[name] = self.module.bindings[name]

    def visit_Name(self, node: ast.Name) -> None:
        """Bind the targets of loops, `with` and the like to something unknown."""
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, Binding())

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Bind the exception."""
        if node.name:
            self._bind(node.name, Binding())
        self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, Binding(value=value))
        elif is_of_self(target):
            self.attributes[target.attr].append((value, self._scope))
        elif _have_same_length(target, value):
            for each, its in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self._assign(each, its)
        else:
            self.visit(target)

    def _bind(self, name: str, binding: Binding) -> None:
        self._scope.bindings[name].append(binding)

    def _enter(self, node: ast.AST, *, is_class: bool) -> None:
        outer, self._scope = self._scope, Scope(self._scope, is_class)
        self.of[node] = self._scope
        self.generic_visit(node)
        self._scope = outer


@dataclass(frozen=True)
class Chain:
    """A dotted expression as long as it gets: `hvd.callbacks.MetricAverageCallback`, or a single name."""

    node: ast.Name | ast.Attribute
    scope: Scope
    call: ast.Call | None
    """The call whose function it is."""
    is_decorator: bool = False

    @property
    def is_assigned(self) -> bool:
        """Whether the chain is what an assignment changes."""
        return isinstance(self.node.ctx, ast.Store)


def chains(tree: ast.Module, scopes: Scopes) -> Iterator[Chain]:
    """Yield every dotted expression of a script with its scope."""
    pending: list[tuple[ast.AST, Scope, ast.Call | None, bool]] = [(tree, scopes.module, None, False)]
    while pending:
        node, scope, call, is_decorator = pending.pop()
        scope = scopes.of.get(node, scope)
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield Chain(node, scope, call, is_decorator)
            base = base_of(node)
            below: Iterable[ast.AST] = () if isinstance(base, ast.Name) else (base,)
        else:
            below = ast.iter_child_nodes(node)
        decorators = getattr(node, "decorator_list", ())
        for child in below:
            is_function = isinstance(node, ast.Call) and child is node.func
            pending.append((child, scope, node if is_function else None, child in decorators))  # type: ignore[arg-type]


def prefixes(chain: Chain) -> Iterator[Chain]:
    """Yield a chain and its beginnings, the longest first: `optimizer.lr.assign`, `optimizer.lr`, `optimizer`."""
    yield chain
    node = chain.node
    while isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
        node = node.value
        yield Chain(node, chain.scope, None)


def _have_same_length(target: ast.expr, value: ast.expr) -> bool:
    """Whether `a, b = c, d` assigns item by item."""
    sequences = (ast.Tuple, ast.List)
    return isinstance(target, sequences) and isinstance(value, sequences) and len(target.elts) == len(value.elts)


def base_of(node: ast.expr) -> ast.expr:
    """Return the expression before the first dot."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def is_of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Whether an expression is `self.NAME`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
