"""What is made of the ranks' gradients before and after they are applied: sums, Adasum, bounds, averages of weights."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, batches_of, dense_data, dense_model, per_sample
from checks.parity import assert_parity, train
from world import Transform, World, exact_arrays, flat_bytes, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.optim.averaging import averaged_weights


@worlds("mpirun-2", extended=True)
def check_groups_and_predivision(world: World) -> None:
    assert_parity(world, "dense", "adam", "float64", gradient_groups=2, predivide=4.0)
    assert_parity(world, "embedding", "adam", "float64", gradient_groups=1, sparse_gradients="gather")


def compare(world: World, transform: Transform | None, rule: Any = None, **options: Any) -> list[np.ndarray]:
    """Train with the options, and in one process with `transform` between gradient and update; return the weights."""
    x, y = dense_data("float64")
    rule = rule or keras.optimizers.SGD(0.125, momentum=0.5)
    trainer = train(world, dense_model("float64", world.rank), rule, (x, y), **options)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    reference, optimizer = dense_model("float64", 0), keras.optimizers.SGD(0.125, momentum=0.5)
    start = [np.array(w) for w in reference.get_weights()]
    expected = plain_training(reference, optimizer, per_sample, batches_of(x, y), transform)
    assert moved(expected, start) >= 1e-2
    error = relative_error(trainer.model.get_weights(), expected)
    assert error <= 1e-9, f"{options}: {error:.2e}"
    return trainer.model.get_weights()


@worlds("mpirun-2", "gloo-1", "mpirun-4", extended=True)
@exact_arrays()
def check_a_sum_is_the_average_times_the_ranks(world: World) -> None:
    compare(world, None, keras.optimizers.SGD(0.125 / world.size, momentum=0.5), reduce_op="sum")


@exact_arrays()
def check_bounds_are_on_the_gradient_of_the_whole_batch(world: World) -> None:
    free = compare(world, None)
    for accumulate in (1, 2):
        weights = compare(
            world, lambda gradients: tf.clip_by_global_norm(gradients, 0.25)[0], clip_norm=0.25, accumulate=accumulate
        )
        assert moved(weights, free) > 1e-2, "nothing was clipped"
    weights = compare(
        world, lambda gradients: [tf.clip_by_value(g, -0.03125, 0.03125) for g in gradients], clip_value=0.03125
    )
    assert moved(weights, free) > 1e-2, "nothing was clipped"


def adasum(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Combine neighbours, then neighbours of the results: Maleki et al. 2020, equation 5, loses the common half."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = adasum(vectors[: len(vectors) // 2]), adasum(vectors[len(vectors) // 2 :])
    dot = float(np.vdot(a, b))
    return (1 - dot / (2 * float(np.vdot(a, a)))) * a + (1 - dot / (2 * float(np.vdot(b, b)))) * b


@worlds("mpirun-2", "mpirun-4", extended=True)
def check_adasum_follows_its_formula(world: World) -> None:
    """One step of the trainer: the mean gradients of the ranks' own samples, combined tensor by tensor.

    Horovod has Adasum on MPI only.
    """
    x, y = dense_data("float64")
    x, y = x[:16], y[:16]
    for accumulate in (1, 2):
        model = dense_model("float64", 0)
        variables = [v.value for v in model.trainable_variables]
        start = [np.array(v) for v in variables]
        own = []
        for rank in range(world.size):
            part = slice(rank * 16 // world.size, (rank + 1) * 16 // world.size)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(per_sample(y[part], model(x[part], training=True)))
            own.append([g.numpy() for g in tape.gradient(loss, variables)])
        expected = [w - adasum(gradients) for w, *gradients in zip(start, *own, strict=True)]
        trainer = hvdtrain.Trainer(
            model,
            keras.optimizers.SGD(1.0),
            CROSS_ENTROPY,
            backend=world.backend,
            reduce_op="adasum",
            accumulate=accumulate,
        )
        trainer.fit((x, y), batch=16, shuffle=False, verbose=False)
        error = relative_error(model.get_weights(), expected)
        assert error <= 1e-6, f"accumulate {accumulate}: {error:.2e}"
        mean = [w - np.mean(gradients, axis=0) for w, *gradients in zip(start, *own, strict=True)]
        assert moved(expected, mean) > 1e-3, "the average would have passed as well"


@worlds("mpirun-2")
@worlds("gloo-1", "mpirun-4", extended=True)
@exact_arrays()
def check_averages_take_the_weights_place(world: World) -> None:
    """After a training; the averages are those of one process."""
    rule = keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.75)
    x, y = dense_data("float64")
    trainer = train(world, dense_model("float64", world.rank), rule, (x, y))
    averages = trainer.model.get_weights()
    figures = trainer.evaluate((x, y), batch=16, return_dict=True)
    reference, optimizer = dense_model("float64", 0), keras.optimizers.SGD(0.125, use_ema=True, ema_momentum=0.75)
    plain_training(reference, optimizer, per_sample, batches_of(x, y))
    assert moved(averages, reference.get_weights()) > 1e-3
    with averaged_weights(optimizer, reference):
        assert world.same_everywhere(flat_bytes(averages))
        assert relative_error(averages, reference.get_weights()) <= 1e-9
        expected = float(tf.reduce_mean(per_sample(y, reference(x))))
    assert abs(figures["loss"] - expected) <= 1e-6 * expected
