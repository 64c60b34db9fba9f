"""Reading and writing configurations as YAML."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config.errors import ConfigError, UserError
from hvdtrain.config.primary_files import FilesRead
from hvdtrain.config.run import Config


def to_yaml(config: Config) -> str:
    """Return `config` as YAML, in the order of declaration."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def digest(config: Config) -> str:
    """Return a short fingerprint of `config`, equal for equal configurations."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


def read_values(path: Path, files: FilesRead | None = None) -> dict[str, Any]:
    """Return the sections and options that the file sets; `files` reads it.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    try:
        values = yaml.safe_load((files or FilesRead()).text(path))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} is no valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"The configuration {path} must hold options as 'section: {{option: value}}'. Received: {values!r}."
        )
    return values


def apply_values(base: Config, values: dict[str, Any], origin: str) -> Config:
    """Return `base` overridden by `values`, nested as in the file.

    Raises:
        ConfigError: unknown keys or wrong types; names the path of each.
    """
    import pydantic

    merged = _merge(dataclasses.asdict(base), values)
    try:
        return pydantic.TypeAdapter(Config).validate_python(merged)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{origin} does not fit:\n" + "\n".join(_lines(error))) from error


def _merge(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        known = merged.get(key)
        # The arguments of a model or data source belong together: a new set replaces the old one.
        nested = isinstance(value, dict) and isinstance(known, dict) and not key.endswith("_args")
        merged[key] = _merge(known, value) if nested and known is not None else value
    return merged


def _lines(invalid: Any) -> list[str]:
    lines = []
    for problem in invalid.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            lines.append(f"  {path}: there is no such option")
        else:
            error = problem.get("ctx", {}).get("error")
            cause = (error.message if isinstance(error, UserError) else problem["msg"]).rstrip(".")
            received = "" if "Received:" in cause else f" Received: {problem['input']!r}."
            lines.append(f"  {path}: {cause}.{received}")
    return lines
