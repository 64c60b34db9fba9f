"""A gradient tape whose gradients are those of all replicas."""

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.backends.select import current_exchange
from hvdtrain.config.training import CompressionName, ReduceOpName
from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions, reduction_options
from hvdtrain.state.variables import as_written, path_of, unique_paths, unwrap


class DistributedGradientTape:
    """Wraps a `tf.GradientTape`: `gradient()` returns gradients reduced over all ranks.

    Sources may be Keras 3 variables or tf.Variables, in nested structures, eagerly or within a
    `tf.function`. Sparse gradients stay sparse, with the rows that several ranks touched added up.

    Args:
        tape: the tape to wrap; one that was recorded already, or a fresh one used as `with`.
        op: `average` (default), `sum`, or `adasum` (MPI only).
        compression: `none`, `fp16` or `bf16` on the wire.
        groups: 0 lets every gradient leave as soon as it is there; n forms n groups that leave whole; lists of
            variables name the groups.
        sparse_as_dense: True turns tf.IndexedSlices into dense tensors before the exchange, False gathers their rows;
            None does, step by step, what moves fewer bytes.
        gradient_predivide_factor: with `average`, divide by it before the sum and by size / factor after.
        exchange: the replicas; the current session's ranks if None.

    Raises:
        ConfigError: options that exclude one another.
        LaunchError: `hvdtrain.init()` was not called.
    """

    def __init__(
        self,
        tape: tf.GradientTape | None = None,
        *,
        op: ReduceOpName = "average",
        compression: CompressionName = "none",
        groups: int | Sequence[Sequence[Any]] = 0,
        sparse_as_dense: bool | None = None,
        gradient_predivide_factor: float = 1.0,
        exchange: Collectives | None = None,
    ) -> None:
        named = groups if isinstance(groups, int) else tuple(tuple(path_of(v) for v in group) for group in groups)
        self._options = reduction_options(
            op,
            compression=compression,
            groups=named,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        self._tape = tape if tape is not None else tf.GradientTape()
        self._exchange = exchange or current_exchange()

    def __enter__(self) -> Self:
        self._tape.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tape.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        """Pass `watch`, `stop_recording` and the like on to the wrapped tape."""
        return getattr(self._tape, name)

    @as_written
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """Return d target / d sources, reduced over all ranks, in the structure of `sources`."""
        flat = tf.nest.flatten(sources)
        local = self._tape.gradient(target, [_watched(source) for source in flat], output_gradients)
        names = unique_paths(flat)
        reduced = GradientReducer(self._exchange, self._options_for(flat, names)).reduce(local, names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def _options_for(self, sources: Sequence[Any], names: Sequence[str]) -> ReductionOptions:
        """Return the options with groups of the names that `sources` have among themselves."""
        if not self._options.named_groups:
            return self._options
        name_of = {path_of(s): name for s, name in zip(sources, names, strict=True) if not _is_tensor(s)}
        groups = tuple(
            tuple(name_of[path] for path in group if path in name_of) for group in self._options.named_groups
        )
        return replace(self._options, named_groups=groups)


def _is_tensor(source: Any) -> bool:
    return tf.is_tensor(source) and not isinstance(source, tf.Variable) and not hasattr(source, "path")


def _watched(source: Any) -> Any:
    return source if tf.is_tensor(source) else unwrap(source)
