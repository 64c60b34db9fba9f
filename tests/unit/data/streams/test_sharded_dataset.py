"""A Dataset of global batches, of which each rank maps its own samples only."""

import collections
import functools
import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.data.batch import slice_batch
from hvdtrain.data.streams import python_batches
from hvdtrain.data.streams.cut import Cut
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.data.streams.sharded_dataset import sharded
from hvdtrain.training.inputs import training_data, with_class_weights
from tests.extended import mostly_extended
from tests.unit.gathering import on_ranks

SAMPLES, BATCH = 50, 8
X, Y = np.arange(SAMPLES, dtype="float32"), np.arange(SAMPLES)


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def decode(x, y):
    return tf.sqrt(x)[None], 2 * y


def zipped():
    inputs = tf.data.Dataset.range(SAMPLES).map(lambda n: n * n)
    shuffled = slices().map(decode).shuffle(SAMPLES, seed=3)
    both = tf.data.Dataset.zip((inputs, shuffled)).map(
        lambda square, sample: ({"a": square, "b": sample[0]}, sample[1])
    )
    return both.batch(BATCH)


ORDER_KEPT = {
    "map": lambda: slices().map(decode).batch(BATCH),
    "parallel, prefetched": lambda: slices().map(decode, tf.data.AUTOTUNE).prefetch(2).batch(BATCH).prefetch(1),
    "drop_remainder": lambda: slices().map(decode).batch(BATCH, drop_remainder=True),
    "shuffled after": lambda: slices().map(decode).shuffle(20, seed=4).batch(BATCH),
    "shuffled before": lambda: slices().shuffle(20, seed=4).map(decode).map(lambda x, y: ((x, x), y)).batch(BATCH),
    "all orders": lambda: (
        slices().map(decode).shuffle(9, seed=1).repeat(3).skip(3).take(99).batch(BATCH).shuffle(4, seed=2).repeat(2)
    ),
    "endless": lambda: slices().map(decode).repeat().batch(BATCH),
    "zip": zipped,
    "one tensor": lambda: tf.data.Dataset.range(SAMPLES).map(lambda n: (n, -n)).batch(BATCH),
    "dict": lambda: tf.data.Dataset.from_tensor_slices({"a": X, "b": Y}).map(lambda d: (d["a"], d["b"])).batch(BATCH),
    "unknown length": lambda: slices().filter(lambda x, y: y % 3 > 0).map(decode).batch(BATCH),
    "a condition": lambda: slices().map(lambda x, y: (tf.cond(y > 4, lambda: x, lambda: -x), y)).batch(BATCH),
    "options": lambda: slices().map(decode).with_options(tf.data.Options()).batch(BATCH),
}


@pytest.mark.parametrize(
    ("kind", "index", "size"),
    mostly_extended(
        [*((kind, 3, 4) for kind in ORDER_KEPT), ("all orders", 0, 1)],
        lambda kind, index, size: kind in ("all orders", "zip", "unknown length"),
        why="they hold what the others hold",
    ),
)
def test_slices_are_those_of_the_whole_dataset(kind, index, size):
    build = ORDER_KEPT[kind]
    whole = [slice_batch(elements, index, size) for elements in build().take(40)]
    mine = list(sharded(build(), size).slices(index, size).take(40))
    for one, other in zip(whole, mine, strict=True):
        for a, b in zip(tf.nest.flatten(tuple(one)), tf.nest.flatten(tuple(other)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_batches_are_counted_without_a_map():
    for build in (ORDER_KEPT["unknown length"], ORDER_KEPT["all orders"], ORDER_KEPT["drop_remainder"]):
        assert sharded(build(), 2).count() == sum(1 for _ in build())


def by_python(x, y, *, stateful=True):
    return tf.ensure_shape(tf.numpy_function(lambda t: 2 * t, [x], tf.float32, stateful=stateful), []), y


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: slices().map(lambda x, y: (x + tf.random.uniform([]), y)).batch(BATCH),
        lambda: slices().map(by_python).batch(BATCH),
        lambda: slices().map(decode).batch(BATCH).map(lambda x, y: (x - tf.reduce_mean(x), y)),
        lambda: slices().map(decode).padded_batch(BATCH),
        lambda: slices().map(decode).cache().batch(BATCH),
        lambda: slices().batch(BATCH),
    ],
    ids=["random", "Python", "a map of batches", "padded", "cached", "nothing to map"],
)
def test_what_would_change_or_gains_nothing_is_left_as_it_is(dataset):
    assert sharded(dataset(), 2) is None


def calls_of(build, size=2, **options):
    """Return which samples each rank's map was called for, and the inputs that each was given, over an epoch."""
    calls = [collections.Counter() for _ in range(size)]

    def on_rank(backend):
        def count(x, y):
            calls[backend.index][int(y)] += 1
            return x

        def counting(x, y):
            return tf.ensure_shape(tf.numpy_function(count, [x, y], tf.float32, stateful=False), []), y

        data = training_data(build(counting), backend, seed=0, shuffle=False, steps_per_epoch=None, **options)
        batches = data.batches(0)
        return [next(batches).targets.numpy().tolist() for _ in range(data.steps_per_epoch)]

    return calls, on_ranks(size, on_rank)


