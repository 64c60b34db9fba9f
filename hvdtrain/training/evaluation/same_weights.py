"""Whether all ranks hold the same weights before something is computed with them."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.state.hashes import checksum
from hvdtrain.state.placement import held_apart, placement_of
from hvdtrain.state.structure import structure_of
from hvdtrain.training.update_rules.base import UpdateRule

WEIGHTS = "model/"
"""How the paths of the model's weights begin."""


def weights_of(model: Any, rule: UpdateRule | None = None) -> dict[str, tf.Variable]:
    """Return the weights of `model` by structural path, and the replicated tensors of `rule`, if it is given."""
    weights = {f"{WEIGHTS}{path}": v for path, v in structure_of(model).by_path(model.weights).items()}
    tensors = {} if rule is None else rule.named_tensors()
    return weights | {path: tensor.value for path, tensor in tensors.items() if tensor.replicated}


def give_first_weights(tensors: Mapping[str, tf.Variable], backend: Backend) -> bool:
    """Give every rank the values of rank 0 where ranks differ, as `fit` does, and tell whether they did.

    Of experts and tables that ranks have divided among them each holds its own slices, and gets those of the first that
    holds the same.

    A user may have loaded weights on rank 0 alone, or each rank may have drawn its own. Every rank calls it, with the
    same paths.
    """
    along_tp = _give_along_tp(tensors, backend)
    if backend.size == backend.local_size:
        return along_tp
    held = held_apart(tensors)
    shared = {path: tensor for path, tensor in tensors.items() if path not in held}
    mine = b"".join(checksum(each).to_bytes(4, "big") for each in (shared, held))
    # A rank may come late: it loads its data.
    everyone = backend.gather_bytes(mine, timeout=None, among="replicas")
    parts = backend.along("ep").size if held else 1
    if all(theirs == everyone[0][:4] + everyone[rank % parts][4:] for rank, theirs in enumerate(everyone)):
        return along_tp
    backend.broadcast(shared)
    if held:
        backend.broadcast(held, among="holders")
    return True


def _give_along_tp(tensors: Mapping[str, tf.Variable], backend: Backend) -> bool:
    """Do the same among the ranks that hold slices of one model, for the weights that each of them holds whole."""
    if backend.axes.get("tp", 1) == 1:
        return False
    # Not for slots, which do not know themselves whether they belong to a slice.
    placements = {path: placement_of(tensor) for path, tensor in tensors.items() if path.startswith(WEIGHTS)}
    whole = {path: tensors[path] for path, placed in placements.items() if placed is None or "tp" not in placed.axes}
    if len(set(backend.gather_bytes(checksum(whole).to_bytes(4, "big"), timeout=None, among="tp"))) == 1:
        return False
    backend.broadcast(whole, among="tp")
    return True
