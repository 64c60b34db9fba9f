"""Who is what in a job of a chief, workers and parameter servers: pure arithmetic of ranks."""

from dataclasses import dataclass

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.tf_config import Task

CHIEF, WORKER, SERVER = "chief", "worker", "ps"
"""Types of tasks, as TF_CONFIG names them."""


@dataclass(frozen=True)
class Roles:
    """The ranks of a job in their order: one chief, then the workers, then the parameter servers."""

    workers: int
    servers: int

    @property
    def tasks(self) -> list[Task]:
        """What each rank is, in the order of ranks."""
        numbers = {CHIEF: 1, WORKER: self.workers, SERVER: self.servers}
        return [(kind, index) for kind, count in numbers.items() for index in range(count)]


def roles_of(config: RuntimeConfig, environment: Environment) -> Roles:
    """Split the ranks of a job.

    Raises:
        LaunchError: there are too few of them.
    """
    servers = config.parameter_servers or 1
    workers = environment.size - 1 - servers
    if workers >= 1:
        return Roles(workers, servers)
    least = servers + 2
    fewer = f", or name fewer {opt('parameter_servers')}" if servers > 1 else ""
    raise LaunchError(
        f"{opt('backend', 'parameter_server')} needs a chief, a worker and {_plural(servers)}: start at least {least} "
        "ranks "
        f"(mpirun -np {least} …){fewer}. "
        f"Received: {environment.size}."
    )


def _plural(servers: int) -> str:
    return "a parameter server" if servers == 1 else f"{servers} parameter servers"
