"""Models with a `train_step` of their own, in one process: what is found, refused and reported."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError, NonFiniteError
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.observability.events import Observer
from hvdtrain.observability.jsonl import flat_record
from hvdtrain.state.optimizers import optimizers_of
from hvdtrain.state.structure import structure_of
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan
from hvdtrain.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("session")

X = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")


class Pair(keras.Model):
    """Two networks with an optimizer each, no `call`, no `test_step`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(2), keras.layers.Dense(2)

    def compile(self, a_optimizer, b_optimizer):
        super().compile()
        self.a_optimizer, self.b_optimizer = a_optimizer, b_optimizer
        self.a_tracker = keras.metrics.Mean(name="a_loss")

    @property
    def metrics(self):
        return [self.a_tracker]

    def train_step(self, data):
        losses = []
        for layer, optimizer in ((self.first, self.a_optimizer), (self.second, self.b_optimizer)):
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_mean(tf.square(layer(data) - 1.0)))
            optimizer.apply(tape.gradient(losses[-1], layer.trainable_variables), layer.trainable_variables)
        self.a_tracker.update_state(losses[0])
        return {"a_loss": self.a_tracker.result(), "b_loss": losses[1]}


def pair(**optimizers):
    keras.utils.set_random_seed(0)
    model = Pair()
    given = {"a_optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "b_optimizer": keras.optimizers.Adam(0.1)}
    model.compile(**{**given, **optimizers})
    return model


class Simple(keras.Model):
    """One layer, and what `returned` makes of its loss."""

    def __init__(self, returned=lambda loss: {"loss": loss}):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.returned = returned

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.returned(loss)


def simple(*args, **kwargs):
    model = Simple(*args)
    model.compile(kwargs.pop("optimizer", "sgd"), **kwargs)
    return model


def fit(model, data=X, **options):
    trainer = Trainer(model)
    return trainer, trainer.fit(data, **{"batch": 8, "shuffle": False, "verbose": 0, **options})


# -- optimizers --


def test_optimizers_are_found_in_attributes_containers_and_layers():
    inner, wrapped = keras.optimizers.SGD(), keras.optimizers.SGD()
    model = simple(optimizer=keras.optimizers.Adam())
    model.a_name = model.optimizer
    model.listed = [keras.optimizers.SGD(), {"deep": inner}]
    model.scaled = keras.optimizers.LossScaleOptimizer(wrapped)
    model.unscaled = wrapped
    model.part = simple(optimizer=keras.optimizers.RMSprop())
    found = optimizers_of(model)
    assert list(found) == ["optimizer", "listed/0", "listed/1/deep", "part/optimizer", "scaled"]
    assert found["listed/1/deep"] is inner


def test_paths_do_not_depend_on_where_python_puts_a_list():
    """The ids of lists that were thrown away are given to later ones: many networks must not hide one another."""

    def built():
        model = keras.Model()
        for number in range(8):
            layers = [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(3))]
            setattr(model, f"net{number}", keras.Sequential(layers))
        return sorted(structure_of(model).paths.values())

    paths = built()
    assert all(paths == built() for _ in range(5))
    assert "net7/layers/2/kernel" in paths
    assert not [path for path in paths if "functional" in path]


def test_every_optimizer_that_is_used_is_in_the_state(tmp_path):
    trainer, _ = fit(pair())
    tensors = trainer.state.named_tensors()
    slots = [path for path in tensors if path.startswith("optimizer")]
    assert slots[0].startswith("optimizers/a_optimizer/")
    assert "optimizers/b_optimizer/velocities/second/kernel" in slots
    assert not [path for path in slots if path.startswith("optimizer/")], "the default of compile() is not used"
    Checkpointer(tmp_path, backend=trainer.backend).save(3, tensors, {"step": 3})
    other = Trainer(pair())
    other.build(training_data(X, other.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None))
    other.restore(Checkpointer(tmp_path, backend=other.backend).find())
    for path, tensor in other.state.named_tensors().items():
        np.testing.assert_array_equal(tensor.value, tensors[path].value, err_msg=path)


