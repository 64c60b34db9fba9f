"""Several steps in one call: the time of a `fit` by `steps_per_execution`, in turn in one run.

    python benchmarks/executions.py --models logistic small_cnn --controllers none mpirun --rounds 5

One launch for each model and controller. In it trainers with 1, 8 and 32 steps in a call take turns at a `fit` of some
epochs on data of the digits' shape, of which each rank computes 32 samples a step. Beside them is the compiled step
alone, called again and again on one batch: what is left when callbacks, logs and data cost nothing. Reported are
milliseconds a step on the slowest rank, and the ratios to one step in a call in the same round. Nothing else may run on
the machine meanwhile.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times, started
from hvdtrain.bench.timing import in_turn, window

AT_ONCE = (1, 8, 32)
BATCH, STEPS, EPOCHS = 32, 96, 4
"""Samples of a rank and step, steps of an epoch, epochs of a `fit`."""


def build(model: str) -> Any:
    """Return a model of images of 8 x 8 pixels: one layer, or the recipe's."""
    import keras

    from hvdtrain.config.model import ModelConfig
    from hvdtrain.models.registry import build_model

    keras.utils.set_random_seed(0)
    if model == "logistic":
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    return build_model(ModelConfig(model), (8, 8, 1), 10, 0)


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds a step of each number of steps in a call, on the slowest rank."""
    backend, _, gather = started()
    import keras

    import hvdtrain
    from hvdtrain.training.inputs import training_data

    rng, batch = np.random.default_rng(0), BATCH * backend.size
    x, y = rng.random((STEPS * batch, 8, 8, 1), dtype=np.float32), rng.integers(0, 10, STEPS * batch)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def trainer_of(at_once: int) -> Any:
        options = {"metrics": ["accuracy"], "backend": backend, "steps_per_execution": at_once}
        return hvdtrain.Trainer(build(model), keras.optimizers.Adam(1e-3), loss, **options)

    def fitted(trainer: Any) -> float:
        begin = time.perf_counter()
        trainer.fit(x, y, batch=batch, epochs=EPOCHS, verbose=0)
        return 1000.0 * (time.perf_counter() - begin) / (STEPS * EPOCHS)

    sides: dict[str, Callable[[], float]] = {f"{n} in a call": partial(fitted, trainer_of(n)) for n in AT_ONCE}
    alone = trainer_of(1)
    data = training_data((x, y), backend, batch=batch, seed=0, shuffle=False, steps_per_epoch=None)
    alone.build(data)
    step, first = alone.compiled_step(data), next(iter(data.batches(0)))
    sides["the step alone"] = partial(window, lambda: step(first, measure=False).totals, STEPS)
    return {"ms": in_turn(sides, rounds, gather)}


def main() -> int:
    script = Script(__doc__, measure, rounds=5)
    script.add_argument("--models", nargs="+", choices=("logistic", "small_cnn"), default=["logistic", "small_cnn"])
    controllers = ("none", "mpirun", "gloo")
    script.add_argument("--controllers", nargs="+", choices=controllers, default=["none", "mpirun"])
    script.add_argument("--ranks", type=int, default=2)
    options = script.parsed()
    for model, controller in product(options.models, options.controllers):
        ranks = 1 if controller == "none" else options.ranks
        job = script.job("in turn", measure, controller=controller, ranks=ranks, model=model, rounds=options.rounds)
        for run in script.measure([job]):
            print_times(f"{model:9} {controller:6} {ranks} rank(s)", run.figure("ms")[0], f"{AT_ONCE[0]} in a call")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
