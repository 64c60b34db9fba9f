"""Does Horovod really reduce here? Run it under a launcher, with any number of ranks.

Every rank sums a float tensor with the real all-reduce operation, eagerly and inside a ``tf.function``,
and compares it with the closed form. Rank 0 prints one line of JSON; the exit code is 0, or 1 where the
check failed. It reads nothing of the rest of hvdtrain: it also tells about an installation that is broken
elsewhere.

With the argument `gpus`, and one rank for each GPU, it tries them: each rank takes the GPU of its local rank, sums
tensors that lie on it, times a large sum, and takes training steps in float16 beside the same in float32. Without GPUs
the same is done on CPUs, and the report says so.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ELEMENTS = 1000
"""Length of the vector that is summed; all sums stay exact in float32."""
MEGABYTES = 64
"""Size of the tensor whose sum is timed."""
TIMED = 5
STEPS = 20
LOSS_SCALE = 128.0
TOLERANCE = 0.02
"""Between the last losses in float16 and in float32, relative to the first loss: five times the 2**-8 that a sum over
64 products, each rounded to 11 bits, may be off."""

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


def take_gpu(tf: Any, local_rank: int) -> str:
    """Show TensorFlow the GPU of this rank alone and return its name; ``CPU`` where there are none."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU"
    if local_rank >= len(gpus):
        raise RuntimeError(f"Local rank {local_rank} finds {len(gpus)} GPUs: start one rank for each GPU.")
    tf.config.set_visible_devices([gpus[local_rank]], "GPU")
    tf.config.experimental.set_memory_growth(gpus[local_rank], True)
    return str(tf.config.experimental.get_device_details(gpus[local_rank]).get("device_name", "GPU"))


def gigabytes_per_second(hvd: Any, tf: Any) -> float:
    """Return the median rate at which a large float32 tensor is summed over all ranks."""
    tensor, times = tf.ones([MEGABYTES << 18]), []
    for _ in range(TIMED + 1):
        begin = time.perf_counter()
        hvd.allreduce(tensor, op=hvd.Sum, name="gpucheck_rate")[:1].numpy()
        times.append(time.perf_counter() - begin)
    return float(MEGABYTES / 1024 / sorted(times[1:])[TIMED // 2])


def losses(hvd: Any, tf: Any, dtype: str) -> tuple[float, float]:
    """Train a small network, whose products are in `dtype`, on other data in each rank; return its first and last loss.

    Gradients are averaged by Horovod in `dtype`, scaled as mixed precision scales them.
    """
    draw = tf.random.Generator.from_seed(1)
    weights = [tf.Variable(draw.normal([64, 64]) / 8), tf.Variable(draw.normal([64, 1]) / 8)]
    data = tf.random.Generator.from_seed(2 + hvd.rank()).normal([256, 64])
    target = tf.reduce_sum(data[:, :4], axis=1, keepdims=True)
    found = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            first, last = (tf.cast(weight, dtype) for weight in weights)
            outputs = tf.matmul(tf.tanh(tf.matmul(tf.cast(data, dtype), first)), last)
            loss = tf.reduce_mean((tf.cast(outputs, tf.float32) - target) ** 2)
            scaled = loss * LOSS_SCALE
        for number, (weight, gradient) in enumerate(zip(weights, tape.gradient(scaled, weights), strict=True)):
            mean = hvd.allreduce(tf.cast(gradient, dtype), op=hvd.Average, name=f"gpucheck_{dtype}_{number}")
            weight.assign_sub(0.05 * tf.cast(mean, tf.float32) / LOSS_SCALE)
        found.append(float(hvd.allreduce(loss, op=hvd.Average, name=f"gpucheck_{dtype}_loss")))
    return found[0], found[-1]


def check_gpus() -> dict[str, Any]:
    """Initialise Horovod, sum and train on this rank's GPU, and shut Horovod down again.

    Returns:
        ``ok`` (the same on all ranks), ``rank``, ``size``, ``device``, ``nccl`` (whether Horovod has it),
        ``wrong_elements`` (over all ranks), ``gigabytes_per_second``, and ``losses`` by dtype: the first and the last.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    device = take_gpu(tf, hvd.local_rank())
    report = {"rank": hvd.rank(), "size": hvd.size(), "device": device, "nccl": bool(hvd.nccl_built())}
    report["losses"] = found = {dtype: losses(hvd, tf, dtype) for dtype in ("float32", "float16")}
    report["gigabytes_per_second"] = gigabytes_per_second(hvd, tf)
    # The verdict goes through gather, not through the sum that is on trial; it is also the barrier before shutdown.
    wrong = hvd.allgather(tf.constant([wrong_elements(hvd, tf)]), name="gpucheck_verdict").numpy()
    hvd.shutdown()
    return {"ok": not wrong.any() and learns_alike(found), **report, "wrong_elements": int(wrong.sum())}


def learns_alike(found: dict[str, tuple[float, float]]) -> bool:
    """Tell whether the network learned, and ended in float16 where it ended in float32."""
    (first, last), (_, last_half) = found["float32"], found["float16"]
    return last < 0.9 * first and abs(last_half - last) <= TOLERANCE * first


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
    sys.exit(run(check_gpus if sys.argv[1:] == ["gpus"] else check))
