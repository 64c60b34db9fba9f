import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.layers.convert import with_sync_batch_norm, without_sync_batch_norm
from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization, refuse_keras_synchronization, sync_layers
from tests.unit.threaded_ranks import on_threads

TOLERANCE = {"float32": 1e-6, "float64": 1e-9}
CHANNELS = 5


class Room:
    """Where threads meet to add up their tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size


class ThreadExchange:
    """The exchange of one thread that stands for a replica."""

    def __init__(self, room: Room, index: int) -> None:
        self.room, self.size, self.index = room, room.size, index
        self.messages: list[tuple[str, int]] = []

    def all_reduce(self, tensor: tf.Tensor, *, name: str, op: str = "sum") -> tf.Tensor:
        assert op == "sum"
        self.messages.append((name, int(tf.size(tensor))))
        self.room.slots[self.index] = (name, tensor)
        self.room.barrier.wait()
        names, tensors = zip(*self.room.slots, strict=True)
        assert len(set(names)) == 1, names
        total = tf.add_n(list(tensors))
        self.room.barrier.wait()
        return total


class Mirror:
    """Two replicas that hold the same: what one of them sees, in compiled functions too."""

    size, index = 2, 0

    def __init__(self) -> None:
        self.names: list[str] = []

    def all_reduce(self, tensor: tf.Tensor, *, name: str, op: str = "sum") -> tf.Tensor:
        self.names.append(name)
        return tensor + tensor


def pass_through(layer: Any, x: np.ndarray, slope: np.ndarray, mask: Any = None) -> dict[str, np.ndarray]:
    """Run a forward and a backward pass of the loss sum(slope * output); return all that comes of it."""
    inputs = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        output = layer(inputs, training=True, mask=mask)
        loss = tf.reduce_sum(tf.cast(output, slope.dtype) * slope)
    gradients = tape.gradient(loss, [inputs, *(v.value for v in layer.trainable_variables)])
    named = dict(zip(["inputs", *(v.name for v in layer.trainable_variables)], gradients, strict=True))
    moving = {v.name: v.numpy() for v in layer.non_trainable_variables}
    return {"output": output.numpy(), **{k: v.numpy() for k, v in named.items()}, **moving}


def built(kind: Callable[..., Any], shape: tuple[int, ...], **options: Any) -> Any:
    """Return a layer with values of its own in every variable, the same in every call."""
    layer = kind(name="bn", **options)
    layer.build((None, *shape))
    rng = np.random.default_rng(7)
    for variable in layer.variables:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return layer


def over_replicas(
    x: np.ndarray,
    slope: np.ndarray,
    ends: list[int],
    *,
    kind: Any = SyncBatchNormalization,
    mask: Any = None,
    has_samples: Any = None,
    **options: Any,
) -> tuple[list[dict[str, np.ndarray]], list[ThreadExchange]]:
    """Cut the batch at `ends` and run each part as a replica of its own."""
    room = Room(len(ends) + 1)
    exchanges = [ThreadExchange(room, index) for index in range(room.size)]
    parts = [np.split(array, ends) for array in (x, slope, *([mask] if mask is not None else []))]
    replicas = [built(kind, x.shape[1:], **options) for _ in range(room.size)]

    def run(index: int) -> dict[str, np.ndarray]:
        layer = replicas[index]
        if kind is SyncBatchNormalization:
            layer.exchange = exchanges[index]
            layer.has_samples = 1.0 if has_samples is None else has_samples[index]
        return pass_through(layer, *(part[index] for part in parts))

    results = on_threads(room.size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results, exchanges


def as_one(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Put the replicas' results together: outputs side by side, gradients of parameters added up."""
    join = {"output": np.concatenate, "inputs": np.concatenate, "gamma": sum, "beta": sum}
    return {name: join.get(name, lambda values: values[0])([part[name] for part in parts]) for name in parts[0]}


