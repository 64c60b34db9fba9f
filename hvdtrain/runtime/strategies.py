"""Make the strategies of tf.distribute, and give each process its place in their cluster."""

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.config.runtime import WITH_REPLICAS, RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.launchers import Environment

TF_CONFIG = "TF_CONFIG"
Task = tuple[str, int]
"""What a process is in its cluster: a type, `worker`, `chief` or `ps`, and its number among those of that type."""


def workers_only(size: int) -> list[Task]:
    """Return the tasks of `size` ranks that are all workers, the first being the chief."""
    return [("worker", rank) for rank in range(size)]


def tf_config(addresses: Sequence[str], tasks: Sequence[Task], rank: int) -> dict[str, Any]:
    """Return what TF_CONFIG holds for `rank` of those with `tasks`, which are at `addresses` (`host:port`)."""
    cluster: dict[str, list[str]] = {}
    for address, (kind, _) in zip(addresses, tasks, strict=True):
        cluster.setdefault(kind, []).append(address)
    kind, index = tasks[rank]
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


def addresses_of(places: Sequence[tuple[str, int]]) -> list[str]:
    """Return `host:port` for the (host name, port) of each rank; ranks of one machine need no name service."""
    alone = len({host for host, _ in places}) == 1
    return [f"{'127.0.0.1' if alone else host}:{port}" for host, port in places]


def check_given(text: str, environment: Environment, tasks: Sequence[Task]) -> None:
    """Refuse a TF_CONFIG, set by somebody else, that does not fit the ranks of this job.

    Raises:
        LaunchError: it cannot be read, or other tasks or another place are in it.
    """
    try:
        given = json.loads(text)
        cluster = {kind: len(addresses) for kind, addresses in given["cluster"].items()}
        task = str(given["task"]["type"]), int(given["task"]["index"])
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{TF_CONFIG} cannot be read ({type(error).__name__} {error}). Received: {text!r}."
        ) from error
    wanted = Counter(kind for kind, _ in tasks)
    if set(cluster) | {task[0]} != set(wanted):
        raise LaunchError(
            f"{TF_CONFIG} must hold {' and '.join(wanted)} tasks only, and some of each. "
            f"Received: {', '.join(cluster)}, for {task[0]} {task[1]}."
        )
    if sum(cluster.values()) != environment.size and environment.launcher == "none":
        raise LaunchError(
            f"{TF_CONFIG} names {cluster['worker']} workers, and nobody started this process as one of them: "
            "start them with horovodrun or mpirun, which takes the same TF_CONFIG, or none."
        )
    if (cluster, task) != (wanted, tasks[environment.rank]):
        raise LaunchError(
            f"{TF_CONFIG} says {_spoken(task, cluster)}, and rank {environment.rank} of {environment.size} by "
            f"{environment.launcher} is {_spoken(tasks[environment.rank], wanted)}. Unset it, and the ranks agree on "
            "addresses themselves."
        )


def _spoken(task: Task, cluster: Mapping[str, int]) -> str:
    others = ", ".join(f"{count} {kind}" for kind, count in cluster.items() if kind != task[0])
    return f"{task[0]} {task[1]} of {cluster[task[0]]}" + (f" (beside {others})" if others else "")


def agreed_tf_config(
    control: ControlChannel,
    environment: Environment,
    environ: Mapping[str, str],
    tasks: Sequence[Task],
    *,
    timeout: float,
) -> str:
    """Return this rank's TF_CONFIG: the one in `environ`, or one with free ports that the ranks tell one another.

    Raises:
        LaunchError: one that is set does not fit; only some ranks have one; a rank is missing.
    """
    given = environ.get(TF_CONFIG, "")
    if given:
        check_given(given, environment, tasks)
    with socket.socket() as held:
        held.bind(("", 0))
        mine = {"given": bool(given), "host": environment.hostname, "port": held.getsockname()[1]}
        everyone = gather(control, mine, timeout=timeout)
    if len({other["given"] for other in everyone}) > 1:
        raise LaunchError(f"{TF_CONFIG} is set on some ranks only: set it on all of them, or on none.")
    places = [(str(other["host"]), int(other["port"])) for other in everyone]
    return given or json.dumps(tf_config(addresses_of(places), tasks, environment.rank))


CHIEF, WORKER, SERVER = "chief", "worker", "ps"
"""Types of tasks, as TF_CONFIG names them."""


@dataclass(frozen=True)
class Roles:
    """The ranks of a job in their order: one chief, then the workers, then the parameter servers."""

    workers: int
    servers: int

    @property
    def tasks(self) -> list[Task]:
        """Role of each rank, in the order of ranks."""
        numbers = {CHIEF: 1, WORKER: self.workers, SERVER: self.servers}
        return [(kind, index) for kind, count in numbers.items() for index in range(count)]


def roles_of(config: RuntimeConfig, environment: Environment) -> Roles:
    """Split the ranks of a job.

    Raises:
        LaunchError: there are too few of them.
    """
    servers = config.parameter_servers or 1
    workers = environment.size - 1 - servers
    if workers >= 1:
        return Roles(workers, servers)
    least, holders = servers + 2, "a parameter server" if servers == 1 else f"{servers} parameter servers"
    fewer = f", or name fewer {opt('parameter_servers')}" if servers > 1 else ""
    raise LaunchError(
        f"{opt('backend', 'parameter_server')} needs a chief, a worker and {holders}: start at least {least} "
        "ranks "
        f"(mpirun -np {least} …){fewer}. "
        f"Received: {environment.size}."
    )


