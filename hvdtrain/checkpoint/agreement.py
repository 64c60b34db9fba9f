"""What the ranks tell one another while a checkpoint is written or read."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.config.errors import CheckpointError

if TYPE_CHECKING:
    from hvdtrain.backends.protocol import Among

TIMEOUT_S = 3600.0
"""A slow disk is no fault; a rank that ends takes the others with it by itself."""


class Ranks(Protocol):
    """What a checkpointer needs of a backend."""

    @property
    def primary(self) -> bool:
        """Whether this process writes the manifest, and reads what all hold alike; it comes first in `gather_bytes`."""

    @property
    def rank(self) -> int:
        """This process's place in `gather_bytes`."""

    @property
    def job_size(self) -> int:
        """Number of processes; more than `processes` where each replica is split among some."""

    @property
    def processes(self) -> int:
        """Number of processes that hold the same part of a replica."""

    def broadcast(self, tensors: dict[str, Any], *, root: int = 0, among: "Among" = "replicas") -> None:
        """Give every replica, or every process of the job, the values that `root` has, by path."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None) -> list[bytes]:
        """Return every process's `payload`, in rank order."""


def is_split(ranks: Ranks) -> bool:
    """Tell whether processes hold different parts of the model."""
    return ranks.job_size > ranks.processes


def on_every_rank(ranks: Ranks, act: Callable[[], Any]) -> list[Any]:
    """Call `act`, which returns JSON, and return what it returned on every rank; an error on one is raised on all.

    Raises:
        CheckpointError: what the first rank on which `act` failed says, naming it where it is another one.
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
