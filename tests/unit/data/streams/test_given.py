"""What `fit` and `evaluate` are given must be the same on every rank."""

from threading import BrokenBarrierError

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.streams.given import in_step
from hvdtrain.training.evaluation.predict import prediction_batches
from hvdtrain.training.inputs import training_data, validation_batches
from tests.unit.gathering import on_ranks

X = np.arange(48, dtype="float32").reshape(-1, 1)
Y = np.zeros(48)
NOISE = np.random.default_rng()


class Batches(keras.utils.PyDataset):
    """Global batches of four of the first samples."""

    def __init__(self, samples):
        super().__init__()
        self.samples = samples

    def __len__(self):
        return self.samples // 4

    def __getitem__(self, number):
        return X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]


def dataset(samples=48, batch=4):
    return tf.data.Dataset.from_tensor_slices((X[:samples], Y[:samples])).batch(batch)


def generator(samples=48):
    def batches():
        for number in range(samples // 4):
            yield X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]

    return batches


def uncounted(samples=48):
    """Of so many samples, which nobody knows before they are read."""
    return dataset(samples).filter(lambda x, y: True)


def fit_on(*data, batch=None, steps_per_epoch=None):
    """Return what each rank says of the data that it is given to train on."""
    return on_ranks(
        len(data),
        lambda backend: training_data(
            data[backend.index],
            backend,
            batch=batch[backend.index] if isinstance(batch, tuple) else batch,
            seed=0,
            shuffle=True,
            steps_per_epoch=steps_per_epoch,
        ),
    )


def evaluate_on(*data):
    """Return what each rank says of the data that it is given to evaluate, or how many batches it had."""
    return on_ranks(
        len(data), lambda backend: sum(1 for _ in validation_batches(data[backend.index], backend, batch=4))
    )


