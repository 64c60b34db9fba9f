"""Predictions of a run: what `predict` does on every rank.

Every rank predicts its part of each batch, and the primary writes all of them in the order of the samples. Each rank
calls the model on equally many samples, whatever their number: predictions do not depend on the number of ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.config.errors import DataError
from hvdtrain.config.run import Config
from hvdtrain.data.bad_records import GATHER_TIMEOUT_S
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation
from hvdtrain.data.prediction.samples import PredictionSamples
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.use.model import trained_model
from hvdtrain.runs.use.outputs import readable_outputs
from hvdtrain.runs.use.rows import RowFormat, RowWriter
from hvdtrain.runtime.session import Session
from hvdtrain.training.objective.outputs import inputs_for


@dataclass(frozen=True)
class PredictOptions:
    """How samples are predicted and written."""

    checkpoint: str = "newest"
    """`newest`, `best`, or the number of a step."""
    batch_size: int = 64
    """Samples per step on each rank."""
    tolerated: int = 0
    """Samples that may be unreadable: their rows say why."""
    rows: RowFormat = field(default_factory=RowFormat)


def predict(
    session: Session,
    config: Config,
    folder: RunFolder,
    description: RunDescription,
    samples: PredictionSamples,
    options: PredictOptions,
    write: Callable[[str], None],
) -> int:
    """Predict `samples` on all ranks, and return how many could not be read.

    Args:
        session: this rank's part in the job.
        config: of the run.
        folder: of the run.
        description: of the run.
        samples: the same on every rank.
        options: how they are predicted.
        write: receives the lines on the primary, batch after batch.

    Raises:
        CheckpointError: there is no such checkpoint.
        DataError: a sample cannot be read, or ranks see different samples.
    """
    backend = backend_for(session)
    _check_same(samples, backend)
    batches = _batches(samples, options, backend)
    writer = RowWriter(description, options.rows, samples.id_name, errors=options.tolerated > 0)
    first = next(iter(batches))
    with trained_model(config, description, folder.checkpoints, options.checkpoint, backend, first) as model:
        number = 0
        for outputs, errors in _outputs(model, batches, backend, options):
            ids = [samples.identify(place) for place in range(number, number + len(errors))]
            if backend.primary:
                write(writer.lines(ids, readable_outputs(outputs, description), errors))
            number += len(errors)
    return len(batches.bad.found)


def _check_same(samples: PredictionSamples, backend: Backend) -> None:
    """Refuse samples that differ by rank; every rank calls it."""
    prints = backend.gather_bytes(samples.source.fingerprint(), timeout=None)
    other = next((rank for rank, theirs in enumerate(prints) if theirs != prints[0]), None)
    if other is not None:
        raise DataError(
            f"What rank {other} is to predict is not what rank 0 is to: all ranks must see the same files. Use one "
            "rank, or a file system that they share."
        )


def _batches(samples: PredictionSamples, options: PredictOptions, backend: Backend) -> SourceEvaluation:
    return SourceEvaluation(
        samples.source,
        batch=options.batch_size * backend.data_parallel.size,
        index=backend.process,
        size=backend.processes,
        read_options=ReadOptions(finish=samples.finish, tolerated=options.tolerated),
        gather=lambda mine: backend.gather_bytes(mine, timeout=GATHER_TIMEOUT_S, among="data_parallel"),
    )


def _outputs(
    model: Any, batches: SourceEvaluation, backend: Backend, options: PredictOptions
) -> Iterator[tuple[Any, list[str]]]:
    """Yield the outputs of each global batch, and what is wrong with each of its samples."""
    call = tf.function(lambda inputs: model(inputs, training=False), autograph=False, reduce_retracing=True)
    gather = tf.function(lambda parts: _gathered(parts, backend), autograph=False, reduce_retracing=True)
    begin = 0
    for batch in batches:
        outputs = call(_filled(inputs_for(model, batch.inputs), options.batch_size))
        mine = int(batch.has_samples) * len(tf.nest.flatten(batch.inputs)[0])
        parts = tf.nest.map_structure(lambda tensor, mine=mine: tensor[:mine], outputs)
        whole = tf.nest.map_structure(lambda tensor: tensor.numpy(), gather(parts))
        if options.tolerated:
            batches.bad.share()
        end = begin + int(batch.global_samples)
        yield whole, [batches.bad.found.get(number, "") for number in range(begin, end)]
        begin = end


def _gathered(parts: Any, backend: Backend) -> Any:
    """Return the outputs of all ranks, in their order."""
    flat = [
        backend.data_parallel.all_gather(tensor, name=f"prediction/output{place}")
        for place, tensor in enumerate(tf.nest.flatten(parts))
    ]
    return tf.nest.pack_sequence_as(parts, flat)


def _filled(inputs: Any, size: int) -> Any:
    """Repeat the last sample up to `size` samples: the model is compiled once, and computes alike on any rank."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, tf.minimum(tf.range(size), len(tensor) - 1)), inputs)
