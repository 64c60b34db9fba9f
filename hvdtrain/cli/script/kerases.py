"""Detection of the Keras that a script uses: Keras 3, or tf_keras if TF_USE_LEGACY_KERAS is set."""

import ast
from collections.abc import Iterator, Mapping

from hvdtrain.cli.script.finding import Finding

VARIABLE = "TF_USE_LEGACY_KERAS"
_YES = ("1", "true", "True")
"""Values that TensorFlow accepts as true."""


def uses_legacy_keras(tree: ast.AST, environ: Mapping[str, str]) -> bool:
    """Whether `tf.keras` is tf_keras, by the settings of the script, else by the environment."""
    said = [value for _, value in _settings(tree)]
    return (said[-1] if said else environ.get(VARIABLE)) in _YES


def keras_findings(tree: ast.AST, is_legacy: bool, first_use: int) -> Iterator[Finding]:
    """Yield findings about a script's choice of Keras.

    Args:
        tree: the script.
        is_legacy: see `uses_legacy_keras`.
        first_use: line of the first import of Horovod, before which the choice must be made.
    """
    for setting, value in _settings(tree):
        late = setting.lineno > first_use
        if value in _YES and late:
            advice = "it is too late here: set it above the import of Horovod, which decides on a Keras."
            yield Finding(setting.lineno, ast.unparse(setting), "needs this change", advice)
        elif value in _YES:
            yield Finding(setting.lineno, ast.unparse(setting), "works as is")
    for line, said, package in _imports(tree):
        if package == "tf_keras" and is_legacy:
            yield Finding(line, said, "works as is")
        elif package == "tf_keras":
            advice = f"tf_keras is for scripts with os.environ['{VARIABLE}'] = '1' above their imports."
            yield Finding(line, said, "needs this change", advice)
        elif package == "keras" and is_legacy:
            advice = f"keras is Keras 3, and with {VARIABLE} Horovod trains tf_keras: from tensorflow import keras."
            yield Finding(line, said, "needs this change", advice)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, text and package of each absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {alias.name}", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, f"from {node.module}", node.module.split(".")[0]


def _settings(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield settings of the variable: `os.environ[…] = "1"`, and `os.environ.setdefault(…, "1")`."""
    for node in ast.walk(tree):
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
