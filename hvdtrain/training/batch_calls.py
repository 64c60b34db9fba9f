"""Keras' `train_on_batch` and `test_on_batch` over all ranks."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.data.batch import Batch
from hvdtrain.training.agreement import agree_on_call
from hvdtrain.training.data_arguments import combined, number_of_samples
from hvdtrain.training.evaluation.evaluate import Score, Scores, as_keras_returns
from hvdtrain.training.fitting import FittingTrainer
from hvdtrain.training.inputs import validation_batches, with_class_weights


class BatchTrainer(FittingTrainer):
    """Adds calls with a single batch to the trainer; base of `Trainer`."""

    _shares_state = False
    """Whether the ranks have had the same state since the first call with a batch."""

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,
    ) -> float | list[Any] | dict[str, Any]:
        """Take one optimizer step on a batch, and return its loss and metrics as Keras does. Collective.

        Args:
            x: inputs [samples, …] of the whole batch, on every rank; each trains on its part.
            y: targets.
            sample_weight: weight of each sample.
            class_weight: weight of each class's samples, by label; multiplies sample weights.
            return_dict: return loss and metrics by name.

        Raises:
            ConfigError: ranks that make another call.
            DataError: unusable data, or ranks with different ones.
        """
        batch, samples = self._one_batch("train_on_batch", combined(x, y, sample_weight), class_weight)
        self.build_on(batch, training=True)
        if not self._shares_state:
            self.broadcast_state()
            self._shares_state = True
        step = self._factory.train_step(self.state, self.rule, samples)
        step.begin_metrics()
        step(batch, measure=False)
        self.state.scalars.step += 1
        results = step.metrics_so_far()
        self.rule.gather_weights()
        return dict(results) if return_dict else as_keras_returns(self.model, results)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Score | Scores | dict[str, Any]:
        """Return loss and metrics of a batch as Keras does; arguments as for `train_on_batch`. Collective."""
        batch, _ = self._one_batch("test_on_batch", combined(x, y, sample_weight), None)
        outcome = self.evaluate_on([batch])
        return outcome.as_dict() if return_dict else outcome.as_keras(self.model)

    def _one_batch(self, call: str, data: Any, class_weight: Mapping[int, float] | None) -> tuple[Batch, int]:
        """Return this replica's part of a batch, and the samples of all parts. Collective."""
        agree_on_call(self.backend, call, {"class_weight": class_weight})
        samples = number_of_samples(data)
        weighted = with_class_weights(data, class_weight)
        return next(iter(validation_batches(weighted, self.backend, batch=samples, what=call))), samples
