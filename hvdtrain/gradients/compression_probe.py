"""Whether 16-bit gradients are worth their arithmetic on this machine: what is saved on a wire is spent on cores."""

import time
from collections.abc import Callable
from statistics import median

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import opt
from hvdtrain.config.training import CompressionName
from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions

MOST_ELEMENTS = 4 * 1024 * 1024
"""Gradients larger than this are judged by a part of this size: beyond it both times grow with the size alone."""
REPETITIONS = 5


def compression_cost(backend: Backend, elements: int, compression: CompressionName) -> float:
    """Return the time of a compressed exchange as a multiple of that of a plain one: above 1 it slows training.

    Both are measured in turn, and the medians of a few repetitions compared. All ranks must call it with the same
    arguments; each gets the ratio that it saw.

    Args:
        backend: the replicas; with one of them nothing travels, and the ratio is 1.
        elements: float32 elements of all gradients together; at most `MOST_ELEMENTS` are sent.
        compression: what is compared with `none`.
    """
    if backend.size == 1 or compression == "none" or elements < 1:
        return 1.0
    values = tf.Variable(tf.random.stateless_normal([min(elements, MOST_ELEMENTS)], [1, backend.index]))
    kinds: tuple[CompressionName, CompressionName] = ("none", compression)
    exchanges = [_exchange(backend, values, kind) for kind in kinds]
    for exchange in exchanges:
        _seconds(exchange)  # the first call compiles
    rounds = [[_seconds(exchange) for exchange in exchanges] for _ in range(REPETITIONS)]
    plain, compressed = (median(times) for times in zip(*rounds, strict=True))
    return compressed / plain


def _exchange(backend: Backend, values: tf.Variable, compression: CompressionName) -> Callable[[], tf.Tensor]:
    reducer = GradientReducer(backend, ReductionOptions("sum", compression))

    def exchange() -> tf.Tensor:
        (total,) = reducer.reduce([values.read_value()], ["values"], role=f"compression_probe/{compression}")
        return total

    return tf.function(exchange, autograph=False)


def _seconds(exchange: Callable[[], tf.Tensor]) -> float:
    """Time one call, up to where its result can be read."""
    begin = time.perf_counter()
    exchange()[:1].numpy()
    return time.perf_counter() - begin


def compression_warning(compression: CompressionName, cost: float) -> str | None:
    """Return the line that says that compression does not pay here; None where it does.

    Args:
        compression: the option's value.
        cost: what `compression_cost` returned.
    """
    if cost <= 1.0:
        return None
    return (
        f"warning: {opt('compression', compression)} makes the exchange {cost:.1f}x as slow as none between these "
        f"ranks; it pays where the network is slower than the cores: use {opt('compression', 'none')}."
    )
