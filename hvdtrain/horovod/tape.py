"""Gradient tapes that reduce gradients over the ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import share_recording, tape_options
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Average, Compression, global_process_set
from hvdtrain.horovod.flavour import keras, refuse_other_keras
from hvdtrain.horovod.reduction import Reduction, groups_of
from hvdtrain.state.variables import as_written, unwrap


@as_written
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> "ReducingTape":
    """Wrap a tape, already recorded or for a `with` block, so that `gradient` returns reduced gradients.

    Sources may be Keras or TensorFlow variables. `device_sparse` is ignored: sparse gradients use `device_dense`.
    """
    reduction = Reduction(
        role="DistributedGradientTape",
        op=op,
        compression=compression,
        groups=groups_of(num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        scale_local=scale_local_gradients,
        device_dense=device_dense or device_sparse,
    )
    return ReducingTape(gradtape, reduction)


@as_written
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> "ReducingTape":
    """Wrap a tape as `DistributedGradientTape` does; the gradients of `local_layers` stay local."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


class ReducingTape(tf.GradientTape):
    """A tape that reduces the gradients it computes."""

    def __init__(self, tape: tf.GradientTape, reduction: Reduction) -> None:
        super().__init__(*tape_options(tape))
        share_recording(self, tape)
        self._reduction = reduction

    @as_written
    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of `source`, a variable, local."""
        self._reduction.keep_local([source])

    @as_written
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **kwargs: Any
    ) -> Any:
        """Return d target / d sources, reduced, in the structure of `sources`.

        Gradients are always matched by position, so `use_generic_names` is ignored. Other arguments are passed to
        tf.GradientTape.gradient.
        """
        flat = tf.nest.flatten(sources)
        local = super().gradient(target, [_watched(source) for source in flat], output_gradients, **kwargs)
        reduced = self._reduction.reduce(local, flat)
        return tf.nest.pack_sequence_as(sources, reduced)

    @as_written
    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs of the local sources, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._reduction.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reduction.is_local(pair[0])]


def variables_of(local_layers: Any) -> Iterable[Any]:
    """Return the trainable variables of a layer or of a collection of layers.

    Raises:
        ConfigError: something else was passed.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        refuse_other_keras(layer)
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in layers for variable in layer.trainable_weights]


def _watched(source: Any) -> Any:
    return unwrap(source) if hasattr(source, "assign") else source
