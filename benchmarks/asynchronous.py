"""Update rules on ranks of one speed, and with one slow rank: samples a second, and the loss they come to.

    python benchmarks/asynchronous.py --ranks 4
    OMPI_MCA_btl=tcp,self python benchmarks/asynchronous.py --plot asynchronous.png

One launch for each setting, `alike` or `slow`; in it the rules take turns. tf.distribute's servers, as hvdtrain's
backend drives them, have launches of their own, in which a chief and a server are further processes; a step of theirs
is the batch of one worker, and has its share of the learning rate.

A worker's computation is emulated: a layer waits for some milliseconds in each training step, five times as long on the
last worker of `slow`, so that the workers do not compete for this machine's cores. The samples, the digits, are the
same for all rules, and so is their number. Reported are samples per second over all epochs, the validation loss after
each, and the bytes that this machine has sent to itself: all messages where Open MPI is told to use TCP, as above.
"""

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.plots import Curves, curves
from hvdtrain.bench.results import Spread
from hvdtrain.bench.script import Script
from hvdtrain.bench.timing import sent_to_itself
from hvdtrain.runtime.launchers import detect_environment

WAIT_US, SLOWER = 20_000, 5
"""SleepDataset waits twice in a step: for its element, and for the end behind it."""
WAIT_FILE = "wait_us"
"""In each process's own folder, how long it waits: the workers of tf.distribute run a graph that the chief has made."""
SERVERS = "tf.distribute's servers"
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


def begun(folder: str, slow: bool, **arguments: Any) -> None:
    """Initialize hvdtrain in a folder that says how long this process waits in a step."""
    import hvdtrain

    os.chdir(folder)
    Path(WAIT_FILE).write_text(str(WAIT_US * (SLOWER if slow else 1)), encoding="utf-8")
    hvdtrain.init(**arguments)


def trained(options: dict[str, Any], epochs: int, seed: int, workers: int = 1) -> dict[str, Any]:
    """Train the digits; return seconds, and the validation loss after each epoch.

    Args:
        options: the trainer's.
        epochs: how often all samples are seen.
        seed: of the weights and the order.
        workers: among how many a batch is divided here, where the trainer does not divide it.
    """
    import keras
    import tensorflow as tf

    import hvdtrain
    from hvdtrain.data.digits import load_digits

    class Wait(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if not training:
                return inputs
            once = tf.data.experimental.to_variant(tf.data.Dataset.range(1))
            kind = {"output_types": [tf.int64], "output_shapes": [[]]}
            wait = tf.strings.to_number(tf.io.read_file(WAIT_FILE), tf.int64)
            slept = tf.raw_ops.SleepDataset(input_dataset=once, sleep_microseconds=wait, **kind)
            elements = tf.data.experimental.from_variant(slept, tf.TensorSpec([], tf.int64))
            with tf.control_dependencies([elements.reduce(tf.constant(0, tf.int64), tf.add)]):
                return tf.identity(inputs)

    def model() -> keras.Model:
        layers = [keras.layers.Flatten(), Wait(), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    keras.utils.set_random_seed(seed)
    images, labels = load_digits()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = hvdtrain.Trainer(
        model, lambda: keras.optimizers.SGD(0.2 / workers, momentum=0.5), loss, ["accuracy"], seed=seed, **options
    )
    batch = BATCH // workers
    trainer.fit((images[:BATCH], labels[:BATCH]), batch=batch, epochs=1, verbose=0)  # compiles
    begin, sent = time.perf_counter(), sent_to_itself()
    result = trainer.fit(
        (images[:SAMPLES], labels[:SAMPLES]),
        batch=batch,
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
    found: dict[str, list[dict[str, Any]]] = {rule: [] for rule in rules}
    with tempfile.TemporaryDirectory() as folder:
        place = detect_environment()
        begun(folder, slow and place.rank == place.size - 1)
        for seed in range(rounds):
            for rule in rules:
                found[rule].append(trained(RULES[rule], epochs, seed))
    return figures_of(found, epochs)


def measure_servers(slow: bool, epochs: int, rounds: int) -> dict[str, Any]:
    """Return the figures of tf.distribute's servers: rank 0 is the chief, the last one the server."""
    with tempfile.TemporaryDirectory() as folder:
        place = detect_environment()
        begun(folder, slow and place.rank == place.size - 2, backend="parameter_server")
        found = [trained({}, epochs, seed, workers=place.size - 2) for seed in range(rounds)]
    return figures_of({SERVERS: found}, epochs)


def figures_of(found: dict[str, list[dict[str, Any]]], epochs: int) -> dict[str, Any]:
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
    script = Script(__doc__, measure, measure_servers, rounds=5)
    script.add_argument("--ranks", type=int, default=4, help="(4)")
    script.add_argument("--settings", nargs="+", choices=("alike", "slow"), default=["alike", "slow"])
    script.add_argument("--rules", nargs="+", choices=(*RULES, SERVERS), default=[*RULES, SERVERS])
    script.add_argument("--epochs", type=int, default=6, help="(6)")
    script.add_argument("--plot", type=Path, help="PNG file to write")
    options = script.parsed()
    settings: dict[str, dict[str, Any]] = {}
    for setting in options.settings:
        given = {"slow": setting == "slow", "epochs": options.epochs, "rounds": options.rounds}
        rules = [rule for rule in options.rules if rule != SERVERS]
        job = partial(script.job, controller="mpirun", **given)
        jobs = [job(setting, measure, ranks=options.ranks, rules=rules)] if rules else []
        if SERVERS in options.rules:
            jobs.append(job(f"{setting}, {SERVERS}", measure_servers, ranks=options.ranks + 2))
        figures: dict[str, Any] = {name: {} for name in ("samples_per_s", "accuracy", "losses", "sent_mb")}
        for run in script.measure(jobs):
            for name, of_rules in figures.items():
                of_rules |= run.figure(name)[0]
        if not figures["losses"]:
            continue
        settings[setting] = figures
        first, base = next(iter(figures["samples_per_s"].items()))
        for rule, rates in figures["samples_per_s"].items():
            ratios = np.array(rates) / np.array(base)
            print(
                f"{setting:6} {rule:24} {np.median(rates):8.0f} samples/s   {np.median(ratios):5.2f} of "
                f"{first} ({ratios.min():.2f} .. {ratios.max():.2f})   accuracy "
                f"{np.median(figures['accuracy'][rule]):.4f}   loss {figures['losses'][rule][-1]:.4f}   "
                f"{np.median(figures['sent_mb'][rule]):.1f} MB",
                flush=True,
            )
    if options.plot is not None and settings:
        options.plot.write_bytes(drawn(settings))
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
