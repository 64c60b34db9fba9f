"""`fit`, `evaluate` and `predict` take what Keras' take, and do what Keras does with it."""

import inspect
import time

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.streams import python_batches
from hvdtrain.training.evaluation.evaluate import is_stopped
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, dense, samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

RNG = np.random.default_rng(0)
X, Y = samples(50)
WEIGHTS = RNG.random(50).astype("float32")
LOSS = cross_entropy()


def trainer_of(metrics=("accuracy",)):
    return Trainer(dense(), keras.optimizers.SGD(0.1), LOSS, list(metrics))


def compiled():
    model = dense()
    model.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    return model


class Epochs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append((epoch, sorted(logs)))


@pytest.mark.parametrize(
    ("method", "own"),
    [("fit", ["batch", "validation_batch", "log_every"]), ("evaluate", ["batch"]), ("predict", ["batch"])],
)
def test_arguments_have_the_names_order_and_defaults_of_keras(method, own):
    ours = inspect.signature(getattr(Trainer, method)).parameters
    theirs = inspect.signature(getattr(keras.Model, method)).parameters
    positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)]
    assert all(ours[name].default == theirs[name].default for name in positional)
    assert set(own) <= {name for name, each in ours.items() if each.kind is each.KEYWORD_ONLY}
    if method == "fit":
        assert len(positional) == len(theirs)


# What Keras' users write, by position and by name; each trains as `Model.fit` does.
CALLS = {
    "positional": ((X, Y, 16, 2, 0), {}),
    "lists and the default batch": ((X.tolist(), Y.tolist()), {"epochs": 2}),
    "split with weights": ((X, Y), {"batch_size": 16, "validation_split": 0.3, "sample_weight": WEIGHTS, "epochs": 2}),
    "from the third epoch": (
        (X, Y),
        {
            **{"batch_size": 16, "initial_epoch": 2, "epochs": 5, "class_weight": {0: 2.0, 2: 0.5}},
            **{"validation_data": (X[:9], Y[:9]), "validation_batch_size": 4, "validation_steps": 2},
            "validation_freq": 2,
        },
    ),
    "a dataset": (
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16),),
        {"validation_data": (X[:9], Y[:9], WEIGHTS[:9]), "validation_freq": [1, 4], "epochs": 4},
    ),
}


