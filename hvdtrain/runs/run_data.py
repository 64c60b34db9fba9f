"""Training and validation data of a run, from its configuration."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.data import DataConfig
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.augment import augmentation
from hvdtrain.data.bad_records import Gather
from hvdtrain.data.batch import Batch, per_replica
from hvdtrain.data.cached import cached
from hvdtrain.data.identity import check_same_data
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation, SourceTraining, TrainingData
from hvdtrain.data.registry import load_splits
from hvdtrain.data.source import DataSplits, Source
from hvdtrain.data.sources.user_data import StreamSource
from hvdtrain.models.objective import has_soft_labels
from hvdtrain.training.inputs import first_batches, training_data, validation_batches
from hvdtrain.training.step.batches import per_microbatch


def is_stream(source: Any) -> TypeGuard[StreamSource]:
    """Return whether samples come as batches of the user's, without numbers."""
    return isinstance(source, StreamSource)


def stream_training(source: StreamSource, config: Config, backend: Backend) -> TrainingData:
    """Return this replica's training batches of a stream.

    Raises:
        ConfigError: options that need samples with numbers, or data that never end without --steps-per-epoch.
        DataError: ranks that read other batches.
    """
    check(config.data, facts=Facts(stream=source.name))
    return training_data(
        source.batches(config.data.batch, "batch"),
        backend,
        batch=None,
        seed=config.training.seed,
        shuffle=config.data.shuffle,
        steps_per_epoch=config.training.steps_per_epoch,
    )


@dataclass(frozen=True)
class RunData:
    """The samples of a run, and this replica's batches."""

    splits: DataSplits
    loaded: DataSplits
    """The same samples, before --cache."""
    training: TrainingData
    validation: Iterable[Batch]

    @property
    def bad(self) -> list[str]:
        """Descriptions of the skipped samples, training first."""
        found = [left_out(part) for part in (self.training, self.validation)]
        return [part[number] for part in found for number in sorted(part)]


def left_out(batches: Any) -> dict[int, str]:
    """Return what is wrong with each sample that was skipped, by its number; streams skip none."""
    return batches.bad.found if hasattr(batches, "bad") else {}


def run_data(config: Config, backend: Backend) -> RunData:
    """Load the data of `config`; every rank calls it.

    Raises:
        ConfigError: options of the data that do not fit.
        DataError: data that cannot be used.
    """
    check_batch(config, backend)
    splits = loaded = loaded_splits(config, backend)

    def kept(source: Any) -> Any:
        return source if is_stream(source) else cached(source, config.data.cache)

    splits = replace(splits, train=kept(splits.train), validation=kept(splits.validation))
    training, steps = _training(config, splits, backend), config.training.validation_steps
    _refuse_steps(TrainingConfig(validation_steps=steps), splits.validation)
    validation = evaluation_of(splits.validation, config.data, splits, backend, steps=steps)
    return RunData(splits, loaded, training, validation)


def check_batch(config: Config, backend: Backend) -> None:
    """Refuse a batch that does not divide among the ranks, or into microbatches.

    Raises:
        ConfigError: naming one that does.
    """
    uneven, shares = backend.capabilities.uneven, backend.data_parallel.size
    per_replica(config.data.batch, shares, uneven=uneven)
    per_microbatch(config.data.batch, shares, config.training.accumulate, uneven=uneven)


def loaded_splits(config: Config, backend: Backend) -> DataSplits:
    """Load the data of `config`, the same on every rank; every rank calls it.

    Raises:
        ConfigError: options of the data that do not fit.
        DataError: data that cannot be used, or that differ by rank.
    """
    return check_loaded(config.data, load_splits(config.data, config.training.seed), backend)


def check_loaded(config: DataConfig, splits: DataSplits, backend: Backend) -> DataSplits:
    """Return `splits` once it is known that all ranks loaded the same; every rank calls it.

    Raises:
        DataError: they differ by rank.
    """
    if is_user_code(config.data) or splits.train.heavy or "path" in config.data_args:
        check_same_data(splits, backend)  # what is made by us is the same everywhere
    return splits


