"""A rank's part in the job, from the first message between the ranks to the shutdown of Horovod."""

import importlib.util
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.compat import warn_of_untested_keras
from hvdtrain.config.errors import ConfigError, LaunchError, opt
from hvdtrain.config.parallel import REST, parse_axes
from hvdtrain.config.runtime import IN_ONE_PROCESS, OF_TF_DISTRIBUTE, WITH_REPLICAS, RuntimeConfig
from hvdtrain.runtime.broken_links import exchange_places
from hvdtrain.runtime.control.agreement import agree, installed_versions
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.devices import (
    DevicePlan,
    agree_on_gpu,
    choose_deterministic_operations,
    configure_tensorflow,
    place_process,
    visible_gpus,
)
from hvdtrain.runtime.hierarchy_choice import choose_hierarchy, resolve_hierarchy
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.leaving import leave_together
from hvdtrain.runtime.link import Link, open_link
from hvdtrain.runtime.malloc import choose_malloc
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.startup import end_iterators_at_once, import_tensorflow
from hvdtrain.runtime.strategies import OpenStrategy, open_strategy, prepare_devices, roles_of
from hvdtrain.runtime.tuning import FUSION_THRESHOLD, fuse_nothing, lose_silent_ranks, outlast_hangs
from hvdtrain.runtime.world import World, open_world