@pytest.mark.parametrize(
    "call",
    mostly_extended(
        CALLS,
        lambda call: call in ("split with weights", "a dataset"),
        why="arrays and batches; arguments by themselves are compared with Keras on ranks",
    ),
)
def test_fit_does_what_keras_does(call):
    args, options = CALLS[call]
    options = {"shuffle": False, "verbose": 0, **options}
    if call == "positional":
        options.pop("verbose")
    keras_model, ours, seen = compiled(), trainer_of(), (Epochs(), Epochs())
    keras_args = tuple(map(np.asarray, args)) if isinstance(args[0], list) else args
    expected = keras_model.fit(*keras_args, callbacks=[seen[0]], **options)
    found = ours.fit(*args, callbacks=[seen[1]], **options)
    assert (seen[1].begun, seen[1].ended) == (seen[0].begun, seen[0].ended)
    assert list(found.history) == list(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5, err_msg=name)
    for mine, theirs in zip(ours.model.get_weights(), keras_model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_second_fit_counts_epochs_from_its_initial_epoch_and_steps_on():
    trainer, epochs = trainer_of(), Epochs()
    for initial, last in ((0, 2), (0, 1), (7, 9)):
        result = trainer.fit(X, Y, 16, last, 0, [epochs], initial_epoch=initial)
    assert epochs.begun == [0, 1, 0, 7, 8]
    assert result.steps == 20


REFUSED = [
    ({"batch_size": 8, "batch": 8}, "batch_size is per rank, and batch over all ranks: give one"),
    ({"validation_batch_size": 8, "validation_batch": 8}, "validation_batch_size is per rank"),
    ({"batch_size": 0}, r"batch_size must be a whole number of at least 1\. Received: 0"),
    ({"batch_size": "16"}, r"batch_size must be a whole number .* Received: '16'"),
    ({"epochs": 2.5}, "epochs must be a whole number"),
    ({"initial_epoch": -1}, "initial_epoch must be a whole number of at least 0"),
    ({"validation_split": 1.5}, "validation_split is a fraction between 0 and 1"),
    ({"validation_split": 0.999}, "leaves one part without any"),
    ({"validation_freq": 0}, "validation_freq is a number of epochs"),
    ({"validation_data": X}, r"validation_data has targets .* one array, of shape \(50, "),
    ({"verbose": "loud"}, r"verbose is \"auto\", 0, 1 or 2\. Received: 'loud'"),
    ({"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)}, "leave out y"),
    (
        {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), "y": None, "validation_split": 0.1},
        "validation_split is for arrays",
    ),
    (
        {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), "y": None, "sample_weight": WEIGHTS},
        "leave out sample_weight",
    ),
    ({"y": None, "sample_weight": WEIGHTS}, "sample_weight needs targets"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        trainer_of().fit(**{"x": X, "y": Y, "verbose": 0, **options})


def batches():
    for begin in range(0, 48, 8):
        yield X[begin : begin + 8], Y[begin : begin + 8]


def endless():
    while True:
        yield from batches()


def test_a_generator_object_is_read_on_through_the_epochs():
    model, trainer = compiled(), trainer_of()
    model.fit(endless(), steps_per_epoch=4, epochs=3, verbose=0)
    result = trainer.fit(endless(), steps_per_epoch=4, epochs=3, verbose=0)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-5)
    np.testing.assert_allclose(result.history["loss"], model.history.history["loss"], rtol=1e-5)
    weighted = trainer_of().fit(endless(), steps_per_epoch=4, class_weight={0: 2.0}, verbose=0)
    assert weighted.history["loss"] != result.history["loss"][:1]


class PyBatches(keras.utils.PyDataset):
    num_batches = 6

    def __getitem__(self, index):
        return X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]


FINITE = {
    "arrays": lambda: {"x": X[:48], "y": Y[:48], "batch_size": 8},
    "Dataset": lambda: {"x": tf.data.Dataset.from_tensor_slices((X[:48], Y[:48])).batch(8)},
    "Dataset of unknown length": lambda: {"x": unknown_length()},
    "PyDataset": lambda: {"x": PyBatches()},
}


def unknown_length():
    return tf.data.Dataset.from_tensor_slices((X[:48], Y[:48])).batch(8).filter(lambda *_: True)


# Of data of unknown length Keras learns only after a pass that it has ended: the next epoch is empty, with a loss of 0.
OF_KNOWN_LENGTH = [kind for kind in FINITE if "unknown" not in kind]


@pytest.mark.parametrize(
    ("kind", "steps", "epochs"),
    mostly_extended(
        [
            *((kind, *lengths) for kind in OF_KNOWN_LENGTH for lengths in [(6, 2), (3, 4)]),
            *((kind, 4, 1) for kind in FINITE),
        ],
        lambda kind, steps, epochs: steps == 4 or (kind, steps) == (OF_KNOWN_LENGTH[0], 3),
        why="the kinds of data are read alike, and lengths are counted alike",
    ),
)
def test_epochs_of_so_many_steps_are_those_of_keras(kind, steps, epochs):
    arguments = {"steps_per_epoch": steps, "epochs": epochs, "shuffle": False, "verbose": 0}
    model, trainer = compiled(), trainer_of()
    theirs = model.fit(**FINITE[kind](), **arguments)
    ours = trainer.fit(**FINITE[kind](), **arguments)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-5)


