"""Step time of `fit` with DistributedOptimizer, through the face of Horovod, against the plain loop with a tape.

    python benchmarks/face.py --controllers mpirun gloo --rounds 5

Both sides train the same model on the same data in the same processes, pinned alike and with the same settings of the
exchange, and take turns, a window of ten steps each: `model.fit` with `hvdtrain.horovod.keras.DistributedOptimizer`,
and Horovod's documented loop with its own tape. A round's ratio is the median window of `fit` over that of the loop;
the median and the range over the rounds are reported. Nothing else may run on the machine meanwhile.
"""

import sys
import time
from typing import Any

from step_time import WARM_UP, WINDOW

from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.suite import MODELS, bench_config


def measure(model: str, batch: int, windows: int) -> dict[str, Any]:
    """Return each side's windows in milliseconds a step, without those in which something is traced."""
    import keras

    import hvdtrain.horovod.keras as hvd
    from hvdtrain.bench.plain import PlainLoop, pin, window_of
    from hvdtrain.models.registry import model_family
    from hvdtrain.runtime.launchers import detect_environment

    environment, config = detect_environment(), bench_config(model, batch=batch)
    pin(environment)
    hvd.init()
    plain, face = PlainLoop(config, environment), PlainLoop(config, environment)
    steps = plain.steps(WINDOW)
    times: dict[str, list[float]] = {"plain": [], "face": []}

    class TakingTurns(keras.callbacks.Callback):
        """Times each window of `fit`, and then lets the plain loop take one."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch % WINDOW == 0:
                self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (batch + 1) % WINDOW == 0:
                times["face"].append(1000.0 * (time.perf_counter() - self.begin) / WINDOW)
                times["plain"].append(window_of(steps, WINDOW))

    face.model.compile(hvd.DistributedOptimizer(face.optimizer), model_family(config.model).loss())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), TakingTurns()]
    face.model.fit(face.batches(), steps_per_epoch=windows * WINDOW, verbose=0, callbacks=callbacks)
    return {f"{side}_ms": values[WARM_UP:] for side, values in times.items()}


def main() -> int:
    script = Script(__doc__, measure, rounds=5, ranks=2)
    script.add_argument("--model", choices=tuple(MODELS), default="resnet20")
    script.add_argument("--batch", type=int, default=64)
    script.add_argument("--windows", type=int, default=24, help="windows of ten steps, the first four not counted")
    options = script.parsed()
    given = {"model": options.model, "batch": options.batch, "windows": options.windows}
    for controller in options.controllers:
        job = script.job("in turn", measure, controller=controller, ranks=options.ranks, **given)
        for run in script.measure([job], options.rounds, limit_s=300):
            times = {"plain loop": run.medians("plain_ms"), "fit": run.medians("face_ms")}
            print_times(f"{options.model:9} {controller:6} {options.ranks} rank(s)", times, "plain loop")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
