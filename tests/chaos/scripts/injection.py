"""What strikes a training from within, on one rank at one step."""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

import hvdtrain

REACHED = Path("reached")
"""File with the last step that the rank to be struck has begun."""
STRUCK = Path("struck")
"""File with the time at which it was struck."""
_LOOKS_AT_HOSTS_S = 0.25
"""What a step takes while horovodrun has yet to see that the hosts have changed."""


class Chaos(Exception):
    """The exception of a round."""


@dataclass(frozen=True)
class Strike:
    """A fault of one rank, so many seconds after a step has begun where it is a signal."""

    name: str
    rank: int
    step: int
    delay: float
    factor: Any = None
    """Variable by which the loss is multiplied."""

    @classmethod
    def of(cls, words: list[str], factor: Any = None) -> "Strike | None":
        """Return what the arguments of a script say; None where there are none."""
        return cls(words[0], int(words[1]), int(words[2]), float(words[3]), factor) if words else None

    def strike(self) -> None:
        """Do it, and note when."""
        if self.name.startswith("SIG"):
            threading.Thread(target=self._signal, daemon=True).start()
        elif self.name == "exception":
            self._note()
            raise Chaos(f"on rank {self.rank} at step {self.step}")
        elif self.name == "sys.exit":
            self._note()
            sys.exit(3)
        elif self.name == "os._exit":
            self._note()
            os._exit(3)
        elif self.name.startswith("inf"):
            self._note()
            self.factor.assign(float("inf"))

    def _signal(self) -> None:
        time.sleep(self.delay)
        self._note()
        os.kill(os.getpid(), signal.Signals[self.name])

    def _note(self) -> None:
        STRUCK.write_text(f"{time.time()}")


class AtStep(keras.callbacks.Callback):
    """Strikes once, as a step begins, and notes the steps that were reached."""

    def __init__(self, strike: Strike, steps_per_epoch: int) -> None:
        super().__init__()
        self._strike = strike
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._here = hvdtrain.rank() == strike.rank
        self._size = hvdtrain.size()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        step = self._epoch * self._steps_per_epoch + batch + 1
        if self._strike.name.startswith("host-") and step >= self._strike.step and hvdtrain.size() == self._size:
            time.sleep(_LOOKS_AT_HOSTS_S)
        if not self._here:
            return
        REACHED.write_text(str(step))
        if step == self._strike.step and not STRUCK.exists():
            self._strike.strike()

    def on_train_batch_end(self, batch, logs=None):
        if self._here and self._strike.name.startswith("inf"):
            self._strike.factor.assign(1.0)
