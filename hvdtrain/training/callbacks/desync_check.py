"""Detect diverged ranks between steps.

In a split model, ranks with the same shard are compared. Exempt are floating-point variables that layers update in the
forward pass, such as BatchNorm's moving averages: they depend on each rank's samples and are averaged before every
evaluation and save. So is everything under a rule whose weights agree only between averages
(`UpdateRule.weights_agree`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import DesyncError, opt
from hvdtrain.state.hashes import Holders, TensorHashes
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.base import EVERY_STEP, Callback, StepEnd
from hvdtrain.training.update_rules.base import UpdateRule

NAMED = 3
"""Variables named in an error."""


class DesyncCheck(Callback):
    """Compares a hash of the state across ranks. Collective.

    Checks at a fixed interval, at the ends of epochs, and after steps 1, 2, 4, 8 … of a training: divergence starts at
    the first step, or at some later time. One check reads the state once and exchanges 8 bytes per rank and group of
    ranks with the same shard, and as many for gradient deviations.

    Args:
        rule: whether the replicas' weights agree.
        first_step: completed steps before the training.
        every: steps between two checks; 0: never.
    """

    when = EVERY_STEP

    def __init__(self, backend: Backend, state: TrainState, rule: UpdateRule, first_step: int, every: int) -> None:
        self._backend = backend
        self._state = state
        self._holders: Holders | None = None
        self._rule = rule
        self._first = first_step
        self._seen = first_step
        """Step after which the ranks were compared last; before the first one all were given rank 0's state."""
        self._every = every
        # Replicas within a process, and workers of a parameter server, share their variables.
        shared = max(backend.processes, backend.job_size) == 1 or backend.capabilities.asynchronous
        self.needed = every > 0 and rule.weights_agree and not shared
        self._hashes = TensorHashes()
        self._gather: Callable[[tf.Tensor], tf.Tensor] = compiled(
            lambda mine: backend.run(lambda: backend.everyone.all_gather(mine, name="desync/checksum"))
        )

    def after_step(self, step: StepEnd) -> None:
        """Check after `step`, if due. Raises DesyncError naming the variables and the ranks that differ."""
        if self._due(step):
            self.look(f"step {step.number}")
            self._seen = step.number

    def before_save(self, step: StepEnd, *, callbacks: bool) -> None:
        """Check after `step` unless it was: no checkpoint holds what was not compared.

        Raises DesyncError. At the end of an epoch `callbacks` may have changed the state since.
        """
        if self.needed and (step.number != self._seen or (callbacks and step.ends_epoch)):
            self.look(f"step {step.number}")

    def _due(self, step: StepEnd) -> bool:
        taken = step.number - self._first
        early = taken < self._every and taken.bit_length() > (taken - step.steps).bit_length()
        return early or step.ends_epoch or step.passes(self._every)

    def look(self, where: str) -> None:
        """Compare the ranks now; `where` names the step. Raises DesyncError naming variables and ranks. Collective."""
        tensors = self._state.compared_tensors()
        if self._holders is None:
            self._holders = Holders(self._backend, tensors)
        tensors = self._holders.shared(tensors)
        hashes = dict(zip(tensors, self._hashes([tensor.value for tensor in tensors.values()]).tolist(), strict=True))
        apart = self._rule.diverging_gradients()
        mine = np.append(self._holders.sums(hashes), np.int64(bool(apart)))
        every = self._gather(tf.constant(mine[np.newaxis])).numpy()
        if self._holders.differing(every[:, :-1]) is not None:
            differing, usual = _minorities(self._holders.hashes_of_all(hashes))
            threads = gather(self._backend, tf.config.threading.get_intra_op_parallelism_threads())
            raise DesyncError(_message(where, differing, usual, threads))
        if every[:, -1].any():
            raise DesyncError(_message_of_gradients(where, self._most_apart(apart)))

    def _most_apart(self, mine: Mapping[str, float]) -> dict[str, float]:
        """Return the deviations of all ranks by path, largest first. Collective."""
        found: dict[str, float] = {}
        for theirs in gather(self._backend, mine):
            for path, deviation in theirs.items():
                found[path] = max(deviation, found.get(path, 0.0))
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _minorities(hashes: Mapping[str, list[dict[int, int]]]) -> tuple[dict[str, list[int]], int]:
    """Return by path the deviating ranks, and one of the majority."""
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


def _message(where: str, differing: Mapping[str, list[int]], usual: int, threads: Sequence[int]) -> str:
    rates = [path for path in differing if path.endswith("learning_rate")]
    names = _named([*rates, *(path for path in differing if path not in rates)])
    ranks = sorted({rank for ranks in differing.values() for rank in ranks})
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}{more}"
    received = (
        f"After {where} every rank must hold the same weights and optimizer state. Received: on {which} "
        f"other values than on rank {usual} of {names}."
    )
    if rates:
        received += " A callback that sets a learning rate must be on every rank, and set it alike."
    if len(rates) == len(differing):
        return received
    return (
        f"{received} Something changes them by a rank's own samples or random numbers: a train_step, layer or callback "
        "that assigns to them, such as a queue of features, or a part of the model that is trained past its "
        "optimizers. Assign the same on every rank, from the weights or from hvdtrain.allgather(features); let a layer "
        "count statistics of samples, which are averaged; keep what is each rank's own in a tf.Variable, which is not "
        f"a weight of the model. {_other_causes(threads)}"
    )


def _other_causes(threads: Sequence[int]) -> str:
    fewest, most = min(threads), max(threads)
    if fewest == most:
        return "Where nothing does, a machine may have faulty memory."
    return (
        f"Or ranks round differently: rank {threads.index(fewest)} computes with {fewest} threads and rank "
        f"{threads.index(most)} with {most}, and an optimizer that sums over whole weights, as Lamb, Adafactor, Muon "
        f"and clipnorm do, needs {opt('threads')} the same on all."
    )


def _message_of_gradients(where: str, deviations: Mapping[str, float]) -> str:
    return (
        f"After {where} ranks that hold slices of the same layers (tp in {opt('parallel')}) must have computed the "
        "same gradients of what each of them holds whole, but for rounding. Received: gradients that differ by "
        f"{max(deviations.values()):.1%} of the norm of all of them, of {_named(list(deviations))}. These ranks see "
        "the same samples: a layer draws its own numbers on each rank, as by NumPy in a tf.numpy_function, or depends "
        "on the rank. Draw by a keras.random.SeedGenerator that is an attribute of the layer."
    )


def _named(paths: Sequence[str]) -> str:
    return ", ".join(paths[:NAMED]) + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")
