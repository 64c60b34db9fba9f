"""Short names for what a build depends on."""

import hashlib
import os
import subprocess
from collections.abc import Sequence


def short_hash(content: bytes) -> str:
    """Return twelve hexadecimal digits that identify `content`."""
    return hashlib.sha256(content).hexdigest()[:12]


def output_of(command: Sequence[str], **environ: str) -> bytes:
    """Return all that `command` prints, whatever its exit code; nothing if there is no such command."""
    try:
        return subprocess.run(
            command,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        ).stdout
    except OSError:
        return b""
