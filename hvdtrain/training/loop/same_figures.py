"""The same figures on all ranks, for callbacks that decide by them."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.state.holders import TIMEOUT_S


def those_of_rank_0(figures: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return rank 0's figures where ranks have split the model; all of them call it.

    Ranks along tp compute loss and metrics each by itself, from the same samples, and stages of a pipeline are told
    them over exchanges of their own. Each rounds in its own way: a callback such as `ReduceLROnPlateau` might decide
    differently by the last digit.

    Args:
        figures: numbers, or arrays such as one value for each class.
        backend: the ranks.
    """
    if not {"tp", "pp"} & set(backend.axes):
        return dict(figures)
    mine = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in figures.items()}
    first, *_ = backend.gather_bytes(json.dumps(mine, default=float).encode(), timeout=TIMEOUT_S)
    return {
        name: np.array(value, figures[name].dtype) if isinstance(value, list) else value
        for name, value in json.loads(first).items()
    }
