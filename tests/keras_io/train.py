"""Train examples: `python -m tests.keras_io.train plain|trainer|both FOLDER NAME ...`.

`plain` trains by Keras alone, in one process, and leaves what comes out in FOLDER. `trainer` trains on all ranks of a
job by `hvdtrain`, compares, and prints a line for each example. An example that fails ends nothing.
`both` does one after the other, in the processes of the job.
"""

import json
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hvdtrain

TOLERANCE = 1e-9
ROUNDING = dict.fromkeys(("nerf", "charbonnier_and_psnr", "ctc_speech_recognition"), 1e-7)
"""tf.image.psnr and keras.ops.ctc_loss compute in 32 bits."""
LARGEST_SAID = 160
EQUAL = "equal"
ADDED = "equal to Keras where rows of one index are added first"
"""Keras' optimizers square the gradients of a table's rows one by one, if a row is looked up several times."""
OTHER_DRAWS = "draws others than Keras by `tf.random` without a seed"
"""TensorFlow numbers them, and keeps their states, by graph: the trainer has one for each length of a batch."""


def main(mode: str, folder: str, *names: str) -> None:
    if mode != "plain":
        hvdtrain.init()
    import keras

    from tests.keras_io.examples import EXAMPLES

    keras.config.set_floatx("float64")
    for name in names:
        print(f"BEGINS {name}", flush=True)
        kept = Path(folder, f"{name}.pickle")
        try:
            if mode == "plain" or (mode == "both" and hvdtrain.rank() == 0):
                keep_reference(EXAMPLES[name], kept)
            said = "trained" if mode == "plain" else compared(EXAMPLES[name], kept)
        except Exception as error:
            traceback.print_exc()
            said = refusal(error)
        if mode != "plain":
            said = next((each for each in hvdtrain.gather_object(said) if each != EQUAL), EQUAL)
        if mode == "plain" or hvdtrain.rank() == 0:
            sys.stdout.write(f"\nRESULT {json.dumps([name, said])}\n")  # one write: lines of ranks mix else
            sys.stdout.flush()


