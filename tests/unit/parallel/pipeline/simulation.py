"""A pipeline's schedules played through on paper: when each pass begins and ends, and whether all of them can run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.parallel.pipeline.schedule import Action, Schedule, needs


class DeadlockError(Exception):
    """The ranks of a pipeline wait for one another for ever; the message names what each of them waits for."""


@dataclass(frozen=True)
class Timeline:
    """When the passes of a simulated step ended."""

    ends: dict[Action, float]
    busy: tuple[float, ...]
    """Time that each rank spends on passes."""

    @property
    def duration(self) -> float:
        """From the first pass's begin to the last one's end."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """Share of the time that ranks are idle, over all of them."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.duration)


def simulate(
    schedules: Sequence[Schedule],
    seconds: Callable[[Action], float],
    *,
    stages: int | None = None,
    message: float = 0.0,
) -> Timeline:
    """Play the ranks' schedules through, each rank one pass at a time and in its order.

    Args:
        schedules: of each rank.
        seconds: returns how long a pass takes.
        stages: of the pipeline; by default one on each rank.
        message: seconds from the end of a pass until its tensors are on the next rank.

    Raises:
        DeadlockError: passes wait for one another, or for one that no schedule has.
    """
    stages = len(schedules) if stages is None else stages
    place_of = {action: rank for rank, schedule in enumerate(schedules) for action in schedule}
    ends: dict[Action, float] = {}
    clocks, done = [0.0] * len(schedules), [0] * len(schedules)
    while moved := [rank for rank, schedule in enumerate(schedules) if _is_ready(schedule, done[rank], ends, stages)]:
        for rank in moved:
            action = schedules[rank][done[rank]]
            arrivals = [ends[need] + message * (place_of[need] != rank) for need in needs(action, stages)]
            clocks[rank] = max([clocks[rank], *arrivals]) + seconds(action)
            ends[action] = clocks[rank]
            done[rank] += 1
    _refuse_waiting(schedules, done, ends, stages)
    return Timeline(ends, tuple(sum(map(seconds, schedule)) for schedule in schedules))


def messages_in_turn(schedules: Sequence[Schedule], seconds: Callable[[Action], float], stages: int) -> int:
    """Return how many messages a step waits for, one after another: it takes longer by the time of so many.

    For short messages; arguments are those of `simulate`.
    """
    without = simulate(schedules, seconds, stages=stages).duration
    message = 1e-3 * min(seconds(action) for schedule in schedules for action in schedule)
    return round((simulate(schedules, seconds, stages=stages, message=message).duration - without) / message)


def _is_ready(schedule: Schedule, done: int, ends: dict[Action, float], stages: int) -> bool:
    return done < len(schedule) and all(need in ends for need in needs(schedule[done], stages))


def _refuse_waiting(schedules: Sequence[Schedule], done: Sequence[int], ends: dict[Action, float], stages: int) -> None:
    waiting = []
    for rank, (schedule, count) in enumerate(zip(schedules, done, strict=True)):
        if count < len(schedule):
            action = schedule[count]
            need = next(need for need in needs(action, stages) if need not in ends)
            waiting.append(f"rank {rank} with the {_words(action)} for the {_words(need)}")
    if waiting:
        raise DeadlockError(f"The ranks of the pipeline wait for one another: {'; '.join(waiting)}.")


def _words(action: Action) -> str:
    return f"{action.kind} pass of microbatch {action.microbatch} through stage {action.stage}"
