"""How long ranks wait for one that still loads its data, and what is said when that was too short."""

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.backends.horovod import HorovodBackend
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.data.identity import check_same_data
from hvdtrain.data.registry import load_splits
from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.world import World
from hvdtrain.training.inputs import training_data, validation_batches


class Slow:
    """A channel to a second rank, which comes after `seconds`."""

    rank, size = 0, 2

    def __init__(self, seconds):
        self.seconds = seconds

    def exchange(self, payload, *, timeout):
        if timeout < self.seconds:
            raise LaunchError(f"No message from rank 1 of 2 within {timeout:g} s: not started.")
        return [payload, payload]


def backend(session, seconds, load_timeout):
    """A backend of two ranks, of which the other one is late."""
    link = replace(session.link, control=Slow(seconds))
    ranks = AxisCollectives(AxisGroup(axis="dp", ranks=(0, 1), index=0, process_set=None))  # they exchange no tensors
    world = World(mesh=Mesh.data_parallel(0, 2), hosts=("here", "there"), collectives={"dp": ranks})
    return HorovodBackend(replace(session, link=link, world=world, config=RuntimeConfig(load_timeout=load_timeout)))


ARRAYS = np.zeros((8, 2)), np.zeros(8)
MEETINGS = {
    "train": lambda backend: check_same_data(load_splits(DataConfig()), backend),
    "fit": lambda backend: training_data(ARRAYS, backend, batch=4, seed=0, shuffle=True, steps_per_epoch=None),
    "evaluate": lambda backend: validation_batches(ARRAYS, backend, batch=4),
}


@pytest.mark.parametrize("meet", MEETINGS.values(), ids=MEETINGS)
def test_a_rank_that_loads_for_long_is_waited_for(session, meet):
    meet(backend(session, seconds=3000.0, load_timeout=3600.0))


@pytest.mark.parametrize("meet", MEETINGS.values(), ids=MEETINGS)
def test_a_rank_that_loads_for_too_long_is_named_with_the_option(session, meet):
    with pytest.raises(LaunchError, match=r"from rank 1 of 2 within 60 s.* need more load_timeout"):
        meet(backend(session, seconds=3000.0, load_timeout=60.0))


def test_other_meetings_have_their_own_time(session):
    with pytest.raises(LaunchError) as raised:
        backend(session, seconds=30.0, load_timeout=3600.0).gather_bytes(b"", timeout=10.0)
    assert "load_timeout" not in str(raised.value)