def begun(example: Callable[[], Any]) -> Any:
    """Return what an example gives, alike each time."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    return example()


def keep_reference(example: Callable[[], Any], kept: Path) -> None:
    """Train by Keras alone."""
    with noted_rows(add=False) as seen, noted_draws() as drawn:
        reference = trained(begun(example))
    if drawn:
        kept.with_suffix(".draws").touch()
    if seen:
        with noted_rows(add=True):
            kept.with_suffix(".rows").write_bytes(pickle.dumps(trained(begun(example))))
    kept.write_bytes(pickle.dumps(reference))


def compared(example: Callable[[], Any], kept: Path) -> str:
    """Train on all ranks, and return what comes out of a comparison with what is kept."""
    ours = trained_on_ranks(begun(example))
    said = difference(ours, pickle.loads(kept.read_bytes()), ROUNDING.get(kept.stem, TOLERANCE))
    of_rows, of_one = kept.with_suffix(".rows"), kept.with_suffix(".1")
    if said != EQUAL and of_rows.exists() and difference(ours, pickle.loads(of_rows.read_bytes())) == EQUAL:
        return ADDED
    if said != EQUAL and kept.with_suffix(".draws").exists():
        said = OTHER_DRAWS
    if hvdtrain.size() == 1:
        of_one.write_bytes(pickle.dumps(ours))
    elif said != EQUAL and of_one.exists():
        on_one = difference(ours, pickle.loads(of_one.read_bytes()))
        return f"{said}; as on 1 rank" if on_one == EQUAL else f"{said}; from 1 rank, {on_one}"
    return said


@contextmanager
def noted_rows(*, add: bool) -> Iterator[list[Any]]:
    """Yield a list of what Keras' optimizers are given for rows of tables, and `add` those of one index."""
    import keras
    import tensorflow as tf

    seen: list[Any] = []
    base: Any = next(each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each))
    apply = base.apply

    def applied(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        seen.extend(each for each in grads if isinstance(each, tf.IndexedSlices))
        grads = [tf.convert_to_tensor(each) if add and isinstance(each, tf.IndexedSlices) else each for each in grads]
        return apply(optimizer, grads, trainable_variables)

    base.apply = applied
    try:
        yield seen
    finally:
        base.apply = apply


@contextmanager
def noted_draws() -> Iterator[list[Any]]:
    """Yield a list of the seeds of operations by tf.random that are given none."""
    from tensorflow.python.framework import random_seed

    seen: list[Any] = []
    original = random_seed.get_seed

    def noted(op_seed: Any) -> Any:
        seen.extend([True] if op_seed is None else [])
        return original(op_seed)

    random_seed.get_seed = noted
    try:
        yield seen
    finally:
        random_seed.get_seed = original


class Alone:
    """One process, as Keras' users have it."""

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        return tf.function(step)

    def mine(self, *arrays: Any) -> list[Any]:
        return list(arrays)


class OnRanks:
    """All ranks of the job."""

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return hvdtrain.whole_batch(step)

    def mine(self, *arrays: Any) -> list[Any]:
        rank, size = hvdtrain.rank(), hvdtrain.size()
        return [each[len(each) * rank // size : len(each) * (rank + 1) // size] for each in arrays]


def trained(example: Any) -> tuple[list[Any], dict[str, Any]]:
    from tests.keras_io.training import BATCH, EPOCHS, Loop

    if isinstance(example, Loop):
        return example.run(Alone())
    sizes = {} if hasattr(example.x, "element_spec") else {"batch_size": BATCH}
    others = {**example.fit, "callbacks": [*example.fit.get("callbacks", ()), same_draws(example.model)]}
    history = example.model.fit(example.x, example.y, epochs=EPOCHS, shuffle=False, verbose=0, **sizes, **others)
    return example.model.get_weights(), history.history


def same_draws(model: Any) -> Any:
    """Return a callback by which Keras draws the numbers of the trainer, which sets generators for each step."""
    import keras

    from hvdtrain.state.train_state import TrainState

    class SetGenerators(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            state = TrainState(model, None, 0, slots=dict)
            for path, value in state.generator_states(0, self.steps).items():
                state.generators[path].assign(value)
            self.steps += 1

    return SetGenerators()


def trained_on_ranks(example: Any) -> tuple[list[Any], dict[str, Any]]:
    from tests.keras_io.training import BATCH, EPOCHS, Loop

    if isinstance(example, Loop):
        return example.run(OnRanks())
    trainer = hvdtrain.Trainer(example.model, **example.options)
    sizes = {} if hasattr(example.x, "element_spec") else {"batch": BATCH}
    result = trainer.fit(example.x, example.y, epochs=EPOCHS, shuffle=False, verbose=0, **sizes, **example.fit)
    return trainer.model.get_weights(), result.history


def difference(
    ours: tuple[list[Any], dict[str, Any]], theirs: tuple[list[Any], dict[str, Any]], rounding: float = TOLERANCE
) -> str:
    """Return where two trainings differ, or `equal`."""
    import numpy as np

    def off(one: Any, other: Any) -> float:
        one, other = (np.asarray(each, "float64") for each in (one, other))
        if one.shape != other.shape:
            return np.inf
        return float(np.max(np.abs(one - other) / np.maximum(np.abs(other), 1.0), initial=0.0))

    weights = [off(one, other) for one, other in zip(ours[0], theirs[0], strict=True)]
    if not max(weights) <= TOLERANCE:
        return f"weights differ by {max(weights):.0e}"
    if sorted(ours[1]) != sorted(theirs[1]):
        return f"History has {sorted(ours[1])}, not {sorted(theirs[1])}"
    figures = {name: off(ours[1][name], theirs[1][name]) for name in theirs[1]}
    worst = max(figures, key=lambda name: figures[name])
    return EQUAL if figures[worst] <= rounding else f"`{worst}` differs by {figures[worst]:.0e}"


def refusal(error: Exception) -> str:
    from hvdtrain.config.errors import UserError

    said = " ".join(str(error).split()).split(". ")[0][:LARGEST_SAID]
    return f"refused: {said}" if isinstance(error, UserError) else f"{type(error).__name__}: {said}"


if __name__ == "__main__":
    main(*sys.argv[1:])
