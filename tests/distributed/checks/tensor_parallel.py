"""Models whose layers are split along tp train as one process does: ours, and some as users of Keras write them."""

import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import TOLERANCE, assert_moved, per_sample
from checks.experts import whole
from meshes import on_mesh
from world import World, computing_in, exact_arrays, flat_bytes, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.models import mlp as mlp
from hvdtrain.models import transformer as transformer
from hvdtrain.parallel.tensor.parallelize import Parallelization

BATCH, EPOCHS, LENGTH = 8, 4, 8
WORDS = 33  # neither two nor four ranks divide them
SAMPLES = 36  # four full batches and one of 4 samples: 20 steps
layers = keras.layers


class TransformerBlock(layers.Layer):
    """As in keras.io/examples/nlp/text_classification_with_transformer."""

    def __init__(self, embed_dim: int, num_heads: int, ff_dim: int, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim // num_heads, name="att")
        self.ffn = keras.Sequential(
            [layers.Dense(ff_dim, activation="relu", name="wide"), layers.Dense(embed_dim, name="narrow")], name="ffn"
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs: Any) -> Any:
        attn_output = self.att(inputs, inputs)
        attn_output = self.dropout1(attn_output)
        out1 = self.layernorm1(inputs + attn_output)
        ffn_output = self.ffn(out1)
        ffn_output = self.dropout2(ffn_output)
        return self.layernorm2(out1 + ffn_output)


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen: int, vocab_size: int, embed_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim, name="token_emb")
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim, name="pos_emb")

    def call(self, x: Any) -> Any:
        maxlen = keras.ops.shape(x)[-1]
        positions = keras.ops.arange(0, maxlen, 1)
        return self.token_emb(x) + self.pos_emb(positions)


def text_classifier() -> keras.Model:
    inputs = layers.Input(shape=(LENGTH,), dtype="int32")
    x = TokenAndPositionEmbedding(LENGTH, WORDS, 16)(inputs)
    x = TransformerBlock(16, 4, 32, rate=0.0)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.0)(x)
    x = layers.Dense(20, activation="relu", name="hidden")(x)
    return keras.Model(inputs, layers.Dense(3, name="out")(x))


TEXT_RULES = {
    r"token_emb/embeddings": ("tp", None),
    r"att/(query|key|value)/kernel": (None, "tp", None),
    r"att/attention_output/kernel": ("tp", None, None),
    r"(wide|hidden)/kernel": (None, "tp"),
    r"(narrow|out)/kernel": ("tp", None),
}