def join_cluster(roles: Roles, environment: Environment, control: ControlChannel, *, timeout: float) -> tuple[Any, Any]:
    """Take this rank's place in the cluster.

    Returns:
        On the chief a ParameterServerStrategy and None; elsewhere None and the running tf.distribute.Server, which
        ends with the process.

    Raises:
        LaunchError: the ranks' TF_CONFIGs do not fit, a rank is missing, or a port was taken.
    """
    import tensorflow as tf

    os.environ[TF_CONFIG] = agreed_tf_config(control, environment, os.environ, roles.tasks, timeout=timeout)
    kind, index = roles.tasks[environment.rank]
    try:
        server = None if kind == CHIEF else _started(kind, index, roles)
        control.barrier(timeout)  # the chief asks servers that are there
        if kind != CHIEF:
            return None, server
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        return tf.distribute.ParameterServerStrategy(resolver), None
    except tf.errors.OpError as error:
        raise LaunchError(
            f"{kind} {index} of {opt('backend', 'parameter_server')} cannot start: {error.message}"
        ) from error


def _started(kind: str, index: int, roles: Roles) -> Any:
    """Start the server of this rank, with threads enough for every worker to have one of its own waiting."""
    import tensorflow as tf

    threads = tf.config.threading
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=max(roles.workers + 1, threads.get_inter_op_parallelism_threads()),
    )
    cluster = tf.train.ClusterSpec(json.loads(os.environ[TF_CONFIG])["cluster"])
    return tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc", config=config)


DEFAULT_REPLICAS = 2
"""Parts of the CPU where there is no GPU: the least that has something to exchange."""


@dataclass(frozen=True, kw_only=True)
class OpenStrategy:
    """A strategy and how it is spoken of."""

    name: str
    """The backend's name."""
    strategy: Any
    """A tf.distribute.Strategy; None on a rank that serves another's."""
    transport: str | None = None
    """What tensors travel over, where that can be chosen."""
    roles: Roles | None = None
    """Who is what, where the first rank leads and the others serve it."""
    server: Any = None
    """The tf.distribute.Server of a rank that serves."""


def prepare_devices(config: RuntimeConfig) -> None:
    """Cut the CPU into as many devices as there are to be replicas; to be called before TensorFlow's context exists.

    Raises:
        LaunchError: there are GPUs, and fewer of them than replicas.
        RuntimeError: TensorFlow was in use before.
    """
    import tensorflow as tf

    if config.backend not in WITH_REPLICAS:
        return
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and (config.replicas or 0) > gpus:
        raise LaunchError(
            f"{opt('replicas')} must not be more than the {gpus} GPUs of this machine. Received: {config.replicas}."
        )
    if not gpus:
        one = tf.config.LogicalDeviceConfiguration()
        parts = config.replicas or DEFAULT_REPLICAS
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * parts)


def open_strategy(
    config: RuntimeConfig, environment: Environment, control: ControlChannel, *, timeout: float
) -> OpenStrategy:
    """Make the strategy that `config.backend` names.

    Raises:
        LaunchError: the devices are not there, the ranks' TF_CONFIGs do not fit, or TensorFlow was in use before.
    """
    if config.backend == "parameter_server":
        roles = roles_of(config, environment)
        strategy, server = join_cluster(roles, environment, control, timeout=timeout)
        return OpenStrategy(name=config.backend, strategy=strategy, roles=roles, server=server)
    import tensorflow as tf

    make = {
        "mirrored": lambda: tf.distribute.MirroredStrategy(_devices(config)),
        "central_storage": lambda: tf.distribute.experimental.CentralStorageStrategy(_devices(config), "/cpu:0"),
        "one_device": lambda: tf.distribute.OneDeviceStrategy(f"/{_device_kind()}:0"),
        "multi_worker_mirrored": lambda: _multi_worker(config, environment, control, timeout),
        "tpu": _tpu,
    }[config.backend]
    return OpenStrategy(
        name=config.backend, strategy=make(), transport=None if config.communication == "auto" else config.communication
    )


def _device_kind() -> str:
    import tensorflow as tf

    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


def _devices(config: RuntimeConfig) -> list[str]:
    """Return the devices of the replicas of one process."""
    import tensorflow as tf

    kind = _device_kind()
    known = [device.name for device in tf.config.list_logical_devices(kind)]
    wanted = config.replicas or (len(known) if kind == "GPU" else DEFAULT_REPLICAS)
    if len(known) < wanted:
        raise LaunchError(
            f"{opt('backend', config.backend)} needs {wanted} devices, and TensorFlow was in use before it could make "
            "them: "
            "call hvdtrain.init() first."
        )
    return known[:wanted]


def _multi_worker(config: RuntimeConfig, environment: Environment, control: ControlChannel, timeout: float) -> Any:
    import tensorflow as tf

    if config.communication == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise LaunchError(
            f"{opt('communication', 'nccl')} needs GPUs, and there is none: use {opt('communication', 'ring')}."
        )
    tasks = workers_only(environment.size)
    os.environ[TF_CONFIG] = agreed_tf_config(control, environment, os.environ, tasks, timeout=timeout)
    carriers = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=getattr(carriers, config.communication.upper())
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise LaunchError(
            f"{opt('backend', 'multi_worker_mirrored')} must be chosen before TensorFlow does any work ({error}): call "
            "hvdtrain.init() first."
        ) from error


def _tpu() -> Any:
    """Return the strategy of the TPU that TPU_NAME names, or of the one that this machine holds."""
    import tensorflow as tf

    name = os.environ.get("TPU_NAME", "")
    if not name and not tf.config.list_physical_devices("TPU"):
        raise LaunchError(
            f"There is no TPU: this machine holds none, and TPU_NAME does not name one. Use another {opt('backend')}."
        )
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name or "local")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, ImportError, OSError, tf.errors.OpError) as error:
        raise LaunchError(f"The TPU {name or 'local'!r} cannot be used: {error}") from error
    return tf.distribute.TPUStrategy(resolver)
