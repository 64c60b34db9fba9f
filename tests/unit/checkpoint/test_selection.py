"""Which epoch is the best, that its checkpoint stays, and how it is found."""

from dataclasses import asdict

import keras
import pytest

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.selection import find_checkpoint
from hvdtrain.config.checkpoint import BestMetric, CheckpointConfig, best_metric
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.training.inputs import training_data, validation_batches
from hvdtrain.training.plan import Plan
from hvdtrain.training.trainer import Trainer
from tests.builders import dense, samples

X, Y = samples(32)
LOWEST = BestMetric("val_loss", "min")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_root_mean_squared_error", "min"),
        ("categorical_crossentropy", "min"),
        ("val_accuracy", "max"),
        ("sparse_top_k_categorical_accuracy", "max"),
        ("auc_1", "max"),
        ("val_f1_score", "max"),
        ("mean_io_u", "max"),
        ("cosine_similarity", "max"),
        ("accuracy_loss", "min"),
    ],
)
def test_the_name_tells_the_mode(name, mode):
    assert best_metric(name, "auto").mode == mode


def test_a_name_that_does_not_tell_the_mode_asks_for_it():
    with pytest.raises(ConfigError, match=r"Received: 'wins'.*, or set --keep-best-mode to min or max"):
        CheckpointConfig(keep_best="wins")
    assert CheckpointConfig(keep_best="wins", keep_best_mode="max").best == BestMetric("wins", "max")
    assert CheckpointConfig(keep_best="none").best is None


def test_only_a_better_figure_improves():
    highest = BestMetric("accuracy", "max")
    assert highest.improves(0.5, None)
    assert not highest.improves(float("nan"), None)
    assert highest.improves(0.6, 0.5)
    assert not highest.improves(0.5, 0.5)
    assert not highest.improves(float("nan"), 0.5)
    assert LOWEST.improves(0.4, 0.5)


def saved(folder, best_of, keep=1):
    """Save a checkpoint for each step of `best_of`, with the step that was the best by then."""
    for step, best in best_of.items():
        record = best and {"metric": "val_loss", "mode": "min", "value": 1.0, "step": best}
        Checkpointer(folder, keep).save(step, {}, {"step": step, "best": record})


def test_the_best_stays_beside_the_newest(tmp_path):
    saved(tmp_path, {10: 10, 20: 20, 30: 20, 40: 20})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000040"]
    assert find_checkpoint(tmp_path, "best").name == "step-00000020"
    assert find_checkpoint(tmp_path, "newest").name == "step-00000040"
    assert find_checkpoint(tmp_path, "20").name == "step-00000020"
    assert Checkpointer(tmp_path).find("best").name == "step-00000020"


def test_what_is_not_there_is_named_with_what_is(tmp_path):
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        find_checkpoint(tmp_path, "best")
    saved(tmp_path, {10: None, 20: None}, keep=2)
    with pytest.raises(CheckpointError, match=r"recorded no best .*--keep-best METRIC.* It holds the steps 10, 20\."):
        find_checkpoint(tmp_path, "best")
    with pytest.raises(CheckpointError, match=r"step 15 is not in .* It holds the steps 10, 20\."):
        find_checkpoint(tmp_path, "15")
    with pytest.raises(CheckpointError, match=r"best, newest, or the number of a step. Received: 'last'"):
        find_checkpoint(tmp_path, "last")


def trainer_of(rate):
    model = dense(activation="softmax")
    return Trainer(model, keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", ["accuracy"])


def train(trainer, folder, epochs, best, every=None):
    """Train to the end of `epochs`, saving every few steps and the best epochs, and return the validation losses."""
    data = training_data((X, Y), trainer.backend, batch=8, seed=0, shuffle=True, steps_per_epoch=None)
    trainer.build(data)
    files = Checkpointer(folder, keep=1)

    def save(state):
        files.save(state.scalars.step, state.named_tensors(), asdict(state.scalars))

    validation = validation_batches((X, Y), trainer.backend, batch=16)
    plan = Plan(epochs * data.steps_per_epoch, checkpoint_every=every, best=best)
    result = trainer.train(data, plan, validation=validation, save=save)
    return {record.step: record.loss for record in result.evaluations}


@pytest.mark.extended
@pytest.mark.usefixtures("session")
def test_the_best_epoch_is_saved_although_it_is_not_due_and_stays_over_a_resume(tmp_path):
    first = trainer_of(0.3)
    losses = train(first, tmp_path, 3, LOWEST, every=7)
    assert min(losses, key=losses.get) == 12, "each epoch improves here"
    assert find_checkpoint(tmp_path, "best").name == "step-00000012"

    worse = trainer_of(0.0)
    worse.build(training_data((X, Y), worse.backend, batch=8, seed=0, shuffle=True, steps_per_epoch=None))
    worse.restore(find_checkpoint(tmp_path))
    worse.optimizer.learning_rate.assign(-1.0)
    losses |= train(worse, tmp_path, 5, LOWEST, every=7)
    assert losses[20] > losses[12], "it climbs now"
    assert find_checkpoint(tmp_path, "best").name == "step-00000012"
    assert find_checkpoint(tmp_path).name == "step-00000020"

    again = trainer_of(0.0)
    again.build(training_data((X, Y), again.backend, batch=8, seed=0, shuffle=True, steps_per_epoch=None))
    again.restore(find_checkpoint(tmp_path))
    train(again, tmp_path, 6, BestMetric("val_loss", "max"), every=7)
    assert again.state.scalars.best["step"] == 24, "by another rule nothing was the best so far"


@pytest.mark.usefixtures("session")
def test_the_best_may_be_chosen_by_a_metric_of_training(tmp_path):
    trainer = trainer_of(0.3)
    train(trainer, tmp_path, 2, BestMetric("accuracy", "max"))
    assert trainer.state.scalars.best["metric"] == "accuracy"
    assert 0 <= trainer.state.scalars.best["value"] <= 1


@pytest.mark.usefixtures("session")
def test_a_metric_that_no_epoch_has_is_refused_before_the_first_step(tmp_path):
    trainer = trainer_of(0.3)
    with pytest.raises(ConfigError, match=r"Received: 'val_auc'. It has loss, accuracy, val_loss, val_accuracy"):
        train(trainer, tmp_path, 2, BestMetric("val_auc", "max"))
    assert trainer.state.scalars.step == 0
