"""Deep learning recommendation model, DLRM (Naumov et al. 2019, arXiv:1906.00091).

Numeric features go through a bottom MLP, each categorical feature through its own embedding table; pairwise dot
products of these vectors and the bottom MLP's output go through a top MLP to the log odds of a click.
"""

import math
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import EmbeddingSharding
from hvdtrain.layers.embedding import ShardedEmbedding, TableLookups
from hvdtrain.layers.slices import ranks_along
from hvdtrain.models.registry import ModelFamily, dense, path_seed


def build(
    shape: dict[str, tuple[int, ...]],
    classes: int,
    seed: int,
    sharding: EmbeddingSharding = "none",
    /,
    *,
    rows: int = 1000,
    dim: int = 16,
    width: int = 128,
    depth: int = 2,
) -> keras.Model:
    """Return a model from {"numeric": [numbers], "categorical": [fields]} to the log odds [1] of a click.

    Args:
        shape: shapes of the two inputs.
        classes: number of labels, must be 2.
        seed: seeds the initial value of each variable, together with its path.
        sharding: divides the tables among the ranks along ep: by `table`, `row` or `column`.
        rows: rows of each embedding table; larger categories wrap around (modulo).
        dim: size of the embeddings.
        width: units of each hidden layer.
        depth: number of hidden layers of each MLP.

    Raises:
        ConfigError: sizes that are not positive, or more than two labels.
    """
    if min(rows, dim, width, depth) < 1:
        raise ConfigError(f"dlrm needs positive sizes. Received: rows={rows}, dim={dim}, width={width}, depth={depth}.")
    if classes != 2:
        raise ConfigError(f"dlrm predicts clicks: its labels are 0 and 1. The data have {classes} classes.")
    numbers = keras.Input(shape["numeric"], name="numeric")
    categories = keras.Input(shape["categorical"], dtype="int32", name="categorical")
    x = _mlp(numbers, depth=depth, width=width, seed=seed, name="numbers")
    x = dense(x, dim, seed, "numbers_out", activation="relu")
    wrapped = keras.ops.mod(categories, rows)
    count, bound = shape["categorical"][0], 1 / math.sqrt(rows)
    seeds = {f"table{field}": path_seed(seed, f"table{field}") for field in range(count)}
    if sharding == "none" or ranks_along("ep") is None:
        fields = []
        for field, (name, drawn) in enumerate(seeds.items()):
            draw = keras.initializers.RandomUniform(-bound, bound, seed=drawn)
            table = keras.layers.Embedding(rows, dim, embeddings_initializer=draw, name=name)
            fields.append(table(wrapped[:, field]))
    else:  # the same paths and initial values
        tables = [
            ShardedEmbedding(rows, dim, sharding, owner=field, bound=bound, seed=drawn, name=name)
            for field, (name, drawn) in enumerate(seeds.items())
        ]
        found = TableLookups(tables, name="lookups")(wrapped)
        fields = [table(wrapped[:, field], found[:, field]) for field, table in enumerate(tables)]
    x = keras.layers.Concatenate(name="features")([x, _products([x, *fields])])
    x = _mlp(x, depth=depth, width=width, seed=seed, name="features")
    odds = dense(x, 1, seed, "log_odds", dtype="float32")
    return keras.Model({"numeric": numbers, "categorical": categories}, odds, name="dlrm")


def _mlp(x: Any, depth: int, width: int, seed: int, name: str) -> Any:
    for number in range(depth):
        x = dense(x, width, seed, f"{name}_hidden{number}", activation="relu")
    return x


def _products(vectors: list[Any]) -> Any:
    """Return pairwise dot products, [batch, n (n - 1) / 2], of n vectors [batch, dim]."""
    count = len(vectors)
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    below = [row * count + column for row in range(count) for column in range(row)]
    return keras.ops.take(keras.ops.reshape(products, (-1, count * count)), below, axis=1)


FAMILY = ModelFamily(
    build=build,
    shards_tables=True,
    loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=lambda: [
        keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0),
        keras.metrics.AUC(name="auc", from_logits=True),
    ],
    sample_dims={"numeric": ("numbers",), "categorical": ("fields",)},
)
