"""Usage: (launcher) python train.py CASE: train handwritten digits, on the GPU if there is one.

Prints RESULT and a JSON object: losses by epoch, accuracy, samples a second, and what the case is about.
"""

import json
import sys
import tempfile
import time

import hvdtrain
from hvdtrain.data.digits import load_digits

EPOCHS, BATCH = 4, 64
OPTIONS = {
    "float32": {},
    "mixed_float16": {"precision": "mixed_float16"},
    "mixed_bfloat16": {"precision": "mixed_bfloat16"},
    "jit": {"jit": True},
    "mirrored": {},
    "checkpoint": {},
}


def build():
    import keras

    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def main(case):
    if case == "shared":
        return shared()
    hvdtrain.init(backend="mirrored" if case == "mirrored" else "auto", replicas=1 if case == "mirrored" else None)
    import keras
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)  # which a CPU does not have
    images, labels = load_digits()
    held = {"validation_data": (images[1500:], labels[1500:]), "batch": BATCH, "verbose": 0}

    def trainer_of():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return hvdtrain.Trainer(
            build, lambda: keras.optimizers.SGD(0.05, momentum=0.9), loss, ["accuracy"], **OPTIONS[case]
        )

    trainer = trainer_of()
    with tempfile.TemporaryDirectory() as folder:
        if case == "checkpoint":
            trainer.fit(images[:1500], labels[:1500], epochs=EPOCHS // 2, checkpoint=folder, **held)
            trainer = trainer_of()
            trainer.resume(folder)
        result = trainer.fit(images[:1500], labels[:1500], epochs=EPOCHS, **held)
    history = result.history
    begin = time.perf_counter()
    trainer.fit(images[:1500], labels[:1500], epochs=EPOCHS + 20, initial_epoch=EPOCHS, batch=BATCH, verbose=0)
    gpus = tf.config.get_visible_devices("GPU")
    return {
        "losses": history["loss"],
        "accuracy": history["val_accuracy"][-1],
        "samples_per_second": 20 * 1500 / (time.perf_counter() - begin),
        "gpus": len(gpus),
        "grows": all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus),
        "placed": trainer.model.weights[0].value.device,
    }


def shared():
    """Two ranks on one GPU, as a Horovod script may pin them; the trainer gives each rank a GPU of its own."""
    import keras
    import tensorflow as tf

    import hvdtrain.horovod
    import hvdtrain.horovod.keras as hvd

    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus[:1]:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_visible_devices(gpus[:1], "GPU")
    images, labels = load_digits()
    mine = slice(hvd.rank(), 1500, hvd.size())
    model = build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    options = {"batch_size": BATCH // hvd.size(), "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    begin = time.perf_counter()
    history = model.fit(images[mine], labels[mine], callbacks=callbacks, **options).history
    sums = hvdtrain.horovod.allgather_object(float(sum(abs(weight).sum() for weight in model.get_weights())))
    return {
        "losses": history["loss"],
        "accuracy": model.evaluate(images[1500:], labels[1500:], verbose=0)[1],
        "samples_per_second": EPOCHS * 1500 / (time.perf_counter() - begin),
        "gpus": len(gpus),
        "equal": len(set(sums)) == 1,
        "placed": model.weights[0].value.device,
    }


if __name__ == "__main__":
    found = main(sys.argv[1])
    print(f"RESULT {json.dumps(found)}\n", end="", flush=True)