def largest_error(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> float:
    """Return the largest difference of any result, as a share of the largest value of that result."""
    assert ours.keys() == reference.keys()
    return max(float(np.abs(ours[k] - v).max() / np.abs(v).max()) for k, v in reference.items())


def batch(dtype: str, shape: tuple[int, ...] = (11, 4, 3, CHANNELS)) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs whose parts have different means, and the slopes of the loss."""
    rng = np.random.default_rng(1)
    drift = np.linspace(-1, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return (2 * rng.standard_normal(shape) + drift + 1).astype(dtype), rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ends", [[4], [1, 9], [3, 6, 9]])
def test_replicas_equal_one_process(dtype: str, ends: list[int]) -> None:
    x, slope = batch(dtype)
    parts, exchanges = over_replicas(x, slope, ends, dtype=dtype)
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], dtype=dtype), x, slope)
    assert largest_error(as_one(parts), reference) < TOLERANCE[dtype]
    for name in ("moving_mean", "moving_variance"):
        assert len({part[name].tobytes() for part in parts}) == 1
    assert exchanges[0].messages == [(f"sync_batch_norm/{way}", 1 + 2 * CHANNELS) for way in ("forward", "backward")]


def test_statistics_of_each_replica_alone_are_not_equal() -> None:
    x, slope = batch("float64")
    parts, _ = over_replicas(x, slope, [4], kind=layers.BatchNormalization, dtype="float64")
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], dtype="float64"), x, slope)
    for name, value in as_one(parts).items():
        if name != "beta":  # its gradient knows nothing of the statistics
            assert np.abs(value - reference[name]).max() > 1e-2 * np.abs(reference[name]).max(), name


def test_mean_far_from_zero_cancels_nothing() -> None:
    x, slope = batch("float64")
    far = x + 1000.0
    parts, _ = over_replicas(far, slope, [4], dtype="float64")
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], dtype="float64"), far, slope)
    assert largest_error(as_one(parts), reference) < TOLERANCE["float64"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_mask_counts_over_the_whole_batch(dtype: str, axis: int) -> None:
    x, slope = batch(dtype, (11, 4, CHANNELS))
    mask = np.random.default_rng(2).random((11, 4)) < 0.6
    mask[:3] = False  # nothing at all on the first replica
    slope *= mask[..., np.newaxis]
    parts, _ = over_replicas(x, slope, [3, 8], mask=mask, axis=axis, dtype=dtype)
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], axis=axis, dtype=dtype), x, slope, mask)
    assert largest_error(as_one(parts), reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("placeholder", [1.0, 1e30])
def test_replica_without_samples_does_not_count(placeholder: float) -> None:
    x, slope = batch("float64")
    padded = np.concatenate([x, np.full_like(x[:2], placeholder)])
    slopes = np.concatenate([slope, np.zeros_like(slope[:2])])
    parts, _ = over_replicas(
        padded, slopes, [4, 11], has_samples=[1.0, tf.constant(1.0), tf.constant(0.0)], dtype="float64"
    )
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], dtype="float64"), x, slope)
    assert largest_error(as_one(parts[:2]), reference) < TOLERANCE["float64"]
    assert np.isfinite(parts[2]["output"]).all()
    for name in ("inputs", "gamma", "beta"):
        np.testing.assert_array_equal(parts[2][name], 0)
    for name in ("moving_mean", "moving_variance"):
        np.testing.assert_array_equal(parts[2][name], parts[0][name])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_has_statistics_in_float32(policy: str) -> None:
    x, slope = batch("float32")
    narrow = tf.cast(x, policy.removeprefix("mixed_")).numpy()
    parts, _ = over_replicas(narrow, slope, [4], dtype=policy)
    reference = pass_through(built(layers.BatchNormalization, x.shape[1:], dtype=policy), narrow, slope)
    assert parts[0]["output"].dtype == narrow.dtype
    for name in ("moving_mean", "moving_variance", "gamma", "beta"):
        assert parts[0][name].dtype == np.float32
    for result in (joined := as_one(parts)), reference:
        for name in ("output", "inputs"):  # rounded to 16 bits: one step apart at most
            result[name] = result[name].astype("float32")
    step = {"mixed_float16": 2.0**-10, "mixed_bfloat16": 2.0**-7}[policy]
    for name in ("output", "inputs"):
        np.testing.assert_allclose(joined.pop(name), reference.pop(name), rtol=step, atol=1e-6)
    assert largest_error(joined, reference) < TOLERANCE["float32"]


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_float16"])
def test_one_replica_is_plain_batch_normalization(policy: str, session: Any) -> None:
    x, slope = batch("float64" if policy == "float64" else "float32", (7, 3, CHANNELS))
    for mask in (None, np.arange(21).reshape(7, 3) % 4 > 0):
        kinds = SyncBatchNormalization, layers.BatchNormalization
        ours, plain = (pass_through(built(k, x.shape[1:], dtype=policy), x, slope, mask) for k in kinds)
        for name, value in plain.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.usefixtures("no_session")
def test_training_needs_a_session_and_inference_none() -> None:
    layer, x = built(SyncBatchNormalization, (CHANNELS,)), batch("float32", (7, CHANNELS))[0]
    with pytest.raises(LaunchError, match=r"call hvdtrain\.init\(\) first"):
        layer(x, training=True)
    plain = built(layers.BatchNormalization, (CHANNELS,))
    np.testing.assert_array_equal(layer(x), plain(x))
    layer.trainable = False
    np.testing.assert_array_equal(layer(x, training=True), plain(x))


@pytest.mark.parametrize("option", ["renorm", "synchronized"])
def test_what_it_does_not_do_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"Received: {option}=True"):
        SyncBatchNormalization(**{option: True})


@pytest.mark.usefixtures("no_session")
def test_saved_model_is_loaded_without_a_session(tmp_path: Any) -> None:
    kept = {"epsilon": 0.01, "momentum": 0.5}
    model = keras.Sequential([keras.Input((CHANNELS,)), SyncBatchNormalization(name="bn", scale=False, **kept)])
    model.layers[0].moving_mean.assign(np.arange(CHANNELS))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is SyncBatchNormalization
    assert {name: loaded.layers[0].get_config()[name] for name in kept} == kept
    x = batch("float32", (7, CHANNELS))[0]
    np.testing.assert_array_equal(loaded(x), model(x))


def test_every_call_in_a_compiled_function_has_a_name_of_its_own() -> None:
    """A layer called twice, and another layer of the same path, once within a loop."""
    exchange = Mirror()
    one, other = built(SyncBatchNormalization, (CHANNELS,)), built(SyncBatchNormalization, (CHANNELS,))
    one.exchange = other.exchange = exchange

    @tf.function(autograph=False)
    def twice(x: tf.Tensor) -> tf.Tensor:
        y = one(one(x, training=True), training=True)
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, other(y, training=True)), (0, y))[1]

    for rows in (3, 4):  # a second trace gives the same names
        twice(tf.ones((rows, CHANNELS)))
        assert exchange.names == [f"sync_batch_norm{number}/forward" for number in ("", "#2", "#3")]
        exchange.names.clear()


def model_with_everything() -> keras.Model:
    """Nested models, one frozen; a shared layer, one of its own path twice, an operation, a dropout."""
    inputs, inner_inputs = keras.Input((8, 8, 3)), keras.Input((8, 8, 4))
    hidden = layers.BatchNormalization(name="bn")(layers.Conv2D(4, 3, padding="same", name="conv")(inner_inputs))
    inner = keras.Model(inner_inputs, hidden, name="inner")
    row = keras.Sequential([layers.Conv2D(4, 1, name="conv"), layers.BatchNormalization(name="bn")], name="row")
    shared = layers.BatchNormalization(name="shared", momentum=0.5, epsilon=0.1)
    x = shared(layers.Conv2D(4, 3, padding="same", name="stem")(inputs))
    x = keras.ops.relu(shared(row(layers.Dropout(0.5)(inner(x) + 1.0))))
    model = keras.Model(inputs, layers.BatchNormalization(name="last", scale=False)(x), name="everything")
    model.get_layer("inner").trainable = False
    rng = np.random.default_rng(5)
    model.set_weights([rng.uniform(0.5, 1.5, w.shape) for w in model.get_weights()])
    return model


def test_conversion_keeps_names_values_and_structure() -> None:
    model = model_with_everything()
    copy = with_sync_batch_norm(model)
    assert [v.path for v in copy.weights] == [v.path for v in model.weights]
    assert [v.path for v in copy.trainable_variables] == [v.path for v in model.trainable_variables]
    assert not {id(v) for v in copy.variables} & {id(v) for v in model.variables}
    for new, old in zip(copy.variables, model.variables, strict=True):
        np.testing.assert_array_equal(new, old)
    assert {layer.path for layer in sync_layers(copy)} == {"shared", "bn", "row/bn", "last"}
    assert not any(type(layer) is layers.BatchNormalization for layer in copy._flatten_layers())
    assert copy.get_layer("shared").epsilon == 0.1
    x = np.random.default_rng(6).standard_normal((3, 8, 8, 3)).astype("float32")
    np.testing.assert_array_equal(copy(x), model(x))
    assert not sync_layers(model)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="mine")
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any) -> Any:
        return self.norm(inputs)


class Uncopied(layers.Layer):
    def __init__(self, factor: Any, name: str) -> None:
        super().__init__(name=name)
        self.factor = keras.Variable(factor)

    def get_config(self) -> Any:
        return {"name": self.name}

    def call(self, inputs: Any) -> Any:
        return inputs * self.factor


def test_conversion_refuses_what_it_cannot_do() -> None:
    inputs = keras.Input((4, CHANNELS))
    mine = Subclassed()
    mine(np.zeros((2, 4, CHANNELS), "float32"))
    for layer in (mine, layers.TimeDistributed(layers.BatchNormalization(), name="mine")):
        within = keras.Sequential([inputs, layers.Dense(CHANNELS), layer])
        with pytest.raises(ConfigError, match=r"Received: \w+ 'mine'.*Use hvdtrain.SyncBatchNormalization"):
            with_sync_batch_norm(within)
    with pytest.raises(ConfigError, match=r"Received: Subclassed 'mine'.*Use hvdtrain.SyncBatchNormalization"):
        with_sync_batch_norm(mine)
    with pytest.raises(ConfigError, match="has no effect: the model has no BatchNormalization"):
        with_sync_batch_norm(keras.Sequential([inputs, layers.Dense(2)]))
    with pytest.raises(ConfigError, match="must be built before"):
        with_sync_batch_norm(keras.Sequential([layers.BatchNormalization()]))
    with pytest.raises(ConfigError, match=r"without get_config\(\) of all of its layers. Received: Uncopied 'odd'"):
        with_sync_batch_norm(keras.Sequential([inputs, Uncopied(3, name="odd"), layers.BatchNormalization()]))
    with pytest.raises(ConfigError, match="Received: renorm=True"):
        with_sync_batch_norm(keras.Sequential([inputs, layers.BatchNormalization(renorm=True)]))


def test_conversion_refuses_weights_that_would_be_renamed() -> None:
    with keras.name_scope("within"):
        model = keras.Sequential([keras.Input((CHANNELS,)), layers.BatchNormalization(name="bn")])
    with pytest.raises(ConfigError, match="would change the names of the weights"):
        with_sync_batch_norm(model)


def test_conversion_can_be_undone(session: Any) -> None:
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization(epsilon=0.01)(inputs)))
    model.layers[1].moving_mean.assign(np.arange(5.0))
    copy = with_sync_batch_norm(model)
    assert with_sync_batch_norm(copy) is copy, "there is nothing left to replace"
    back = without_sync_batch_norm(copy)
    assert type(back.layers[1]) is keras.layers.BatchNormalization
    assert back.layers[1].epsilon == 0.01
    x = np.ones((3, 5), "float32")
    np.testing.assert_array_equal(back(x), model(x))


def test_what_keras_synchronizes_over_tf_distribute_is_refused():
    """It would normalize each rank's samples by themselves, without a word."""
    inner = keras.Sequential([layers.Dense(2), layers.BatchNormalization(synchronized=True, name="norm")])
    with pytest.raises(ConfigError, match=r"'norm' \(synchronized=True\) .* write Trainer\(…, sync_batch_norm=True\)"):
        refuse_keras_synchronization(keras.Sequential([inner]))
    refuse_keras_synchronization(keras.Sequential([layers.BatchNormalization(), SyncBatchNormalization()]))
