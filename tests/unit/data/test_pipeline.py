import hashlib
import re
from itertools import islice

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import per_replica, slice_batch
from hvdtrain.data.digits import load_digits
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation, SourceTraining
from hvdtrain.data.registry import load_splits
from hvdtrain.data.streams.cut import Cut
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.training.inputs import training_data, validation_batches
from tests.extended import mostly_extended
from tests.unit.gathering import on_ranks

SIZES = range(1, 6)


def numbers(count):
    """A source whose samples are their own numbers."""
    return ArraySource((np.arange(count), np.zeros(count)))


def array_training(count, batch, *, index=0, size=1, seed=0, shuffle=True):
    return SourceTraining(numbers(count), batch=batch, index=index, size=size, seed=seed, shuffle=shuffle)


def held(batch):
    """The samples that count."""
    return batch.inputs.numpy().tolist() if float(batch.has_samples) else []


def taken(data, count, start=0):
    """The samples of `count` steps."""
    return [held(batch) for batch in islice(data.batches(start), count)]


def order_of(data, epoch):
    """The samples of an epoch, one after the other."""
    steps = taken(data, data.steps_per_epoch, epoch * data.steps_per_epoch)
    return [sample for step in steps for sample in step]


# -- the order --


@pytest.mark.parametrize(("count", "batch"), [(1, 1), (1, 8), (2, 1), (7, 8), (8, 8), (53, 8), (100, 100), (53, 100)])
def test_an_epoch_visits_every_sample_once(count, batch):
    data = array_training(count, batch)
    assert data.steps_per_epoch == -(-count // batch)
    for epoch in (0, 1000):
        assert sorted(order_of(data, epoch)) == list(range(count))


def test_the_order_differs_by_epoch_and_by_seed():
    orders = [
        tuple(order_of(array_training(50, 8, seed=seed), epoch)) for seed in (0, 1, 2**31 - 1) for epoch in (0, 1)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize("size", mostly_extended(SIZES, lambda size: size == SIZES[-1], why="it is the most uneven"))
def test_the_replicas_together_hold_the_global_batch_at_any_size(size):
    batch, count, steps = 60, 133, 5  # a tail of 13 samples; two epochs nearly
    alone = taken(array_training(count, batch, seed=9), steps)
    parts = [taken(array_training(count, batch, seed=9, index=i, size=size), steps) for i in range(size)]
    assert [[sample for part in parts for sample in part[step]] for step in range(steps)] == alone


@pytest.mark.parametrize("start", [1, 7, 20])
@pytest.mark.parametrize(("index", "size"), [(0, 1), (1, 2)])
def test_any_step_is_reached_without_those_before_it(start, index, size):
    data = array_training(53, 8, index=index, size=size)
    assert taken(data, 3, start) == taken(data, start + 3)[start:]


# -- cutting a batch --


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", range(1, 13))
def test_cuts_lose_nothing_and_repeat_nothing(total, size):
    x = tf.range(total)
    batches = [slice_batch((x, x * 10), index, size) for index in range(size)]
    assert [sample for b in batches for sample in held(b)] == list(range(total))
    lengths = [len(held(b)) for b in batches]
    assert max(lengths) - min(lengths) <= 1
    for b in batches:
        assert int(b.global_samples) == total
        assert (b.targets.numpy() == 10 * b.inputs.numpy()).all()
        # Layers never see an empty batch: a replica without samples holds one that does not count.
        assert len(b.inputs) == max(1, len(held(b)))
        assert float(b.has_samples) in (0.0, 1.0)


def test_nests_and_weights_are_cut_alike():
    x = {"a": tf.range(5), "b": (tf.range(5) * 2, tf.zeros([5, 3]))}
    batch = slice_batch((x, tf.range(5), tf.range(5.0)), 1, 2)
    assert batch.inputs["a"].numpy().tolist() == [2, 3, 4]
    assert batch.inputs["b"][0].numpy().tolist() == [4, 6, 8]
    assert batch.inputs["b"][1].shape == (3, 3)
    assert batch.sample_weight.numpy().tolist() == [2.0, 3.0, 4.0]
    assert slice_batch((x, tf.range(5)), 1, 2).sample_weight is None


@pytest.mark.parametrize(
    ("batch", "size", "advice"), [(64, 3, "63 or batch=66"), (2, 4, "4 or batch=8"), (7, 2, "6 or batch=8")]
)
def test_a_batch_that_does_not_divide_is_refused_with_those_that_do(batch, size, advice):
    cause = f"A batch of {batch} samples does not divide among {size} ranks (batch is the global batch)."
    with pytest.raises(ConfigError, match=re.escape(f"{cause} Use batch={advice}, or another number of ranks.")):
        per_replica(batch, size)
    with pytest.raises(ConfigError, match="does not divide"):
        array_training(100, batch, size=size)


@pytest.mark.parametrize("batch", [0, -8])
def test_a_batch_of_no_samples_is_refused(batch):
    with pytest.raises(ConfigError, match=f"at least one sample. Received: {batch}"):
        array_training(100, batch, size=2)


# -- evaluation --


@pytest.mark.parametrize(("batch", "size"), [(7, 1), (7, 3), (23, 2), (100, 5)])
def test_evaluation_sees_every_sample_once_in_order(batch, size):
    parts = [list(SourceEvaluation(numbers(23), batch=batch, index=i, size=size)) for i in range(size)]
    steps = -(-23 // batch)
    assert {len(part) for part in parts} == {steps}  # every replica takes part in every exchange
    together = [sample for step in range(steps) for part in parts for sample in held(part[step])]
    assert together == list(range(23))


# -- datasets of the user's --


def dataset_of(count, batch):
    return tf.data.Dataset.from_tensor_slices((np.arange(count), np.zeros(count))).batch(batch)


def dataset_training(dataset, batch=4, index=0, size=1, **options):
    return DatasetTraining(dataset, Cut(batch, index, size, "The dataset"), **options)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_dataset_is_cut_and_repeated_with_its_uneven_tail(size):
    parts = [taken(dataset_training(dataset_of(70, 60), 60, i, size), 4) for i in range(size)]
    together = [[sample for part in parts for sample in part[step]] for step in range(4)]
    assert together == [list(range(60)), list(range(60, 70))] * 2


@pytest.mark.parametrize("start", [1, 3, 7])
def test_a_dataset_goes_on_at_any_step(start):
    data = dataset_training(dataset_of(10, 4))
    assert taken(data, 3, start) == taken(data, 10)[start : start + 3]


@pytest.mark.parametrize(
    ("dataset", "count"),
    [
        (dataset_of(10, 4), 3),
        (dataset_of(10, 4).repeat(2), 6),
        (dataset_of(10, 4).filter(lambda *_: True), 3),  # it does not know its length
    ],
)
def test_the_batches_of_a_dataset_are_counted(dataset, count):
    assert dataset_training(dataset).steps_per_epoch == count


def test_an_endless_dataset_needs_steps_per_epoch():
    endless = dataset_of(10, 4).repeat()
    with pytest.raises(ConfigError, match="never ends: pass steps_per_epoch"):
        dataset_training(endless)
    data = dataset_training(endless, steps_per_epoch=2)
    assert data.steps_per_epoch == 2
    assert taken(data, 2, start=2) == [[8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize("dataset", [dataset_of(10, 4).take(0), dataset_of(10, 4).filter(lambda *_: False)])
def test_an_empty_dataset_is_refused(dataset):
    with pytest.raises(DataError, match="The dataset is empty"):
        dataset_training(dataset)


# -- what fit takes --


def given(data, batch=None, backend=None):
    return training_data(data, backend or SingleBackend(None), batch=batch, seed=0, shuffle=False, steps_per_epoch=None)


def test_arrays_sources_and_datasets_give_the_same_batches():
    x, y = np.arange(10), np.zeros(10)
    unbatched = tf.data.Dataset.from_tensor_slices((x, y))
    kinds = [((x, y), 4), ([x, y], 4), (ArraySource((x, y)), 4), (unbatched, 4), (unbatched.batch(4), None)]
    for data, batch in kinds:
        stream = given(data, batch)
        assert (stream.batch, stream.steps_per_epoch) == (4, 3)
        assert taken(stream, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Items(keras.utils.PyDataset):
    """Two batches of a kind."""

    def __init__(self, item):
        super().__init__()
        self.item = item

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.item


def generator(element):
    def batches():
        yield element

    return batches


def test_inputs_alone_arrive_as_keras_hands_them_to_a_train_step():
    """An array of a Dataset by itself, and a tuple of one where there was one: a step that unpacks it takes no row."""
    x, y = np.arange(8.0).reshape(4, 2), np.arange(4)
    slices = tf.data.Dataset.from_tensor_slices
    kinds = {
        "an array": [x, (x,), slices(x), slices(x).batch(4), generator(x)],
        "a tuple of one": [slices((x,)).batch(4), Items(x), Items((x,)), generator((x,))],
        "a dict": [{"a": x}, slices({"a": x}), generator({"a": x})],
        "a tuple of four": [slices((x, y, y, y)), generator((x, y, y, y))],
        "a tuple of a dict": [Items({"a": x})],
    }
    forms = {
        "an array": x,
        "a tuple of one": (x,),
        "a dict": {"a": x},
        "a tuple of four": (x, y, y, y),
        "a tuple of a dict": ({"a": x},),
    }
    for kind, examples in kinds.items():
        for data in examples:
            trained = next(given(data, 4 if needs_batch(data) else None).batches(0))
            whole = data.batch(4) if isinstance(data, tf.data.Dataset) and needs_batch(data) else data
            evaluated = next(iter(validation_batches(whole, SingleBackend(None), batch=4)))
            for batch in (trained, evaluated):
                assert batch.targets is None
                tf.nest.assert_same_structure(batch.inputs, forms[kind])
                for ours, theirs in zip(tf.nest.flatten(batch.inputs), tf.nest.flatten(forms[kind]), strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def needs_batch(data):
    if isinstance(data, tf.data.Dataset):
        return tf.nest.flatten(data.element_spec)[0].shape.rank == 1
    return isinstance(data, np.ndarray | tuple | dict)


def test_tensors_of_other_lengths_are_cut_by_themselves():
    """Six unlabeled samples and two labeled ones of one step, over two ranks."""
    element = (tf.range(6), (tf.range(2), tf.range(2) * 10))
    batches = [slice_batch(element, index, 2) for index in range(2)]
    assert [b.inputs.numpy().tolist() for b in batches] == [[0, 1, 2], [3, 4, 5]]
    assert [b.targets[1].numpy().tolist() for b in batches] == [[0], [10]]
    # Not both a multiple of the ranks; a bag of instances with one target; the edges and nodes of two graphs.
    for element in (
        (tf.range(6), (tf.range(3), tf.range(3))),
        (tf.range(6), tf.range(2)),
        ({"edges": tf.range(6), "nodes": tf.range(4)}, tf.range(2)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="give each rank whole batches of its own"):
            slice_batch(element, 0, 2)
        alone = slice_batch(element, 0, 1)
        assert [len(part) for part in tf.nest.flatten((alone.inputs, alone.targets))] == list(
            map(len, tf.nest.flatten(element))
        )


def test_a_batch_without_samples_has_slices_without_samples():
    """They count, as no replica has any: a placeholder would have to be a sample of another batch."""
    for index in range(2):
        batch = slice_batch((tf.zeros([0, 3]), (tf.zeros([0]), tf.zeros([0]))), index, 2)
        assert [each.shape[0] for each in tf.nest.flatten((batch.inputs, batch.targets))] == [0, 0, 0]
        assert (float(batch.has_samples), int(batch.global_samples)) == (1.0, 0)


@pytest.mark.parametrize(
    ("data", "kind", "cause"),
    [
        ((np.zeros(3), np.zeros(3)), ConfigError, r"Arrays need a batch: pass fit\(…, batch=N\)"),
        (tf.data.Dataset.range(3), DataError, "The dataset is not batched"),
        (tf.data.Dataset.from_tensor_slices((np.zeros((3, 2)), np.zeros(3))), DataError, "The dataset is not batched"),
        (dataset_of(10, 4).take(0), DataError, "The dataset is empty"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, kind, cause):
    with pytest.raises(kind, match=cause):
        given(data)


def test_a_dataset_is_batched_once():
    samples = tf.data.Dataset.from_tensor_slices((np.zeros((12, 8)), np.zeros((12, 1))))
    with pytest.raises(ConfigError, match=r"comes in batches already: leave out batch_size \(or batch\)"):
        given(samples.batch(4).map(lambda x, y: (x, y)).prefetch(1), batch=4)
    windows = given(samples.batch(4, drop_remainder=True), batch=3)
    assert next(windows.batches(0)).inputs.shape == (3, 4, 8)
    for outcome in on_ranks(2, lambda backend: given(samples, backend=backend)):
        assert str(outcome).startswith("If the elements of the dataset are samples, batch them: dataset.batch(N). ")


def test_ranks_that_read_another_order_are_named():
    datasets = dataset_of(12, 6), dataset_of(12, 6), dataset_of(12, 6).map(lambda x, y: (11 - x, y))
    for outcome in on_ranks(3, lambda backend: given(datasets[backend.index], backend=backend)):
        assert str(outcome).startswith("Rank 2 reads the training data in another order than rank 0")


# -- arrays --


@pytest.mark.parametrize(
    ("elements", "cause"),
    [
        ((np.zeros(3),) * 4, r"mine must be \(inputs, targets\), .*\(inputs,\). Received: a tuple of 4"),
        (None, r"mine must be \(inputs, targets\), .* Received: NoneType"),
        ((np.zeros(3), np.zeros(4)), "arrays of mine differ in length: 3, 4 samples"),
        (({"a": np.zeros(3), "b": np.zeros(2)}, np.zeros(3)), "arrays of mine differ in length: 2, 3 samples"),
        ((np.zeros(3), np.zeros(3), np.zeros(1)), "arrays of mine differ in length: 1, 3 samples"),
        ((np.zeros(3), 5), "arrays of mine differ in length: 0, 3 samples"),
        ((np.zeros((0, 4)), np.zeros(0)), "mine holds no samples"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(elements, cause):
    with pytest.raises(DataError, match=cause):
        ArraySource(elements, "mine")


# -- named sources --


def test_digits_are_split_as_promised():
    splits = load_splits(DataConfig("digits"))
    assert (splits.train.size, splits.validation.size) == (1437, 360)
    assert (splits.sample_shape, splits.classes) == ((8, 8, 1), 10)
    for source in (splits.train, splits.validation):
        images, labels = source.gather(tf.range(source.size))
        assert images.shape[1:] == splits.sample_shape
        assert (float(tf.reduce_min(images)), float(tf.reduce_max(images))) == (0.0, 1.0)
        shares = np.bincount(labels.numpy()) / source.size
        assert (abs(shares - 0.1) < 0.01).all()  # stratified
    first, again = (load_splits(DataConfig("digits")).validation.gather(tf.range(360))[1].numpy() for _ in range(2))
    assert (first == again).all()


def test_the_digits_are_those_of_the_repository():
    """Fingerprints of runs hold: the values, their order and what is held out have not changed."""
    images, labels = load_digits()
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 8, 8, 1), np.float32, np.int32)
    table = np.concatenate([images.reshape(-1, 64) * 16, labels[:, np.newaxis]], axis=1).astype(np.uint8)
    assert (
        hashlib.sha256(table.tobytes()).hexdigest()
        == "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
    )
    assert (
        load_splits(DataConfig("digits")).validation.fingerprint().hex()
        == "147bac8337b9715e75a050a5f40fa8a37d4bab2f2f7cd7a0eddbeea16020673b"
    )


def test_synthetic_images_are_what_was_asked_for():
    splits = load_splits(DataConfig("synthetic_images", {"size": 4, "samples": 80, "classes": 3, "nan_at": 7}))
    images, labels = (array.numpy() for array in splits.train.elements)
    assert (splits.train.size, splits.validation.size) == (80, 10)
    assert images.shape == (80, 4, 4, 3)
    assert set(labels) == {0, 1, 2}
    assert np.argwhere(np.isnan(images)).tolist() == [[7, 0, 0, 0]]
    assert not np.isnan(splits.validation.elements[0]).any()


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (DataConfig("digit"), "Unknown dataset 'digit'. Perhaps you meant: digits."),
        (DataConfig("digits", {"size": 8}), "The dataset 'digits' takes no argument 'size'."),
        (DataConfig("synthetic_images", {"size": "8"}), "'size' of the dataset 'synthetic_images' must be int"),
    ],
)
def test_an_unknown_source_or_argument_is_refused(config, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        load_splits(config)


def test_what_bounds_the_reading_reaches_tf_data():
    elements = tf.data.Dataset.range(4)
    for reading, threads, budget in (
        (ReadOptions(threads=3, memory_mb=64), 3, 64 * 2**20),
        (ReadOptions(), None, None),
    ):
        options = reading.batches(elements, lambda number: number, heavy=True).options()
        assert options.deterministic
        assert options.threading.private_threadpool_size == threads
        assert options.autotune.ram_budget == budget
