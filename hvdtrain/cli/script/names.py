"""The public names of Horovod's face, by module, for reading scripts without importing anything."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2]

STANDS_FOR = {
    "horovod.tensorflow": "hvdtrain.horovod",
    "horovod.tensorflow.elastic": "hvdtrain.horovod.elastic",
    "horovod.tensorflow.keras": "hvdtrain.horovod.keras",
    "horovod.tensorflow.keras.callbacks": "hvdtrain.horovod.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvdtrain.horovod.keras.elastic",
    "horovod.keras": "hvdtrain.horovod.keras",
    "horovod.keras.callbacks": "hvdtrain.horovod.keras.callbacks",
    "horovod.keras.elastic": "hvdtrain.horovod.keras.elastic",
}
"""Module of the face for each of Horovod's."""


def _names_of(module: str) -> list[str]:
    """Return `__all__` from the source of a module of the face; importing it would import TensorFlow."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{file} does not say what is public.")


FACE = {module: _names_of(module) for module in sorted(set(STANDS_FOR.values()))}
"""Public names by module of the face."""
