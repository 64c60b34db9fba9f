"""An elastic training as users write it; started without host discovery it trains the same with fixed ranks.

The numbers have 64 bits: another number of ranks adds the same gradients in another order.

Usage: (launcher) python elastic_script.py [FAULT RANK STEP DELAY]
"""

import os
import sys

import injection
import keras
import numpy as np
import training_script as script

import hvdtrain


def main() -> None:
    hvdtrain.init(hang_timeout=5)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)
    x, y = script.samples("float64")
    model = script.network(dropout=0.0)
    optimizer = keras.optimizers.Adam(1e-2)
    trainer = hvdtrain.Trainer(model, optimizer, "mse")

    def tell(logs=None):
        print("begins after step", int(optimizer.iterations), flush=True)

    callbacks = [keras.callbacks.BackupAndRestore("saved"), keras.callbacks.LambdaCallback(on_train_begin=tell)]
    callbacks.append(script.unhurried())
    strike = injection.Strike.of(sys.argv[1:])
    if strike is not None:
        callbacks.append(injection.AtStep(strike, script.STEPS_PER_EPOCH))
    elastic = {"elastic": True, "commit_every": 5} if "HOROVOD_ELASTIC" in os.environ else {}
    lengths = {"batch": script.BATCH, "epochs": script.EPOCHS}
    trainer.fit(x, y, callbacks=callbacks, verbose=2, **lengths, **elastic)
    if hvdtrain.rank() == 0:
        np.save("parameters.npy", np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
    script.show(model)


if __name__ == "__main__":
    main()
