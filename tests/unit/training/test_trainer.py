import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError, DataError, NonFiniteError
from hvdtrain.observability.events import Observer
from hvdtrain.runtime.session import current
from hvdtrain.training.callbacks.report import FitResult, summary_of
from hvdtrain.training.inputs import training_data, validation_batches
from hvdtrain.training.plan import Plan
from hvdtrain.training.step import graph_cache
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, dense, samples

pytestmark = pytest.mark.usefixtures("session")

SAMPLES = 50
RNG = np.random.default_rng(0)
X, Y = samples(SAMPLES)
CROSSENTROPY = cross_entropy()


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate)


def fitted(model=None, optimizer=None, loss=CROSSENTROPY, data=(X, Y), **options):
    """Train without shuffling and return the trainer and the result."""
    trainer = Trainer(model or dense(), optimizer or sgd(), loss)
    options = {"batch": 16, "shuffle": False, "verbose": False, **options}
    return trainer, trainer.fit(data, **options)


def by_keras(model, optimizer, epochs=1, weights=None):
    """What Keras makes of it."""
    model.compile(optimizer, CROSSENTROPY)
    history = model.fit(X, Y, sample_weight=weights, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights(), history.history["loss"]


def assert_equal_weights(model, weights):
    for ours, theirs in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# -- what fit comes to --


@pytest.mark.parametrize("optimizer", [sgd, lambda: keras.optimizers.Adam(0.01)])
def test_training_is_what_keras_does(optimizer):
    trainer, result = fitted(dense(), optimizer(), epochs=3)
    weights, losses = by_keras(dense(), optimizer(), epochs=3)
    assert_equal_weights(trainer.model, weights)
    assert np.abs(weights[0] - dense().get_weights()[0]).max() > 1e-2
    assert result.train_loss == pytest.approx(losses[-1], rel=1e-5)


def test_sample_weights_weigh():
    weights = RNG.random(SAMPLES).astype("float32")
    trainer, _ = fitted(data=(X, Y, weights))
    expected, _ = by_keras(dense(), sgd(), weights=weights)
    assert_equal_weights(trainer.model, expected)


def test_the_result_tells_how_it_went():
    trainer = Trainer(dense(), sgd(), CROSSENTROPY, ["accuracy"])
    result = trainer.fit((X, Y), batch=16, epochs=3, validation_data=(X[:7], Y[:7]), verbose=False)
    assert isinstance(result, FitResult)
    assert (result.steps, result.epochs) == (12, 3)
    assert [(record.step, record.epoch) for record in result.evaluations] == [(4, 0), (8, 1), (12, 2)]
    last = trainer.evaluate((X[:7], Y[:7]), return_dict=True)
    assert result.evaluations[-1].loss == pytest.approx(last["loss"])
    assert result.evaluations[-1].metrics == {"accuracy": last["accuracy"]}
    assert result.evaluations[0].loss > result.evaluations[-1].loss
    assert result.samples_per_second > 0
    assert 0 < result.step_ms["median"] <= result.step_ms["p90"]
    assert result.wall_seconds > 0
    figures = summary_of(result)
    assert (figures["val_loss"], figures["val_accuracy"]) == (last["loss"], last["accuracy"])
    assert (trainer.state.scalars.step, trainer.state.scalars.epoch) == (12, 3)


def test_a_second_fit_goes_on():
    twice, _ = fitted(optimizer=keras.optimizers.Adam(0.01), epochs=1)
    result = twice.fit((X, Y), batch=16, epochs=2, shuffle=False, verbose=False)
    once, expected = fitted(optimizer=keras.optimizers.Adam(0.01), epochs=3)
    assert (result.steps, result.epochs) == (12, 3)
    assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-6)
    for ours, theirs in zip(twice.model.get_weights(), once.model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_second_fit_with_another_batch_visits_every_sample_once():
    """Samples are told by their gradient: each moves a weight of its own."""
    model = keras.Sequential(
        [keras.Input((SAMPLES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    trainer = Trainer(model, sgd(1.0), lambda targets, outputs: outputs[:, 0])
    data = np.eye(SAMPLES, dtype="float32"), np.zeros((SAMPLES, 1), "float32")
    trainer.fit(data, batch=16, verbose=False)  # 4 steps
    before = model.get_weights()[0]
    trainer.fit(data, batch=10, verbose=False)  # 5 steps
    np.testing.assert_allclose(before - model.get_weights()[0], 0.1, rtol=1e-5)


# -- what may be given --


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    "model",
    [
        dense,
        pytest.param(dense(), marks=pytest.mark.extended),
        pytest.param(keras.Sequential([keras.layers.Dense(3)]), marks=pytest.mark.extended),
        pytest.param(Subclassed, marks=pytest.mark.extended),
        Subclassed(),
    ],
    ids=["builder", "instance", "unbuilt instance", "class", "subclassed instance"],
)
def test_a_model_may_be_built_or_not(model):
    trainer, result = fitted(model)
    assert result.steps == 4
    assert trainer.state.parameters() == 18
    assert np.isfinite(trainer.evaluate((X, Y), return_dict=True)["loss"])


@pytest.mark.parametrize("optimizer", ["sgd", sgd(), keras.optimizers.SGD])
def test_an_optimizer_may_be_named_built_or_given(optimizer):
    trainer, _ = fitted(optimizer=optimizer)
    assert type(trainer.optimizer) is keras.optimizers.SGD
    assert int(trainer.optimizer.iterations) == 4


@pytest.mark.parametrize("thing", [3, "dense", None])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(ConfigError, match=r"Model or a function that builds one is needed\. Received: "):
        Trainer(thing, "sgd", CROSSENTROPY)


# -- what is refused --


@pytest.mark.parametrize(
    ("data", "options", "kind", "cause"),
    [
        ((X, Y), {"batch": 0}, ConfigError, r"batch must be a whole number of at least 1\. Received: 0"),
        ((X, Y), {"batch": -4}, ConfigError, "batch must be a whole number of at least 1"),
        ((X, Y[:-1]), {}, DataError, "differ in length: 49, 50"),
        (X, {}, DataError, r"must give \(inputs, targets\) or .*the loss of Sequential 'sequential.*inputs alone"),
        (tf.data.Dataset.from_tensor_slices((X,)).batch(4), {"batch": None}, DataError, "Received: inputs alone"),
        (None, {}, DataError, r"must be \(inputs, targets\)"),
        (tf.data.Dataset.from_tensor_slices((X, Y)), {"batch": None}, DataError, "not batched"),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat(), {"batch": None}, ConfigError, "steps_per_epoch"),
        ((X, Y), {"validation_data": (X, Y[:3])}, DataError, "arrays of validation data differ in length"),
    ],
)
def test_data_that_cannot_be_used_are_refused_before_anything_is_trained(data, options, kind, cause):
    model = dense()
    before = model.get_weights()
    with pytest.raises(kind, match=cause):
        fitted(model, data=data, **options)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Largest(keras.metrics.Metric):
    """The largest output so far: no sum over samples."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y_pred))))

    def result(self):
        return self.value


class Total(Largest):
    """A sum over samples, and a constructor that get_config does not know of."""

    def __init__(self, scale):
        super().__init__(name="total")
        self.scale = scale

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(self.scale * tf.reduce_sum(y_pred))


def test_a_metric_that_is_no_sum_is_that_of_keras_in_one_process():
    trainer = Trainer(dense(), sgd(), CROSSENTROPY, [Largest()])
    expected = float(np.abs(trainer.model(X)).max())
    assert trainer.evaluate((X, Y), batch=16, return_dict=True)["largest"] == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_cannot_be_copied_is_evaluated():
    trainer = Trainer(dense(), sgd(), CROSSENTROPY, [Total(2.0)])
    expected = 2 * float(tf.reduce_sum(trainer.model(X)))
    assert trainer.evaluate((X, Y), return_dict=True)["total"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_nan_in_the_data_is_named_with_its_step(log_every):
    x = X.copy()
    x[37, 2] = np.nan  # the third batch
    with pytest.raises(NonFiniteError, match=r"at step 3 \(epoch 1\)"):
        fitted(data=(x, Y), epochs=2, log_every=log_every)


def test_a_nan_ends_the_training_by_keras_callback():
    x = X.copy()
    x[37, 2] = np.nan  # the third batch
    theirs, mine = dense(), dense()
    histories = []
    for model in (theirs, Trainer(mine, sgd(), CROSSENTROPY)):
        if model is theirs:
            theirs.compile(sgd(), CROSSENTROPY)
        callbacks = [keras.callbacks.TerminateOnNaN()]
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        histories.append(model.fit(x, Y, **options).history)
    np.testing.assert_equal(histories[1], histories[0])
    for ours, reference in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(reference))


# -- evaluation --


@pytest.mark.parametrize("batch", [7, 1000])
def test_evaluation_is_what_keras_says(batch):
    model = dense()
    trainer = Trainer(
        model, sgd(), CROSSENTROPY, ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    )
    weights = RNG.random(SAMPLES).astype("float32")
    theirs = keras.models.clone_model(model)
    theirs.set_weights(model.get_weights())
    theirs.compile(loss=CROSSENTROPY, metrics=["accuracy"], weighted_metrics=[])
    expected = theirs.evaluate(X, Y, batch_size=SAMPLES, verbose=0, return_dict=True)
    outcome = trainer.evaluate((X, Y), batch=batch, return_dict=True)
    assert outcome["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert outcome["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)
    top2 = np.argsort(-model(X).numpy(), axis=1)[:, :2]
    assert outcome["top2"] == pytest.approx((top2 == Y[:, None]).any(1).mean(), rel=1e-6)
    weighted = trainer.evaluate((X, Y, weights), batch=batch, return_dict=True)
    assert weighted["loss"] == pytest.approx(float(CROSSENTROPY(Y, model(X), sample_weight=weights)), rel=1e-6)


def test_evaluation_changes_nothing():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    trainer = Trainer(model, sgd(), CROSSENTROPY, ["accuracy"])
    fit = dict(batch=16, verbose=False)
    trainer.fit((X, Y), **fit)
    before = trainer.state.parameter_hash()
    assert trainer.evaluate((X, Y), return_dict=True)["loss"] == trainer.evaluate((X, Y), return_dict=True)["loss"]
    assert trainer.state.parameter_hash() == before


# -- what observers are told --


class Notes(Observer):
    def __init__(self):
        self.steps, self.evaluations, self.progress, self.info = [], [], [], None

    def on_start(self, info):
        self.info = info

    def on_progress(self, step):
        self.progress.append(step)

    def on_step(self, record):
        self.steps.append(record)

    def on_evaluation(self, record):
        self.evaluations.append(record)


@functools.cache
def watched(plan):
    """Train as `plan` says; return the result, what the observers were told, and the steps that were saved."""
    trainer = Trainer(dense(), sgd(), CROSSENTROPY, ["accuracy"])
    data = training_data((X, Y), SingleBackend(current()), batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    notes, saved = Notes(), []
    result = trainer.train(data, plan, observers=notes, save=lambda state: saved.append(state.scalars.step))
    return result, notes, saved


def test_the_watchdog_is_told_of_evaluation_and_saving():
    activity, phases = current().link.activity, {}

    class Telling(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            phases["evaluated"] = activity.phase, activity.step

        def on_train_end(self, logs=None):
            phases["ended"] = activity.phase, activity.step

    def save(state):
        phases["saved"] = activity.phase, activity.step

    trainer = Trainer(dense(), sgd(), CROSSENTROPY)
    data = training_data((X, Y), SingleBackend(current()), batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    validation = data.batches(0)
    trainer.train(data, Plan(1), validation=[next(iter(validation))], save=save, callbacks=[Telling()])
    assert phases == {"evaluated": ("evaluation", 1), "saved": ("saving", 1), "ended": ("", None)}


FINE, COARSE = Plan(8, log_every=1, checkpoint_every=3), Plan(8, log_every=100, checkpoint_every=100)


@pytest.mark.parametrize(
    ("plan", "logged", "saved"),
    [
        (FINE, [1, 2, 3, 4, 5, 6, 7, 8], [3, 6, 8]),  # the end is always saved
        (COARSE, [1, 4, 8], [8]),  # the first step and the ends of epochs are always logged
        (Plan(8, log_every=3), [1, 3, 4, 6, 8], [4, 8]),  # saved at the end of every epoch
        (Plan(6, log_every=100), [1, 4, 6], [4, 6]),  # the end within an epoch
    ],
)
def test_steps_are_logged_and_saved_in_time(plan, logged, saved):
    result, notes, saves = watched(plan)
    assert [record.step for record in notes.steps] == logged
    assert saves == saved
    assert notes.progress == list(range(1, plan.total_steps + 1))
    assert (result.steps, result.epochs) == (plan.total_steps, 2)


def test_a_logged_step_holds_the_mean_since_the_last():
    fine, coarse = (watched(plan)[1].steps for plan in (FINE, COARSE))
    sizes = [16, 16, 16, 2] * 2
    losses = [record.loss for record in fine]
    assert coarse[1].loss == pytest.approx(np.average(losses[1:4], weights=sizes[1:4]), rel=1e-5)
    assert coarse[2].loss == pytest.approx(np.average(losses[4:], weights=sizes[4:]), rel=1e-5)
    for record in fine:
        assert record.learning_rate == pytest.approx(0.1)
        assert record.samples_per_second > 0
        assert 0 <= record.metrics["accuracy"] <= 1
    assert [record.epoch for record in fine] == [0] * 4 + [1] * 4


def test_the_first_step_is_that_of_the_first_batch():
    record = watched(FINE)[1].steps[0]
    model = dense()
    with tf.GradientTape() as tape:
        loss = CROSSENTROPY(Y[:16], model(X[:16]))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert record.grad_norm == pytest.approx(float(tf.linalg.global_norm(gradients)), rel=1e-5)
    assert record.loss == pytest.approx(float(loss), rel=1e-5)
    assert record.metrics["accuracy"] == pytest.approx((model(X[:16]).numpy().argmax(1) == Y[:16]).mean())


def test_regularizers_and_added_losses_count_as_in_keras():
    """Two steps of SGD on the whole data, against Keras' own compiled model."""

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input(X.shape[1:])
        hidden = keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.3))(inputs)
        hidden = keras.layers.ActivityRegularization(l2=0.2)(hidden)
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    theirs = build()
    theirs.compile(sgd(), CROSSENTROPY)
    history = theirs.fit(X, Y, batch_size=len(X), epochs=2, shuffle=False, verbose=0)
    trainer, result = fitted(build(), batch=len(X), epochs=2)
    for ours, reference in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)
    assert result.train_loss == pytest.approx(history.history["loss"][-1], rel=1e-5)
    assert trainer.evaluate((X, Y), return_dict=True)["loss"] == pytest.approx(
        theirs.evaluate(X, Y, verbose=0, batch_size=len(X)), rel=1e-5
    )


