"""Mixture of experts, optionally expert-parallel along `ep`.

Tokens are moved to and from the experts' buffers by gathers: no [tokens, experts, capacity] tensor is formed, as with
one-hot masks.
"""

import math
import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import copy_to, exchange_parts, sum_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import REPLICA_AXES
from hvdtrain.layers.exchanging import ExchangingLayer
from hvdtrain.layers.slices import add_slice, check_divides, ranks_along, refuse_built_before_init
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.session import has_session


def load_balance_loss(probabilities: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """Return experts x sum over experts of (token share x mean probability); 1 if balanced.

    Switch (Fedus et al. 2021, equation 4) and GShard. Only the probabilities have a gradient.

    Args:
        probabilities: [tokens, experts].
        shares: [experts], fraction of tokens whose first choice is each expert. With the shares of all ranks' tokens,
            the mean of this loss over all ranks' tokens equals that of one process: it is linear in the probabilities.
    """
    mean = tf.reduce_mean(probabilities, axis=0)
    return tf.cast(probabilities.shape[1], mean.dtype) * tf.reduce_sum(tf.stop_gradient(shares) * mean)


def router_z_loss(logits: tf.Tensor) -> tf.Tensor:
    """Return the mean of log(sum(exp(logits)))^2 over tokens, for logits [tokens, experts].

    ST-MoE (Zoph et al. 2022, equation 5).
    """
    return tf.reduce_mean(tf.square(tf.reduce_logsumexp(logits, axis=1)))


class Routes(NamedTuple):
    """Routing of each token, by first choice, second …"""

    experts: tf.Tensor
    """[tokens, choices], int32: chosen experts."""
    gates: tf.Tensor
    """[tokens, choices]: weights of their outputs."""
    positions: tf.Tensor
    """[tokens, choices], int32: position in the expert's queue."""
    kept: tf.Tensor
    """[tokens, choices], bool: whether it fits the expert's capacity; others are dropped."""


def expert_capacity(tokens: Any, experts: int, top_k: int, factor: float | None) -> Any:
    """Return an expert's capacity: ceil(factor x top_k x tokens / experts), at most all tokens.

    As in Switch (Fedus et al. 2021, equation 3) and, for two choices, GShard (Lepikhin et al. 2020). `tokens` is an int
    or an integer tensor; factor None means no limit.
    """
    if factor is None:
        return tokens
    share = factor * top_k / experts
    if not tf.is_tensor(tokens):
        return min(tokens, math.ceil(share * tokens))
    return tf.minimum(tokens, tf.cast(tf.math.ceil(share * tf.cast(tokens, tf.float64)), tokens.dtype))


def queue_positions(chosen: tf.Tensor, experts: int) -> tf.Tensor:
    """Return each token's position in its experts' queues: [tokens, choices], int32.

    Tokens queue in order; all first choices precede second choices (GShard, algorithm 1). `chosen` is [tokens,
    choices], int32.
    """
    # Not transposed: TensorFlow warns about transposing integers on most processors.
    in_order = tf.concat(tf.unstack(chosen, axis=1), 0)
    one_hot = tf.one_hot(in_order, experts, dtype=tf.int32)
    before = tf.cumsum(one_hot, exclusive=True)
    positions = tf.reduce_sum(before * one_hot, axis=1)
    return tf.stack(tf.split(positions, chosen.shape[1]), axis=1)


def routes_of(probabilities: tf.Tensor, top_k: int, capacity: Any) -> Routes:
    """Return the routing of all tokens to their `top_k` (1 or 2) likeliest experts.

    The gate of a single choice is its probability (Switch); two gates are normalized to sum to 1 (GShard), so that the
    router learns their ratio. Probabilities are [tokens, experts].
    """
    gates, experts = tf.math.top_k(probabilities, top_k)
    if top_k > 1:
        gates /= tf.reduce_sum(gates, axis=1, keepdims=True)
    positions = queue_positions(experts, probabilities.shape[1])
    return Routes(experts, gates, positions, positions < capacity)


def load_of(chosen: tf.Tensor, experts: int) -> tf.Tensor:
    """Return the number of tokens per expert, including dropped ones: [experts], int32."""
    return tf.math.bincount(tf.reshape(chosen, [-1]), minlength=experts, maxlength=experts, dtype=tf.int32)


def slots_of(routes: Routes, slots: Any) -> tf.Tensor:
    """Return each token's index in the concatenated buffers: [tokens, choices], int32; -1 if dropped."""
    return tf.where(routes.kept, routes.experts * slots + routes.positions, -1)


def to_experts(tokens: tf.Tensor, places: tf.Tensor, experts: int, slots: Any) -> tf.Tensor:
    """Return the buffers [experts, slots, width] of tokens [tokens, width]; empty slots are zero."""
    count, choices = tf.shape(tokens)[0], places.shape[1]
    numbers = tf.repeat(tf.range(1, count + 1), choices)
    # An additional slot takes dropped tokens.
    into = tf.where(places < 0, experts * slots, places)
    taken = tf.scatter_nd(tf.reshape(into, [-1, 1]), numbers, [experts * slots + 1])[:-1]
    rows = tf.gather(tokens, tf.maximum(taken - 1, 0))
    filled = tf.where(taken[:, tf.newaxis] > 0, rows, tf.zeros_like(rows))
    return tf.reshape(filled, [experts, slots, tokens.shape[1]])


def from_experts(outputs: tf.Tensor, places: tf.Tensor, gates: tf.Tensor) -> tf.Tensor:
    """Return the gated sum of each token's expert outputs: [tokens, width]; zero if all are dropped.

    Args:
        outputs: [experts, slots, width].
        places: as returned by `slots_of`.
        gates: [tokens, choices].
    """
    flat = tf.reshape(outputs, [-1, outputs.shape[2]])
    rows = tf.gather(flat, tf.maximum(places, 0))
    gates = tf.cast(gates, rows.dtype)[..., tf.newaxis]
    return tf.reduce_sum(tf.where(places[..., tf.newaxis] < 0, tf.zeros_like(rows), rows * gates), axis=1)


class RoutingCounts:
    """Counters of training steps since the last reset, not saved."""

    def __init__(self, experts: int) -> None:
        # A plain object hides them from Keras: they are not weights, and not saved in checkpoints.
        local: dict[str, Any] = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        with eager_variables():  # a layer inside another one is built while the outer one is traced
            self.load = tf.Variable(tf.zeros([experts]), name="expert_load", **local)
            """Tokens that chose each expert."""
            self.dropped = tf.Variable(0.0, name="dropped_tokens", **local)
            """Those of them that found no place; a token with two choices may count twice."""

    def add(self, load: tf.Tensor, kept: tf.Tensor, has_samples: Any) -> None:
        """Count one call.

        Args:
            load: [experts], tokens that chose each expert.
            kept: [tokens, choices], whether they fit.
            has_samples: 1, or 0 for a placeholder.
        """
        present = tf.cast(has_samples, tf.float32) > 0
        dropped = tf.reduce_sum(tf.cast(tf.logical_not(kept), tf.float32))
        self.load.assign_add(tf.where(present, tf.cast(load, tf.float32), 0.0))
        self.dropped.assign_add(tf.where(present, dropped, 0.0))


def routing_metrics(layers: Sequence[Any], replicas: Collectives) -> dict[str, tf.Tensor]:
    """Return and reset the routing metrics of all replicas' built `layers`. Collective.

    `dropped_tokens` is the number of dropped tokens, over layers and choices; `dropped_share` their fraction;
    `expert_load_NAME` [experts] is the load of each expert of layer NAME, 1 if balanced.
    """
    if not layers:
        return {}
    own = [tf.concat([layer.counts.load, [layer.counts.dropped]], 0) for layer in layers]
    sizes = [layer.experts + 1 for layer in layers]
    everywhere = tf.split(replicas.all_reduce(tf.concat(own, 0), name="routing_metrics"), sizes)
    for layer in layers:
        layer.counts.load.assign(tf.zeros([layer.experts]))
        layer.counts.dropped.assign(0.0)
    dropped = tf.add_n([counts[-1] for counts in everywhere])
    sent = tf.add_n([tf.reduce_sum(counts[:-1]) for counts in everywhere])
    figures = {"dropped_tokens": dropped, "dropped_share": tf.math.divide_no_nan(dropped, sent)}
    for layer, counts in zip(layers, everywhere, strict=True):
        mean = tf.reduce_mean(counts[:-1])
        figures[f"expert_load_{layer.name}"] = tf.math.divide_no_nan(counts[:-1], mean)
    return figures


_PLAIN_ARGUMENTS = (
    *("experts", "hidden", "top_k", "capacity_factor", "eval_capacity_factor"),
    *("balance_weight", "z_weight", "output_scale", "seed"),
)


@keras.saving.register_keras_serializable(package="hvdtrain")
class MixtureOfExperts(ExchangingLayer):
    """Routes each token to `top_k` MLPs (experts) and sums gated outputs.

    Top-1 as in Switch (Fedus et al. 2021), top-2 as in GShard (Lepikhin et al. 2020). Replaces a transformer's MLP: the
    output has the shape of the input, [batch, …, width], and is zero for a dropped token, so that the residual
    connection carries it on. An input mask is propagated; masked tokens are routed like all others. In training the
    layer adds the load-balance loss and the router z-loss (ST-MoE, Zoph et al. 2022) to the model's losses.

    With `--parallel ep=N` each rank along `ep` holds experts / N of them, and tokens travel by all-to-all. Capacity is
    per rank; the load is balanced over all ranks. Along `cp` a rank's tokens are those of its shard of each sequence.
    Along `tp` each rank holds a shard of the hidden units of each expert.

    Args:
        experts: number of experts.
        hidden: hidden units of each.
        top_k: experts per token, 1 or 2.
        capacity_factor: in training an expert takes ceil(factor x top_k x tokens / experts) tokens of a rank, and drops
            the others; None: all.
        eval_capacity_factor: the same outside of training.
        activation: of the hidden units, as for `keras.layers.Dense`.
        balance_weight: factor of the load-balance loss.
        z_weight: factor of the router z-loss.
        output_scale: factor of the initial output kernels.
        seed: of the initial values, a function of it and of the expert's index; None: from Keras.

    Raises:
        ConfigError: sizes or factors that are not positive, or experts or hidden units not divisible by the ranks.

    Example::

        tokens = keras.Input((16, 32))
        experts = hvdtrain.MixtureOfExperts(experts=4, hidden=64, top_k=2)
        outputs = tokens + experts(keras.layers.LayerNormalization()(tokens))
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        *,
        top_k: int = 1,
        capacity_factor: float | None = 1.25,
        eval_capacity_factor: float | None = None,
        activation: Any = "gelu",
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
        output_scale: float = 1.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.experts, self.hidden, self.top_k = experts, hidden, top_k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.activation = keras.activations.get(activation)
        self.balance_weight, self.z_weight = balance_weight, z_weight
        self.output_scale = output_scale
        self.seed = seed
        self._check()
        self.supports_masking = True  # the mask of the input is that of the output, as of keras.layers.Dense
        self.counts: RoutingCounts | None = None
        """Training counters, reported by `routing_metrics`."""
        self._along_ep: Collectives | None = None
        self._along_tp: Collectives | None = None
        self._replicas: Collectives | None = None

    def _check(self) -> None:
        sizes = {"experts": self.experts, "hidden": self.hidden}
        if any(not isinstance(size, int) or size < 1 for size in sizes.values()):
            raise ConfigError(f"MixtureOfExperts needs positive sizes. Received: {_listed(sizes)}.")
        if self.top_k not in (1, 2) or self.top_k > self.experts:
            raise ConfigError(
                "MixtureOfExperts sends a token to 1 or 2 of its experts. "
                f"Received: top_k={self.top_k}, experts={self.experts}."
            )
        factors = {"capacity_factor": self.capacity_factor, "eval_capacity_factor": self.eval_capacity_factor}
        if any(factor is not None and not 0 < factor < math.inf for factor in factors.values()):
            raise ConfigError(
                f"MixtureOfExperts needs positive capacities, or None to drop no token. Received: {_listed(factors)}."
            )
        weights = {"balance_weight": self.balance_weight, "z_weight": self.z_weight}
        if any(not 0 <= weight < math.inf for weight in weights.values()):
            raise ConfigError(f"MixtureOfExperts needs weights of losses from 0 on. Received: {_listed(weights)}.")

    @property
    def exchanges(self) -> bool:
        """Whether it communicates along `ep`, `tp` or the replica axes."""
        return any(ranks is not None for ranks in (self._along_ep, self._along_tp, self._replicas))

    @property
    def counters(self) -> list[tf.Variable]:
        """The routing counters."""
        return [] if self.counts is None else [self.counts.load, self.counts.dropped]

    def build(self, input_shape: Any) -> None:
        """Create the router, and this rank's shard of the experts."""
        check_divides(self.experts, "experts", "ep", self)
        check_divides(self.hidden, "hidden units", "tp", self)
        self._along_ep, self._along_tp = ranks_along("ep"), ranks_along("tp")
        self._replicas = ranks_along(*REPLICA_AXES)
        self.built_in_session = has_session() or self.exchanges
        if self.seed is None:
            self.seed = random.randint(1, 2**31 - 1)  # as Keras' own layers, by what keras.utils.set_random_seed sets
        width = int(input_shape[-1])
        bound = math.sqrt(6 / (width + self.hidden))  # of an expert, as Dense has it
        # The router works in 32 bits at least: with 16 it would choose other experts (Switch, section 2.4).
        self.router = self._add("router", (width, self.experts), {}, math.sqrt(3 / width), autocast=False)
        self.kernel_in = self._add("kernel_in", (self.experts, width, self.hidden), {0: "ep", 2: "tp"}, bound)
        self.bias_in = self._add("bias_in", (self.experts, self.hidden), {0: "ep", 1: "tp"})
        shape = (self.experts, self.hidden, width)
        self.kernel_out = self._add("kernel_out", shape, {0: "ep", 1: "tp"}, self.output_scale * bound)
        self.bias_out = self._add("bias_out", (self.experts, width), {0: "ep"})
        self.counts = RoutingCounts(self.experts)
        self.built = True

    def _add(self, name: str, shape: tuple[int, ...], cut: dict[int, str], bound: float = 0.0, **options: Any) -> Any:
        assert self.seed is not None, "build has chosen one"
        seed = zlib.crc32(f"{self.seed}/{name}".encode()) & 0x7FFFFFFF
        return add_slice(self, name, shape, cut, seed=seed, bound=bound, **options)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Return the experts' outputs, in the shape of `inputs`.

        Raises:
            ConfigError: the layer was built before `hvdtrain.init`, with ranks to communicate with.
        """
        if not self.built_in_session:
            refuse_built_before_init(self, "ep")
            refuse_built_before_init(self, "tp")
            refuse_built_before_init(self, *REPLICA_AXES)
        tokens = tf.reshape(inputs, [-1, inputs.shape[-1]])
        logits = tf.matmul(tf.cast(tokens, self.router.dtype), self.router)
        probabilities = tf.nn.softmax(logits)
        factor = self.capacity_factor if training else self.eval_capacity_factor
        count = tf.shape(tokens)[0] if tokens.shape[0] is None else tokens.shape[0]
        capacity = expert_capacity(count, self.experts, self.top_k, factor)
        routes = routes_of(probabilities, self.top_k, capacity)
        load = load_of(routes.experts, self.experts)
        name = numbered("experts")
        if training:
            self._count(logits, probabilities=probabilities, routes=routes, load=load, name=name)
        slots = self._slots(capacity, load, bool(training), name)
        places = slots_of(routes, slots)
        buffers = self.unless_placeholder(to_experts(tokens, places, self.experts, slots))
        outputs = self.unless_placeholder(self._outputs(buffers, name))
        return tf.reshape(from_experts(outputs, places, routes.gates), tf.shape(inputs))

    def _count(self, logits: tf.Tensor, probabilities: tf.Tensor, routes: Routes, load: tf.Tensor, name: str) -> None:
        """Add the router's losses, and count the routing."""
        first = load_of(routes.experts[:, :1], self.experts)
        counts = self.unless_placeholder(tf.cast(first, probabilities.dtype))
        if self._replicas is not None:
            counts = self._replicas.all_reduce(counts, name=f"{name}/load")
        shares = tf.math.divide_no_nan(counts, tf.reduce_sum(counts))
        balance = self.balance_weight * load_balance_loss(probabilities, shares)
        self.add_loss(balance + self.z_weight * router_z_loss(logits))
        assert self.counts is not None, "build comes first"
        self.counts.add(load, routes.kept, self.has_samples)

    def _slots(self, capacity: Any, load: tf.Tensor, training: bool, name: str) -> Any:
        """Return the buffers' slots: the maximum load, the same on all ranks along `ep`.

        In training in one process it is the capacity: a buffer of static size.
        """
        if self._along_ep is None and training and not tf.is_tensor(capacity):
            return capacity
        needed = tf.minimum(capacity, tf.reduce_max(load))
        if self._along_ep is None:
            return needed
        # Ranks may have different numbers of tokens, and so different capacities.
        return tf.reduce_max(self._along_ep.all_gather(needed[tf.newaxis], name=f"{name}/slots"))

    def _outputs(self, buffers: tf.Tensor, name: str) -> tf.Tensor:
        """Apply the experts to their buffers, [experts, slots, width]."""
        if self._along_ep is not None:
            buffers = exchange_parts(buffers, self._along_ep, 0, 1, name=f"{name}/there")
        if self._along_tp is not None:
            buffers = copy_to(buffers, self._along_tp, name=f"{name}/hidden")
        hidden = self.activation(tf.matmul(buffers, self.kernel_in) + self.bias_in[:, tf.newaxis])
        outputs = tf.matmul(hidden, self.kernel_out)
        if self._along_tp is not None:
            outputs = sum_from(outputs, self._along_tp, name=f"{name}/sum")
        outputs += self.bias_out[:, tf.newaxis]
        if self._along_ep is not None:
            outputs = exchange_parts(outputs, self._along_ep, 1, 0, name=f"{name}/back_here")
        return outputs

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the input shape without a collective."""
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        own = {name: getattr(self, name) for name in _PLAIN_ARGUMENTS}
        return {**super().get_config(), **own, "activation": keras.activations.serialize(self.activation)}


def expert_layers(model: Any) -> list[MixtureOfExperts]:
    """Return the MixtureOfExperts layers of `model`, nested ones too, in order."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, MixtureOfExperts)]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
