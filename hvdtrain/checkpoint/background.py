"""Write checkpoints in a background thread: a training step waits only for the copy to host memory.

One checkpoint is written at a time: the next save waits for it (`finish`), and raises its error on all ranks.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hvdtrain.checkpoint.agreement import TIMEOUT_S, is_split, on_every_rank
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.pending import PendingCheckpoint
from hvdtrain.config.errors import CheckpointError, LaunchError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.state.train_state import TrainState

_KEY = "checkpoint"
_LOOKS_A_SECOND = 500
"""The primary's reads of the status board: over horovodrun's store each one is a request per rank."""
_PATIENCE_S = 5.0
"""Time for a pending checkpoint to finish after training has failed."""


class BackgroundSaver:
    """Saves a training state in the background. Collective.

    Args:
        files: writes the checkpoints.
        board: the channel on whose status board ranks with slices report theirs on disk; its ordered exchange is the
            training's.
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
        """Copy the state, and start writing it.

        Raises:
            CheckpointError: the folder cannot be written, or the checkpoint before failed; the same on all ranks.
        """
        self.finish()
        self._before(state)
        tensors = state.saved_tensors()
        ranks = self.files.ranks
        whole = not is_split(ranks) and all(tensor.replicated for tensor in tensors.values())
        if not whole and self._board.size != ranks.job_size:
            self.files.save_state(state)  # no board on which the ranks could agree
            return
        pending = self.files.copy(state.scalars.step, tensors, asdict(state.scalars))
        self._writing = _Writing(pending, None if whole else self._board)

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one. Collective.

        Raises:
            CheckpointError: it failed; the same on all ranks.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            on_every_rank(self.files.ranks, writing.result)

    def close(self) -> None:
        """Wait a few seconds for the pending checkpoint when training ends; each rank for itself."""
        if self._writing is not None:
            self._writing.abandon(_PATIENCE_S)


class _Writing:
    """The thread that writes a checkpoint.

    Args:
        pending: the copied slices of this rank, and their folder.
        board: where the ranks report their files; None if the primary writes everything.
    """

    def __init__(self, pending: PendingCheckpoint, board: ControlChannel | None) -> None:
        self._pending = pending
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
        """Stop waiting for other ranks, and wait `patience` seconds for the thread."""
        self._abandoned.set()
        self._thread.join(patience)

    def _run(self) -> None:
        pending = self._pending
        try:
            with pending.naming_failures():
                name = self._written_here()
                names = [name] if self._board is None else self._written_by_all(self._board)
                if pending.primary:
                    pending.commit(names)
        except BaseException as error:  # raised by `result`, in the thread that trains
            self._error = error
            pending.give_up()

    def _written_here(self) -> str | None:
        """Write this rank's file, and report it or the error."""
        try:
            name = self._pending.write()
        except Exception as error:
            self._report(error=str(error))
            raise
        self._report(name=name)
        return name

    def _report(self, name: str | None = None, error: str | None = None) -> None:
        if self._board is not None:
            self._board.post(_KEY, json.dumps([self._pending.token, name, error]).encode())

    def _written_by_all(self, board: ControlChannel) -> Sequence[str | None]:
        """Return, on the primary, the name of each rank's file, or None where a rank owns nothing.

        Raises:
            CheckpointError: a rank failed to write its file, or is gone.
        """
        if not self._pending.primary:
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
        """Return the reports about this checkpoint, by rank."""
        try:
            posts = {rank: json.loads(text) for rank, text in board.read(_KEY).items()}
        except LaunchError:
            return {}
        return {rank: (name, error) for rank, (token, name, error) in posts.items() if token == self._pending.token}
