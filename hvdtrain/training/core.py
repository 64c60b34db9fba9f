"""Core of the trainer: build, load, broadcast, evaluate."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for, backend_of_process
from hvdtrain.checkpoint import index
from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.checkpoint.naming import checkpoints_at
from hvdtrain.checkpoint.restore import contents, extras, restore
from hvdtrain.checkpoint.selection import located, newest_good
from hvdtrain.compat.keras import last_compile
from hvdtrain.compat.keras_variables import forget_slots
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.registry import resolve
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.data.streams.python_batches import PyDatasetTraining
from hvdtrain.layers.sync_batch_norm import refuse_keras_synchronization
from hvdtrain.optim.averaging import averages_weights, innermost
from hvdtrain.optim.optimizers import NoOptimizer
from hvdtrain.optim.precision import precision, scales_loss, with_loss_scaling
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.parallel.tensor.parallelize import refuse_saving_shards
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import Session
from hvdtrain.state.named_tensors import is_split
from hvdtrain.state.optimizers import AVERAGES, MAIN
from hvdtrain.state.train_state import EXTRA, LAYERS, MODEL, RULE, TrainState
from hvdtrain.training.advice import Announcer
from hvdtrain.training.agreement import agree_on_call, settings_of
from hvdtrain.training.assembly import (
    built_optimizer,
    check_split,
    converted,
    job_facts,
    model_facts,
    model_for,
    refuse_instances,
)
from hvdtrain.training.callbacks.keras_callbacks import evaluation_callbacks
from hvdtrain.training.compile_settings import (
    Objective,
    compiled_code,
    merge_compile_settings,
    refuse_no_optimizer,
)
from hvdtrain.training.elastic import Commits
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks, broadcast_first_weights, weights_of
from hvdtrain.training.options import StepOptions, TrainerOptions, step_options
from hvdtrain.training.pipelined.staging import staged
from hvdtrain.training.step.contract import CompiledStep
from hvdtrain.training.step.step_factory import KerasStepFactory
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.zero.building import is_built_sharded


def step_factory_for(
    backend: Backend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
) -> KerasStepFactory:
    """Return the step factory for `model` on `backend`. Raises ConfigError for incompatible options or layers."""
    if isinstance(model, PipelineStage):
        from hvdtrain.training.pipelined.factory import PipelineStepFactory

        return PipelineStepFactory(
            backend=backend, model=model, optimizer=optimizer, objective=objective, options=options
        )
    table = {backend.name: backend.capabilities.step_factory}
    factory: KerasStepFactory = resolve("backend", backend.name, table)(backend, model, optimizer, objective, options)
    return factory


class TrainerCore:
    """A model, its optimizer and its objective on a backend's replicas; base of `Trainer`."""

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
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.backend = backend or backend_of_process()
        self.options = step_options(dict(options))
        check(self.options, facts=self._job())
        if self.backend.capabilities.needs_builders:
            refuse_instances(self.backend.name, model, optimizer)
        self.seed = seed
        self.goes_on = False
        """Whether the next `fit` continues a restored training."""
        self.resumed: frozenset[Path] = frozenset()
        """Folders that the script has resumed from, or tried to."""
        self.reading: TrainingData | None = None
        """The data of the last `fit`."""
        self._pending: Path | None = None
        """A checkpoint to load once the model has variables."""
        with self.backend.scope():
            built = model_for(self.backend, model, self.options)
            self.eager = bool(getattr(built, "run_eagerly", False))
            chosen = Objective(loss, metrics, loss_weights, weighted_metrics)
            decided = optimizer is None and self.options.precision is None  # by Keras, in compile
            self.compiled_by_user = optimizer is None
            """Whether the optimizer is that of a compiled model, which goes on with it after a training."""
            optimizer, objective, notes = merge_compile_settings(built, optimizer, chosen)
            if self.options.steps_per_execution == 1:
                self.options = replace(self.options, steps_per_execution=built.steps_per_execution)
            check(self.options, facts=model_facts(self._job(), built))
            if self.backend.name == "horovod" and self.backend.size > 1:
                refuse_keras_synchronization(built)
            own = not isinstance(model, keras.Model)
            self.model = staged(converted(built, self.options), self.backend, self.options, own=own)
            self.model.steps_per_execution = self.options.steps_per_execution
            optimizer = built_optimizer(optimizer, self.model)
            if scales_loss(built) and not decided:
                optimizer = with_loss_scaling(optimizer)
        self._parts = optimizer, objective, notes
        self._scalars_before: Mapping[str, Any] | None = None
        self._assemble()

    def _assemble(self) -> None:
        """(Re)create everything that depends on the number of replicas."""
        optimizer, objective, notes = self._parts
        check(self.options, facts=model_facts(self._job(), self.model, optimizer))
        self.backend.prepare(optimizer)
        # The sums of losses and metrics are each replica's own, where a process has several.
        with self.backend.scope() if self.backend.local_size > 1 else nullcontext():
            self.factory = step_factory_for(
                self.backend, model=self.model, optimizer=optimizer, objective=objective, options=self.options
            )
        self._rule: UpdateRule | None = None
        self._state: TrainState | None = None
        self.announcer = Announcer(self.backend, self.options, notes)
        self._predictor = self.factory.predictor()
        self._compiled = last_compile(self.model)

    def enter(self, session: Session) -> None:
        """Go on in another world of an elastic job: model and optimizer are kept."""
        scalars = None if self._state is None else asdict(self._state.scalars)
        self.backend = backend_for(session)
        if self._rule is not None and self._rule.waits_when_measured:
            forget_slots(innermost(self.optimizer))  # other ranks will hold them; the commit has all
        self._assemble()
        self._scalars_before = scalars

    def _job(self) -> Facts:
        session = self.backend.session
        return job_facts(self.backend, session.environment.controller, deterministic=session.config.deterministic)

    @property
    def optimizer(self) -> Any:
        """The optimizer; of several, the first that `train_step` uses."""
        return self.factory.optimizer

    @property
    def rule(self) -> UpdateRule:
        """The update rule; created once the model is built."""
        return self._rule or self._make_rule()

    def _make_rule(self) -> UpdateRule:
        with self.backend.scope():
            self._rule = self.factory.update_rule()
        return self._rule

    @property
    def state(self) -> TrainState:
        """The training state; created once the model is built."""
        if self._state is None:
            with self.backend.scope():
                self._state = TrainState(self.model, self.optimizer, self.seed, slots=self.rule.named_tensors)
            if self._scalars_before is not None:
                self._state.restore(self._scalars_before)
        return self._state

    def evaluate_on(self, batches: Iterable[Batch], callbacks: Sequence[Any] = ()) -> Evaluation:
        """Evaluate on this replica's batches, which must be re-iterable, as must be the `callbacks`. Collective."""
        if not self.model.compiled:
            raise ConfigError(
                "evaluate needs a loss: Trainer(model, loss=…), or a model that was compiled with one. Received: "
                f"{type(self.model).__name__} {self.model.name!r}, which is not compiled."
            )
        for first in batches:
            self.build_on(first)
            break
        self.rule.consolidate()
        self._broadcast_first_weights()
        called = evaluation_callbacks(callbacks, self.model, self.backend)
        with self.factory.evaluator().kept_metrics() if self.state.counts_epoch else nullcontext():
            if called is None:
                return self.evaluate_batches(batches)
            called.begin_evaluation()
            outcome = self.evaluate_batches(batches, called)
            called.end_evaluation(outcome.as_dict())
            return outcome

    def build(self, data: TrainingData) -> None:
        """Build model and optimizer if necessary, and check loss and metrics."""
        if isinstance(data, DatasetTraining | SourceTraining | PyDatasetTraining):
            self.build_on(data.sample(), training=True)
        else:
            self.build_on(next(iter(data.batches(0))), training=True)

    def build_on(self, batch: Batch, *, training: bool = False) -> None:
        """Build model and optimizer from one representative batch, and load a checkpoint that waits for them.

        Raises ConfigError for a model that was compiled again since, whose new settings the steps would not have.
        """
        if last_compile(self.model) is not self._compiled:
            raise ConfigError(
                f"{type(self.model).__name__} {self.model.name!r} was compiled again since, and this trainer has the "
                "optimizer, losses and metrics from before: make a new one, trainer = hvdtrain.Trainer(model)."
            )
        if training:
            refuse_no_optimizer(self.model, self.optimizer)
        if is_built_sharded(self.model):
            self._make_rule()  # makes the model callable
        # The policy is for layers that are created on the first call.
        with precision(self.options.precision), compiled_code(self.model, eager=self.eager):
            self._build_variables(batch, training=training)
        check_split(self.model, self.backend.axes)
        check(self.options, facts=model_facts(self._job(), self.model, self.optimizer))
        if is_split(self.model):
            refuse_saving_shards(self.model)
        with self.backend.scope():
            if self._state is not None:  # else it is made now
                self.state.follow_model()
            self.state.optimizer = self.optimizer
            self.rule.follow_model(training=training)
        self.load_pending()

    def _build_variables(self, batch: Batch, *, training: bool) -> None:
        """Create the model's variables, and the optimizers' if `training` or where a checkpoint has their slots."""
        restores = not training and self._pending is not None and self._trains
        try:
            self.factory.build(batch, training=training or restores)
        except Exception as error:
            if restores:
                error.add_note(
                    f"{type(self.model).__name__} was built for training on a batch of evaluation, to load "
                    f"{self._pending} into its optimizers."
                )
            raise
        if self._rule is not None and not self.factory.is_settled(self._rule):
            self._scalars_before = None if self._state is None else asdict(self._state.scalars)
            self._rule = self._state = None

    def broadcast_state(self) -> None:
        """Broadcast rank 0's tensors and scalars; shards stay in place. Collective."""
        self.state.broadcast(self.backend)
        self.rule.on_state_loaded()

    def find_newest(self, folder: Path) -> Path | None:
        """Return the newest good checkpoint in or at `folder`, or None if there is none, good or damaged. Collective.

        Only rank 0 needs to see it. Raises CheckpointError: all are damaged.
        """

        def look() -> str | None:
            path = located(folder, "newest") if (folder / index.NAME).is_file() else None
            path = path or newest_good(checkpoints_at(folder), set_aside=True)
            return None if path is None else str(path)

        found = on_primary(self.backend, look)
        return None if found is None else Path(found)

    def load(self, checkpoint: Path, *, goes_on: bool) -> None:
        """Load a checkpoint, at once or when the model has variables. Collective.

        Args:
            checkpoint: seen by rank 0.
            goes_on: whether its training continues: weights stay those of training beside their averages.

        Raises:
            CheckpointError: it was saved from another model or optimizer.
        """
        self.goes_on, self._pending = goes_on, checkpoint
        if self.factory.has_variables:
            self.load_pending()
        elif self.backend.primary:
            LOGGER.info(f"the model has no variables yet: fit, evaluate or predict will load {checkpoint}")

    def load_pending(self) -> None:
        """Load the checkpoint that waits for the model's variables, if any. Collective."""
        if self._pending is None:
            return
        path, self._pending = self._pending, None
        state = self.state
        scalars = restore(path, state.named_tensors(), self.backend) if self._trains else self._load_weights(path)
        state.restore(scalars)
        state.held_weights = extras(path, self.backend, EXTRA)
        state.restore_layers(extras(path, self.backend, LAYERS))
        self.rule.on_state_loaded(extras(path, self.backend, RULE))
        if not self.goes_on:
            self.rule.finalize()

    @property
    def _trains(self) -> bool:
        """Whether there is an optimizer; else the model evaluates and predicts."""
        return not isinstance(innermost(self.optimizer), NoOptimizer)

    def _load_weights(self, path: Path) -> dict[str, Any]:
        """Load the weights of a checkpoint alone, or their averages if it has these; return its scalars. Collective."""
        names, scalars = contents(path, self.backend)
        saved = [name for name in names if name.startswith(f"{MAIN}/") and AVERAGES in name]
        averages = {name.partition(AVERAGES)[2]: name for name in saved if scalars["step"]}  # before it they are zeros
        sources = {f"{MODEL}{path}": averages[path] for path in self.state.trainable if path in averages}
        tensors = {name: each for name, each in self.state.named_tensors().items() if name.startswith(MODEL)}
        needed = {sources.get(name, name): each for name, each in tensors.items()}
        return restore(path, needed, self.backend, partly=True)

    def restore_commit(self, commits: Commits) -> bool:
        """Restore the newest commit of an elastic training on all ranks; return whether there is one. Collective."""
        found = commits.restore(self.state, self.backend)
        if found:
            self.rule.on_state_loaded()
        return found

    def compiled_step(self, data: TrainingData) -> CompiledStep:
        """Return the compiled step for batches of `data`, for standalone use."""
        return self.factory.train_step(self.state, self.rule, data.batch)

    def consolidate(self) -> None:
        """Make the model hold the weights to be evaluated and saved. Collective."""
        self.rule.consolidate()
        self.state.average_statistics(self.backend, self.rule.trainers)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Swap in the weights' EMA (`use_ema=True`) as of the last `consolidate`."""
        return nullcontext() if self._rule is None else self._rule.averaged_weights()

    def agree(self, call: str, arguments: Mapping[str, Any], callbacks: Sequence[Any]) -> None:
        """Verify that all ranks make the same call with the same trainer. Collective."""
        _, objective, _ = self._parts
        settings = settings_of(self.seed, self.options, self.optimizer, objective=objective, callbacks=callbacks)
        agree_on_call(self.backend, call, arguments, settings)

    def _broadcast_first_weights(self) -> None:
        """Broadcast rank 0's weights (and EMA weights) if the ranks' weights differ."""
        averages = self.rule if averages_weights(self.optimizer) else None
        if broadcast_first_weights(weights_of(self.model, averages), self.backend) and self._rule is not None:
            self._rule.sync_from_model()

    def evaluate_batches(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate the model as it is. Collective."""
        swapped = self.averaged_weights() if hooks is not None and hooks.swaps else nullcontext()
        with swapped, compiled_code(self.model, eager=self.eager):
            return self.factory.evaluator()(batches, hooks)
