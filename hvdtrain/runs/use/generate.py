"""Text from a run's language model: what `generate` does on every rank."""

import json
from collections.abc import Callable

import tensorflow as tf

from hvdtrain.backends.select import backend_for
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.use.model import trained_model
from hvdtrain.runs.use.text_generator import Sampling, TextGenerator, check_language_model
from hvdtrain.runtime.session import Session


def generate(
    session: Session,
    config: Config,
    folder: RunFolder,
    description: RunDescription,
    prompt: str,
    sampling: Sampling,
    write: Callable[[str], None],
    *,
    samples: int = 1,
    checkpoint: str = "newest",
) -> None:
    """Continue `prompt`, and write it with its continuations.

    Every rank generates some of the samples, and the primary writes all of them; on one rank the text is written as it
    comes. A sample depends on its number and the seed alone.

    Args:
        session: this rank's part in the job.
        config: of the run.
        folder: of the run.
        description: of the run.
        prompt: the text to continue.
        sampling: how tokens are drawn.
        write: receives the text on the primary.
        samples: number of continuations.
        checkpoint: `newest`, `best`, or the number of a step.

    Raises:
        CheckpointError: there is no such checkpoint.
        DataError: the run is no language model, or its tokenizer does not know a character of the prompt.
    """
    check_language_model(description, str(folder.path))
    backend = backend_for(session)
    like = Batch(
        inputs=tf.zeros([1, *description.sample_shape], tf.int32),
        targets=None,
        sample_weight=None,
        has_samples=1.0,
        global_samples=1,
    )
    with trained_model(config, description, folder.checkpoints, checkpoint, backend, like) as model:
        generator = TextGenerator(model, description)
        given = generator.encoded(prompt)
        if backend.size == 1:
            for sample in range(samples):
                write(_head(sample, samples) + prompt)
                for piece in generator.pieces(given, sampling, sample):
                    write(piece)
                write("\n")
            return
        mine = {
            sample: "".join(generator.pieces(given, sampling, sample))
            for sample in range(backend.process, samples, backend.processes)
        }
        texts: dict[str, str] = {}
        for part in backend.gather_bytes(json.dumps(mine).encode(), timeout=None, among="data_parallel"):
            texts |= json.loads(part)
        if backend.primary:
            for sample in range(samples):
                write(f"{_head(sample, samples)}{prompt}{texts[str(sample)]}\n")


def _head(sample: int, samples: int) -> str:
    """Return the line above a sample; "" for the only one."""
    return f"--- sample {sample + 1} of {samples}\n" if samples > 1 else ""
