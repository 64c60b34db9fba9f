"""How a rank knows the store of its job, before it sends the token: the store signs a number that the rank draws.

Somebody else may listen on the port. What he is sent is of no use to him, and what he answers does not pass.
"""

import hmac
import json
import re

_PATH = re.compile(r"/hello/([0-9a-f]{32})")
STATE = ("rendezvous", "state")
"""Scope and key of the store under which rank 0 notes that all ranks have come."""
COMPLETE = b"complete"


def path_of(nonce: str) -> str:
    """Return the path under which the store signs `nonce`, 32 hexadecimal digits."""
    return f"/hello/{nonce}"


def nonce_of(path: str) -> str | None:
    """Return what is to be signed for a request of `path`; None if it is another request."""
    match = _PATH.fullmatch(path)
    return match[1] if match else None


def answer(key: bytes, port: int, nonce: str) -> bytes:
    """Return the signed answer of the store that listens on `port`: it does not pass for that of another port."""
    return hmac.digest(key, json.dumps(["hello", port, nonce]).encode(), "sha256").hex().encode()


def is_answer(text: bytes, key: bytes, port: int, nonce: str) -> bool:
    """Tell whether the store of this job has answered."""
    return hmac.compare_digest(text, answer(key, port, nonce))
