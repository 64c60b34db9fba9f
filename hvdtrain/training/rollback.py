"""Roll back to the newest good checkpoint within a training."""

from collections.abc import Callable

from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.restore import restore
from hvdtrain.config.errors import CheckpointError, ConfigError, opt
from hvdtrain.state.scalars import Scalars, scalars_from
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.base import UpdateRule


def check_rollback(options: StepOptions, *, saves: bool) -> None:
    """Reject rollbacks in a training without checkpoints. Raises ConfigError naming the option."""
    if options.on_bad_step == "rollback" and not saves:
        raise ConfigError(
            f"{opt('on_bad_step', 'rollback')} goes back to the newest checkpoint of the training. Received: a "
            "training that "
            f"saves none. Pass fit(…, checkpoint=FOLDER), or use {opt('on_bad_step', 'skip')}."
        )


def rollback_to(saver: BackgroundSaver, backend: Backend, state: TrainState, rule: UpdateRule) -> Callable[[], Scalars]:
    """Return a function that restores the newest good checkpoint's tensors. Collective.

    It returns the checkpoint's scalars but leaves those of `state` unchanged: steps and the position in the data
    continue. It raises CheckpointError if there is no good checkpoint.
    """

    def roll_back() -> Scalars:
        path = saver.files.find_to_go_on()
        if path is None:
            raise CheckpointError("There is no good checkpoint to roll back to: all are damaged, or were removed.")
        saved = scalars_from(restore(path, state.named_tensors(), backend))
        rule.on_state_loaded()
        return saved

    return roll_back
