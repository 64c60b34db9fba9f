"""Whether all ranks hold the same weights before something is computed with them."""

from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.state.structure import structure_of
from hvdtrain.training.update_rules.base import UpdateRule


def checksum(tensors: Mapping[str, tf.Variable]) -> int:
    """Return the CRC-32C of the values, in the order of their paths: 200 MB take 0.03 s."""
    crc = 0
    for _, variable in sorted(tensors.items()):
        octets = np.ascontiguousarray(variable.numpy()).reshape(-1).view(np.uint8)
        octets.flags.writeable = False  # the extension takes nothing that may change
        crc = google_crc32c.extend(crc, octets)
    return crc


def weights_of(model: Any, rule: UpdateRule | None = None) -> dict[str, tf.Variable]:
    """Return the weights of `model` by structural path, and the replicated tensors of `rule`, if it is given."""
    weights = {f"model/{path}": v for path, v in structure_of(model).by_path(model.weights).items()}
    tensors = {} if rule is None else rule.named_tensors()
    return weights | {path: tensor.value for path, tensor in tensors.items() if tensor.replicated}


def give_first_weights(tensors: Mapping[str, tf.Variable], backend: Backend) -> bool:
    """Give every rank the values of rank 0 where ranks differ, as `fit` does, and tell whether they did.

    A user may have loaded weights on rank 0 alone, or each rank may have drawn its own. Every rank calls it, with the
    same paths.
    """
    if backend.processes == 1:
        return False
    mine = checksum(tensors).to_bytes(4, "big")
    # A rank may come late: it loads its data.
    if len(set(backend.gather_bytes(mine, timeout=None))) == 1:
        return False
    backend.broadcast(dict(tensors))
    return True
