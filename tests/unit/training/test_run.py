"""The order of what happens between two steps."""

import keras
import pytest

from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.runtime.session import current
from hvdtrain.training.callbacks import saving
from hvdtrain.training.elastic import Commits
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan
from hvdtrain.training.run import Run
from hvdtrain.training.trainer import Trainer
from tests.builders import dense, samples

pytestmark = pytest.mark.usefixtures("session")


def run_with(monkeypatch, folder, **options):
    """A run with all that a training may have."""
    trainer = Trainer(dense(), "sgd", "sparse_categorical_crossentropy", **options)
    data = training_data(samples(32), trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    monkeypatch.setattr(saving, "HostsCheck", lambda session, backend: None)
    return Run(
        trainer,
        data,
        Plan(4, commit_every=2),
        callbacks=[keras.callbacks.TerminateOnNaN()],
        save=BackgroundSaver(Checkpointer(folder, backend=trainer.backend), current().control),
        stopping=object(),
        commits=Commits(),
    )


def test_nothing_is_saved_before_it_was_looked_at_nor_before_callbacks_have_decided(monkeypatch, tmp_path):
    listed = [type(each).__name__ for each in run_with(monkeypatch, tmp_path)._callbacks()]
    assert listed == [
        *["Totals", "KerasBatches", "BadSteps", "TrainingReport", "DataWait"],
        *["KerasStops", "EpochEnds", "KerasStops", "Saving", "Stopping", "Committing"],
    ]


def test_what_a_training_lacks_is_not_in_the_list(session):
    trainer = Trainer(dense(), "sgd", "sparse_categorical_crossentropy")
    data = training_data(samples(32), trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    listed = [type(each).__name__ for each in Run(trainer, data, Plan(4))._callbacks()]
    assert listed == ["Totals", "BadSteps", "TrainingReport", "DataWait", "EpochEnds"]
