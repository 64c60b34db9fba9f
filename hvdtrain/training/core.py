"""What a trainer consists of, and what it does for every way of using it: build, broadcast, train, evaluate."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.service.use import Services
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.observability.events import BaseObserver, Observer, RunInfo
from hvdtrain.optim.averaging import averages_weights
from hvdtrain.optim.precision import precision, with_loss_scaling
from hvdtrain.runtime.session import current
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import Announcer
from hvdtrain.training.assembly import built_model, built_optimizer, converted, refuse_instances
from hvdtrain.training.engine import step_factory_for
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks
from hvdtrain.training.evaluation.same_weights import give_first_weights, weights_of
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.loop.result import FitResult
from hvdtrain.training.loop.standard_hooks import Actions, StandardTraining
from hvdtrain.training.objective.compile_settings import Objective, merge_compile_settings
from hvdtrain.training.options import step_options
from hvdtrain.training.run_info import run_info
from hvdtrain.training.same_call import agree_on_call, settings_of
from hvdtrain.training.step.result import CompiledStep
from hvdtrain.training.update_rules.base import UpdateRule


class TrainerCore:
    """A model, its optimizer and its objective, assembled for the replicas of a backend; see `Trainer`."""

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
            optimizer = with_loss_scaling(built_optimizer(optimizer, self.model), self.model)
        self.backend.prepare(optimizer)
        self._factory = step_factory_for(self.backend, self.model, optimizer, objective, self.options)
        self._services = Services()
        self._rule: UpdateRule | None = None
        self._state: TrainState | None = None
        self._announcer = Announcer(self.backend, self.options, notes)
        self._predictor = self._factory.predictor()

    @property
    def optimizer(self) -> Any:
        """The optimizer that trains the model; of several, the first that its `train_step` uses."""
        return self._factory.optimizer

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

    def evaluate_on(self, batches: Iterable[Batch]) -> Evaluation:
        """Do what `evaluate` does, on this replica's batches, which can be read more than once."""
        for first in batches:
            self.build_on(first)
            break
        self.rule.consolidate()
        self._give_first_weights()
        return self._evaluate(batches)

    def build(self, data: TrainingData) -> None:
        """Create the variables of model and optimizer, if they are not there, and check loss and metrics."""
        sample = data.sample() if isinstance(data, DatasetTraining) else next(iter(data.batches(0)))
        self.build_on(sample, training=True)

    def build_on(self, batch: Batch, *, training: bool = False) -> None:
        """Do what `build` does, on a batch that is like those to come, in `training` or in evaluation."""
        with precision(self.options.precision):  # for layers that are made when they are first called
            self._factory.build(batch, training=training)
        with self.backend.scope():
            self.state.optimizer = self.optimizer
            self.state.follow_model()
            self.rule.follow_model()

    def broadcast_state(self) -> None:
        """Give every rank the tensors and scalars of rank 0; slices stay where they are."""
        self.state.broadcast(self.backend)
        self.rule.begin()

    def train(
        self,
        data: TrainingData,
        plan: Plan,
        *,
        validation: Iterable[Batch] | None = None,
        observers: Observer | None = None,
        info: RunInfo | None = None,
        save: Callable[[TrainState], object] | None = None,
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
        save: Callable[[TrainState], object] | None = None,
        callbacks: Sequence[Any] = (),
        verbose: str | int = 0,
    ) -> FitResult:
        """Do what `train` does, from a state that is the same on every rank."""
        begin = time.perf_counter()
        info = info or run_info(self.backend, self.state, self.options, data, plan)
        notes = getattr(data, "notes", ())
        self._announcer.announce(info, self.state, observers, notes, narrow_outputs=self._factory.narrow_outputs)
        saving = None if save is None else lambda: save(self.state)
        actions = Actions(self._evaluate, self.consolidate, self.averaged_weights, saving)
        parts = (self.backend, self.state, self._factory, self.rule, data, plan)
        training = StandardTraining(
            *parts, actions, observers, validation=validation, callbacks=callbacks, verbose=verbose
        )
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
