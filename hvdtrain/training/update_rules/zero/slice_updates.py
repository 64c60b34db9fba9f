"""Sequential updates of shards, to bound the number of copies."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.optim.averaging import innermost
from hvdtrain.state.variables import unwrap
from hvdtrain.training.update_rules.zero.shards import Shard
from hvdtrain.training.update_rules.zero.window import window_for


def has_lean_update(optimizer: Any) -> bool:
    """Return whether `optimizer` only updates variables one by one: no weight decay or averages."""
    return innermost(optimizer) is optimizer and not optimizer.weight_decay and not optimizer.use_ema


@contextmanager
def slice_updates(optimizer: Any, shards: Iterable[Shard], gather: Callable[[Shard], Any]) -> Iterator[None]:
    """Make `optimizer` update copies of shards, freed after the gather.

    The optimizer has a lean update and was built for the masters of `shards` and other variables; `gather` all-gathers
    an updated variable and returns the last operation.
    """
    by_master = {id(unwrap(shard.master)): shard for shard in shards}
    window = window_for(by_master.values())
    own = vars(optimizer).get("update_step")
    update = optimizer.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        shard = by_master.get(id(variable))
        if shard is None:
            update(gradient, variable, learning_rate)
            return
        with tf.control_dependencies(window.before(shard.bytes)):
            shard.fill_master()
            update(gradient, variable, learning_rate)
            last = gather(shard)
        with tf.control_dependencies([last]):
            window.add(shard.bytes, shard.release_master())

    # Bypass Keras' tracking: this is not part of the optimizer's state.
    vars(optimizer)["update_step"] = update_step
    try:
        yield
    finally:
        if own is None:
            del vars(optimizer)["update_step"]
        else:
            vars(optimizer)["update_step"] = own
