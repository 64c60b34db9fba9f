"""Imports of Horovod in a script: what has to change in them, and their replacements."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.cli.script.finding import Finding, Replacement
from hvdtrain.cli.script.names import FACE, FACES, MODULES, STANDS_FOR, WITH_OWN_KERAS, has, horovod_has, module_of
from hvdtrain.cli.script.program import Resolver, Script, has_fromlist
from hvdtrain.cli.script.scopes import Chain, base_of

_FROM = re.compile(rb"from(?:\s|\\\r?\n)+")


@dataclass
class Imports:
    """Findings about a script's imports of Horovod, and the replacements that `--write` makes."""

    findings: list[Finding] = field(default_factory=list)
    replacements: list[Replacement] = field(default_factory=list)

    def add(self, node: ast.stmt | ast.expr, said: str, verdict: str, advice: str = "") -> None:
        """Add a finding that needs no action, or is a manual change."""
        is_manual = verdict == "needs this change"
        self.findings.append(Finding(node.lineno, said, "needs this change" if is_manual else "works as is", advice))

    def change(self, line: int, said: str, advice: str, replacements: Sequence[Replacement]) -> None:
        """Add an import that `--write` changes."""
        self.findings.append(Finding(line, said, "change this import", advice))
        self.replacements += replacements


def imports_of(script: Script, resolver: Resolver, is_legacy: bool) -> Imports:
    """Judge the imports of a script, by statement or by call.

    Args:
        script: the script.
        resolver: says what its names stand for.
        is_legacy: whether it uses tf_keras.
    """
    found = Imports()
    plain = _PlainImports(script, resolver)
    for node in script.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_horovods(alias.name):
                    plain.judge(found, node, alias) if not alias.asname else _renamed(found, node, alias)
                    _warn_of_own_keras(found, node, alias.name, is_legacy)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_horovods(node.module or ""):
            _from(found, script, node)
            _warn_of_own_keras(found, node, node.module or "", is_legacy)
    _by_call(found, script, resolver)
    plain.rewrite_uses(found)
    return found


def _is_horovods(module: str) -> bool:
    return module.split(".")[0] == "horovod" or module in FACES or module.startswith(f"{FACE}.")


def _warn_of_own_keras(found: Imports, node: ast.stmt, module: str, is_legacy: bool) -> None:
    """Find parts of Horovod that train with plain Horovod on Keras 3, where it reduces no gradients."""
    if module.startswith(WITH_OWN_KERAS) and not is_legacy:
        advice = "it trains with plain Horovod, which reduces no gradients on Keras 3: set TF_USE_LEGACY_KERAS=1."
        found.findings.append(Finding(node.lineno, ast.unparse(node), "needs this change", advice))


def _renamed(found: Imports, node: ast.Import, alias: ast.alias) -> None:
    """Judge `import MODULE as NAME`."""
    said = f"import {alias.name} as {alias.asname}"
    if alias.name in STANDS_FOR:
        ours = STANDS_FOR[alias.name]
        found.change(node.lineno, said, f"import {ours} as {alias.asname}", [_of_alias(alias, ours)])
    else:
        _other(found, node, said, alias.name)


def _of_alias(alias: ast.alias, text: str) -> Replacement:
    begin = alias.col_offset
    return Replacement(
        line=alias.lineno, begin=begin, end_line=alias.lineno, end=begin + len(alias.name.encode()), text=text
    )


def _other(found: Imports, node: ast.stmt, said: str, name: str) -> None:
    """Judge the import of what has no counterpart."""
    module, rest = module_of(name.split("."))
    if module in FACES and rest and not has(module, rest[0]):
        found.add(node, said, "needs this change", f"{rest[0]} is not part of {module}.")
    elif module in STANDS_FOR and rest and not has(STANDS_FOR[module], rest[0]) and horovod_has(module, rest[0]):
        advice = f"{STANDS_FOR[module]} has no {rest[0]}: import what you use by its public name."
        found.add(node, said, "needs this change", advice)
    elif module in MODULES and module not in STANDS_FOR:
        advice = f"{module} is Horovod's own inner part: import what you use from {FACE}, by its public name."
        found.add(node, said, "needs this change", advice)
    elif not horovod_has(*name.rpartition(".")[::2]) if "." in name else False:
        found.add(node, said, "needs this change", f"{name} is not part of Horovod 0.28.1.")
    else:
        found.add(node, said, "works as is")


