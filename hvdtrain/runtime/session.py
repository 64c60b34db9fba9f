"""A rank's part in the job, from the first message between the ranks to the shutdown of Horovod."""

import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import IN_ONE_PROCESS, OF_TF_DISTRIBUTE, WITH_REPLICAS, RuntimeConfig
from hvdtrain.runtime.control.agreement import agree, installed_versions
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.control.local import LocalChannel
from hvdtrain.runtime.control.open import open_control
from hvdtrain.runtime.devices import DevicePlan, configure_tensorflow, place_process
from hvdtrain.runtime.failures import FailFast, FailurePolicy
from hvdtrain.runtime.launchers import Environment, detect_environment
from hvdtrain.runtime.leaving import leave_together
from hvdtrain.runtime.quiet import import_tensorflow_quietly, start_up_chatter_hidden
from hvdtrain.runtime.roles import roles_of
from hvdtrain.runtime.strategies import OpenStrategy, open_strategy, prepare_devices
from hvdtrain.runtime.tuning import set_exchange_defaults
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.runtime.world import World, open_world

INTERRUPTED = "interrupted"


@dataclass
class Link:
    """What connects a rank to the others before TensorFlow is there."""

    environment: Environment
    control: ControlChannel
    watchdog: Watchdog
    policy: FailurePolicy = field(default_factory=FailFast)
    generation: int = 0
    """How many times the job has formed anew."""
    on_interrupt: Callable[[], str] = lambda: INTERRUPTED
    """Returns what the user is told at Ctrl-C; a run that can go on says how."""

    def fail(self, error: BaseException) -> int:
        """Act on `error`, with which this rank fails, and return the exit code to leave with, if it returns."""
        return self.policy.fail(self.control, self.environment, error)

    def close(self) -> None:
        """Stop watching and release the channel."""
        self.watchdog.stop()
        self.control.close()


def open_link(
    *, timeout: float, generation: int = 0, restartable: bool = False, policy: FailurePolicy | None = None
) -> Link:
    """Find out who started this process and reach the other ranks.

    Args:
        timeout: seconds to wait for them.
        generation: how many times the job has formed anew.
        restartable: whether another generation may follow in this process.
        policy: what follows from the failure of a rank; by default the end of the job.

    Raises:
        LaunchError: ranks are missing, or cannot be reached.
    """
    set_exchange_defaults(os.environ, restartable=restartable)
    environment = detect_environment(os.environ)
    control = open_control(environment, timeout=timeout, generation=generation)
    policy = policy or FailFast()
    watchdog = Watchdog(control, policy)
    watchdog.start()
    return Link(environment, control, watchdog, policy, generation)


@dataclass
class Session:
    """The running job as one rank sees it."""

    link: Link
    world: World
    plan: DevicePlan
    strategy: OpenStrategy | None = None
    """None where tf.distribute does not take part."""
    load_timeout: float = RuntimeConfig.load_timeout
    """Seconds to wait for ranks that still load their data."""

    @property
    def environment(self) -> Environment:
        """Who started this process, and where it stands."""
        return self.link.environment

    @property
    def control(self) -> ControlChannel:
        """The channel to the other ranks that work as this one does, without TensorFlow; one that leads has none."""
        led = self.strategy is not None and self.strategy.roles is not None
        return LocalChannel() if led else self.link.control

    @property
    def serves(self) -> bool:
        """Whether this rank does what another asks for: there is nothing left for it but to close."""
        return self.strategy is not None and self.strategy.server is not None

    def gather(self, payload: bytes, timeout: float | None, axis: str = "dp") -> list[bytes]:
        """Return the `payload` of each rank along `axis`, in its order; every rank of the job must call it.

        Args:
            payload: this rank's.
            timeout: seconds to wait for the other ranks; None: as long as they may take to load their data.
            axis: an axis of the mesh.

        Raises:
            LaunchError: a rank did not come in time; it is named.
        """
        members = self.world.mesh.ranks_along(axis)
        if self.control.size == 1:
            return [payload]
        try:
            everyone = self.control.exchange(payload, timeout=self.load_timeout if timeout is None else timeout)
        except LaunchError as error:
            if timeout is not None:
                raise
            advice = "Ranks that load their data for longer need more --load-timeout."
            raise LaunchError(f"{error.message} {advice}") from error
        return [everyone[rank] for rank in members]

    def close(self, *, remark: str = "") -> None:
        """Wait for all ranks, then shut Horovod down: the first to leave would end it for everybody.

        A rank that serves waits, for as long as it may take, until the one that leads is done.

        Args:
            remark: what this rank adds where it says for whom it waits.

        Raises:
            LaunchError: a rank did not come; it is named.
        """
        if self.world.collectives:
            leave_together(self.link.control, remark=remark)
            self.world.close()
        elif self.strategy is not None:
            # The server that each worker of a strategy runs ends with its process.
            waits = {"patience": math.inf, "notice": math.inf} if self.serves else {}
            leave_together(self.link.control, remark=remark, **waits)
        self.link.close()


def wants_horovod(config: RuntimeConfig, environment: Environment) -> bool:
    """Resolve `--backend`: by itself it is horovod under a launcher and single elsewhere."""
    if config.backend in IN_ONE_PROCESS and environment.size > 1:
        more = " and --replicas=N" if config.backend in WITH_REPLICAS else ""
        raise LaunchError(
            f"--backend={config.backend} trains in one process, but {environment.launcher} started "
            f"{environment.size}: each would train a model of its own. Use --backend=horovod, or start one process"
            f"{more}."
        )
    wanted = config.backend == "horovod" or (config.backend == "auto" and environment.launcher != "none")
    if wanted and importlib.util.find_spec("horovod") is None:
        raise LaunchError(
            "Horovod is not installed in this environment, and more than one process needs it. "
            "Run: python -m hvdtrain setup"
        )
    return wanted


def open_session(
    link: Link, config: RuntimeConfig, facts: Mapping[str, str] | None = None, *, axes: Mapping[str, int] | None = None
) -> Session:
    """Agree with the other ranks, take this rank's cores, start TensorFlow and Horovod.

    Args:
        link: the open connection between the ranks.
        config: options of processes and threads.
        facts: what must be the same on all ranks besides the installed versions, by name.
        axes: sizes of the mesh's axes besides `dp`, by name.

    Raises:
        LaunchError: the ranks differ, one is missing, the axes do not fit them, or Horovod is not usable.
    """
    environment, timeout = link.environment, config.start_timeout
    agree(link.control, {**installed_versions(), **(facts or {})}, timeout=timeout)
    with_horovod = wants_horovod(config, environment)
    if config.backend == "parameter_server":
        roles_of(config, environment)  # too few ranks are told so before TensorFlow is loaded
    plan = place_process(link.control, environment, config, timeout=timeout)
    import_tensorflow_quietly()
    strategy = _start_tensorflow(link, config, plan)
    hosts = [host.decode() for host in link.control.exchange(environment.hostname.encode(), timeout=timeout)]
    world = open_world(
        link.control,
        environment,
        hosts,
        axes=axes,
        generation=link.generation,
        horovod=with_horovod,
        timeout=timeout,
    )
    return Session(link, world, plan, strategy, config.load_timeout)


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
