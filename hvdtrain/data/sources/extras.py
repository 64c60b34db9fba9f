"""Packages that only some data need."""

import importlib
from typing import Any

from hvdtrain.config.errors import ConfigError


def optional_package(module: str, package: str, need: str) -> Any:
    """Import `module` of a package that need not be installed.

    Args:
        module: what is imported.
        package: what pip calls the package.
        need: what needs it, as the user named it.

    Raises:
        ConfigError: it is not installed; with the command that does it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        raise ConfigError(
            f"{need} needs the package {package}, which is not installed: pip install {package}"
        ) from None
