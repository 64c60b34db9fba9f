"""What `data bench` makes of its three figures."""

import pytest

from hvdtrain.runs.data_bench import DataBench, verdict

CURE = "What helps: this."


@pytest.mark.parametrize("pipeline", [80.0, 140.0, 1000.0])
def test_training_that_reaches_the_speed_of_its_step_does_not_wait(pipeline):
    said = verdict(DataBench(pipeline, step=100.0, together=95.0, cure=CURE))
    assert said.startswith(f"The pipeline is {pipeline / 100:.1f} times as fast as the step, and training reaches 95%")
    assert said.endswith("of the step's speed: it does not wait for its data.")


def test_a_pipeline_slower_than_the_step_is_waited_for():
    said = verdict(DataBench(60.0, step=100.0, together=55.0, cure=CURE))
    assert said.endswith("training reaches 55% of the step's speed: it waits for its data. What helps: this.")


@pytest.mark.parametrize("pipeline", [140.0, 1000.0])
def test_a_fast_pipeline_may_take_the_cores_of_the_step(pipeline):
    said = verdict(DataBench(pipeline, step=100.0, together=70.0, cure=CURE))
    assert "reading them takes cores that the step would use. What helps: this." in said
    assert "waits" not in said


def test_where_nothing_is_left_to_be_done_nothing_is_advised():
    assert verdict(DataBench(60.0, step=100.0, together=55.0)).endswith("it waits for its data.")
