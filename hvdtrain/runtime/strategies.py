"""The strategies of tf.distribute, made before TensorFlow does any work."""

import os
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.config.runtime import WITH_REPLICAS, RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.parameter_server import Roles, join_cluster, roles_of
from hvdtrain.runtime.tf_config import VARIABLE, agreed_tf_config, workers_only

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
    make = {
        "mirrored": lambda: _mirrored(config),
        "central_storage": lambda: _central_storage(config),
        "one_device": _one_device,
        "multi_worker_mirrored": lambda: _multi_worker(config, environment, control, timeout),
        "tpu": _tpu,
    }[config.backend]
    return OpenStrategy(
        name=config.backend, strategy=make(), transport=None if config.communication == "auto" else config.communication
    )


def _devices(config: RuntimeConfig) -> list[str]:
    """Return the devices of the replicas of one process."""
    import tensorflow as tf

    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    known = [device.name for device in tf.config.list_logical_devices(kind)]
    wanted = config.replicas or (len(known) if kind == "GPU" else DEFAULT_REPLICAS)
    if len(known) < wanted:
        raise LaunchError(
            f"{opt('backend', config.backend)} needs {wanted} devices, and TensorFlow was in use before it could make "
            "them: "
            "call hvdtrain.init() first."
        )
    return known[:wanted]


def _mirrored(config: RuntimeConfig) -> Any:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(_devices(config))


def _central_storage(config: RuntimeConfig) -> Any:
    import tensorflow as tf

    return tf.distribute.experimental.CentralStorageStrategy(_devices(config), "/cpu:0")


def _one_device() -> Any:
    import tensorflow as tf

    return tf.distribute.OneDeviceStrategy("/gpu:0" if tf.config.list_logical_devices("GPU") else "/cpu:0")


def _multi_worker(config: RuntimeConfig, environment: Environment, control: ControlChannel, timeout: float) -> Any:
    import tensorflow as tf

    if config.communication == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise LaunchError(
            f"{opt('communication', 'nccl')} needs GPUs, and there is none: use {opt('communication', 'ring')}."
        )
    tasks = workers_only(environment.size)
    os.environ[VARIABLE] = agreed_tf_config(control, environment, os.environ, tasks, timeout=timeout)
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