@dataclass(kw_only=True)
class Session:
    """The running job as one rank sees it."""

    link: Link
    world: World
    plan: DevicePlan
    strategy: OpenStrategy | None = None
    """None where tf.distribute does not take part."""
    config: RuntimeConfig = field(default_factory=RuntimeConfig)
    """The options it was opened with."""
    arguments: Mapping[str, Any] | None = None
    """Those of `hvdtrain.init`; None where the command line opened it."""
    malloc: str = ""
    """The memory allocator, in a line."""
    closed: bool = False
    """Whether this rank has left the job."""
    exchanges: bool = False
    """Whether a tape, optimizer or collective has asked for the ranks, as code of `Model.fit` may have."""

    @property
    def environment(self) -> Environment:
        """Launcher and place of this process."""
        return self.link.environment

    @property
    def control(self) -> ControlChannel:
        """The channel to the other ranks that work as this one does, without TensorFlow; one that leads has none."""
        led = self.strategy is not None and self.strategy.roles is not None
        return ControlChannel() if led else self.link.control

    @property
    def elastic(self) -> bool:
        """Whether ranks may be lost and others come, where what trains allows for it."""
        return self.link.worlds is not None

    @property
    def serves(self) -> bool:
        """Whether this rank does what another asks for: there is nothing left for it but to close."""
        return self.strategy is not None and self.strategy.server is not None

    def gather(self, payload: bytes, timeout: float | None, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Return the `payload` of each of `ranks`, in their order; every rank of the job must call it.

        Args:
            payload: this rank's.
            timeout: seconds to wait for the other ranks; None: as long as they may take to load their data.
            ranks: whose payloads are wanted; None: those of all.

        Raises:
            LaunchError: a rank did not come in time; it is named.
        """
        if self.control.size == 1:
            return [payload]
        try:
            everyone = self.control.exchange(payload, timeout=self.config.load_timeout if timeout is None else timeout)
        except LaunchError as error:
            if timeout is not None:
                raise
            advice = f"Ranks that load their data for longer need more {opt('load_timeout')}."
            raise LaunchError(f"{error.message} {advice}") from error
        return everyone if ranks is None else [everyone[rank] for rank in ranks]

    def close(self) -> None:
        """Wait for all ranks, then shut Horovod down: the first to leave would end it for everybody.

        A rank that serves waits, for as long as it may take, until the one that leads is done.

        Raises:
            LaunchError: a rank did not come; it is named.
        """
        if self.world.collectives:
            leave_together(self.link.control)
            if self.link.worlds is not None:
                self.link.worlds.over = True
            self.link.stop_threads()
            self.world.close()  # Horovod writes the rest of its timeline
        elif self.strategy is not None:
            # The server that each worker of a strategy runs ends with its process.
            waits = {"patience": math.inf, "notice": math.inf} if self.serves else {}
            leave_together(self.link.control, **waits)
        if self.link.trace is not None:
            self.link.trace.finish(self.link.control)
        self.link.close()
        self.closed = True


def wants_horovod(config: RuntimeConfig, environment: Environment) -> bool:
    """Resolve `--backend`: by itself it is horovod under a launcher and single elsewhere."""
    if config.backend in IN_ONE_PROCESS and environment.size > 1:
        more = f" and {opt('replicas', 'N')}" if config.backend in WITH_REPLICAS else ""
        raise LaunchError(
            f"{opt('backend', config.backend)} trains in one process, but {environment.launcher} started "
            f"{environment.size}: each would train a model of its own. Use {opt('backend', 'horovod')}, or start one "
            f"process{more}."
        )
    wanted = config.backend == "horovod" or (config.backend == "auto" and environment.launcher != "none")
    if wanted and importlib.util.find_spec("horovod") is None:
        raise LaunchError(
            "Horovod is not installed in this environment, and more than one process needs it. "
            "Run: python -m hvdtrain setup"
        )
    return wanted


def check_parallel(config: RuntimeConfig, environment: Environment, *, with_horovod: bool) -> None:
    """Refuse a layout on a mesh that this job cannot have.

    Raises:
        ConfigError: an elastic job, whose number of ranks changes, or one without Horovod.
        LaunchError: the number of ranks does not fit.
    """
    axes = parse_axes(config.parallel)
    alone = (1, REST) if environment.size == 1 else (1,)
    others = {axis: size for axis, size in axes.items() if axis != "dp" and size not in alone}
    if others and environment.elastic:
        raise ConfigError(
            f"{opt('parallel')} needs ranks that stay, and those of an elastic job come and go: leave it out, or start "
            f"a job of a fixed number of ranks. Received: {config.parallel}."
        )
    if others and not with_horovod:
        chosen = config.backend != RuntimeConfig.backend
        without = f", and leave out {opt('backend', config.backend)}" if chosen else ""
        raise ConfigError(
            f"{opt('parallel')} needs Horovod to carry what the ranks exchange: start as many ranks as its axes have "
            f"with horovodrun or mpirun{without}; or let one process have all of the model with {opt('parallel')} "
            f"dp=-1. Received: {config.parallel}"
            + ("." if environment.launcher == "none" else f", started by {environment.launcher}.")
        )
    Mesh.of(axes, environment.rank, environment.size)


def open_session(link: Link, config: RuntimeConfig, facts: Mapping[str, str] | None = None) -> Session:
    """Agree with the other ranks, take this rank's cores, start TensorFlow and Horovod.

    `facts` must be the same on all ranks, besides the installed versions.

    Raises:
        LaunchError: the ranks differ, one is missing, `--parallel` does not fit them, or Horovod is not usable.
    """
    environment, timeout = link.environment, config.start_timeout
    with_horovod = wants_horovod(config, environment)
    check_parallel(config, environment, with_horovod=with_horovod)
    if config.deterministic and with_horovod:
        fuse_nothing(os.environ)
    hierarchy = resolve_hierarchy(config, environment, os.environ)
    shared = {
        "timeline": repr(link.trace and link.trace.config),
        "hierarchical_allreduce": hierarchy,
        **installed_versions(),
        # Ranks that cut messages in other ways wait for ever, or add up wrongly.
        "deterministic": str(config.deterministic),
        FUSION_THRESHOLD: os.environ.get(FUSION_THRESHOLD, "its default"),
        **(facts or {}),
    }
    agree(link.control, shared, timeout=timeout)
    if config.backend == "parameter_server":
        roles_of(config, environment)  # too few ranks are told so before TensorFlow is loaded
    plan = place_process(link.control, environment, config, timeout=timeout)
    malloc = choose_malloc(config.malloc)
    warn_of_untested_keras()
    import_tensorflow()
    gpus = visible_gpus(environment.hostname)
    gpu = agree_on_gpu(link.control, environment, gpus, mixed=not with_horovod, timeout=timeout)
    late = _configure_tensorflow(link, config, plan, gpu)
    all_late = all(gather(link.control, late is not None, timeout=timeout))
    if late is not None and (environment.rank == 0 or not all_late):
        warnings.warn(
            f"TensorFlow was in use before hvdtrain.init(): its threads stay as they are ({late}).",
            stacklevel=3,  # the caller of init
        )
    strategy = _start_tensorflow(link, config, plan)
    places = exchange_places(link.control, environment, timeout=timeout)
    hosts = [place.host for place in places]
    limit_silence = lose_silent_ranks if environment.elastic else outlast_hangs
    limit_silence(os.environ, config.hang_timeout)
    if link.trace is not None:
        link.trace.prepare(environment, world=1 if link.worlds is None else link.worlds.entered)
    world = open_world(
        link.control,
        environment,
        hosts,
        axes=parse_axes(config.parallel),
        horovod=with_horovod,
        by_host=hierarchy != "never",
        communicator=link.communicator,
    )
    if world.engine is not None:
        link.watch_engine(world.engine)
    if link.trace is not None:
        link.trace.begin(link.control)
    link.watch_for_hangs(config)
    link.watch_other_hosts(places, config.link_timeout)
    if with_horovod:
        link.watch_for_stragglers()
    world = choose_hierarchy(world, hierarchy, link.control, timeout)
    return Session(
        link=link,
        world=world,
        plan=plan,
        strategy=strategy,
        config=config,
        malloc=malloc,
    )


def join_next_world(session: Session) -> Session:
    """Open the session of an elastic job's next world, after `session`, and make it the process's own.

    Raises:
        LaunchError: as `open_session`.
    """
    config, before = session.config, session.link
    link = open_link(timeout=config.start_timeout, policy=before.policy, worlds=before.worlds)
    link.record_to(before.trace)
    try:
        following = open_session(link, config)
    except BaseException:
        link.close()
        raise
    following.arguments = session.arguments
    set_current(following)
    return following


def _configure_tensorflow(link: Link, config: RuntimeConfig, plan: DevicePlan, gpu: int | None) -> RuntimeError | None:
    """Set up TensorFlow's threads and devices; return the error if it was in use before."""
    if link.rejoined:
        return None  # TensorFlow has the threads and devices of an earlier world
    try:
        prepare_devices(config)
        # A model in a process of its own may have its halves on several.
        configure_tensorflow(plan, gpu, all_gpus=config.backend in WITH_REPLICAS or link.environment.size == 1)
        if config.deterministic:
            choose_deterministic_operations()
    except RuntimeError as error:
        return error
    return None


def _start_tensorflow(link: Link, config: RuntimeConfig, plan: DevicePlan) -> OpenStrategy | None:
    """Start TensorFlow as it is configured, and make the strategy of a backend of tf.distribute."""
    if link.rejoined:
        return None
    import tensorflow as tf

    end_iterators_at_once(tf.config.threading.get_inter_op_parallelism_threads() or len(plan.cores))
    strategy = None
    if config.backend in OF_TF_DISTRIBUTE:
        strategy = open_strategy(config, link.environment, link.control, timeout=config.start_timeout)
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
