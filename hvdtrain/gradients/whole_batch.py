"""Steps of a loop of one's own that compute with the samples of all ranks."""

import functools
import random
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.backends.select import current_exchange
from hvdtrain.compat.keras import global_seed
from hvdtrain.compat.tensorflow import converted_function
from hvdtrain.config.errors import ConfigError
from hvdtrain.partition.step import open_rows, partition_of, whole_nest
from hvdtrain.partition.tracing import StepExchanges, traced
from hvdtrain.runtime.compiled import names_under


def whole_batch(step: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a step, written for one process, that computes with the samples of all ranks.

    Each rank calls it with its own samples, and has the results of one process with all of them: losses, gradients,
    metrics, variables that it changes, and random numbers. What an optimizer applies needs no exchange of its own.

    Args:
        step: takes nests of tensors [samples, …], of which each rank may have any number, and returns a nest. Sums,
            means, shapes and comparisons of samples in it are those of all ranks' samples.

    Returns:
        The compiled step, which all ranks must call alike. Its results are the same on all of them.

    Raises:
        ConfigError: when called, for a step that exchanges by itself or calls Python functions with samples.

    Example::

        @hvdtrain.whole_batch
        def train_step(images, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_of(labels, model(images, training=True)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss
    """
    called: _WholeBatch | None = None

    @functools.wraps(getattr(step, "python_function", step))
    def run(*args: Any) -> Any:
        nonlocal called
        if called is None:
            called = _WholeBatch(step, current_exchange())
        return called(*args)

    return run


class _WholeBatch:
    """A step on the ranks of a session."""

    def __init__(self, step: Callable[..., Any], backend: Backend) -> None:
        is_compiled = hasattr(step, "python_function")
        self._step = converted_function(step if is_compiled else tf.function(step))
        self._name = getattr(step, "__name__", type(step).__name__)
        self._backend = backend
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        # Random numbers without a seed of the script's would differ between ranks.
        self._seed = gather(backend, random.getrandbits(31), timeout=None)[0]
        if backend.size > 1:
            backend.broadcast({"global_seed": global_seed()})

    def __call__(self, *args: Any) -> Any:
        tensors = tf.nest.map_structure(tf.convert_to_tensor, args)
        flat = tf.nest.flatten(tensors)
        if not flat or any(each.shape.rank == 0 for each in flat):
            raise ConfigError(
                f"{self._name} is given tensors [samples, …] alone. Received: "
                f"{', '.join(str(each.shape) for each in flat) or 'nothing'}. Other values belong into variables."
            )
        if self._backend.size == 1:
            return self._alone(*tensors)
        # The number of rows is left open: ranks that have other numbers must compile the same.
        specs = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), tensors)
        key = str(specs)
        if key not in self._compiled:
            try:
                self._compiled[key] = tf.function(self._traced, autograph=False).get_concrete_function(*specs)
            except Exception as error:
                raise self._refusal(error) from error
        return self._compiled[key](*flat)

    def _refusal(self, error: BaseException) -> BaseException:
        """Return the error behind one that autograph has made of it."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError | StepExchanges):
            cause = cause.__context__
        if isinstance(cause, StepExchanges):
            return ConfigError(
                f"{self._name} computes with the samples of all ranks, and exchanges at {cause.place}: its gradients "
                "and sums would be added up twice. Use tf.GradientTape and Keras' optimizer, without hvdtrain's."
            )
        return error if cause is None else cause

    def _traced(self, *nests: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        if graph.seed is None:
            graph.seed = self._seed
        nests = tf.nest.map_structure(open_rows, nests)
        with names_under(f"whole_batch/{self._name}"):
            partition = partition_of(self._backend, tf.nest.flatten(nests)[0])
            partition.mark_rows(nests)
            with traced(partition):
                results = self._step(*nests)
                partition.cause = "the results"
                return whole_nest(partition, results)

    @functools.cached_property
    def _alone(self) -> Callable[..., Any]:
        compiled: Callable[..., Any] = tf.function(self._step, autograph=False)
        return compiled
