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
from hvdtrain.models.family import ModelFamily, path_seed


def build(
    shape: dict[str, tuple[int, ...]],
    classes: int,
    seed: int,
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
        rows: rows of each embedding table; larger categories wrap around (modulo).
        dim: size of the embeddings.
        width: units of each hidden layer.
        depth: number of hidden layers of each MLP.

    Raises:
        ConfigError: sizes that are not positive, or more than two labels.
    """
    return build_sharded(shape, classes, seed, "none", rows=rows, dim=dim, width=width, depth=depth)


def build_sharded(
    shape: dict[str, tuple[int, ...]],
    classes: int,
    seed: int,
    sharding: EmbeddingSharding,
    *,
    rows: int = 1000,
    dim: int = 16,
    width: int = 128,
    depth: int = 2,
) -> keras.Model:
    """Return `build`'s model with tables sharded by `table`, `row` or `column`."""
    if min(rows, dim, width, depth) < 1:
        raise ConfigError(f"dlrm needs positive sizes. Received: rows={rows}, dim={dim}, width={width}, depth={depth}.")
    if classes != 2:
        raise ConfigError(f"dlrm predicts clicks: its labels are 0 and 1. The data have {classes} classes.")
    numbers = keras.Input(shape["numeric"], name="numeric")
    categories = keras.Input(shape["categorical"], dtype="int32", name="categorical")
    dense = _mlp(numbers, depth=depth, width=width, seed=seed, name="numbers")
    dense = _dense(dense, dim, seed, "numbers_out", activation="relu")
    if sharding == "none" or ranks_along("ep") is None:
        fields = [
            _looked_up(categories, field=field, rows=rows, dim=dim, seed=seed)
            for field in range(shape["categorical"][0])
        ]
    else:
        fields = _looked_up_together(
            categories, fields=shape["categorical"][0], rows=rows, dim=dim, seed=seed, sharding=sharding
        )
    x = keras.layers.Concatenate(name="features")([dense, _products([dense, *fields])])
    x = _mlp(x, depth=depth, width=width, seed=seed, name="features")
    odds = _dense(x, 1, seed, "log_odds", dtype="float32")
    return keras.Model({"numeric": numbers, "categorical": categories}, odds, name="dlrm")


def _mlp(x: Any, depth: int, width: int, seed: int, name: str) -> Any:
    for number in range(depth):
        x = _dense(x, width, seed, f"{name}_hidden{number}", activation="relu")
    return x


def _dense(x: Any, units: int, seed: int, name: str, **options: Any) -> Any:
    initializer = keras.initializers.HeNormal(seed=path_seed(seed, name))
    return keras.layers.Dense(units, kernel_initializer=initializer, name=name, **options)(x)


def _looked_up(categories: Any, field: int, rows: int, dim: int, seed: int) -> Any:
    """Return the embeddings [batch, dim] of one categorical feature."""
    name, bound = f"table{field}", _bound(rows)
    draw = keras.initializers.RandomUniform(-bound, bound, seed=path_seed(seed, name))
    table = keras.layers.Embedding(rows, dim, embeddings_initializer=draw, name=name)
    return table(keras.ops.mod(categories[:, field], rows))


def _looked_up_together(
    categories: Any, fields: int, rows: int, dim: int, seed: int, sharding: EmbeddingSharding
) -> list[Any]:
    """Return the embeddings [batch, dim] of each categorical feature from sharded tables.

    Paths and initial values equal those of `_looked_up`.
    """
    names = [f"table{field}" for field in range(fields)]
    tables = [
        ShardedEmbedding(rows, dim, sharding, owner=field, bound=_bound(rows), seed=path_seed(seed, name), name=name)
        for field, name in enumerate(names)
    ]
    categories = keras.ops.mod(categories, rows)
    found = TableLookups(tables, name="lookups")(categories)
    return [table(categories[:, field], found[:, field]) for field, table in enumerate(tables)]


def _bound(rows: int) -> float:
    return 1 / math.sqrt(rows)


def _products(vectors: list[Any]) -> Any:
    """Return pairwise dot products, [batch, n (n - 1) / 2], of n vectors [batch, dim]."""
    count = len(vectors)
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    below = [row * count + column for row in range(count) for column in range(row)]
    return keras.ops.take(keras.ops.reshape(products, (-1, count * count)), below, axis=1)


FAMILY = ModelFamily(
    build=build,
    build_sharded=build_sharded,
    loss=lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=lambda: [
        keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0),
        keras.metrics.AUC(name="auc", from_logits=True),
    ],
    sample_dims={"numeric": ("numbers",), "categorical": ("fields",)},
)
