"""The same model on all ranks, of which each computes some positions: another one would send other messages."""

import json
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.structure import structure_of

_TIMEOUT_S = 600.0


def agree_on_model(backend: Backend, model: Any, specs: Any) -> None:
    """Refuse ranks that split sequences of different models; every rank of the job calls it.

    Args:
        backend: the ranks.
        model: a built model.
        specs: shapes and dtypes of what it is called with.

    Raises:
        ConfigError: the same on every rank, naming one that differs, and in what.
    """
    variables = structure_of(model).by_path(model.variables)
    mine = [f"{path} of the shape {tuple(variable.shape)}" for path, variable in variables.items()]
    mine += [f"inputs of the shape {tuple(spec.shape)}" for spec in tf.nest.flatten(specs)]
    everyone = [json.loads(text) for text in backend.gather_bytes(json.dumps(mine).encode(), timeout=_TIMEOUT_S)]
    first, *others = everyone
    for rank, other in enumerate(others, start=1):
        strange = [fact for fact in (*other, *first) if (fact in other) != (fact in first)]
        if strange:
            where = f"rank {rank}, and not on rank 0" if strange[0] in other else f"rank 0, and not on rank {rank}"
            raise ConfigError(
                f"Every rank along cp computes positions of the same model. Received: {strange[0]} on {where}. Build "
                "it alike everywhere."
            )
