"""XLA around forward and backward pass only: the same training, with the exchange outside of it."""

import keras
import numpy as np
from checks.parity import assert_parity, dense_data, per_sample
from world import World, flat_bytes, moved

import hvdtrain


def check_dense_with_accumulation(world: World) -> None:
    assert_parity(world, "dense", "adam", "float64", jit=True, accumulate=2)


def check_sparse(world: World) -> None:
    assert_parity(world, "embedding", "adam", "float64", jit=True)


def trained(world: World, *, jit: bool) -> list[np.ndarray]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3, dtype="float32"),
            ]
        ),
        keras.optimizers.SGD(0.1),
        per_sample,
        backend=world.backend,
        precision="mixed_bfloat16",
        jit=jit,
        accumulate=2,
    )
    trainer.fit(dense_data("float32"), batch=16, epochs=2, shuffle=False, verbose=False, log_every=1)
    trainer.state.average_statistics(world.backend)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    return trainer.model.get_weights()


def check_statistics_in_16_bits(world: World) -> None:
    """The same as without XLA but for roundings."""
    plain, compiled = trained(world, jit=False), trained(world, jit=True)
    largest = max(float(np.abs(w).max()) for w in plain)
    assert moved(compiled, plain) / largest < 16 * 2**-8, moved(compiled, plain) / largest
