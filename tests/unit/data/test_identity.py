"""A run goes on with the samples that it began with, and with no others."""

import json
import shutil
from dataclasses import replace

import keras
import numpy as np
import pytest

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import CheckpointError, DataError
from hvdtrain.config.model import ModelConfig
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.identity import check_same_samples, identity_of
from hvdtrain.data.source import DataSplits
from hvdtrain.recipes import recipe
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.run import train as train_in_process


def splits(count=10, first=0.0):
    x = np.arange(count, dtype="float32")
    x[0] = first
    train = ArraySource((x, x), "training")
    return DataSplits(train, ArraySource((np.zeros(4), np.zeros(4)), "validation"), (), None)


def test_the_same_samples_are_known_again_from_a_file():
    saved = json.loads(json.dumps(identity_of(splits())))
    check_same_samples(saved, identity_of(splits()), "run")


@pytest.mark.parametrize(
    ("other", "told"), [(splits(11), "11 now and 10 before"), (splits(first=9), "10 now and before, but others")]
)
def test_other_samples_are_refused_with_what_differs(other, told):
    with pytest.raises(DataError) as raised:
        check_same_samples(identity_of(splits()), identity_of(other), "run")
    assert str(raised.value).startswith("--resume run: the training samples are not those that the run was trained")
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_validation_samples_are_refused():
    other = replace(splits(), validation=ArraySource((np.ones(4), np.zeros(4)), "validation"))
    with pytest.raises(DataError, match="the validation samples are not those"):
        check_same_samples(identity_of(splits()), identity_of(other), "run")


# -- runs --


def train(*args, **options):
    """Train as in a process of its own: Keras numbers the optimizers of one."""
    keras.utils.clear_session(free_memory=False)
    return train_in_process(*args, **options)


@pytest.fixture
def begun(session, tmp_path):
    """A run of three steps on 40 samples in a file."""
    write(tmp_path / "data.npz", 40)
    train(session, config_of(tmp_path / "data.npz"), tmp_path / "run")
    return RunFolder(tmp_path / "run")


def write(path, count, classes=3):
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.random((count, 4)).astype("float32"), y=np.arange(count) % classes)


def config_of(path, steps=3):
    base = recipe("digits")
    return replace(
        base,
        model=ModelConfig("mlp", {"depth": 1, "width": 4}),
        data=DataConfig("arrays", {"path": str(path)}, batch=8, eval_batch=8),
        training=replace(base.training, max_steps=steps),
        observability=replace(base.observability, tensorboard=False, plots=False),
    )


def index_of(folder):
    return max(folder.checkpoints.glob("step-*")) / "index.json"


@pytest.mark.extended
def test_a_run_goes_on_with_the_samples_that_it_began_with(session, begun, tmp_path):
    saved = json.loads(index_of(begun).read_text())["scalars"]["data"]
    assert (saved["training"]["samples"], saved["validation"]["samples"]) == (36, 4)
    config = config_of(tmp_path / "data.npz", steps=4)
    assert train(session, config, begun.path, resume="yes")["resumed_from"] == 3
    write(tmp_path / "data.npz", 41)
    with pytest.raises(DataError, match=r"--resume .*run: the training samples .* \(37 now and 36 before\)"):
        train(session, config_of(tmp_path / "data.npz", steps=5), begun.path, resume="yes")


@pytest.mark.extended  # trains four times
def test_a_run_that_a_queue_starts_once_more_is_left_alone_when_it_is_finished(session, begun, tmp_path, capsys):
    config = config_of(tmp_path / "data.npz", steps=3)
    before = index_of(begun).read_bytes()
    assert train(session, config, begun.path, resume="auto") == {}
    assert f"--resume auto: the run in {begun.path} is finished: there is nothing left" in capsys.readouterr().out
    # Killed between its last checkpoint and its results: these are written.
    begun.summary.unlink()
    begun.model.unlink()
    assert train(session, config, begun.path, resume="auto")["steps"] == 3
    assert begun.model.is_file()
    assert index_of(begun).read_bytes() == before
    # Nothing good is left: it does not begin anew until the damaged ones are removed.
    for path in begun.checkpoints.glob("step-*"):
        (path / "index.json").unlink()
    assert train(session, config, begun.path, resume="auto") == {}, "its results are there"
    begun.summary.unlink()
    with pytest.raises(CheckpointError, match=f"rm -r {begun.checkpoints}$"):
        train(session, config, begun.path, resume="auto")
    shutil.rmtree(begun.checkpoints)
    assert train(session, config, begun.path, resume="auto")["resumed_from"] == 0
    shutil.rmtree(begun.checkpoints)
    with pytest.raises(CheckpointError, match="--resume takes a run with a checkpoint"):
        train(session, config, begun.path, resume="yes")