def refused(outcomes):
    """Return the one message that all ranks end with."""
    assert all(isinstance(outcome, DataError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.mark.parametrize(
    ("data", "batch"),
    [((X, Y), 4), (dataset(), None), (dataset(batch=1).unbatch(), 4), (Batches(48), None), (generator(), None)],
    ids=["arrays", "batched", "unbatched", "PyDataset", "generator"],
)
def test_the_same_data_on_every_rank_are_taken(data, batch):
    assert [outcome.steps_per_epoch for outcome in fit_on(data, data, batch=batch)] == [12, 12]


def test_a_slice_of_arrays_for_each_rank_is_refused():
    said = refused(fit_on((X[0::2], Y[0::2]), (X[1::2], Y[1::2]), batch=4))
    assert said.startswith("The training samples of rank 1 are not those of rank 0.")
    assert "x[rank::size]" in said


def test_arrays_of_different_lengths_are_refused_with_their_lengths():
    said = refused(fit_on((X, Y), (X, Y), (X[:32], Y[:32]), batch=12))
    assert said.startswith("The training data have 32 samples on rank 2 and 48 on rank 0.")


@pytest.mark.parametrize("of", [dataset, uncounted, Batches, generator])
def test_batches_that_are_more_on_one_rank_are_refused(of):
    said = refused(fit_on(of(48), of(32)))
    assert said.startswith("The training data have 8 batches on rank 1 and 12 on rank 0.")
    assert "shard()" in said


def test_a_dataset_that_is_longer_than_an_epoch_has_one_length_on_every_rank():
    """The shorter one would begin anew before the other: different batches from then on."""
    said = refused(fit_on(dataset(48), dataset(32), steps_per_epoch=4))
    assert said.startswith("The training data have 8 batches on rank 1 and 12 on rank 0.")
    taken = fit_on(dataset(48).repeat(), dataset(32).repeat(), steps_per_epoch=4)
    assert [data.steps_per_epoch for data in taken] == [4, 4], "nobody knows where those begin anew"
    taken = fit_on(dataset(), dataset(), steps_per_epoch=4)
    assert [data.steps_per_epoch for data in taken] == [4, 4]


def test_a_dataset_that_is_sharded_is_refused():
    shards = [tf.data.Dataset.from_tensor_slices((X, Y)).shard(2, rank).batch(4) for rank in range(2)]
    said = refused(fit_on(*shards))
    assert said.startswith("Rank 1 reads the training data in another order than rank 0")
    assert "shard()" in said


def drawing(labels, reverse=False):
    """Samples that a parallel map adds random numbers to, as each rank draws them."""
    rows = (X[::-1], labels[::-1]) if reverse else (X, labels)

    def noisy(x, y):
        noise = tf.numpy_function(lambda: np.float32(NOISE.random()), [], tf.float32)
        return x + tf.ensure_shape(noise, []), y

    return tf.data.Dataset.from_tensor_slices(rows).map(noisy, num_parallel_calls=tf.data.AUTOTUNE).batch(4)


def test_ranks_may_draw_their_own_augmentation_where_the_rest_shows_the_order():
    labels = np.arange(48)
    taken = fit_on(drawing(labels), drawing(labels))
    assert [data.steps_per_epoch for data in taken] == [12, 12]
    assert evaluate_on(drawing(labels), drawing(labels)) == [12, 12]
    said = refused(fit_on(drawing(labels), drawing(labels, reverse=True)))
    assert said.startswith("Rank 1 reads the training data in another order than rank 0")


def test_an_order_that_nothing_shows_is_refused_with_the_cure():
    said = refused(fit_on(drawing(Y), drawing(Y)))
    assert said.startswith("Rank 1 reads the training data in another order than rank 0")
    assert "where it leaves no part of a batch as it is, add one that shows which samples it holds" in said


def without_order(data):
    options = tf.data.Options()
    options.deterministic = False
    return data.with_options(options)


@pytest.mark.parametrize(
    "unordered",
    [
        lambda: dataset().map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False),
        lambda: dataset().batch(1, num_parallel_calls=2, deterministic=False).unbatch(),
        lambda: tf.data.Dataset.range(2).interleave(lambda _: dataset(), num_parallel_calls=2, deterministic=False),
        lambda: without_order(dataset()),
    ],
    ids=["map", "batch", "interleave", "options"],
)
def test_an_order_that_depends_on_timing_is_refused_by_name(unordered):
    said = refused(fit_on(unordered(), unordered()))
    assert said.startswith("The order of the training data depends on timing (deterministic=False)")
    assert "order of the validation data" in refused(evaluate_on(unordered(), unordered()))
    assert fit_on(unordered(), steps_per_epoch=2)[0].steps_per_epoch == 2, "a rank alone may have any"


def test_one_file_for_the_caches_of_several_ranks_is_refused(tmp_path):
    def cached(name):
        return dataset().cache(str(tmp_path / name)).map(lambda x, y: (x, y))

    # A file for each job: tracebacks keep the refused iterators, and their locks, until they are collected.
    for file, read in (("fitted", fit_on), ("evaluated", evaluate_on)):
        # A rank that meets the other's lock ends the job, before the two have compared their files.
        said = refused([each for each in read(cached(file), cached(file)) if not isinstance(each, BrokenBarrierError)])
        assert f"to one file, '{tmp_path}/{file}'" in said
        assert 'dataset.cache(f"{file}-{hvdtrain.rank()}")' in said
    own = fit_on(cached("0"), cached("1"))
    assert [data.steps_per_epoch for data in own] == [12, 12]
    assert len(list(cached("all"))) == 12
    written = fit_on(cached("all"), cached("all"))  # is only read
    assert [data.steps_per_epoch for data in written] == [12, 12]


def test_batches_of_different_sizes_are_refused():
    said = refused(fit_on((X, Y), (X, Y), batch=(4, 8)))
    assert said == "The training batches of rank 1 hold 8 samples, and those of rank 0 4."
    assert "of rank 1 hold 8 samples" in refused(fit_on(dataset(), dataset(batch=8)))


def test_data_of_different_kinds_are_refused():
    said = refused(fit_on(dataset(), (X, Y), batch=(None, 4)))
    assert said.startswith("The training data of rank 1 are arrays, and those of rank 0 a Dataset.")


@pytest.mark.extended
@pytest.mark.parametrize("of", [lambda n: (X[:n], Y[:n]), dataset, uncounted, Batches, generator])
def test_validation_data_of_different_lengths_are_refused(of):
    assert evaluate_on(of(48), of(48)) == [12, 12]
    unit = "32 samples on rank 1 and 48" if isinstance(of(4), tuple) else "8 batches on rank 1 and 12"
    assert refused(evaluate_on(of(48), of(32))).startswith(f"The validation data have {unit} on rank 0.")


@pytest.mark.parametrize("of", [lambda x: x, lambda x: tf.data.Dataset.from_tensor_slices(x).batch(4)])
def test_inputs_that_differ_are_refused(of):
    def predict_on(*data):
        return on_ranks(
            2, lambda backend: sum(1 for _ in prediction_batches(of(data[backend.index]), backend, batch=4))
        )

    assert predict_on(X, X) == [12, 12]
    assert "prediction" in refused(predict_on(X, X + 1)).split("rank 0")[0]
    assert refused(predict_on(X, X[:32])).startswith("The prediction data have ")


def lengths_in_step(*data):
    """Return how many batches each rank sees of evaluation data in which the ranks meet at each batch."""
    return on_ranks(
        len(data), lambda backend: sum(1 for _ in in_step(validation_batches(data[backend.index], backend, batch=4)))
    )


@pytest.mark.parametrize("of", [uncounted, generator])
def test_batches_that_one_rank_lacks_are_noticed_before_they_are_used(of):
    assert lengths_in_step(of(48), of(48)) == [12, 12]
    said = refused(lengths_in_step(of(48), of(32), of(40)))
    assert said.startswith("The validation data have 8 batches on rank 1 and more on rank 0. Every rank is given all")
