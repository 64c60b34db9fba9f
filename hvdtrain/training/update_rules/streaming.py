"""Local SGD whose averages are streamed: fragments in turn, beside the next steps, in few bits.

Douillard et al. 2025 (arXiv:2501.18512, algorithm 2). The weights are divided into P fragments of about the same size,
of which each is averaged every H steps, H / P steps after the one before: a burst is 1 / P of the weights. What travels
are differences to the weights of the fragment's last average, which all replicas hold. With a delay of T steps they
travel beside the next T steps; then, with the blending factor a, the replica's weights w follow the outer step's
result x: w <- a w + (1 - a) x.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.gradients.compression import compressed_sum
from hvdtrain.optim.averaging import innermost
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.local_sgd import LocalUpdate, OuterOptimizer, at_least_float32
from hvdtrain.training.update_rules.servers.layout import owners_of

BLEND = 0.5
"""Default blending factor of averages that are delayed, of Douillard et al."""
BLOCK = 256
"""Elements that share a scale in 8 bits."""


class StreamingUpdate(LocalUpdate):
    """Averages a fragment at a time, as `options.average_fragments`, `_delay`, `_blend` and `_bits` say.

    A replica is weighted by its samples since the fragment's last average. Before an evaluation or a checkpoint
    everything is averaged at once.
    """

    acts_between_steps = True

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        options = options or StepOptions()
        self._delay = options.average_delay
        blend = options.average_blend
        self._blend = (BLEND if self._delay else 0.0) if blend is None else blend
        self._bits = options.average_bits
        self._count = options.average_fragments
        self._fragments: list[Fragment] = []
        self._held: list[int] = []
        """Of the weights in the fragments."""
        self._taken = 0
        """Local steps since all was averaged."""
        self._early = 0
        """Steps that are left before the first local one."""
        super().__init__(backend, model, optimizer, options)

    def _name_tensors(self) -> None:
        """Divide the trained weights into fragments."""
        self._outer = self._outer or OuterOptimizer(self._options)
        super()._name_tensors()
        held = [id(variable) for variable in self._weights.values()]
        if held == self._held:
            return
        self._held = held
        sizes = {path: int(variable.shape.num_elements()) for path, variable in self._weights.items()}
        fragments = owners_of(sizes, self._count)
        self._fragments = [
            Fragment(
                f"local_sgd/fragment{number}",
                {path: self._weights[path] for path in sizes if fragments[path] == number},
                backend=self._backend,
                outer=self._outer,
                bits=self._bits,
                blend=self._blend,
                rate=self._rate,
            )
            for number in range(self._count)
        ]

    def _average_if_due(self, weight: tf.Tensor, early: tf.Tensor) -> None:
        """Count the samples; fragments are averaged at the end of the step."""
        self._weight.assign_add(weight)
        self._steps.assign_add(1)
        for fragment in self._fragments:
            fragment.weight.assign_add(weight)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Apply the averages that arrive after this step, and begin those that are due."""
        yield
        if self._early:
            self._early -= 1
            return
        self._taken += 1
        for number, fragment in enumerate(self._fragments):
            offset = self._period * (number + 1) // self._count
            since = (self._taken - offset) % self._period
            if since == self._delay and self._delay:
                fragment.finish()
            if since == 0 and self._taken >= offset:
                fragment.begin()
                if not self._delay:
                    fragment.finish()

    def _begin_local_steps(self) -> tf.Tensor:
        for fragment in self._fragments:
            fragment.weight.assign(0.0)
        return super()._begin_local_steps()

    def _average(self, variables: dict[str, tf.Variable]) -> tf.Tensor:
        for fragment in self._fragments:
            fragment.weight.assign(0.0)
        return super()._average(variables)

    def on_state_loaded(self, own: Mapping[str, np.ndarray] | None = None) -> None:
        """Begin a new period."""
        super().on_state_loaded(own)
        self._taken = 0
        self._early = max(self._after - int(innermost(self.optimizer).iterations), 0)

    def consolidate(self) -> None:
        """Wait for the averages under way, and average everything. Collective."""
        if not self._consolidated:
            for fragment in self._fragments:
                fragment.finish()
            self._taken = 0
        super().consolidate()


