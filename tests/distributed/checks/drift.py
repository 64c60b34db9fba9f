"""What changes variables on one rank alone is refused by name, at once or in the first steps."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, flat_bytes, grappler
from worlds import worlds

import hvdtrain
import hvdtrain.horovod as hvd
from hvdtrain.config.errors import ConfigError, DesyncError, LaunchError

X = np.random.default_rng(8).standard_normal((32, 4)).astype("float32")


class Base(keras.Model):
    """A train_step with what a subclass does besides."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(data)))
        self.update(tape.gradient(loss, self.net.trainable_variables), data)
        return {"loss": loss}

    def update(self, gradients: Any, data: Any) -> None:
        self.optimizer.apply(gradients, self.net.trainable_variables)


def refusal(
    world: World,
    model: keras.Model,
    batch: int = 8,
    desync_every: int = 100,
    *,
    whole_batch: bool = False,
    **options: Any,
) -> str:
    """Train, and return what is said of it: the same on every rank."""
    model.compile(keras.optimizers.SGD(0.1))
    said = ""
    try:
        trainer = hvdtrain.Trainer(model, backend=world.backend, desync_every=desync_every, whole_batch=whole_batch)
        trainer.fit(X, batch=batch, shuffle=False, verbose=0, **options)
    except (ConfigError, DesyncError, LaunchError) as error:
        said = f"{type(error).__name__}: {error}"
    assert world.same_everywhere(said.encode()), said
    return said


@worlds("mpirun-2", extended=True)
def check_an_optimizer_that_is_no_attribute_is_refused(world: World) -> None:
    elsewhere = keras.optimizers.Adam(0.1, name="elsewhere")

    class OutOfSight(Base):
        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            elsewhere.apply(gradients, self.net.trainable_variables)

    class Makeshift(Base):
        def update(self, gradients: Any, data: Any) -> None:
            keras.optimizers.SGD(0.1, name="makeshift").apply_gradients(
                zip(gradients, self.net.trainable_variables, strict=True)
            )

    message = refusal(world, OutOfSight())
    assert "train_step of OutOfSight applies gradients with an optimizer that is no attribute" in message, message
    assert "Received: Adam 'elsewhere'; the model holds self.optimizer." in message, message
    assert "Received: SGD" in refusal(world, Makeshift())


def check_what_is_assigned_from_a_ranks_samples_is_named(world: World) -> None:
    class ByHand(Base):
        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            self.net.layers[0].bias.assign_sub(0.1 * gradients[1])

    class Later(Base):
        """From the third step on: after the first looks, at the end of the epoch."""

        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            late = tf.cast(self.optimizer.iterations > 2, tf.float32)
            self.net.layers[0].kernel.assign_sub(late * gradients[0])

    class Queue(Base):
        """A bank of features, as contrastive models have: of this rank's samples alone."""

        gathered = False

        def __init__(self) -> None:
            super().__init__()
            self.queue = self.add_weight(shape=(8, 2), initializer="zeros", trainable=False)

        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            features = self.net(data)
            features = hvd.allgather(features, name="features") if self.gathered else features
            self.queue.assign(tf.concat([features, self.queue], axis=0)[:8])

    class GatheredQueue(Queue):
        gathered = True

    if world.size == 1:
        assert refusal(world, ByHand()) == refusal(world, Later()) == refusal(world, Queue()) == ""
        return

    class Sometime(Later):
        """In the middle of a long epoch, on rank 0 alone, in the last bit of one weight."""

        def update(self, gradients: Any, data: Any) -> None:
            Base.update(self, gradients, data)
            drifts = tf.cast(tf.logical_and(self.optimizer.iterations > 4, world.rank == 0), tf.int32)
            bits = tf.bitcast(self.net.layers[0].kernel.value, tf.int32)
            self.net.layers[0].kernel.assign(tf.bitcast(tf.bitwise.bitwise_xor(bits, drifts), tf.float32))

    message = refusal(world, ByHand())
    assert message.startswith("DesyncError: After step 1 every rank must hold the same weights"), message
    assert "on rank 1 other values than on rank 0 of model/net/layers/0/bias. Something" in message, message
    assert "After step 4" in refusal(world, Later())
    # 16 steps, of which the fifth drifts.
    assert "After step 6 " in refusal(world, Sometime(), batch=2, desync_every=3)
    folder = world.folder / f"drifted-{world.controller}"
    saves = hvdtrain.Checkpoint(folder, every=5)
    assert "After step 5 " in refusal(world, Sometime(), batch=2, checkpoint=saves)
    assert not list(folder.glob("step-*")), "what the ranks were not compared in is saved"
    assert "of model/queue. Something" in refusal(world, Queue())
    assert refusal(world, GatheredQueue(), epochs=2) == ""


