"""Elastic training: resume from a committed state in host memory in each new world."""

import json
import os
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import ConfigError, LaunchError, opt
from hvdtrain.config.training import PACED, UpdateConfig
from hvdtrain.observability.wording import plural
from hvdtrain.runtime.control.agreement import check_same_call, encode_call
from hvdtrain.runtime.elastic import HostsChangedError
from hvdtrain.runtime.placement import box_shape
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.survivors import Survivors
from hvdtrain.runtime.tracing.trace import TIMELINE
from hvdtrain.state.named_tensors import NamedTensor, elements
from hvdtrain.state.train_state import TrainState

NO_COMMIT = -1
ASYNCHRONOUS = tuple(PACED.split("|"))
"""Update rules whose ranks wait for one another at meetings alone."""
MOST_IN_VAIN = 10
"""Worlds without a new commit after which the job ends."""


@dataclass(frozen=True)
class Commit:
    """A full training state in host memory."""

    scalars: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    held_weights: Mapping[str, np.ndarray]
    """Weights held by callbacks, as in `TrainState`."""

    @classmethod
    def of(cls, state: TrainState, backend: Backend) -> "Commit":
        """Copy `state`, also what only one of the ranks holds. Collective."""
        tensors, divided = {}, {}
        for path, tensor in state.named_tensors().items():
            if tensor.replicated:
                tensors[path] = np.array(tensor.value.numpy())
            else:
                divided[path] = tensor
        tensors |= _of_holders(divided, backend)
        return cls(deepcopy(asdict(state.scalars)), tensors, dict(state.held_weights))

    @property
    def step(self) -> int:
        """Completed steps."""
        return int(self.scalars["step"])

    def restore(self, state: TrainState) -> None:
        """Restore `state` to this commit."""
        for path, tensor in state.named_tensors().items():
            if tensor.replicated or _holds(tensor):
                tensor.value.assign(np.reshape(self.tensors[path], tensor.value.shape))
        state.restore(deepcopy(dict(self.scalars)))
        state.held_weights = dict(self.held_weights)


@dataclass(frozen=True)
class WorldRecord:
    """One world of an elastic training, as listed in `summary.json`."""

    step: int
    """Completed steps at its start."""
    ranks: int
    seconds_to_first_step: float | None = None
    """From the last step begun in the previous world to the end of this one's first step; None in the first world."""


class Commits:
    """State that a process keeps across the worlds of an elastic training."""

    def __init__(self) -> None:
        self.settled: Any = None
        """Values fixed in the first world, such as the run folder; None before."""
        self.worlds: list[WorldRecord] = []
        """Worlds so far."""
        self.goes_on = False
        """Whether this world is not the first."""
        self._newest: Commit | None = None
        self._steps_here = 0
        self._last_began: float | None = None
        self._interrupted: float | None = None
        """Start of the last step of the previous world; None in this process's first one."""

    def agree(self, call: str, session: Session) -> Any:
        """Return the values fixed in the first world; None in the first. Collective, before all else.

        Raises ConfigError for ranks that make another call than `call`.
        """
        mine = encode_call(call, {}) + b"\n" + json.dumps(self.settled).encode()
        everyone = session.control.exchange(mine, timeout=session.config.load_timeout)
        check_same_call(everyone, call)
        told = [json.loads(theirs.partition(b"\n")[2]) for theirs in everyone]
        self.settled = next((settled for settled in told if settled is not None), None)
        self.goes_on = self.settled is not None
        return self.settled

    def keep(self, state: TrainState, backend: Backend) -> None:
        """Replace the commit by `state`. Collective."""
        self._newest = Commit.of(state, backend)

    def of_any(self, backend: Backend) -> bool:
        """Return whether any rank has a commit to go on with. Collective."""
        return any(gather(backend, self._newest is not None, timeout=None))

    def restore(self, state: TrainState, backend: Backend) -> bool:
        """Restore the newest commit of any rank on all ranks; return whether there is one. Collective.

        Ranks may differ by one commit: a rank may be lost while others commit.
        """
        step = NO_COMMIT if self._newest is None else self._newest.step
        mine = [
            step,
            [asdict(world) for world in self.worlds],
            None if self._newest is None else _shapes(self._newest.held_weights),
        ]
        everyone = gather(backend, mine, timeout=None)
        steps = [theirs[0] for theirs in everyone]
        newest, root = max(steps), steps.index(max(steps))
        if newest == NO_COMMIT:
            return False
        if self._newest is not None and step == newest:
            self._newest.restore(state)
        state.broadcast(backend, root=root)
        state.held_weights = _broadcast_arrays(state.held_weights, everyone[root][2], backend, root)
        worlds = [WorldRecord(**world) for world in everyone[root][1]]
        self.worlds = [world for world in worlds if world.step <= newest]
        if [world.step for world in self.worlds[-MOST_IN_VAIN:]] == MOST_IN_VAIN * [newest]:
            raise LaunchError(
                f"Each of {MOST_IN_VAIN} worlds in a row has lost a rank before it got further than step {newest}: "
                f"look for the reason on the hosts, or use a smaller {opt('commit_every')}."
            )
        return True

    def begin(self, state: TrainState, backend: Backend) -> str | None:
        """Commit the initial state of a world; return a message, None in the first."""
        before = self.worlds[-1].ranks if self.worlds else None
        self.worlds.append(WorldRecord(state.scalars.step, backend.size))
        self._interrupted, self._steps_here = self._last_began, 0
        self.keep(state, backend)
        if before is None:
            return None
        return (
            f"elastic: {plural(before, 'rank')} before, {backend.size} now: goes on after step {state.scalars.step:,}"
        )

    def note_step(self) -> None:
        """Record the start of a step; the second one determines the first one's latency."""
        self._last_began, self._steps_here = time.monotonic(), self._steps_here + 1
        if self._steps_here == 2 and self._interrupted is not None:
            seconds = round(self._last_began - self._interrupted, 2)
            self.worlds[-1] = replace(self.worlds[-1], seconds_to_first_step=seconds)


