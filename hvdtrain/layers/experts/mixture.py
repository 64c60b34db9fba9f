"""The layer of experts, in one process or with a slice of them on each rank along `ep`."""

import math
import random
import zlib
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.differentiable import copy_to, exchange_parts, sum_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import REPLICA_AXES
from hvdtrain.layers.exchanging import ExchangingLayer
from hvdtrain.layers.experts.balance import load_balance_loss, router_z_loss
from hvdtrain.layers.experts.dispatch import from_experts, slots_of, to_experts
from hvdtrain.layers.experts.figures import RoutingCounts
from hvdtrain.layers.experts.routing import Routes, expert_capacity, load_of, routes_of
from hvdtrain.layers.slices import add_slice, check_divides, ranks_along, refuse_built_before_init
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.session import has_session

_PLAIN_ARGUMENTS = (
    "experts",
    "hidden",
    "top_k",
    "capacity_factor",
    "eval_capacity_factor",
    "balance_weight",
    "z_weight",
    "output_scale",
    "seed",
)


@keras.saving.register_keras_serializable(package="hvdtrain")
class MixtureOfExperts(ExchangingLayer):
    """Sends each token to `top_k` of many MLPs, its experts, and adds up their outputs, weighted by the router.

    Top-1 as in Switch (Fedus et al. 2021), top-2 as in GShard (Lepikhin et al. 2020). In place of a transformer's MLP:
    the output has the shape of the input, [batch, …, width], and is zero for a token that no expert had a place for, so
    that the residual connection carries it on. A mask of the input is passed on; tokens that it leaves out are routed
    like all others. In training the layer adds the load-balance loss and the router's z-loss (ST-MoE, Zoph et al. 2022)
    to those of the model.

    With `--parallel ep=N` each rank along `ep` holds experts / N of them; tokens go there and come back by all-to-all.
    Capacity is that of a rank's tokens, and the load is balanced over those of all ranks. Along `cp` a rank's tokens
    are those of its slice of each sequence. Along `tp` each rank holds a part of the hidden units of each expert.

    Args:
        experts: number of experts.
        hidden: hidden units of each.
        top_k: experts of each token, 1 or 2.
        capacity_factor: in training an expert takes ceil(factor x top_k x tokens / experts) tokens of a rank, and
            drops the others; None: all.
        eval_capacity_factor: the same outside of training.
        activation: of the hidden units, as `keras.layers.Dense` takes it.
        balance_weight: factor of the load-balance loss.
        z_weight: factor of the router's z-loss.
        output_scale: factor of the initial output kernels.
        seed: of the initial values, which are a function of it and of the number of the expert; None: from Keras.

    Raises:
        ConfigError: sizes or factors that are not positive, or experts or hidden units that the ranks do not divide.
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
        """Counted in training; see `routing_figures`."""
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
        """See `ExchangingLayer`."""
        return any(ranks is not None for ranks in (self._along_ep, self._along_tp, self._replicas))

    @property
    def counters(self) -> list[tf.Variable]:
        """See `ExchangingLayer`."""
        return [] if self.counts is None else [self.counts.load, self.counts.dropped]

    def build(self, input_shape: Any) -> None:
        """Create the router, and this rank's slice of the experts."""
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
            ConfigError: the layer was built before `hvdtrain.init`, and there are ranks to exchange with.
        """
        if not self.built_in_session:
            refuse_built_before_init(self, "ep")
            refuse_built_before_init(self, "tp")
            refuse_built_before_init(self, *REPLICA_AXES)
        tokens = tf.reshape(inputs, [-1, inputs.shape[-1]])
        logits = tf.matmul(tf.cast(tokens, self.router.dtype), self.router)
        probabilities = tf.nn.softmax(logits)
        factor = self.capacity_factor if training else self.eval_capacity_factor
        capacity = expert_capacity(_rows(tokens), self.experts, self.top_k, factor)
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
        """Add the losses of the router, and count where its tokens go."""
        first = load_of(routes.experts[:, :1], self.experts)
        shares = self._shares(tf.cast(first, probabilities.dtype), name)
        balance = self.balance_weight * load_balance_loss(probabilities, shares)
        self.add_loss(balance + self.z_weight * router_z_loss(logits))
        assert self.counts is not None, "build comes first"
        self.counts.add(load, routes.kept, self.has_samples)

    def _shares(self, first: tf.Tensor, name: str) -> tf.Tensor:
        """Return the share of each expert among the first choices of all ranks' tokens."""
        counts = self.unless_placeholder(first)
        if self._replicas is not None:
            counts = self._replicas.all_reduce(counts, name=f"{name}/load")
        return tf.math.divide_no_nan(counts, tf.reduce_sum(counts))

    def _slots(self, capacity: Any, load: tf.Tensor, training: bool, name: str) -> Any:
        """Return the slots of each buffer: what the fullest needs, the same on all ranks along `ep`.

        In training in one process it is the capacity: a buffer of a static size.
        """
        if self._along_ep is None and training and not tf.is_tensor(capacity):
            return capacity
        needed = tf.minimum(capacity, tf.reduce_max(load))
        if self._along_ep is None:
            return needed
        # Ranks may have different numbers of tokens, and so different capacities.
        return tf.reduce_max(self._along_ep.all_gather(needed[tf.newaxis], name=f"{name}/slots"))

    def _outputs(self, buffers: tf.Tensor, name: str) -> tf.Tensor:
        """Return what the experts make of their buffers [experts, slots, width]."""
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
        """Return the shape of the inputs, without an exchange that no other rank would take part in."""
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        own = {name: getattr(self, name) for name in _PLAIN_ARGUMENTS}
        return {**super().get_config(), **own, "activation": keras.activations.serialize(self.activation)}


def expert_layers(model: Any) -> list[MixtureOfExperts]:
    """Return the layers of experts of `model`, nested ones too, in the order of the model."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, MixtureOfExperts)]


def _rows(tokens: tf.Tensor) -> Any:
    """Return the number of tokens, an int where it is known."""
    return tf.shape(tokens)[0] if tokens.shape[0] is None else tokens.shape[0]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
