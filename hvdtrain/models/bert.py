"""BERT (Devlin et al. 2019, arXiv:1810.04805), a masked language model built from `transformer`.

Unlike BERT, its blocks are pre-norm, which trains without a long warm-up; there is no next-sentence task, and the
output layer is not tied to the embedding.
"""

from typing import Any

import keras

from hvdtrain.models import transformer as transformer
from hvdtrain.models.registry import ModelFamily

IGNORED = -1
"""Target at positions that are not predicted."""


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
    """Return a masked language model, tokens [length] to logits [length, vocabulary]; the vocabulary has the mask.

    Args:
        shape: (length,) of one sequence of token numbers.
        classes: size of the vocabulary.
        seed: seeds the initial value of each variable, together with its path.
        depth: number of blocks of attention and MLP.
        width: size of a token's representation.
        heads: number of attention heads; must divide the width.
        dropout: dropout rate of the embeddings and of each block's output.
    """
    sizes: dict[str, Any] = {"depth": depth, "width": width, "heads": heads, "dropout": dropout}
    return transformer.build(shape, classes, seed, causal=False, **sizes)


class MaskedAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """Accuracy over the predicted positions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Update the accuracy with a batch.

        Args:
            y_true: tokens [batch, length], IGNORED at positions that are not predicted.
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
    rules=transformer.rules,
)
