"""Private names of other libraries stand in `hvdtrain/compat/` alone."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_current_frames"}
"""Public in spite of their names: those of NamedTuple, os and sys."""
OURS = re.compile(r"_hvdtrain_\w+|__\w+__")
"""What hvdtrain sets on objects of others; special names of Python."""
PRIVATE_MODULE = re.compile(r"(?!hvdtrain\b)\w+(\.\w+)*\.(_[a-z]|src\b|python\b)|keras\.src|tensorflow\.python")

PRIVATE_NAME = re.compile(r"(keras\.src|tensorflow\.python)(\.\w+)*")
IN_USERS_SCRIPTS = "cli/migrate/keras2.py"
"""Names what it looks for in scripts."""


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and OURS.fullmatch(name) is None and name not in DOCUMENTED


def names_of_others() -> set[str]:
    """Return the private attributes that `hvdtrain.compat` names, in its code or as strings."""
    found = set()
    for path in (PACKAGE / "compat").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return set(filter(is_private, found))


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names that a file itself defines: functions, classes, fields and attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return set(filter(is_private, found))


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "__all__"


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def violations(source: str, others: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each place of a file that names something private of another library."""
    tree = ast.parse(source)
    own = defined_in(tree)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(getattr(node, "body", None), list) and node.body and isinstance(node.body[0], ast.Expr)
    }
    exported = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_all(node.targets[0])]
    documentation |= {id(name) for names in exported for name in ast.walk(names)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong = any(PRIVATE_MODULE.match(name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
            wrong = not node.level and any(PRIVATE_MODULE.match(name) for name in (str(node.module), *names))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = is_self(node.value) or is_super(node.value)
            wrong = not of_self and (node.attr in others or node.attr not in own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            wrong = node.value in others or PRIVATE_NAME.fullmatch(node.value) is not None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            wrong = is_private(str(name)) and str(name) not in own
        else:
            wrong = False
        if wrong:
            yield node.lineno, ast.unparse(node)[:100]


FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def others() -> set[str]:
    return names_of_others()


def test_no_file_but_compats_names_what_is_private():
    found = [
        f"{name}:{line}: {text}"
        for name, path in FILES.items()
        if not name.startswith(("compat/", IN_USERS_SCRIPTS))
        for line, text in violations(path.read_text(), others())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "from keras.src.backend import standardize_dtype",
        "import tensorflow.python.ops.gen_math_ops",
        "from tensorflow.python.ops import control_flow_util",
        "from horovod import _keras",
        "from mpi4py import _mpiabi",
        "importlib.import_module('tensorflow.python.ops')",
        "layer._flatten_layers()",
        "getattr(layer, '_losses', ())",
        "hasattr(layer, '_anything')",
        "setattr(optimizer, '_all_reduce_sum_gradients', list)",
        "vars(layer)['_compute_attention'] = f",
        "op._set_attr('_uid', 1)",
        "parser._actions",
        "class Own:\n    _losses = ()\n\ndef f(layer):\n    return layer._losses",
    ],
)
def test_a_planted_name_is_found(planted):
    assert list(violations(planted, others()))


def classes_of_others() -> Iterator[tuple[type, list[type]]]:
    """Yield each class of hvdtrain that derives from one of a library's, with these."""
    for found in pkgutil.walk_packages([str(PACKAGE)], "hvdtrain."):
        if found.name.rpartition(".")[2] == "__main__" or any(part in found.name for part in (".compat", ".legacy_")):
            continue
        for kind in vars(importlib.import_module(found.name)).values():
            if isinstance(kind, type) and kind.__module__ == found.name:
                foreign = [each for each in kind.__mro__ if each.__module__.split(".")[0] in LIBRARIES]
                if foreign:
                    yield kind, foreign


LIBRARIES = {"keras", "tensorflow", "horovod", "tf_keras", "mpi4py", "argparse", "http", "socketserver"}


@cache
def private_names_of(kind: type) -> set[str]:
    """Return the private attributes that a class of a library defines, or sets on its instances."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {name for name in vars(kind) if is_private(name)}
    return defined_in(tree) | {name for name in vars(kind) if is_private(name)}


def names_in(kind: type) -> set[str]:
    """Return the private names that a class of hvdtrain defines, sets or reads on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and (is_self(node.value) or is_super(node.value))
    }
    return defined_in(tree) | set(filter(is_private, read))


def test_subclasses_of_a_librarys_classes_do_without_its_private_names():
    found = []
    for kind, foreign in classes_of_others():
        for base in foreign:
            common = names_in(kind) & private_names_of(base)
            found += [f"{kind.__module__}.{kind.__qualname__}: {name} of {base.__qualname__}" for name in common]
    assert not found, "\n".join(sorted(set(found)))
