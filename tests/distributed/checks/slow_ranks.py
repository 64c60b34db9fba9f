"""The rank for which the others wait, as `fit` and its summary name it."""

import time
from collections.abc import Callable

import keras
import numpy as np
from world import World
from worlds import worlds

import hvdtrain
from hvdtrain.training.callbacks.report import FitResult, summary_of

PAUSE_S = 0.1
"""Long beside what a busy machine adds to a step."""


def trained(world: World, batches: Callable[[], object] | None = None, callbacks: tuple[object, ...] = ()) -> FitResult:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((800, 5)).astype("float32")
    trainer = hvdtrain.Trainer(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)]), "sgd", "mse", backend=world.backend
    )
    if batches is None:
        return trainer.fit(x, x[:, :4], batch=16, callbacks=callbacks, verbose=0)
    return trainer.fit(batches, steps_per_epoch=50, callbacks=callbacks, verbose=0)


@worlds("mpirun-2", extended=True)
def check_a_callback_that_sleeps_names_its_rank(world: World) -> None:
    for slow in range(world.size):
        pause = PAUSE_S if world.rank == slow else 0.0

        def sleep(batch: int, logs: object, pause: float = pause) -> None:
            time.sleep(pause)

        result = trained(world, callbacks=(keras.callbacks.LambdaCallback(on_train_batch_end=sleep),))
        assert result.slowest_rank is not None
        assert result.slowest_rank.rank == slow
        assert result.slowest_rank.own_ms >= 1000 * PAUSE_S
        assert result.slowest_rank.own_ms - result.slowest_rank.others_ms >= 750 * PAUSE_S
        assert 0.3 < result.slowest_rank.share <= 1
        assert summary_of(result)["slowest_rank"]["rank"] == slow


@worlds("mpirun-2", extended=True)
def check_data_that_come_late_name_their_rank(world: World) -> None:
    def batches() -> object:
        rng = np.random.default_rng(0)
        for _ in range(50):
            time.sleep(PAUSE_S if world.rank == world.size - 1 else 0.0)
            x = rng.standard_normal((16, 5)).astype("float32")
            yield x, x[:, :4]

    result = trained(world, batches)
    assert result.slowest_rank is not None
    assert result.slowest_rank.rank == world.size - 1
    assert result.slowest_rank.host


@worlds("mpirun-2", extended=True)
def check_equal_ranks_name_nobody(world: World) -> None:
    pause = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(PAUSE_S))
    result = trained(world, callbacks=(pause,))
    assert result.slowest_rank is None
    assert "slowest_rank" not in summary_of(result)
