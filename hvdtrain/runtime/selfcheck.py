"""Does Horovod really reduce here? Run it under a launcher, with any number of ranks.

Every rank sums a float tensor with the real all-reduce operation, eagerly and inside a ``tf.function``,
and compares it with the closed form. Rank 0 prints one line of JSON; the exit code is 0, or 1 where the
check failed. It reads nothing of the rest of hvdtrain: it also tells about an installation that is broken
elsewhere.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

ELEMENTS = 1000
"""Length of the vector that is summed; all sums stay exact in float32."""

_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def wrong_elements(hvd: Any, tf: Any) -> int:
    """Sum a vector over all ranks, eagerly and in a graph, and count the elements that came out wrong."""
    own = tf.range(ELEMENTS, dtype=tf.float32) + float(hvd.rank())
    eager = hvd.allreduce(own, op=hvd.Sum)
    # The input is an argument: a constant would be folded, and the operation run at trace time only.
    graph = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="selfcheck_sum"))(own)
    size = hvd.size()  # the closed form of the sum over ranks r of r + i, for each element i
    expected = tf.constant([size * i + size * (size - 1) / 2 for i in range(ELEMENTS)], tf.float32)
    return int(sum(int(tf.math.count_nonzero(found != expected)) for found in (eager, graph)))


def check() -> dict[str, Any]:
    """Initialise Horovod, reduce over all ranks, and shut it down again.

    Returns:
        ``ok`` (the same on all ranks), ``rank``, ``size``, ``local_size``, ``controller`` (``mpi`` or
        ``gloo``), ``wrong_elements`` (over all ranks) and the versions of TensorFlow and Horovod.
    """
    import horovod
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    report = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_size": hvd.local_size(),
        "controller": "mpi" if hvd.mpi_enabled() else "gloo" if hvd.gloo_enabled() else "none",
        "tensorflow": tf.__version__,
        "horovod": horovod.__version__,
    }
    # The verdict goes through gather, not through the sum that is on trial. It is also the barrier before
    # shutdown: a rank that left first would take Horovod down for the others.
    wrong = hvd.allgather(tf.constant([wrong_elements(hvd, tf)]), name="selfcheck_verdict").numpy()
    hvd.shutdown()
    ok = not wrong.any() and len(wrong) == report["size"]
    return {"ok": bool(ok), **report, "wrong_elements": int(wrong.sum())}


def run(check: Callable[[], dict[str, Any]]) -> int:
    """Run a check; rank 0 prints its outcome as one line of JSON. Return the exit code."""
    try:
        report = check()
    except Exception as error:
        rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
        report = {"ok": False, "rank": rank, "error": f"{type(error).__name__}: {error}"}
    if report.pop("rank") == 0:
        print(json.dumps(report), flush=True)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(run(check))
