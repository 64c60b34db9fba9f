"""Magnitude pruning: the smallest weights of a model become zero while it is trained, and stay zero.

The mask of a kernel is a weight of its layer. A constraint computes and applies it in the optimizer's own update: so
it is the same on all ranks, which have the same weights, is in every checkpoint, and costs no exchange.
"""

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import add_weight_when_built, flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.export.channels import chains_of
from hvdtrain.runtime.placement import placement_of

PATTERN, CHANNELS = "2:4", "channels"
MASK, STEP = "pruning_mask", "pruning_step"
KERNELS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
GROUP = 4
"""Neighbours along the inputs of a kernel, of which two stay in the pattern 2:4."""


def prune(
    model: keras.Model,
    sparsity: float | None = None,
    *,
    layers: str | None = None,
    pattern: str | None = None,
    begin: int = 0,
    steps: int = 0,
    every: int = 100,
) -> list[str]:
    """Let a model lose its smallest weights in the steps of any training that follows, and return the pruned layers.

    Sparsity grows as in Zhu & Gupta 2017 ("To prune, or not to prune"): at step t of `steps` it is
    sparsity (1 - (1 - t / steps)^3). Weights that are zero at the end stay zero. Call it before `compile` and before a
    checkpoint is resumed; `finish_pruning` takes away what an export does not need.

    Args:
        model: a built model.
        sparsity: the share of each kernel's weights, or channels, that become zero; None: 0.8, with a pattern 0.5.
        layers: an expression that is searched for in the paths of layers; None: all Dense, EinsumDense, convolutions.
        pattern: `2:4` keeps at most the two largest of four neighbours along a kernel's inputs, and of these as many as
            `sparsity` leaves; `channels` takes whole outputs, with their bias and normalization, of the layers that
            `take_out_channels` can do without them; None: weights anywhere.
        begin: first step at which weights are taken.
        steps: steps until the full sparsity; 0: at once.
        every: steps between two choices of weights until then.

    Raises:
        ConfigError: a value out of range, no layer of that name, a layer that the pattern does not divide, or a model
            that is not built or pruned already.

    Example::

        hvdtrain.prune(model, 0.8, steps=2000)
        hvdtrain.Trainer(model, "adam", loss).fit(x, y, epochs=3)
    """
    sparsity = (0.5 if pattern else 0.8) if sparsity is None else sparsity
    _check_options(sparsity, pattern, begin=begin, steps=steps, every=every)
    chains = chains_of(model) if pattern == CHANNELS else {}
    found = [layer for layer in flatten_layers(model) if _is_chosen(layer, layers)]
    found = [layer for layer in found if pattern != CHANNELS or id(layer) in chains]
    if not found:
        named = f" whose path has {layers!r}" if layers else ""
        lone = ", whose channels are read by others of these alone," if pattern == CHANNELS else ""
        raise ConfigError(
            f"prune finds no trainable Dense, EinsumDense or convolution{lone}{named}. Is the model built?"
        )
    _check_layers(found, pattern)
    for layer in found:
        pruned = Pruned(layer, sparsity, pattern=pattern, begin=begin, steps=steps, every=every)
        layer.kernel.constraint = pruned
        for vector, repeats in chains[id(layer)].vectors if chains else ():
            vector.constraint = Follows(pruned, vector, repeats)
    return [layer.path for layer in found]


def _check_options(sparsity: float, pattern: str | None, *, begin: int, steps: int, every: int) -> None:
    if pattern not in (None, PATTERN, CHANNELS):
        raise ConfigError(f"prune takes pattern={PATTERN!r}, {CHANNELS!r} or None. Received: {pattern!r}.")
    if not 0 < sparsity < 1 or (pattern == PATTERN and sparsity < 0.5):
        raise ConfigError(
            f"prune takes a sparsity between 0 and 1, and with the pattern {PATTERN} from 0.5. Received: {sparsity}."
        )
    if min(begin, steps) < 0 or every < 1:
        received = f"begin={begin}, steps={steps}, every={every}"
        raise ConfigError(f"prune takes begin and steps from 0, and every from 1. Received: {received}.")


