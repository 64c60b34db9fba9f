"""The trainer: a model, an optimizer and a loss, trained over all replicas of a backend."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint import restore
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.observability.events import BaseObserver, Observer, RunInfo
from hvdtrain.optim.averaging import averages_weights
from hvdtrain.optim.precision import with_loss_scaling
from hvdtrain.runtime.session import current
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import Announcer
from hvdtrain.training.assembly import built_model, built_optimizer, converted, refuse_instances
from hvdtrain.training.engine import step_factory_for
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks
from hvdtrain.training.evaluation.predict import build_for, prediction_batches
from hvdtrain.training.evaluation.same_weights import give_first_weights, weights_of
from hvdtrain.training.fit_arguments import FitArguments
from hvdtrain.training.inputs import validation_batches
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.loop.result import FitResult, summary_of
from hvdtrain.training.loop.standard_hooks import Actions, StandardTraining
from hvdtrain.training.objective.compile_settings import Objective, merge_compile_settings
from hvdtrain.training.options import step_options
from hvdtrain.training.run_info import console_for, run_info
from hvdtrain.training.same_call import agree_on_call, settings_of
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.update_rules.base import UpdateRule


class Trainer:
    """Trains a Keras model on every rank of the session.

    Of a model that was compiled, the optimizer, the losses (with their weights) and the metrics (with the weighted
    ones) are used where they are not given here; a warning at the start of `fit` names what is not. `jit_compile` of
    `compile()` is not looked at: XLA is used with `jit=True`.

    Args:
        model: a Keras model, or a function without arguments that builds one. One with a `train_step` of its own is
            trained by it. What is trained is `trainer.model`: with `sync_batch_norm=True` a copy.
        optimizer: a Keras optimizer, its name, or a function that builds one. Backends of tf.distribute take a
            function for the model, and a function or a name for the optimizer.
        loss: a Keras loss, its name, or a function `f(y_true, y_pred)` that returns one value for each sample; for
            several outputs a dict or list of them.
        metrics: Keras metrics or their names; for several outputs a dict or list. `accuracy` is the share of samples
            whose largest output is the label.
        loss_weights: numbers that several losses are multiplied by, in a dict or list.
        weighted_metrics: metrics that count sample weights.
        seed: the order of samples and the draws of dropout are functions of it.
        backend: who distributes; the session's by default.
        options: fields of `hvdtrain.training.options.StepOptions`: `accumulate=4`, `precision="mixed_bfloat16"`,
            `clip_norm=1.0`, `compression="bf16"` …

    Raises:
        ConfigError: options, a loss or a metric that cannot be combined over ranks.
        LaunchError: `hvdtrain.init()` was not called.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        *,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
        seed: int = 0,
        backend: Backend | None = None,
        **options: Any,
    ) -> None:
        self.backend = backend or backend_for(current())
        self.options = step_options(options)
        self.options.check_backend(self.backend.name, self.backend.capabilities.lacks)
        self.options.check_world(self.backend.size, current().environment.controller)
        if self.backend.capabilities.needs_builders:
            refuse_instances(self.backend.name, model, optimizer)
        self._seed = seed
        with self.backend.scope():
            built = built_model(model, self.options)
            chosen = Objective(loss, metrics, loss_weights, weighted_metrics)
            optimizer, objective, notes = merge_compile_settings(built, optimizer, chosen)
            self.model = converted(built, self.options)
            self.optimizer = with_loss_scaling(built_optimizer(optimizer, self.model), self.model)
        self.backend.prepare(self.optimizer)
        self._factory = step_factory_for(self.backend, self.model, self.optimizer, objective, self.options)
        self._rule: UpdateRule | None = None
        self._state: TrainState | None = None
        self._announcer = Announcer(self.backend, self.options, notes)
        self._predictor = self._factory.predictor()

    @property
    def rule(self) -> UpdateRule:
        """The update rule; it exists once the model's variables do."""
        if self._rule is None:
            with self.backend.scope():
                self._rule = self._factory.update_rule()
        return self._rule

    @property
    def state(self) -> TrainState:
        """The training state; it exists once the model's variables do."""
        if self._state is None:
            with self.backend.scope():
                self._state = TrainState(self.model, self.optimizer, self._seed, slots=self.rule.named_tensors)
            self.backend.check_changing(self._state.changing())
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
        class_weight: Mapping[int, float] | None = None,
        callbacks: Sequence[Any] = (),
        log_every: int = 10,
        verbose: bool = True,
    ) -> FitResult:
        """Train for `epochs` more passes over `dataset`; every rank calls it with the same arguments.

        Args:
            dataset: `(inputs, targets[, sample_weight])` arrays, a tf.data.Dataset of such tuples, or a keras PyDataset
                or generator function of batches over all ranks. The whole data on every rank: the trainer gives each
                rank its part.
            batch: samples per step over all ranks; None for a Dataset that is batched already.
            epochs: passes over the data.
            validation_data: evaluated after every epoch: arrays, or batches of a tf.data.Dataset, a PyDataset or a
                generator function.
            validation_batch: samples per evaluation step over all ranks, for arrays.
            steps_per_epoch: needed for a Dataset that does not end.
            shuffle: whether arrays are visited in a new order every epoch.
            class_weight: what the samples of each class count, by label; they multiply sample weights.
            callbacks: Keras callbacks. They run on every rank, with figures over all ranks, and those that write
                files (ModelCheckpoint, CSVLogger, TensorBoard, RemoteMonitor) on rank 0 only. Some ranks may have
                none, but those that set weights or the learning rate are needed on all. One that looks at batches
                costs each of them a small exchange.
            log_every: steps between two logged steps.
            verbose: show the progress on rank 0.

        Raises:
            ConfigError: a batch that does not divide among the ranks, options that do not fit, or ranks that call it
                with different arguments.
            DataError: data that cannot be used.
            NonFiniteError: the loss became NaN or infinite.
        """
        data_of_all = (dataset, validation_data, class_weight)
        given = FitArguments(*data_of_all, batch, epochs, validation_batch, log_every, steps_per_epoch, shuffle)
        self._agree("fit", vars(given), callbacks)
        given.check()
        data, validation = given.training(self.backend, self._seed), given.validation(self.backend)
        if isinstance(data, SourceTraining):
            self._factory.check(data.source)
        self.build(data)
        # Rank 0 may be the only one that restored a checkpoint: the plan is made from its state.
        self.broadcast_state()
        # A fit begins with an epoch of its own data; optimizer steps are counted on.
        self.state.scalars.begin_epoch()
        plan = Plan(self.state.scalars.step + epochs * data.steps_per_epoch, log_every)
        observers = console_for(self.backend) if verbose else BaseObserver()
        try:
            result = self._train(data, plan, validation, observers, callbacks=callbacks)
            observers.on_end(summary_of(result))
        finally:
            observers.close()
        return result

    def evaluate(self, dataset: Any, *, batch: int = 256) -> Evaluation:
        """Return loss and metrics over `dataset` (arrays, or batches of any kind), each sample counted once.

        Every rank calls it with the same arguments; where they hold different weights, those of rank 0 count.
        """
        agree_on_call(self.backend, "evaluate", {"dataset": dataset, "batch": batch})
        return self.evaluate_on(validation_batches(dataset, self.backend, batch=batch))

    def evaluate_on(self, batches: Iterable[Batch]) -> Evaluation:
        """Do what `evaluate` does, on this replica's batches, which can be read more than once."""
        for first in batches:
            self.build_on(first)
            break
        self.rule.consolidate()
        self._give_first_weights()
        return self._evaluate(batches)

    def predict(self, inputs: Any, *, batch: int = 256) -> Any:
        """Return the model's outputs for `inputs`, in their order, as NumPy arrays on every rank.

        Every rank calls it with the same arguments; where they hold different weights, those of rank 0 count.

        Args:
            inputs: arrays [samples, …], a nest of them, or a batched tf.data.Dataset whose elements are inputs or
                begin with them; the whole data on every rank.
            batch: samples per step over all ranks, for arrays.

        Raises:
            ConfigError: ranks that make another call, or with other arguments.
            DataError: no inputs, or ranks that were given other inputs.
        """
        agree_on_call(self.backend, "predict", {"inputs": inputs, "batch": batch})
        batches = prediction_batches(inputs, self.backend, batch=batch)
        if self.backend.processes > 1:
            build_for(self.model, batches)
        if self._rule is not None:
            self._rule.consolidate()
        self._give_first_weights()
        with self.averaged_weights():
            return self._predictor(batches)

    def build(self, data: TrainingData) -> None:
        """Create the variables of model and optimizer, if they are not there, and check loss and metrics."""
        self.build_on(next(iter(data.batches(0))))

    def build_on(self, batch: Batch) -> None:
        """Do what `build` does, on a batch that is like those to come."""
        self._factory.build(batch)
        with self.backend.scope():
            self.state.follow_model()
            self.rule.follow_model()

    def broadcast_state(self) -> None:
        """Give every rank the tensors and scalars of rank 0; slices stay where they are."""
        self.state.broadcast(self.backend)
        self.rule.begin()

    def restore(self, path: Path) -> None:
        """Load the checkpoint at `path`; every rank calls it, and only rank 0 needs to see the folder."""
        state = self.state
        scalars = restore.restore(path, state.named_tensors(), self.backend, earlier_names=state.earlier_names())
        state.restore(scalars)
        self.rule.begin()

    def train(
        self,
        data: TrainingData,
        plan: Plan,
        *,
        validation: Iterable[Batch] | None = None,
        observers: Observer | None = None,
        info: RunInfo | None = None,
        save: Callable[[TrainState], None] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> FitResult:
        """Broadcast the state of rank 0 and train until `plan.total_steps`.

        Args:
            data: this replica's batches.
            plan: when to stop, log and save.
            validation: evaluated after every epoch.
            observers: told what happens; rank 0's only.
            info: what the observers are told at the start.
            save: writes the state; called on every rank.
            callbacks: see `fit`. After `restore` they go on from what was saved of them.

        Raises:
            ConfigError: as `fit`; or a restored callback has lost its best weights (`restore_best_weights=True`).
        """
        sizes = {"data.batch": data.batch, "data.steps_per_epoch": data.steps_per_epoch}
        self._agree("train", {"plan": plan, **sizes, "validation": validation, "save": save}, callbacks)
        self.broadcast_state()
        return self._train(data, plan, validation, observers or BaseObserver(), info, save, callbacks)

    def _train(
        self,
        data: TrainingData,
        plan: Plan,
        validation: Iterable[Batch] | None,
        observers: Observer,
        info: RunInfo | None = None,
        save: Callable[[TrainState], None] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> FitResult:
        """Do what `train` does, from a state that is the same on every rank."""
        begin = time.perf_counter()
        info = info or run_info(self.backend, self.state, self.options, data, plan)
        self._announcer.announce(info, self.state, observers, narrow_outputs=self._factory.narrow_outputs)
        saving = None if save is None else lambda: save(self.state)
        actions = Actions(self._evaluate, self.consolidate, self.averaged_weights, saving)
        parts = (self.backend, self.state, self._factory, self.rule, data, plan)
        training = StandardTraining(*parts, actions, observers, validation=validation, callbacks=callbacks)
        training.run()
        return training.result(wall_seconds=time.perf_counter() - begin)

    def compiled_step(self, data: TrainingData) -> CompiledStep:
        """Return the compiled step for batches of `data`, to be called by itself."""
        return self._factory.train_step(self.state, self.rule, data.batch, epoch_metrics=False)

    def consolidate(self) -> None:
        """Make the model what is evaluated and saved; every rank calls it, and training goes on from there."""
        self.rule.consolidate()
        self.state.average_statistics(self.backend)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give the model the optimizer's averages of its weights (`use_ema=True`), as of the last `consolidate`."""
        return nullcontext() if self._rule is None else self._rule.averaged_weights()

    def _agree(self, call: str, arguments: Mapping[str, Any], callbacks: Sequence[Any]) -> None:
        """Refuse a call that differs by rank, or one by trainers that do."""
        settings = settings_of(self._seed, self.options, self.optimizer, callbacks)
        agree_on_call(self.backend, call, arguments, settings)

    def _give_first_weights(self) -> None:
        """Give every rank what rank 0 would evaluate with, where ranks differ: the averages too, if there are any."""
        averages = self.rule if averages_weights(self.optimizer) else None
        if give_first_weights(weights_of(self.model, averages), self.backend) and self._rule is not None:
            self._rule.adopt_weights()

    def _evaluate(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        with self.averaged_weights():
            return self._factory.evaluator()(batches, hooks)
