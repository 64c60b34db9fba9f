"""`RunInfo` of a user's script, and its progress display."""

from typing import Any

import keras

from hvdtrain.backends.protocol import Backend, split_axes, world_size
from hvdtrain.compat.keras_variables import rate_or_schedule
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import Observer, RunInfo
from hvdtrain.observability.wording import figures_of, formatted, joined
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.logs import PROGRESS, on_terminal
from hvdtrain.state.optimizers import rate_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.options import StepOptions
from hvdtrain.training.plan import Plan


def run_info(backend: Backend, state: TrainState, options: StepOptions, data: TrainingData, plan: Plan) -> RunInfo:
    """Return the facts about a run for observers, before its first step."""
    session = backend.session
    return RunInfo(
        recipe=str(state.model.name),
        **who_trains(backend),
        launcher=session.environment.launcher,
        global_batch=data.batch,
        per_replica_batch=data.batch // backend.data_parallel.size,
        total_steps=plan.total_steps,
        steps_per_epoch=data.steps_per_epoch,
        parameters=state.parameters(),
        start_step=state.scalars.step,
        begin_epoch=state.scalars.epoch + plan.epoch_offset,
        begin_step=state.scalars.step - state.scalars.step_in_epoch,
        accumulate=options.accumulate,
        learning_rate=_rate_of(state.optimizer),
        options=options.chosen(),
        threads=session.plan.threads,
    )


def console_for(backend: Backend, verbose: str | int = "auto") -> Observer:
    """Return the progress display on rank 0, a no-op elsewhere.

    `verbose` is "auto" or 1 for a live display on a terminal and lines elsewhere, 2 for a line per epoch, 0 for none.
    Raises ConfigError for another value.
    """
    check_verbose(verbose)
    if not backend.primary or not verbose:
        return Observer()
    if verbose == 2:
        return make_console(live=False, steps=False)
    return make_console(live=on_terminal(backend.session.environment))


def check_verbose(verbose: str | int) -> None:
    """Reject values of `verbose` that Keras does not have. Raises ConfigError with the value."""
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigError(f'verbose is "auto", 0, 1 or 2. Received: {verbose!r}.')


def show_evaluation(outcome: Evaluation, backend: Backend, verbose: str | int) -> None:
    """Print an evaluation's metrics on rank 0, unless `verbose` is 0."""
    check_verbose(verbose)
    if backend.primary and verbose:
        PROGRESS.info(joined("evaluation", *formatted(figures_of(outcome.as_dict()))))


def who_trains(backend: Backend) -> dict[str, Any]:
    """Return the backend's fields of `RunInfo`."""
    roles = backend.roles
    return {
        "backend": backend.name,
        "world_size": world_size(backend),
        "controller": backend.transport,
        "processes": None if roles else backend.processes,
        "roles": roles,
        "axes": split_axes(backend),
    }


def _rate_of(optimizer: Any) -> str:
    """Describe the learning rate."""
    optimizer = innermost(optimizer)
    value, schedule = f"{float(rate_of(optimizer)):g}", rate_or_schedule(optimizer)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return f"{value} now, by {type(schedule).__name__}"
    return value
