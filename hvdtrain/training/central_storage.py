"""Steps and evaluation of replicas that share one copy of each variable, for the central-storage backend."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.backends.central_storage import CentralStorageBackend
from hvdtrain.compat.keras import flatten_layers, own_seed_generators, own_variables
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.state.variables import path_of
from hvdtrain.training.evaluation.evaluate import KerasEvaluator
from hvdtrain.training.step.batches import inputs_for
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.pinned import PinnedScope, pinned
from hvdtrain.training.step.placeholder import counted
from hvdtrain.training.step.step_factory import KerasStepFactory


class CentralStepFactory(KerasStepFactory):
    """hvdtrain's step and evaluation, where a forward pass changes no variable."""

    _checked = False

    def build(self, batch: Batch, *, training: bool) -> None:
        """Also reject layers that change variables in training. Raises ConfigError naming one."""
        super().build(batch, training=training)
        if training and not self._checked:
            compiled(lambda batch: self._backend.run(self._forward_once, batch)).get_concrete_function(batch)
            self._checked = True

    def _forward_once(self, batch: Batch) -> None:
        model = self._model
        try:
            with forward_alone(model, ()):
                model(inputs_for(model, batch.inputs), training=True)
        except ValueError as error:
            if "aggregation" not in str(error):
                raise
            raise refusal(type(model).__name__, "a tf.Variable") from error  # TensorFlow does not say which

    def _new_logs(self) -> StepLogs:
        return SharedLogs(self._backend, self._model, "train_step")

    def _new_evaluator(self) -> KerasEvaluator:
        return KerasEvaluator(self._backend, self._model, rule=lambda: self._rule, logs=SharedLogs)


class SharedLogs(StepLogs):
    """Global values of a step's results, where the replicas' sums are added up in what they share.

    Each replica counts a pass from zero. Added to what the shared variables hold, and assigned by the replicas, earlier
    passes would count once for each of them.
    """

    _replicas: CentralStorageBackend

    @contextmanager
    def counting(self, has_samples: tf.Tensor | float) -> Iterator[None]:
        """Add the metrics of a pass inside the context to those of all, unless its samples are a placeholder."""
        metrics = self.keras_variables()
        with forward_alone(self._model, metrics) as scope:
            yield
        mine = [counted(tf.convert_to_tensor(scope.assigned(metric)), has_samples) for metric in metrics]
        if mine:
            self._replicas.add_sums(self.variables(), mine)

    def _count(self, sums: tf.Variable, mine: tf.Tensor, *, first: bool) -> None:
        self._replicas.add_sums([sums], [mine], first=first)

    def _counted_apart(self) -> bool:
        return False


@contextmanager
def forward_alone(model: Any, metrics: Sequence[Any]) -> Iterator[PinnedScope]:
    """Call a model inside the context with its `metrics`, Keras variables, at zero; no variable is changed.

    Raises ConfigError if a layer changes one.
    """
    with pinned([(metric, tf.zeros(metric.shape, metric.dtype)) for metric in metrics], (), reads=True) as scope:
        yield scope
    for layer in flatten_layers(model):
        for variable in (*own_variables(layer), *(each.state for each in own_seed_generators(layer))):
            if scope.assigned(variable) is not None:
                raise refusal(f"{type(layer).__name__} {layer.name!r}", path_of(variable))


def refusal(layer: str, variable: str) -> ConfigError:
    """Return the error for a layer that changes a variable in its forward pass."""
    return ConfigError(
        f"{opt('backend', 'central_storage')} holds one copy of each variable for all replicas, which no layer may "
        f"change in its forward pass, as {layer} changes {variable}. Use {opt('backend', 'mirrored')}."
    )
