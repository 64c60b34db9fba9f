"""Embedding layer with a table sharded along `ep`.

Row indices are sent to the ranks that hold the rows, and the rows are returned: one all-to-all each way for all tables
together. Gradients return to the holder, which sums those of the same row.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, get_args

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import EmbeddingSharding
from hvdtrain.layers.exchanging import ExchangingLayer
from hvdtrain.layers.slices import add_slice, ranks_along, refuse_built_before_init
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.placement import Box, even_slice
from hvdtrain.runtime.session import has_session

SHARDINGS = get_args(EmbeddingSharding)


@dataclass(frozen=True)
class Partition:
    """Sharding of a table [rows, dim] over `ranks` ranks."""

    rows: int
    dim: int
    sharding: EmbeddingSharding
    """`table`: one rank holds all of it; `row`, `column`: each rank a shard of its rows or columns."""
    ranks: int
    owner: int = 0
    """The rank that holds a whole table, modulo the number of ranks."""

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"A table is sharded by {', '.join(SHARDINGS)}. Received: {self.sharding!r}.")
        if min(self.rows, self.dim) < 1:
            raise ConfigError(f"A table needs positive sizes. Received: rows={self.rows}, dim={self.dim}.")
        if self.sharding == "column" and self.dim % self.ranks:
            raise ConfigError(
                "A table sharded by column needs a number of columns that the ranks along ep divide. "
                f"Received: {self.dim} columns, {self.ranks} ranks. Choose another dim, or shard by row or table."
            )

    def box(self, rank: int) -> Box:
        """Return the shard of `rank`; may be empty."""
        rows, columns = slice(0, self.rows), slice(0, self.dim)
        if self.ranks == 1 or self.sharding == "none":
            return rows, columns
        if self.sharding == "table":
            return (rows if rank == self.owner % self.ranks else slice(0, 0)), columns
        if self.sharding == "row":
            return even_slice(self.rows, self.ranks, rank), columns
        return rows, even_slice(self.dim, self.ranks, rank)

    def first_rows(self) -> np.ndarray:
        """Return each rank's first row, [ranks]; past the end for trailing empty shards."""
        if self.sharding != "table":
            return np.array([self.box(rank)[0].start for rank in range(self.ranks)])
        return np.array([0 if rank <= self.owner % self.ranks else self.rows for rank in range(self.ranks)])

    def counts(self) -> np.ndarray:
        """Return each rank's number of rows, [ranks]."""
        return np.array([self.box(rank)[0].stop - self.box(rank)[0].start for rank in range(self.ranks)])


class RowExchange(Protocol):
    """All-to-all of rows among the ranks that share the tables."""

    size: int
    index: int

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Send `rows[i]` consecutive rows to rank i; return received rows by rank, and their counts."""


class Table(NamedTuple):
    """A table with this rank's shard."""

    partition: Partition
    part: Any
    """[own rows, own columns], a tf.Variable."""


class Addresses(NamedTuple):
    """Location of looked-up rows; a rank's shards are concatenated."""

    holders: tf.Tensor
    """[lookups], int32: the holder of each row."""
    places: tf.Tensor
    """[lookups], int64: its index among all rows of the holder."""


def addresses(tables: Sequence[Partition], rows: Sequence[tf.Tensor]) -> Addresses:
    """Return the location of rows, given as int64 row indices per table."""
    firsts = np.stack([table.first_rows() for table in tables])  # [tables, ranks]
    begins = begins_of(tables)
    holders = [
        tf.searchsorted(tf.constant(first, tf.int64), numbers, side="right") - 1
        for first, numbers in zip(firsts, rows, strict=True)
    ]
    places = [
        numbers + tf.gather(tf.constant(begin - first, tf.int64), holder)
        for begin, first, numbers, holder in zip(begins, firsts, rows, holders, strict=True)
    ]
    return Addresses(tf.concat(holders, 0), tf.concat(places, 0))


def begins_of(tables: Sequence[Partition]) -> np.ndarray:
    """Return each table's offset among a rank's concatenated rows: [tables, ranks]."""
    counts = np.stack([table.counts() for table in tables])
    return np.cumsum(counts, axis=0) - counts


def look_up(tables: Sequence[Table], rows: Sequence[tf.Tensor], ranks: RowExchange, *, name: str) -> list[tf.Tensor]:
    """Return each table's rows [lookups, dim], sharded by table or row. Collective.

    Tables have one dim and sharding, in the same order on every rank; `rows` are int64 vectors of any length.
    """
    partitions = [table.partition for table in tables]
    holders, places = addresses(partitions, rows)
    order = tf.argsort(holders, stable=True)
    counts = tf.math.bincount(holders, minlength=ranks.size, maxlength=ranks.size)
    wanted, wanted_by = ranks.exchange_rows(tf.gather(places, order), counts, name=f"{name}/rows")
    found = _own_rows(tables, wanted, begins_of(partitions)[:, ranks.index])
    came = send_rows(found, wanted_by, counts, ranks, name=f"{name}/vectors")
    in_order = tf.gather(came, tf.math.invert_permutation(order))
    return tf.split(in_order, [tf.shape(numbers)[0] for numbers in rows], num=len(rows))


