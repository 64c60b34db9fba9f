"""Client side of the tf.data service, as `horovod.tensorflow.data.compute_service`.

The import adds `send_to_data_service` to `tf.data.Dataset`, as Horovod's does.
"""

import threading
from typing import Any

import tensorflow as tf
from horovod.runner.common.service.compute_service import ComputeClient
from horovod.tensorflow.data import compute_service as _horovods
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service, tf_data_service

from hvdtrain.horovod.basics import init
from hvdtrain.horovod.names import rank

__all__ = ["ComputeClient", "TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Serve data until the compute service shuts down: run one tf.data worker on this rank, and maybe a dispatcher.

    A worker whose dispatcher is part of the training job is left to end with this process.
    """
    init()
    if compute_config.dispatcher_side == "compute":
        _horovods.compute_worker_fn(compute_config)
    else:
        _serve_training_side(compute_config)


def _serve_training_side(config: TfDataServiceConfig) -> None:
    dispatcher = rank() // config.workers_per_dispatcher
    client = config.compute_client(verbose=0)
    address = client.wait_for_dispatcher_registration(dispatcher, config.timeout)
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.split("://")[1],
            heartbeat_interval_ms=1000,
            dispatcher_timeout_ms=config.timeout * 1000,
        )
    )
    _keep(worker)
    client.register_worker_for_dispatcher(dispatcher, rank())
    client.wait_for_shutdown()


def _keep(worker: Any) -> None:
    """Hold `worker` until the process ends.

    The dispatcher has ended with the training job. To stop a worker then takes as long as `timeout`, or for ever where
    a dataset has no end, and all of Python waits with it.
    """

    def hold(_: Any) -> None:
        threading.Event().wait()

    threading.Thread(target=hold, args=(worker,), daemon=True).start()
