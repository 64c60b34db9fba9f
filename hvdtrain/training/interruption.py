"""Signals during `fit` with checkpoints: all ranks save after the same step and exit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import current
from hvdtrain.runtime.stopping import StopAgreement, Stopped
from hvdtrain.state.scalars import Scalars


@contextmanager
def stoppable(checkpoint: Checkpoint | None, scalars: Scalars, total_steps: int) -> Iterator[StopAgreement | None]:
    """Let signals stop the training inside this context; yields None without checkpoints.

    Signals with a handler of the script are left to it. Raises Stopped: after the last step, which is saved; on every
    rank.
    """
    if checkpoint is None:
        yield None
        return
    session, folder = current(), os.fspath(checkpoint.folder)
    link = session.link

    def message() -> str:
        where = f"interrupted at step {scalars.step} of {total_steps}"
        return f"{where}. trainer.resume({folder!r}) before fit resumes from the newest checkpoint in it."

    def failed() -> bool:
        return bool(link.control.failures())

    stopping = link.stoppable(scalars.step, grace=checkpoint.grace_seconds, ranks=session.control.size)
    try:
        with (
            stopping as agreement,
            InterruptWatch(lambda: session.environment, message, failed, stop=link.request_stop),
        ):
            yield agreement
    except Stopped:
        if session.world.primary:
            LOGGER.info(message())
        raise
    if agreement.asked_here is not None:
        os.kill(os.getpid(), agreement.asked_here)  # arrived after the last step: the training is complete and saved
