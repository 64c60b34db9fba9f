"""Broadcasting of variables."""

from collections.abc import Iterable
from typing import Any, NoReturn

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set
from hvdtrain.horovod.collectives import broadcast_
from hvdtrain.horovod.exchange import exchange_among, is_included, place_among
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import as_written, unwrap


@as_written
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> None:
    """Broadcast `variables` from `root_rank` to every rank of `process_set`.

    Keras and TensorFlow variables are matched by position in the list. `inplace` needs no second copy.
    """
    tensors = [unwrap(variable) for variable in variables]
    if not is_included(process_set):
        return
    if not inplace:
        call = numbered("variables")
        by_place = {f"{call}/{place}": tensor for place, tensor in enumerate(tensors)}
        exchange = exchange_among(process_set)
        exchange.broadcast(by_place, root=place_among(root_rank, exchange))
        return
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        broadcast_([tensor for tensor in tensors if tensor.device == device], root_rank, None, process_set)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise: TensorFlow 2 keeps no list of all variables.

    Raises:
        ConfigError: always; names the function to call instead.
    """
    raise ConfigError(
        "broadcast_global_variables needs TensorFlow 1's list of all variables. Call "
        f"hvd.broadcast_variables(model.variables + optimizer.variables, root_rank={root_rank}) instead."
    )


class BroadcastGlobalVariablesHook:
    """Placeholder for Horovod's hook of TensorFlow 1 sessions; raises on construction."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise ConfigError(
            "BroadcastGlobalVariablesHook belongs to TensorFlow 1's sessions and estimators, which TensorFlow 2 "
            f"does not run. With model.fit pass hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}); in your "
            "own loop call hvd.broadcast_variables(model.variables + optimizer.variables, "
            f"root_rank={root_rank}) before the first step."
        )
