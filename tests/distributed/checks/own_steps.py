"""Models with a `train_step` of their own, against `Model.fit` of the whole batch in one process.

Python's own draws are left out of the models or written out in the reference; see `generative_models.py`.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks import context_parallel, experts
from generative_models import CLASSES, FEATURES, GAN, LATENT, WGAN, DiffusionModel, net
from meshes import on_mesh
from representation_models import BYOL, Contrastive, Distiller, Weighted
from world import World, computing_in, flat_bytes, moved, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError

RNG = np.random.default_rng(5)
SAMPLES, BATCH, EPOCHS = 69, 16, 4  # the last of five batches has 5 samples: 2 and 3 on two ranks
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
X = RNG.standard_normal((SAMPLES, FEATURES))
OTHERS = RNG.standard_normal((SAMPLES, FEATURES)) ** 2
LABELS = (X[:, 0] > 0).astype("int64")
WEIGHTS = RNG.random(SAMPLES) + 0.5


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def crossentropy() -> Any:
    return keras.losses.BinaryCrossentropy(from_logits=True)


def dataset(*parts: Any, batch: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts[0] if len(parts) == 1 else parts).batch(batch)


def compare(
    world: World,
    build: Callable[[], keras.Model],
    data: Any,
    *,
    validation: Any = None,
    reference: Callable[[], keras.Model] | None = None,
    figures: bool = True,
) -> Any:
    """Train by `Model.fit` in this process and by the trainer on all ranks; weights and histories must agree."""
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        one = (reference or build)()
        arrays = not isinstance(data, tf.data.Dataset)
        x, *y = data if isinstance(data, tuple) else (data,)
        start = [np.array(w) for w in one.get_weights()]
        fitted = one.fit(
            x,
            *y[:1],
            batch_size=BATCH if arrays else None,
            sample_weight=y[1] if len(y) > 1 else None,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=validation,
        )
        keras.utils.set_random_seed(world.rank)
        model = build()
        if world.rank == 0:
            model.set_weights(start)
        trainer = hvdtrain.Trainer(model, backend=world.backend)
        result = trainer.fit(
            data,
            batch=BATCH if arrays else None,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=validation,
            callbacks=[keras.callbacks.Callback()],
        )
    expected = [np.array(w) for w in one.get_weights()]
    assert moved(expected, start) >= 1e-2
    assert world.same_everywhere(flat_bytes(model.get_weights())), "the ranks' weights differ"
    error = relative_error(model.get_weights(), expected)
    assert error <= 1e-9, f"{error:.2e}"
    assert set(result.history) == set(fitted.history), (result.history, fitted.history)
    for name, values in result.history.items():
        # A tracker that is told of a batch at a time counts the slices of a short batch alike.
        np.testing.assert_allclose(values, fitted.history[name], rtol=1e-9 if figures else 0.1, err_msg=name)
    return trainer


def gan() -> keras.Model:
    model = GAN(net(FEATURES, 1), net(LATENT, FEATURES))
    model.compile(d_optimizer=adam(), g_optimizer=adam(), loss_fn=crossentropy())
    return model


@worlds("mpirun-2", "mpirun-1", extended=True)
def check_a_gan_with_two_optimizers(world: World) -> None:
    # A short batch of one sample: on two ranks one of them holds a placeholder.
    trainer = compare(world, gan, dataset(X[:65]), figures=False)
    slots = {path.split("/")[1] for path in trainer.state.named_tensors() if path.startswith("optimizer")}
    assert slots == {"d_optimizer", "g_optimizer"}, slots
    # Batches that divide: figures as in one process.
    compare(world, gan, (X[:64],))


@worlds("mpirun-2", extended=True)
def check_a_wasserstein_gan_with_gradient_penalty(world: World) -> None:
    def build() -> keras.Model:
        model = WGAN(net(FEATURES, 1), net(LATENT, FEATURES))
        model.compile(
            d_optimizer=keras.optimizers.Adam(0.005, beta_1=0.5, beta_2=0.9),
            g_optimizer=keras.optimizers.Adam(0.005, beta_1=0.5, beta_2=0.9),
            g_loss_fn=lambda fake_img: -tf.reduce_mean(fake_img),
            d_loss_fn=lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        )
        return model

    compare(world, build, tf.data.Dataset.from_tensor_slices((X,)).batch(BATCH))


@worlds("mpirun-2", extended=True)
def check_a_diffusion_model_with_averaged_weights(world: World) -> None:
    def build() -> keras.Model:
        model = DiffusionModel(net(FEATURES + 1, FEATURES))
        model.normalizer.adapt(X)
        model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-4), loss=keras.losses.MeanAbsoluteError())
        return model

    compare(world, build, X[:64], validation=dataset(OTHERS[:32]))


@worlds("mpirun-2", extended=True)
def check_a_contrastive_model_with_a_probe(world: World) -> None:
    def build() -> keras.Model:
        model = Contrastive()
        model.compile(contrastive_optimizer=adam(), probe_optimizer=adam())
        return model

    unlabeled, labeled = dataset(X[:64], LABELS[:64]), dataset(OTHERS[:32], LABELS[:32], batch=8)
    data = tf.data.Dataset.zip((unlabeled, labeled))
    compare(world, build, data, validation=dataset(X[:32], LABELS[:32]))


@worlds("mpirun-2", extended=True)
def check_knowledge_distillation(world: World) -> None:
    def build() -> keras.Model:
        model = Distiller(net(FEATURES, CLASSES), net(FEATURES, CLASSES))
        model.compile(
            optimizer=adam(),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
            student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss_fn=keras.losses.KLDivergence(),
            alpha=0.1,
            temperature=3,
        )
        return model

    compare(world, build, (X, LABELS), validation=(OTHERS, LABELS))


@worlds("mpirun-2", extended=True)
def check_sample_weights_in_a_step_of_its_own(world: World) -> None:
    def build() -> keras.Model:
        model = Weighted()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(adam(), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()])
        model.build((None, FEATURES))
        return model

    compare(world, build, (X, LABELS, WEIGHTS))


@worlds("mpirun-2", extended=True)
def check_a_slow_copy_of_the_network(world: World) -> None:
    def build() -> keras.Model:
        model = BYOL()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        model.built = True
        return model

    compare(world, build, tf.data.Dataset.from_tensor_slices((X,)).batch(BATCH))


@worlds("mpirun-2", extended=True)
def check_a_custom_loop_with_two_networks(world: World) -> None:
    """A critic and a generator in a loop of the user's own, by the tape and by the optimizer that exchange."""

    def trained(tape: Any, wrap: Any, rows: slice) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        critic, generator = net(FEATURES, 1), net(FEATURES, FEATURES)
        d_optimizer, g_optimizer = wrap(adam()), wrap(adam())

        @tf.function
        def step(real: tf.Tensor) -> None:
            for _ in range(2):
                with tape() as d_tape:
                    fake = generator(tf.sin(37.0 * real))
                    with tf.GradientTape() as inner:
                        inner.watch(fake)
                        judged = critic(fake)
                    slope = inner.gradient(judged, fake)
                    penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1.0))
                    d_loss = tf.reduce_mean(judged) - tf.reduce_mean(critic(real)) + 10.0 * penalty
                weights = critic.trainable_variables
                d_optimizer.apply(d_tape.gradient(d_loss, weights), weights)
            with tape() as g_tape:
                g_loss = -tf.reduce_mean(critic(generator(tf.sin(37.0 * real))))
            weights = generator.trainable_variables
            g_optimizer.apply(g_tape.gradient(g_loss, weights), weights)

        for first in range(0, 64, BATCH):
            step(tf.constant(X[first : first + BATCH][rows]))
        return [np.array(w) for w in critic.get_weights() + generator.get_weights()]

    mine = slice(world.rank, None, world.size)
    with computing_in("float64"):
        expected = trained(tf.GradientTape, lambda optimizer: optimizer, slice(None))
        by_tape = trained(hvdtrain.DistributedGradientTape, lambda optimizer: optimizer, mine)
        by_optimizer = trained(tf.GradientTape, hvdtrain.DistributedOptimizer, mine)
    for weights in (by_tape, by_optimizer):
        assert world.same_everywhere(flat_bytes(weights))
        assert relative_error(weights, expected) <= 1e-9, relative_error(weights, expected)


