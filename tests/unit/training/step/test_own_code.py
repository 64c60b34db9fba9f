"""Operations of keras.ops in a model's graph that put samples together are found by their trace."""

import keras
import numpy as np
import pytest

from hvdtrain.training.step.own_code import own_parts
from tests.distributed.keras_operations import OPERATIONS, OVER_BATCH
from tests.distributed.partition_cases import Case
from tests.distributed.zoo.operations import kinds_on_page

ops = keras.ops
FOR_GRADIENTS = {"ops.batch_normalization"}
"""What is fetched is the gradient by a mean that all ranks have."""


def model_of(case: Case) -> keras.Model | None:
    """Return a model of a function's operations; None if it takes no symbols."""
    inputs = [keras.Input(shape, dtype="int32" if case.integers else None) for shape in case.rows]
    try:
        outputs = case.function(*inputs, *(np.ones(shape, "float32") for shape in case.shared))
        return keras.Model(inputs, outputs)
    except Exception:
        return None


@pytest.mark.parametrize("over_batch", [False, True])
def test_functions_of_keras_are_found_where_a_step_fetches_for_them(over_batch):
    cases = OVER_BATCH if over_batch else OPERATIONS
    models = {name: model for name, case in cases.items() if (model := model_of(case)) is not None}
    fetching = {"sums of the batch", "samples"}
    of_several = {name for kind in fetching for name in kinds_on_page(kind, over_batch=over_batch)}
    found = {name for name, model in models.items() if own_parts(model)}
    assert len(models) > (20 if over_batch else 150)
    assert of_several & set(models) - FOR_GRADIENTS <= found


def residual(x):
    return ops.relu(keras.layers.Dense(4)(x) + x) * 2.0


def pooled(x):
    return ops.concatenate([x[:, 0], ops.mean(x, axis=1), ops.max(x, axis=-1)], -1)


def attention(x):
    scores = ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1))) / 2.0)
    return ops.reshape(ops.einsum("bij,bjk->bik", scores, x), (-1, 20))


def positions(x):
    return ops.cumsum(ops.ones_like(x), axis=1)


@pytest.mark.parametrize("function", [residual, pooled, attention, positions])
def test_operations_on_each_sample_are_none_of_ones_own(function):
    x = keras.Input((5, 4))
    assert own_parts(keras.Model(x, function(x))) == []


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x - ops.mean(x, 0), "Mean"),
        (lambda x: x / ops.max(x), "Max"),
        (lambda x: ops.flip(x, 0), "Flip"),
        (lambda x: ops.transpose(x, (1, 0, 2)), "Transpose"),
        (lambda x: ops.slice(x, (0, 0, 0), (1, 5, 4)), "Slice"),
        (lambda x: ops.reshape(x, (-1, 4)), "Reshape"),
        (lambda x: ops.tile(x, (2, 1, 1)), "Tile"),
    ],
)
def test_operations_on_several_samples_are_named(function, named):
    x = keras.Input((5, 4))
    assert f"operation {named} " in own_parts(keras.Model(x, function(x)))[0]


def test_of_a_model_that_names_its_number_of_samples_nothing_is_assumed():
    x = keras.Input(batch_shape=(8, 4))
    assert own_parts(keras.Model(x, x + 1.0))
