"""Replicas of one process, each on a thread, that exchange tensors: what a backend does between processes."""

import threading

import numpy as np
import tensorflow as tf

from hvdtrain.gradients.reduction import GradientReducer, reduction_options
from tests.unit.threaded_ranks import on_threads

NOT_LINEAR = {
    "min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
    "product": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
}


class Meeting:
    """Where the replicas of one process, each on a thread, put their tensors together."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought = [None] * size
        self.log = []

    def put_together(self, index, what, tensors):
        """Return every replica's tensors; all must have come for the same reason."""
        self.brought[index] = (what, [(t.dtype, *t.shape[1:]) for t in tensors], tensors)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        if index == 0:
            self.log.append(what)
        assert len({str(each[:2]) for each in brought}) == 1, "the replicas' messages do not match"
        return [each[2] for each in brought]


class Replica:
    """An exchange that adds in the tensors' own precision, as Horovod does."""

    def __init__(self, meeting, index):
        self._meeting = meeting
        self.index = index
        self.size = meeting.size
        self.sends = meeting.size > 1
        self.by_host = None

    def _sum(self, what, tensors, prescale, postscale):
        scaled = [t * tf.cast(prescale, t.dtype) for t in tensors]
        parts = self._meeting.put_together(self.index, (*what, prescale, postscale), scaled)
        sums = []
        for column in zip(*parts, strict=True):
            total = column[0]
            for tensor in column[1:]:
                total = total + tensor
            sums.append(total * tf.cast(postscale, total.dtype))
        return sums

    def all_reduce(self, tensor, *, name, op="sum", prescale=1.0, postscale=1.0):
        if op in NOT_LINEAR:
            return NOT_LINEAR[op]([part[0] for part in self._meeting.put_together(self.index, (op, name), [tensor])])
        after = postscale / self.size if op == "average" else postscale
        return self._sum((op, name), [tensor], prescale, after)[0]

    def grouped_all_reduce(self, tensors, *, name, prescale=1.0, postscale=1.0):
        assert tensors, "a message without tensors"
        return self._sum(("group", name, len(tensors)), tensors, prescale, postscale)

    def all_gather(self, tensor, *, name):
        return tf.concat([t for (t,) in self._meeting.put_together(self.index, ("gather", name), [tensor])], 0)

    def grouped_all_gather(self, tensors, *, name):
        return [self.all_gather(tensor, name=f"{name}/{i}") for i, tensor in enumerate(tensors)]

    def reduce_scatter(self, tensor, *, name, prescale=1.0, postscale=1.0):
        total = self._sum(("scatter", name), [tensor], prescale, postscale)[0]
        return tf.gather(total, np.array_split(np.arange(total.shape[0]), self.size)[self.index])

    def grouped_reduce_scatter(self, tensors, *, name, prescale=1.0, postscale=1.0):
        each = enumerate(tensors)
        return [self.reduce_scatter(t, name=f"{name}/{i}", prescale=prescale, postscale=postscale) for i, t in each]

    def exchange_rows(self, tensor, rows, *, name):
        parts = tf.split(tensor, rows if len(rows) else self.size)
        brought = self._meeting.put_together(self.index, ("rows", name), parts)
        mine = [sent[self.index] for sent in brought]
        return tf.concat(mine, 0), tf.constant([len(part) for part in mine])

    def broadcast_value(self, tensor, *, root, name):
        return self._meeting.put_together(self.index, ("broadcast", name, root), [tensor])[root][0]

    def all_to_all(self, tensor, *, name):
        parts = tf.split(tensor, self.size)  # refuses what does not divide
        brought = self._meeting.put_together(self.index, ("scatter", name, tensor.shape), parts)
        return tf.concat([sent[self.index] for sent in brought], 0)


def outcomes_on(size, body):
    """Run ``body(rank)`` on a thread for each rank; return what each returned, or raise what one raised."""
    outcomes = on_threads(size, body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def reduce_on(size, gradients, paths, role="gradient", exact=(), **options):
    """Reduce `gradients(rank)` on every replica; return rank 0's result and what was sent."""
    meeting = Meeting(size)

    def body(rank):
        reducer = GradientReducer(Replica(meeting, rank), reduction_options(**options))
        return reducer.reduce(gradients(rank), paths, role=role, exact=exact)

    outcomes = outcomes_on(size, body)
    for outcome in outcomes:
        for mine, first in zip(outcome, outcomes[0], strict=True):
            if first is None:
                assert mine is None
            else:
                np.testing.assert_array_equal(tf.convert_to_tensor(mine), tf.convert_to_tensor(first), strict=True)
    return outcomes[0], meeting.log
