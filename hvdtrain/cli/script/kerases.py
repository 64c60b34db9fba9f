"""The Keras that a script uses: Keras 3, or tf_keras if TF_USE_LEGACY_KERAS is set."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.cli.script.finding import Finding
from hvdtrain.cli.script.program import Resolver, Script
from hvdtrain.cli.script.scopes import Scope, Target

VARIABLE = "TF_USE_LEGACY_KERAS"
YES = ("1", "true", "True")
"""Values that TensorFlow accepts as true."""
KERASES = ("keras", "tf_keras")
_LAZY = {"losses", "metrics", "optimizers", "initializers"}
"""Modules of Keras that TensorFlow offers at its top."""


@dataclass(frozen=True)
class Facts:
    """What is known of a program as a whole."""

    is_legacy: bool = False
    """Whether it uses tf_keras."""
    wraps: bool = False
    """Whether it has a DistributedOptimizer."""
    loads: bool = False
    """Whether it loads models, Lambda layers refused."""
    has_graphs: bool = False
    """Whether it runs TensorFlow 1's graphs in sessions."""


def real_name(target: Target, is_legacy: bool) -> Target:
    """Return the name under which a part of Keras is installed.

    With tf_keras, `import keras` is a finding of its own, and what is used of it is judged as if it were changed.
    """
    parts = ["tensorflow", *target] if is_legacy and target[0] == "keras" else list(target)
    if parts[:3] == ["tensorflow", "compat", "v2"]:
        parts = ["tensorflow", *parts[3:]]
    is_v1 = parts[:3] == ["tensorflow", "compat", "v1"]
    rest = parts[3:] if is_v1 else parts[1:]
    if parts[0] == "tensorflow" and rest and (rest[0] == "keras" or (rest[0] in _LAZY and not is_v1)):
        below = rest[1:] if rest[0] == "keras" else rest
        legacy = ["tf_keras", "api", "_v1" if is_v1 else "_v2", "keras"]
        return tuple([*(legacy if is_legacy else ["keras", "_tf_keras", "keras"]), *below])
    return tuple(parts)


def file_name(resolver: Resolver, call: ast.Call, scope: Scope) -> str | None:
    """Return the file name that a call is given, as far as its end is known."""
    given = call.args[:1] or [keyword.value for keyword in call.keywords if keyword.arg == "filepath"]
    return resolver.constant(given[0], scope) if given else None


def setting_of(script: Script) -> str | None:
    """Return the value that a script sets the variable to; None if it does not."""
    values = [value for _, value in _settings(script)]
    return values[-1] if values else None


def keras_findings(script: Script, is_legacy: bool, first_use: int | None) -> Iterator[Finding]:
    """Yield findings about a script's choice of Keras.

    Args:
        script: the script.
        is_legacy: whether it uses tf_keras.
        first_use: line of the first import of Horovod, before which the choice must be made.
    """
    for setting, value in _settings(script):
        if value in YES and first_use is not None and setting.lineno > first_use:
            advice = "it is too late here: set it above the import of Horovod, which decides on a Keras."
            yield Finding(setting.lineno, ast.unparse(setting), "needs this change", advice)
        elif value in YES:
            yield Finding(setting.lineno, ast.unparse(setting), "works as is")
    for line, said, package in _imports(script):
        if package == "tf_keras" and is_legacy:
            yield Finding(line, said, "works as is")
        elif package == "tf_keras":
            advice = f"tf_keras is for scripts with os.environ['{VARIABLE}'] = '1' above their imports."
            yield Finding(line, said, "needs this change", advice)
        elif package == "keras" and is_legacy:
            advice = f"keras is Keras 3, and with {VARIABLE} Horovod trains tf_keras: from tensorflow import keras."
            yield Finding(line, said, "needs this change", advice)


def _imports(script: Script) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and package of each absolute import."""
    for node in script.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {alias.name}", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, f"from {node.module}", node.module.split(".")[0]


def _settings(script: Script) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield settings of the variable: `os.environ[…] = "1"`, and `os.environ.setdefault(…, "1")`."""
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            owner, name, value = node.targets[0].value, node.targets[0].slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 2:
            owner, (name, value) = node.func.value, node.args
            if node.func.attr != "setdefault":
                continue
        else:
            continue
        if not (isinstance(name, ast.Constant) and isinstance(value, ast.Constant)):
            continue
        if name.value == VARIABLE and ast.unparse(owner).endswith("environ"):
            yield node, str(value.value)
