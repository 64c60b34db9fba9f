"""Checkpoints that are written while training goes on: a step waits only for the copy to the host's memory.

One checkpoint is written at a time: who saves again waits for the one before (`finish`). What goes wrong in the
background is raised there, on all ranks alike.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.checkpoint.agreement import TIMEOUT_S, is_split, on_every_rank
from hvdtrain.checkpoint.checkpointer import Checkpointer, Unwritten
from hvdtrain.config.errors import CheckpointError, LaunchError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.state.train_state import TrainState

_KEY = "checkpoint"
_LOOKS_A_SECOND = 500
"""At the status board, by the primary alone: over the store of horovodrun each look asks once for every rank."""
_PATIENCE_S = 5.0
"""Where training fails, a checkpoint that is nearly there is waited for; a longer one is given up with the job."""


class BackgroundSaver:
    """Saves a training state in the background; every rank calls it after the same steps.

    Args:
        files: writes the checkpoints.
        board: the channel over which ranks that hold slices say that theirs are on disk, past its ordered exchange,
            which is the training's.
        before: called with the state before it is copied.
    """

    def __init__(
        self, files: Checkpointer, board: ControlChannel, before: Callable[[TrainState], object] = lambda state: None
    ) -> None:
        self.files = files
        self._board = board
        self._before = before
        self._writing: _Writing | None = None

    def __call__(self, state: TrainState) -> None:
        """Copy the state, and begin to write it.

        Raises:
            CheckpointError: the folder cannot be written, or what was being written could not; the same on all ranks.
        """
        self.finish()
        self._before(state)
        tensors = state.saved_tensors()
        ranks = self.files.ranks
        whole = not is_split(ranks) and all(tensor.replicated for tensor in tensors.values())
        if not whole and self._board.size != ranks.job_size:
            self.files.save_state(state)  # no board on which the ranks could agree
            return
        unwritten = self.files.copy(state.scalars.step, tensors, asdict(state.scalars))
        self._writing = _Writing(unwritten, None if whole else self._board)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there, if there is one.

        Raises:
            CheckpointError: it could not be written; the same on all ranks.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            on_every_rank(self.files.ranks, writing.result)

    def close(self) -> None:
        """Wait for some seconds for what is being written, where training fails; called by each rank for itself."""
        if self._writing is not None:
            self._writing.abandon(_PATIENCE_S)


class _Writing:
    """A checkpoint that a thread writes.

    Args:
        unwritten: the copy of what this rank owns, and where it goes.
        board: where the ranks report what they have written; None where the primary writes everything.
    """

    def __init__(self, unwritten: Unwritten, board: ControlChannel | None) -> None:
        self._unwritten = unwritten
        self._board = board
        self._error: BaseException | None = None
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-checkpoint", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for the thread, and raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self, patience: float) -> None:
        """Wait for so many seconds, and no more for other ranks."""
        self._abandoned.set()
        self._thread.join(patience)

    def _run(self) -> None:
        unwritten = self._unwritten
        try:
            with unwritten.told_as_its_failure():
                name = self._written_here()
                names = [name] if self._board is None else self._written_by_all(self._board)
                if unwritten.primary:
                    unwritten.commit(names)
        except BaseException as error:  # raised by `result`, in the thread that trains
            self._error = error
            unwritten.give_up()

    def _written_here(self) -> str | None:
        """Write what this rank owns, and tell the others so, or that it failed."""
        try:
            name = self._unwritten.write()
        except Exception as error:
            self._report(error=str(error))
            raise
        self._report(name=name)
        return name

    def _report(self, name: str | None = None, error: str | None = None) -> None:
        if self._board is not None:
            self._board.post(_KEY, json.dumps([self._unwritten.token, name, error]).encode())

    def _written_by_all(self, board: ControlChannel) -> Sequence[str | None]:
        """Return, on the primary, the name of each rank's file, None where it owns nothing.

        Raises:
            CheckpointError: a rank could not write its own, or is gone.
        """
        if not self._unwritten.primary:
            return []
        pause, deadline = max(0.02, board.size / _LOOKS_A_SECOND), time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not self._abandoned.is_set() and not board.failures():
            found = self._reports(board)
            for rank, (_, error) in found.items():
                if error is not None:
                    raise CheckpointError(f"rank {rank}: {error}")
            if len(found) == board.size:
                return [found[rank][0] for rank in sorted(found)]
            self._abandoned.wait(pause)
        raise CheckpointError("other ranks have not written theirs.")

    def _reports(self, board: ControlChannel) -> dict[int, tuple[Any, Any]]:
        """Return by rank what was reported of this checkpoint."""
        try:
            posts = {rank: json.loads(text) for rank, text in board.read(_KEY).items()}
        except LaunchError:
            return {}
        return {rank: (name, error) for rank, (token, name, error) in posts.items() if token == self._unwritten.token}
