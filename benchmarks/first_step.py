"""Time of a short `fit`, beside Keras' own: what is traced, built and compiled until a training is under way.

    python benchmarks/first_step.py --models resnet50 transformer --controllers none mpirun --rounds 5

    keras    `Model.fit` in each process by itself, without any exchange
    trainer  `hvdtrain.Trainer(model).fit`, from the construction of the trainer on

Both sides take turns, each in processes of its own that are started for it, with the same cores and threads. They make
one step, and forty in other processes: of so many, those that are not logged have a graph of their own. Times are those
of rank 0; reported are the median and the range of the ratios to `keras` over the rounds. Nothing else may run on the
machine meanwhile.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from hvdtrain.bench.script import Script, print_times

STEPS = (1, 40)
"""Lengths of a `fit`; all of a few steps would be measured, and so have one graph."""


def resnet50() -> Any:
    """Return Keras' ResNet-50 for images of CIFAR's size."""
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10)


def transformer() -> Any:
    """Return a language model of eight layers of Keras' attention."""
    import keras
    from keras import layers

    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    for _ in range(8):
        attended = layers.MultiHeadAttention(4, 32)(layers.LayerNormalization()(x), x, use_causal_mask=True)
        x = x + attended
        x = x + layers.Dense(128)(layers.Dense(512, "gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(1000)(x))


def samples(model: str, count: int) -> tuple[Any, Any]:
    """Return inputs and targets of a model."""
    import numpy as np

    random = np.random.default_rng(0)
    if model == "resnet50":
        return random.normal(size=(count, 32, 32, 3)).astype("float32"), random.integers(0, 10, count)
    tokens = random.integers(0, 1000, (count, 65))
    return tokens[:, :-1], tokens[:, 1:]


MODELS: dict[str, Callable[[], Any]] = {"resnet50": resnet50, "transformer": transformer}


def fitted(model: str, side: str, batch: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a `fit` of a compiled model."""
    import keras

    import hvdtrain

    hvdtrain.init()
    keras.utils.set_random_seed(0)
    built = MODELS[model]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=model == "transformer")
    built.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
    begin = time.perf_counter()
    if side == "keras":
        built.fit(*samples(model, batch * steps), batch_size=batch, verbose=0)
    else:
        whole = batch * hvdtrain.size()
        hvdtrain.Trainer(built).fit(*samples(model, whole * steps), batch=whole, verbose=0)
    return {"fit_ms": 1000.0 * (time.perf_counter() - begin)}


def main() -> int:
    script = Script(__doc__, fitted)
    script.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    controllers = ("none", "mpirun", "gloo")
    script.add_argument("--controllers", nargs="+", choices=controllers, default=["none", "mpirun"])
    script.add_argument("--ranks", type=int, default=2)
    script.add_argument("--rounds", type=int, default=5)
    script.add_argument("--batch", type=int, default=8, help="samples of a rank (8)")
    options = script.parsed()
    for model, controller, steps in product(options.models, options.controllers, STEPS):
        ranks = 1 if controller == "none" else options.ranks
        given = {"model": model, "batch": options.batch, "steps": steps}
        job = partial(script.job, function=fitted, controller=controller, ranks=ranks, **given)
        runs = script.measure([job(side, side=side) for side in ("keras", "trainer")], options.rounds)
        title = f"{model:11} {controller:6} {ranks} rank(s)  {steps:2} step(s)"
        print_times(title, {run.name: run.medians("fit_ms") for run in runs}, "keras")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