class VisionTransformer(keras.Model):
    """A subclassed model whose layers are made when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = layers.Conv2D(16, 4, 4, name="patches")
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.GroupQueryAttention(4, 8, 4, name="attention")
        self.mlp = [layers.Dense(32, activation=keras.activations.gelu, name="up"), layers.Dense(16, name="down")]
        self.head = layers.Dense(4, name="head")

    def call(self, images: Any, training: bool = False) -> Any:
        x = self.patches(images)
        x = keras.ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
        y = self.norms[0](x)
        x = x + self.attention(y, y)
        y = self.norms[1](x)
        for layer in self.mlp:
            y = layer(y)
        return self.head(keras.ops.mean(x + y, axis=1))


VISION_RULES = {
    r"attention/(query|key|value)/kernel": (None, "tp", None),
    r"attention/attention_output/kernel": ("tp", None, None),
    r"up/kernel": (None, "tp"),
    r"down/kernel": ("tp", None),
    r"head/kernel": (None, "tp"),
}


def perceptron() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(24, activation="tanh", name="one"),
            layers.Dense(16, activation="relu", name="two"),
            layers.Dense(4, name="three"),
        ]
    )


PERCEPTRON_RULES = {"one/kernel": (None, "tp"), "two/kernel": ("tp", None), "three/kernel": (None, "tp")}


def tied_language_model() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(WORDS, 16, name="table")
    x = table(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 4, name="att")(x, x, use_causal_mask=True))
    return keras.Model(tokens, table(x, reverse=True))


TIED_RULES = {
    "table/embeddings": ("tp", None),
    r"att/(query|key|value)/kernel": (None, "tp", None),
    r"att/attention_output/kernel": ("tp", None, None),
}


def tokens_and_labels() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.integers(0, WORDS, (SAMPLES, LENGTH)).astype("int32"), rng.integers(0, 3, SAMPLES)


def tokens_and_next() -> tuple[np.ndarray, np.ndarray]:
    tokens = tokens_and_labels()[0]
    return tokens, np.roll(tokens, -1, 1)


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.standard_normal((SAMPLES, 8, 8, 3)), rng.integers(0, 4, SAMPLES)


def rows_and_labels() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.standard_normal((SAMPLES, 6)), rng.integers(0, 4, SAMPLES)


CASES = {
    "text": (text_classifier, TEXT_RULES, tokens_and_labels),
    "vision": (VisionTransformer, VISION_RULES, images_and_labels),
    "perceptron": (perceptron, PERCEPTRON_RULES, rows_and_labels),
    "tied": (tied_language_model, TIED_RULES, tokens_and_next),
    "mlp": (lambda: mlp.build((6,), 4, 1, depth=3, width=16), mlp.rules(4, 2, depth=3), rows_and_labels),
    "transformer": (
        lambda: transformer.build((LENGTH,), WORDS, 1, depth=2, width=16, heads=4),
        transformer.rules(WORDS, 4),
        tokens_and_next,
    ),
}
RATES = {"vision": 0.03, "mlp": 0.05}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")


def built(name: str, dtype: str, seed: int = 11) -> Any:
    """Return the whole model."""
    keras.utils.set_random_seed(seed)
    with computing_in(dtype):
        return CASES[name][0]()


def data_of(name: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = CASES[name][2]()
    return x if x.dtype == np.int32 else x.astype(dtype), y


class Deaf:
    """An exchange that leaves out the sums whose names end with one of `dropped`."""

    def __init__(self, exchange: Any, dropped: str) -> None:
        self._exchange, self._dropped = exchange, dropped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    def all_reduce(self, tensor: Any, *, name: str) -> Any:
        heard = self._exchange.all_reduce(tensor, name=name)
        return heard * 0 + tensor if self._dropped in name else heard


def split(mesh: World, name: str, dtype: str, *, deaf: str = "", sequence: bool = False) -> Any:
    """Return the model of a case, split among the ranks; each rank would draw values of its own."""
    exchange = mesh.backend.along("tp")
    exchange = Deaf(exchange, deaf) if deaf else exchange
    inputs = data_of(name, dtype)[0][:1] if name == "vision" else None
    with computing_in(dtype):
        split_model = Parallelization(exchange, CASES[name][1], mesh.backend, sequence=sequence)
        return split_model(lambda: built(name, dtype, 11 + mesh.session.world.rank), inputs)


def trained_alone(name: str, dtype: str) -> list[np.ndarray]:
    model, (x, y) = built(name, dtype), data_of(name, dtype)
    model(x[:1])
    start = [np.array(w) for w in model.get_weights()]
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS
    optimizer = keras.optimizers.SGD(RATES.get(name, 0.3), momentum=0.9)
    weights = plain_training(model, optimizer, per_sample, batches)
    assert_moved(weights, start)
    return weights


def error_of(mesh: World, name: str, dtype: str, *, sequence: bool = False, **more: Any) -> float:
    """Train split and in one process, and return the relative error."""
    deaf, rate = more.pop("deaf", ""), RATES.get(name, 0.3)
    model = split(mesh, name, dtype, deaf=deaf, sequence=sequence)
    x, y = data_of(name, dtype)
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(rate, momentum=0.9), LOSS, backend=mesh.backend, **more)
    trainer.fit((x, y), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, log_every=10)
    weights = whole(model, mesh)
    if not deaf:
        assert mesh.same_everywhere(flat_bytes(weights)), f"{name}: the ranks hold different models"
    return relative_error(weights, mesh.reference(trained_alone, name, dtype))


def layouts(world: World) -> list[str]:
    return ["tp=4"] if world.size == 4 else ["tp=2"]


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_models_of_users_train_split_as_in_one_process(world: World) -> None:
    for axes in layouts(world):
        with on_mesh(world, axes) as mesh:
            for name in ("perceptron", "text", "vision", "tied"):
                error = error_of(mesh, name, "float64")
                assert error <= TOLERANCE["float64"], f"{name} {axes}: {error:.2e}"


def check_our_perceptron_trains_split_as_in_one_process(world: World) -> None:
    assert_split_trains_as_whole(world, "mlp")


@worlds("mpirun-2", "gloo-4", extended=True)
def check_our_transformer_trains_split_as_in_one_process(world: World) -> None:
    assert_split_trains_as_whole(world, "transformer")
    if world.size > 2:
        assert_split_trains_as_whole(world, "mlp")


def assert_split_trains_as_whole(world: World, name: str) -> None:
    """In float32, as the logits of our models always are."""
    with on_mesh(world, layouts(world)[0]) as mesh:
        error = error_of(mesh, name, "float32")
    assert error <= TOLERANCE["float32"], f"{name}: {error:.2e}"


@worlds("mpirun-2", extended=True)
def check_slices_of_the_sequence_train_as_in_one_process(world: World) -> None:
    with on_mesh(world, layouts(world)[0]) as mesh:
        error = error_of(mesh, "transformer", "float32", sequence=True)
        assert error <= TOLERANCE["float32"], f"{error:.2e}"


@worlds("mpirun-2", extended=True)
def check_a_collective_that_is_missing_is_noticed(world: World) -> None:
    with on_mesh(world, layouts(world)[0]) as mesh:
        for dropped in ("input/back", "/output"):
            # Left on, the check for ranks that drift apart would end the training before the comparison.
            assert error_of(mesh, "perceptron", "float64", deaf=dropped, desync_every=0) > 1e-3, dropped


@worlds("mpirun-2", "gloo-4", extended=True)
@exact_arrays()
def check_what_is_around_a_split_model(world: World) -> None:
    """Bounds, microbatches, averages of weights, evaluation, prediction, and checkpoints that are restored whole."""
    x, y = data_of("perceptron", "float64")
    bound, rate = 1 / 16, 0.3
    fit = {"batch": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": False, "log_every": 10}
    optimizer = lambda: keras.optimizers.SGD(rate, momentum=0.9, use_ema=True, ema_momentum=0.9)  # noqa: E731
    options = {"clip_norm": bound, "accumulate": 2, "metrics": ["accuracy"]}
    axes = "dp=2,tp=2" if world.size == 4 else "tp=2"
    folder = world.folder / "split"
    with on_mesh(world, axes) as mesh:
        model = split(mesh, "perceptron", "float64")
        trainer = hvdtrain.Trainer(model, optimizer(), LOSS, backend=mesh.backend, **options)
        trainer.fit((x, y), **fit)
        weights, scores, outputs = whole(model, mesh), trainer.evaluate((x, y), return_dict=True), trainer.predict(x)
        trainer.save(folder)
    reference = built("perceptron", "float64")
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS
    clip = lambda gradients: tf.clip_by_global_norm(gradients, bound)[0]  # noqa: E731
    averaging = optimizer()
    plain_training(reference, averaging, per_sample, batches, clip)
    averaging.finalize_variable_values(reference.trainable_variables)
    assert relative_error(weights, reference.get_weights()) <= 1e-9
    expected = reference(x).numpy()
    assert np.abs(outputs - expected).max() <= 1e-9 * np.abs(expected).max(), "predict"
    assert abs(scores["loss"] - float(tf.reduce_mean(per_sample(y, expected)))) <= 1e-6
    assert abs(scores["accuracy"] - np.mean(expected.argmax(-1) == y)) <= 1e-6
    with on_mesh(world, "dp=-1") as plain:
        with computing_in("float64"):
            model = built("perceptron", "float64", seed=3)
        again = hvdtrain.Trainer(model, optimizer(), LOSS, backend=plain.backend, **options)
        again.restore(folder)
        found = [again.predict(x), *(np.array(w) for w in model.get_weights())]
        assert all((mine == theirs).all() for mine, theirs in zip(found[1:], weights, strict=True)), "not bit-equal"
        assert np.abs(found[0] - expected).max() <= 1e-9 * np.abs(expected).max()
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)
