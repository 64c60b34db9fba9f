"""What a start on N ranks would refuse, found in one process."""

from dataclasses import replace

from hvdtrain.backends.planned import PlannedBackend, planned
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.run import Config
from hvdtrain.data.order import Order
from hvdtrain.data.registry import load_splits
from hvdtrain.data.source import DataSplits
from hvdtrain.runs.run_data import check_batch
from hvdtrain.runs.trainers import check_sequence_parallel, checked_trainer, step_arguments
from hvdtrain.runs.use.model import ANY_STEPS
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.session import check_parallel
from hvdtrain.training.assembly import check_expert_parallel, check_split
from hvdtrain.training.elastic import check_undivided
from hvdtrain.training.options import step_options


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
    if config.elastic.elastic:
        check_undivided(step_options(step_arguments(config)), config.data.shard_by)
    with planned(runtime, mesh) as backend:
        check_batch(config, backend)
        check_sequence_parallel(config, backend)
    if not (set(backend.axes) - {"dp"} or (config.update.zero and ranks > 1)):
        return
    splits = load_splits(config.data, config.training.seed)
    for rank in mesh.ranks_along("pp"):
        with planned(runtime, Mesh.of(axes, rank, ranks)) as backend:
            _check_rank(config, splits, backend)


def _check_rank(config: Config, splits: DataSplits, backend: PlannedBackend) -> None:
    trainer = checked_trainer(config, splits, backend, _schedule_steps(config, splits))
    if trainer.model.built:
        check_split(trainer.model, backend.axes)
        check_expert_parallel(trainer.model, trainer.options)


def _schedule_steps(config: Config, splits: DataSplits) -> int:
    """Return the steps of all epochs, or many where only a start would count the samples."""
    data, training = config.data, config.training
    samples: int | None = splits.train.size  # None: a stream
    if samples is None or data.shard_by == "files":
        return training.epochs * training.steps_per_epoch if training.steps_per_epoch else ANY_STEPS
    order = Order(samples=samples, batch=data.batch, seed=training.seed, shuffle=data.shuffle, tail=data.tail)
    return training.epochs * order.steps_per_epoch
