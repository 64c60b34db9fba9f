"""What a user asks to have started."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.launch.hosts import Host


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started, on what, and how."""

    arguments: tuple[str, ...]
    """Of `python -m hvdtrain`; or a script of the user's own, and its arguments."""
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    controller: Literal["auto", "gloo", "mpi"] = "auto"
    oversubscribe: bool = False
    """Start more ranks than there are cores or slots."""
    discovery: str | None = None
    """A program that prints the hosts there are by now, of an elastic job."""
    min_ranks: int | None = None
    max_ranks: int | None = None
    extra: tuple[str, ...] = ()
    """The user's own flags of the launcher."""

    def __post_init__(self) -> None:
        if self.discovery is None and (self.min_ranks or self.max_ranks):
            raise ConfigError("--min-np and --max-np are of elastic jobs: they need --host-discovery-script.")
        if self.discovery is not None and (self.hosts or self.controller == "mpi"):
            other = "--hosts" if self.hosts else "--mpi"
            raise ConfigError(f"--host-discovery-script names the hosts itself, and runs over Gloo: leave out {other}.")
        if not (self.min_ranks or 1) <= (self.ranks or self.min_ranks or 1) <= (self.max_ranks or self.ranks or 2**31):
            raise ConfigError(
                f"-np must lie between --min-np and --max-np. Received: -np {self.ranks}, --min-np {self.min_ranks}, "
                f"--max-np {self.max_ranks}."
            )

    def program(self, python: str) -> tuple[str, ...]:
        """Return the command of each rank."""
        if self.arguments and self.arguments[0].endswith(".py"):
            return (python, *self.arguments)
        return (python, "-m", "hvdtrain", *self.arguments)
