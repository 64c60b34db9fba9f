"""Options of what a run reports."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

LOOPBACK = "127.0.0.1"


@section
class ObservabilityConfig:
    """What a run records."""

    log_every: int = 10
    """Steps between two logged steps."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    plots: bool = True
    """Draw curves.png at the end."""
    timeline: str | None = None
    """Write one trace of all ranks to this file, with Horovod's exchange, for ui.perfetto.dev."""
    profile: str | None = None
    """START:STOP, both included: draw TensorFlow's operations in these steps into the timeline as well."""
    profile_ranks: tuple[int, ...] = ()
    """Ranks whose operations are drawn; all by default."""
    metrics_port: int | None = None
    """Serve figures of the run to Prometheus at this port of rank 0's host; 0: at any free one."""
    metrics_host: str = LOOPBACK
    """Address at which they are served; 0.0.0.0: at all of the host's, to whoever can reach it."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ConfigError(f"{opt('log_every')} must be at least 1. Received: {self.log_every}.")
        check_metrics_port(self.metrics_port)
        trace_config(self.timeline, self.profile, self.profile_ranks)
        if self.metrics_host != LOOPBACK and self.metrics_port is None:
            raise ConfigError("--metrics-host has no effect without --metrics-port: leave it out.")


def check_metrics_port(port: int | None) -> None:
    """Refuse what is no port.

    Raises:
        ConfigError: naming the value.
    """
    if port is not None and not 0 <= port < 65536:
        raise ConfigError(f"--metrics-port must be a port, up to 65535, or 0 for any free one. Received: {port}.")


@dataclass(frozen=True)
class TraceConfig:
    """What is recorded for the trace of a job."""

    timeline: Path
    """Where rank 0 writes it."""
    steps: tuple[int, int] | None = None
    """The first and the last step whose operations are recorded; None: of no step."""
    profile_ranks: tuple[int, ...] = ()
    """The ranks whose operations are; empty: all."""


def trace_config(
    timeline: str | Path | None, profile: str | Sequence[int] | None = None, profile_ranks: Sequence[int] = ()
) -> TraceConfig | None:
    """Return what is to be recorded, as `--timeline`, `--profile` and `--profile-ranks` say; None for nothing.

    Raises:
        ConfigError: options that do not fit together, or steps that are none.
    """
    if timeline is None:
        useless = opt("profile") if profile is not None else opt("profile_ranks") if profile_ranks else None
        if useless is not None:
            raise ConfigError(
                f"{useless} has no effect without {opt('timeline')}, into which it is drawn: name a file."
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
    """Return the first and the last step."""
    if isinstance(profile, str):
        found = re.fullmatch(r"(\d+):(\d+)", profile.strip())
        numbers = tuple(map(int, found.groups())) if found else ()
    else:
        numbers = tuple(profile)
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"{opt('profile')} is START:STOP, two steps from 1 on, such as 10:12. Received: {profile!r}.")
    return numbers[0], numbers[1]
