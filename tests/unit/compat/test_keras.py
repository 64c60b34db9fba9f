"""What hvdtrain takes for granted about Keras' layers, models, metrics and callbacks."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.compat import keras as compat
from hvdtrain.config.errors import CompatibilityError
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "keras")
LAYER = keras.layers.Layer


class Block(keras.layers.Layer):
    """A layer with one of each kind of state."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(2)
        self.seeds = keras.random.SeedGenerator(1)
        self.mean = keras.metrics.Mean()

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.count = self.add_weight(shape=(), trainable=False, name="count")
        self.inner.build(shape)

    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return self.inner(x) * self.scale


def block():
    made = Block()
    made(np.ones((1, 2), np.float32))
    return made


def functional():
    x = keras.Input((3,), dtype="float32", name="x")
    hidden = keras.layers.Dense(2, name="hidden")(x)
    return keras.Model({"x": x}, {"y": keras.layers.ReLU(name="out")(hidden)})


@CONTRACTS.of(compat.flatten_layers)
def flattens():
    outer = block()
    assert [type(each) for each in compat.flatten_layers(outer)] == [Block, keras.layers.Dense]
    assert compat.flatten_layers(outer, include_self=False) == [outer.inner]
    assert compat.flatten_layers(keras.Sequential([outer]), recursive=False, include_self=False) == [outer]
    assert compat.flatten_layers(keras.ops.add(keras.Input((1,)), 1)._keras_history.operation) == []


@CONTRACTS.of(compat.add_weight_when_built)
def adds_weights_to_built_layers():
    outer = block()
    before = [*outer.weights]
    weight = compat.add_weight_when_built(outer.inner, "mask", (2,), "ones", "uint8")
    assert outer.inner.mask is weight
    assert [id(each) for each in outer.non_trainable_weights] == [id(outer.count), id(weight)]
    assert not weight.trainable
    with pytest.raises(ValueError, match="already built"):
        outer.inner.other = keras.Variable(1.0)  # it is locked again
    delattr(outer.inner, "mask")
    assert [id(each) for each in outer.weights] == [id(each) for each in before]


@CONTRACTS.of(
    *(compat.own_trainable_variables, compat.own_non_trainable_variables, compat.own_variables),
    *(compat.own_seed_generators, compat.own_metrics, compat.own_layers),
)
def lists_what_a_layer_owns():
    outer = block()
    assert compat.own_non_trainable_variables(outer) == [outer.count]
    assert compat.own_variables(outer) == [outer.scale, outer.count]
    assert compat.own_seed_generators(outer) == [outer.seeds]
    assert compat.own_metrics(outer) == [outer.mean]
    assert compat.own_layers(outer) == [outer.inner]
    outer.trainable = False
    assert compat.own_trainable_variables(outer) == [outer.scale]


@CONTRACTS.of(compat.is_layer_graph)
def knows_lists_of_layers():
    models = keras.Sequential([keras.layers.Dense(1)]), functional()
    assert all(map(compat.is_layer_graph, models))
    assert not compat.is_layer_graph(block())


@CONTRACTS.of(compat.constructor_arguments)
def keeps_arguments():
    assert compat.constructor_arguments(keras.layers.Dense(3))["units"] == 3
    assert "trainable" not in compat.constructor_arguments(keras.layers.Dense(3))
    assert compat.constructor_arguments(keras.layers.Dense(3, trainable=False))["trainable"] is False
    assert compat.constructor_arguments(keras.layers.Dense(3, dtype="float64"))["dtype"] == "float64"


@CONTRACTS.of(compat.losses_of)
def keeps_losses():
    outer = block()
    assert [(layer is outer, float(loss)) for layer, loss in compat.losses_of([outer, outer.inner])] == [(True, 2.0)]


@CONTRACTS.of(compat.clear_losses)
def clears_losses():
    outer = block()
    compat.clear_losses(outer)
    assert not compat.losses_of([outer])
    assert not outer.losses


@CONTRACTS.of(compat.added_losses)
def sets_losses_aside():
    outer = block()
    with compat.added_losses([outer]) as added:
        outer.add_loss(tf.constant(5.0))
    assert [float(loss) for _, loss in added] == [5.0]
    assert [float(loss) for loss in outer.losses] == [2.0]


@CONTRACTS.of(compat.kept_losses)
def keeps_losses_that_another_call_clears():
    outer = block()
    with compat.kept_losses([outer]):
        compat.clear_losses(outer)
        outer.add_loss(tf.constant(5.0))
    assert [float(loss) for loss in outer.losses] == [2.0]


@CONTRACTS.of(compat.joined_outputs)
def joins_outputs_as_predict_does():
    one, other = tf.ones([2, 3]), tf.zeros([1, 3])
    assert compat.joined_outputs([one, other]).tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert compat.joined_outputs([tf.ones([]), tf.zeros([])]).tolist() == [1.0, 0.0]
    ragged = compat.joined_outputs([tf.ones([1, 2]), tf.ones([1, 1])])
    assert isinstance(ragged, tf.RaggedTensor)


