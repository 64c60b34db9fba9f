"""What the state holds while it is saved, and after."""

from types import SimpleNamespace

import pytest

from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.loop.hooks import Actions, Outcome
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.loop.saving_hooks import SavingHooks


class Callbacks:
    """Keras callbacks with a state and weights."""

    def states(self):
        return [{"wait": 1}]

    def held_weights(self, paths):
        return {"callback/0": "weights"}


class Failing:
    """Fails at one of the stages of saving a state."""

    def __init__(self, stage):
        self._stage = stage
        self.seen = None

    def at(self, stage, state):
        if stage == "commit":
            self.seen = (state.scalars.progress.callbacks, state.scalars.progress.metrics, state.held_weights)
        if stage == self._stage:
            raise KeyError(stage)


def hooks(state, failing):
    def stage(name):
        return lambda: failing.at(name, state)

    actions = Actions(
        evaluate=None,
        prepare_to_evaluate=None,
        consolidate=None,
        prepare_to_save=stage("prepare"),
        averaged_weights=None,
        save=None,
        commit=stage("commit"),
    )
    step = SimpleNamespace(metric_sums=lambda: {"accuracy": [1.0]})
    rule = SimpleNamespace(guard=None)
    return SavingHooks(Plan(total_steps=9), state, rule, step, actions, Callbacks(), Activity(), speaks=True)


def commit(failing):
    """Commit a state in the middle of an epoch and return what it holds afterwards."""
    state = SimpleNamespace(scalars=Scalars(), held_weights={}, weight_paths=dict)
    state.scalars.step = state.scalars.step_in_epoch = 3
    end = SimpleNamespace(last=False, ends_epoch=False, outcome=Outcome.CONTINUE, number=3)
    try:
        hooks(state, failing)._commit(end)
    finally:
        after = (state.scalars.progress.callbacks, state.scalars.progress.metrics, state.held_weights)
        assert after == ([], {}, {})


def test_a_state_holds_what_callbacks_and_metrics_remember_only_while_it_is_saved():
    failing = Failing(stage=None)
    commit(failing)
    assert failing.seen == ([{"wait": 1}], {"accuracy": [1.0]}, {"callback/0": "weights"})


@pytest.mark.parametrize("stage", ["prepare", "commit"])
def test_a_save_that_fails_leaves_nothing_of_them_in_the_state(stage):
    with pytest.raises(KeyError, match=stage):
        commit(Failing(stage))
