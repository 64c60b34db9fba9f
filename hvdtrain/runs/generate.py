"""`generate` on every rank: text from a run's language model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import gather
from hvdtrain.backends.select import backend_for
from hvdtrain.config.errors import DataError
from hvdtrain.config.model import Sampling
from hvdtrain.config.run import Config
from hvdtrain.data.sources.tokenizers import Tokenizer, tokenizer_of
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.predict import softmax
from hvdtrain.runs.trainers import trained_model
from hvdtrain.runtime.session import Session

INCOMPLETE = "\ufffd"
"""Decoded form of a character whose last bytes are missing."""


def check_language_model(description: RunDescription, name: str) -> None:
    """Refuse a run whose model does not continue a text.

    Args:
        description: of the run.
        name: the run, for the message.

    Raises:
        DataError: naming the reason.
    """
    text = description.preprocessing.text
    if text is None:
        raise DataError(
            f"{name} is not a language model: it was trained on the data source {description.data!r}, not on text "
            "(--data text). predict uses it."
        )
    if text.masked:
        raise DataError(
            f"{name} is a masked language model: it fills in single tokens by what stands on both sides of them, and "
            "cannot continue a text. generate needs a run with --data text."
        )
    if description.outputs not in ("logits", "probabilities"):
        raise DataError(f"The model of {name} returns no logits of tokens: it cannot continue a text.")


class TextGenerator:
    """Continues texts with a model from tokens [1, window] to logits [1, window, vocabulary] of the next tokens.

    Each token is drawn after one call on the last `window` tokens. A shorter text is padded at its end, which a causal
    model does not see.

    Args:
        model: the model.
        description: of its run.

    Raises:
        DataError: the model is not causal.
    """

    def __init__(self, model: Any, description: RunDescription) -> None:
        text = description.preprocessing.text
        assert text is not None, "checked by check_language_model"
        self.tokenizer: Tokenizer = tokenizer_of(text)
        self._window = text.length
        self._logits = description.outputs == "logits"
        # One shape for all steps: it is traced once.
        signature = [tf.TensorSpec([1, self._window], tf.int32), tf.TensorSpec([], tf.int32)]
        self._call = tf.function(
            lambda tokens, place: model(tokens, training=False)[0, place], input_signature=signature, autograph=False
        )
        self._check_causal()

    def encoded(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            DataError: it is empty, or has a character that the tokenizer does not know.
        """
        given = [int(token) for token in self.tokenizer.encode(prompt.encode())]
        if not given:
            raise DataError("A prompt needs at least one character: what follows it is generated.")
        return given

    def pieces(self, given: Sequence[int], sampling: Sampling, sample: int = 0) -> Iterator[str]:
        """Yield the continuation of a prompt, piece by piece.

        Args:
            given: the tokens of the prompt.
            sampling: how tokens are drawn.
            sample: number of the sample: each draws its own.
        """
        before, done, tokens = self.tokenizer.decode(given), "", list(given)
        for token in self._tokens(given, sampling, sample):
            tokens.append(token)
            # Decoded as a whole: what a token stands for can depend on its neighbours.
            text = self.tokenizer.decode(tokens)[len(before) :]
            if not text.endswith(INCOMPLETE):
                yield text[len(done) :]
                done = text
        rest = self.tokenizer.decode(tokens)[len(before) + len(done) :]
        if rest:
            yield rest

    def _tokens(self, given: Sequence[int], sampling: Sampling, sample: int) -> Iterator[int]:
        draws = np.random.default_rng([sampling.seed, sample])
        context = list(given)
        for _ in range(sampling.length):
            context = context[-self._window :]
            token = drawn(self._scores(context), sampling, draws)
            context.append(token)
            yield token

    def _scores(self, context: list[int], fill: int = 0) -> np.ndarray:
        """Return the logits [vocabulary] of the token after `context`."""
        tokens = np.full((1, self._window), fill, np.int32)
        tokens[0, : len(context)] = context
        scores = self._call(tf.constant(tokens), tf.constant(len(context) - 1)).numpy().astype(np.float64)
        return scores if self._logits else np.log(np.maximum(scores, 1e-30))

    def _check_causal(self) -> None:
        if self._window == 1:
            return
        last = self.tokenizer.size - 1
        if not np.allclose(self._scores([0], fill=0), self._scores([0], fill=last), rtol=1e-4, atol=1e-4):
            raise DataError(
                "The model is not causal: its prediction for a token depends on the tokens that follow, so it cannot "
                "continue a text. A transformer needs --model-args causal True, which is its default."
            )


def drawn(scores: np.ndarray, sampling: Sampling, draws: np.random.Generator) -> int:
    """Return a token drawn by the softmax of `scores` [vocabulary]."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    if sampling.top_k is not None and sampling.top_k < len(scores):
        kept = np.argsort(-scores, kind="stable")[: sampling.top_k]
        masked = np.full_like(scores, -np.inf)
        masked[kept] = scores[kept]
        scores = masked
    # The highest becomes 0 first: a tiny temperature must not make infinities.
    shares = softmax((scores - scores.max()) / sampling.temperature)
    return int(draws.choice(len(shares), p=shares))


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

    Every rank generates some of the samples, and rank 0 gives all of them to `write`; on one rank the text is written
    as it comes. A sample depends on its number and the seed alone.

    Raises:
        CheckpointError: there is no such checkpoint.
        DataError: the run is no language model, or its tokenizer does not know a character of the prompt.
    """
    check_language_model(description, str(folder.path))
    backend = backend_for(session)
    with trained_model(config, description, folder.checkpoints, checkpoint, backend) as model:
        generator = TextGenerator(model, description)
        given = generator.encoded(prompt)
        head = f"--- sample {{}} of {samples}\n" if samples > 1 else ""
        if backend.size == 1:
            for sample in range(samples):
                write(head.format(sample + 1) + prompt)
                for piece in generator.pieces(given, sampling, sample):
                    write(piece)
                write("\n")
            return
        mine = {
            sample: "".join(generator.pieces(given, sampling, sample))
            for sample in range(backend.process, samples, backend.processes)
        }
        texts: dict[str, str] = {}
        for part in gather(backend, mine, timeout=None, among="data_parallel"):
            texts |= part
        if backend.primary:
            for sample in range(samples):
                write(f"{head.format(sample + 1)}{prompt}{texts[str(sample)]}\n")