def look_up_columns(
    tables: Sequence[Table], rows: Sequence[tf.Tensor], ranks: RowExchange, *, name: str
) -> list[tf.Tensor]:
    """Like `look_up`, for tables sharded by column: every rank holds part of every row. Collective."""
    firsts = np.cumsum([0, *(table.partition.rows for table in tables[:-1])])
    mine = tf.concat([numbers + first for numbers, first in zip(rows, firsts, strict=True)], 0)
    counts = tf.fill([ranks.size], tf.shape(mine)[0])
    wanted, wanted_by = ranks.exchange_rows(tf.tile(mine, [ranks.size]), counts, name=f"{name}/rows")
    came = send_rows(_own_rows(tables, wanted, firsts), wanted_by, counts, ranks, name=f"{name}/vectors")
    parts = tf.reshape(came, [ranks.size, -1, came.shape[1]])
    whole = tf.reshape(tf.transpose(parts, [1, 0, 2]), [-1, ranks.size * came.shape[1]])
    return tf.split(whole, [tf.shape(numbers)[0] for numbers in rows], num=len(rows))


def _own_rows(tables: Sequence[Table], places: tf.Tensor, begins: np.ndarray) -> tf.Tensor:
    """Return rows of this rank's shards, [lookups, columns], by index across tables."""
    if len(tables) == 1:
        return tf.gather(tables[0].part, places)
    table = tf.searchsorted(tf.constant(begins, tf.int64), places, side="right") - 1
    numbers = tf.dynamic_partition(places - tf.gather(tf.constant(begins, tf.int64), table), table, len(tables))
    back = tf.dynamic_partition(tf.range(tf.shape(places)[0]), table, len(tables))
    found = [tf.gather(each.part, rows) for each, rows in zip(tables, numbers, strict=True)]
    # Of no lookups at all dynamic_stitch would return a vector of another shape.
    return tf.gather(tf.concat(found, 0), tf.math.invert_permutation(tf.concat(back, 0)))


def send_rows(x: tf.Tensor, rows: tf.Tensor, back: tf.Tensor, ranks: RowExchange, *, name: str) -> tf.Tensor:
    """Send `rows[i]` consecutive rows of `x` [rows, width] to rank i; gradients take the reverse path. Collective."""

    @tf.custom_gradient
    def sent(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            return ranks.exchange_rows(dy, back, name=f"{name}/back")[0]

        return ranks.exchange_rows(value, rows, name=name)[0], gradient

    return sent(x)


@keras.saving.register_keras_serializable(package="hvdtrain")
class ShardedEmbedding(ExchangingLayer):
    """`keras.layers.Embedding` with its table sharded along `ep`.

    Each rank looks up its own samples' rows by an all-to-all with the holders. Gradients go to the holder, which alone
    keeps the optimizer state. In one process it is a plain embedding. Inputs are integers of any shape, outputs have
    one more dim.

    Args:
        input_dim: rows of the table.
        output_dim: size of an embedding.
        sharding: `row`: each rank holds a shard of the rows; `column`: of the columns; `table`: one rank holds all of
            it; `none`: every rank does.
        owner: with `table`, the rank along `ep` that holds it, modulo the number of ranks.
        bound: initial values are uniform in [-bound, bound).
        seed: of the initial values, which do not depend on the sharding; None: from Keras.

    Raises:
        ConfigError: sizes that are not positive, an unknown sharding, or columns not divisible by the ranks.

    Example::

        users = keras.Input((1,), dtype="int32")
        vectors = hvdtrain.ShardedEmbedding(1000, 16, "row")(users)
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
        """The group that shares the table; None if this process holds it."""

    def build(self, input_shape: Any = None) -> None:
        """Create this rank's shard of the table."""
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
        """Return embeddings [..., output_dim]; `vectors` are precomputed by `TableLookups`."""
        if vectors is None:
            (vectors,) = look_up_together([self], [inputs])
        return vectors

    def compute_output_spec(self, inputs: Any, vectors: Any = None) -> Any:
        """Return the output shape without a collective."""
        return keras.KerasTensor((*inputs.shape, self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        names = ("input_dim", "output_dim", "sharding", "owner", "bound", "seed")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def look_up_together(layers: Sequence[ShardedEmbedding], inputs: Sequence[Any]) -> list[tf.Tensor]:
    """Return the embeddings of each layer's integer inputs, in one exchange. Collective.

    Layers have one dim and sharding, in the same order on every rank. Raises ConfigError for a layer built before
    `hvdtrain.init` with ranks to share its table.
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
    """Assert that all `rows` exist: another rank would fail, or return zeros."""
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
    """Looks up one category per table in one exchange, for `ShardedEmbedding`s of one dim and sharding."""

    def __init__(self, layers: Sequence[ShardedEmbedding], name: str | None = None) -> None:
        super().__init__(name=name)
        self._tables = list(layers)

    def call(self, categories: Any) -> Any:
        """Return the embeddings [batch, tables, dim] of categories [batch, tables]."""
        for layer in self._tables:
            layer.build()
        return tf.stack(look_up_together(self._tables, tf.unstack(categories, num=len(self._tables), axis=1)), axis=1)

    def get_config(self) -> dict[str, Any]:
        """Refuse to save this rank's shard as the model. Always raises ConfigError."""
        raise ConfigError(
            "Each rank holds a part of the tables, and none can save the full model. Received: model.save(). Use "
            "Trainer.save; python -m hvdtrain checkpoint export writes the whole model."
        )

    def compute_output_spec(self, categories: Any) -> Any:
        """Return the shape of the embeddings."""
        first = self._tables[0]
        return keras.KerasTensor((*categories.shape, first.output_dim), dtype=first.compute_dtype)
