"""XLA around forward and backward pass only: the same training, with the exchange outside of it."""

import keras
import numpy as np
from builders import CROSS_ENTROPY, dense_data
from checks.parity import assert_parity
from world import World, exact_arrays, flat_bytes, moved
from worlds import worlds

import hvdtrain


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_dense_with_accumulation(world: World) -> None:
    assert_parity(world, "dense", "adam", "float64", jit=True, accumulate=2)


@worlds("mpirun-2", extended=True)
def check_sparse(world: World) -> None:
    assert_parity(world, "embedding", "adam", "float64", jit=True)


def trained(world: World, precision: str, *, jit: bool) -> list[np.ndarray]:
    keras.utils.clear_session(free_memory=False)
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
        CROSS_ENTROPY,
        backend=world.backend,
        precision=precision,
        jit=jit,
        accumulate=2,
    )
    x, y = dense_data("float32")
    # A short last batch would take another pass of XLA's compiler, a second or two.
    trainer.fit((x[:64], y[:64]), batch=16, epochs=2, shuffle=False, verbose=False, log_every=1)
    trainer.state.average_statistics(world.backend)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    return trainer.model.get_weights()


@worlds("mpirun-2", extended=True)
def check_statistics_in_16_bits(world: World) -> None:
    """The same as without XLA but for roundings; in fp16 with a loss that is scaled."""
    for name, unit in (("mixed_bfloat16", 2**-8), ("mixed_float16", 2**-11)):
        plain, compiled = trained(world, name, jit=False), trained(world, name, jit=True)
        largest = max(float(np.abs(w).max()) for w in plain)
        error = moved(compiled, plain) / largest
        assert 0 < error < 16 * unit, f"{name}: {error:.2e}"


@worlds("mpirun-2", extended=True)
def check_what_overflows_is_skipped_by_all(world: World) -> None:
    """XLA may keep in 32 bits what TensorFlow rounds to fp16: this overflows in both."""
    x, y = dense_data("float32")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8), keras.layers.Dense(3, dtype="float32")]
    trainer = hvdtrain.Trainer(
        lambda: keras.Sequential([keras.Input((6,)), *layers]),
        keras.optimizers.SGD(0.1),
        CROSS_ENTROPY,
        backend=world.backend,
        precision="mixed_float16",
        jit=True,
    )
    trainer.fit((x[:16], y[:16]), batch=16, shuffle=False, verbose=False, log_every=1)
    before = trainer.model.get_weights()
    poisoned = x[16:32].copy()
    poisoned[-1] = 3e38  # the last rank's
    trainer.fit((poisoned, y[16:32]), batch=16, shuffle=False, verbose=False, log_every=1)
    optimizer = trainer.optimizer
    assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (1, 2.0**14)
    assert moved(trainer.model.get_weights(), before) == 0.0
    assert world.same_everywhere(flat_bytes([t.value.numpy() for t in trainer.state.named_tensors().values()]))
