"""Whether all ranks still hold the same state, looked at between steps.

What is exempt, and why: the floating-point variables that layers count themselves in their forward pass, such as
BatchNorm's moving averages, follow the samples of each rank, and are averaged before every evaluation and save. Exempt
are also slices of tensors that a rule shards, of which every rank has its own, and everything under a rule whose
weights agree only between two averages (`UpdateRule.weights_agree`).
"""

from collections.abc import Callable, Mapping

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import DesyncError
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.same_weights import checksum
from hvdtrain.training.loop.hooks import StepEnd
from hvdtrain.training.update_rules.base import UpdateRule

NAMED = 3
"""Variables that an error names."""
TIMEOUT_S = 600.0


class DesyncCheck:
    """Compares a checksum of everything that must be equal; every rank calls it after the same steps.

    It looks after steps 1, 2, 4, 8 … of a training and at the ends of epochs: what drifts does so from the first step
    on, or some time. A look reads the state once and exchanges 8 bytes per rank.

    Args:
        backend: the replicas.
        state: what is trained.
        rule: whether the replicas' weights agree.
        first_step: number of finished steps before the training.
    """

    def __init__(self, backend: Backend, state: TrainState, rule: UpdateRule, first_step: int) -> None:
        self._backend = backend
        self._state = state
        self._first = first_step
        # Replicas within a process, and workers of a parameter server, share their variables.
        self.needed = rule.weights_agree and backend.processes > 1 and not backend.capabilities.asynchronous
        self._gather: Callable[[tf.Tensor], tf.Tensor] = tf.function(
            lambda mine: backend.run(lambda: backend.all_gather(mine, name="desync/checksum")), autograph=False
        )

    def __call__(self, step: StepEnd) -> None:
        """Look after `step`, if it is due.

        Raises:
            DesyncError: naming the variables and the ranks that differ.
        """
        taken = step.number - self._first
        if not step.ends_epoch and taken & (taken - 1):
            return
        tensors = self._state.equal_tensors()
        sums = self._gather(tf.constant([checksum(tensors)], tf.int64)).numpy()
        if (sums != sums[0]).any():
            self._refuse(step, tensors)

    def _refuse(self, step: StepEnd, tensors: Mapping[str, tf.Variable]) -> None:
        mine = b"".join(checksum({path: tensor}).to_bytes(4, "big") for path, tensor in tensors.items())
        everyone = self._backend.gather_bytes(mine, timeout=TIMEOUT_S)
        differing: dict[str, list[int]] = {}
        for place, path in enumerate(tensors):
            parts = [theirs[4 * place : 4 * place + 4] for theirs in everyone]
            ranks = [rank for rank, part in enumerate(parts) if part != parts[0]]
            if ranks:
                differing[path] = ranks
        raise DesyncError(_message(step, differing))


def _message(step: StepEnd, differing: Mapping[str, list[int]]) -> str:
    names = ", ".join(list(differing)[:NAMED]) + (
        f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    )
    ranks = sorted({rank for ranks in differing.values() for rank in ranks})
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
    return (
        f"After step {step.number} every rank must hold the same weights and optimizer state. Received: on {which} "
        f"other values than on rank 0 of {names}. Something changes them by a rank's own samples or draws: a "
        "train_step, layer or callback that assigns to them, such as a queue of features, or a part of the model that "
        "is trained past its optimizers. Assign the same on every rank, from the weights or from "
        "hvdtrain.horovod.allgather(features); let a layer count statistics of samples, which are averaged; keep what "
        "is each rank's own in a tf.Variable, which is no weight of the model."
    )