@pytest.mark.parametrize("kind", FINITE)
def test_a_pass_that_ends_within_an_epoch_is_refused(kind):
    error, said = (DataError, "dataset ran out after 6") if "unknown" in kind else (ConfigError, "pass .* has 6 steps")
    cure = {"arrays": "leave it out", "PyDataset": "let the PyDataset never end: num_batches = None"}.get(
        kind, "repeat"
    )
    with pytest.raises(error, match=f"{said}.*{cure}"):
        trainer_of().fit(**FINITE[kind](), steps_per_epoch=4, epochs=3, shuffle=False, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", [kind for kind in FINITE if "unknown" not in kind])
def test_epochs_end_with_the_pass_where_they_ask_for_more(kind):
    arguments = {"steps_per_epoch": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    model, trainer = compiled(), trainer_of()
    theirs = model.fit(**FINITE[kind](), **arguments)
    with pytest.warns(UserWarning, match="steps_per_epoch=7: the data run out after 6 steps"):
        ours = trainer.fit(**FINITE[kind](), **arguments)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Limiting")
def test_epochs_and_steps_are_limited_by_keras_configuration():
    model, trainer, observer = compiled(), trainer_of(), Epochs()
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(2)
    try:
        theirs = model.fit(X[:48], Y[:48], batch_size=8, epochs=4, shuffle=False, verbose=0)
        ours = trainer.fit(X[:48], Y[:48], 8, 4, shuffle=False, verbose=0, callbacks=[observer])
        figures = [each.evaluate(X, Y, batch_size=8, verbose=0) for each in (model, trainer)]
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert observer.begun == [0, 1]
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(figures[1], figures[0], rtol=1e-5)


class StopsAtThree(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = batch == 2

    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting = batch == 2


def test_a_callback_ends_an_evaluation_and_a_prediction():
    model, trainer = compiled(), trainer_of()
    theirs = model.evaluate(endless(), callbacks=[StopsAtThree()], verbose=0)
    np.testing.assert_allclose(trainer.evaluate(endless, callbacks=[StopsAtThree()], verbose=0), theirs, rtol=1e-5)
    assert len(trainer.predict(endless, callbacks=[StopsAtThree()], verbose=0)) == 24


@pytest.mark.parametrize("attribute", ["stop_evaluating", "stop_predicting"])
def test_a_callback_cannot_end_what_several_ranks_go_through(attribute):
    model = compiled()
    setattr(model, attribute, True)
    with pytest.raises(ConfigError, match=f"A callback set model.{attribute}.* Pass steps=N"):
        is_stopped(model, attribute, ranks=2)


SPARSE = {
    "TensorFlow's": lambda rows: tf.sparse.from_dense(np.where(rows > 0.3, rows, 0)),
    "SciPy's": lambda rows: scipy.sparse.csr_matrix(np.where(rows > 0.3, rows, 0)),
}


class SparseBatches(PyBatches):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return self.form(inputs), targets


@pytest.mark.parametrize("form", SPARSE.values(), ids=SPARSE)
def test_batches_may_be_sparse(form):
    model, trainer = compiled(), trainer_of()
    # Keras takes SciPy's matrices from generators and as arrays, not from a PyDataset.
    theirs = model.fit(SparseBatches(SPARSE["TensorFlow's"]), epochs=2, shuffle=False, verbose=0)
    ours = trainer.fit(SparseBatches(form), epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-5)


class Bound(keras.callbacks.Callback):
    """Sets how many samples a filter leaves in each epoch, and counts the steps."""

    def __init__(self, *bounds):
        super().__init__()
        self.bounds, self.steps, self.level = bounds, [], tf.Variable(bounds[0], dtype=tf.int64)

    def on_epoch_begin(self, epoch, logs=None):
        self.level.assign(self.bounds[epoch])
        self.steps.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.steps[-1] += 1

    def batches(self):
        numbered = tf.data.Dataset.from_tensor_slices((X, Y)).enumerate()
        return numbered.filter(lambda number, pair: number < self.level).map(lambda number, pair: pair).batch(8)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("bounds", [(16, 24, 20, 16), (32, 9, 30, 50)], ids=["grows", "shrinks"])
def test_each_epoch_is_a_pass_over_data_whose_passes_differ(bounds):
    theirs, ours = Bound(*bounds), Bound(*bounds)
    model, trainer = compiled(), trainer_of()
    expected = model.fit(theirs.batches(), epochs=4, verbose=0, callbacks=[theirs])
    found = trainer.fit(ours.batches(), epochs=4, verbose=0, callbacks=[ours])
    assert ours.steps == theirs.steps
    assert found.steps == sum(theirs.steps)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"batch": 12}, {"batch_size": 9}, {"batch": 12, "validation_batch": 5}])
