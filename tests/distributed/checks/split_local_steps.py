"""Local SGD of replicas that are split themselves."""

import keras
import numpy as np
import tensorflow as tf
from checks.alike import BATCH, FIT, SAMPLES, built, data, split
from checks.experts import whole
from checks.hybrids import LOSS
from meshes import alone, on_mesh
from world import World, computing_in, moved, relative_error
from worlds import worlds

import hvdtrain


@worlds("gloo-4", extended=True)
def check_local_steps_of_a_split_model_are_those_of_whole_replicas(world: World) -> None:
    """Each replica is bounded by the norm of its whole gradient, of which its ranks hold slices."""
    bound, period = 0.05, 2
    with computing_in("float64"):
        with on_mesh(world, "dp=2,tp=2") as mesh:
            model = split(mesh, 2.0**-36 * mesh.session.world.rank)
            options = {"clip_norm": bound, "local_steps": period}
            trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.5), LOSS, backend=mesh.backend, **options)
            trainer.fit(*data(), epochs=1, **FIT)
            weights = whole(model, mesh)
            gamma = model.get_layer("norm").gamma.numpy().tobytes()
            assert len(set(mesh.backend.gather_bytes(gamma, timeout=60))) == 1
        with alone():
            start, expected = local_steps_by_hand(bound, period)
    assert moved(expected, start) >= 1e-2
    error = relative_error(weights, expected)
    assert error <= 1e-9, f"{error:.2e}"


def local_steps_by_hand(bound: float, period: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the weights of two replicas at the start and the end, trained one after the other on halves of batches."""
    model = built()
    start = model.get_weights()
    replicas = [start, start]
    x, y = data()
    for step, begin in enumerate(range(0, SAMPLES, BATCH), 1):
        for replica, weights in enumerate(replicas):
            model.set_weights(weights)
            mine = slice(begin + replica * BATCH // 2, begin + (replica + 1) * BATCH // 2)
            with tf.GradientTape() as tape:
                loss = LOSS(y[mine], model(x[mine], training=True))
            gradients = [
                tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
            ]
            clipped, _ = tf.clip_by_global_norm(gradients, bound)
            replicas[replica] = [w - 0.5 * g.numpy() for w, g in zip(weights, clipped, strict=True)]
        if step % period == 0:
            mean = [(one + other) / 2 for one, other in zip(*replicas, strict=True)]
            replicas = [mean, mean]
    return start, replicas[0]