@worlds("mpirun-2", extended=True)
def check_statistics_of_layers_and_a_ranks_own_variables_are_exempt(world: World) -> None:
    class Norm(Base):
        def __init__(self) -> None:
            super().__init__()
            self.norm = keras.layers.BatchNormalization()
            self.seen = tf.Variable(tf.zeros([4]), trainable=False)

        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            self.seen.assign(tf.reduce_mean(self.norm(data, training=True), axis=0) + data[0])

    assert refusal(world, Norm(), epochs=2) == ""


@worlds("mpirun-2", extended=True)
def check_ranks_with_other_models_do_not_wait_for_one_another(world: World) -> None:
    class Differing(Base):
        def __init__(self) -> None:
            super().__init__()
            self.extra = keras.layers.Dense(1 + world.rank)
            self.extra.build((None, 2))

    message = refusal(world, Differing())
    if world.size > 1:
        expected = "LaunchError: Every rank trains the same model with the same optimizers. Received: model/extra/"
        assert message.startswith(expected), message


@worlds("mpirun-2", extended=True)
@grappler()
def check_gradients_applied_in_loops_conditions_and_functions(world: World) -> None:
    """Each of them is exchanged once, also where the graph is traced elsewhere than the step."""

    class Everywhere(Base):
        def __init__(self) -> None:
            super().__init__()
            self.others = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.02)]
            self.sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in self.net.trainable_variables]
            self.count = tf.Variable(0, trainable=False)

        @tf.function
        def in_a_function(self, data: Any) -> Any:
            for _ in tf.range(2):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.abs(self.net(data) - 1.0))
                variables = self.net.trainable_variables
                self.others[0].apply(tape.gradient(loss, variables), variables)
            return loss

        def update(self, gradients: Any, data: Any) -> None:
            self.in_a_function(data)
            for total, gradient in zip(self.sums, gradients, strict=True):
                total.assign_add(gradient)

            def apply_sums() -> Any:
                self.others[1].apply([total.read_value() for total in self.sums], self.net.trainable_variables)
                for total in self.sums:
                    total.assign(tf.zeros_like(total))
                return tf.constant(True)

            tf.cond(self.count.assign_add(1) % 2 == 0, apply_sums, lambda: tf.constant(False))
            super().update(gradients, data)

    keras.utils.set_random_seed(0)
    model, one = Everywhere(), Everywhere()
    one.set_weights(model.get_weights())
    assert refusal(world, model, epochs=3) == ""
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    one.compile(keras.optimizers.SGD(0.1))
    one.fit(X, batch_size=8, shuffle=False, epochs=3, verbose=0)
    if world.rank == 0:
        for ours, theirs in zip(model.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def check_draws_differ_by_rank_in_a_step_of_its_own(world: World) -> None:
    """A seed that is the same on every rank must not give all of them the same noise."""

    class Noisy(Base):
        def __init__(self, drawn: tf.Variable) -> None:
            super().__init__()
            self.seen = lambda: drawn  # not an attribute, of which ranks must not have their own

        def update(self, gradients: Any, data: Any) -> None:
            super().update(gradients, data)
            self.seen().assign(tf.stack([tf.random.normal([5]), keras.random.normal([5])]))

    keras.utils.set_random_seed(0)
    apart, together = (tf.Variable(tf.zeros([2, 5]), trainable=False) for _ in range(2))
    assert refusal(world, Noisy(apart)) == ""
    for drawn in apart.numpy():
        assert len(set(world.gather(drawn.tobytes()))) == world.size, drawn
    assert refusal(world, Noisy(together), whole_batch=True) == ""
    assert world.same_everywhere(together.numpy().tobytes()), together
