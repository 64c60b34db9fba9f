"""Fused optimizer updates by TensorFlow's training ops, in one pass over memory.

Keras writes an update as a chain of ops, each of which reads and writes full tensors: with 12.6 M parameters and one
core, Adam takes 2.5 times, SGD with momentum 2.0 and without 1.5 times as long as the fused op; for a sparse gradient
of a table of 12.8 M, of which momentum updates every row, 2.5 and 1.4 times (`benchmarks/fused.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import adam_slots, slot_of
from hvdtrain.compat.seams import UPDATE

UpdateStep = Callable[[Any, Any, Any], None]

DTYPES = (tf.float32, tf.float64)
"""Dtypes of variables. In 16 bits the ops round differently from Keras."""


@contextmanager
def fused_updates(optimizer: Any) -> Iterator[None]:
    """Use fused ops for a built Keras 3 optimizer inside this context.

    Clipping, weight decay, averages and loss scaling stay Keras' own. So do optimizers other than SGD, Adam and AdamW,
    Adam with amsgrad, 16-bit variables, and everything under a tf.distribute strategy.
    """
    inner = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    fused = None if tf.distribute.has_strategy() else _fused(inner)
    if fused is None:
        yield
        return
    written_out = UPDATE.active(inner)

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = fused if variable.dtype in DTYPES else written_out
        step(gradient, variable, learning_rate)

    with UPDATE.replaced(inner, update_step):
        yield


def _fused(optimizer: Any) -> UpdateStep | None:
    """Return the fused update of this optimizer; None if unsupported or overridden."""
    if UPDATE.is_taken(optimizer):
        return None
    written_out = type(optimizer).update_step
    if written_out is keras.optimizers.SGD.update_step:
        return _sgd(optimizer)
    if written_out is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        return _adam(optimizer)
    return None


def _sgd(optimizer: Any) -> UpdateStep:
    def update_step(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        rate = tf.cast(learning_rate, variable.dtype)
        if optimizer.momentum:
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=variable.handle,
                accum=slot_of(optimizer, optimizer.momentums, variable).value.handle,
                lr=rate,
                grad=_dense(gradient, variable),
                momentum=tf.cast(optimizer.momentum, variable.dtype),
                use_nesterov=optimizer.nesterov,
            )
        elif isinstance(gradient, tf.IndexedSlices):
            moved = rate * tf.cast(gradient.values, variable.dtype)
            variable.scatter_sub(tf.IndexedSlices(moved, gradient.indices))
        else:
            delta = _dense(gradient, variable)
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=delta)

    return update_step


def _adam(optimizer: Any) -> UpdateStep:
    """Return the update of Kingma and Ba 2014 (arXiv:1412.6980, section 2)."""
    scalars: dict[Any, dict[str, tf.Tensor]] = {}

    def update_step(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        dtype = variable.dtype
        # Shared by all variables of a call; nested graphs, such as a branch of loss scaling, have their own.
        key = (dtype, None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
        if key not in scalars:
            scalars[key] = _adam_scalars(optimizer, dtype, learning_rate)
        first, second = adam_slots(optimizer, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.value.handle,
            v=second.value.handle,
            grad=_dense(gradient, variable),
            **scalars[key],
        )

    return update_step


def _adam_scalars(optimizer: Any, dtype: tf.DType, learning_rate: Any) -> dict[str, tf.Tensor]:
    """Return the scalar arguments of the op.

    It computes 1 - beta in the variables' precision: in float32, 1 - 0.999 is off by 1.3e-5 (relative) from Keras'
    factor. The learning rate corrects the resulting scale of both averages.
    """
    step = tf.cast(optimizer.iterations + 1, dtype)
    gain_1, gain_2 = _gain(optimizer.beta_1, step), _gain(optimizer.beta_2, step)
    return {
        # From the betas as Keras casts them: through float32, whatever the dtype of the variables.
        "beta1_power": tf.pow(tf.cast(optimizer.beta_1, dtype), step),
        "beta2_power": tf.pow(tf.cast(optimizer.beta_2, dtype), step),
        "lr": tf.cast(learning_rate, dtype) * tf.sqrt(gain_2) / gain_1,
        "beta1": tf.constant(optimizer.beta_1, dtype),
        "beta2": tf.constant(optimizer.beta_2, dtype),
        "epsilon": tf.constant(optimizer.epsilon, dtype),
    }


def _gain(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Return the op's average of a constant, relative to Keras', at `step`."""
    number = step.dtype.as_numpy_dtype
    ops, keras_own = float(number(1) - number(beta)), float(number(1.0 - beta))
    if ops == keras_own:
        return tf.ones_like(step)
    return tf.math.expm1(step * number(np.log1p(-ops))) / tf.math.expm1(step * number(np.log1p(-keras_own)))


def _dense(gradient: Any, variable: tf.Variable) -> tf.Tensor:
    """Return the dense gradient in the variable's dtype; momentum updates all rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.cast(gradient, variable.dtype)
    values = tf.cast(gradient.values, variable.dtype)
    return tf.math.unsorted_segment_sum(values, gradient.indices, variable.shape[0])
