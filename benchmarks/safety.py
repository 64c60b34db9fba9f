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

import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from options import MODELS, build, samples

from hvdtrain.bench.script import Script, print_times

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


def train(model: str, side: str, steps: int, epochs: int) -> dict[str, Any]:
    """Return the milliseconds a step of each epoch."""
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
    batch = MODELS[model][4] * hvdtrain.size()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = hvdtrain.Trainer(
        lambda: build(model), lambda: keras.optimizers.SGD(1e-3), loss, **arguments.get("trainer", {})
    )
    data = samples(model, batch * steps)
    trainer.fit(*data, batch=batch, epochs=WARM_UP + epochs, verbose=0, callbacks=[Watch()], **arguments.get("fit", {}))
    return {"windows_ms": times[WARM_UP:]}


def elastic_options(ranks: int, folder: Path) -> list[str]:
    """Return what horovodrun needs for an elastic job on this machine."""
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\necho localhost:{ranks}\n")
    discover.chmod(0o755)
    return ["--min-np", str(ranks), "--network-interfaces", "lo", "--host-discovery-script", str(discover)]


def main() -> int:
    script = Script(__doc__, train, rounds=3, ranks=2)
    script.add_argument("--models", nargs="+", choices=list(MODELS), default=["mlp", "resnet20"])
    script.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    script.add_argument("--steps", type=int, default=30, help="steps of an epoch")
    script.add_argument("--epochs", type=int, default=4, help="epochs that are measured in each launch")
    options = script.parsed()
    with tempfile.TemporaryDirectory() as folder:
        elastic = elastic_options(options.ranks, Path(folder))
        for model, controller in product(options.models, options.controllers):
            given = {"model": model, "steps": options.steps, "epochs": options.epochs}
            jobs = [
                script.job(
                    side,
                    train,
                    controller=controller,
                    ranks=options.ranks,
                    before=elastic if "fit" in SIDES[side] else (),
                    side=side,
                    **given,
                )
                for side in options.sides
                if controller == "gloo" or "fit" not in SIDES[side]
            ]
            runs = script.measure(jobs, options.rounds, limit_s=600)
            for base, kind in (("plain", False), ("elastic", True)):
                times = {run.name: run.medians("windows_ms") for run in runs if ("fit" in SIDES[run.name]) == kind}
                print_times(f"{model:9} {controller:6} {options.ranks} ranks", times, base)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
