"""The public functions of a user's own script."""

import atexit
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from hvdtrain.config.errors import ConfigError, LaunchError, LoneRanksError
from hvdtrain.config.observability import trace_config
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.runtime import BackendName, CommunicationName, HierarchyName, MallocName, RuntimeConfig
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.exits import UNCLEAR, ExitWatch
from hvdtrain.runtime.failures import show_alone
from hvdtrain.runtime.interrupts import show_interrupt
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import Link, open_link
from hvdtrain.runtime.objects import object_of_root, objects_of_all, wait_for_all
from hvdtrain.runtime.session import Session, current, has_session, new_trace, open_session, set_current
from hvdtrain.runtime.tracing.trace import traced_step

P = ParamSpec("P")
T = TypeVar("T")


def init(
    *,
    backend: BackendName = "auto",
    replicas: int | None = None,
    communication: CommunicationName = "auto",
    parameter_servers: int | None = None,
    threads: int | None = None,
    pin: bool = True,
    malloc: MallocName = "keep",
    start_timeout: float = 120.0,
    load_timeout: float = 3600.0,
    hang_timeout: float = 300.0,
    link_timeout: float = 15.0,
    deterministic: bool = False,
    hierarchical_allreduce: HierarchyName = "auto",
    parallel: str | None = None,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
    timeline: str | PathLike[str] | None = None,
    profile: tuple[int, int] | None = None,
    profile_ranks: Sequence[int] = (),
) -> None:
    """Join the job: call it once, before TensorFlow does any work and before datasets and models are made.

    From here on an exception on one rank, or `sys.exit` with a code other than 0, ends the job, and the ranks leave
    together at the end of the script, where the first to come wait up to an hour for those that are still at work.
    `raise SystemExit(n)` hides its code, and counts as an end like any other: use `sys.exit(n)` for a failure. With
    `backend="parameter_server"` it returns on rank 0 only: the others serve it until its script ends, and end with it.

    Args:
        backend: `horovod`, `single`, a strategy of tf.distribute (`mirrored`, `multi_worker_mirrored`,
            `central_storage`, `one_device`, `tpu`, `parameter_server`), or `auto`: horovod under a launcher, else
            single.
        replicas: replicas in the one process of `mirrored` and `central_storage`; None: every GPU, or 2 parts of the
            CPU.
        communication: what `multi_worker_mirrored` sends over: `ring`, `nccl` or `auto`.
        parameter_servers: ranks of `parameter_server` that hold the parameters, the last ones; None: one.
        threads: threads an operation may use; None divides the cores among the ranks of this machine.
        pin: give each rank its own cores where there are enough.
        malloc: `keep` freed memory in the process for the next step, or `system`: glibc's own settings, which return it
            to the system (docs/performance.md).
        start_timeout: seconds to wait for the other ranks.
        load_timeout: seconds to wait for ranks that still load their data, when they meet in `fit`.
        hang_timeout: seconds after which a job ends whose ranks wait for one another; 0: never (docs/reliability.md).
        link_timeout: seconds without a packet from another host after which the job ends; 0: never.
        deterministic: train to the same bits in every run of the same job, on any number of ranks: messages between
            them are cut in one way, and TensorFlow's operations add up in one order (docs/reliability.md).
        hierarchical_allreduce: sum gradients inside each host first, then between the hosts: `always`, `never`, or
            `auto`: where that is faster by a measurement at the start (docs/performance.md).
        parallel: sizes of the axes of the mesh that the ranks are laid out on, such as `tp=2,pp=2`
            (docs/parallel.md); None: every rank is a replica of the whole model.
        mesh: the same as a mapping, `{"tp": 2, "pp": 2}`, in place of `parallel`.
        timeline: file to which rank 0 writes one trace of all ranks at the end, with Horovod's exchange
            (docs/clusters.md).
        profile: the first and the last step whose TensorFlow operations are drawn into it: `(10, 12)`; steps of `fit`,
            or those that a loop of your own names by `hvdtrain.trace_step(number)`.
        profile_ranks: ranks whose operations are drawn; all by default.
        seed: seeds Python, NumPy and TensorFlow alike on all ranks, so that datasets shuffle alike.

    Calling it again without arguments, or with the same ones, does nothing.

    Raises:
        LaunchError: the ranks do not fit together, or Horovod is not usable.
        ConfigError: it was called before with other arguments.
    """
    if mesh is not None:
        if parallel is not None:
            raise ConfigError(f"Give init the sizes of the axes once. Received: parallel={parallel!r}, mesh={mesh!r}.")
        parallel = ",".join(f"{axis}={size}" for axis, size in parse_axes(mesh).items())
    arguments = {name: value for name, value in locals().items() if name != "mesh"}
    if has_session():
        _check_same(arguments)
        return
    link: Link | None = None
    try:
        config = RuntimeConfig(
            backend=backend,
            replicas=replicas,
            communication=communication,
            parameter_servers=parameter_servers,
            threads=threads,
            pin=pin,
            malloc=malloc,
            start_timeout=start_timeout,
            load_timeout=load_timeout,
            hang_timeout=hang_timeout,
            link_timeout=link_timeout,
            deterministic=deterministic,
            hierarchical_allreduce=hierarchical_allreduce,
            parallel=parallel,
        )
        path = None if timeline is None else Path(timeline)
        trace = new_trace(trace_config(path, profile, profile_ranks), backend)
        link = open_link(timeout=start_timeout)
        link.record_to(trace)
        session = open_session(link, config)
        session.arguments = arguments
        if session.serves:
            session.close()
    except BaseException as error:
        _fail(link, error)
        raise
    set_current(session)
    if session.serves:
        sys.exit(0)
    import keras

    keras.utils.set_random_seed(seed)
    _end_with_the_job(session)


