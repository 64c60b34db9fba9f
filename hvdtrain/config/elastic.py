"""Options of elastic training."""

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

COMMIT_EVERY = 10
"""Default interval in steps: the most work that a lost rank costs.

Copying the state is cheap next to this many steps.
"""


@section
class ElasticConfig:
    """Training that survives lost or joining ranks, under horovodrun's host discovery."""

    elastic: bool = False
    """Resume from the last commit when ranks are lost, and admit new hosts: horovodrun --min-np …"""
    commit_every: int = COMMIT_EVERY
    """With --elastic: commit the state to host memory every N steps; new ranks join at commits."""

    def __post_init__(self) -> None:
        check_commits(self.commit_every)
        if self.commit_every != COMMIT_EVERY and not self.elastic:
            raise ConfigError(f"{opt('commit_every')} has no effect without {opt('elastic')}: leave it out.")


def check_commits(every: int) -> int:
    """Validate and return the commit interval. Raises ConfigError if not a positive integer."""
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"{opt('commit_every')} must be at least 1. Received: {every!r}.")
    return every
