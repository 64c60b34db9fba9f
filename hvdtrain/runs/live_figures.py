"""Figures of a run under way that no record holds, for whoever asks while it trains."""

from collections.abc import Callable
from typing import Any

from hvdtrain.checkpoint.naming import complete, step_of
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.session import Session
from hvdtrain.training.trainer import Trainer


def run_figures(trainer: Trainer, folder: RunFolder, session: Session) -> Callable[[], dict[str, float]]:
    """Return a function that looks at a run, from any thread, and returns its figures by name."""
    per_step, ranks = exchanged_bytes(trainer), trainer.backend.size

    def figures() -> dict[str, float]:
        scalars = trainer.state.scalars
        bad, saved = scalars.bad_steps, complete(folder.checkpoints)
        found: dict[str, float] = {
            "bad_steps": bad.non_finite + bad.spikes,
            "rollbacks": len(bad.rollbacks),
            "checkpoints": len(saved),
            "exchange_bytes": scalars.step * per_step if ranks > 1 else 0,
        }
        if saved:
            found["checkpoint_step"] = step_of(saved[-1])
        slow = session.link.stragglers.latest if session.link.stragglers is not None else None
        if slow is not None:
            found |= {"slowest_rank": slow.rank, "slowest_rank_own_seconds": slow.own_ms / 1000.0}
        return found

    return figures


SCATTERS_EACH_MICROBATCH = 2
"""From this stage of ZeRO on gradients are not accumulated whole."""


def exchanged_bytes(trainer: Trainer) -> float:
    """Return the bytes of dense gradients that a rank gives to the exchange in a step; of local steps, of weights."""
    options = trainer.options
    sizes = (_bytes(variable, options.compression) for variable in trainer.model.trainable_variables)
    rounds = options.accumulate if options.zero >= SCATTERS_EACH_MICROBATCH else 1
    return sum(sizes) * rounds / max(1, options.local_steps or 1)


def _bytes(variable: Any, compression: str | None) -> int:
    size = 1
    for each in variable.shape:
        size *= int(each)
    width = 2 if compression in ("bf16", "fp16") or "16" in str(variable.dtype) else _WIDTHS.get(str(variable.dtype), 4)
    return size * width


_WIDTHS = {"float64": 8, "float32": 4}
