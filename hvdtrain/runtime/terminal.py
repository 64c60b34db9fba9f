"""Whether what a rank prints reaches a terminal, or only looks as if it did."""

import os
import sys
from collections.abc import Mapping

from hvdtrain.runtime.launchers import Environment

TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def on_terminal(environment: Environment, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether standard output is a terminal on which lines can be redrawn.

    Open MPI gives each rank a terminal of its own and passes on what is written to it, wherever its own output
    goes and with a tag before each line if it was told so: there, the launcher's output decides.
    """
    if not sys.stdout.isatty() or environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if environment.launcher == "none":
        return True
    if environ.get("OMPI_MCA_orte_tag_output", "0") not in ("0", "false"):
        return False
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(TERMINALS)
    except OSError:
        return False
