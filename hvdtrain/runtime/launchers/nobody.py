"""No launcher at all."""

from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, place


class Nobody:
    """No launcher: one process that is the whole job."""

    def detect(self, environ: Mapping[str, str]) -> Environment:
        """See `Launcher.detect`; always answers."""
        return place(launcher="none", controller="none", world=(0, 1), local=(0, 1), job_id="none")
