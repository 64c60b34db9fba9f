"""An embedding layer whose table the ranks along `ep` have divided among them."""

import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import EmbeddingSharding
from hvdtrain.layers.embedding.lookups import RowExchange, Table, look_up, look_up_columns
from hvdtrain.layers.embedding.partition import Partition
from hvdtrain.layers.exchanging import ExchangingLayer
from hvdtrain.layers.slices import add_slice, ranks_along, refuse_built_before_init
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.session import has_session


@keras.saving.register_keras_serializable(package="hvdtrain")
class ShardedEmbedding(ExchangingLayer):
    """`keras.layers.Embedding`, with the table divided among the ranks along `ep`.

    Each rank looks up its own samples' rows: their numbers go to the rank that holds them, and the rows come back, by
    all-to-all. Gradients go to the holder, which alone keeps the optimizer's slots. In one process it is an embedding
    like any other. Inputs are integers of any shape, outputs have one more dim.

    Args:
        input_dim: rows of the table.
        output_dim: size of an embedding.
        sharding: `row`: each rank holds a slice of the rows; `column`: of the columns; `table`: one rank holds all of
            it; `none`: every rank does.
        owner: with `table`, the rank along `ep` that holds it, modulo their number.
        bound: initial values are uniform in [-bound, bound).
        seed: of the initial values, which do not depend on the sharding; None: from Keras.

    Raises:
        ConfigError: sizes that are not positive, an unknown sharding, or columns that the ranks do not divide.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        sharding: EmbeddingSharding = "row",
        *,
        owner: int = 0,
        bound: float = 0.05,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        Partition(input_dim, output_dim, sharding, ranks=1)
        self.input_dim, self.output_dim, self.sharding = input_dim, output_dim, sharding
        self.owner, self.bound, self.seed = owner, bound, seed
        self.ranks: RowExchange | None = None
        """Those that hold the table; None if this process does."""

    def build(self, input_shape: Any = None) -> None:
        """Create this rank's part of the table."""
        if hasattr(self, "embeddings"):
            return
        ranks = ranks_along("ep") if self.sharding != "none" else None
        self.ranks = ranks
        self.built_in_session = has_session() or ranks is not None
        self.partition = Partition(
            rows=self.input_dim,
            dim=self.output_dim,
            sharding=self.sharding,
            ranks=1 if ranks is None else ranks.size,
            owner=self.owner,
        )
        if self.seed is None:
            self.seed = random.randint(1, 2**31 - 1)  # as Keras' own layers, by what keras.utils.set_random_seed sets
        self.embeddings = add_slice(
            self,
            "embeddings",
            (self.input_dim, self.output_dim),
            {} if ranks is None else {0: "ep"},
            seed=self.seed,
            bound=self.bound,
            box=self.partition.box(0 if ranks is None else ranks.index),
            autocast=False,
        )
        self.built = True

    def call(self, inputs: Any, vectors: tf.Tensor | None = None) -> tf.Tensor:
        """Return the embeddings [..., output_dim] of `inputs`; `vectors` are what `TableLookups` has found for them."""
        if vectors is None:
            (vectors,) = look_up_together([self], [inputs])
        return vectors

    def compute_output_spec(self, inputs: Any, vectors: Any = None) -> Any:
        """Return the shape of the embeddings, without an exchange that no other rank would take part in."""
        return keras.KerasTensor((*inputs.shape, self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        names = ("input_dim", "output_dim", "sharding", "owner", "bound", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def look_up_together(layers: Sequence[ShardedEmbedding], inputs: Sequence[Any]) -> list[tf.Tensor]:
    """Return the embeddings of each layer's inputs, of all in one exchange.

    Args:
        layers: of one dim and one sharding, in the same order on every rank.
        inputs: of each, integers of any shape.

    Raises:
        ConfigError: a layer was built before `hvdtrain.init`, and there are ranks to divide its table with.
    """
    for layer in layers:
        if not layer.built_in_session and layer.sharding != "none":
            refuse_built_before_init(layer, "ep")
    rows = [_checked(layer, tf.cast(tf.reshape(x, [-1]), tf.int64)) for layer, x in zip(layers, inputs, strict=True)]
    tables = [Table(layer.partition, layer.embeddings.value) for layer in layers]
    ranks = layers[0].ranks
    if ranks is None:
        found = [tf.gather(table.part, numbers) for table, numbers in zip(tables, rows, strict=True)]
    else:
        search = look_up_columns if layers[0].sharding == "column" else look_up
        found = search(tables, rows, ranks, name=numbered("embeddings"))
    return [
        tf.cast(
            tf.reshape(layer.unless_placeholder(vectors), [*_dims(x), layer.output_dim]),
            layer.compute_dtype,
        )
        for layer, x, vectors in zip(layers, inputs, found, strict=True)
    ]


def _checked(layer: ShardedEmbedding, rows: tf.Tensor) -> tf.Tensor:
    """Return `rows` if the table has them all: else another rank would fail, or return zeros."""
    inside = tf.reduce_all((rows >= 0) & (rows < layer.input_dim))
    said = (
        f"The layer {layer.name!r} has rows from 0 to {layer.input_dim - 1}. Received others: give it larger input_dim."
    )
    with tf.control_dependencies([tf.debugging.Assert(inside, [said, tf.reduce_min(rows), tf.reduce_max(rows)])]):
        return tf.identity(rows)


def _dims(x: Any) -> list[Any]:
    dynamic = tf.shape(x)
    return [dynamic[place] if size is None else size for place, size in enumerate(x.shape)]


class TableLookups(keras.Operation):
    """Looks up one category of each of several tables, of all tables in one exchange.

    Args:
        layers: `ShardedEmbedding` layers of one dim and one sharding, which are given what it finds.
    """

    def __init__(self, layers: Sequence[ShardedEmbedding], name: str | None = None) -> None:
        super().__init__(name=name)
        self._tables = list(layers)

    def call(self, categories: Any) -> Any:
        """Return the embeddings [batch, tables, dim] of categories [batch, tables]."""
        for layer in self._tables:
            layer.build()
        return tf.stack(look_up_together(self._tables, tf.unstack(categories, num=len(self._tables), axis=1)), axis=1)

    def get_config(self) -> dict[str, Any]:
        """Refuse to save the model as this rank has it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "Each rank holds a part of the tables, and none can save the model by itself. Received: model.save(). Use "
            "Trainer.save; python -m hvdtrain checkpoint export writes the whole model."
        )

    def compute_output_spec(self, categories: Any) -> Any:
        """Return the shape of the embeddings."""
        first = self._tables[0]
        return keras.KerasTensor((*categories.shape, first.output_dim), dtype=first.compute_dtype)
