"""The trainer: a model, an optimizer and a loss, trained over all replicas of a backend."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint import checkpointer
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import BaseObserver, Observer, RunInfo
from hvdtrain.observability.summary import median_p90
from hvdtrain.runtime.session import current
from hvdtrain.runtime.terminal import on_terminal
from hvdtrain.training.evaluate import Evaluation, Evaluator
from hvdtrain.training.inputs import training_data, validation_batches
from hvdtrain.training.loop import Plan, TrainingLoop
from hvdtrain.training.losses import summed_loss
from hvdtrain.training.metrics import MetricSet, fresh_metrics
from hvdtrain.training.result import FitResult, summary_of
from hvdtrain.training.state import TrainState
from hvdtrain.training.step import AllReduceUpdate, TrainStep

STATE_TIMEOUT_S = 600.0


class Trainer:
    """Trains a Keras model on every rank of the session.

    Args:
        model: a Keras model, or a function without arguments that builds one.
        optimizer: a Keras optimizer, its name, or a function that builds one.
        loss: a Keras loss, its name, or a function `f(y_true, y_pred)` that returns one value for each sample.
        metrics: Keras metrics or their names; `accuracy` is the share of samples whose largest output is the label.
        seed: the order of samples and the draws of dropout are functions of it.
        backend: who distributes; the session's by default.

    Raises:
        ConfigError: a loss or metric that cannot be combined over ranks.
        LaunchError: `hvdtrain.init()` was not called.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Any,
        metrics: Sequence[Any] = (),
        *,
        seed: int = 0,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend or backend_for(current())
        self._seed = seed
        self._loss = summed_loss(loss)
        self._metrics = MetricSet(metrics, self.backend)
        with self.backend.scope():
            self.model = _built(model, keras.Model)
            self.optimizer = _checked(_built(optimizer, keras.optimizers.Optimizer))
        self._state: TrainState | None = None
        self._step: TrainStep | None = None
        self._evaluator: Evaluator | None = None

    @property
    def state(self) -> TrainState:
        """The training state; it exists once the model's variables do."""
        if self._state is None:
            self._state = TrainState(self.model, self.optimizer, self._seed)
        return self._state

    def fit(
        self,
        dataset: Any,
        *,
        batch: int | None = None,
        epochs: int = 1,
        validation_data: Any = None,
        validation_batch: int = 256,
        steps_per_epoch: int | None = None,
        shuffle: bool = True,
        log_every: int = 10,
        verbose: bool = True,
    ) -> FitResult:
        """Train for `epochs` more passes over `dataset`; every rank calls it with the same arguments.

        Args:
            dataset: `(inputs, targets[, sample_weight])` arrays, or a tf.data.Dataset of such tuples. The whole data
                on every rank: the trainer gives each rank its part.
            batch: samples per step over all ranks; None for a Dataset that is batched already.
            epochs: passes over the data.
            validation_data: evaluated after every epoch: arrays, or a batched tf.data.Dataset.
            validation_batch: samples per evaluation step over all ranks, for arrays.
            steps_per_epoch: needed for a Dataset that does not end.
            shuffle: whether arrays are visited in a new order every epoch.
            log_every: steps between two logged steps.
            verbose: show the progress on rank 0.

        Raises:
            ConfigError: a batch that does not divide among the ranks, or options that do not fit.
            DataError: data that cannot be used.
            NonFiniteError: the loss became NaN or infinite.
        """
        for name, value in {"epochs": epochs, "log_every": log_every, "validation_batch": validation_batch}.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1. Received: {value}.")
        data = training_data(
            dataset,
            self.backend,
            batch=batch,
            seed=self._seed,
            shuffle=shuffle,
            steps_per_epoch=steps_per_epoch,
        )
        validation = (
            None
            if validation_data is None
            else validation_batches(validation_data, self.backend, batch=validation_batch)
        )
        self.build(data)
        # A fit begins with an epoch; its steps are counted in steps of its own data.
        scalars = self.state.scalars
        scalars.step = scalars.epoch * data.steps_per_epoch
        plan = Plan(scalars.step + epochs * data.steps_per_epoch, log_every)
        observers: Observer = BaseObserver()
        if verbose and self.backend.index == 0:
            observers = make_console(live=on_terminal(current().environment))
        try:
            result = self.train(data, plan, validation=validation, observers=observers)
            observers.on_end(summary_of(result))
        finally:
            observers.close()
        return result

    def evaluate(self, dataset: Any, *, batch: int = 256) -> Evaluation:
        """Return loss and metrics over `dataset` (arrays or a batched tf.data.Dataset), each sample counted once."""
        batches = validation_batches(dataset, self.backend, batch=batch)
        for first in batches:
            self.build_on(first)
            break
        return self._evaluate(batches)

    def build(self, data: TrainingData) -> None:
        """Create the variables of model and optimizer, if they are not there, and check the metrics."""
        self.build_on(next(iter(data.batches(0))))

    def build_on(self, batch: Batch) -> None:
        """Do what `build` does, on a batch that is like those to come."""
        outputs = self.model(batch.inputs, training=False)
        self._metrics.settle(batch.targets, outputs)
        fresh_metrics(self._metrics.metrics)  # what cannot be copied is refused now, not at the first evaluation
        with self.backend.scope():
            _ = self.state

    def broadcast_state(self) -> None:
        """Give every rank the variables and scalars of rank 0."""
        self.backend.broadcast(self.state.variables())
        mine = json.dumps(dataclasses.asdict(self.state.scalars)).encode()
        scalars = self.backend.gather_bytes(mine, timeout=STATE_TIMEOUT_S)
        self.state.restore(json.loads(scalars[0]))

    def restore(self, path: Path) -> None:
        """Load a checkpoint on rank 0; the next `broadcast_state` or `train` gives it to the others."""
        if self.backend.index == 0:
            self.state.restore(checkpointer.restore(path, self.state.variables()))

    def train(
        self,
        data: TrainingData,
        plan: Plan,
        *,
        validation: Iterable[Batch] | None = None,
        observers: Observer | None = None,
        info: RunInfo | None = None,
        save: Callable[[TrainState], None] | None = None,
    ) -> FitResult:
        """Broadcast the state of rank 0 and train until `plan.total_steps`.

        Args:
            data: this replica's batches.
            plan: when to stop, log and save.
            validation: evaluated after every epoch.
            observers: told what happens; rank 0's only.
            info: what the observers are told at the start.
            save: writes the state; called on rank 0 only, while the others wait.
        """
        begin = time.perf_counter()
        self.broadcast_state()
        observers = observers or BaseObserver()
        observers.on_start(info or self._info(data, plan))
        loop = TrainingLoop(
            self.backend,
            self.state,
            self._train_step(),
            data,
            observers,
            evaluate=None if validation is None else lambda: self._evaluate(validation),
            save=None if save is None else lambda: self._save_on_first(save),
        )
        loop.run(plan)
        scalars = self.state.scalars
        return FitResult(
            steps=scalars.step,
            epochs=-(-scalars.step // data.steps_per_epoch),
            train_loss=loop.ledger.epoch_loss,
            evaluations=loop.evaluations,
            samples_per_second=loop.clock.steady_samples_per_second(),
            step_ms=median_p90(loop.clock.steady_ms()),
            wall_seconds=time.perf_counter() - begin,
        )

    def _train_step(self) -> TrainStep:
        if self._step is None:
            rule = AllReduceUpdate(self.backend, self.state)
            self._step = TrainStep(self.backend, self.state, self._loss, self._metrics, rule)
        return self._step

    def _evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        if self._evaluator is None:
            metrics = fresh_metrics(self._metrics.metrics)
            self._evaluator = Evaluator(self.backend, self.model, self._loss, metrics)
        return self._evaluator(batches)

    def _save_on_first(self, save: Callable[[TrainState], None]) -> None:
        if self.backend.index == 0:
            save(self.state)

    def _info(self, data: TrainingData, plan: Plan) -> RunInfo:
        session = current()
        return RunInfo(
            recipe=str(self.model.name),
            backend=self.backend.name,
            world_size=self.backend.size,
            launcher=session.environment.launcher,
            controller=session.environment.controller if self.backend.size > 1 else None,
            global_batch=data.batch,
            per_replica_batch=data.batch // self.backend.size,
            total_steps=plan.total_steps,
            steps_per_epoch=data.steps_per_epoch,
            parameters=self.state.parameters(),
            start_step=self.state.scalars.step,
            threads=session.plan.threads,
        )


def _built(thing: Any, kind: type) -> Any:
    """Return `thing` itself, what its name stands for, or what it builds."""
    if isinstance(thing, str) and kind is keras.optimizers.Optimizer:
        try:
            thing = keras.optimizers.get(thing)
        except ValueError as error:
            raise ConfigError(f"Unknown optimizer {thing!r}: {error}") from error
    if not isinstance(thing, kind) and callable(thing):
        thing = thing()
    if not isinstance(thing, kind):
        raise ConfigError(f"A Keras {kind.__name__} or a function that builds one is needed. Received: {thing!r}.")
    return thing


def _checked(optimizer: Any) -> Any:
    """Refuse what an optimizer would do to gradients that are reduced and whose loss is not scaled."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        raise ConfigError("Loss scaling needs a scaled loss, which hvdtrain does not have yet: leave it out.")
    if optimizer.gradient_accumulation_steps:
        raise ConfigError(
            "Keras' gradient_accumulation_steps would exchange every microbatch: use a larger batch instead."
        )
    return optimizer