def linear(features):
    return keras.Sequential([keras.Input((features,)), keras.layers.Activation("linear")])


FILTERED = np.arange(SAMPLES) // 10 != 1
"""The second batch of ten has lost all of its samples."""


def filtered_dataset():
    batches = tf.data.Dataset.from_tensor_slices((X, Y, FILTERED)).batch(10)
    return batches.map(lambda *arrays: tuple(tf.boolean_mask(each, arrays[-1]) for each in arrays[:2]))


def filtered_generator():
    for begin in range(0, SAMPLES, 10):
        kept = FILTERED[begin : begin + 10]
        yield X[begin : begin + 10][kept], Y[begin : begin + 10][kept]


@pytest.mark.parametrize("form", [filtered_dataset, filtered_generator])
def test_a_batch_without_samples_is_what_keras_makes_of_it(form):
    """A step in which penalties of weights and the optimizer's moments count."""

    def compiled():
        model = dense()
        model.layers[-1].kernel_regularizer = keras.regularizers.L2(0.1)
        model.compile(keras.optimizers.Adam(0.01), CROSSENTROPY, metrics=["accuracy"])
        return model

    reference, trainer = compiled(), Trainer(compiled())
    theirs = reference.fit(filtered_dataset(), epochs=2, verbose=0)
    data = form() if form is filtered_dataset else form
    found = trainer.fit(data, epochs=2, shuffle=False, verbose=0)
    assert_equal_weights(trainer.model, reference.get_weights())
    for name, values in theirs.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)
    scores = reference.evaluate(filtered_dataset(), verbose=0)
    np.testing.assert_allclose(trainer.evaluate(data, verbose=0), scores, rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(data), reference.predict(filtered_dataset(), verbose=0), rtol=1e-5)