class HostsCheck:
    """Ends the world after the same step when hosts change. Collective."""

    def __init__(self, session: Session, backend: Backend) -> None:
        self._worlds = session.link.worlds
        self._gather = tf.function(
            lambda mine: backend.run(lambda value: backend.all_gather(value, name="elastic/hosts"), mine),
            autograph=False,
        )

    def __call__(self) -> None:
        """Check for changed hosts. Raises HostsChangedError if the launcher has notified one of the ranks."""
        changed = self._worlds is not None and self._worlds.hosts_changed
        if self._gather(tf.constant([int(changed)])).numpy().any():
            raise HostsChangedError("The hosts of the job have changed.")


def check_goes_on(session: Session, options: UpdateConfig) -> None:
    """Reject elastic training by an update rule that cannot go on under this launcher (ConfigError)."""
    apart = options.update in ASYNCHRONOUS
    if options.local_steps and not apart:
        raise ConfigError(
            f"{opt('local_steps', options.local_steps)} does not go with {opt('elastic')}: between two averages ranks "
            f"have weights of their own. Leave out one of them, or use {opt('update', 'gossip')} or easgd."
        )
    if not session.elastic and apart:
        raise ConfigError(
            f"{opt('elastic')} with {opt('update', options.update)} needs a launcher that leaves the others alone "
            f"where a rank is lost: mpirun --enable-recovery, of Open MPI 4. Received: {_launcher(session)}."
        )
    if not session.elastic:
        raise ConfigError(
            f"{opt('elastic')} needs a launcher that replaces ranks: horovodrun with a host discovery script. "
            f"Received: {_launcher(session)}. Elsewhere restart the job from its newest checkpoint, on any "
            "number of ranks."
        )
    if isinstance(session.link.worlds, Survivors) and not apart:
        raise ConfigError(
            f"{opt('elastic')} over MPI needs ranks that train apart: {opt('update', 'async')}, gossip or easgd. In an "
            "all-reduce MPI waits for a lost rank for ever: use horovodrun --gloo with a host discovery script."
        )
    if isinstance(session.link.worlds, Survivors) and TIMELINE in os.environ:
        raise ConfigError(
            f"A trace of Horovod does not go with {opt('elastic')} over MPI, where Horovod runs at meetings alone: "
            "leave out one of them."
        )


def _holds(tensor: NamedTensor) -> bool:
    return elements(box_shape(tensor.slice)) > 0


def _of_holders(tensors: Mapping[str, NamedTensor], backend: Backend) -> dict[str, np.ndarray]:
    """Return the values of tensors that one rank each holds as a whole. Collective."""
    held = gather(backend, [path for path, tensor in tensors.items() if _holds(tensor)], among="replicas")
    found: dict[str, np.ndarray] = {}
    for holder, paths in enumerate(held):
        copies = {}
        for path in paths:
            value, shape = tensors[path].value, tensors[path].global_shape
            mine = tf.reshape(value, shape) if holder == backend.index else tf.zeros(shape, value.dtype)
            copies[path] = tf.Variable(mine, trainable=False)
        backend.broadcast({f"commit/{path}": copy for path, copy in copies.items()}, root=holder)
        found |= {path: copy.numpy() for path, copy in copies.items()}
    return found


def _launcher(session: Session) -> str:
    launcher = session.environment.launcher
    return "no launcher" if launcher == "none" else f"{launcher} with a fixed number of ranks"


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {path: [str(array.dtype), list(array.shape)] for path, array in arrays.items()}


def _broadcast_arrays(
    mine: Mapping[str, np.ndarray], shapes: Mapping[str, Any], backend: Backend, root: int
) -> dict[str, np.ndarray]:
    """Broadcast arrays of known dtypes and shapes from rank `root`. Collective."""
    if not shapes:
        return {}
    empty = {path: np.zeros(shape, dtype) for path, (dtype, shape) in shapes.items()}
    variables = {
        path: tf.Variable(mine[path] if backend.index == root else array, trainable=False)
        for path, array in empty.items()
    }
    backend.broadcast({f"held/{path}": variable for path, variable in variables.items()}, root=root)
    return {path: variable.numpy() for path, variable in variables.items()}
