"""Horovod's own launcher, where it speaks over Gloo."""

import socket
from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import STARTER_VARIABLE, Environment, number, place


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Tell whether ``horovodrun`` discovers hosts, and forms the job anew when ranks are lost or come."""
    return environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


class HorovodrunGloo:
    """``horovodrun --gloo``, and whoever sets the same variables: by hand, or `hvdtrain.runtime.rendezvous`."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if not {"HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} <= environ.keys():
            return None
        port = number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
        # Without the token that a patched Horovod puts behind it.
        address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[0].partition(":")[0]
        return place(
            launcher=environ.get(STARTER_VARIABLE, "horovodrun"),
            controller="gloo",
            world=(number(environ, "HOROVOD_RANK"), number(environ, "HOROVOD_SIZE")),
            local=(number(environ, "HOROVOD_LOCAL_RANK"), number(environ, "HOROVOD_LOCAL_SIZE")),
            cross=(number(environ, "HOROVOD_CROSS_RANK"), number(environ, "HOROVOD_CROSS_SIZE")),
            hostname=environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
            job_id=f"{address}:{port}",
            elastic=is_elastic(environ),
        )