class TwoTowers(keras.Model):
    """One is called by compute_loss alone, and a head in training alone; the last layer never."""

    def __init__(self):
        super().__init__()
        self.tower, self.other, self.head = (keras.layers.Dense(3) for _ in range(3))
        self.unused = keras.layers.Dense(3)

    def call(self, inputs, training=False):
        outputs = self.tower(inputs)
        if training:
            self.add_loss(keras.ops.mean(keras.ops.square(self.head(outputs) - 1.0)))
        return outputs

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        added = sum(self.losses) if training else 0.0
        return keras.ops.mean(keras.ops.square(self.other(x) - y_pred)) + added


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_layers_that_call_does_not_reach_are_trained_as_by_keras(evaluates_first):
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(TwoTowers())
        models[-1].compile(sgd())
    reference, trainer = models[0], Trainer(models[1])
    if evaluates_first:
        expected = reference.evaluate(X, Y, batch_size=10, verbose=0)
        assert trainer.evaluate(X, Y, batch=10, verbose=0, return_dict=True)["loss"] == pytest.approx(
            expected, rel=1e-5
        )
    theirs = reference.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    found = trainer.fit(X, Y, batch=10, epochs=2, shuffle=False, verbose=0)
    assert len(reference.get_weights()) == 6
    assert_equal_weights(trainer.model, reference.get_weights())
    assert found.history["loss"] == pytest.approx(theirs.history["loss"], rel=1e-5)


