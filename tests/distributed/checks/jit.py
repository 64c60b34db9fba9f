"""XLA around forward and backward pass only: the same training, with the exchange outside of it."""

import keras
from checks.parity import assert_parity
from world import World


def check_dense_and_sparse_with_and_without_accumulation(world: World) -> None:
    for accumulate in (1, 2):
        assert_parity(world, "dense", "adam", "float64", jit=True, accumulate=accumulate)
        assert_parity(world, "embedding", "adam", "float64", jit=True, accumulate=accumulate)


def check_dropout_is_drawn_within(world: World) -> None:
    """A layer with random numbers and one with statistics can be compiled as well."""
    import numpy as np
    from checks.parity import dense_data, per_sample
    from world import flat_bytes

    import hvdtrain

    x, y = dense_data("float32")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, "adam", per_sample, backend=world.backend, jit=True, accumulate=2)
    before = model.get_weights()
    trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False)
    trainer.state.average_statistics(world.backend)
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert not np.array_equal(before[4], model.get_weights()[4]), "the moving mean stood still"
