"""The trainer that a configuration describes, and what its start on N ranks would refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.planned import planned
from hvdtrain.backends.protocol import Backend
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.run import Config
from hvdtrain.config.tuning import TuningConfig
from hvdtrain.data.batch import Batch
from hvdtrain.data.order import Order
from hvdtrain.data.registry import load_splits
from hvdtrain.data.shapes import check_shapes
from hvdtrain.data.source import DataSplits
from hvdtrain.models.objective import soft_label_loss, soft_label_metrics
from hvdtrain.models.registry import build_model, layout_rules, model_family
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.optim.precision import precision
from hvdtrain.parallel.parallelize import parallelize
from hvdtrain.runs.description import RunDescription, inputs_of, zeros_of
from hvdtrain.runs.run_data import RunData, check_batch
from hvdtrain.runs.tuning import (
    Begun,
    Earlier,
    begin_with,
    check_prepared_alike,
    check_teacher,
    earlier_run,
    student_of,
    taught,
    tune,
    tuned_model,
)
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.session import check_parallel
from hvdtrain.training.assembly import check_split
from hvdtrain.training.evaluation.predict import build_for
from hvdtrain.training.options import StepOptions
from hvdtrain.training.trainer import Trainer

ANY_STEPS = 10**9
"""Steps of a learning rate's schedule that nothing is trained with."""
NOTHING = Begun()
OF_MODELS = ("precision", "sync_batch_norm")
"""Options of a step that change what its model is."""


def run_trainer(config: Config, source: RunData, backend: Backend, *, goes_on: bool = False) -> Trainer:
    """Return the trainer of `config`, for its data. Collective where it begins with another run.

    Args:
        config: the configuration.
        source: the data.
        backend: the replicas.
        goes_on: whether a checkpoint is restored next, so that no other run's weights are needed.

    Raises:
        CheckpointError: the run that it begins with, or its teacher, is not there.
        ConfigError: options that do not fit.
        DataError: data that do not fit the model.
    """
    # The schedule spans all epochs, also where --max-steps ends the run before.
    steps = config.training.epochs * source.training.steps_per_epoch
    begun = _begun(config, source.splits, backend, goes_on=goes_on)
    return checked_trainer(config, source.splits, backend, steps=steps, begun=begun)


def checked_trainer(
    config: Config, splits: DataSplits, backend: Backend, steps: int, begun: Begun = NOTHING
) -> Trainer:
    """Return the trainer for data of `splits`, with a schedule of the learning rate over `steps`."""
    check(config.model, facts=Facts.on_mesh(backend.axes))
    shape, classes = splits.sample_shape, splits.classes
    trainer = trainer_for(config, shape=shape, classes=classes, backend=backend, steps=steps, begun=begun)
    check_shapes(student_of(trainer.model), splits, model_family(config.model).loss())
    return trainer


def _begun(config: Config, splits: DataSplits, backend: Backend, *, goes_on: bool) -> Begun:
    """Return what a run begins with; of one that goes on, its teacher alone. Collective."""
    tuning, weights, teacher = config.tuning, None, None
    if tuning == TuningConfig():
        return NOTHING
    if tuning.weights is not None and not goes_on:
        weights = earlier_run("--weights", Path(tuning.weights), backend)
        check_prepared_alike(weights, splits)
    if tuning.teacher is not None:
        teacher = earlier_run("--teacher", Path(tuning.teacher), backend)
        check_teacher(teacher, splits)
    return Begun(
        base=_restored(weights, backend, narrows=False),
        teacher=_restored(teacher, backend, narrows=True),
        named="" if weights is None else weights.named,
        zeros=zeros_of(inputs_of(splits)),
    )


def _restored(run: Earlier | None, backend: Backend, *, narrows: bool) -> Any:
    """Return the model of an earlier run, with the weights that it is evaluated with. Collective."""
    if run is None:
        return None
    place = run.place
    with trained_model(run.config, run.description, place, "newest", backend, narrows=narrows) as model:
        weights = model.get_weights()
    model.set_weights(weights)  # averages are gone by now
    return model


