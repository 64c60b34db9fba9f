"""A user's own script in which something goes wrong on one rank, or nothing: see `tests.chaos.matrix`, test_hang.py.

Usage: (launcher) python faulty_script.py WHAT RANK HANG_TIMEOUT
"""

import itertools
import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import hvdtrain

GUILTY, TIMEOUT_S = (int(sys.argv[2]), float(sys.argv[3])) if __name__ == "__main__" else (0, 3.0)


def note() -> bool:
    """Tell whether this is the rank with the fault, and say when it has it."""
    if hvdtrain.rank() == GUILTY:
        print(f"fault at {time.time():.2f}", flush=True)
    return hvdtrain.rank() == GUILTY


def loops() -> None:
    if note():
        while True:
            pass


def holds_the_lock() -> None:
    """Stay in C code that gives no other Python thread its turn."""
    if note():
        sum(itertools.repeat(0))


def stops() -> None:
    if note():
        os.kill(os.getpid(), signal.SIGSTOP)


def exchanges_alone() -> None:
    import tensorflow as tf

    import hvdtrain.horovod as hvd

    if note():
        hvd.allreduce(tf.constant(1.0), name="one_too_many")


def leaves_one_out() -> None:
    import tensorflow as tf

    import hvdtrain.horovod as hvd

    if not note():
        hvd.allreduce(tf.constant(1.0), name="left_out")


def raises() -> None:
    if note():
        raise ValueError("a mistake")


def exits() -> None:
    if note():
        sys.exit(3)


def is_killed() -> None:
    if note():
        os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    if note():
        os.kill(os.getpid(), signal.SIGSEGV)


def leaves_at_once() -> None:
    if note():
        os._exit(3)


class Fault(keras.callbacks.Callback):
    """Does `act` after the third step."""

    def __init__(self, act):
        super().__init__()
        self._act = act

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self._act()


def trainer() -> hvdtrain.Trainer:
    return hvdtrain.Trainer(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), "sgd", "mse")


def batches(at: int, act):
    """Return a generator function of batches that does `act` before the batch of that number."""

    def read():
        for number in range(16):
            if number == at:
                act()
            yield np.ones((8, 4), "float32"), np.zeros(8, "float32")

    return read


def in_a_callback(act) -> None:
    x, y = np.ones((80, 4), "float32"), np.zeros(80, "float32")
    trainer().fit(x, y, batch=8, callbacks=[Fault(act)], verbose=0)


def reads_no_more() -> None:
    def block() -> None:
        if note():
            threading.Event().wait()

    trainer().fit(batches(12, block), steps_per_epoch=16, verbose=0)


def goes_other_ways() -> None:
    """Take another branch than the other rank in a function of the script's own."""
    import tensorflow as tf

    import hvdtrain.horovod as hvd

    @tf.function
    def step(x, more):
        return tf.cond(more, lambda: hvd.allreduce(x, name="in_the_branch"), lambda: x) + hvd.allreduce(
            x, name="behind"
        )

    for number in range(4):
        step(tf.ones([2]), tf.constant(number == 2 and note()))


def exits_well() -> None:
    """Leave by an exit that is none of a failure, while the other rank has work left."""
    import tensorflow as tf

    import hvdtrain.horovod as hvd

    if note():
        sys.exit(0)
    hvd.allreduce(tf.constant(1.0), name="left_over")


def is_slow_but_well() -> None:
    """Be at work for longer than the timeout, on one rank at a time, wherever that is right."""
    alone = hvdtrain.rank() == GUILTY

    def compute(seconds: float = TIMEOUT_S + 1.5) -> None:
        end = time.monotonic() + seconds
        while alone and time.monotonic() < end:
            np.ones(10_000).sum()

    def sleep() -> None:
        time.sleep((TIMEOUT_S + 1.5) * alone)

    def write() -> None:
        for _ in range(40 * alone):
            with open(os.devnull, "wb") as file:
                file.write(bytes(2**20))
            time.sleep(0.1)

    trainer().fit(batches(0, sleep), steps_per_epoch=16, verbose=0)  # data that take long to open
    trainer().fit(batches(12, compute), steps_per_epoch=16, verbose=0)  # a sample that takes long to decode
    in_a_callback(write)
    sleep()  # at work after the others are done
    print("well", flush=True)


if __name__ == "__main__":
    hvdtrain.init(hang_timeout=TIMEOUT_S)
    what = globals()[sys.argv[1]]
    if what in (reads_no_more, goes_other_ways, exits_well, is_slow_but_well):
        what()
    else:
        in_a_callback(what)
