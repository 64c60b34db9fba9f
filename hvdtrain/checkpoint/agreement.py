"""Agreement of the ranks while a checkpoint is written or read: an error on one rank is raised on all."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdtrain.config.errors import CheckpointError

if TYPE_CHECKING:
    from hvdtrain.backends.protocol import Backend

TIMEOUT_S = 3600.0
"""Generous: slow disks are not an error, and dead ranks are detected elsewhere."""


def is_split(ranks: "Backend") -> bool:
    """Return whether processes hold different shards of the model."""
    return ranks.job_size > ranks.processes


def on_every_rank(ranks: "Backend", act: Callable[[], Any]) -> list[Any]:
    """Call `act`, which returns JSON, and gather the results of all ranks. Collective.

    Raises:
        CheckpointError: of the first rank on which `act` raised one, named if it is another rank.
    """
    error: CheckpointError | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = act()
    except CheckpointError as raised:
        error, outcome["error"] = raised, str(raised)
    gathered = ranks.gather_bytes(json.dumps(outcome).encode(), timeout=TIMEOUT_S)
    answers = [json.loads(answer) for answer in gathered]
    failed = next((rank for rank, answer in enumerate(answers) if "error" in answer), None)
    if error is not None:
        raise error
    if failed is not None:
        raise CheckpointError(f"rank {failed}: {answers[failed]['error']}")
    return [answer["value"] for answer in answers]


def on_primary(ranks: "Backend", act: Callable[[], Any]) -> Any:
    """Call `act`, which returns JSON, on the primary alone, and return its result on every rank. Collective.

    Raises:
        CheckpointError: if `act` did.
    """
    return on_every_rank(ranks, lambda: act() if ranks.primary else None)[0]
