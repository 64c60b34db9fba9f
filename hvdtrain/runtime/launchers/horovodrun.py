"""Horovod's own launcher, where it speaks over Gloo."""

import socket
from collections.abc import Mapping

from hvdtrain.runtime.launchers.environment import Environment, number, place


class HorovodrunGloo:
    """``horovodrun --gloo``, and whoever sets the same variables by hand."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if not {"HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} <= environ.keys():
            return None
        port = number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
        return place(
            launcher="horovodrun",
            controller="gloo",
            world=(number(environ, "HOROVOD_RANK"), number(environ, "HOROVOD_SIZE")),
            local=(number(environ, "HOROVOD_LOCAL_RANK"), number(environ, "HOROVOD_LOCAL_SIZE")),
            cross=(number(environ, "HOROVOD_CROSS_RANK"), number(environ, "HOROVOD_CROSS_SIZE")),
            hostname=environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
            job_id=f"{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{port}",
        )
