"""Options of the desync check, which compares what the ranks hold."""

from dataclasses import KW_ONLY

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

DESYNC_EVERY = 100
"""Steps. A look reads the state once (200 MB take 0.03 s) and exchanges 8 bytes."""


@section
class DesyncConfig:
    """How often ranks are compared, which must hold the same weights and optimizer state."""

    _: KW_ONLY
    desync_every: int = DESYNC_EVERY
    """Compare a hash of weights and optimizer state over the ranks every this many steps, after the first steps, and at
    the end of every epoch; 0 never compares."""

    def __post_init__(self) -> None:
        if self.desync_every < 0:
            raise ConfigError(f"{opt('desync_every')} must be at least 0. Received: {self.desync_every}.")
