"""Ranks on threads of one process that exchange bytes, and nothing else."""

import threading

from hvdtrain.backends.single import SingleBackend
from hvdtrain.runtime.startup import end_iterators_at_once
from tests.unit.threaded_ranks import on_threads


class Gathering(SingleBackend):
    """One of `size` ranks, which meet in `gather_bytes`; what they brought is kept in `brought`."""

    def __init__(self, index, size, barrier, brought):
        super().__init__(None)
        self.index = index
        self.primary = index == 0
        self.size = size
        self._barrier = barrier
        self.brought = brought

    def gather_bytes(self, payload, *, timeout, among="job"):
        self.brought[self.index] = payload
        self._barrier.wait()
        everyone = list(self.brought)
        self._barrier.wait()
        return everyone


def on_ranks(size, body, kind=Gathering):
    """Run ``body(backend)`` on a thread for each rank; return what each returned or raised."""
    end_iterators_at_once(threads=2)  # as in a session: iterators that are tuned may sleep before they end
    barrier, brought = threading.Barrier(size, timeout=20), [b""] * size

    def run(rank):
        try:
            return body(kind(rank, size, barrier, brought))
        except BaseException:
            # Nobody waits for it any more. Not at once: others may be on their way out of the last exchange.
            ending = threading.Timer(3.0, barrier.abort)
            ending.daemon = True
            ending.start()
            raise

    return on_threads(size, run)
