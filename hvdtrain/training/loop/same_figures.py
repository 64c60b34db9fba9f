"""The same figures on all ranks, for callbacks that decide by them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.state.holders import TIMEOUT_S


def first_along_tp(figures: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return the figures of the first of the ranks along tp, all of which call it.

    Each of them computes loss and metrics by itself, from the same samples, and rounds in its own way: a callback such
    as `ReduceLROnPlateau` might decide otherwise by the last digit.

    Args:
        figures: numbers, or arrays such as one value for each class.
        backend: the ranks.
    """
    if backend.axes.get("tp", 1) == 1:
        return dict(figures)
    mine = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in figures.items()}
    first, *_ = backend.gather_bytes(json.dumps(mine, default=float).encode(), timeout=TIMEOUT_S, among="tp")
    return {
        name: np.array(value, figures[name].dtype) if isinstance(value, list) else value
        for name, value in json.loads(first).items()
    }
