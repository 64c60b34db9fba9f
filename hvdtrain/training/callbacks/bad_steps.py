"""Policy for bad steps (NaN, Inf, loss spikes): report, count, then raise, skip or roll back."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import BadStepError, NonFiniteError, opt
from hvdtrain.config.training import BadStepConfig
from hvdtrain.observability.wording import plural
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.loss_monitor import BadStep

NAMED = 3
"""Bad steps named individually per read of the totals."""
ADVICE = f"A lower {opt('learning_rate')}, a warm-up or {opt('clip_norm')} may help."


class BadStepPolicy:
    """Counts bad steps in the state, and raises or rolls back. Collective."""

    def __init__(self, options: BadStepConfig, backend: Backend, state: TrainState, say: Callable[[str], None]) -> None:
        self._options = options
        self._backend = backend
        self._state = state
        self._say = say

    def settle(self, bad: Sequence[BadStep], *, finite_parameters: bool, where: str) -> bool:
        """Report and count `bad` steps; return whether to roll back. Collective.

        Raises BadStepError if bad steps are errors, or there were too many.
        """
        causes = self._causes(bad[:NAMED]) if bad else []
        for step in bad:
            self._count(step)
        rolls_back = self._options.on_bad_step == "rollback" and (bool(bad) or not finite_parameters)
        if bad and self._options.on_bad_step == "raise":
            raise _error(bad[0], f"{bad[0].where[0].upper()}{bad[0].where[1:]} is bad: {causes[0]}. {ADVICE}")
        self._check_limit(bad, causes, rolls_back=rolls_back)
        done = "calls for a rollback" if rolls_back else "is skipped"
        for step, cause in zip(bad, causes, strict=False):
            self._say(f"warning: {step.where} {done}: {cause}.")
        if len(bad) > NAMED:
            done = "call for it as well" if rolls_back else "are skipped as well"
            self._say(f"warning: {plural(len(bad) - NAMED, 'more step')} up to {where} {done}.")
        if rolls_back and not bad:
            self._say(f"warning: parameters became NaN or infinite by {where}.")
        return rolls_back

    def note_rollback(self, saved: int, step: int) -> None:
        """Record the rollback after `step` to the checkpoint of step `saved`."""
        self._state.scalars.bad_steps.rollbacks.append([saved + 1, step])
        self._say(
            f"warning: rolled back after step {step} to the checkpoint of step {saved}: the batches of steps "
            f"{saved + 1} to {step} are left out."
        )

    def end_epoch(self) -> int:
        """Return and reset the epoch's number of bad steps."""
        counts = self._state.scalars.bad_steps
        found, counts.in_epoch = counts.in_epoch, 0
        return found

    def _count(self, step: BadStep) -> None:
        counts = self._state.scalars.bad_steps
        counts.in_a_row = counts.in_a_row + 1 if counts.last and step.number == counts.last + 1 else 1
        counts.last = step.number
        counts.in_epoch += 1
        counts.spikes += step.spike
        counts.non_finite += not step.spike

    def _check_limit(self, bad: Sequence[BadStep], causes: Sequence[str], *, rolls_back: bool) -> None:
        most, counts = self._options.max_bad_steps, self._state.scalars.bad_steps
        if rolls_back and len(counts.rollbacks) >= most:
            what = f"Training was rolled back {plural(most, 'time')}, and another one is called for"
        elif bad and not rolls_back and counts.in_a_row > most:
            what = f"{counts.in_a_row} steps in a row were bad"
        else:
            return
        last = f"{bad[0].where}: {causes[0]}" if bad else "the parameters are NaN or infinite"
        raise _error(
            bad[0] if bad else None,
            f"{what} ({last}). {ADVICE} {opt('max_bad_steps', most)} is the most that is tolerated.",
        )

    def _causes(self, bad: Sequence[BadStep]) -> list[str]:
        """Describe why each step is bad, gathered from all ranks. Collective."""
        paths = list(self._state.trainable)
        everyone = gather(self._backend, [_found_here(step.here, paths) for step in bad])
        return [_cause(step, [theirs[place] for theirs in everyone]) for place, step in enumerate(bad)]


def _error(step: BadStep | None, message: str) -> BadStepError:
    return BadStepError(message) if step is not None and step.spike else NonFiniteError(message)


def _found_here(here: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Return this rank's findings on a bad step: its mean loss, and non-finite values."""
    loss, weight, data, *gradients = np.asarray(here, np.float64).tolist()
    bad = [path for path, value in zip(paths, gradients, strict=True) if not np.isfinite(value)]
    mean = loss / weight if weight else 0.0
    finite = bool(np.isfinite(mean))
    return {"loss": mean if finite else None, "data": not np.isfinite(data), "gradients": bad[:1], "more": len(bad) - 1}


def _cause(step: BadStep, ranks: Sequence[dict[str, Any]]) -> str:
    if step.spike:
        mean = step.totals.loss / step.totals.weight
        highest = max(range(len(ranks)), key=lambda rank: ranks[rank]["loss"] or 0.0)
        of_rank = f", highest on rank {highest} ({ranks[highest]['loss']:.4g})" if len(ranks) > 1 else ""
        return f"a loss of {mean:.4g} where up to {step.totals.limit:.4g} is usual{of_rank}"
    where = _of_ranks([found["data"] for found in ranks])
    if where is not None:
        return f"NaN or infinite values in the data{where}"
    where = _of_ranks([found["loss"] is None for found in ranks])
    if where is not None:
        return f"a loss of NaN or infinity{where}, with sound data"
    rank = next((rank for rank, found in enumerate(ranks) if found["gradients"]), None)
    if rank is None:
        return "a sum over the ranks that is NaN or infinite"
    more = f" and {ranks[rank]['more']} more" if ranks[rank]["more"] else ""
    where = _of_ranks([bool(found["gradients"]) for found in ranks])
    return f"NaN or infinity in the gradient of {ranks[rank]['gradients'][0]}{more}{where}"


def _of_ranks(bad: Sequence[bool]) -> str | None:
    """List the ranks with a `bad` value: "" for a single rank, None if there are none."""
    found = [str(rank) for rank, value in enumerate(bad) if value]
    if not found:
        return None
    if len(bad) == 1:
        return ""
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f" of rank {found[0]}" if len(found) == 1 else f" of ranks {', '.join(found[:8])}{more}"
