"""The end of a job: ranks leave together, and whoever is done first waits for the others."""

import time
from collections.abc import Sequence

from hvdtrain.runtime.control.channel import ControlChannel, name_ranks
from hvdtrain.runtime.logs import LOGGER

PATIENCE_S = 3600.0
"""A rank that saves a large model to a slow disk is still at work; one that fails or is gone ends the job at once."""

NOTICE_S = 60.0


def leave_together(
    control: ControlChannel, *, patience: float = PATIENCE_S, notice: float = NOTICE_S, remark: str = ""
) -> None:
    """Wait for all ranks.

    Args:
        control: the channel to them.
        patience: seconds to wait.
        notice: seconds after which one of those that wait says for whom, and again after twice as many.
        remark: what this rank adds to that.

    Raises:
        LaunchError: a rank did not come; it is named.
    """
    control.barrier(patience, on_wait=_Notice(control, notice, remark))


class _Notice:
    """Says for whom is being waited; on the lowest rank that waits."""

    def __init__(self, control: ControlChannel, seconds: float, remark: str) -> None:
        self._control = control
        self._remark = remark
        self._begin = time.monotonic()
        self._seconds = seconds

    def __call__(self, missing: Sequence[int]) -> None:
        waited = time.monotonic() - self._begin
        if waited < self._seconds:
            return
        self._seconds *= 2
        if self._control.rank == min(set(range(self._control.size)) - set(missing), default=0):
            LOGGER.warning(
                f"rank {self._control.rank} is done and has waited {waited:.0f} s for {name_ranks(missing)}: "
                f"still at work, or in an exchange that needs a rank which is done. {self._remark}".rstrip()
            )
