"""Small files of a run, as the first rank sees them: the hosts of a job need not share a folder."""

import base64
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path


class FilesRead:
    """Reads files, and remembers what was in them.

    Args:
        given: what the first rank has found in files; None for one that is not there. They are not read here.
    """

    def __init__(self, given: Mapping[str, bytes | None] | None = None) -> None:
        self._given = dict(given or {})
        self.contents: dict[str, bytes | None] = {}
        """Of the files read so far, by path; None for one that is not there."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        content = self._given[str(path)] if str(path) in self._given else _content(path)
        self.contents[str(path)] = content
        if content is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return content

    def text(self, path: Path) -> str:
        """Return the content of a file as text.

        Raises:
            OSError: as `read`.
            UnicodeDecodeError: it is not UTF-8.
        """
        return self.read(path).decode("utf-8")

    def exists(self, path: Path) -> bool:
        """Whether there is a file at `path` that can be read."""
        try:
            self.read(path)
        except OSError:
            return False
        return True

    def encode(self) -> bytes:
        """Return the files read so far, for `decoded` on another rank."""
        coded = {path: _coded(content) for path, content in self.contents.items()}
        return json.dumps(coded, sort_keys=True).encode()


def decoded(message: bytes) -> dict[str, bytes | None]:
    """Return what another rank has read, from what its `FilesRead.encode` returned."""
    return {path: None if text is None else base64.b64decode(text) for path, text in json.loads(message).items()}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _coded(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()
