"""Read and write configurations as YAML; share rank 0's small files with other hosts."""

import base64
import dataclasses
import difflib
import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.config.errors import ConfigError, UserError
from hvdtrain.config.run import Config


class FilesRead:
    """Reads files and remembers their contents.

    `given` are contents that rank 0 has read, by path, None for a missing file; these are not read again.
    """

    def __init__(self, given: Mapping[str, bytes | None] | None = None) -> None:
        self._given = dict(given or {})
        self.contents: dict[str, bytes | None] = {}
        """Contents of the files read so far, by path; None for a missing file."""

    def read(self, path: Path) -> bytes:
        """Return a file's content. Raises OSError if it is missing or unreadable."""
        content = self._given[str(path)] if str(path) in self._given else _content(path)
        self.contents[str(path)] = content
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return content

    def text(self, path: Path) -> str:
        """Return a file's content as text.

        Raises:
            OSError: it is missing or unreadable.
            UnicodeDecodeError: it is not UTF-8.
        """
        return self.read(path).decode("utf-8")

    def exists(self, path: Path) -> bool:
        """Return whether the file `path` exists and is readable."""
        try:
            self.read(path)
        except OSError:
            return False
        return True

    def encode(self) -> bytes:
        """Serialize the files read so far; `decoded` is the inverse."""
        coded = {path: _coded(content) for path, content in self.contents.items()}
        return json.dumps(coded, sort_keys=True).encode()


def decoded(message: bytes) -> dict[str, bytes | None]:
    """Deserialize the output of another rank's `FilesRead.encode`."""
    return {path: None if text is None else base64.b64decode(text) for path, text in json.loads(message).items()}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _coded(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()


def to_yaml(config: Config) -> str:
    """Return `config` as YAML, in declaration order."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def digest(config: Config) -> str:
    """Return a short fingerprint of `config`, equal for equal configurations."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


def read_values(path: Path, files: FilesRead | None = None) -> dict[str, Any]:
    """Return the sections and options set in a YAML file. Raises ConfigError if unreadable, or not a mapping."""
    try:
        values = yaml.safe_load((files or FilesRead()).text(path))
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"The configuration {path} must hold options as 'section: {{option: value}}'. Received: {values!r}."
        )
    return values


def apply_values(base: Config, values: dict[str, Any], origin: str) -> Config:
    """Return `base` overridden by nested `values`. Raises ConfigError with the path of each invalid key."""
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


def _suggestion(path: str) -> str:
    """Return " Perhaps you meant: section.option." for an option in the wrong section, or a near miss."""
    known = [
        f"{section}.{option}"
        for section, options in dataclasses.asdict(Config(recipe="")).items()
        for option in (options if isinstance(options, dict) else ())
    ]
    elsewhere = [each for each in known if each.rpartition(".")[2] == path.rpartition(".")[2]]
    near = elsewhere or difflib.get_close_matches(path, known, n=1) or _nearest_name(path, known)
    return f" Perhaps you meant: {near[0]}." if near else ""


def _nearest_name(path: str, known: Sequence[str]) -> list[str]:
    names = {each.rpartition(".")[2]: each for each in known}
    return [names[name] for name in difflib.get_close_matches(path.rpartition(".")[2], names, n=1)]


def _lines(invalid: Any) -> list[str]:
    lines = []
    for problem in invalid.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            lines.append(f"  {path}: there is no such option.{_suggestion(path)}")
        else:
            error = problem.get("ctx", {}).get("error")
            users = isinstance(error, UserError)
            cause = (error.message if users else problem["msg"]).rstrip(".")
            received = "" if users else f" Received: {problem['input']!r}."
            lines.append(f"  {f'{path}: ' if path else ''}{cause}.{received}")
    return lines
