"""The baseline: a hand-written training loop after Horovod's documentation, and the same without Horovod.

It uses nothing of hvdtrain's training. With one process it does not load Horovod. Model, data and optimizer are those
of the other sides.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.bench.timing import Timing, Usage, own_usage, peak_rss_mib, process_settings, usage_figures, window
from hvdtrain.config.run import Config
from hvdtrain.data.registry import load_splits
from hvdtrain.data.source import DataSplits
from hvdtrain.models.registry import build_model, model_family
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.malloc import choose_malloc

Tape = Callable[[tf.GradientTape], Any]

BUFFER = 10_000
"""Size of the shuffle buffer, as in Horovod's examples."""


def pin_and_start(environment: Environment) -> int:
    """Pin the process and initialize Horovod, as `hvdtrain.init` does for other sides; return the number of threads."""
    threads = pin(environment)
    if environment.size > 1:
        import horovod.tensorflow as hvd

        hvd.init()
    return threads


def pin(environment: Environment) -> int:
    """Set the cores, threads and GPU of this rank as hvdtrain does, and return the number of threads."""
    cores, rank = sorted(os.sched_getaffinity(0)), environment.local_rank
    threads = max(1, share := len(cores) // environment.local_size)
    if share:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[environment.local_rank % len(gpus)], "GPU")
    return threads


class PlainLoop:
    """The loop of one rank.

    Args:
        config: model, data, optimizer and batch over all ranks.
        environment: rank and size.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        import keras

        self._splits = load_splits(config.data, config.training.seed)
        self._batch = config.data.batch // environment.size
        self._size = environment.size
        keras.config.set_dtype_policy(config.training.precision)
        self.model = build_model(config.model, self._splits.sample_shape, self._splits.classes, config.training.seed)
        keras.config.set_dtype_policy("float32")
        self.optimizer = build_optimizer(config.optim, 1, config.data.batch)
        self._loss = model_family(config.model).loss()

    def batches(self) -> Any:
        """Yield this rank's batches, endlessly."""
        count = tf.nest.flatten(_elements(self._splits))[0].shape[0]
        data = tf.data.Dataset.from_tensor_slices(_elements(self._splits))
        return data.repeat().shuffle(min(BUFFER, count)).batch(self._batch).prefetch(4)

    def step(self) -> Callable[[], tf.Tensor]:
        """Return a function that takes the next step and returns its loss, from rank 0's initial values."""
        self.optimizer.build(self.model.trainable_variables)
        tape: Tape = lambda tape: tape  # noqa: E731
        if self._size > 1:
            import horovod.tensorflow as hvd

            tape = hvd.DistributedGradientTape
            hvd.broadcast_variables([v.value for v in self.model.variables + self.optimizer.variables], root_rank=0)
        step, batches = plain_step(self.model, self.optimizer, self._loss, tape), iter(self.batches())
        return lambda: step(*next(batches))

    def gradient_sizes(self) -> list[dict[str, Any]]:
        """Trace the step without running it, and return the size of each gradient.

        Returns:
            bytes: of the variable.
            rows_per_sample: rows of an embedding table that a sample touches, with duplicates; missing if dense.
            row_bytes: of a row with its index.
        """
        found: list[dict[str, Any]] = []

        def look(inputs: Any, targets: Any) -> None:
            with tf.GradientTape() as tape:
                value = self._loss(targets, self.model(inputs, training=True))
            variables = [variable.value for variable in self.model.trainable_variables]
            found.extend(map(self._size_of, tape.gradient(value, variables)))

        tf.function(look, autograph=False).get_concrete_function(*next(iter(self.batches())))
        return found

    def _size_of(self, gradient: Any) -> dict[str, Any]:
        whole = int(np.prod(gradient.shape)) * gradient.dtype.size
        if not isinstance(gradient, tf.IndexedSlices):
            return {"bytes": whole}
        row = int(np.prod(gradient.shape[1:])) * gradient.dtype.size + gradient.indices.dtype.size
        rows = int(np.prod(gradient.indices.shape)) / self._batch
        return {"bytes": whole, "rows_per_sample": rows, "row_bytes": row}


def plain_step(model: Any, optimizer: Any, loss: Any, tape_of: Tape) -> Callable[[Any, Any], tf.Tensor]:
    """Return the compiled step; `tape_of` wraps a tape so that it reduces gradients."""
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def training_step(inputs: Any, targets: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True))
        gradients = tape_of(tape).gradient(value, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return training_step


def _elements(splits: DataSplits) -> Any:
    return splits.train.elements  # type: ignore[attr-defined]  # random data lie in memory


def measure(config: Config, timing: Timing, environment: Environment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the loop; return figures and facts, valid on rank 0. Collective."""
    malloc = choose_malloc(config.processes.malloc)
    threads = pin_and_start(environment)
    loop = PlainLoop(config, environment)
    step = loop.step()
    for _ in range(timing.warm_up):
        window(step, timing.steps)
    begin = own_usage()
    windows = [window(step, timing.steps) for _ in range(timing.windows)]
    used = own_usage().since(begin)
    everyone: Any = np.array([[peak_rss_mib(), used.user_s, used.system_s, used.page_faults]])
    if environment.size > 1:
        import horovod.tensorflow as hvd

        everyone = hvd.allgather(tf.constant(everyone, tf.float64)).numpy()
    usages = [Usage(user_s, system_s, int(page_faults)) for _, user_s, system_s, page_faults in everyone]
    figures = {"windows_ms": windows, **usage_figures(usages, everyone[:, 0], timing.windows * timing.steps)}
    facts: dict[str, Any] = {
        "settings": process_settings(threads, malloc=malloc),
        "parameters": sum(int(np.prod(v.shape)) for v in loop.model.trainable_variables),
    }
    if environment.size == 1:
        facts["gradients"] = loop.gradient_sizes()
    return figures, facts