class LossOfEach(keras.Sequential):
    """Has one for each sample, whose gradients TensorFlow adds up."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, 3), y_pred)


class LossOfEachInStep(LossOfEach):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": tf.reduce_mean(loss)}


@pytest.mark.parametrize("kind", [LossOfEach, LossOfEachInStep])
def test_a_loss_of_several_numbers_is_differentiated_as_by_keras(kind):
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(kind([keras.Input(X.shape[1:]), keras.layers.Dense(3)]))
        models[-1].compile(keras.optimizers.SGD(0.01))
    theirs = models[0].fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    found = Trainer(models[1]).fit(X, Y, batch=10, epochs=2, shuffle=False, verbose=0)
    assert_equal_weights(models[1], models[0].get_weights())
    np.testing.assert_allclose(found.history["loss"], theirs.history["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adm"}, "Unknown optimizer 'adm'"),
        ({"loss": "mze"}, r"Unknown loss 'mze'\. Perhaps you meant: mse\."),
        ({"metrics": ["maee"]}, r"Unknown metric 'maee'\. Perhaps you meant: mae\."),
        ({"metrics": ["RecallAtPrecision"]}, "The metric 'RecallAtPrecision' needs arguments"),
        ({"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=4)}, "gradient_accumulation_steps"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(options, said):
    with pytest.raises(ConfigError, match=said):
        Trainer(dense(), **{"optimizer": "sgd", "loss": CROSSENTROPY, **options})


@pytest.mark.parametrize("by_trainer", [False, True])
def test_evaluation_and_prediction_need_no_optimizer(by_trainer):
    model, expected = dense(), dense()
    expected.compile(None, CROSSENTROPY)
    expected.set_weights(model.get_weights())
    if not by_trainer:
        model.compile(None, CROSSENTROPY)
    trainer = Trainer(model, loss=CROSSENTROPY) if by_trainer else Trainer(model)
    at_once = {"batch_size": SAMPLES, "verbose": 0}  # how a processor rounds may depend on the number of rows
    np.testing.assert_array_equal(trainer.predict(X, **at_once), expected.predict(X, **at_once))
    np.testing.assert_allclose(trainer.evaluate(X, Y), expected.evaluate(X, Y, verbose=0), rtol=1e-6)
    assert model.optimizer is None
    for train in (trainer.fit, trainer.train_on_batch):
        with pytest.raises(ConfigError, match="An optimizer is needed"):
            train(X, Y)


def test_prediction_needs_no_compiled_model():
    model = dense()
    np.testing.assert_array_equal(
        Trainer(model).predict(X, batch_size=SAMPLES), model.predict(X, batch_size=SAMPLES, verbose=0)
    )
    assert not model.compiled
    with pytest.raises(ConfigError, match=r"evaluate needs a loss: .* Received: .*, which is not compiled"):
        Trainer(model).evaluate(X, Y)
    with pytest.raises(
        ConfigError, match=r"An optimizer is needed: Trainer\(model, optimizer, loss\), or a model that"
    ):
        Trainer(model).fit(X, Y)


def test_nothing_to_evaluate_is_an_error():
    empty = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).take(0)
    with pytest.raises(DataError, match="empty"):
        Trainer(dense(), "sgd", CROSSENTROPY).evaluate(empty)


def test_sixteen_bit_outputs_are_added_up_in_thirty_two():
    outputs = np.full((400, 1), 200.0, "float16")
    model = keras.Sequential([keras.Input((1,), dtype="float16"), keras.layers.Activation("linear", dtype="float16")])
    outcome = Trainer(model, "sgd", "mse").evaluate(
        (outputs, np.zeros((400, 1), "float16")), batch=400, return_dict=True
    )
    assert outcome["loss"] == pytest.approx(40000.0)


def test_data_whose_shapes_keep_changing_share_a_graph(monkeypatch):
    """Sequences of any length: each length would be compiled, and kept, by itself."""
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 4)
    lengths = [5, 9, 3, 7, 11, 4, 6, 8, 12, 10]

    def batches():
        rng = np.random.default_rng(0)
        for length in lengths:
            yield rng.standard_normal((8, length, 2)).astype("float32"), rng.integers(0, 3, 8)

    def trained():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((None, 2)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
        trainer = Trainer(keras.Sequential(layers), sgd(), CROSSENTROPY)
        trainer.fit(batches, epochs=2, verbose=False, log_every=3)
        (step,) = trainer.factory._known.values()
        return trainer.model.get_weights(), step

    weights, step = trained()
    assert len(step._special) == 4
    general = sum(function.experimental_get_tracing_count() for function in step._general.values())
    assert general <= 6, "a graph for each shape again"
    monkeypatch.setattr(graph_cache, "MOST_GRAPHS", 1000)
    expected, step = trained()
    assert len(step._special) == len(lengths)
    for ours, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_what_happens_after_a_step_has_an_order():
    """Logged first, so that nothing that is not finite is evaluated or saved; saved last."""
    happened = []

    class Notes(Observer):
        def on_step(self, record):
            happened.append(f"logged {record.step}")

        def on_evaluation(self, record):
            happened.append(f"evaluated {record.step}")

    class Callback(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            happened.append("begin")

        def on_epoch_begin(self, epoch, logs=None):
            happened.append(f"epoch {epoch}")

        def on_train_batch_end(self, batch, logs=None):
            happened.append(f"batch {batch}")

        def on_test_end(self, logs=None):
            happened.append("tested")

        def on_epoch_end(self, epoch, logs=None):
            happened.append(f"epoch {epoch} ends with {', '.join(sorted(logs))}")
            self.model.stop_training = epoch == 1

        def on_train_end(self, logs=None):
            happened.append("end")

    trainer = Trainer(dense(), sgd(), CROSSENTROPY)
    data = training_data((X[:32], Y[:32]), trainer.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    validation = validation_batches((X, Y), trainer.backend, batch=50)
    trainer.train(
        data,
        Plan(20, log_every=100, checkpoint_every=3),
        validation=validation,
        observers=Notes(),
        save=lambda state: happened.append(f"saved {state.scalars.step}"),
        callbacks=[Callback()],
    )
    epoch_end = "ends with loss, val_loss"
    assert happened == [
        *("begin", "epoch 0", "batch 0", "logged 1", "batch 1", "logged 2", "tested", "evaluated 2"),
        *(f"epoch 0 {epoch_end}", "epoch 1", "batch 0", "logged 3", "saved 3", "batch 1", "logged 4", "tested"),
        *("evaluated 4", f"epoch 1 {epoch_end}", "saved 4", "end"),
    ]


class Counting(keras.layers.Layer):
    """Counts how often it is called."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


