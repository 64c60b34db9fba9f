"""Pipeline schedules: the order of a rank's forward and backward passes, as a list; pure Python.

A pipeline of `ranks` ranks with `chunks` stages on each has `ranks * chunks` stages. Stage s is on rank s % ranks: with
one stage on each rank they are the same number, and an interleaved pipeline goes round all ranks `chunks` times.

A pass waits for the tensors that it needs from its neighbour and sends its own as soon as it has them. The lists do not
name these messages: they follow from the passes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.pipeline import ScheduleName

PassKind = Literal["forward", "backward"]


class Action(NamedTuple):
    """One pass of one microbatch through one stage."""

    kind: PassKind
    stage: int
    """Of all stages of the pipeline."""
    microbatch: int


Schedule = list[Action]


def gpipe(rank: int, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of GPipe (Huang et al. 2019, arXiv:1811.06965): all forward passes, then all backward passes.

    All microbatches' activations are in memory at once.
    """
    forward = [Action("forward", rank, number) for number in range(microbatches)]
    return [*forward, *(Action("backward", rank, number) for number in range(microbatches))]


def one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503).

    It takes as long as GPipe, but a stage holds the activations of at most `ranks - rank` microbatches.
    """
    forward = [Action("forward", rank, number) for number in range(microbatches)]
    backward = [Action("backward", rank, number) for number in range(microbatches)]
    return _alternate(forward, backward, warm_up=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return the interleaved 1F1B schedule (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Microbatches advance in groups of `ranks`: a group passes one stage of this rank, then the next. The ranks are idle
    for a `chunks`-th of the time of 1F1B, and exchange `chunks` times as many messages.
    """
    numbers = range(microbatches * chunks)
    forward = [_turn("forward", number=number, rank=rank, ranks=ranks, chunks=chunks) for number in numbers]
    backward = [_turn("backward", number=number, rank=rank, ranks=ranks, chunks=chunks) for number in numbers]
    return _alternate(forward, backward, warm_up=2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _turn(kind: PassKind, number: int, rank: int, ranks: int, chunks: int) -> Action:
    """Return the `number`-th pass of its kind on a rank of an interleaved pipeline."""
    group, place = divmod(number, ranks * chunks)
    chunk, member = divmod(place, ranks)
    if kind == "backward":
        chunk = chunks - 1 - chunk
    return Action(kind, chunk * ranks + rank, group * ranks + member)


def _alternate(forward: Schedule, backward: Schedule, *, warm_up: int) -> Schedule:
    """Put `warm_up` forward passes first, then one forward and one backward in turn, then the remaining backward."""
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    turns = chain.from_iterable(zip(forward[warm_up:], backward[:steady], strict=True))
    return [*forward[:warm_up], *turns, *backward[steady:]]


def schedule_of(name: ScheduleName, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return what a rank of a pipeline does in one optimizer step.

    Args:
        name: of the schedule.
        rank: place in the pipeline.
        ranks: their number.
        microbatches: of the step.
        chunks: stages on each rank; more than one for the interleaved schedule only.

    Raises:
        ConfigError: an unknown name, or an interleaved schedule whose microbatches do not form groups of `ranks`.
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
    """Yield the passes whose results `action` needs; in a pipeline of `stages` stages."""
    kind, stage, microbatch = action
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, microbatch)
        return
    yield Action("forward", stage, microbatch)
    if stage + 1 < stages:
        yield Action("backward", stage + 1, microbatch)


def most_in_flight(schedule: Sequence[Action]) -> int:
    """Return how many forward passes' activations a rank holds at most, over all of its stages."""
    held = most = 0
    for action in schedule:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def ideal_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return the share of the time that ranks are idle if all stages take equally long and messages no time.

    (p - 1) / (m + p - 1) for p ranks and m microbatches; with v stages on each rank, p - 1 counts a v-th.
    """
    idle = (ranks - 1) / chunks
    return idle / (microbatches + idle)
