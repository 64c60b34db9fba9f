"""Which samples form which batch."""

import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.file_order import WINDOW, FileOrder
from hvdtrain.data.order import Order
from hvdtrain.data.pipeline import SourceTraining


def epoch_of(order, epoch, index=0, size=1):
    """Return the numbers of a replica's samples in each batch of an epoch, without placeholders."""
    full, counts = order.full_batches, getattr(order, "counts", order)
    steps = [*order.slice_numbers(epoch, 0, full, counts.batch, index, size).numpy()] if full else []
    if order.rest:
        kept = order.rest * (index + 1) // size - order.rest * index // size
        steps.append(order.slice_numbers(epoch, full, 1, order.rest, index, size).numpy()[0][:kept])
    return steps


@pytest.mark.parametrize(
    ("tail", "samples", "lengths"),
    [
        ("pad", 10, [4, 4, 2]),
        ("drop", 10, [4, 4]),
        ("repeat", 10, [4, 4, 4]),
        ("pad", 8, [4, 4]),
        ("drop", 8, [4, 4]),
        ("repeat", 8, [4, 4]),
        ("pad", 3, [3]),
        ("repeat", 3, [4]),
    ],
)
def test_what_becomes_of_the_last_samples(tail, samples, lengths):
    order = Order(samples, 4, seed=1, tail=tail)
    batches = epoch_of(order, 2)
    assert [len(batch) for batch in batches] == lengths
    assert order.steps_per_epoch == len(lengths)
    seen = np.concatenate(batches)
    whole = epoch_of(Order(samples, samples, seed=1), 2)[0]
    assert sorted(whole) == list(range(samples))
    if tail == "repeat":
        assert (seen == np.concatenate([whole, whole])[: len(seen)]).all()
    else:
        assert (seen == whole[: len(seen)]).all()


def test_drop_needs_one_full_batch():
    with pytest.raises(ConfigError, match="--tail drop would leave nothing of 3 samples"):
        Order(3, 4, seed=0, tail="drop")


def test_epochs_and_seeds_differ_and_repeat():
    def visited(seed, epoch):
        return epoch_of(Order(50, 50, seed=seed), epoch)[0].tolist()

    assert visited(0, 0) == visited(0, 0)
    assert len({tuple(visited(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert epoch_of(Order(50, 50, seed=0, shuffle=False), 3)[0].tolist() == list(range(50))


class InFiles(ArraySource):
    """Samples that are their own numbers, in files of different lengths."""

    def __init__(self, *lengths):
        super().__init__((np.arange(sum(lengths)), np.zeros(sum(lengths))))
        self.file_of = np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("tail", ["pad", "drop", "repeat"])
@pytest.mark.parametrize("lengths", [(5, 9, 2, 7), (23,), (1, 1, 35)])
def test_by_files_every_sample_comes_once_an_epoch(lengths, tail, size):
    order = FileOrder(InFiles(*lengths), 6, seed=2, tail=tail)
    total = sum(lengths)
    for epoch in (0, 1):
        parts = [epoch_of(order, epoch, index, size) for index in range(size)]
        assert len({len(part) for part in parts}) == 1
        seen = np.concatenate([np.concatenate(part) for part in parts])
        if tail == "pad":
            assert sorted(seen) == list(range(total))
        elif tail == "drop":
            assert len(set(seen)) == len(seen) == total // 6 * 6
        else:
            assert len(seen) == -(-total // 6) * 6
            assert set(seen) == set(range(total))


def test_by_files_each_replica_reads_few_files_from_first_to_last():
    lengths = [30_000] * 8
    order = FileOrder(InFiles(*lengths), 8, seed=0)
    mine = np.concatenate(epoch_of(order, 0, 1, 4))
    files = mine // 30_000
    assert len(set(files)) == 2
    first = files == files[0]
    within = mine[first] % 30_000
    assert np.abs(np.argsort(np.argsort(within)) - np.arange(len(within)))[5000:-20_000].max() <= WINDOW
    assert (np.diff(within) < 0).any()


def test_by_files_the_pipeline_reads_the_same_samples():
    source = InFiles(5, 9, 2, 7)
    parts = []
    for index in range(4):
        data = SourceTraining(source, batch=8, index=index, size=4, seed=0, shard_by="files")
        stream = data.batches(0)
        parts += [batch.inputs.numpy() for batch in (next(stream) for _ in range(3)) if float(batch.has_samples)]
    assert sorted(np.concatenate(parts)) == list(range(23))


@pytest.mark.parametrize(("tail", "count"), [("pad", 3), ("repeat", 8)])
def test_by_files_there_may_be_fewer_samples_than_replicas(tail, count):
    order = FileOrder(InFiles(2, 1), 8, seed=2, tail=tail)
    parts = [epoch_of(order, 0, index, 8) for index in range(8)]
    seen = np.concatenate([np.concatenate(part) for part in parts])
    assert len(seen) == count
    assert set(seen) == {0, 1, 2}


def test_by_files_the_files_need_not_lie_in_order():
    source = InFiles(3, 3)
    source.file_of = np.array([7, 2, 7, 2, 2, 7])
    order = FileOrder(source, 6, seed=0, shuffle=False)
    assert epoch_of(order, 0)[0].tolist() == [1, 3, 4, 0, 2, 5]


def test_by_files_needs_files():
    with pytest.raises(ConfigError, match="--shard-by files is for samples in files"):
        FileOrder(ArraySource((np.zeros(3), np.zeros(3))), 2, seed=0)
