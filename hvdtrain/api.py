"""Public functions for user scripts."""

import atexit
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial, wraps
from os import PathLike, fspath
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from hvdtrain.config.errors import ConfigError, LaunchError, LoneRanksError, UserError
from hvdtrain.config.observability import traced
from hvdtrain.config.options import check
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.runtime import BackendName, CommunicationName, HierarchyName, MallocName, RuntimeConfig
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.failures import show_alone
from hvdtrain.runtime.interrupts import show_interrupt
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.leaving import ExitWatch
from hvdtrain.runtime.link import Link, open_link
from hvdtrain.runtime.logs import set_up_logging, warn_on_first
from hvdtrain.runtime.objects import object_of_root, objects_of_all, wait_for_all
from hvdtrain.runtime.session import Session, current, has_session, open_session, set_current
from hvdtrain.runtime.tracing.trace import Trace, traced_step

_FACES = ("hvdtrain.horovod", "horovod.keras", "horovod.tensorflow.keras")
"""With one of these a script's optimizer may exchange gradients."""
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
    """Join the job; call once, before TensorFlow is used and before datasets and models are created.

    From here on, an exception on one rank, or `sys.exit` with a nonzero code, ends the job. At the end of the script
    the ranks exit together: the first to arrive wait up to an hour for the others. `raise SystemExit(n)` hides its code
    and counts as a normal end: use `sys.exit(n)` for a failure. With `backend="parameter_server"` it returns on rank 0
    only: the other ranks serve it until its script ends.

    Args:
        backend: `horovod`, `single`, a tf.distribute strategy (`mirrored`, `multi_worker_mirrored`, `central_storage`,
            `one_device`, `tpu`, `parameter_server`), or `auto`: horovod under a launcher, else single.
        replicas: replicas in the one process of `mirrored` and `central_storage`; None: one per GPU, or 2 on the CPU.
        communication: transport of `multi_worker_mirrored`: `ring`, `nccl` or `auto`.
        parameter_servers: number of parameter servers of `parameter_server`, the last ranks; None: one.
        threads: threads per op; None divides the cores among the ranks of this host.
        pin: pin each rank to its own cores if there are enough.
        malloc: `keep` freed memory in the process for the next step, or `system`: glibc's defaults, which return it to
            the system (docs/performance.md).
        start_timeout: seconds to wait for the other ranks.
        load_timeout: seconds to wait in `fit` for ranks that are still loading data.
        hang_timeout: seconds without progress before a deadlocked job is ended; 0: never (docs/reliability.md).
        link_timeout: seconds without a packet from another host before the job is ended; 0: never.
        deterministic: bitwise reproducible training on any number of ranks: fixed messages, deterministic ops
            (docs/reliability.md).
        hierarchical_allreduce: reduce gradients within each host first, then between hosts: `always`, `never`, or
            `auto`: where a measurement at startup shows that it is faster (docs/performance.md).
        parallel: mesh axis sizes, such as `tp=2,pp=2` (docs/parallel.md); None: every rank is a full replica.
        mesh: the same as a mapping, `{"tp": 2, "pp": 2}`, in place of `parallel`.
        timeline: file to which rank 0 writes one trace of all ranks at the end, including Horovod's collectives
            (docs/clusters.md).
        profile: first and last step whose TensorFlow ops are recorded in it: `(10, 12)`; steps of `fit`, or of a custom
            loop that uses `hvdtrain.trace_step(number)`.
        profile_ranks: ranks whose ops are recorded; default: all.
        seed: seed of Python, NumPy and TensorFlow, the same on all ranks, so that datasets shuffle identically.

    A repeated call without arguments, or with the same ones, does nothing. Collective.

    Raises:
        LaunchError: the ranks do not fit together, or Horovod is not usable.
        ConfigError: called before with other arguments.

    Example::

        hvdtrain.init(mesh={"tp": 2}, hang_timeout=600)
    """
    arguments = _plain(locals())
    if has_session():
        if current().closed:
            raise ConfigError("hvdtrain.shutdown() was called, and a process joins its job once: call it at the end.")
        _check_same(arguments)
        return
    set_up_logging()
    link: Link | None = None
    try:
        config = RuntimeConfig(**{each.name: arguments[each.name] for each in fields(RuntimeConfig)})
        observed = traced(timeline, profile, profile_ranks)
        check(config, observed)
        link = open_link(timeout=start_timeout)
        link.record_to(None if observed.trace is None else Trace(observed.trace))
        session = open_session(link, config)
        session.arguments = arguments
        if session.serves:
            session.close()
    except BaseException as error:
        _fail(link, error)
        sys.excepthook = partial(_show_alone, sys.excepthook)
        raise
    set_current(session)
    if session.serves:
        sys.exit(0)
    face = sys.modules.get("hvdtrain.horovod")
    if face is not None:
        face.start_beside_session()
    import keras

    keras.utils.set_random_seed(seed)
    if session.environment.size > 1 and session.strategy is None:
        _warn_of_lone_fits(session)
    _end_with_the_job(session)


