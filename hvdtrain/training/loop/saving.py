"""Saving between two steps: in the background, and on disks that may be full."""

from collections.abc import Callable
from typing import Any

from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.terminal import say
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.hooks import StepEnd


class Saving:
    """Saves a training; a checkpoint that fails costs a training that goes on no more than that. Every rank calls it.

    Args:
        state: what is trained. Of its best epoch, what was not saved is taken back.
        save: begins to write a checkpoint; raises the same on all ranks.
        finish: waits until it is there, and raises why it is not, the same on all ranks.
        speaks: whether this rank warns.
    """

    def __init__(
        self, state: TrainState, save: Callable[[], object], finish: Callable[[], object], *, speaks: bool
    ) -> None:
        self._state = state
        self._save = save
        self._finish = finish
        self._speaks = speaks
        self._begun = 0
        self._best_before: dict[int, dict[str, Any] | None] = {}

    def finish_earlier(self) -> None:
        """Wait for the checkpoint before, which this one may build on."""
        self._attempt(self._finish, self._begun)

    def save(self, step: StepEnd) -> None:
        """Save `step`; before the end of training, or where all stop, wait until it is there.

        Raises:
            CheckpointError: the end of training is not saved.
        """
        self._begun = step.number
        self._attempt(self._save, step.number, needed=step.last)
        if step.last or step.stops:
            self._attempt(self._finish, step.number, needed=step.last)

    def save_beginning(self, step: int) -> None:
        """Save before the first step, after `step` earlier ones, and wait until it is there.

        Raises:
            CheckpointError: it cannot be saved.
        """
        self._begun = step
        self._attempt(self._save, step, needed=True)
        self._attempt(self._finish, step, needed=True)

    def note_best(self, before: dict[str, Any] | None) -> None:
        """Remember which epoch was the best `before`, if that is another one by now."""
        best = self._state.scalars.best
        if best is not None and best != before:
            self._best_before = {best["step"]: before}

    def _attempt(self, act: Callable[[], object], step: int, *, needed: bool = False) -> None:
        try:
            act()
        except CheckpointError as error:
            if needed:
                raise
            best = self._state.scalars.best
            if best is not None and best["step"] == step:
                self._state.scalars.best = self._best_before.get(step)
            if self._speaks:
                what = str(error).rstrip(".")
                text = f"hvdtrain: warning: {what}. Checkpoints that are there stay, and training goes on."
                say(text)