def _check_layers(found: list[Any], pattern: str | None) -> None:
    refuse_slices(found, "prune")
    for layer in found:
        if isinstance(layer.kernel.constraint, Pruned):
            raise ConfigError(f"The layer {layer.path!r} is pruned already.")
        inputs = layer.kernel.shape[input_dims(layer)[-1]]
        if pattern == PATTERN and inputs % GROUP:
            raise ConfigError(
                f"The pattern {PATTERN} takes inputs in groups of {GROUP}. The layer {layer.path!r} has {inputs}: "
                "leave it out by layers."
            )


def refuse_slices(layers: Iterable[Any], what: str) -> None:
    """Refuse layers of which each rank has a slice. Raises ConfigError naming the first."""
    for layer in layers:
        if any(placement_of(weight) is not None for weight in layer.weights):
            raise ConfigError(
                f"{what} takes layers that a rank holds whole. Received: {layer.path!r}, of which each rank along tp "
                "has a slice: leave it out by layers, or divide the model's state by zero=3."
            )


def pruned_layers(model: keras.Model) -> list[Any]:
    """Return the layers that `prune` has chosen, until `finish_pruning`."""
    kernels = ((layer, getattr(layer, "kernel", None)) for layer in flatten_layers(model) if layer.built)
    return [layer for layer, kernel in kernels if isinstance(getattr(kernel, "constraint", None), Pruned)]


def _is_chosen(layer: Any, layers: str | None) -> bool:
    kernel = getattr(layer, "kernel", None) if layer.built and isinstance(layer, KERNELS) else None
    return getattr(kernel, "trainable", False) and re.search(layers or "", layer.path) is not None


def letters_of(layer: keras.layers.EinsumDense) -> tuple[str, ...]:
    """Return the letters of the dims of a layer's inputs, kernel and outputs."""
    return re.fullmatch(r"(.*),(.*)->(.*)", layer.equation).groups()  # type: ignore[union-attr]


def input_dims(layer: Any) -> list[int]:
    """Return the dims of a layer's kernel over which it sums, the last one that of features."""
    if not isinstance(layer, keras.layers.EinsumDense):
        return list(range(len(layer.kernel.shape) - 1))
    inputs, kernel, outputs = letters_of(layer)
    return [dim for dim, letter in enumerate(kernel) if letter in inputs and letter not in outputs]