class ByCompiledLoss(keras.Model):
    """Applies gradients once, of the loss that was compiled."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.loss_of(x, y, outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
        return self.compute_loss(x=x, y=y, y_pred=outputs)


class ByHand(ByCompiledLoss):
    """Applies gradients once, of a loss that nothing of Keras computes."""

    def loss_of(self, x: Any, y: Any, outputs: Any) -> Any:
        own = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), outputs)
        return tf.add_n([tf.reduce_mean(own), *self.losses])


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_steps_that_apply_once_train_on_every_axis_as_keras_own(world: World) -> None:
    """With options and axes; the last batch is uneven."""
    x, y = context_parallel.tokens()

    def weights(build: Callable[[], keras.Model], kind: Any, axes: str, data: Any, **options: Any) -> list[np.ndarray]:
        def model() -> keras.Model:
            inner = build()
            return kind(inner.inputs, inner.outputs[0])

        with on_mesh(world, axes) as mesh:
            rules = {r"(up|logits)/kernel": (None, "tp"), r"down/kernel": ("tp", None)} if axes == "tp=2" else None
            built = hvdtrain.parallelize(model, rules) if axes in ("tp=2", "cp=2") else model()
            trainer = hvdtrain.Trainer(built, keras.optimizers.SGD(0.1), LOSS, backend=mesh.backend, **options)
            trainer.fit(data, batch=16, epochs=2, shuffle=False, verbose=0)
            return [np.array(each) for each in trainer.model.get_weights()]

    def decoder() -> keras.Model:
        keras.utils.set_random_seed(7)
        tokens = keras.Input((context_parallel.LENGTH,), dtype="int32")
        embedded = keras.layers.Embedding(context_parallel.WORDS, 8)(tokens)
        attended = keras.layers.MultiHeadAttention(2, 4)(embedded, embedded, use_causal_mask=True)
        hidden = keras.layers.Dense(16, "tanh", name="up", kernel_regularizer="l2")(attended)
        hidden = keras.layers.Dense(8, name="down")(hidden)
        return keras.Model(tokens, keras.layers.Dense(6, name="logits")(hidden))

    def normalized() -> keras.Model:
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(8, "tanh"), hvdtrain.SyncBatchNormalization(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    sequences, features = (x[:37], y[:37] % 6), (X, LABELS)
    for build, axes, data, options in (
        (decoder, "tp=2", sequences, {}),
        (decoder, "cp=2", sequences, {}),
        (decoder, "dp=-1", sequences, {"zero": 3}),
        (decoder, "dp=-1", sequences, {"accumulate": 2}),
        (decoder, "dp=-1", sequences, {"local_steps": 2}),
        (normalized, "dp=-1", features, {}),
        (lambda: experts.model_of("float64"), "ep=2", experts.data("float64"), {}),
    ):
        expected = weights(build, keras.Model, axes, data, **options)
        if axes in ("cp=2", "ep=2") or "local_steps" in options:
            with refused("The step of ByHand is its own", ConfigError):
                weights(build, ByHand, axes, data, **options)
            options = {"whole_batch": False, **options}
        for kind in (ByCompiledLoss, ByHand):
            error = relative_error(weights(build, kind, axes, data, **options), expected)
            assert error <= 1e-9, f"{kind.__name__} {axes} {options}: {error:.2e}"
