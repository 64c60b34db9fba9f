"""Options of elastic training."""

from hvdtrain.config.options import applies_to, option, section

COMMIT_EVERY = 10
"""Default interval in steps: the most work that a lost rank costs.

Copying the state is cheap next to this many steps.
"""


@section
class ElasticConfig:
    """Training that survives lost or joining ranks, under horovodrun's host discovery."""

    elastic: bool = option(False, applies_to("backend=auto|horovod"))
    """Resume from the last commit when ranks are lost, and admit new hosts: horovodrun --min-np …"""
    commit_every: int = option(COMMIT_EVERY, "[1, inf)", applies_to("elastic"))
    """With --elastic: commit the state to host memory every N steps; new ranks join at commits."""