def _warn_of_lone_fits(session: Session) -> None:
    """Warn after Keras' own training in a job in which nothing is exchanged: each rank has trained by itself.

    It replaces `fit` and `train_on_batch` of `keras.Model` for as long as the process lives.
    """
    import keras

    def noticing(name: str) -> Callable[..., Any]:
        own = getattr(keras.Model, name)

        @wraps(own)
        def noticed(model: Any, *args: Any, **options: Any) -> Any:
            result = own(model, *args, **options)
            if not session.exchanges and not any(face in sys.modules for face in _FACES):
                warn_on_first(
                    f"Model.{name} exchanges nothing: each of the {session.environment.size} ranks has trained "
                    f"{model.name!r} by itself. Write hvdtrain.Trainer(model).{name}(…) in its place.",
                    stacklevel=2,
                )
            return result

        return noticed

    keras.Model.fit, keras.Model.train_on_batch = noticing("fit"), noticing("train_on_batch")


def _check_same(arguments: Mapping[str, Any]) -> None:
    """Reject a second `init` with other arguments than the first.

    Raises:
        ConfigError: names the arguments.
    """
    defaults = _plain({name: each.default for name, each in inspect.signature(init).parameters.items()})
    if arguments == defaults:
        return
    session = current()
    known = {**defaults, **(vars(session.config) if session.arguments is None else session.arguments)}
    other = [f"{name}={value!r} (before: {known[name]!r})" for name, value in arguments.items() if value != known[name]]
    if other and session.arguments is None:
        raise ConfigError(
            "The command that imports this module has joined the job, with other arguments than the module's "
            f'hvdtrain.init: {", ".join(other)}. Call it below `if __name__ == "__main__":`.'
        )
    if other:
        raise ConfigError(
            "hvdtrain.init() was called before, and a process joins its job once. Received other arguments: "
            f"{', '.join(other)}. Give them to the first call, and leave out the second."
        )


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `init` arguments so that they can be compared: plain types, and `mesh` as `parallel`."""
    given = dict(arguments)
    mesh, timeline = given.pop("mesh"), given["timeline"]
    if mesh is not None:
        if given["parallel"] is not None:
            raise ConfigError(
                f"Give init the sizes of the axes once. Received: parallel={given['parallel']!r}, mesh={mesh!r}."
            )
        given["parallel"] = ",".join(f"{axis}={size}" for axis, size in parse_axes(mesh).items())
    given["timeline"] = fspath(timeline) if isinstance(timeline, PathLike) else timeline
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def rank() -> int:
    """Return this process's rank in the job, from 0."""
    return current().environment.rank


def size() -> int:
    """Return the number of ranks."""
    return current().environment.size


def local_rank() -> int:
    """Return this process's rank on its host, from 0."""
    return current().environment.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().environment.local_size


def cross_rank() -> int:
    """Return this host's number among those that have a rank with this local rank, from 0."""
    return current().environment.cross_rank


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Assign rank `root_rank`'s values to `variables` (Keras 3 or tf.Variables, or those of a model). Collective.

    Of a model also what its layers hold beside them: vocabularies, and what Normalization has adapted to.

    Raises:
        ConfigError: a model within tf.function, or one whose layers were made with other arguments on another rank.

    Example::

        hvdtrain.broadcast_variables(model)  # before its first step is compiled
        optimizer.build(model.trainable_variables)  # creates its slots, so that they are sent, too
        hvdtrain.broadcast_variables(optimizer.variables)
    """
    from hvdtrain.backends.select import backend_for
    from hvdtrain.compat.keras import is_layer
    from hvdtrain.state.layer_states import refuse_in_graph, share_states
    from hvdtrain.state.variables import unique_paths, unwrap, warning_of_adapted

    model = variables if is_layer(variables) else None
    given = list(variables if model is None else model.variables)
    unwrapped = [unwrap(variable) for variable in given]
    tensors = dict(zip(unique_paths(given), unwrapped, strict=True))
    backend = backend_for(current())
    if model is None:
        with warning_of_adapted(given, "Write hvdtrain.broadcast_variables(model), before its first step."):
            backend.broadcast(tensors, root=root_rank)
        return
    refuse_in_graph()
    backend.broadcast(tensors, root=root_rank)
    share_states(model, backend, root_rank)


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` has not."""
    return has_session() and not current().closed


