import functools
import itertools
import re
import threading
import warnings
from itertools import islice

import keras
import numpy as np
import pytest

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.streams import python_batches
from hvdtrain.data.streams.cut import Cut
from hvdtrain.data.streams.python_batches import GeneratorTraining, PyDatasetTraining, StreamEvaluation, ahead
from hvdtrain.training.inputs import first_batches, training_data, validation_batches, with_class_weights
from hvdtrain.training.trainer import Trainer
from tests.builders import samples
from tests.unit.gathering import on_ranks

COUNT, BATCH = 50, 16
X, Y = samples(COUNT)
NUMBERS = np.arange(COUNT)


class Batches(keras.utils.PyDataset):
    """Samples that are their own numbers, in batches."""

    def __init__(self, count=COUNT, batch=BATCH, endless=False, **options):
        super().__init__(**options)
        self.count, self.batch, self.endless = count, batch, endless
        self.read, self.told = [], []

    @property
    def num_batches(self):
        return None if self.endless else -(-self.count // self.batch)

    def __getitem__(self, index):
        self.read.append(index)
        numbers = np.arange(index * self.batch, (index + 1) * self.batch)
        numbers = numbers % self.count if self.endless else numbers[numbers < self.count]
        return numbers, numbers * 10

    def on_epoch_begin(self):
        self.told.append(("begin", len(self.read)))

    def on_epoch_end(self):
        self.told.append(("end", len(self.read)))


def generator(count=COUNT, batch=BATCH):
    for begin in range(0, count, batch):
        numbers = np.arange(begin, min(count, begin + batch))
        yield numbers, numbers * 10


def py_training(dataset=None, *, batch=BATCH, index=0, size=1, seed=0, shuffle=False, steps_per_epoch=None):
    dataset = Batches() if dataset is None else dataset
    cut = Cut(batch, index, size, type(dataset).__name__)
    return PyDatasetTraining(dataset, cut, seed=seed, shuffle=shuffle, steps_per_epoch=steps_per_epoch)


def gen_training(function=generator, *, batch=BATCH, index=0, size=1, steps_per_epoch=None):
    return GeneratorTraining(function, Cut(batch, index, size, function.__name__), steps_per_epoch=steps_per_epoch)


def held(batch):
    """The samples that count."""
    assert (batch.targets.numpy() == 10 * batch.inputs.numpy()).all()
    return batch.inputs.numpy().tolist() if float(batch.has_samples) else []


def test_of_a_sample_no_epoch_begins():
    """A PyDataset may shuffle in on_epoch_begin."""
    dataset = Batches()
    data = py_training(dataset)
    assert held(data.sample()) == held(next(data.batches(0)))
    assert [what for what, _ in dataset.told] == ["begin"]


def taken(data, count, start=0):
    return [held(batch) for batch in islice(data.batches(start), count)]


def together(parts):
    return list(itertools.chain.from_iterable(parts))


EPOCH = [list(range(begin, min(COUNT, begin + BATCH))) for begin in range(0, COUNT, BATCH)]


# -- the batches --


@pytest.mark.parametrize("training", [py_training, gen_training])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_replicas_take_the_parts_of_every_batch(training, size):
    parts = [taken(training(index=index, size=size), 9) for index in range(size)]
    whole = [together(part[step] for part in parts) for step in range(9)]
    assert whole == (EPOCH * 3)[:9]
    lengths = [[len(part[step]) for part in parts] for step in range(9)]
    assert max(max(row) - min(row) for row in lengths) <= 1


@pytest.mark.parametrize("training", [py_training, gen_training])
@pytest.mark.parametrize("start", [1, 3, 4, 6, 13])
def test_any_step_can_be_resumed_at(training, start):
    assert taken(training(), 5, start) == taken(training(), 20)[start : start + 5]


def test_weights_and_several_inputs_are_cut_alike():
    def batches():
        yield [NUMBERS, X], Y, np.arange(COUNT) / 2
        yield {"a": NUMBERS, "b": X}, Y, None
        yield NUMBERS, list(range(COUNT))

    first, second, third = islice(gen_training(batches, batch=50, index=1, size=2).batches(0), 3)
    assert first.inputs[0].numpy().tolist() == list(range(25, 50))
    assert (first.inputs[1].numpy() == X[25:]).all()
    assert first.sample_weight.numpy().tolist() == [number / 2 for number in range(25, 50)]
    assert (second.inputs["b"].numpy() == X[25:]).all()
    assert second.sample_weight is None
    assert third.targets.numpy().tolist() == list(range(25, 50))


@pytest.mark.parametrize("data", [Batches(), generator])
def test_a_batch_that_does_not_divide_is_refused(data):
    for outcome in on_ranks(3, lambda backend: given(data, backend=backend)):
        assert str(outcome).startswith("A batch of 16 samples does not divide among 3 ranks, the first of")
        assert "dataset.batch(15)" in str(outcome)


# -- the order of a PyDataset --


def test_shuffled_batches_are_all_visited_in_an_order_of_seed_and_epoch():
    data = py_training(Batches(200, 4), batch=4, seed=3, shuffle=True)
    orders = [data.numbers(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != list(range(50))
    assert orders == [py_training(Batches(200, 4), batch=4, seed=3, shuffle=True).numbers(e).tolist() for e in range(3)]
    assert orders[0] != py_training(Batches(200, 4), batch=4, seed=4, shuffle=True).numbers(0).tolist()
    assert taken(data, 3, start=52) == [[4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in orders[1][2:5]]


def test_an_endless_data_set_goes_on_counting():
    data = py_training(Batches(endless=True), steps_per_epoch=3, shuffle=True)
    assert data.steps_per_epoch == 3
    dataset = Batches(endless=True)
    taken(py_training(dataset, steps_per_epoch=3, shuffle=True), 7)
    assert dataset.read[:7] == list(range(7))
    assert taken(data, 2, start=5) == [[n % COUNT for n in range(i * BATCH, (i + 1) * BATCH)] for i in (5, 6)]


def test_data_without_end_need_steps_per_epoch():
    with pytest.raises(ConfigError, match=r"Batches never ends .* pass steps_per_epoch"):
        py_training(Batches(endless=True))


def test_epochs_may_be_parts_of_a_pass():
    dataset = Batches(200, 4)
    data = py_training(dataset, batch=4, seed=3, shuffle=True, steps_per_epoch=25)
    whole = py_training(Batches(200, 4), batch=4, seed=3, shuffle=True)
    assert [*data.numbers(2), *data.numbers(3)] == whole.numbers(1).tolist()
    taken(data, 60)
    assert [read for kind, read in dataset.told if kind == "end"] == [25, 50]


def test_epochs_begin_and_end_where_the_steps_do():
    dataset = Batches()
    stream = py_training(dataset).batches(0)
    for _ in range(4):
        next(stream)
    # Nothing of the next epoch was read, and this one is not over before its last step is.
    assert dataset.told == [("begin", 0)]
    assert sorted(dataset.read) == [0, 1, 2, 3]
    next(stream)
    assert dataset.told == [("begin", 0), ("end", 4), ("begin", 4)]
    for _ in range(3):
        next(stream)
    stream.close()
    assert dataset.told == [("begin", 0), ("end", 4), ("begin", 4), ("end", 8)]


# -- reading ahead --


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_how_much_is_read_depends_on_what_was_asked_for_alone(asked):
    called = []
    tasks = (functools.partial(called.append, number) for number in itertools.count())
    results = ahead(tasks, limit=3)
    for _ in range(asked):
        next(results)
    results.close()
    for thread in threading.enumerate():
        if thread.name.startswith("data"):
            thread.join(20)
    assert called == list(range(asked + 3 if asked > 1 else 1))


def test_who_wants_no_more_does_not_wait_for_a_reader_that_is_blocked():
    """As the garbage collector does, on whatever thread it runs: the watchdog's once waited for a reader's hour."""
    more, ended = threading.Event(), threading.Event()
    results = ahead(itertools.chain([lambda: 0, lambda: 1], itertools.repeat(more.wait)), limit=1)
    assert list(islice(results, 2)) == [0, 1]
    closing = threading.Thread(target=lambda: (results.close(), ended.set()), daemon=True)
    closing.start()
    try:
        assert ended.wait(20)
    finally:
        more.set()


def test_processes_are_threads_and_that_is_told():
    with pytest.warns(UserWarning, match="read by 2 threads"):
        py_training(Batches(use_multiprocessing=True, workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        py_training(Batches(use_multiprocessing=True, workers=2), index=1, size=2)  # rank 0 says it for all


@pytest.mark.parametrize("training", [py_training, gen_training])
def test_an_error_comes_where_it_happened(training):
    class Broken(Batches):
        def __getitem__(self, index):
            if index == 2:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    def broken():
        for index in range(4):
            yield Broken()[index]

    data = training(Broken()) if training is py_training else training(broken, steps_per_epoch=4)
    stream = data.batches(0)
    assert [held(next(stream)) for _ in range(2)] == EPOCH[:2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


# -- generator functions --


def test_a_generator_function_is_called_for_every_epoch():
    calls = []

    def batches():
        calls.append(len(calls))
        yield from generator()

    data = gen_training(batches)
    assert (data.steps_per_epoch, calls) == (4, [0])  # counted
    assert taken(data, 4) == EPOCH
    assert calls == [0]  # the first epoch is the pass that counted
    assert taken(data, 8) == EPOCH * 2
    assert len(calls) >= 3
    data = gen_training(batches, steps_per_epoch=4)
    assert taken(data, 8) == EPOCH * 2


def test_an_endless_generator_goes_on_where_it_is():
    def endless():
        for begin in itertools.count(step=4):
            yield np.arange(begin, begin + 4), 10 * np.arange(begin, begin + 4)

    data = gen_training(endless, batch=4, steps_per_epoch=2)
    assert [batch[0] for batch in taken(data, 6)] == [0, 4, 8, 12, 16, 20]
    assert [batch[0] for batch in taken(data, 2, start=3)] == [12, 16]


def test_a_generator_that_ends_within_an_epoch_is_an_error():
    stream = gen_training(steps_per_epoch=3).batches(0)
    assert [held(next(stream)) for _ in range(4)] == EPOCH
    with pytest.raises(DataError, match="generator ended after 4 batches, within an epoch of 3 steps"):
        next(stream)


def test_long_counting_is_told_of(monkeypatch):
    monkeypatch.setattr(python_batches, "COUNTING_S", 0.0)
    with pytest.warns(
        UserWarning, match="generator is being read to count its batches, .* pass steps_per_epoch"
    ) as told:
        assert gen_training().steps_per_epoch == 4
    assert len(told) == 1


# -- what fit takes --


def given(data, *, batch=None, backend=None, steps_per_epoch=None):
    backend = backend or SingleBackend(None)
    return training_data(data, backend, batch=batch, seed=0, shuffle=False, steps_per_epoch=steps_per_epoch)


@pytest.mark.parametrize(
    "data", [Batches(), generator, lambda: generator(), functools.partial(generator, COUNT), lambda: list(generator())]
)
def test_streams_are_told_from_other_data(data):
    stream = given(data)
    assert (stream.batch, stream.steps_per_epoch) == (BATCH, 4)
    assert taken(stream, 5) == [*EPOCH, EPOCH[0]]


class Gives(keras.utils.PyDataset):
    def __init__(self, thing, count=1):
        super().__init__()
        self.thing, self.count = thing, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.thing


@pytest.mark.parametrize(
    ("thing", "cause"),
    [
        ((), "Received: tuple of 0"),
        ([], "Received: list of 0"),
        ((X[:0], Y[:0]), "gives a first batch without samples"),
        ((X, 5), "holds a single number where an array [samples, …] belongs"),
    ],
)
def test_batches_that_are_none_are_refused(thing, cause):
    def batches():
        yield thing

    for data, name in ((Gives(thing), "Gives"), (batches, "batches")):
        with pytest.raises(DataError, match=re.escape(cause)) as raised:
            given(data)
        assert name in str(raised.value)


@pytest.mark.parametrize(
    ("data", "error", "cause"),
    [
        (generator(), ConfigError, "A generator can be read only once: pass the function that makes it"),
        (Gives((X, Y), 0), DataError, "Gives holds no batches"),
        (lambda: iter(()), DataError, "gives no batches"),
        (lambda: 5, DataError, "must be a generator function of global batches. It returned: int."),
        (lambda: (X, Y), DataError, "It returned: tuple."),
    ],
)
def test_streams_that_give_nothing_are_refused(data, error, cause):
    with pytest.raises(error, match=re.escape(cause)):
        given(data)


@pytest.mark.parametrize("data", [Batches(), generator])
def test_streams_are_batched_already(data):
    with pytest.raises(ConfigError, match=r"come in batches already: leave out batch\. Received: batch=8"):
        given(data, batch=8)


class Reversed(Batches):
    """The same batches, with their inputs in another order."""

    def __getitem__(self, index):
        x, *rest = super().__getitem__(index)
        return x[::-1], *rest


@pytest.mark.parametrize("both", [(Batches(), Reversed()), (generator, lambda: ((x[::-1], y) for x, y in generator()))])
def test_ranks_that_read_other_batches_are_named(both):
    for outcome in on_ranks(2, lambda backend: given(both[backend.index], backend=backend)):
        said = str(outcome)
        assert said.startswith("Rank 1 reads the training data in another order than rank 0")
        assert "Draw from generators with a seed" in said


@pytest.mark.parametrize("data", [Batches(), generator])
def test_validation_reads_every_sample_once_and_can_be_repeated(data):
    parts = [StreamEvaluation(data, index=index, size=3) for index in range(3)]
    for _ in range(2):
        steps = zip(*parts, strict=True)
        assert [together(map(held, step)) for step in steps] == EPOCH
    assert [held(batch) for batch in validation_batches(data, SingleBackend(None), batch=1)] == EPOCH


@pytest.mark.parametrize("steps", [None, 3])
def test_each_validation_begins_and_ends_an_epoch_of_its_data(steps):
    dataset = Batches()
    batches = validation_batches(first_batches(dataset, steps, BATCH), SingleBackend(None), batch=1)
    dataset.read.clear()
    read = steps or len(EPOCH)
    for _ in range(2):
        list(batches)
    assert dataset.told == [("begin", 0), ("end", read), ("begin", read), ("end", 2 * read)]


def test_endless_validation_is_refused():
    with pytest.raises(ConfigError, match="never ends"):
        validation_batches(Batches(endless=True), SingleBackend(None), batch=1)


class Samples(keras.utils.PyDataset):
    """`X` and `Y` in batches."""

    def __len__(self):
        return -(-COUNT // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def samples():
    dataset = Samples()
    for index in range(len(dataset)):
        yield dataset[index]


def test_class_weights_reach_the_samples_of_a_stream():
    for data in (Samples(), samples):
        weighted = with_class_weights(data, {1: 2.5})
        for batch in islice(given(weighted).batches(0), 4):
            assert (batch.sample_weight.numpy() == np.where(batch.targets == 1, 2.5, 1.0)).all()


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("data", [Samples(workers=2), samples])
def test_training_on_a_stream_is_training_on_its_arrays(data):
    def weights_after(given, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = Trainer(model, keras.optimizers.SGD(0.1), loss, ["accuracy"])
        trainer.fit(given, epochs=2, shuffle=False, verbose=False, validation_data=given, **options)
        figures = trainer.evaluate(given, return_dict=True)
        return trainer.model.get_weights(), figures["loss"], figures["accuracy"]

    (kernel, bias), loss, accuracy = weights_after(data)
    (kernel_of_arrays, bias_of_arrays), loss_of_arrays, accuracy_of_arrays = weights_after((X, Y), batch=BATCH)
    np.testing.assert_allclose(kernel, kernel_of_arrays, rtol=0, atol=1e-6)
    np.testing.assert_allclose(bias, bias_of_arrays, rtol=0, atol=1e-6)
    assert loss == pytest.approx(loss_of_arrays, rel=1e-6)
    assert accuracy == accuracy_of_arrays
