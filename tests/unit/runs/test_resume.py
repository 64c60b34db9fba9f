"""By files, an epoch is finished by as many ranks as began it."""

import numpy as np
import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.pipeline import SourceTraining
from hvdtrain.runs.resume import settle_processes
from hvdtrain.state.scalars import Scalars


class InFiles(ArraySource):
    """Forty samples in five files."""

    def __init__(self):
        super().__init__((np.arange(40), np.zeros(40)))
        self.file_of = np.repeat(np.arange(5), 8)


def data(shard_by="files"):
    return SourceTraining(InFiles(), batch=8, index=0, size=1, seed=0, shard_by=shard_by)


def test_another_number_of_ranks_would_lose_samples_within_an_epoch():
    """Why it is refused: two steps on 2 ranks and three on 4 are no epoch."""
    seen = []
    for size, first, last in ((2, 0, 2), (4, 2, 5)):
        for index in range(size):
            part = SourceTraining(InFiles(), batch=8, index=index, size=size, seed=0, shard_by="files").batches(first)
            seen += [batch.inputs.numpy() for batch, _ in zip(part, range(first, last), strict=False)]
    assert len(np.concatenate(seen)) == 40
    assert len(set(np.concatenate(seen).tolist())) < 40


def test_within_an_epoch_the_number_of_ranks_stays():
    scalars = Scalars(step=7, epoch=1, step_in_epoch=2, processes=2)
    settle_processes(scalars, data(), 2, "run")
    with pytest.raises(ConfigError) as raised:
        settle_processes(scalars, data(), 4, "run")
    assert str(raised.value).startswith("--resume run: with --shard-by files an epoch is finished by as many ranks")
    assert "Received: 4 ranks within an epoch of 2 ranks, which ends at step 10" in str(raised.value)
    assert "--max-steps 10" in str(raised.value)
    assert scalars.processes == 2


def test_at_the_end_of_an_epoch_others_go_on():
    scalars = Scalars(step=10, processes=2)
    settle_processes(scalars, data(), 4, "run")
    assert scalars.processes == 4


def test_the_samples_of_batches_are_shared_by_any_number():
    scalars = Scalars(step=7)
    settle_processes(scalars, data("samples"), 2, "run")
    settle_processes(scalars, data("samples"), 4, "run")
    assert scalars.processes is None