def shutdown() -> None:
    """Leave the job and shut Horovod down, before the end of the script. Collective.

    Optional: without it, the ranks leave together at the end of the script. Afterwards exceptions no longer end the
    job, and `rank()` and `size()` keep their values. A process joins its job once: `init` raises.

    Raises:
        LaunchError: a rank timed out; it is named.
    """
    if not current().closed:
        current().close()


def barrier(name: str = "", *, timeout: float | None = None) -> None:
    """Block until all ranks reach this barrier. Collective.

    Args:
        name: of this barrier; ranks at barriers with different names raise.
        timeout: seconds to wait for the others; None: the `load_timeout` of `init`, by default an hour.

    Raises:
        LaunchError: a rank timed out; it is named.
        ConfigError: a rank made another call.
    """
    wait_for_all(current(), name, timeout)


def broadcast_object(obj: Any = None, root_rank: int = 0, *, timeout: float | None = None) -> Any:
    """Return rank `root_rank`'s object on every rank. Collective.

    Args:
        obj: any picklable object, up to 1 GiB; ignored on other ranks. `root_rank` gets the object itself.
        root_rank: rank of the object, the same on all ranks.
        timeout: as for `barrier`.

    Raises:
        LaunchError: a rank timed out; it is named.
        ConfigError: a rank made another call, or the object cannot be sent; the same on every rank.

    Example::

        settings = hvdtrain.broadcast_object({"step": 200} if hvdtrain.rank() == 0 else None)
    """
    return object_of_root(current(), obj, root_rank, timeout)


def gather_object(obj: Any, *, timeout: float | None = None) -> list[Any]:
    """Return all ranks' objects, in rank order, on every rank. Collective.

    Args:
        obj: any picklable object, up to 1 GiB over all ranks.
        timeout: as for `barrier`.

    Raises:
        LaunchError: a rank timed out; it is named.
        ConfigError: a rank made another call, or an object cannot be sent; the same on every rank.

    Example::

        accuracies = hvdtrain.gather_object(0.9)  # one entry per rank
    """
    return objects_of_all(current(), obj, timeout)


def trace_step(number: int) -> AbstractContextManager[None]:
    """Return a context that traces step `number`, from 1, of a custom loop.

    A no-op without `init(timeline=…)`. Not needed for `fit`.

    Example::

        for number, (x, y) in enumerate(dataset, start=1):
            with hvdtrain.trace_step(number):
                step(x, y)
    """
    return traced_step(current().link.trace, number)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function to run on rank 0 only; other ranks return None.

    It must not contain collectives (`fit`, `barrier`, `broadcast_object` …): the other ranks would not join.

    Example::

        @hvdtrain.rank_zero_only
        def save():
            model.save("model.keras")

        save()
        hvdtrain.barrier()  # the file is there for every rank
    """

    @wraps(function)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if rank() == 0 else None

    return on_rank_zero


def _fail(link: Link | None, error: BaseException) -> None:
    """End a multi-rank job; return if this process is alone."""
    try:
        environment = link.environment if link else detect_environment()
    except LoneRanksError:
        end_process(show_alone(None, error))
    if environment.size > 1:
        end_process(link.fail(error) if link else show_alone(environment, error))


def _end_with_the_job(session: Session) -> None:
    show = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _last(session).closed:
            _fail(_last(session).link, error)
        atexit.unregister(leave)
        _show_alone(show, kind, error, trace)

    exits = ExitWatch()
    if session.environment.size > 1:
        exits.start()
    leave = partial(_leave, session, exits)
    sys.excepthook = on_exception
    atexit.register(leave)


def _show_alone(
    show: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show by `show` what a process that is alone met, unless it is a mistake or Ctrl-C and `show` is Python's own."""
    if show is sys.__excepthook__ and isinstance(error, KeyboardInterrupt):
        show_interrupt(trace)
    elif show is sys.__excepthook__ and isinstance(error, UserError):
        code = show_alone(None, error)
        if not (hasattr(sys, "ps1") or sys.flags.inspect):  # else a person goes on after it
            sys.exit(code)
    else:
        show(kind, error, trace)


def _last(session: Session) -> Session:
    """Return the session of the current world of an elastic job."""
    return current() if has_session() else session


def _leave(session: Session, exits: ExitWatch) -> None:
    """Exit together with other ranks, or end the job after a failure.

    An exit with an unknown code is normal for most scripts (`raise SystemExit(main())`), so this rank waits for the
    others as usual: they may still be saving. If the others wait for it in a collective, Horovod reports it as missing,
    and the job fails when the wait times out.
    """
    session, left = _last(session), exits.found()
    if session.closed:
        return
    session.link.activity.exit = exits.described
    if left is not None:
        _fail(session.link, left)
    try:
        session.close()
    except LaunchError as error:
        _fail(session.link, error)
        raise
