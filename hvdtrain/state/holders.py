"""Compare the ranks that hold the same tensors of a split model."""

import json
from collections.abc import Mapping

import numpy as np

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.state.named_tensors import NamedTensor, bounds_of

_WORD = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio; odd, so that multiplication is invertible."""


class Holders:
    """The groups of ranks that hold the same shard of each tensor. Collective to construct."""

    def __init__(self, backend: Backend, tensors: Mapping[str, NamedTensor]) -> None:
        self._backend = backend
        whole = all(tensor.replicated for tensor in tensors.values())
        self.split = backend.job_size > backend.processes or not whole
        """Whether ranks hold different tensors or shards."""
        self.groups: list[tuple[int, ...]] = []
        """Groups of several ranks with the same shard, if split."""
        self._places: dict[str, int] = {}
        """Index of the group of each shared shard."""
        self._group_of: dict[str, int] = {}
        if self.split:
            self._find(list(_keys(tensors).values()))

    def _find(self, mine: list[str]) -> None:
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(gather(self._backend, mine)):
            for key in theirs:
                holders.setdefault(key, []).append(rank)
        self.groups = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        places = {ranks: place for place, ranks in enumerate(self.groups)}
        self._places = {key: places[tuple(holders[key])] for key in mine if len(holders[key]) > 1}

    def shared(self, tensors: Mapping[str, NamedTensor]) -> dict[str, NamedTensor]:
        """Return the tensors of which other ranks hold the same shard."""
        if not self.split:
            return dict(tensors)
        # With ZeRO-3 a rank temporarily holds full parameters.
        self._group_of = {path: self._places[key] for path, key in _keys(tensors).items() if key in self._places}
        return {path: tensors[path] for path in self._group_of}

    def sums(self, hashes: Mapping[str, int]) -> np.ndarray:
        """Return one checksum per group, int64, from the hashes of its tensors."""
        found = [0] * max(1, len(self.groups))
        for path, value in sorted(hashes.items()):
            place = self._group_of.get(path, 0)
            found[place] = (found[place] * _SPREAD + int(value) + 1) & _WORD
        return np.array(found, np.uint64).view(np.int64)

    def differing(self, sums: np.ndarray) -> tuple[int, int] | None:
        """Return the first rank that differs from its group's first, and that one, or None; `sums` [ranks, groups]."""
        for column, ranks in zip(sums.T, self.groups or [tuple(range(len(sums)))], strict=False):
            other = next((rank for rank in ranks if column[rank] != column[ranks[0]]), None)
            if other is not None:
                return other, ranks[0]
        return None

    def hashes_of_all(self, hashes: Mapping[str, int]) -> dict[str, list[dict[int, int]]]:
        """Return each path's hashes by shard group and rank. Collective."""
        mine = {path: [self._group_of.get(path, 0), int(value)] for path, value in hashes.items()}
        found: dict[str, dict[int, dict[int, int]]] = {}
        for rank, theirs in enumerate(gather(self._backend, mine)):
            for path, (group, value) in theirs.items():
                found.setdefault(path, {}).setdefault(group, {})[rank] = value
        return {path: list(groups.values()) for path, groups in found.items()}


def _keys(tensors: Mapping[str, NamedTensor]) -> dict[str, str]:
    """Return by path a key for this rank's shard."""
    return {path: json.dumps([path, *bounds_of(tensor.slice)]) for path, tensor in tensors.items()}