class Pruned(keras.constraints.Constraint):
    """Chooses the weights of a kernel that are zero, and makes them so after each update.

    Args:
        layer: has the kernel, and gets its mask and its count of updates.
        sparsity: see `prune`, as the others.
    """

    def __init__(self, layer: Any, sparsity: float, *, pattern: str | None, begin: int, steps: int, every: int) -> None:
        self.before = layer.kernel.constraint
        self.pattern, self.followers = pattern, list[Follows]()
        self._sparsity = sparsity
        self._begin, self._steps, self._every = begin, steps, every
        self._inputs, shape = input_dims(layer), layer.kernel.shape
        self.mask = add_weight_when_built(layer, MASK, shape=shape, initializer="ones", dtype="uint8")
        self.step = add_weight_when_built(layer, STEP, shape=(), initializer="zeros", dtype="int32")

    def __call__(self, w: Any) -> Any:
        """Return the kernel after an update, with zeros."""
        value = tf.convert_to_tensor(w if self.before is None else self.before(w))
        mask, step = self.mask.value, self.step.value
        since = step - self._begin
        if self._steps:
            due = (since >= 0) & (since <= self._steps) & ((since % self._every == 0) | (since == self._steps))
            done = tf.clip_by_value(tf.cast(since, tf.float64) / self._steps, 0.0, 1.0)
        else:
            due, done = tf.equal(since, 0), tf.constant(1.0, tf.float64)
        share = self._sparsity * (1 - (1 - done) ** 3)
        chosen = tf.cond(due, lambda: self._chosen(value, share), lambda: tf.identity(mask))
        mask.assign(chosen)
        step.assign_add(1)
        return value * tf.cast(chosen, value.dtype)

    def _chosen(self, value: Any, share: Any) -> Any:
        """Return a new mask: 0 for the smallest of all weights, and of each group. Ties go by place."""
        if self.pattern == CHANNELS:
            sizes = tf.reduce_sum(tf.square(value), self._inputs)
            lost = tf.cast(tf.round(share * sizes.shape[0]), tf.int32)
            kept = _ranks(sizes) >= tf.minimum(lost, sizes.shape[0] - 1)
            return tf.cast(tf.broadcast_to(kept, value.shape), tf.uint8)
        sizes = tf.abs(value)
        if self.pattern is not None:
            order = [*(dim for dim in range(len(value.shape)) if dim not in self._inputs), *self._inputs]
            moved = tf.transpose(sizes, order)  # neighbours along the inputs are neighbours in memory
            kept = tf.reshape(_ranks(tf.reshape(moved, [-1, GROUP])) >= GROUP // 2, tf.shape(moved))
            kept = tf.transpose(kept, [order.index(dim) for dim in range(len(order))])
            sizes = tf.where(kept, sizes, -tf.ones_like(sizes))  # below a weight that is zero
        places = _ranks(tf.reshape(sizes, [-1]))
        lost = tf.cast(tf.round(share * value.shape.num_elements()), places.dtype)
        chosen = tf.reshape(places >= lost, value.shape)
        return tf.cast(chosen if self.pattern is None else chosen & kept, tf.uint8)

    def get_config(self) -> dict[str, Any]:
        """Refuse to be a part of a model's config: its masks are weights of layers."""
        raise ConfigError("A pruned model is copied without its masks: call hvdtrain.finish_pruning(model) before.")


class Follows(keras.constraints.Constraint):
    """Makes what belongs to a channel zero where its kernel is.

    Args:
        pruned: the constraint of the kernel.
        vector: the variable.
        repeats: its numbers for each channel.
    """

    def __init__(self, pruned: Pruned, vector: Any, repeats: int) -> None:
        self.vector, self.before = vector, vector.constraint
        self._pruned, self._repeats = pruned, repeats
        pruned.followers.append(self)

    def __call__(self, w: Any) -> Any:
        """Return the variable after an update, with zeros."""
        value = tf.convert_to_tensor(w if self.before is None else self.before(w))
        mask = self._pruned.mask.value
        kept = tf.reduce_max(mask, list(range(len(mask.shape) - 1)))
        return value * tf.cast(tf.tile(kept, [self._repeats]), value.dtype)

    def get_config(self) -> dict[str, Any]:
        """Refuse to be a part of a model's config, as the kernel's does."""
        return self._pruned.get_config()


def _ranks(values: Any) -> Any:
    """Return the place of each value among those of the last dim, in ascending order."""
    return tf.argsort(tf.argsort(values, stable=True), stable=True)


def finish_pruning(model: keras.Model) -> float:
    """Take masks and constraints off a model, whose zeros stay, and return the share of zeros in the pruned kernels.

    Example::

        hvdtrain.prune(model, 0.5)
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        print(hvdtrain.finish_pruning(model))
    """
    zeros, size = 0, 0
    for layer in pruned_layers(model):
        kernel, constraint = layer.kernel, layer.kernel.constraint
        kernel.assign(kernel.value * tf.cast(constraint.mask.value, kernel.value.dtype))
        zeros += int(tf.reduce_sum(tf.cast(kernel.value == 0, tf.int64)))
        size += kernel.value.shape.num_elements()
        for follower in constraint.followers:
            follower.vector.assign(follower(follower.vector))
            follower.vector.constraint = follower.before
        kernel.constraint = constraint.before
        for name in (MASK, STEP):
            delattr(layer, name)
    return zeros / max(size, 1)
