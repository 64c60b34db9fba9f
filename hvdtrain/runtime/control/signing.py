"""Signed messages between the ranks of a job, and the secret they are signed with.

A message is bytes with an HMAC-SHA256 in front. It is never evaluated, and unpickled only where a script sends objects
of its own (`runtime/objects.py`), after its MAC is checked. It is not encrypted: nothing secret belongs into one.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers import SECRET_FILE_VARIABLE, SECRET_VARIABLE

_MAC_BYTES = hashlib.sha256().digest_size
KEY_BYTES = 32
"""Of a random secret."""


class Signer:
    """Signs and checks the messages of one job."""

    def __init__(self, secret: bytes, job_id: str) -> None:
        self._secret = secret
        self._job_id = job_id

    def sign(self, payload: bytes, *, purpose: str, sequence: int, sender: int) -> bytes:
        """Return ``payload`` with its MAC in front."""
        return self._mac(payload, purpose, sequence, sender) + payload

    def open(self, message: bytes, *, purpose: str, sequence: int, sender: int) -> bytes:
        """Return the payload of a message that ``sender`` signed for this job, purpose and sequence number.

        Raises:
            LaunchError: it was changed, replayed, moved, or signed with another secret; names the sender.
        """
        mac, payload = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload, purpose, sequence, sender)):
            raise LaunchError(
                f"Refused a message from rank {sender} ({purpose} {sequence}): it is not signed with this "
                f"rank's secret of the job. Where hosts do not share the home folder, set {SECRET_VARIABLE} "
                "to the same text on every rank. If they do, somebody else writes into this job's messages."
            )
        return payload

    def _mac(self, payload: bytes, purpose: str, sequence: int, sender: int) -> bytes:
        # JSON contains no NUL, so that no two headers and payloads read alike.
        header = json.dumps([self._job_id, purpose, sequence, sender]).encode()
        return hmac.digest(self._secret, header + b"\0" + payload, "sha256")


def secret_from_environment(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret in HVDTRAIN_JOB_SECRET or in the file HVDTRAIN_JOB_SECRET_FILE; None where neither is set.

    Raises:
        LaunchError: the file cannot be read, is empty, belongs to somebody else, or others may read it.
    """
    given, name = environ.get(SECRET_VARIABLE, "").encode(), environ.get(SECRET_FILE_VARIABLE)
    if given or not name:
        return given or None
    path = Path(name)
    try:
        with open(path, "rb") as file:
            _refuse_exposed(path, os.fstat(file.fileno()), "make another secret")
            secret = file.read().strip()
    except OSError as error:
        raise LaunchError(
            f"{SECRET_FILE_VARIABLE} must name a file with the job's secret. Received: {path}, which cannot be read "
            f"({error.strerror or error})."
        ) from error
    if not secret:
        raise LaunchError(f"{SECRET_FILE_VARIABLE} must name a file with the job's secret. Received: {path}, empty.")
    return secret


def secret_from_key_file(job_id: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """Derive the job's secret from this user's key file, which is made where it is missing.

    Ranks on hosts that share the home folder thus agree without a word on the network.

    Raises:
        LaunchError: the file cannot be made or read, belongs to somebody else, or others may read it.
    """
    path = key_file(environ)
    try:
        key = read_key(path) or _create_key(path)
    except OSError as error:
        raise LaunchError(
            f"Cannot keep this user's key in {path} ({error.strerror or error}), with which the ranks sign "
            f"their messages. Set {SECRET_VARIABLE} to the same text on every rank instead."
        ) from error
    return hmac.digest(key, b"hvdtrain job\0" + job_id.encode(), "sha256")


def key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of this user's key file, which need not exist."""
    home = environ.get("HOME") or "~"
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return Path(config).expanduser() / "hvdtrain" / "job.key"


def read_key(path: Path) -> bytes | None:
    """Return the key, or None if there is no file."""
    try:
        with open(path, "rb") as file:
            _refuse_exposed(path, os.fstat(file.fileno()))
            key = file.read()
    except FileNotFoundError:
        return None
    if len(key) != KEY_BYTES:
        raise LaunchError(f"{path} must hold {KEY_BYTES} bytes. Received: {len(key)}. Remove it: a new one is made.")
    return key


def _refuse_exposed(path: Path, status: os.stat_result, cure: str = "remove it, and a new one is made") -> None:
    if status.st_uid != os.geteuid():
        raise LaunchError(f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()}). Remove it.")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{path} can be read or written by others (mode {stat.S_IMODE(status.st_mode):04o}). Others may "
            f"know it: {cure}, or: chmod 600 {path}"
        )


def _create_key(path: Path) -> bytes:
    """Make the key file whole or not at all; the first of several ranks wins, and all return its key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # unlike a rename, never replaces another rank's
    finally:
        draft.unlink()
    key = read_key(path)
    if key is None:
        raise LaunchError(f"{path} vanished while it was being made. Start the job again.")
    return key
