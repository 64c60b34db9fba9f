"""The start of TensorFlow in this process: import, log level, and iterators that end without a wait."""

import contextlib
import functools
import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_NOISE = re.compile(
    rb"WARNING: All log messages before|I\d{4} \d\d:|\d{4}-\d\d-\d\d [\d:.]+: I |To enable the following"
)
_NO_DRIVER = re.compile(rb"E\d{4} .*failed call to cuInit")
"""Noise on a machine without a GPU; an error on one that has some."""
_UNTUNED = "__hvdtrain_untuned__"
_UNTUNED_CALLS = 16
"""Parallel calls of `tf.data.AUTOTUNE` without tuning, if there are as many threads: up to here tuning adds none."""


def prepare_streams() -> None:
    """Open the null device for closed standard streams, and let TensorFlow log warnings and errors alone.

    A file that is opened later would otherwise get the number of a closed stream (`2>&-`), and what libraries print.
    """
    os.environ.setdefault(LOG_LEVEL, "1")
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (for the whole process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def import_tensorflow() -> None:
    """Import TensorFlow and Keras, and list the devices, without the lines that C++ writes whatever the log level.

    The garbage collector leaves alone what they create: some million objects that live until the process ends, to look
    through which takes a third of the time of the import, much of that of tracing, and a second at the end.
    """
    if "tensorflow" in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    with _without_noise():
        import keras  # noqa: F401
        import tensorflow as tf

        tf.config.list_physical_devices()
    gc.freeze()
    if collects:
        gc.enable()


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    """Hold back file descriptor 2, and show it without noise at the end; all of it after an exception."""
    if os.environ.get(LOG_LEVEL) == "0":
        yield
        return
    sys.stderr.flush()
    before, noise = os.dup(2), None
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
            noise = _NOISE
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            aside.seek(0)
            has_gpu = Path("/dev/nvidiactl").exists()
            for line in aside:
                if noise is None or not (noise.match(line) or (not has_gpu and _NO_DRIVER.match(line))):
                    os.write(2, line)


def end_iterators_at_once(threads: int) -> None:
    """Create this process's iterators of datasets without tf.data's autotuning, unless a dataset's options set it.

    An iterator that is deleted waits for its tuning thread. If this thread runs as soon as it is notified, always so on
    one core (`benchmarks/one_core.py`) and sometimes on busy ones, it does not yet see that it is to end, and sleeps
    for the rest of its period. The period doubles up to a minute, so each epoch, each evaluation and the training may
    end in a wait as long as itself, which the watchdog of the other ranks takes for a hang. What autotuning also does,
    to read ahead where the dataset does not, is kept.

    It replaces `tf.data.Dataset.__iter__` for as long as the process lives.

    Args:
        threads: of TensorFlow's pool of operations. With more than are used untuned, tuning stays.
    """
    import tensorflow as tf

    begin = tf.data.Dataset.__iter__
    if getattr(begin, _UNTUNED, False):
        return

    @functools.wraps(begin)
    def untuned(dataset: Any) -> Any:
        return begin(_without_tuning(dataset, threads))

    setattr(untuned, _UNTUNED, True)
    # Keras' fit and users' loops make iterators of their own, so each dataset has to know.
    tf.data.Dataset.__iter__ = untuned


def _without_tuning(dataset: Any, threads: int) -> Any:
    import tensorflow as tf

    if not tf.executing_eagerly():
        return dataset  # a graph knows no options; its loops over datasets have no iterator
    given = dataset.options()
    if (given.threading.private_threadpool_size or threads) > _UNTUNED_CALLS:
        return dataset
    tuning = given.autotune
    if any(chosen is not None for chosen in (tuning.enabled, tuning.ram_budget, tuning.cpu_budget)):
        return dataset
    if given.experimental_optimization.inject_prefetch is not False and not _reads_ahead(dataset):
        dataset = dataset.prefetch(1)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _reads_ahead(dataset: Any) -> bool:
    from hvdtrain.compat.tensorflow import OPTIONS, PREFETCHES, input_of, is_kind

    while is_kind(dataset, OPTIONS):
        dataset = input_of(dataset)
    return is_kind(dataset, PREFETCHES)
