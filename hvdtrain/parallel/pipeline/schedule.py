"""Pipeline schedules as lists of passes, and their simulation; no ranks, no TensorFlow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.parallel import ScheduleName

PassKind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: PassKind
    stage: int
    """Index among all stages of the pipeline."""
    microbatch: int


Schedule = list[Action]


def gpipe(rank: int, ranks: int, microbatches: int) -> Schedule:
    """Return the GPipe schedule: all forward passes, then all backward passes.

    Huang et al. 2019, arXiv:1811.06965. Activations of all microbatches are in memory at once.
    """
    forward = [Action("forward", rank, number) for number in range(microbatches)]
    return [*forward, *(Action("backward", rank, number) for number in range(microbatches))]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    As long as GPipe, but a stage holds activations of at most `ranks - rank` microbatches.
    """
    forward = [Action("forward", rank, number) for number in range(microbatches)]
    backward = [Action("backward", rank, number) for number in range(microbatches)]
    return _alternate(forward, backward, warm_up=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return the interleaved 1F1B schedule (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Microbatches advance in groups of `ranks`: a group passes one stage of this rank, then the next. The bubble is 1 /
    `chunks` of that of 1F1B, with `chunks` times as many messages.
    """
    numbers = range(microbatches * chunks)
    forward = [_turn("forward", number=number, rank=rank, ranks=ranks, chunks=chunks) for number in numbers]
    backward = [_turn("backward", number=number, rank=rank, ranks=ranks, chunks=chunks) for number in numbers]
    return _alternate(forward, backward, warm_up=2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _turn(kind: PassKind, number: int, rank: int, ranks: int, chunks: int) -> Action:
    """Return the `number`-th forward or backward pass of an interleaved schedule."""
    group, place = divmod(number, ranks * chunks)
    chunk, member = divmod(place, ranks)
    if kind == "backward":
        chunk = chunks - 1 - chunk
    return Action(kind, chunk * ranks + rank, group * ranks + member)


def _alternate(forward: Schedule, backward: Schedule, *, warm_up: int) -> Schedule:
    """Return `warm_up` forward passes, then alternating passes, then the remaining backward passes."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    turns = chain.from_iterable(zip(forward[warm_up:], backward[:steady], strict=True))
    return [*forward[:warm_up], *turns, *backward[steady:]]


def schedule_of(name: ScheduleName, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a rank's passes per optimizer step, for `chunks` stages per rank.

    Raises ConfigError for an unknown name, or interleaved microbatches not divisible by `ranks`.
    """
    if name == "interleaved":
        if microbatches % ranks:
            near = max(1, microbatches // ranks) * ranks
            raise ConfigError(
                f"{opt('pipeline_schedule', 'interleaved')} passes microbatches on in groups of {ranks}, one for each "
                "rank. "
                f"Received: {opt('accumulate', microbatches)}. Use {opt('accumulate', near)} or {near + ranks}."
            )
        return interleaved(rank, ranks, microbatches, chunks)
    plain: dict[str, Callable[[int, int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
    if name not in plain:
        raise ConfigError(
            f"{opt('pipeline_schedule')} must be one of {', '.join(get_args(ScheduleName))}. Received: {name!r}."
        )
    return plain[name](rank, ranks, microbatches)


def needs(action: Action, stages: int) -> Iterator[Action]:
    """Yield the passes that `action` depends on, among `stages` stages."""
    kind, stage, microbatch = action
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, microbatch)
        return
    yield Action("forward", stage, microbatch)
    if stage + 1 < stages:
        yield Action("backward", stage + 1, microbatch)


def ideal_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the idle fraction for equally long stages and free messages.

    (p - 1) / (m + p - 1) for p ranks and m microbatches; with v stages per rank, (p - 1) / v in place of p - 1.
    """
    idle = (ranks - 1) / chunks
    return idle / (microbatches + idle)


class DeadlockError(Exception):
    """Ranks of a pipeline wait for one another forever; the message names each one's dependency."""


@dataclass(frozen=True)
class Timeline:
    """End times of the passes of a simulated step."""

    ends: dict[Action, float]
    busy: tuple[float, ...]
    """Busy time of each rank."""

    @property
    def duration(self) -> float:
        """Makespan."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """Idle fraction, over all ranks."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.duration)


def simulate(
    schedules: Sequence[Schedule],
    seconds: Callable[[Action], float],
    *,
    stages: int | None = None,
    message: float = 0.0,
) -> Timeline:
    """Simulate the ranks' schedules, one pass at a time per rank.

    Args:
        stages: of the pipeline; by default one per rank.
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
    """Return the number of messages on the critical path of a step.

    For short messages; arguments as for `simulate`.
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
