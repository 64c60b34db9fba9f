"""Kubernetes, where its pods find one another by themselves."""

import socket
from collections.abc import Mapping

from hvdtrain.config.errors import LoneRanksError
from hvdtrain.runtime.launchers.environment import SECRET_VARIABLE, Environment, has_secret, number, place

INDEX = "JOB_COMPLETION_INDEX"
COMPLETIONS = "JOB_COMPLETIONS"


class IndexedJob:
    """The pods of a Job whose ``completionMode`` is ``Indexed``, each of them a rank.

    Kubernetes tells a pod its index, and not how many there are: the manifest sets JOB_COMPLETIONS.
    """

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if INDEX not in environ:
            return None
        if COMPLETIONS not in environ:
            raise LoneRanksError(
                f"A pod of an Indexed Job must know how many pods there are. Received: {INDEX}={environ[INDEX]}, and "
                f"no {COMPLETIONS}. Set {COMPLETIONS} in the manifest to its `completions`, or to 1 if each pod is to "
                "train a model of its own.",
                rank=number(environ, INDEX),
            )
        index, size = number(environ, INDEX), number(environ, COMPLETIONS)
        if size == 1:
            return None
        if not has_secret(environ):
            raise LoneRanksError(
                f"The {size} pods of an Indexed Job need a secret by which to know one another. Set "
                f"{SECRET_VARIABLE} from a Secret in the manifest, as launch/kubernetes/indexed-job-gloo.yaml does.",
                rank=index,
            )
        pod = environ.get("HOSTNAME") or socket.gethostname()
        return place(
            launcher="kubernetes",
            controller="gloo",
            world=(index, size),
            local=(0, 1),
            cross=(index, size),
            job_id=_job(pod, index),
            hostname=pod,
            hosts=[f"{_job(pod, index)}-{each}" for each in range(size)],
        )


def _job(pod: str, index: int) -> str:
    """Return the name of the Job, which its pods' host names begin with."""
    return pod.removesuffix(f"-{index}")
