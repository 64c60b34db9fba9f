"""Optional packages of some data sources."""

import importlib
from typing import Any

from hvdtrain.config.errors import ConfigError


def optional_package(module: str, extra: str, need: str) -> Any:
    """Import `module` of an optional package.

    Args:
        module: the module to import.
        extra: the extra of hvdtrain that installs it.
        need: the option that needs it, as the user wrote it.

    Raises:
        ConfigError: it is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and lacks something itself
        raise ConfigError(
            f"{need} needs the package {error.name}, which is not installed: pip install 'hvdtrain[{extra}]'"
        ) from None
