"""Penalties of variables of which each rank holds a slice."""

from typing import Any

import keras

from hvdtrain.backends.differentiable import sum_from
from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras_variables import replace_regularizer
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.compiled import numbered

ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers that add up over the elements, and so over slices."""


def regularize_slices(variable: Any, exchange: Collectives, name: str) -> None:
    """Let the penalty of a variable that is a slice be that of the whole.

    Args:
        variable: a Keras variable.
        exchange: the ranks that hold the other slices.
        name: of the variable, the same on all ranks.

    Raises:
        ConfigError: a regularizer that does not add up over the elements.
    """
    whole = variable.regularizer
    if whole is None:
        return
    if type(whole) not in ADDITIVE:
        raise ConfigError(
            f"The regularizer of {variable.path!r} looks at the whole variable, of which each rank has a slice; L1, L2 "
            f"and L1L2 add up. Received: {type(whole).__name__}. Leave it out, or the variable whole."
        )
    replace_regularizer(
        variable, lambda value: sum_from(whole(value), exchange, name=numbered(f"tensor/{name}/penalty"))
    )


def divide_penalty(variable: Any, ranks: int) -> None:
    """Let each rank have a part of the gradient of a whole variable's penalty, which is added up with the others'.

    Args:
        variable: a Keras variable of whose gradient each rank has a part. The penalty itself stays that of the whole.
        ranks: how many there are.
    """
    whole = variable.regularizer
    if whole is None:
        return

    def penalty(value: Any) -> Any:
        found = whole(value)
        return keras.ops.stop_gradient(found) * (1 - 1 / ranks) + found / ranks

    replace_regularizer(variable, penalty)
