"""How ranks other than 0 find the store of their job."""

import contextlib
import http.client
import secrets
import time
from dataclasses import dataclass, field

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.rendezvous.hello import is_answer, path_of
from hvdtrain.runtime.rendezvous.network import resolve
from hvdtrain.runtime.rendezvous.settings import HOST, PORT, TIMEOUT, Settings

_CALL_S = 2.0
_LONGEST_PAUSE_S = 0.5
_MOST_BYTES = 100


@dataclass
class Caller:
    """Looks for the store on one host."""

    host: str
    settings: Settings
    _seen: str = field(default="it was not asked", init=False)
    """What became of the latest attempt, for the user."""

    def find(self) -> tuple[str, int]:
        """Return the address and the port of the store, once it is there.

        Raises:
            LaunchError: it was not found in time.
        """
        deadline, pause = time.monotonic() + self.settings.timeout, 0.02
        while True:
            found = self._look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise LaunchError(self._advice())
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _look(self) -> tuple[str, int] | None:
        try:
            address = resolve(self.host)
        except OSError:
            self._seen = f"the name {self.host} has no IPv4 address"
            return None
        answered, failed = [], []
        for port in self.settings.ports:
            try:
                why_not = self._ask(address, port)
            except (OSError, http.client.HTTPException) as error:
                failed.append(f"{address}:{port} {str(error) or type(error).__name__}")
                continue
            if why_not is None:
                return address, port
            answered.append(f"{why_not} on {address}:{port}")
        self._seen = (answered + failed)[0]
        return None

    def _ask(self, address: str, port: int) -> str | None:
        """Return None if the store of this job answers, and else who does."""
        nonce = secrets.token_hex(16)
        with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_CALL_S)) as connection:
            connection.request("GET", path_of(nonce))
            response = connection.getresponse()
            body = response.read(_MOST_BYTES)
        if response.status == http.client.OK and is_answer(body, self.settings.key, port, nonce):
            return None
        if response.status == http.client.CONFLICT:
            return "all ranks have come already, and this is one more, or of a later start of the job,"
        return "another program answers, or a job with another secret,"

    def _advice(self) -> str:
        return (
            f"Rank 0 was not found on {self.host} within {self.settings.timeout:g} s, at port "
            f"{', '.join(map(str, self.settings.ports))} (last: {self._seen}). If rank 0 has failed, its own message "
            f"says why; {TIMEOUT}=SECONDS waits longer for one that starts late. {HOST} says by which name or address "
            f"the other hosts reach that of rank 0, {PORT}=FIRST-LAST which ports a firewall lets through."
        )
