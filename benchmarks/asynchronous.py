"""Update rules on ranks of one speed, and with one slow rank: samples a second, and the loss they come to.

    python benchmarks/asynchronous.py --ranks 4
    OMPI_MCA_btl=tcp,self python benchmarks/asynchronous.py --plot asynchronous.png

One launch for each setting, `alike` or `slow`; in it the rules take turns. A rank's computation is emulated: a layer
waits for some milliseconds in each training step, five times as long on the last rank of `slow`, so that the ranks do
not compete for this machine's cores. The samples, the digits, are the same for all rules, and so is their number.
Reported are samples per second over all epochs, the validation loss after each, and the bytes that this machine has
sent to itself: all messages where Open MPI is told to use TCP, as above. tf.distribute's servers are no part of it: its
chief and its servers are further processes, which compute nothing.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.plots import Curves, curves
from hvdtrain.bench.results import Spread
from hvdtrain.bench.script import Script, started
from hvdtrain.bench.timing import sent_to_itself

WAIT_S, SLOWER = 0.02, 5
RULES: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "async": {"update": "async"},
    "async, at most 2 ahead": {"update": "async", "max_staleness": 2},
    "async, dc_asgd": {"update": "async", "compensation": "dc_asgd"},
    "async, 1 of 4 serves": {"update": "async", "servers": 1},
    "local, 8 steps": {"local_steps": 8},
    "local, streamed": {"local_steps": 8, "average_fragments": 4, "average_delay": 2, "average_bits": 8},
    "gossip": {"update": "gossip"},
    "gossip, pushing": {"update": "gossip", "push_sum": True, "gossip_graph": "exponential"},
    "easgd": {"update": "easgd", "local_steps": 2},
    "diloco, 8 steps": {"local_steps": 8, "outer_optimizer": "diloco"},
}
BATCH, SAMPLES = 32, 1536


def trained(rule: str, slow: bool, epochs: int, seed: int) -> dict[str, Any]:
    """Train the digits by a rule; return seconds, and the validation loss after each epoch."""
    import keras
    import tensorflow as tf

    import hvdtrain
    from hvdtrain.data.digits import load_digits

    seconds = WAIT_S * (SLOWER if slow and hvdtrain.rank() == hvdtrain.size() - 1 else 1)

    class Wait(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if not training:
                return inputs
            waited = tf.numpy_function(lambda x: (time.sleep(seconds), x)[1], [inputs], inputs.dtype)
            return inputs + tf.stop_gradient(tf.ensure_shape(waited, inputs.shape) - inputs)

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            Wait(),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(10),
        ]
    )
    images, labels = load_digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = hvdtrain.Trainer(
        model, keras.optimizers.SGD(0.2, momentum=0.5), loss, ["accuracy"], seed=seed, **RULES[rule]
    )
    trainer.fit((images[:BATCH], labels[:BATCH]), batch=BATCH, epochs=1, verbose=0)  # compiles
    begin, sent = time.perf_counter(), sent_to_itself()
    result = trainer.fit(
        (images[:SAMPLES], labels[:SAMPLES]),
        batch=BATCH,
        epochs=epochs,
        log_every=1000,
        verbose=0,
        validation_data=(images[SAMPLES:], labels[SAMPLES:]),
    )
    taken = time.perf_counter() - begin
    return {
        "seconds": taken,
        "sent_mb": (sent_to_itself() - sent) / 1e6,
        "losses": [float(each.loss) for each in result.evaluations],
        "accuracy": float(result.evaluations[-1].metrics["accuracy"]),
    }


def measure(slow: bool, rules: list[str], epochs: int, rounds: int) -> dict[str, Any]:
    """Return each rule's figures of the rounds: samples a second, losses after each epoch, accuracy."""
    started()
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in rules}
    for seed in range(rounds):
        for rule in rules:
            found[rule].append(trained(rule, slow=slow, epochs=epochs, seed=seed))
    return {
        "samples_per_s": {rule: [epochs * SAMPLES / one["seconds"] for one in runs] for rule, runs in found.items()},
        "accuracy": {rule: [one["accuracy"] for one in runs] for rule, runs in found.items()},
        "sent_mb": {rule: [one["sent_mb"] for one in runs] for rule, runs in found.items()},
        "losses": {rule: np.median([one["losses"] for one in runs], 0).tolist() for rule, runs in found.items()},
    }


def drawn(settings: dict[str, dict[str, Any]]) -> bytes:
    """Return the validation loss over samples, seconds and bytes."""
    rows = []
    for setting, figures in settings.items():
        over_samples, over_time, over_bytes = {}, {}, {}
        for rule, losses in figures["losses"].items():
            points = [(SAMPLES * (epoch + 1), Spread(loss, loss, loss)) for epoch, loss in enumerate(losses)]
            rate = float(np.median(figures["samples_per_s"][rule]))
            over_samples[rule] = points
            sent = float(np.median(figures["sent_mb"][rule])) / points[-1][0]
            over_time[rule] = [(samples / rate, loss) for samples, loss in points]
            over_bytes[rule] = [(samples * sent, loss) for samples, loss in points]
        titles = (("samples", over_samples), ("seconds", over_time), ("MB sent", over_bytes))
        title = "one slow rank: loss" if setting == "slow" else "ranks alike: loss"
        rows.append([Curves(title, xlabel, found, scale="linear") for xlabel, found in titles])
    return curves(rows, one_legend=True)


def main() -> int:
    script = Script(__doc__, measure, rounds=5)
    script.add_argument("--ranks", type=int, default=4, help="(4)")
    script.add_argument("--settings", nargs="+", choices=("alike", "slow"), default=["alike", "slow"])
    script.add_argument("--rules", nargs="+", choices=tuple(RULES), default=list(RULES))
    script.add_argument("--epochs", type=int, default=6, help="(6)")
    script.add_argument("--plot", type=Path, help="PNG file to write")
    options = script.parsed()
    settings = {}
    for setting in options.settings:
        given = {"slow": setting == "slow", "rules": options.rules, "epochs": options.epochs, "rounds": options.rounds}
        for run in script.measure([script.job(setting, measure, controller="mpirun", ranks=options.ranks, **given)]):
            figures = {name: run.figure(name)[0] for name in ("samples_per_s", "accuracy", "losses", "sent_mb")}
            settings[setting] = figures
            base = figures["samples_per_s"][options.rules[0]]
            for rule, rates in figures["samples_per_s"].items():
                ratios = np.array(rates) / np.array(base)
                print(
                    f"{setting:6} {rule:24} {np.median(rates):8.0f} samples/s   {np.median(ratios):5.2f} of "
                    f"{options.rules[0]} ({ratios.min():.2f} .. {ratios.max():.2f})   accuracy "
                    f"{np.median(figures['accuracy'][rule]):.4f}   loss {figures['losses'][rule][-1]:.4f}   "
                    f"{np.median(figures['sent_mb'][rule]):.1f} MB",
                    flush=True,
                )
    if options.plot is not None and settings:
        options.plot.write_bytes(drawn(settings))
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
