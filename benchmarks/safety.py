"""What protection costs a training: each option of it against a training without, in turn.

    python benchmarks/safety.py --models mlp resnet20 --controllers mpirun gloo --ranks 2 --rounds 3

    plain            `fit` as it is by default: bad numbers raise, hangs are watched for
    hang_timeout=0   nothing watches for hangs
    deterministic    the same bits in each run: `hvdtrain.init(deterministic=True)`
    timeline         a trace of all ranks is recorded, without TensorFlow's operations
    on_bad_step=skip every update is judged before it is made
    spikes           the same, and the loss is compared with those of the last steps
    commit_every=10  an elastic job, under horovodrun, with a commit every ten steps; against `elastic`, with none

Most of these are chosen as a process starts, so that the sides take turns in launches of their own, in one order in
even rounds and in the other in odd ones. A side's time is its median epoch, per step; reported are the medians over the
rounds and the ratios to `plain` (of an elastic job: to `elastic`) of the same round. Nothing else may run meanwhile.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import launcher, printed, write
from options import MODELS, build, samples

LIMIT_S = 600
WARM_UP = 1
NEVER = 10**9
SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "hang_timeout=0": {"init": {"hang_timeout": 0.0}},
    "deterministic": {"init": {"deterministic": True}},
    "timeline": {"init": {"timeline": str(Path(tempfile.gettempdir()) / "hvdtrain-trace.json")}},
    "on_bad_step=skip": {"trainer": {"on_bad_step": "skip"}},
    "spikes": {"trainer": {"on_bad_step": "skip", "spike_threshold": 20.0}},
    "elastic": {"fit": {"elastic": True, "commit_every": NEVER}},
    "commit_every=10": {"fit": {"elastic": True, "commit_every": 10}},
}
"""Each side's arguments of `hvdtrain.init`, `Trainer` and `fit`."""


def train(name: str, side: str, steps: int, epochs: int) -> None:
    """Run on every rank of a launch; rank 0 prints the milliseconds a step of each epoch."""
    import keras

    import hvdtrain

    arguments = SIDES[side]
    hvdtrain.init(**arguments.get("init", {}))

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            times.append(1000.0 * (time.perf_counter() - self.begin) / steps)

    times: list[float] = []
    batch = MODELS[name][4] * hvdtrain.size()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = hvdtrain.Trainer(
        lambda: build(name), lambda: keras.optimizers.SGD(1e-3), loss, **arguments.get("trainer", {})
    )
    data = samples(name, batch * steps)
    trainer.fit(*data, batch=batch, epochs=WARM_UP + epochs, verbose=0, callbacks=[Watch()], **arguments.get("fit", {}))
    if hvdtrain.rank() == 0:
        print("EPOCHS " + json.dumps(times[WARM_UP:]), flush=True)


def command_of(side: str, controller: str, ranks: int, folder: Path) -> list[str]:
    """Return the words before `python` that start a side's job."""
    words = launcher(controller, ranks)
    if not is_elastic(side):
        return words
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\necho localhost:{ranks}\n")
    discover.chmod(0o755)
    return [*words, "--min-np", str(ranks), "--network-interfaces", "lo", "--host-discovery-script", str(discover)]


def is_elastic(side: str) -> bool:
    return bool(SIDES[side].get("fit"))


def compare(name: str, controller: str, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run all rounds of one model under one controller and print a line for each side."""
    sides = [side for side in arguments.sides if controller == "gloo" or not is_elastic(side)]
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        taken = {}
        for side in sides if number % 2 == 0 else sides[::-1]:
            words = [*command_of(side, controller, arguments.ranks, folder), sys.executable, __file__]
            words += ["--side", side, "--models", name, "--steps", str(arguments.steps)]
            words += ["--epochs", str(arguments.epochs)]
            taken[side] = float(np.median(printed(words, "EPOCHS", limit_s=LIMIT_S)))
        rounds.append(taken)
    for side in sides:
        base = "elastic" if is_elastic(side) else "plain"
        ratios = [taken[side] / taken[base] for taken in rounds] if base in sides else [float("nan")]
        print(
            f"{name:9} {controller:6} {arguments.ranks} ranks  {side:17}"
            f" {np.median([taken[side] for taken in rounds]):8.2f} ms a step"
            f"   {np.median(ratios):.3f} of {base} ({min(ratios):.3f} .. {max(ratios):.3f})",
            flush=True,
        )
    return {"model": name, "controller": controller, "ranks": arguments.ranks, "rounds_ms": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet20"])
    parser.add_argument("--controllers", nargs="+", choices=["mpirun", "gloo"], default=["mpirun", "gloo"])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=4, help="epochs that are measured in each launch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        train(arguments.models[0], arguments.side, arguments.steps, arguments.epochs)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = [
            compare(name, controller, arguments, Path(folder))
            for name in arguments.models
            for controller in arguments.controllers
        ]
    write(arguments, results)


if __name__ == "__main__":
    main()
