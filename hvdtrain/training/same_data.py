"""The training data of a script as its checkpoints describe them: a training goes on with the same."""

import hashlib
from collections.abc import Mapping
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import CheckpointError
from hvdtrain.data.identity import Identity
from hvdtrain.data.order import Order
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.data.source import Source
from hvdtrain.data.streams.rank_parts import RankTraining

_WORDS = {"steps_per_epoch": "steps per epoch", "batch": "samples per step over all ranks"}


def described(data: TrainingData, seed: int, backend: Backend) -> Identity:
    """Return what must stay the same of `data` where a training goes on, with the seed of their order.

    Of batches that a Dataset or a generator gives it is their size and number: their order is the user's own. Of data
    that each rank has for itself it is the number of ranks, and what each has. Every rank calls it.
    """
    facts: dict[str, Any] = {"batch": data.batch, "steps_per_epoch": data.steps_per_epoch, "seed": seed}
    if isinstance(data, SourceTraining):
        facts["shuffle"] = data.order.shuffle if isinstance(data.order, Order) else None
        facts["samples"] = data.source.size
        facts["fingerprint"] = _fingerprint(data.source)
    if isinstance(data, RankTraining):
        mine = _fingerprint(data.source) or ""
        everyone = backend.gather_bytes(mine.encode(), timeout=None)
        facts["ranks"] = len(everyone)
        facts["fingerprint"] = hashlib.sha256(b" ".join(everyone)).hexdigest()
    return {"training": facts}


def _fingerprint(source: Source | None) -> str | None:
    """Return a fingerprint of all samples; None where there is none."""
    return source.fingerprint().hex() if source is not None and hasattr(source, "fingerprint") else None


def check_goes_on(before: Mapping[str, Any] | None, now: Identity | None) -> None:
    """Refuse to go on with a training on other data than `before`, as far as both are known.

    Raises:
        CheckpointError: naming what differs.
    """
    then, today = (before or {}).get("training", {}), (now or {}).get("training", {})
    differing = [name for name in today if then.get(name) is not None and today[name] not in (None, then[name])]
    if not differing:
        return
    name = differing[0]
    if name == "fingerprint":
        what = "samples with other values"
    else:
        what = f"{_WORDS.get(name, name)} {today[name]} now and {then[name]} before"
    raise CheckpointError(
        f"A training goes on with the data and the batch that it began with. Received: {what}. Give fit the same "
        "(batch=N is the size over all ranks), or begin a new training: in another folder, or with restore in place "
        "of resume."
    )
