"""Collectives and their gradients, among threads that stand for ranks, against formulas on whole arrays."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends import differentiable as d
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

SIZE = 3
X = np.random.default_rng(0).standard_normal((SIZE, 6, 2, 9))  # of each rank
DY = np.random.default_rng(1).standard_normal((SIZE, 18, 6, 27))


def parts(whole, dim):
    return np.split(whole, SIZE, axis=dim)


def joined(pieces, dim):
    return np.concatenate(list(pieces), axis=dim)


def exchanged(arrays, cut, along):
    return [joined([parts(x, cut)[rank] for x in arrays], along) for rank in range(SIZE)]


def every(value):
    return [value] * SIZE


CASES = {
    "copy_to": (
        lambda x, group: d.copy_to(x, group, name="n"),
        lambda xs: xs,
        lambda dys: every(sum(dys)),
    ),
    "sum_from": (lambda x, group: d.sum_from(x, group, name="n"), lambda xs: every(sum(xs)), lambda dys: dys),
    "gather_from": (
        lambda x, group: d.gather_from(x, group, 2, name="n"),
        lambda xs: every(joined(xs, 2)),
        lambda dys: [parts(dy, 2)[rank] for rank, dy in enumerate(dys)],
    ),
    "slice_to": (
        lambda x, group: d.slice_to(x, group, -1, name="n"),
        lambda xs: [parts(x, -1)[rank] for rank, x in enumerate(xs)],
        lambda dys: every(joined(dys, -1)),
    ),
    "gather_to": (
        lambda x, group: d.gather_to(x, group, 1, name="n"),
        lambda xs: every(joined(xs, 1)),
        lambda dys: parts(sum(dys), 1),
    ),
    "sum_slices_from": (
        lambda x, group: d.sum_slices_from(x, group, 0, name="n"),
        lambda xs: parts(sum(xs), 0),
        lambda dys: every(joined(dys, 0)),
    ),
    "exchange_parts": (
        lambda x, group: d.exchange_parts(x, group, 2, 0, name="n"),
        lambda xs: exchanged(xs, 2, 0),
        lambda dys: exchanged(dys, 0, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_collective_and_its_gradient(name):
    operation, forward, backward = CASES[name]
    meeting = Meeting(SIZE)

    def body(rank):
        group = Replica(meeting, rank)
        with tf.GradientTape() as tape:
            x = tf.constant(X[rank])
            tape.watch(x)
            y = operation(x, group)
        return y, tape.gradient(y, x, output_gradients=tf.constant(DY[rank][tuple(slice(n) for n in y.shape)]))

    outcomes = outcomes_on(SIZE, body)
    ys, gradients = zip(*outcomes, strict=True)
    expected = forward(list(X))
    assert all(np.allclose(y, e, atol=1e-13) for y, e in zip(ys, expected, strict=True))
    dys = [DY[rank][tuple(slice(n) for n in y.shape)] for rank, y in enumerate(ys)]
    assert all(np.allclose(g, e, atol=1e-13) for g, e in zip(gradients, backward(dys), strict=True))
    names = {what[1] for what in meeting.log}
    assert names <= {"n", "n/back"}, "forward and backward pass must not share a name"


@pytest.mark.parametrize("name", ["gather_to", "exchange_parts"])
def test_a_gradient_is_the_adjoint(name):
    """Of what no two ranks hold alike: <A x, y> = <x, A* y>."""
    _, forward, backward = CASES[name]
    ys = forward(list(X))
    dys = [DY[rank][tuple(slice(n) for n in y.shape)] for rank, y in enumerate(ys)]
    there = sum(float((y * dy).sum()) for y, dy in zip(ys, dys, strict=True))
    back = sum(float((x * dx).sum()) for x, dx in zip(X, backward(dys), strict=True))
    assert there == pytest.approx(back, rel=1e-12)