def _check_same(arguments: Mapping[str, Any]) -> None:
    """Refuse a second `init` that asks for something else than the first.

    Raises:
        ConfigError: naming the arguments.
    """
    defaults = {name: each.default for name, each in inspect.signature(init).parameters.items() if name != "mesh"}
    if _plain(arguments) == _plain(defaults):
        return
    session = current()
    before = vars(session.config) if session.arguments is None else session.arguments
    known = _plain({**defaults, **before})
    other = [
        f"{name}={value!r} (before: {known[name]!r})"
        for name, value in _plain(arguments).items()
        if value != known[name]
    ]
    if other:
        raise ConfigError(
            "hvdtrain.init() was called before, and a process joins its job once. Received other arguments: "
            f"{', '.join(other)}. Give them to the first call, and leave out the second."
        )


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `init` in the form in which they can be compared."""
    timeline, ranks = arguments["timeline"], arguments["profile_ranks"]
    profile = arguments["profile"]
    return {
        **arguments,
        "timeline": None if timeline is None else fspath(timeline),
        "profile": None if profile is None else tuple(profile),
        "profile_ranks": tuple(ranks),
    }


def rank() -> int:
    """Return this process's number among all, from 0."""
    return current().environment.rank


def size() -> int:
    """Return the number of processes."""
    return current().environment.size


def local_rank() -> int:
    """Return this process's number among those on this machine, from 0."""
    return current().environment.local_rank


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Give every rank the values that `root_rank` has in `variables` (Keras 3 variables or tf.Variables)."""
    from hvdtrain.backends.select import backend_for
    from hvdtrain.state.variables import unique_paths, unwrap

    given = list(variables)
    tensors = [unwrap(variable) for variable in given]
    backend_for(current()).broadcast(dict(zip(unique_paths(given), tensors, strict=True)), root=root_rank)


def is_initialized() -> bool:
    """Return whether this process has joined its job by `init`."""
    return has_session()


def barrier(name: str = "", *, timeout: float | None = None) -> None:
    """Wait until every rank has called it: what one rank did before it is done for all after it.

    Args:
        name: of this barrier; ranks that wait at barriers of different names are refused.
        timeout: seconds to wait for the others; None: the `load_timeout` of `init`, an hour by default.

    Raises:
        LaunchError: a rank did not come in time; it is named.
        ConfigError: a rank made another call.
    """
    wait_for_all(current(), name, timeout)


def broadcast_object(obj: Any = None, root_rank: int = 0, *, timeout: float | None = None) -> Any:
    """Return on every rank the object of rank `root_rank`; what the others pass is not looked at.

    Args:
        obj: anything that pickle takes, of up to a GiB; `root_rank` gets back the object itself.
        root_rank: the rank whose object it is, the same on every rank.
        timeout: see `barrier`.

    Raises:
        LaunchError: a rank did not come in time; it is named.
        ConfigError: a rank made another call, or the object cannot be sent; the same on every rank.
    """
    return object_of_root(current(), obj, root_rank, timeout)


def gather_object(obj: Any, *, timeout: float | None = None) -> list[Any]:
    """Return on every rank a list with the object of each rank, in rank order.

    Args:
        obj: anything that pickle takes, of up to a GiB on all ranks together.
        timeout: see `barrier`.

    Raises:
        LaunchError: a rank did not come in time; it is named.
        ConfigError: a rank made another call, or an object cannot be sent; the same on every rank.
    """
    return objects_of_all(current(), obj, timeout)


def trace_step(number: int) -> AbstractContextManager[None]:
    """Return a context for the step `number`, from 1, of a loop of your own, in the trace of the job.

    Without `init(timeline=…)` it does nothing. `fit` needs none: its steps are recorded.
    """
    return traced_step(current().link.trace, number)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function so that only rank 0 runs it; on all other ranks it does nothing and returns None.

    Nothing in it may wait for the other ranks (`fit`, `barrier`, `broadcast_object` …): they would not come.
    """

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if rank() == 0 else None

    return on_rank_zero


def _fail(link: Link | None, error: BaseException) -> None:
    """End the job if it has other ranks; return where this process is alone."""
    try:
        environment = link.environment if link else detect_environment()
    except LoneRanksError:
        end_process(show_alone(None, error))
    if environment.size > 1:
        end_process(link.fail(error) if link else show_alone(environment, error))


def _end_with_the_job(session: Session) -> None:
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _fail(_last(session).link, error)
        atexit.unregister(leave)
        if isinstance(error, KeyboardInterrupt) and show is sys.__excepthook__:
            show_interrupt(trace)
        else:
            show(kind, error, trace)

    exits = ExitWatch()
    if session.environment.size > 1:
        exits.start()
    leave = partial(_leave, session, exits)
    sys.excepthook = on_exception
    atexit.register(leave)


def _last(session: Session) -> Session:
    """Return the session of an elastic job's last world, `session` being that of its first."""
    return current() if has_session() else session


def _leave(session: Session, exits: ExitWatch) -> None:
    """Leave with the other ranks, or end the job where this rank's script left by an exit code.

    An exit whose code cannot be seen ends most scripts well (`raise SystemExit(main())`), so this rank waits for the
    others as long as after any other end: they may still save. If it left them in an exchange instead, it says so while
    it waits, Horovod names it as missing, and the job fails when the wait is over.
    """
    session, left = _last(session), exits.found()
    session.link.activity.exit = exits.described
    if left is not None:
        _fail(session.link, left)
    try:
        session.close(remark=UNCLEAR if exits.unclear else "")
    except LaunchError as error:
        _fail(session.link, error)
        raise
