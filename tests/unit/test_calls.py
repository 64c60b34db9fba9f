"""Arguments go by name where their order could be mistaken."""

import ast
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
MOST_POSITIONAL = 4


def own_calls(text, own):
    """Yield a module's calls by name of the package's functions and classes, and those of methods of `self`."""
    tree = ast.parse(text)
    others = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hvdtrain")
        for each in node.names
    }
    for node in ast.walk(tree):
        function = getattr(node, "func", None)
        by_name = isinstance(function, ast.Name) and function.id in own - others
        of_self = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self"
        if by_name or (of_self and function.attr in own):
            yield node


def test_calls_of_hvdtrains_own_functions_pass_few_arguments_by_position():
    """But for Horovod's signatures, functions that a decorator makes, and stars in a call or a definition."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "horovod" not in file.parents]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [node for text in texts.values() for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    free = {n.name for n in nodes if isinstance(n, ast.FunctionDef) and (n.decorator_list or n.args.vararg)}
    own = {node.name for node in nodes} - free
    calls = [(file, node) for file, text in texts.items() for node in own_calls(text, own)]
    assert len(calls) > 3000, "the search finds nothing"
    mistakable = [
        f"{file}:{node.lineno}: {ast.unparse(node.func)}"
        for file, node in calls
        if len(node.args) > MOST_POSITIONAL and not any(isinstance(each, ast.Starred) for each in node.args)
    ]
    assert mistakable == []
