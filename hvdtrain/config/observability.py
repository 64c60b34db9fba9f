"""Options of logging, TensorBoard, tracing and metrics export."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

LOOPBACK = "127.0.0.1"


@section
class ObservabilityConfig:
    """Logging, event files, traces and metrics of a run."""

    log_every: int = 10
    """Steps between two log lines."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    plots: bool = True
    """Plot curves.png at the end."""
    rank_logs: bool = True
    """Write each rank's log to logs/rank-N.log of the run folder, on the rank's host."""
    timeline: str | None = None
    """Write one trace of all ranks, including Horovod's collectives, to this file, for ui.perfetto.dev."""
    profile: str | None = None
    """START:STOP, inclusive: also record TensorFlow ops of these steps in the timeline."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks whose ops are recorded; default: all."""
    metrics_port: int | None = None
    """Serve metrics to Prometheus on this port of rank 0's host; 0: any free port."""
    metrics_host: str = LOOPBACK
    """Address to serve metrics on; 0.0.0.0: all interfaces, open to everyone who can reach them."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ConfigError(f"{opt('log_every')} must be at least 1. Received: {self.log_every}.")
        check_metrics_port(self.metrics_port)
        trace_config(self.timeline, self.profile, self.profile_ranks)
        if self.metrics_host != LOOPBACK and self.metrics_port is None:
            raise ConfigError("--metrics-host has no effect without --metrics-port: leave it out.")


def check_metrics_port(port: int | None) -> None:
    """Validate a port number. Raises ConfigError if out of range."""
    if port is not None and not 0 <= port < 65536:
        raise ConfigError(f"--metrics-port must be a port, up to 65535, or 0 for any free one. Received: {port}.")


@dataclass(frozen=True)
class TraceConfig:
    """Scope of a job's trace."""

    timeline: Path
    """Path that rank 0 writes."""
    steps: tuple[int, int] | None = None
    """First and last step whose ops are recorded; None: no step."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks whose ops are recorded; empty: all."""


def trace_config(
    timeline: str | Path | None, profile: str | Sequence[int] | None = None, profile_ranks: Sequence[int] = ()
) -> TraceConfig | None:
    """Parse `--timeline`, `--profile` and `--profile-ranks`; None without a timeline. Raises ConfigError."""
    if timeline is None:
        useless = opt("profile") if profile is not None else opt("profile_ranks") if profile_ranks else None
        if useless is not None:
            raise ConfigError(
                f"{useless} has no effect without {opt('timeline')}, in which it is recorded: name a file."
            )
        return None
    if profile is None and profile_ranks:
        raise ConfigError(f"{opt('profile_ranks')} has no effect without {opt('profile')}: leave it out.")
    if Path(timeline).is_dir() or not str(timeline):
        raise ConfigError(f"{opt('timeline')} names a file. Received: {str(timeline)!r}, which is a folder.")
    if any(rank < 0 for rank in profile_ranks):
        raise ConfigError(f"{opt('profile_ranks')} must be numbers of ranks, from 0. Received: {tuple(profile_ranks)}.")
    return TraceConfig(Path(timeline), None if profile is None else _steps(profile), tuple(profile_ranks))


def _steps(profile: str | Sequence[int]) -> tuple[int, int]:
    if isinstance(profile, str):
        found = re.fullmatch(r"(\d+):(\d+)", profile.strip())
        numbers = tuple(map(int, found.groups())) if found else ()
    else:
        numbers = tuple(profile)
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"{opt('profile')} is START:STOP, two steps from 1 on, such as 10:12. Received: {profile!r}.")
    return numbers[0], numbers[1]
