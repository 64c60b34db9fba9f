"""A masked language model as BERT (Devlin et al. 2019, arXiv:1810.04805), made of the blocks of `transformer`.

Unlike BERT's, its blocks normalize before attention and MLP, not after, which trains without a long warm-up; there is
no second task about pairs of sentences, and the output layer has a matrix of its own.
"""

from typing import Any

import keras

from hvdtrain.models.family import ModelFamily
from hvdtrain.models.transformer import model as transformer

IGNORED = -1
"""The target of a place that is not to be predicted."""


def build(
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    depth: int = 4,
    width: int = 256,
    heads: int = 4,
    dropout: float = 0.0,
) -> keras.Model:
    """Return a masked language model: tokens [length] give logits [length, vocabulary] of what is at each place.

    Args:
        shape: (length,) of one sequence of token numbers.
        classes: number of tokens in the vocabulary, with the mask.
        seed: initial values are a function of it and of each variable's path.
        depth: blocks of attention and MLP.
        width: size of a token's representation.
        heads: attention heads; they divide the width.
        dropout: share of the embeddings and of each block's output that is dropped in training.

    Raises:
        ConfigError: sizes that are not positive or do not divide, or a dropout outside of [0, 1).
    """
    sizes: dict[str, Any] = {"depth": depth, "width": width, "heads": heads, "dropout": dropout}
    return transformer.build(shape, classes, seed, causal=False, **sizes)


class MaskedAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """The share of right predictions among the places that were to be predicted."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Count a batch.

        Args:
            y_true: tokens [batch, length], IGNORED where nothing was to be predicted.
            y_pred: logits [batch, length, vocabulary].
            sample_weight: weights [batch] or [batch, length], or None.
        """
        counted = keras.ops.cast(keras.ops.not_equal(y_true, IGNORED), "float32")
        if sample_weight is not None:
            weight = keras.ops.cast(sample_weight, "float32")
            counted *= keras.ops.expand_dims(weight, -1) if len(weight.shape) == 1 else weight
        return super().update_state(y_true, y_pred, sample_weight=counted)


FAMILY = ModelFamily(
    build=build,
    loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORED),
    metrics=lambda: [MaskedAccuracy(name="accuracy")],
    sample_dims=("length",),
)