class OwnStep(keras.Model):
    """A step that returns a figure which is no metric's."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = CROSSENTROPY(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


class TwoOptimizers(OwnStep):
    """A step with an optimizer of each half of the weights."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.second = keras.optimizers.Adam()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = CROSSENTROPY(y, self(x, training=True))
        table, *others = self.trainable_variables
        gradient, *rest = tape.gradient(loss, [table, *others])
        self.optimizer.apply(rest, others)
        self.second.apply([gradient], [table])
        return {"own": loss}


@pytest.mark.parametrize(
    ("kind", "options", "traces"),
    [
        (keras.Model, {}, 1),
        (keras.Model, {"accumulate": 2}, 2),
        (keras.Model, {"on_bad_step": "skip", "clip_norm": 1.0}, 1),
        (keras.Model, {"precision": "mixed_float16"}, 1),
        (keras.Model, {"sparse_gradients": "gather"}, 1),
        (OwnStep, {}, 1),
        (TwoOptimizers, {}, 2),
    ],
    ids=str,
)
def test_a_model_is_traced_once_to_be_built_and_once_for_its_step(kind, options, traces):
    """A variable that is made while a step is traced would have TensorFlow trace it once more."""
    counting = Counting()
    tokens = keras.Input((4,), dtype="int32")
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(counting(keras.layers.Embedding(10, 3)(tokens))))
    trainer = Trainer(kind(tokens, outputs), "adam", CROSSENTROPY, **options)
    called = counting.calls
    trainer.fit((np.ones((8, 4), "int32"), Y[:8]), batch=8, verbose=False)
    assert counting.calls - called == 1 + traces
