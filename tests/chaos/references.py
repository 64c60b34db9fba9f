"""Trainings that nothing strikes, with which those of the rounds are compared."""

import fcntl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.jobs import Job
from tests.chaos.places import Place
from tests.chaos.rounds import Round
from tests.chaos.trainings import TRAININGS

TIMEOUT_S = 240.0
"""No launch takes longer, on a busy machine and with a hang that is found after 5 s."""


class References:
    """Final parameters of trainings that nothing struck; each is trained once by all processes that share a folder.

    Two ranks add the same two numbers under either controller, so that one training stands for both. More may add in
    another order: they have one for each world.

    Args:
        folder: where the parameters are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def parameters(self, of: Round, without: Sequence[int] | None = None) -> str:
        """Return the final parameters for a round's training and world.

        Args:
            of: the round.
            without: the first and the last step that the training leaves out.
        """
        world = of.world.replace(":", "-") if of.size > 2 else str(of.size)
        kept = self._folder / "-".join(map(str, [of.form, world, *(without or [])]))
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(_train(of, [] if without is None else ["without", *map(str, without)]))
        return kept.read_text()


def _train(of: Round, words: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        training = TRAININGS[of.form](Path(folder))
        controller = "mpirun" if of.controller == "mpirun" else "gloo"
        command = [*Place().launcher(controller, of.size), *training.words(words)]
        with Job(command, training.cwd) as job:
            code, text = job.wait(TIMEOUT_S), job.text
        found = training.parameters(text) if code == 0 else ""
    if not found:
        raise RuntimeError(f"A training that nothing struck ended with code {code}:\n{text[-4000:]}")
    return found
