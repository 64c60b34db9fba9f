"""TensorFlowState over variables without a model: the sum of all steps is known, whoever took part in them."""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from departures import come_and_go

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=10000)
args = parser.parse_args()

hvd.init()

by_tape, by_optimizer = tf.Variable([float(hvd.rank())]), tf.Variable([float(hvd.rank())])
rate_of_one = 0.125
plain_optimizer = tf.keras.optimizers.SGD(rate_of_one * hvd.size())
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(rate_of_one * hvd.size()))


@tf.function
def step(share):
    with tf.GradientTape(persistent=True) as tape:
        losses = share * by_tape[0], share * by_optimizer[0]
    optimizer.apply_gradients([(tape.gradient(losses[1], by_optimizer), by_optimizer)])
    tape = hvd.DistributedGradientTape(tape)
    plain_optimizer.apply_gradients([(tape.gradient(losses[0], by_tape), by_tape)])


@hvd.elastic.run
def train(state):
    while state.batch < args.batches:
        step(tf.constant(1.0 + hvd.rank()))
        come_and_go(state.batch)
        state.batch += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.rates = [*state.rates, float(optimizer.lr)]
        state.commit()


def on_state_reset():
    plain_optimizer.learning_rate = rate_of_one * hvd.size()
    optimizer.lr = rate_of_one * hvd.size()


state = hvd.elastic.TensorFlowState([by_tape, by_optimizer], batch=0, sizes=[], rates=[])
state.register_reset_callbacks([on_state_reset])
train(state)

# Rank 0 began at 0. A step of n ranks goes n times the rate of one times the average of their shares 1 … n.
expected = -sum(rate_of_one * size * (size + 1) / 2 for size in state.sizes)
np.testing.assert_allclose([by_tape.numpy()[0], by_optimizer.numpy()[0]], expected, rtol=1e-6)
model = state.variables
