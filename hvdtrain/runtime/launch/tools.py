"""The programs of this machine that start ranks."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PATIENCE_S = 20.0


class Tools:
    """The programs on PATH, and those beside this Python, whose environment need not be activated.

    Args:
        environ: environment variables.
        python: the interpreter; None: this one.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, python: str | None = None) -> None:
        self._environ = environ
        python = python or sys.executable
        self._folder = str(Path(python).parent)
        self.python = "python" if self._on_path("python") == python else python
        """How this Python is called in a shell."""
        self.absolute_python = python
        """How it is called on another host."""

    def find(self, name: str) -> str | None:
        """Return how a program is called: by its name if it is on PATH, else by its path; None if it is not there."""
        if self._on_path(name):
            return name
        return shutil.which(name, path=self._folder)

    def output(self, words: Sequence[str]) -> str:
        """Return what a command prints on both streams; "" if it cannot be run."""
        try:
            done = subprocess.run(
                words,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PATIENCE_S,
                check=False,
                text=True,
                errors="replace",
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout

    def _on_path(self, name: str) -> str | None:
        return shutil.which(name, path=self._environ.get("PATH", os.defpath))