@CONTRACTS.of(compat.sparse_tensor, compat.sliceable_rows, compat.gathered_rows)
def gathers_rows_of_sparse_matrices():
    dense = np.array([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]])  # Keras 3.14 loses empty rows at the end
    rows = compat.sliceable_rows(tf.sparse.from_dense(dense))
    found = compat.gathered_rows(rows, tf.constant([2, 0, 1], tf.int64))
    assert tf.sparse.to_dense(found).numpy().tolist() == dense[[2, 0, 1]].tolist()
    scipy = pytest.importorskip("scipy.sparse", reason="scipy is not installed")
    assert tf.sparse.to_dense(compat.sparse_tensor(scipy.csr_matrix(dense))).numpy().tolist() == dense.tolist()


@CONTRACTS.of(compat.with_kernel)
def computes_with_another_kernel_for_a_while():
    for layer, x in (
        (keras.layers.Dense(3), tf.ones([2, 4])),
        (keras.layers.EinsumDense("ab,bc->ac", 3), tf.ones([2, 4])),
        (keras.layers.Conv2D(3, 2), tf.ones([1, 4, 4, 2])),
    ):
        before, kernel = layer(x), layer.kernel
        with compat.with_kernel(layer, 2 * tf.convert_to_tensor(kernel)):
            np.testing.assert_allclose(layer(x), 2 * before, rtol=1e-6)
        assert layer.kernel is kernel
        with pytest.raises(KeyError), compat.with_kernel(layer, tf.zeros_like(kernel)):
            raise KeyError
        assert layer.kernel is kernel
        assert [id(weight) for weight in layer.trainable_variables][:1] == [id(kernel)]


@CONTRACTS.of(compat.kernel_of)
def has_a_kernel():
    for layer, shape in (
        (keras.layers.Dense(3), (1, 2)),
        (keras.layers.EinsumDense("ab,bc->ac", 3), (1, 2)),
        (keras.layers.Conv2D(3, 2), (1, 4, 4, 2)),
    ):
        layer.build(shape)
        assert compat.kernel_of(layer) is layer.kernel
    layer = keras.layers.Dense(3)
    layer.build((1, 2))
    whole = layer.kernel
    layer.enable_lora(1)
    assert compat.kernel_of(layer) is whole


@CONTRACTS.of(compat.embeddings_of)
def has_embeddings():
    layer = keras.layers.Embedding(3, 2)
    layer.build()
    assert compat.embeddings_of(layer) is layer.embeddings


@CONTRACTS.of(compat.mask_of)
def has_a_mask():
    masked = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[1, 0]]))
    assert compat.mask_of(masked).numpy().tolist() == [[True, False]]
    assert compat.mask_of(tf.ones([1])) is None


@CONTRACTS.of(compat.set_mask)
def takes_a_mask():
    x = tf.constant([[[1.0], [3.0]]])
    compat.set_mask(x, tf.constant([[True, False]]))
    assert float(keras.layers.GlobalAveragePooling1D()(x)[0, 0]) == 1.0
    compat.set_mask(x, None)
    assert float(keras.layers.GlobalAveragePooling1D()(x)[0, 0]) == 2.0


@CONTRACTS.of(compat.BatchNormalizationByMoments)
def asks_for_moments():
    class Zeros(compat.BatchNormalizationByMoments):
        def moments(self, inputs, mask, axes):
            assert list(axes) == [0, 1]
            own = super().moments(inputs, mask, axes)
            return own[0] * 0 + 1, own[1] * 0 + 1 - self.epsilon

    x = tf.random.normal([4, 5, 3])
    np.testing.assert_allclose(Zeros()(x, training=True), x - 1, atol=1e-5)


@CONTRACTS.of(compat.is_layer)
def tells_layers_from_their_variables():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    assert compat.is_layer(layer)
    assert compat.is_layer(keras.Sequential([layer]))
    assert not compat.is_layer(layer.kernel)
    assert not compat.is_layer([layer.kernel])


@CONTRACTS.of(compat.global_seed)
def draws_from_one_state():
    keras.utils.set_random_seed(1)
    before = compat.global_seed().numpy()
    first = keras.random.normal((2,)).numpy()
    compat.global_seed().assign(before)
    assert (keras.random.normal((2,)).numpy() == first).all()


@CONTRACTS.of(compat.calls_of)
def lists_calls_of_an_operation():
    x = keras.Input((2,))
    y = keras.ops.add(x, 1.0)
    keras.Model(x, y)
    operation = y._keras_history.operation
    (args, options), *others = compat.calls_of(operation)
    assert (args[0] is x, args[1:], options, others) == (True, (1.0,), {}, [])