def _training(config: Config, splits: DataSplits, backend: Backend) -> TrainingData:
    data = config.data
    if is_stream(splits.train):
        return stream_training(splits.train, config, backend)
    _refuse_steps(TrainingConfig(steps_per_epoch=config.training.steps_per_epoch), splits.train)
    options = replace(
        _read_options(data, splits),
        augment=augmentation(data.augment, spec=splits.train.spec, classes=splits.classes),
    )
    return SourceTraining(
        splits.train,
        batch=data.batch,
        index=backend.process,
        size=backend.processes,
        seed=config.training.seed,
        shuffle=data.shuffle,
        tail=data.tail,
        shard_by=data.shard_by,
        read_options=options,
        gather=gather_along_replicas(backend),
        remedy=waiting_advice(data, heavy=splits.train.heavy),
        uneven=backend.capabilities.uneven,
    )


def waiting_advice(config: DataConfig, *, heavy: bool) -> str:
    """Return the advice shown if steps wait for data, given the options in use: a sentence, or "".

    Args:
        config: options of the data.
        heavy: whether the samples are read from files or decoded.
    """
    remedies = {
        "--cache memory or --cache file where the decoded samples fit": heavy
        and config.cache == "none"
        and not config.tolerated,
        "packed files (`python -m hvdtrain data pack`)": config.data == "class_folders" and config.cache == "none",
        "more --data-threads": config.data_threads > 0 and (heavy or bool(config.augment)),
        "fewer changes in --augment": bool(config.augment),
        "a larger --batch": not heavy and not config.augment,
    }
    named = [remedy for remedy, helps in remedies.items() if helps]
    return f"What helps: {', '.join(named)}." if named else ""


def _refuse_steps(options: TrainingConfig, source: Source) -> None:
    if not is_stream(source):
        check(options, facts=Facts(samples=f"{source.name} with {source.size:,} samples"))


def evaluation_of(
    source: Any,
    config: DataConfig,
    splits: DataSplits,
    backend: Backend,
    *,
    steps: int | None = None,
) -> Any:
    """Return this replica's batches of `source`, to be evaluated like the validation samples of `splits`.

    Args:
        source: samples, or a stream of batches.
        config: options of the data.
        splits: how samples are finished.
        backend: the replicas.
        steps: batches of a stream to evaluate; None: all of them.

    Raises:
        ConfigError: a stream that never ends, without --validation-steps.
        DataError: ranks that read other batches of a stream.
    """
    if is_stream(source):
        samples = config.samples_evaluated
        data = source.data if source.batched else source.batches(samples, "eval_batch")
        return validation_batches(first_batches(data, steps, samples), backend, batch=samples)
    options = _read_options(config, splits)
    if has_soft_labels(config):  # loss and metrics take one kind of targets: hard labels become soft

        def finish(inputs: Any, targets: Any, *weights: Any) -> tuple[Any, ...]:
            elements = inputs, targets, *weights
            elements = elements if splits.finish is None else splits.finish(*elements)
            return elements[0], tf.one_hot(elements[1], splits.classes), *elements[2:]

        options = replace(options, finish=finish)
    return SourceEvaluation(
        source,
        batch=config.samples_evaluated,
        index=backend.process,
        size=backend.processes,
        read_options=options,
        gather=gather_along_replicas(backend),
    )


def gather_along_replicas(backend: Backend) -> Gather:
    """Return a function that gathers a value of each replica."""
    return lambda mine: gather(backend, mine, among="data_parallel")


def _read_options(config: DataConfig, splits: DataSplits) -> ReadOptions:
    return ReadOptions(
        finish=splits.finish,
        tolerated=config.tolerated,
        threads=config.data_threads,
        memory_mb=config.data_memory_mb,
    )
