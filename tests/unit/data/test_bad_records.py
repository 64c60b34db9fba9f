"""Samples that cannot be read are named, or left out where a few of them are tolerated."""

import re

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation, SourceTraining
from hvdtrain.data.sources.class_folders import scan
from hvdtrain.data.sources.images import ImageSource
from hvdtrain.runs.run_files import left_out_line
from tests.unit.images import write_folders


def damaged(folder, *places, size=0):
    files = write_folders(folder, each=10)
    for place in places:
        files[place].write_bytes(files[place].read_bytes()[:40])
    found = scan(folder)
    return ImageSource(found.blobs, found.labels, "mine", size=size)


def training(source, *, tolerated=0, index=0, size=1, gather=None, batch=4):
    return SourceTraining(
        source,
        batch=batch,
        index=index,
        size=size,
        seed=3,
        read_options=ReadOptions(tolerated=tolerated),
        gather=gather,
    )


def run(data, steps, start=0):
    stream = data.batches(start)
    return [next(stream) for _ in range(steps)]


def test_the_first_bad_record_is_named(tmp_path):
    source = damaged(tmp_path / "data", 13)
    for batches in (training(source).batches(0), iter(SourceEvaluation(source, batch=8, index=0, size=1))):
        with pytest.raises(DataError, match=r"bee/003\.png.*--on-bad-record skip:N"):
            for _, _ in zip(range(5), batches, strict=False):
                pass


def test_what_is_tolerated_does_not_count_and_all_else_does(tmp_path):
    source = damaged(tmp_path / "data", 2, 13)
    data = training(source, tolerated=2)
    for epoch in range(2):
        batches = run(data, 5, epoch * 5)
        weights = np.concatenate([batch.sample_weight.numpy() for batch in batches])
        assert weights.sum() == 18
        numbers = np.concatenate([data.order.slice_numbers(epoch, step, 1, 4, 0, 1).numpy()[0] for step in range(5)])
        assert sorted(numbers[weights == 0]) == [2, 13]
        labels = np.concatenate([batch.targets.numpy() for batch in batches])
        assert (labels == (numbers >= 10))[weights == 1].all()
    assert sorted(data.bad.found) == [2, 13]
    assert re.fullmatch(r".*ant/002\.png: .*(PNG|image).*", data.bad.found[2])


def test_a_run_that_goes_on_counts_what_was_left_out_before(tmp_path):
    source = damaged(tmp_path / "data", 2, 13)
    before = {"2": "data/ant/002.png: damaged"}
    data = training(source, tolerated=2)
    data.bad.recall(before)
    run(data, 5)
    assert sorted(data.bad.found) == [2, 13]
    assert data.bad.found[2] == before["2"]
    data = training(source, tolerated=1)
    data.bad.recall(before)
    with pytest.raises(DataError, match=r"2 samples of mine are bad, more than --on-bad-record skip:1"):
        run(data, 5)
    with pytest.raises(DataError, match=r"damaged\. 3 samples of mine are bad, more than --on-bad-record skip:2"):
        training(source, tolerated=2).bad.recall(dict.fromkeys("123", "damaged"))
    strict = training(source)
    strict.bad.recall(before)
    with pytest.raises(DataError, match=r"--on-bad-record skip:N leaves out"):
        run(strict, 5)


def test_resuming_reads_the_same(tmp_path):
    source = damaged(tmp_path / "data", 2, 13)
    whole = run(training(source, tolerated=2), 9)
    rest = run(training(source, tolerated=2), 4, start=5)
    for one, other in zip(whole[5:], rest, strict=True):
        kept = one.sample_weight.numpy() > 0
        assert (other.sample_weight.numpy() == one.sample_weight.numpy()).all()
        assert (one.inputs.numpy()[kept] == other.inputs.numpy()[kept]).all()


def test_the_ranks_count_together(tmp_path):
    source = damaged(tmp_path / "data", 2, 13)
    told = []

    def gather(mine):
        told.append(dict(mine))
        return [mine, {"13": "bee/003.png: bad"}]

    data = training(source, tolerated=1, gather=gather)
    data.bad.examine(tf.constant([2], tf.int64), ValueError("one"))
    with pytest.raises(DataError, match="2 samples of mine are bad"):
        data.bad.share()
    assert told == [{2: data.bad.found[2]}]


def test_the_ranks_count_together_in_evaluation(tmp_path):
    source = damaged(tmp_path / "data", 2, 13)
    parts = []
    for index in range(2):
        read_options = ReadOptions(tolerated=1)
        parts.append(
            SourceEvaluation(
                source, batch=7, index=index, size=2, read_options=read_options, gather=lambda mine: [mine]
            )
        )
    assert sum(len(list(part)) for part in parts) == 6  # each rank alone meets one of them
    theirs = [{"2": "ant/002.png: bad"}, {"13": "bee/003.png: bad"}]
    both = SourceEvaluation(
        source, batch=7, index=0, size=2, read_options=ReadOptions(tolerated=1), gather=lambda _: theirs
    )
    with pytest.raises(DataError, match="2 samples of mine are bad"):
        list(both)


def test_an_error_that_no_sample_explains_is_shown_as_it_is(tmp_path):
    source = damaged(tmp_path / "data")
    data = training(source)
    error = tf.errors.InternalError(None, None, "out of luck")
    with pytest.raises(tf.errors.InternalError, match="out of luck"):
        data.bad.examine(tf.constant([0, 1], tf.int64), error)


def test_what_was_left_out_is_told_in_a_line():
    assert left_out_line([], "summary.json") == ""
    assert left_out_line(["a: bad"], "summary.json") == "warning: 1 sample could not be read and did not count: a: bad"
    assert left_out_line(["a: bad", "b: bad"], "summary.json").endswith(
        "2 samples could not be read and did not count: a: bad (summary.json names all 2)"
    )


@pytest.mark.parametrize("word", ["skip", "skip:0", "skip:-1", "skip:x", "ignore"])
def test_wrong_words(word):
    with pytest.raises(ConfigError, match="--on-bad-record must be raise or skip:N"):
        DataConfig(on_bad_record=word)
