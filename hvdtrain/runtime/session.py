"""A rank's part in the job, from the first message between the ranks to the shutdown of Horovod."""

import importlib.util
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import IN_ONE_PROCESS, OF_TF_DISTRIBUTE, WITH_REPLICAS, RuntimeConfig
from hvdtrain.runtime.agreement import agree, installed_versions
from hvdtrain.runtime.control import ControlChannel, open_control
from hvdtrain.runtime.devices import DevicePlan, configure_tensorflow, place_process
from hvdtrain.runtime.environment import Environment, detect_environment
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.quiet import import_tensorflow_quietly, start_up_chatter_hidden
from hvdtrain.runtime.strategies import OpenStrategy, open_strategy, prepare_devices
from hvdtrain.runtime.tuning import ALONE, set_exchange_defaults
from hvdtrain.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import Collectives

EXIT_TIMEOUT_S = 60.0


@dataclass
class Link:
    """What connects a rank to the others before TensorFlow is there."""

    environment: Environment
    control: ControlChannel
    watchdog: Watchdog

    def close(self) -> None:
        """Stop watching and release the channel."""
        self.watchdog.stop()
        self.control.close()


def open_link(*, timeout: float) -> Link:
    """Find out who started this process and reach the other ranks, within `timeout` seconds."""
    set_exchange_defaults(os.environ)
    environment = detect_environment(os.environ)
    control = open_control(environment, timeout=timeout)
    watchdog = Watchdog(control)
    watchdog.start()
    return Link(environment, control, watchdog)


@dataclass
class Session:
    """The running job as one rank sees it."""

    link: Link
    mesh: Mesh
    plan: DevicePlan
    collectives: "Collectives | None" = field(default=None)
    """None where Horovod does not run."""
    strategy: OpenStrategy | None = None
    """None where tf.distribute does not take part."""

    @property
    def environment(self) -> Environment:
        """Who started this process, and where it stands."""
        return self.link.environment

    @property
    def control(self) -> ControlChannel:
        """The channel to the other ranks that works without TensorFlow."""
        return self.link.control

    def close(self) -> None:
        """Wait for all ranks, then shut Horovod down: the first to leave would end it for everybody."""
        if self.collectives is not None:
            self.control.barrier(EXIT_TIMEOUT_S)
            import horovod.tensorflow as hvd

            hvd.shutdown()
        elif self.strategy is not None:
            # The server that each worker of a strategy runs ends with its process.
            self.control.barrier(EXIT_TIMEOUT_S)
        self.link.close()


def wants_horovod(config: RuntimeConfig, environment: Environment) -> bool:
    """Resolve `--backend`: by itself it is horovod under a launcher and single elsewhere."""
    if config.backend in IN_ONE_PROCESS and environment.size > 1:
        more = " and --replicas N" if config.backend in WITH_REPLICAS else ""
        raise LaunchError(
            f"--backend {config.backend} trains in one process, but {environment.launcher} started "
            f"{environment.size}: each would train a model of its own. Use --backend horovod, or start one process"
            f"{more}."
        )
    wanted = config.backend == "horovod" or (config.backend == "auto" and environment.launcher != "none")
    if wanted and importlib.util.find_spec("horovod") is None:
        raise LaunchError(
            "Horovod is not installed in this environment, and more than one process needs it. "
            "launch/setup.sh builds it against the installed TensorFlow."
        )
    return wanted


def _start_horovod(environment: Environment) -> "Collectives":
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise LaunchError(
            f"Horovod does not load with the installed TensorFlow ({error}). launch/setup.sh builds it anew; "
            "python -m hvdtrain doctor shows what does not fit."
        ) from error
    if environment.launcher == "none":
        os.environ.update(ALONE)
    hvd.init()
    if (hvd.rank(), hvd.size()) != (environment.rank, environment.size):
        raise LaunchError(
            f"{environment.launcher} says rank {environment.rank} of {environment.size}, Horovod says rank "
            f"{hvd.rank()} of {hvd.size()}. Horovod was probably built without the controller of this launcher; "
            "python -m hvdtrain doctor shows which it has."
        )
    from hvdtrain.runtime.collectives import Collectives

    return Collectives("dp", hvd.rank(), hvd.size())


def open_session(link: Link, config: RuntimeConfig, facts: Mapping[str, str] | None = None) -> Session:
    """Agree with the other ranks, take this rank's cores, start TensorFlow and Horovod.

    Args:
        link: the open connection between the ranks.
        config: options of processes and threads.
        facts: what must be the same on all ranks besides the installed versions, by name.

    Raises:
        LaunchError: the ranks differ, one is missing, or Horovod is not usable.
    """
    environment, timeout = link.environment, config.start_timeout
    agree(link.control, {**installed_versions(), **(facts or {})}, timeout=timeout)
    with_horovod = wants_horovod(config, environment)
    plan = place_process(link.control, environment, config, timeout=timeout)
    import_tensorflow_quietly()
    strategy = _start_tensorflow(link, config, plan)
    collectives = _start_horovod(environment) if with_horovod else None
    return Session(link, Mesh.data_parallel(environment.rank, environment.size), plan, collectives, strategy)


def _start_tensorflow(link: Link, config: RuntimeConfig, plan: DevicePlan) -> OpenStrategy | None:
    """Set up TensorFlow's threads and devices, and make the strategy of a backend of tf.distribute."""
    environment = link.environment
    try:
        with start_up_chatter_hidden():
            prepare_devices(config)
            configure_tensorflow(plan, environment, all_gpus=config.backend in WITH_REPLICAS)
    except RuntimeError as error:
        warnings.warn(
            f"TensorFlow was in use before hvdtrain.init(): its threads stay as they are ({error}).",
            stacklevel=3,
        )
    import tensorflow as tf

    with start_up_chatter_hidden():
        strategy = None
        if config.backend in OF_TF_DISTRIBUTE:
            strategy = open_strategy(config, environment, link.control, timeout=config.start_timeout)
        tf.config.list_logical_devices()  # creates the context, with what was set above
    return strategy


class _Current:
    """Horovod is one per process, and so is the session: the one piece of state that belongs to a module."""

    session: Session | None = None


def set_current(session: Session | None) -> None:
    """Make `session` the process's own; None forgets it."""
    _Current.session = session


def has_session() -> bool:
    """Whether the process has started a session."""
    return _Current.session is not None


def current() -> Session:
    """Return the process's session.

    Raises:
        LaunchError: none was started.
    """
    if _Current.session is None:
        raise LaunchError("There is no session yet: call hvdtrain.init() first.")
    return _Current.session
