"""Batches of a run whose data are streamed: what a user's function gave, read as training goes on."""

from collections.abc import Iterable

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.stream_source import StreamSource
from hvdtrain.training.data_arguments import first_batches
from hvdtrain.training.inputs import training_data, validation_batches


def stream_training(source: StreamSource, config: Config, backend: Backend) -> TrainingData:
    """Return this replica's training batches of a stream.

    Raises:
        ConfigError: options that need samples with numbers, or data that never end without --steps-per-epoch.
        DataError: ranks that read other batches.
    """
    _check_options(source, config.data)
    return training_data(
        source.batches(config.data.batch, "batch"),
        backend,
        batch=None,
        seed=config.training.seed,
        shuffle=config.data.shuffle,
        steps_per_epoch=config.training.steps_per_epoch,
    )


def stream_evaluation(source: StreamSource, config: DataConfig, steps: int | None, backend: Backend) -> Iterable[Batch]:
    """Return this replica's evaluation batches of a stream, of the size that they have, or of --eval-batch samples.

    Raises:
        ConfigError: data that never end without --validation-steps.
        DataError: ranks that read other batches.
    """
    samples = config.samples_evaluated
    data = source.data if source.batched else source.batches(samples, "eval_batch")
    return validation_batches(first_batches(data, steps, samples), backend, batch=samples)


def _check_options(source: StreamSource, config: DataConfig) -> None:
    """Refuse options that would have no effect."""
    unfit = {
        "--augment": bool(config.augment),
        "--tail": config.tail != "pad",
        "--shard-by": config.shard_by != "samples",
        "--on-bad-record": bool(config.tolerated),
        "--cache file": config.cache == "file",
        "--data-threads": bool(config.data_threads),
        "--data-memory-mb": bool(config.data_memory_mb),
    }
    for option, used in unfit.items():
        if used:
            raise ConfigError(
                f"{option} is for samples that are read by their numbers, and {source.name} gives batches in an order "
                "of its own. Leave it out, or use --cache memory, which reads all of them once into memory."
            )
