"""The trainer of what a configuration names."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.run import Config
from hvdtrain.data.shapes import check_shapes
from hvdtrain.data.source import DataSplits
from hvdtrain.models.registry import build_model, layout_rules, model_family
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.parallel.parallelize import parallelize
from hvdtrain.runs.run_data import RunData
from hvdtrain.training.objective.soft_labels import soft_label_loss, soft_label_metrics
from hvdtrain.training.options import StepOptions
from hvdtrain.training.trainer import Trainer


def run_trainer(config: Config, source: RunData, backend: Backend) -> Trainer:
    """Return the trainer of what `config` names, for its data.

    Raises:
        ConfigError: options that do not fit.
        DataError: data that do not fit the model.
    """
    return checked_trainer(config, source.splits, backend, _schedule_steps(config, source))


def checked_trainer(config: Config, splits: DataSplits, backend: Backend, steps: int) -> Trainer:
    """Do what `run_trainer` does, for a schedule of the learning rate that spans `steps`."""
    check_sequence_parallel(config, backend)
    trainer = trainer_for(config, shape=splits.sample_shape, classes=splits.classes, backend=backend, steps=steps)
    check_shapes(trainer.model, splits, model_family(config.model).loss())
    return trainer


def check_sequence_parallel(config: Config, backend: Backend) -> None:
    """Refuse --sequence-parallel where no ranks share matrices.

    Raises:
        ConfigError: naming the options.
    """
    if config.model.sequence_parallel and "tp" not in backend.axes:
        raise ConfigError(
            "--sequence-parallel has no effect without --parallel tp=N: leave it out, or go on with a run that had it "
            "by --sequence-parallel False."
        )


def trainer_for(config: Config, shape: Any, classes: int | None, backend: Backend, steps: int) -> Trainer:
    """Return the trainer of what `config` names, for any data of that shape.

    Args:
        config: of the run.
        shape: shape of one input, or a nest of shapes.
        classes: number of classes; None if the targets are no labels.
        backend: the replicas.
        steps: what the schedule of the learning rate spans.

    Raises:
        ConfigError: options that do not fit.
    """
    family = model_family(config.model)
    seed, loss = config.training.seed, family.loss()
    metrics = soft_label_metrics(config.data, family.metrics())
    tolerated = config.data.tolerated  # what is left out weighs nothing
    return Trainer(
        _split(lambda: build_model(config.model, shape, classes, seed), config, classes, backend),
        lambda: build_optimizer(config.optim, steps, config.data.batch),
        soft_label_loss(config.data, loss),
        seed=seed,
        backend=backend,
        metrics=None if tolerated else metrics,
        weighted_metrics=metrics if tolerated else None,
        **step_arguments(config),
    )


def _split(build: Callable[[], Any], config: Config, classes: int | None, backend: Backend) -> Callable[[], Any]:
    """Return a builder of the model that `build` builds, split where the ranks are laid out along tp or cp.

    Raises:
        ConfigError: a model without rules for tp.
    """
    if not {"tp", "cp"} & set(backend.axes):
        return build
    rules = layout_rules(config.model, classes, backend.axes.get("tp", 1))
    return lambda: parallelize(build, rules, sequence_parallel=config.model.sequence_parallel)


def _schedule_steps(config: Config, source: RunData) -> int:
    """Return the steps of all epochs: the schedule spans them also where --max-steps ends the run before."""
    return config.training.epochs * source.training.steps_per_epoch


def step_arguments(config: Config) -> dict[str, Any]:
    """Return the options of a step that `config` sets."""
    names = {field.name for field in fields(StepOptions)}
    sections = (
        *(config.training, config.optim, config.exchange, config.update),
        *(config.pipeline, config.bad_steps, config.desync),
    )
    return {name: value for part in sections for name, value in vars(part).items() if name in names}