def test_the_batch_of_a_validation_is_that_of_the_training(options):
    sizes = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: sizes.append(note.count))
    note.on_test_batch_end = lambda batch, logs=None: setattr(note, "count", batch + 1)
    trainer_of().fit(X[:48], Y[:48], validation_data=(X, Y), verbose=0, callbacks=[note], **options)
    size = options.get("validation_batch") or options.get("batch") or options.get("batch_size") or 32
    assert sizes == [-(-50 // size)]


def test_a_pass_that_grows_further_than_keras_reads_it_is_named():
    bound = Bound(16, 40)
    with pytest.warns(UserWarning, match="A pass over the data has more than 3 batches: as in Keras, which counted 2"):
        trainer_of().fit(bound.batches(), epochs=2, verbose=0, callbacks=[bound])
    assert bound.steps == [2, 3]


@pytest.mark.parametrize("counted", [3, 5], ids=["grows", "shrinks"])
def test_each_epoch_is_a_call_of_a_generator_function(counted):
    lengths = iter([counted, 4, 1, 5])
    count = Bound(0, 0, 0, 0)

    def generate():
        for begin in range(next(lengths)):
            yield X[8 * begin : 8 * begin + 8], Y[8 * begin : 8 * begin + 8]

    trainer_of().fit(generate, epochs=4, verbose=0, callbacks=[count])
    assert count.steps == [counted, 4, 1, 5]


def test_an_epoch_without_batches_is_refused():
    bound = Bound(16, 0)
    with pytest.raises(DataError, match=r"The data gave no batches in epoch 2\."):
        trainer_of().fit(bound.batches(), epochs=2, verbose=0, callbacks=[bound])


def test_a_generator_object_that_ends_too_early_is_named():
    with pytest.raises(DataError, match="batches ended before the training did"):
        trainer_of().fit(batches(), steps_per_epoch=3, epochs=3, verbose=0)
    with pytest.raises(DataError, match="ended after 6 batches, within an epoch of 4 steps"):
        trainer_of().fit(batches(), steps_per_epoch=4, epochs=3, verbose=0)
    with pytest.raises(ConfigError, match=r"pass steps_per_epoch=N, or the function.*fit\(batches\) and not"):
        trainer_of().fit(batches(), epochs=2, verbose=0)


def test_a_generator_object_is_read_once_without_a_number_of_steps():
    model, trainer = compiled(), trainer_of()
    model.fit(batches(), verbose=0)
    result = trainer.fit(batches(), verbose=0)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-5)
    np.testing.assert_allclose(result.history["loss"], model.history.history["loss"], rtol=1e-5)
    theirs = model.evaluate(batches(), verbose=0)
    np.testing.assert_allclose(trainer.evaluate(batches(), verbose=0), theirs, rtol=1e-5)


def test_a_generator_object_of_more_than_is_kept_needs_a_number_of_steps(monkeypatch):
    monkeypatch.setattr(python_batches, "KEPT_MB", 0)
    with pytest.raises(DataError, match="or more than are kept while they are counted: pass steps_per_epoch=N"):
        trainer_of().fit(batches(), verbose=0)


TARGETS = X.sum(1, keepdims=True)


class Offset(keras.layers.Layer):
    """Takes a second input or none."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x, offset=None):
        return self.dense(x if offset is None else x + offset)


class Pull(keras.layers.Layer):
    def call(self, one, other):
        self.add_loss(keras.ops.mean(keras.ops.square(one - other)))
        return one


@pytest.mark.parametrize("form", [list, tuple])
def test_several_inputs_without_targets_may_be_listed(form):
    def made():
        keras.utils.set_random_seed(0)
        one, other = keras.Input(X.shape[1:]), keras.Input(X.shape[1:])
        model = keras.Model([one, other], Pull()(keras.layers.Dense(2)(one), keras.layers.Dense(2)(other)))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    reference, trainer = made(), Trainer(made())
    pair = form([X, X[::-1].copy()])
    options = {"shuffle": False, "epochs": 2, "verbose": 0, "validation_data": (pair, None)}
    theirs = reference.fit(pair, batch_size=8, validation_batch_size=8, **options)
    found = trainer.fit(pair, batch=8, validation_batch=8, **options)
    for name, values in theirs.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)
    expected = reference.evaluate(pair, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.evaluate(pair, batch=8, verbose=0), expected, rtol=1e-5)


@pytest.mark.parametrize("offset", [None, pytest.param(X[:, ::-1].copy(), marks=pytest.mark.extended)])
def test_an_optional_input_may_be_none(offset):
    def made():
        keras.utils.set_random_seed(0)
        inputs = {"x": keras.Input(X.shape[1:]), "offset": keras.Input(X.shape[1:], optional=True)}
        model = keras.Model(inputs, Offset()(inputs["x"], inputs["offset"]))
        model.compile("sgd", "mse")
        return model

    def pairs():
        for begin in range(0, len(X), 8):
            rows = slice(begin, begin + 8)
            yield {"x": X[rows], "offset": None if offset is None else offset[rows]}, TARGETS[rows]

    theirs, given = made(), {"x": X, "offset": offset}
    theirs.fit(given, TARGETS, batch_size=8, shuffle=False, epochs=2, verbose=0)
    for data in ((given, TARGETS), (pairs,)):
        trainer = Trainer(made())
        more = {"batch": 8, "shuffle": False} if len(data) == 2 else {}
        trainer.fit(*data, epochs=2, verbose=0, **more)
        np.testing.assert_allclose(trainer.model.get_weights()[0], theirs.get_weights()[0], rtol=1e-5)
    evaluated = trainer.evaluate(given, TARGETS, verbose=0)
    np.testing.assert_allclose(evaluated, theirs.evaluate(given, TARGETS, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(trainer.predict(given), theirs.predict(given, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("stream", [tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), batches])
def test_a_second_fit_begins_a_stream_anew(stream):
    """The steps of a training on other data are none of its own, and of its own those of another `fit` neither."""
    trainer, model = trainer_of(), compiled()
    for each, batch in ((trainer, {"batch": 8}), (model, {"batch_size": 8})):
        each.fit(X, Y, epochs=2, shuffle=False, verbose=0, **batch)
        for _ in range(2):
            data = stream if isinstance(stream, tf.data.Dataset) or each is trainer else stream()
            each.fit(data, epochs=1, steps_per_epoch=3, verbose=0)
    for ours, theirs in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_generator_object_may_be_given_again():
    """Another thread may still read ahead in it when the first `fit` has ended."""
    read = []

    def endless():
        while True:
            time.sleep(0.005)
            read.append(len(read))
            yield X[:8], Y[:8]

    trainer, generator = trainer_of(), endless()
    for _ in range(4):
        before = len(read)
        trainer.fit(generator, steps_per_epoch=6, epochs=1, verbose=0)
        assert 6 <= len(read) - before <= 6 + 2 * python_batches.PREFETCH


class Batches(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, number):
        return X[8 * number : 8 * number + 8], Y[8 * number : 8 * number + 8]


@pytest.mark.parametrize(
    "data",
    [(X, Y), tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat(), batches, Batches()],
    ids=["arrays", "endless dataset", "generator function", "endless PyDataset"],
)
def test_steps_are_the_first_batches(data):
    expected = trainer_of().evaluate(X[:24], Y[:24], verbose=0)
    found = trainer_of().evaluate(data, steps=3, batch_size=8 if isinstance(data, tuple) else None, verbose=0)
    assert list(found) == pytest.approx(list(expected), rel=1e-6)


def test_evaluate_gives_what_keras_users_read(capsys):
    trainer, model = trainer_of(), compiled()
    expected = model.evaluate(X, Y, verbose=0, sample_weight=WEIGHTS)
    loss, accuracy = trainer.evaluate(X, Y, 16, 0, WEIGHTS)
    assert [loss, accuracy] == pytest.approx(expected, rel=1e-6)
    assert capsys.readouterr().out == ""
    outcome = trainer.evaluate(X, Y, sample_weight=WEIGHTS, return_dict=True)
    assert outcome == pytest.approx({"loss": loss, "accuracy": accuracy})
    assert dict(outcome) == outcome


class Heard(keras.callbacks.Callback):
    """Notes every call in its order, with the names in its logs."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_"):
                setattr(self, name, self.noting(name))

    def noting(self, name):
        def note(*args, **options):
            numbers = [each for each in args if isinstance(each, int)]
            logs = [sorted(each) for each in (*args, *options.values()) if isinstance(each, dict)]
            self.calls.append((name, *numbers, *(names for names in logs if names)))

        return note


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_callbacks_are_called_as_by_keras(call):
    data = (X, Y) if call == "evaluate" else (X,)
    theirs, mine = Heard(), Heard()
    getattr(compiled(), call)(*data, batch_size=10, verbose=0, callbacks=[theirs])
    trainer = trainer_of()
    getattr(trainer, call)(*data, batch_size=10, verbose=0, callbacks=[mine])
    assert mine.calls == theirs.calls
    assert mine.model is trainer.model
    with pytest.raises(ConfigError, match=r"callbacks must be keras\.callbacks\.Callback objects"):
        getattr(trainer, call)(*data, callbacks=["stop"])


def test_predict_takes_what_keras_takes():
    trainer = trainer_of()
    expected = trainer.model.predict(X, verbose=0)
    np.testing.assert_allclose(trainer.predict(X, 16, 0), expected, rtol=1e-6)
    np.testing.assert_allclose(trainer.predict(X, batch_size=8, steps=3), expected[:24], rtol=1e-6)
    endless = tf.data.Dataset.from_tensor_slices(X).batch(8).repeat()
    np.testing.assert_allclose(trainer.predict(endless, steps=3), expected[:24], rtol=1e-6)
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        trainer.predict(X, steps=0)
    with pytest.raises(DataError, match="no samples"):
        trainer.predict(X[:0])
