"""Messages that are not signed with the job's secret.

Over a store that anybody may reach, others can write such messages, also in the place of a rank's own. They are passed
over, as if they had not come, and a rank whose message is missing sends it again. Those that keep coming are from a
rank with another secret.
"""

import time
from collections.abc import Sequence

from hvdtrain.config.errors import LaunchError

PATIENCE_S = 3.0
"""Messages of a rank that are wrongly signed for so long are its own: it has another secret."""
APART_S = 2.5
"""Wrongly signed messages further apart have nothing to do with one another."""


class Refusals:
    """What to do about wrongly signed messages during one exchange.

    Args:
        rank: this process's rank. Rank 0 gives up first, while the others still send their messages again.
        others_may_write: whether processes that are no ranks may have written them; if not, none is passed over.
    """

    def __init__(self, rank: int, others_may_write: bool) -> None:
        patience = PATIENCE_S if rank == 0 else PATIENCE_S + 1.0
        self._patience = patience if others_may_write else 0.0
        self._seen: dict[int, tuple[float, float]] = {}
        self._last: dict[int, LaunchError] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def note(self, sender: int, error: LaunchError) -> None:
        """Note a message of `sender`, and raise `error` where they have been coming for too long."""
        now = time.monotonic()
        first, last = self._seen.get(sender, (now, now))
        first = now if now - last > APART_S else first
        self._seen[sender], self._last[sender] = (first, now), error
        if now - first >= self._patience:
            raise error

    def of(self, senders: Sequence[int]) -> LaunchError | None:
        """Return the error of one of `senders`, if any sent such a message."""
        return next((self._last[sender] for sender in senders if sender in self._last), None)
