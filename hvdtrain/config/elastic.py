"""Options of elastic training."""

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

COMMIT_EVERY = 10
"""Steps: what a lost rank costs at most, and the copy of a state is cheap beside as many steps."""


@section
class ElasticConfig:
    """Training that goes on when ranks are lost or come, under horovodrun with host discovery."""

    elastic: bool = False
    """Go on from the last commit when ranks are lost, and with new ones when hosts come: horovodrun --min-np …"""
    commit_every: int = COMMIT_EVERY
    """With --elastic: keep the state in memory every this many steps, at which new ranks can join."""

    def __post_init__(self) -> None:
        check_commits(self.commit_every)
        if self.commit_every != COMMIT_EVERY and not self.elastic:
            raise ConfigError(f"{opt('commit_every')} has no effect without {opt('elastic')}: leave it out.")


def check_commits(every: int) -> int:
    """Return the number of steps between two commits, once it is seen to be one.

    Raises:
        ConfigError: naming the option.
    """
    if not isinstance(every, int) or every < 1:
        raise ConfigError(f"{opt('commit_every')} must be at least 1. Received: {every!r}.")
    return every