def _from(found: Imports, script: Script, node: ast.ImportFrom) -> None:
    """Judge `from MODULE import NAME, …`."""
    module = node.module or ""
    if module in STANDS_FOR:
        _from_counterpart(found, script, node, module)
        return
    ours = {alias.name: STANDS_FOR.get(f"{module}.{alias.name}") for alias in node.names}
    changed = [f"import {ours[a.name]} as {a.asname or a.name}" for a in node.names if ours[a.name]]
    others = [alias for alias in node.names if not ours[alias.name]]
    for alias in others:
        said = ast.unparse(ast.ImportFrom(module, [alias], 0))
        _other(found, node, said, module if alias.name == "*" else f"{module}.{alias.name}")
    if changed:
        kept = [ast.unparse(ast.ImportFrom(module, others, 0))] if others else []
        text = "; ".join([*changed, *kept])
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        whole = Replacement(line=node.lineno, begin=node.col_offset, end_line=end_line, end=end, text=text)
        found.change(node.lineno, ast.unparse(node), text, [whole])


def _from_counterpart(found: Imports, script: Script, node: ast.ImportFrom, module: str) -> None:
    ours = STANDS_FOR[module]
    lacking = [a.name for a in node.names if a.name != "*" and not _is_offered(module, a.name)]
    for name in lacking:
        _other(found, node, f"from {module} import {name}", f"{module}.{name}")
    if lacking:
        return
    after = ast.unparse(ast.ImportFrom(ours, node.names, 0))
    place = _module_of_statement(script, node, module)
    if place is None:
        found.add(node, ast.unparse(node), "needs this change", f"{after}.")
    else:
        found.change(node.lineno, ast.unparse(node), after, [Replacement(*place, ours)])