@pytest.mark.filterwarnings("ignore:The dataset runs Python code")
@pytest.mark.parametrize("given", [{"batch": BATCH}, {"batch": None}])
def test_a_rank_maps_its_own_samples_only(given):
    def build(counting):
        dataset = slices().map(counting)
        return dataset if given["batch"] else dataset.batch(BATCH)

    calls, targets = calls_of(build, **given)
    for index in range(2):
        mine = {label for batch in targets[index] for label in batch}
        begun = set(range(BATCH))  # the first batch is compared with that of the whole dataset
        # Reading ahead goes on into the next epoch.
        assert set(calls[index]) <= mine | begun
        assert set(calls[index]) >= mine
    assert sorted(label for part in targets for batch in part for label in batch) == list(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:The dataset runs Python code")
def test_maps_that_differ_between_two_calls_are_called_for_all_samples():
    drawn = np.random.default_rng(0)

    def build(counting):
        del counting

        def noisy(x):
            return np.float32(x + drawn.random())

        def draw(x, y):
            return tf.ensure_shape(tf.numpy_function(noisy, [x], tf.float32, stateful=False), []), y

        return slices().map(draw).batch(BATCH)

    with pytest.warns(UserWarning, match="give other samples when they are called again"):
        data = training_data(build(None), SingleBackend(None), batch=None, seed=0, shuffle=False, steps_per_epoch=None)
    assert data.steps_per_epoch == 7


@pytest.mark.parametrize("map_last", [False, True], ids=["whole", "sharded"])
def test_a_sample_uses_up_one_order_however_long_it_takes(map_last):
    def build():
        shuffled = slices().shuffle(SAMPLES, seed=3)
        return (shuffled.map(decode) if map_last else shuffled).batch(SAMPLES // 2)

    data = training_data(build(), SingleBackend(None), batch=None, seed=0, shuffle=True, steps_per_epoch=None)
    data.sample()
    time.sleep(0.3)  # what reads ahead in a thread would come to the next epoch
    alone = build()
    orders = [[y.numpy() for _, y in alone] for _ in range(4)]
    expected = np.concatenate([*orders[2], *orders[3]])  # the ranks have compared the first, and one was read above
    got = np.concatenate([batch.targets.numpy() for batch in itertools.islice(data.batches(0), 4)])
    assert (got == expected).all()


@pytest.mark.parametrize("start", [2, 3, 5, 7])
def test_training_goes_on_in_the_order_of_batches_that_were_counted(start):
    def training():
        kept = slices().filter(lambda x, y: y < 24).shuffle(24, seed=3).batch(BATCH)
        return training_data(kept, SingleBackend(None), batch=None, seed=0, shuffle=True, steps_per_epoch=None)

    def targets(begin):
        return [batch.targets.numpy().tolist() for batch in itertools.islice(training().batches(begin), 9 - begin)]

    assert targets(start) == targets(0)[start:]


def test_class_weights_are_those_of_the_whole_dataset():
    weighted = with_class_weights(slices().map(lambda x, y: (x, y % 3)), {1: 2.5})
    for rank in on_ranks(
        2, lambda backend: training_data(weighted, backend, batch=BATCH, seed=0, shuffle=False, steps_per_epoch=None)
    ):
        batch = next(rank.batches(0))
        assert batch.sample_weight.numpy().tolist() == [2.5 if label == 1 else 1.0 for label in batch.targets.numpy()]


# -- a first pass over what nobody has counted --


def counted_generator(calls):
    def batches():
        for begin in range(0, SAMPLES, BATCH):
            calls.append(begin)
            yield X[begin : begin + BATCH], Y[begin : begin + BATCH]

    return batches


def as_dataset(calls):
    signature = (tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int64))
    return tf.data.Dataset.from_generator(counted_generator(calls), output_signature=signature)


@pytest.mark.parametrize(("form", "extra"), [(counted_generator, 0), (as_dataset, 1)])
def test_an_epoch_of_python_is_made_once(form, extra):
    calls = [[], []]

    def on_rank(backend):
        data = form(calls[backend.index])
        training = training_data(data, backend, batch=None, seed=0, shuffle=False, steps_per_epoch=None)
        next(training.batches(0))  # the trainer builds its model on it
        batches = training.batches(0)
        return [next(batches).targets.numpy().tolist() for _ in range(training.steps_per_epoch)]

    targets = on_ranks(2, on_rank)
    assert sorted(label for rank in targets for batch in rank for label in batch) == list(range(SAMPLES))
    assert [len(made) for made in calls] == [7 + extra, 7 + extra]


def test_batches_that_do_not_fit_on_one_rank_are_made_again_on_all(monkeypatch):
    """One rank alone would go on with other batches of a generator that draws."""
    small = set()
    monkeypatch.setattr(python_batches, "_bytes", lambda batch: 2**40 if threading.get_ident() in small else 0)

    def on_rank(backend, too_small):
        if backend.index == too_small:
            small.add(threading.get_ident())
        data = counted_generator([])
        return training_data(data, backend, batch=None, seed=0, shuffle=False, steps_per_epoch=None).first_pass.kept

    assert on_ranks(2, functools.partial(on_rank, too_small=None)) == [True, True]
    assert on_ranks(2, functools.partial(on_rank, too_small=1)) == [False, False]


def test_no_pass_begins_that_is_not_trained():
    """Reading ahead into the next pass would use up an order of a shuffle, on some ranks and not on others."""
    begun = []

    def samples():
        begun.append(len(begun))
        yield from range(6)

    kinds = tf.TensorSpec((), "int64")
    dataset = tf.data.Dataset.from_generator(samples, output_signature=kinds).map(lambda x: (x, x)).batch(2)
    data = DatasetTraining(dataset, Cut(2, 0, 1, "it"), steps_per_epoch=3)
    batches = data.batches(0)
    for step in range(7):
        next(batches)
        time.sleep(0.1)
        assert len(begun) == step // 3 + 1
