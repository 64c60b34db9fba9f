"""Imports of Horovod in a script: the names they bind, and their replacements."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.cli.script.finding import Finding
from hvdtrain.cli.script.names import FACE, STANDS_FOR

_UNTOUCHED = ("horovod.torch", "horovod.mxnet", "horovod.spark", "horovod.ray", "horovod.runner", "horovod.data")


@dataclass(frozen=True)
class Replacement:
    """A replacement of the text between two positions of a script (lines from 1, bytes from 0)."""

    line: int
    begin: int
    end_line: int
    end: int
    text: str


@dataclass(frozen=True)
class Import:
    """One imported name: its binding, finding and replacement."""

    bound: str
    module: str
    """The dotted name behind `bound`."""
    finding: Finding | None
    replacement: Replacement | None = None


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Yield the imports of Horovod or of its face in a script."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_plain(alias) for alias in node.names if _is_horovods(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_horovods(node.module or ""):
            yield from _from(node)


def _is_horovods(module: str) -> bool:
    return module.split(".")[0] == "horovod" or module in FACE


def _plain(alias: ast.alias) -> Import:
    said = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    bound = alias.asname or alias.name.split(".")[0]
    module = alias.name if alias.asname else bound
    if alias.name in FACE:
        return Import(bound, module, Finding(alias.lineno, said, "works as is"))
    ours = STANDS_FOR.get(alias.name)
    if ours is None:
        return Import(bound, module, _other(alias.lineno, said, alias.name))
    if alias.asname is None:
        advice = f"import {ours} as hvd, and hvd. instead of {alias.name}."
        return Import(bound, module, Finding(alias.lineno, said, "needs this change", advice))
    end = alias.col_offset + len(alias.name.encode())
    return Import(
        bound,
        module,
        Finding(alias.lineno, said, "works with the import changed"),
        Replacement(alias.lineno, alias.col_offset, alias.lineno, end, ours),
    )


def _from(node: ast.ImportFrom) -> Iterator[Import]:
    module = node.module or ""
    findings = [_of_name(module, alias, node.lineno) for alias in node.names]
    rewritten = all(finding is None or finding.verdict != "needs this change" for finding in findings)
    replacement = _rewritten(node, module) if rewritten else None
    for alias, finding in zip(node.names, findings, strict=True):
        yield Import(alias.asname or alias.name, f"{module}.{alias.name}", finding, replacement)
        replacement = None


def _of_name(module: str, alias: ast.alias, line: int) -> Finding | None:
    said = f"from {module} import {alias.name}"
    if module in FACE:
        return Finding(line, said, "works as is")
    whole = f"{module}.{alias.name}"
    if whole in STANDS_FOR or alias.name in FACE.get(STANDS_FOR.get(module, ""), ()):
        return Finding(line, said, "works with the import changed")
    return _other(line, said, whole)


def _rewritten(node: ast.ImportFrom, module: str) -> Replacement | None:
    """Return the replacement of the whole statement; `from horovod import …` only with a single name."""
    if module in STANDS_FOR:
        begin = node.col_offset + len("from ")
        end = begin + len(module.encode())
        return Replacement(node.lineno, begin, node.lineno, end, STANDS_FOR[module])
    ours = STANDS_FOR.get(f"{module}.{node.names[0].name}")
    if ours is None or len(node.names) > 1 or node.end_lineno is None or node.end_col_offset is None:
        return None
    text = f"import {ours} as {node.names[0].asname or node.names[0].name}"
    return Replacement(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text)


def _other(line: int, said: str, name: str) -> Finding:
    """Return the finding for a name without a counterpart in the face."""
    if name == "horovod" or name.startswith(_UNTOUCHED):
        return Finding(line, said, "works as is")
    inner = next((module for module in sorted(STANDS_FOR, reverse=True) if name.startswith(f"{module}.")), None)
    if inner is None:
        return Finding(line, said, "needs this change", f"{name} is not part of Horovod 0.28.1.")
    advice = f"{name} is Horovod's own inner part: import what is used from {STANDS_FOR[inner]}, by its public name."
    return Finding(line, said, "needs this change", advice)
