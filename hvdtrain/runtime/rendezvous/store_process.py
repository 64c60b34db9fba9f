"""Rank 0's side of the store: the process that serves it."""

import contextlib
import json
import os
import subprocess
import sys

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.rendezvous.settings import HOST, PORT, Settings

_START_S = 60.0


class StoreProcess:
    """A process beside this one that keeps the job's store; it ends with this one at the latest."""

    def __init__(self, address: str, settings: Settings) -> None:
        """Start it, and wait until it listens.

        Args:
            address: where it is to listen; "" for all addresses.
            settings: of the meeting.

        Raises:
            LaunchError: it cannot listen there.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.runtime.rendezvous.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._owner = os.getpid()
        order = {
            "address": address,
            "ports": settings.ports,
            "token": settings.token,
            "key": settings.key.hex(),
        }
        self.port = self._order(json.dumps(order), address, settings)

    def end(self) -> None:
        """End it, if it is a child of this process; to call once more is fine."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()

    def _order(self, order: str, address: str, settings: Settings) -> int:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or b"{}")
        if "port" in said:
            return int(said["port"])
        self.end()
        ports = ", ".join(map(str, settings.ports))
        raise LaunchError(
            f"Rank 0 cannot open the store of the job on {address or 'any address'}, port {ports}: "
            f"{said.get('error', 'its process has ended')}. {PORT}=FIRST-LAST gives it ports to choose from, {HOST} "
            "the name or address of rank 0's host."
        )