def trainer_for(
    config: Config,
    shape: Any,
    classes: int | None,
    backend: Backend,
    steps: int,
    *,
    trains: bool = True,
    begun: Begun = NOTHING,
) -> Trainer:
    """Return the trainer of `config`, for any data of that shape.

    Args:
        config: the configuration.
        shape: shape of one input, or a nest of shapes.
        classes: number of classes; None if the targets are not labels.
        backend: the replicas.
        steps: length of the learning rate's schedule.
        trains: whether it has an optimizer; without, it restores weights alone, and holds nothing else.
        begun: what it begins with.

    Raises:
        ConfigError: options that do not fit.
    """
    seed, compiled = config.training.seed, _objective(config)
    options = step_arguments(config)
    if trains:
        compiled["optimizer"] = lambda: build_optimizer(config.optim, steps, config.data.batch)
    else:
        options = {name: options[name] for name in OF_MODELS}
    splits = bool({"tp", "cp"} & set(backend.axes))
    rules = layout_rules(config.model, classes, backend.axes.get("tp", 1)) if splits else None
    sequence_parallel = config.model.sequence_parallel

    def build() -> Any:
        model = build_model(config.model, shape, classes, seed)
        if begun.zeros is not None and config.tuning != TuningConfig():
            build_for(model, [_one(begun.zeros)])
        if begun.base is not None:
            begin_with(model, begun.base, begun.named)
        tune(model, config.tuning, seed=seed, steps_per_epoch=steps // config.training.epochs)
        if begun.teacher is None:
            return model
        distiller = taught(model, begun.teacher, config.tuning)
        distiller.compile(compiled["optimizer"](), compiled["loss"], compiled["metrics"])  # one of its own
        return distiller

    model: Any = (lambda: parallelize(build, rules, sequence_parallel=sequence_parallel)) if splits else build
    if config.tuning != TuningConfig() and config.update.zero == 3:
        with precision(config.training.precision):
            model = model()  # one whose variables are made in parts has nowhere to put whole ones
    settings = compiled if begun.teacher is None else {}
    return Trainer(model, seed=seed, backend=backend, **settings, **options)


def _objective(config: Config) -> dict[str, Any]:
    """Return the loss and the metrics of a run."""
    family = model_family(config.model)
    metrics = soft_label_metrics(config.data, family.metrics())
    tolerated = config.data.tolerated  # what is left out weighs nothing
    return {
        "loss": soft_label_loss(config.data, family.loss()),
        "metrics": None if tolerated else metrics,
        "weighted_metrics": metrics if tolerated else None,
    }


@contextmanager
def trained_model(
    config: Config,
    description: RunDescription,
    folder: Path,
    which: str,
    backend: Backend,
    like: Batch | None = None,
    *,
    narrows: bool = True,
) -> Iterator[Any]:
    """Yield a run's model as it is evaluated in training: with the averages of its weights, if any. Collective.

    Args:
        config: of the run.
        description: of the run.
        folder: holds the run's checkpoints, or is one of them.
        which: `newest`, `best`, or the number of a step.
        backend: the replicas.
        like: a batch of the model's inputs; None: one sample of zeros.
        narrows: see `tuned_model`.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the configuration.
    """
    trainer = restoring_trainer(config, description, description.classes, backend)
    build_for(trainer.model, [_one(description.zeros()) if like is None else like])
    trainer.restore(folder, which)
    trainer.rule.consolidate()
    with trainer.averaged_weights():
        yield tuned_model(trainer.model, narrows=narrows)


def restoring_trainer(config: Config, description: RunDescription, classes: int | None, backend: Backend) -> Trainer:
    """Return the trainer of a run that is not trained further, to restore it; see `trainer_for`."""
    # Other rules than an all-reduce hold weights in their own state, too.
    whole = config.update.update != "all_reduce" or config.update.local_steps is not None
    return trainer_for(
        config,
        shape=description.sample_shape,
        classes=classes,
        backend=backend,
        steps=ANY_STEPS,
        trains=whole,
        begun=Begun(zeros=description.zeros()),
    )


def _one(inputs: Any) -> Batch:
    return Batch(inputs=inputs, targets=None, sample_weight=None, has_samples=1.0, global_samples=1)


def step_arguments(config: Config) -> dict[str, Any]:
    """Return the options of a step that `config` sets."""
    names = {field.name for field in fields(StepOptions)}
    sections = (
        *(config.training, config.optim, config.exchange, config.update),
        *(config.pipeline, config.bad_steps, config.desync),
    )
    return {name: value for part in sections for name, value in vars(part).items() if name in names}


def check_start(config: Config, ranks: int) -> None:
    """Refuse what a start on `ranks` ranks would refuse: of the layout, the batch, the data, the model and the options.

    Where ranks share a model or its slots, the data are loaded, which say how many classes there are, and the model is
    built as a rank of each stage of a pipeline would.

    Raises:
        UserError: as the start does.
    """
    runtime, axes = config.processes, parse_axes(config.processes.parallel)
    mesh = Mesh.of(axes, 0, ranks)
    environment = replace(detect_environment({}), launcher="mpirun", size=ranks, elastic=config.elastic.elastic)
    check_parallel(runtime, environment, with_horovod=runtime.backend in ("auto", "horovod"))
    with planned(runtime, mesh) as backend:
        check_batch(config, backend)
        check(config.model, facts=Facts.on_mesh(backend.axes))
    if not (set(backend.axes) - {"dp"} or (config.update.zero and ranks > 1)):
        return
    splits = load_splits(config.data, config.training.seed)
    for rank in mesh.ranks_along("pp"):
        with planned(runtime, Mesh.of(axes, rank, ranks)) as backend:
            trainer = checked_trainer(config, splits, backend, _schedule_steps(config, splits))
            if trainer.model.built:
                check_split(trainer.model, backend.axes)


def _schedule_steps(config: Config, splits: DataSplits) -> int:
    """Return the steps of all epochs, or many where only a start would count the samples."""
    data, training = config.data, config.training
    samples: int | None = splits.train.size  # None: a stream
    if samples is None or data.shard_by == "files":
        return training.epochs * training.steps_per_epoch if training.steps_per_epoch else ANY_STEPS
    order = Order(samples=samples, batch=data.batch, seed=training.seed, shuffle=data.shuffle, tail=data.tail)
    return training.epochs * order.steps_per_epoch
