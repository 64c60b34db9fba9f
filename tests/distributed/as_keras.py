"""A training by `Model.fit` in this process, and by the trainer on all ranks: weights and figures must agree."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, computing_in

import hvdtrain

TOLERANCE = 1e-10
NO_ARGUMENTS: Mapping[str, Any] = {}


def assert_same(ours: Any, theirs: Any, what: str, tolerance: float = TOLERANCE) -> None:
    """Compare nests of arrays and numbers, or dicts of them."""
    if isinstance(theirs, Mapping):
        assert sorted(ours) == sorted(theirs), f"{what}: {sorted(ours)} for {sorted(theirs)}"
        for name in theirs:
            assert_same(ours[name], theirs[name], f"{what} {name!r}", tolerance)
        return
    ours, theirs = tf.nest.flatten(ours), tf.nest.flatten(theirs)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} values for {len(theirs)}"
    for one, other in zip(map(np.asarray, ours), map(np.asarray, theirs), strict=True):
        assert one.shape == other.shape, f"{what}: {one.shape} for {other.shape}"
        if one.dtype.kind in "OSU":
            assert (one == other).all(), f"{what}: {one} for {other}"
        else:
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=what)


def assert_trained_as_keras(
    world: World,
    build: Callable[[], keras.Model],
    compiled: Callable[[], Mapping[str, Any]],
    fit: Callable[[], Mapping[str, Any]],
    *,
    evaluate: Callable[[], Mapping[str, Any]] | None = None,
    predict: Callable[[], Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] = NO_ARGUMENTS,
    dtype: str = "float64",
) -> hvdtrain.Trainer:
    """Train, evaluate and predict both ways, and compare weights, History and what is returned.

    Args:
        build: makes the model, alike each time.
        compiled: arguments of `compile`.
        fit: arguments of `fit`; a `batch_size` is that of all ranks together.
        evaluate: arguments of `evaluate`.
        predict: arguments of `predict`.
        options: of the trainer.
    """
    with computing_in(dtype):
        reference, model = build(), build()
        reference.compile(**compiled())
        model.compile(**compiled())
        trainer = hvdtrain.Trainer(model, backend=world.backend, **options)

        def both(name: str, arguments: Callable[[], Mapping[str, Any]]) -> tuple[Any, Any]:
            ours = dict(arguments())
            if "batch_size" in ours:
                ours["batch"] = ours.pop("batch_size")
            theirs = getattr(reference, name)(verbose=0, **arguments())
            return getattr(trainer, name)(verbose=0, **ours), theirs

        ours, theirs = both("fit", fit)
        assert_same(model.get_weights(), reference.get_weights(), "weights")
        assert_same(ours.history, theirs.history, "history")
        if evaluate is not None:
            assert_same(*both("evaluate", evaluate), "evaluate")
        if predict is not None:
            assert_same(*both("predict", predict), "predict")
    return trainer