def _is_offered(module: str, name: str) -> bool:
    """Whether a name may be imported from the counterpart of a module."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}" in STANDS_FOR
    return has(STANDS_FOR[module], name)


def _module_of_statement(script: Script, node: ast.ImportFrom, module: str) -> tuple[int, int, int, int] | None:
    """Return where `from MODULE import` says MODULE; None if it is spelled in an unusual way."""
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
    statement = script.source.text_between(
        Replacement(line=node.lineno, begin=node.col_offset, end_line=end_line, end=end, text="")
    ).encode()
    match = _FROM.match(statement)
    if match is None or not statement.startswith(module.encode(), match.end()) or b"\n" in match[0]:
        return None
    begin = node.col_offset + match.end()
    return node.lineno, begin, node.lineno, begin + len(module.encode())


def _by_call(found: Imports, script: Script, resolver: Resolver) -> None:
    """Judge `import_module(…)`, `__import__(…)`, and functions that by their name import a module, too."""
    for chain in script.chains:
        if chain.call is None or not chain.call.args:
            continue
        if resolver.is_importer(chain.call, chain.scope):
            _by_importer(found, script, chain.call)
            continue
        for node in chain.call.args if _sounds_like_import(chain) else ():
            if isinstance(node, ast.Constant) and node.value in STANDS_FOR:
                advice = f"if this names a module to import: '{STANDS_FOR[node.value]}'."
                found.add(node, ast.unparse(node), "needs this change", advice)


def _sounds_like_import(chain: Chain) -> bool:
    name = (chain.node.attr if isinstance(chain.node, ast.Attribute) else chain.node.id).lower()
    return any(word in name for word in ("import", "lazy", "load", "module"))


def _by_importer(found: Imports, script: Script, call: ast.Call) -> None:
    name = call.args[0]
    if isinstance(name, ast.Constant):
        _by_constant(found, script, call, name)
    elif (_first_words(name) or "").startswith("horovod"):
        advice = f"for TensorFlow and Keras the name must be {FACE} or {FACE}.keras."
        found.add(call, ast.unparse(call), "needs this change", advice)


def _by_constant(found: Imports, script: Script, call: ast.Call, name: ast.Constant) -> None:
    ours = STANDS_FOR.get(name.value) if isinstance(name.value, str) else None
    said = ast.unparse(call)
    if ours is None:
        if isinstance(name.value, str) and _is_horovods(name.value):
            _other(found, ast.Expr(call, lineno=call.lineno), said, name.value)
        return
    begin, end = name.col_offset, name.end_col_offset or 0
    inner = Replacement(
        line=name.lineno, begin=begin + 1, end_line=name.end_lineno or name.lineno, end=end - 1, text=ours
    )
    if said.startswith("__import__") and not has_fromlist(call):
        advice = f"it gives horovod, the package around it: import {ours}."
        found.add(call, said, "needs this change", advice)
    elif script.source.text_between(inner) == name.value:
        found.change(call.lineno, said, said.replace(name.value, ours), [inner])
    else:
        found.add(call, said, "needs this change", f"import {ours}.")


def _first_words(node: ast.expr) -> str | None:
    """Return the constant start of a string that is put together."""
    while isinstance(node, (ast.BinOp, ast.JoinedStr, ast.Call, ast.Attribute)):
        if isinstance(node, ast.BinOp):
            node = node.left
        elif isinstance(node, ast.JoinedStr):
            node = node.values[0]
        else:
            node = node.func if isinstance(node, ast.Call) else node.value
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class _PlainImports:
    """`import horovod.tensorflow` without `as`, which binds `horovod`: every use spells out the module."""

    def __init__(self, script: Script, resolver: Resolver) -> None:
        self._bare = [
            alias.name
            for node in script.nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name.split(".")[0] == "horovod" and not alias.asname
        ]
        self._uses: list[tuple[Chain, str]] = []
        self._stays = False
        """Whether something else than the modules with a counterpart is used by the name `horovod`."""
        for chain in script.chains if self._bare else ():
            base = base_of(chain.node)
            is_named_so = isinstance(base, ast.Name) and base.id == "horovod"
            if is_named_so and ("horovod",) in resolver.targets(base, chain.scope):
                self._sort(chain)

    def _sort(self, chain: Chain) -> None:
        parts = ast.unparse(chain.node).split(".")
        module, _ = module_of(parts)
        if module in STANDS_FOR:
            self._uses.append((chain, module))
        else:
            self._stays = True

    def judge(self, found: Imports, node: ast.Import, alias: ast.alias) -> None:
        """Judge one of these imports."""
        after = self._after(alias.name)
        if after is None:
            _other(found, node, f"import {alias.name}", alias.name)
        else:
            found.change(node.lineno, f"import {alias.name}", f"import {after}", [_of_alias(alias, after)])

    def _after(self, name: str) -> str | None:
        """Return what to import instead of a module; None if nothing."""
        if name == "horovod" and self._uses and not any(each in STANDS_FOR for each in self._bare):
            modules = dict.fromkeys(STANDS_FOR[module] for _, module in self._uses)
        elif name in STANDS_FOR:
            modules = dict.fromkeys([STANDS_FOR[name]])
        else:
            return None
        is_bound_elsewhere = any(each not in STANDS_FOR and each != name for each in self._bare)
        return ", ".join([*modules, *(["horovod"] if self._stays and not is_bound_elsewhere else [])])

    def rewrite_uses(self, found: Imports) -> None:
        """Let every use name the counterpart."""
        for chain, module in self._uses:
            prefix: ast.expr = chain.node
            for _ in ast.unparse(chain.node).split(".")[module.count(".") + 1 :]:
                prefix = prefix.value if isinstance(prefix, ast.Attribute) else prefix
            end_line, end = prefix.end_lineno or prefix.lineno, prefix.end_col_offset or 0
            found.replacements.append(
                Replacement(
                    line=prefix.lineno, begin=prefix.col_offset, end_line=end_line, end=end, text=STANDS_FOR[module]
                )
            )
