"""What the test does to a job: one worker is killed, and later another one comes."""

import os
import pathlib
import signal
import time

import horovod.tensorflow as plain_hvd

LOST, MORE = pathlib.Path("lost"), pathlib.Path("more")


def come_and_go(batches_done):
    """Kill rank 1 of the first two ranks; while one is left, ask for another and go slowly."""
    if plain_hvd.size() == 2 and plain_hvd.rank() == 1 and batches_done == 5 and not LOST.exists():
        LOST.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if plain_hvd.size() == 1:
        MORE.touch()
        time.sleep(0.3)