@CONTRACTS.of(compat.operations_of)
def lists_operations_of_a_graph():
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.layers.Dense(2)])
    model = keras.Model(inputs, keras.ops.mean(inner(inputs), axis=0))
    kinds = {type(each).__name__ for each in compat.operations_of(model)}
    assert {"Mean", "Sequential"} <= kinds
    assert compat.operations_of(keras.layers.Dense(1)) == []


@CONTRACTS.of(compat.compile_arguments)
def keeps_compile_arguments():
    model = functional()
    assert compat.compile_arguments(model) == {}
    model.compile("sgd", "mse", metrics=["mae"])
    arguments = compat.compile_arguments(model)
    assert (arguments["loss"], arguments["metrics"]) == ("mse", ["mae"])
    assert isinstance(arguments["optimizer"], keras.optimizers.SGD)


@CONTRACTS.of(compat.last_compile)
def tells_compiles_apart():
    model = functional()
    assert compat.last_compile(model) is None
    model.compile("sgd", "mse")
    first = compat.last_compile(model)
    assert compat.last_compile(model) is first is not None
    model.compile("sgd", "mse")
    assert compat.last_compile(model) is not first


@CONTRACTS.of(compat.compile_metrics)
def builds_compile_metrics():
    model = functional()
    model.compile("sgd", "mse", metrics=["mae"])
    metrics = compat.compile_metrics(model)
    assert not metrics.built
    metrics.build({"y": tf.ones([1, 2])}, {"y": tf.ones([1, 2])})
    assert metrics.built


@CONTRACTS.of(compat.functional_of)
def holds_a_functional():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert [layer.name for layer in compat.functional_of(model).layers[1:]] == [model.layers[0].name]
    assert compat.functional_of(keras.Sequential([keras.layers.Dense(1)])) is None


@CONTRACTS.of(compat.nodes_of, compat.ends_of, compat.input_nest, compat.output_nest, compat.operation_of)
def knows_its_graph():
    model = functional()
    assert [node.operation.name for node in compat.nodes_of(model)] == ["hidden", "out"]
    assert compat.ends_of(model) == (model.inputs, model.outputs)
    assert (list(compat.input_nest(model)), list(compat.output_nest(model))) == (["x"], ["y"])
    assert compat.operation_of(model.outputs[0]).name == "out"
    assert compat.nodes_of(block()) is compat.input_nest(block()) is None


@CONTRACTS.of(compat.standardized_inputs)
def standardizes_inputs():
    (x,) = compat.standardized_inputs(functional(), {"x": np.ones((1, 3))})
    assert x.dtype == "float32"


@CONTRACTS.of(compat.run_graph)
def runs_a_graph():
    model, called = functional(), []

    def call_of(operation):
        called.append(operation.name)
        return operation

    made = compat.run_graph(keras.Function(model.inputs, model.outputs), [tf.ones([1, 3])], call_of)
    assert called[-2:] == ["hidden", "out"]
    assert tf.nest.flatten(made)[0].shape == (1, 2)


@CONTRACTS.of(compat.function_of_metric)
def knows_its_function():
    assert compat.function_of_metric(keras.metrics.MeanSquaredError()) is keras.losses.mean_squared_error
    assert compat.function_of_metric(keras.metrics.Mean()) is None


@CONTRACTS.of(compat.replaced_function)
def calls_another_function():
    metric = keras.metrics.MeanSquaredError()
    with compat.replaced_function(metric, lambda y, z: y * 0 + 7):
        assert float(metric(tf.zeros([1]), tf.ones([1]))) == 7.0
    metric.reset_state()
    assert float(metric(tf.zeros([1]), tf.ones([1]))) == 1.0


def compiled(metrics):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=metrics)
    return model


@CONTRACTS.of(compat.drop_compile_metrics, compat.compiled_metrics, compat.build_from, compat.build_objective)
def has_the_metrics_of_its_compile():
    model = compiled(["mae", "mse"])
    assert compat.build_from(model, (tf.ones([4, 3]), tf.ones([4, 2]))).shape == (4, 2)
    assert [metric.name for metric in compat.compiled_metrics(model)] == ["mae", "mse"]
    assert all(float(metric.total) == 0.0 for metric in compat.compiled_metrics(model)), "nothing was counted"
    compat.drop_compile_metrics(model)
    assert compat.compiled_metrics(model) == []


@CONTRACTS.of(compat.flatten_results)
def gives_what_evaluate_returns():
    model = compiled(["mae"])
    model.evaluate(tf.ones([4, 3]), tf.ones([4, 2]), verbose=0)
    assert compat.flatten_results(model, {"mae": 2.0, "loss": 1.0, "z": 3.0}) == [1.0, 2.0, 3.0]
    assert compat.flatten_results(model, {"loss": 1.0}) == 1.0


