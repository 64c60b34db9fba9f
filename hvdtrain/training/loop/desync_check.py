"""Whether ranks that hold the same state still do, looked at between steps.

Where ranks have split the model, those are compared that hold the same slice. What is exempt, and why: the
floating-point variables that layers count themselves in their forward pass, such as BatchNorm's moving averages, follow
the samples of each rank, and are averaged before every evaluation and save. Exempt is also everything under a rule
whose weights agree only between two averages (`UpdateRule.weights_agree`).
"""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import DesyncError
from hvdtrain.state.hashes import TensorHashes
from hvdtrain.state.holders import Holders
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.hooks import StepEnd
from hvdtrain.training.update_rules.base import UpdateRule

NAMED = 3
"""Variables that an error names."""


class DesyncCheck:
    """Compares a hash of everything that must be equal; every rank calls it after the same steps.

    It looks every so many steps, at the ends of epochs, and after steps 1, 2, 4, 8 … of a training: what drifts does so
    from the first step on, or some time. A look reads the state once and exchanges 8 bytes per rank and group of ranks
    that hold the same.

    Args:
        backend: the replicas.
        state: what is trained.
        rule: whether the replicas' weights agree.
        first_step: number of finished steps before the training.
        every: steps between two looks; 0 never looks.
    """

    def __init__(self, backend: Backend, state: TrainState, rule: UpdateRule, first_step: int, every: int) -> None:
        self._backend = backend
        self._state = state
        self._holders: Holders | None = None
        self._first = first_step
        self._every = every
        # Replicas within a process, and workers of a parameter server, share their variables.
        shared = max(backend.processes, backend.job_size) == 1 or backend.capabilities.asynchronous
        self.needed = every > 0 and rule.weights_agree and not shared
        self._hashes = TensorHashes()
        self._gather: Callable[[tf.Tensor], tf.Tensor] = tf.function(
            lambda mine: backend.run(lambda: backend.everyone.all_gather(mine, name="desync/checksum")), autograph=False
        )

    def __call__(self, step: StepEnd) -> None:
        """Look after `step`, if it is due.

        Raises:
            DesyncError: naming the variables and the ranks that differ.
        """
        if self._due(step):
            self.look(f"step {step.number}")

    def _due(self, step: StepEnd) -> bool:
        taken = step.number - self._first
        early = taken < self._every and not taken & (taken - 1)
        return early or step.ends_epoch or step.number % self._every == 0

    def look(self, where: str) -> None:
        """Compare the ranks now; `where` names the step in the error.

        Raises:
            DesyncError: naming the variables and the ranks that differ.
        """
        tensors = self._state.compared_tensors()
        if self._holders is None:
            self._holders = Holders(self._backend, tensors)
        tensors = self._holders.shared(tensors)
        hashes = dict(zip(tensors, self._hashes([tensor.value for tensor in tensors.values()]).tolist(), strict=True))
        sums = self._gather(tf.constant(self._holders.sums(hashes)[np.newaxis])).numpy()
        if self._holders.differing(sums) is not None:
            raise DesyncError(_message(where, *_minorities(self._holders.hashes_of_all(hashes))))


def _minorities(hashes: Mapping[str, list[dict[int, int]]]) -> tuple[dict[str, list[int]], int]:
    """Return, by path, the ranks that hold other values than most that should hold the same, and one of the latter."""
    differing: dict[str, list[int]] = {}
    usual = []
    for path, groups in hashes.items():
        for group in groups:
            most = Counter(group.values()).most_common(1)[0][0]  # of two equally large parts that of the lower rank
            others = [rank for rank, value in group.items() if value != most]
            if others:
                differing.setdefault(path, []).extend(others)
                usual.append(next(rank for rank, value in group.items() if value == most))
    return differing, usual[0]


def _message(where: str, differing: Mapping[str, list[int]], usual: int) -> str:
    names = ", ".join(list(differing)[:NAMED]) + (
        f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    )
    ranks = sorted({rank for ranks in differing.values() for rank in ranks})
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}{more}"
    return (
        f"After {where} every rank must hold the same weights and optimizer state. Received: on {which} "
        f"other values than on rank {usual} of {names}. Something changes them by a rank's own samples or draws: a "
        "train_step, layer or callback that assigns to them, such as a queue of features, or a part of the model that "
        "is trained past its optimizers. Assign the same on every rank, from the weights or from "
        "hvdtrain.horovod.allgather(features); let a layer count statistics of samples, which are averaged; keep what "
        "is each rank's own in a tf.Variable, which is no weight of the model. Where nothing does, a machine may have "
        "faulty memory."
    )
