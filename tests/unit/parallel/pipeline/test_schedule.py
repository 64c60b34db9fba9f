"""Schedules of pipeline parallelism, as lists of passes: without ranks, and without TensorFlow."""

from collections import Counter
from itertools import accumulate

import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import PipelineConfig
from hvdtrain.parallel.pipeline.schedule import (
    Action,
    DeadlockError,
    ideal_bubble,
    messages_in_turn,
    needs,
    schedule_of,
    simulate,
)

PLAIN = [("gpipe", p, m, 1) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8)]
ONE_EACH = [("1f1b", p, m, 1) for p in (1, 2, 3, 4, 8) for m in (1, 2, 5, 8)]
INTERLEAVED = [("interleaved", p, m, v) for p, m in ((2, 2), (2, 6), (4, 4), (4, 8), (3, 9)) for v in (2, 3, 4)]
EVERY = [*PLAIN, *ONE_EACH, *INTERLEAVED]


def schedules(name, ranks, microbatches, chunks):
    return [schedule_of(name, rank, ranks, microbatches, chunks) for rank in range(ranks)]


def seconds(action):
    return 1.0 if action.kind == "forward" else 2.0


def most_in_flight(schedule):
    """The forward passes whose activations a rank holds at its peak."""
    return max(accumulate(1 if action.kind == "forward" else -1 for action in schedule))


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), EVERY)
def test_each_microbatch_passes_each_stage_once_forward_and_once_backward(name, ranks, microbatches, chunks):
    for rank, schedule in enumerate(schedules(name, ranks, microbatches, chunks)):
        stages = range(rank, ranks * chunks, ranks)
        kinds = ("forward", "backward")
        expected = [Action(kind, stage, m) for kind in kinds for stage in stages for m in range(microbatches)]
        assert Counter(schedule) == Counter(expected)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), EVERY)
def test_no_rank_waits_for_ever_and_each_pass_follows_what_it_needs(name, ranks, microbatches, chunks):
    stages = ranks * chunks
    timeline = simulate(schedules(name, ranks, microbatches, chunks), seconds, stages=stages, message=0.25)
    for action, end in timeline.ends.items():
        for need in needs(action, stages):
            message = 0.25 * (need.stage % ranks != action.stage % ranks)
            assert timeline.ends[need] + message <= end - seconds(action) + 1e-9


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), EVERY)
def test_the_idle_share_is_that_of_the_formula(name, ranks, microbatches, chunks):
    timeline = simulate(schedules(name, ranks, microbatches, chunks), seconds, stages=ranks * chunks)
    assert timeline.bubble == pytest.approx(ideal_bubble(ranks, microbatches, chunks))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "messages"),
    [
        ("gpipe", 2, 4, 1, 2),
        ("gpipe", 4, 8, 1, 6),
        ("1f1b", 2, 2, 1, 2),
        ("1f1b", 2, 8, 1, 8),
        ("interleaved", 2, 2, 2, 6),
        ("interleaved", 2, 8, 2, 6),
        ("interleaved", 4, 8, 2, 14),
    ],
)
def test_a_step_waits_for_messages_that_the_formula_does_not_count(name, ranks, microbatches, chunks, messages):
    schedule = schedules(name, ranks, microbatches, chunks)
    assert messages_in_turn(schedule, seconds, ranks * chunks) == messages


def test_the_formula_is_the_known_one():
    assert ideal_bubble(4, 8) == pytest.approx(3 / 11)
    assert ideal_bubble(4, 8, 3) == pytest.approx(1 / 9)
    assert ideal_bubble(1, 8) == 0


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), ONE_EACH)
def test_1f1b_holds_the_activations_of_no_more_microbatches_than_stages_follow(name, ranks, microbatches, chunks):
    for rank, schedule in enumerate(schedules(name, ranks, microbatches, chunks)):
        assert most_in_flight(schedule) == min(microbatches, ranks - rank)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), PLAIN)
def test_gpipe_holds_all_of_them(name, ranks, microbatches, chunks):
    assert {most_in_flight(s) for s in schedules(name, ranks, microbatches, chunks)} == {microbatches}


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), INTERLEAVED)
def test_an_interleaved_rank_holds_what_its_warm_up_and_one_more_need(name, ranks, microbatches, chunks):
    for rank, schedule in enumerate(schedules(name, ranks, microbatches, chunks)):
        bound = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        assert most_in_flight(schedule) == min(microbatches * chunks, bound)


def test_backward_passes_come_in_the_order_of_the_microbatches_in_every_schedule():
    for name, ranks, microbatches, chunks in EVERY:
        for schedule in schedules(name, ranks, microbatches, chunks):
            for kind in ("forward", "backward"):
                for stage in {action.stage for action in schedule}:
                    order = [a.microbatch for a in schedule if (a.kind, a.stage) == (kind, stage)]
                    assert order == list(range(microbatches))


def test_schedules_that_wait_for_one_another_are_noticed_with_who_waits_for_what():
    first, last = schedules("1f1b", 2, 2, 1)
    swapped = [last[2], *last[:2], *last[3:]]  # the second microbatch's forward pass before the first one's
    upside_down = [first[-1], *first[:-1]]
    with pytest.raises(
        DeadlockError, match="rank 0 with the backward pass of microbatch 1 through stage 0 for the for"
    ):
        simulate([upside_down, last], seconds)
    simulate([first, swapped], seconds)  # the other order is only slower
    with pytest.raises(DeadlockError, match=r"rank 1 .* for the forward pass of microbatch 1 through stage 0"):
        simulate([[a for a in first if a != Action("forward", 0, 1)], last], seconds)


def test_interleaving_needs_whole_groups_of_microbatches():
    with pytest.raises(ConfigError, match=r"groups of 4, .* accumulate=6\. Use accumulate=4 or 8\."):
        schedule_of("interleaved", 0, 4, 6, 2)


def test_an_unknown_schedule_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"one of gpipe, 1f1b, interleaved\. Received: 'zb'"):
        schedule_of("zb", 0, 2, 2)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"virtual_stages": 0}, r"virtual_stages must be at least 1\. Received: 0"),
        (
            {"virtual_stages": 2},
            r"virtual_stages=2 has no effect without pipeline_schedule='interleaved': leave it out",
        ),
        ({"pipeline_schedule": "interleaved"}, r"'interleaved' needs virtual_stages: add 2 or more\."),
        ({"pipeline_stages": ("a", "a")}, r"pipeline_stages names each layer once\. Received: a, a\."),
    ],
)
def test_options_that_do_not_fit_are_refused(options, cause):
    with pytest.raises(ConfigError, match=cause):
        PipelineConfig(**options)
