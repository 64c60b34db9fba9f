"""`hvdtrain.horovod` by the name of `horovod.tensorflow`: a script changes the prefix of its imports alone.

`hvdtrain.horovod.tensorflow.keras` is `hvdtrain.horovod.keras` itself, and so with every module below.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hvdtrain import horovod as _face
from hvdtrain.horovod import *  # noqa: F403

__all__ = list(_face.__all__)


class _SameModule(MetaPathFinder, Loader):
    """Imports `hvdtrain.horovod.x` for `hvdtrain.horovod.tensorflow.x`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return how to import a module by this package's name; None for all others."""
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the same name in `hvdtrain.horovod`."""
        module = import_module(f"{_face.__name__}{spec.name.removeprefix(__name__)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Let the module keep what it says of itself; it was executed under its own name."""
        module.__spec__ = module.__spec__ and module.__spec__.loader_state


if not any(type(finder).__qualname__ == _SameModule.__qualname__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _SameModule())


def __getattr__(name: str) -> Any:
    """Return what else `hvdtrain.horovod` has."""
    return getattr(_face, name)
