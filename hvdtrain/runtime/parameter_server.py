"""The processes of tf.distribute's ParameterServerStrategy: a chief, and servers that do what it asks for."""

import json
import os
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.tf_config import VARIABLE, Task, agreed_tf_config

CHIEF, WORKER, SERVER = "chief", "worker", "ps"
"""Types of tasks, as TF_CONFIG names them."""


@dataclass(frozen=True)
class Roles:
    """The ranks of a job in their order: one chief, then the workers, then the parameter servers."""

    workers: int
    servers: int

    @property
    def tasks(self) -> list[Task]:
        """What each rank is, in the order of ranks."""
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
    least = servers + 2
    fewer = f", or name fewer {opt('parameter_servers')}" if servers > 1 else ""
    raise LaunchError(
        f"{opt('backend', 'parameter_server')} needs a chief, a worker and {_plural(servers)}: start at least {least} "
        "ranks "
        f"(mpirun -np {least} …){fewer}. "
        f"Received: {environment.size}."
    )


def _plural(servers: int) -> str:
    return "a parameter server" if servers == 1 else f"{servers} parameter servers"


def join_cluster(roles: Roles, environment: Environment, control: ControlChannel, *, timeout: float) -> tuple[Any, Any]:
    """Take this rank's place in the cluster.

    Returns:
        On the chief a ParameterServerStrategy and None; elsewhere None and the running tf.distribute.Server, which
        ends with the process.

    Raises:
        LaunchError: the ranks' TF_CONFIGs do not fit, a rank is missing, or a port was taken.
    """
    import tensorflow as tf

    os.environ[VARIABLE] = agreed_tf_config(control, environment, os.environ, roles.tasks, timeout=timeout)
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
    cluster = tf.train.ClusterSpec(json.loads(os.environ[VARIABLE])["cluster"])
    return tf.distribute.Server(cluster, job_name=kind, task_index=index, protocol="grpc", config=config)
