"""Mixed precision: 32-bit master weights, and steps that all ranks skip together."""

from typing import Any

import keras
import numpy as np
from builders import CROSS_ENTROPY
from world import World, flat_bytes, moved, relative_error
from worlds import worlds

import hvdtrain

RNG = np.random.default_rng(11)
X = RNG.standard_normal((64, 6)).astype("float32")
Y = np.argmax(X[:, :3], axis=1)


POISON = 3e4
"""A finite float32 whose gradients overflow in fp16."""


def build(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(24, activation="relu")
    return keras.Sequential([keras.Input((6,)), hidden, keras.layers.Dense(3, dtype="float32")])


def trained(world: World, name: str, x: np.ndarray, epochs: int, **options: Any) -> Any:
    trainer = hvdtrain.Trainer(
        lambda: build(world.rank),
        keras.optimizers.SGD(0.2),
        CROSS_ENTROPY,
        backend=world.backend,
        precision=name,
        **options,
    )
    trainer.fit((x, Y), batch=16, epochs=epochs, shuffle=False, verbose=False, log_every=1)
    return trainer


@worlds("mpirun-2", extended=True)
def check_master_weights_are_float32_and_training_follows_float32(world: World) -> None:
    weights = {}
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        for accumulate in (1, 2):
            trainer = trained(world, name, X, 5, accumulate=accumulate)
            assert {v.dtype for v in trainer.model.weights} == {"float32"}
            assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
            layer = trainer.model.layers[0]
            assert layer.compute_dtype == {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}.get(name, name)
            weights[name, accumulate] = trainer.model.get_weights()
    reference = weights["float32", 1]
    largest = max(float(np.abs(w).max()) for w in reference)
    # 20 steps at rate 0.2 of gradients that are rounded to u each: the weights may part by 20 x 0.2 x |g| x u and
    # what the path makes of it; u is 2^-11 and 2^-8.
    for (name, accumulate), values in weights.items():
        bound = {"float32": 1e-6, "mixed_float16": 4 * 2**-11, "mixed_bfloat16": 4 * 2**-8}[name]
        error = moved(values, reference) / largest
        assert error <= bound, f"{name} x {accumulate}: {error:.2e}"
    assert not np.array_equal(weights["mixed_bfloat16", 1][0], reference[0]), "nothing was computed in 16 bits"


def check_an_overflow_on_one_rank_is_skipped_by_all(world: World) -> None:
    """A sample so large that its gradients overflow in fp16, though it is a finite float32."""
    for accumulate in (1, 2):
        poisoned = X.copy()
        poisoned[-1] = POISON  # the last rank's, in the last microbatch of the last step
        trainer = trained(world, "mixed_float16", poisoned, 1, accumulate=accumulate)
        optimizer = trainer.optimizer
        assert int(optimizer.iterations) == 3, f"of 4 steps {int(optimizer.iterations)} were applied"
        assert float(optimizer.dynamic_scale) == 2.0**14, float(optimizer.dynamic_scale)
        state = [t.value.numpy() for t in trainer.state.named_tensors().values()]
        assert all(np.isfinite(value).all() for value in state if value.dtype.kind == "f")
        assert world.same_everywhere(flat_bytes(state))


def deep(seed: int) -> keras.Model:
    """Return a model that is long enough to be cut into segments."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(8, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(3, dtype="float32")])


@worlds("mpirun-2", extended=True)
def check_an_overflow_in_an_earlier_microbatch_skips_the_whole_group(world: World) -> None:
    """On the last rank only, and not in its last microbatch; also where activations are recomputed."""
    weights = []
    for recompute in (False, True):
        trainer = hvdtrain.Trainer(
            lambda: deep(world.rank),
            keras.optimizers.SGD(0.2, momentum=0.9),
            CROSS_ENTROPY,
            backend=world.backend,
            precision="mixed_float16",
            accumulate=2,
            recompute=recompute,
        )

        def fit(x: np.ndarray, y: np.ndarray, trainer: Any = trainer) -> Any:
            trainer.fit((x, y), batch=16, shuffle=False, verbose=False, log_every=1)
            return trainer.optimizer, [v.numpy() for v in trainer.state.trainable.values()]

        optimizer, before = fit(X[:32], Y[:32])
        assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (2, 2.0**15)
        poisoned = X[32:48].copy()
        poisoned[(world.size - 1) * 16 // world.size] = POISON  # the first sample of the last rank
        optimizer, after = fit(poisoned, Y[32:48])
        assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (2, 2.0**14)
        assert moved(after, before) == 0.0, "the group's other microbatch was applied"
        optimizer, after = fit(X[32:48], Y[32:48])
        assert int(optimizer.iterations) == 3
        assert moved(after, before) > 1e-2, "training does not go on"
        assert world.same_everywhere(flat_bytes([t.value.numpy() for t in trainer.state.named_tensors().values()]))
        weights.append(after)
    # Above two ranks the order of a sum depends on what is sent together: a weight may round the other way in fp16.
    assert relative_error(*weights) <= (0.0 if world.size <= 2 else 4 * 2**-11), "recomputing changed the numbers"
