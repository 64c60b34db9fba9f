"""A training that does without bad steps, or one that takes no step where that one left some out.

The optimizer is plain gradient descent: a step with a learning rate of 0 changes nothing at all.

Usage: (launcher) python bad_steps_script.py skip|rollback [FAULT RANK STEP DELAY]
       (launcher) python bad_steps_script.py skip|rollback without FIRST LAST
"""

import sys

import injection
import keras
import training_script as script

import hvdtrain

LEARNING_RATE = 0.05


class Without(keras.callbacks.Callback):
    """Lets the steps from `first` to `last` change nothing."""

    def __init__(self, optimizer: keras.Optimizer, first: int, last: int) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._first, self._last = first, last
        self._step = 0

    def on_train_batch_begin(self, batch, logs=None):
        self._step += 1
        left_out = self._first <= self._step <= self._last
        self._optimizer.learning_rate = 0.0 if left_out else LEARNING_RATE


def main(policy: str, *words: str) -> None:
    hvdtrain.init(hang_timeout=5)
    keras.utils.set_random_seed(7)
    x, y = script.samples()
    model = script.network(dropout=0.2 if policy == "skip" else 0.0)  # a rollback draws again what it has drawn
    factor = keras.Variable(1.0, trainable=False, name="factor")

    def loss(y_true, y_pred):
        return factor * keras.losses.mean_squared_error(y_true, y_pred)

    alone = words[:1] == ("without",)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    trainer = hvdtrain.Trainer(model, optimizer, loss, on_bad_step="raise" if alone else policy)
    callbacks = [script.unhurried()]
    if alone:
        callbacks.append(Without(optimizer, int(words[1]), int(words[2])))
    else:
        callbacks.append(injection.AtStep(injection.Strike.of([*words], factor), script.STEPS_PER_EPOCH))
    checkpoint = hvdtrain.Checkpoint("saved", every=7, keep=4)
    lengths = {"batch": script.BATCH, "epochs": script.EPOCHS, "log_every": 5}
    result = trainer.fit(x, y, checkpoint=checkpoint, callbacks=callbacks, verbose=2, **lengths)
    print("bad steps", result.bad_steps, flush=True)
    script.show(model)


if __name__ == "__main__":
    main(*sys.argv[1:])