@CONTRACTS.of(compat.module_of_losses)
def forms_losses_in_one_place():
    module = compat.module_of_losses()
    original, seen = module.reduce_weighted_values, []

    def noted(*args, **options):
        seen.append(args)
        return original(*args, **options)

    module.reduce_weighted_values = noted
    try:
        keras.losses.MeanSquaredError()(tf.zeros([3, 2]), tf.ones([3, 2]), sample_weight=tf.ones([3]))
    finally:
        module.reduce_weighted_values = original
    assert len(seen) == 1
    assert {name for name in vars(module) if name.endswith("scale_loss_for_distribution")} == {
        "scale_loss_for_distribution",
        "unscale_loss_for_distribution",
    }


@CONTRACTS.of(compat.divisor_of)
def divides_as_keras():
    values, weights = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([[1.0, 0.0], [0.5, 2.0]])
    mask = tf.constant([[True, True], [True, False]])
    module = compat.module_of_losses()
    for reduction, masks in (("mean_with_sample_weight", (None, mask)), ("sum_over_batch_size", (mask,))):
        for each in masks:
            value = module.reduce_weighted_values(values, weights, each, reduction)
            kept = tf.ones_like(values) if each is None else tf.cast(each, tf.float32)
            total = tf.reduce_sum(values * weights * kept)
            np.testing.assert_allclose(value * compat.divisor_of(weights, each, reduction, tf.float32), total, 1e-6)
    assert compat.divisor_of(weights, None, "sum_over_batch_size", tf.float32) is None


@CONTRACTS.of(compat.function_of_loss, compat.loss_of_function)
def knows_the_function_of_a_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=1)
    function, arguments = compat.function_of_loss(loss)
    assert function is keras.losses.sparse_categorical_crossentropy
    assert (arguments["from_logits"], arguments["axis"]) == (True, 1)
    assert isinstance(loss, compat.loss_of_function())
    assert compat.function_of_loss(compat.loss_of_function()(keras.losses.mean_squared_error))[0] is (
        keras.losses.mean_squared_error
    )


@CONTRACTS.of(
    compat.loss_tracker,
    compat.compiled_losses,
    compat.trackers_of_outputs,
    compat.losses_by_output,
)
def has_the_losses_of_its_compile():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"})
    model.compile("sgd", {"a": "mse", "b": "mae"})
    x, y = tf.ones([3, 2]), {name: tf.zeros([3, 1]) for name in "ab"}
    compat.build_from(model, (x, y))
    functions = [compat.function_of_loss(loss)[0] for loss in compat.losses_by_output(model)]
    assert functions == [keras.losses.mean_squared_error, keras.losses.mean_absolute_error]
    assert [tracker.name for tracker in compat.trackers_of_outputs(model)] == ["a_loss", "b_loss"]
    outputs = model(x)
    np.testing.assert_allclose(
        compat.compiled_losses(model)(y, outputs), np.mean(outputs["a"] ** 2) + np.mean(abs(outputs["b"])), 1e-5
    )
    assert compat.loss_tracker(model).name == "loss"


@CONTRACTS.of(compat.is_default_hook)
def marks_its_own_hooks():
    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    assert compat.is_default_hook(Own().on_train_batch_begin)
    assert not compat.is_default_hook(Own().on_train_batch_end)


@CONTRACTS.of(compat.profiles_batches)
def profiles():
    with tempfile.TemporaryDirectory() as folder:
        for batches, expected in ((0, False), ((2, 3), True)):
            callback = keras.callbacks.TensorBoard(folder, profile_batch=batches)
            callback.set_model(functional())
            assert compat.profiles_batches(callback) == expected
            callback.on_train_end()


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


def test_bookkeeping_lists_what_other_attributes_hold():
    assert set(vars(block())) >= compat.LAYER_BOOKKEEPING


def test_losses_that_are_kept_elsewhere_are_refused(monkeypatch):
    """They would be lost, or counted twice, without a word."""
    monkeypatch.setattr(LAYER, "add_loss", lambda self, loss: vars(self).setdefault("elsewhere", []).append(loss))
    with pytest.raises(CompatibilityError, match=rf"losses_of relies on it. Received: keras {keras.__version__}"):
        compat.losses_of([])


def test_losses_are_not_looked_at_where_none_are_kept():
    with keras.StatelessScope():
        assert compat.losses_of([block()]) == []


def test_moments_that_nobody_asks_for_are_refused(monkeypatch):
    """Batches would be normalized by the statistics of one replica."""
    monkeypatch.setattr(keras.layers.BatchNormalization, "call", lambda self, inputs, training=None: inputs)
    with pytest.raises(CompatibilityError, match="asks _moments for mean and variance"):
        compat.BatchNormalizationByMoments()(tf.ones([2, 3]))
