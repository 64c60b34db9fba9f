"""Options of logging, TensorBoard, tracing and metrics export."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.options import applies_to, excludes, flag, option, section
from hvdtrain.config.runtime import STRATEGIES

TrackerName = Literal["none", "wandb", "mlflow"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class TraceConfig:
    """Scope of a job's trace."""

    timeline: Path
    """Path that rank 0 writes."""
    steps: tuple[int, int] | None = None
    """First and last step whose ops are recorded; None: no step."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks whose ops are recorded; empty: all."""


def _check_file(timeline: str) -> None:
    if Path(timeline).is_dir() or not timeline:
        raise ConfigError(f"{opt('timeline')} names a file. Received: {timeline!r}, which is a folder.")


def _profiled_steps(profile: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", profile.strip())
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"{opt('profile')} is START:STOP, two steps from 1 on, such as 10:12. Received: {profile!r}.")
    return first, last


@section
class ObservabilityConfig:
    """Logging, event files, traces and metrics of a run."""

    log_every: int = option(10, "[1, inf)")
    """Steps between two that metrics.jsonl has; of these a terminal shows at most one in two seconds."""
    tensorboard: bool = flag(True)
    """Write TensorBoard event files."""
    tracker: TrackerName = flag("none")
    """Also write the run to Weights & Biases or MLflow, whose environment variables say where to."""
    plots: bool = flag(True)
    """Plot curves.png at the end."""
    rank_logs: bool = flag(True)
    """Write each rank's log to logs/rank-N.log of the run folder, on the rank's host."""
    timeline: str | None = option(
        None,
        excludes(
            STRATEGIES,
            why="it records the exchange of Horovod",
            instead="leave it out; TensorFlow's own profiler shows that of tf.distribute",
        ),
        valid=_check_file,
    )
    """Write one trace of all ranks, including Horovod's collectives, to this file, for ui.perfetto.dev."""
    profile: str | None = option(None, applies_to("timeline"), valid=_profiled_steps)
    """START:STOP, inclusive: also record TensorFlow ops of these steps in the timeline."""
    profile_ranks: tuple[int, ...] = option((), "[0, inf)", applies_to("profile"))
    """Ranks whose ops are recorded; default: all."""
    metrics_port: int | None = flag(None, "[0, 65535]")
    """Serve metrics to Prometheus on this port of rank 0's host; 0: any free port."""
    metrics_host: str = flag(LOOPBACK, applies_to("metrics_port"))
    """Address to serve metrics on; 0.0.0.0: all interfaces, open to everyone who can reach them."""

    @property
    def trace(self) -> TraceConfig | None:
        """The trace to record, if any."""
        if self.timeline is None:
            return None
        steps = None if self.profile is None else _profiled_steps(self.profile)
        return TraceConfig(Path(self.timeline), steps, self.profile_ranks)


def traced(
    timeline: str | os.PathLike[str] | None,
    profile: str | Sequence[int] | None = None,
    profile_ranks: Sequence[int] = (),
) -> ObservabilityConfig:
    """Return the options of a trace from arguments of a script. Raises ConfigError."""
    return ObservabilityConfig(
        timeline=None if timeline is None else os.fspath(timeline),
        profile=profile if profile is None or isinstance(profile, str) else ":".join(map(str, profile)),
        profile_ranks=tuple(profile_ranks),
    )