def test_a_second_trainer_takes_a_model_as_the_first_left_it():
    model = pair()
    fit(model)
    kept = model.a_optimizer
    trainer, _ = fit(model)
    assert trainer.optimizer is model.a_optimizer is kept
    assert int(kept.iterations) == 6
    assert "apply" not in vars(kept), "what exchanges is there while the step is traced"


def test_averages_of_several_optimizers_are_what_is_evaluated():
    model = pair(b_optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
    trainer, _ = fit(model)
    own = [model.first.kernel.numpy(), model.second.kernel.numpy()]
    with trainer.averaged_weights():
        np.testing.assert_array_equal(model.first.kernel, own[0])
        assert np.abs(model.second.kernel.numpy() - own[1]).max() > 1e-3
    np.testing.assert_array_equal(model.second.kernel, own[1])


class Every(keras.Model):
    """Applies its gradients in every second step, within a condition."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.count = tf.Variable(0, trainable=False)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.layer(data)))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)
            return True

        tf.cond(self.count.assign_add(1) % 2 == 0, apply, lambda: False)
        return {"loss": loss}


def test_exchanges_within_a_condition_have_names_of_their_own(monkeypatch):
    """TensorFlow tells equal names within one graph apart, and a branch is another graph."""
    names = {True: set(), False: set()}
    model = Every()
    model.compile("sgd")
    trainer = Trainer(model)
    original = trainer.backend.all_reduce

    def noted(tensor, *, name, **options):
        names[tf.compat.v1.get_default_graph().name.startswith("cond")].add(name)
        return original(tensor, name=name, **options)

    monkeypatch.setattr(trainer.backend, "all_reduce", noted)
    trainer.fit(X, batch=8, verbose=0)
    assert names[True]
    assert names[False]
    assert not names[True] & names[False]


def test_what_an_optimizer_trains_must_be_the_models():
    stranger = keras.Variable(np.ones(2, "float32"), name="stranger")

    class Outside(Simple):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data)) * stranger[0])
            self.optimizer.apply(tape.gradient(loss, [stranger]), [stranger])
            return {"loss": loss}

    model = Outside()
    model.compile("sgd")
    with pytest.raises(ConfigError, match=r"self\.optimizer of Outside trains a variable that is not the model's"):
        fit(model)


def test_an_optimizer_that_exchanges_by_itself_is_refused():
    with pytest.raises(ConfigError, match="DistributedOptimizer would do it again: pass its inner optimizer"):
        Trainer(pair(b_optimizer=DistributedOptimizer(keras.optimizers.SGD())))


# -- compile --


def test_a_model_that_compiles_itself_is_compiled_before():
    with pytest.raises(
        ConfigError, match=r"An optimizer is needed: Trainer\(model, optimizer, loss\), or a model that"
    ):
        fit(Pair())
    message = r"call it before Trainer\(model\)\. .*\(Pair\.compile\(a_optimizer, b_optimizer\), which calls super"
    with pytest.raises(ConfigError, match=message):
        Trainer(Pair(), "sgd")
    with pytest.raises(
        ConfigError, match=r"takes its losses and metrics: leave out loss of Trainer. Received: loss='mse'"
    ):
        Trainer(pair(), loss="mse")


def test_a_model_may_be_compiled_without_a_main_optimizer():
    class Own(Simple):
        def compile(self, mine):
            super().compile(optimizer=None)
            self.mine = mine

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(data)))
            self.mine.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Own()
    model.compile(keras.optimizers.SGD(0.25))
    trainer, result = fit(model, callbacks=[keras.callbacks.Callback()])
    assert trainer.optimizer is model.mine
    assert result.train_loss == result.history["loss"][-1]
    model = Own()
    model.compile(None)
    model.mine = None
    with pytest.raises(ConfigError, match="Own was compiled with none, and holds none in its attributes"):
        fit(model)


# -- what is reported --


class Records(Observer):
    def __init__(self):
        self.steps = []

    def on_step(self, record):
        self.steps.append(record)


def test_nothing_is_reported_that_the_model_does_not_return(capsys):
    batches = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(dict(logs)))
    trainer, result = fit(pair(), epochs=2, callbacks=[seen], verbose=1)
    assert set(result.history) == {"a_loss", "b_loss"}
    assert result.train_loss is None
    assert len(batches) == 6
    assert all(set(logs) == {"a_loss", "b_loss"} for logs in batches)
    assert result.history["b_loss"][0] == pytest.approx(batches[2]["b_loss"]), (
        "other figures are those of the last batch"
    )
    assert result.history["a_loss"][1] == pytest.approx(batches[5]["a_loss"])
    printed = capsys.readouterr().out
    assert "a_loss" in printed
    assert " loss " not in printed
    records = Records()
    data = training_data(X, trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.train(data, Plan(trainer.state.scalars.step + 3), observers=records)
    line = flat_record("step", records.steps[-1])
    assert {"a_loss", "b_loss"} <= set(line)
    assert "loss" not in line


def test_metrics_count_over_an_epoch_as_in_keras():
    ours, theirs = pair(), pair()
    _, result = fit(ours, epochs=3, callbacks=[keras.callbacks.Callback()])
    expected = theirs.fit(X, batch_size=8, epochs=3, shuffle=False, verbose=0).history
    assert set(result.history) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(result.history[name], values, rtol=1e-5)


@pytest.mark.extended
def test_an_epoch_that_is_resumed_reports_all_of_it():
    def steps(model):
        trainer = Trainer(model)
        data = training_data(X, trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
        trainer.build(data)
        step = trainer.factory.train_step(trainer.state, trainer.rule, 8)
        return step, [batch for batch, _ in zip(data.batches(0), range(3), strict=False)]

    zero = keras.optimizers.SGD(0.0)
    whole, batches = steps(pair(a_optimizer=zero))
    whole.begin_metrics()
    for batch in batches:
        whole(batch, measure=False)
    expected = whole.epoch_metrics()["a_loss"]
    first, _ = steps(pair(a_optimizer=keras.optimizers.SGD(0.0)))
    first.begin_metrics()
    first(batches[0], measure=False)
    sums = json.loads(json.dumps(first.metric_sums()))
    assert sums["a_loss"][1] == 1.0
    second, _ = steps(pair(a_optimizer=keras.optimizers.SGD(0.0)))
    second.begin_metrics(sums)
    for batch in batches[1:]:
        second(batch, measure=False)
    assert second.epoch_metrics()["a_loss"] == pytest.approx(expected)
    second.begin_metrics()
    assert second.metric_sums()["a_loss"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (lambda loss: loss, r"train_step of Simple must return a dict of metrics, such as \{'loss': loss\}\. Received"),
        (lambda loss: {"loss": object()}, "one number for each name, .* Received for 'loss': "),
        (lambda loss: {"note": "text"}, "Received for 'note': 'text'"),
    ],
)
def test_figures_are_numbers_by_name(returned, cause):
    with pytest.raises(ConfigError, match=cause):
        fit(simple(returned))


def test_figures_of_a_batch_may_be_several_numbers():
    def returned(loss):
        table = tf.reshape(loss * [1.0, 2.0, 3.0, 4.0], [2, 2])
        return {"loss": tf.stack([loss, 3 * loss]), "table": table, "one": tf.reshape(loss, [1, 1])}

    _, history = fit(simple(returned))
    (losses,), (table,), (one,) = (history.history[name] for name in ("loss", "table", "one"))
    assert isinstance(one, float)
    assert one == losses[0]
    np.testing.assert_allclose(losses, losses[0] * np.array([1.0, 3.0]))
    np.testing.assert_allclose(table, losses[0] * np.array([[1.0, 2.0], [3.0, 4.0]]))


def test_losses_that_are_not_finite_end_the_training():
    def spoiled(loss):
        return {"d_loss": loss, "g_loss": loss / 0.0, "share": loss / 0.0}

    with pytest.raises(NonFiniteError, match="The loss became NaN or infinite at step 1"):
        fit(simple(spoiled))
    fit(simple(lambda loss: {"d_loss": loss, "share": loss / 0.0}))  # no loss: it may be anything


# -- evaluation --


def test_without_a_test_step_keras_own_one_is_called():
    with pytest.raises(NotImplementedError, match=r"Model Pair does not have a `call\(\)` method implemented"):
        fit(pair(), validation_data=(X,))


def test_metrics_hold_an_evaluation_after_it_and_count_it_nowhere_else():
    class Tested(Pair):
        def test_step(self, data):
            loss = tf.reduce_mean(tf.square(self.first(data) - 1.0))
            self.a_tracker.update_state(loss)
            return {"a_loss": self.a_tracker.result(), "other": loss}

    model = Tested()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    trainer = Trainer(model)
    outcome = trainer.evaluate(X, batch=8, return_dict=True)
    assert "loss" not in outcome
    error = lambda x: np.mean(np.square(model.first(x) - 1.0))  # noqa: E731
    assert outcome["a_loss"] == pytest.approx(error(X)), "a mean over all samples"
    assert outcome["other"] == pytest.approx(error(X[-8:])), "of the last batch, as in Keras"
    model.a_tracker.update_state(5.0)
    assert trainer.evaluate(X, batch=8, return_dict=True) == outcome
    assert float(model.a_tracker.result()) == pytest.approx(outcome["a_loss"])
    result = trainer.fit(X, batch=8, verbose=0, validation_data=X, callbacks=[keras.callbacks.Callback()])
    assert set(result.history) == {"a_loss", "b_loss", "val_a_loss", "val_other"}


class Evaluated(Pair):
    """Can be evaluated, and trained unless it is `broken`."""

    broken = False

    def train_step(self, data):
        if self.broken:
            raise NameError("name 'gradeints' is not defined")
        return super().train_step(data)

    def test_step(self, data):
        return {"other": tf.reduce_mean(tf.square(self.second(data) + self.first(data)))}


def evaluated(*, broken):
    keras.utils.set_random_seed(1)
    model = Evaluated()
    model.broken = broken
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1))
    return Trainer(model)


@pytest.mark.extended
def test_the_error_of_a_train_step_is_shown_where_a_checkpoint_needs_its_optimizers(tmp_path):
    trained = evaluated(broken=False)
    trained.fit(X, batch=8, verbose=0)
    trained.save(tmp_path)
    trainer = evaluated(broken=True)
    trainer.restore(tmp_path)
    with pytest.raises(NameError, match="gradeints") as raised:
        trainer.evaluate(X, batch=8)
    assert raised.value.__notes__ == [
        f"Evaluated was built for training on a batch of evaluation, to load {tmp_path}/step-00000003 into its "
        "optimizers."
    ]


@pytest.mark.extended
def test_what_evaluates_a_checkpoint_loads_its_optimizers_too(tmp_path):
    trained = evaluated(broken=False)
    trained.fit(X, batch=8, verbose=0)
    trained.save(tmp_path)
    trainer = evaluated(broken=False)
    trainer.evaluate(X, batch=8)
    trainer.restore(tmp_path)
    assert trainer.evaluate(X, batch=8, return_dict=True) == trained.evaluate(X, batch=8, return_dict=True)
    expected, loaded = (each.state.named_tensors() for each in (trained, trainer))
    assert set(loaded) == set(expected)
    for path, tensor in loaded.items():
        np.testing.assert_array_equal(tensor.value, expected[path].value, err_msg=path)