class Fragment:
    """Some of the weights, whose average is computed beside the training.

    Args:
        name: tells its exchanges from all others.
        weights: by path.
        rate: the learning rate of the last local step.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, tf.Variable],
        *,
        backend: Backend,
        outer: OuterOptimizer,
        bits: int,
        blend: float,
        rate: tf.Variable,
    ) -> None:
        wide = any(variable.dtype == tf.float64 for variable in weights.values())
        self._dtype = tf.float64 if wide else tf.float32
        elements = sum(variable.shape.num_elements() for variable in weights.values())
        self.weight = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="fragment_weight")
        """Weight of this replica's samples since the last average."""
        self._sent_weight = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="sent_weight")
        self._sent_rate = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="sent_rate")
        self._difference = tf.Variable(tf.zeros([elements], self._dtype), trainable=False, name="difference")
        self._under_way: Exchange | None = None

        def take() -> None:
            """Keep what travels, which the next steps leave alone."""
            moved = [
                tf.cast(outer.anchor(path) - at_least_float32(variable.read_value()), self._dtype)
                for path, variable in weights.items()
            ]
            self._difference.assign(tf.concat([tf.reshape(each, [-1]) for each in moved], 0))
            self._sent_weight.assign(self.weight)
            self._sent_rate.assign(rate)
            self.weight.assign(0.0)

        def exchange() -> tf.Tensor:
            weight = self._sent_weight.read_value()
            total = backend.all_reduce(weight, name=f"{name}/weight")
            share = tf.where(total > 0, tf.math.divide_no_nan(weight, total), 1.0 / backend.size)
            mine = self._difference.read_value() * tf.cast(share, self._dtype)
            if bits == 8:
                return sum_in_8_bits(mine, backend, name=name)
            if bits == 16:
                return compressed_sum([mine], backend, "fp16", name=name)[0]
            return backend.all_reduce(mine, name=name)

        def apply(mean: tf.Tensor) -> None:
            parts = tf.split(mean, [variable.shape.num_elements() for variable in weights.values()])
            for (path, variable), part in zip(weights.items(), parts, strict=True):
                anchor = outer.anchor(path)
                average = anchor - tf.cast(tf.reshape(part, variable.shape), anchor.dtype)
                after = outer.step(path, average, self._sent_rate.read_value())
                mixed = blend * at_least_float32(variable.read_value()) + (1 - blend) * after if blend else after
                variable.assign(tf.cast(mixed, variable.dtype))

        self._empty = not weights
        self._take = tf.function(take, autograph=False)
        self._exchange = tf.function(lambda: backend.run(exchange), autograph=False)
        self._apply = tf.function(apply, autograph=False)

    def begin(self) -> None:
        """Begin to average. Collective."""
        if not self._empty:
            self._take()
            self._under_way = Exchange(self._exchange)

    def finish(self) -> None:
        """Wait for the average that is under way, if any, and let the weights follow it."""
        if self._under_way is not None:
            mean, self._under_way = self._under_way.result(), None
            self._apply(mean)


class Exchange(threading.Thread):
    """A collective that another thread waits for."""

    def __init__(self, function: Callable[[], tf.Tensor]) -> None:
        super().__init__(name="hvdtrain-average", daemon=True)
        self._function = function
        self._found: Any = None
        self.start()

    def run(self) -> None:
        """Call the function."""
        try:
            self._found = self._function()
        except BaseException as error:  # raised by `result`
            self._found = error

    def result(self) -> tf.Tensor:
        """Wait for the result, or raise what was raised."""
        self.join()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


def sum_in_8_bits(flat: tf.Tensor, exchange: Collectives, *, name: str) -> tf.Tensor:
    """Return the sum over the replicas of vectors of which 8 bits per element travel. Collective.

    As in `gradients/compression.py`, each replica adds up one part, in the vectors' own precision, and sends it to all,
    which decode the same words. Each `BLOCK` of elements is divided by the scale that makes its largest value 127, and
    rounded: an error of at most half a scale, in either direction.
    """
    size, elements = exchange.size, int(flat.shape[0])
    width = -(-elements // (size * BLOCK)) * BLOCK
    parts = tf.reshape(tf.pad(flat, [[0, size * width - elements]]), [size, width])
    words = exchange.all_to_all(_words(parts), name=f"{name}/scatter")
    total = tf.reduce_sum(_values(words, width, flat.dtype), 0, keepdims=True)
    gathered = exchange.all_gather(_words(total), name=f"{name}/gather")
    return tf.reshape(_values(gathered, width, flat.dtype), [-1])[:elements]


def _words(rows: tf.Tensor) -> tf.Tensor:
    """Return rows [k, w] as bytes [k, w + 4 w / BLOCK]: the elements, and the scales of their blocks."""
    blocks = tf.reshape(tf.cast(rows, tf.float32), [rows.shape[0], -1, BLOCK])
    scales = tf.reduce_max(tf.abs(blocks), 2, keepdims=True) / 127
    rounded = tf.cast(tf.round(tf.math.divide_no_nan(blocks, scales)), tf.int8)
    parts = tf.bitcast(rounded, tf.uint8), tf.bitcast(scales, tf.uint8)
    return tf.concat([tf.reshape(part, [rows.shape[0], -1]) for part in parts], 1)


def _values(words: tf.Tensor, width: int, dtype: tf.DType) -> tf.Tensor:
    """Return the rows [k, width] that `_words` made `words` of."""
    count = tf.shape(words)[0]
    elements = tf.cast(tf.bitcast(tf.reshape(words[:, :width], [count, -1, BLOCK]), tf.int8), dtype)
    scales = tf.bitcast(tf.reshape(words[:, width:], [count, -1, 1, 4]), tf.float32)
    return tf.reshape(elements * tf.cast(scales, dtype), [count, width])
