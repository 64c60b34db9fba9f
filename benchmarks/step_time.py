"""Step time of hvdtrain against a plain hand-written loop, both sides in turn.

    python benchmarks/step_time.py --controllers mpirun gloo --models digits resnet20 --rounds 5

Ratios for every model and controller:

    defaults  the plain loop at Horovod's own settings. They are read when a process starts, so the sides take turns
              in processes of their own.
    settings  the plain loop with hvdtrain's settings of the exchange (with one process: without Horovod). Both sides
              take turns in the same processes, a window of ten steps each, so that neither placement nor the
              machine's mood tells them apart.
    face      with --face instead: `fit` with `hvdtrain.horovod.keras.DistributedOptimizer` in place of the Trainer.

With --desync instead: what a look of the desync check takes, and which share that is of the steps between two.

All are pinned alike: one block of cores and as many threads for each rank. A round's ratio is the median window of
hvdtrain over that of the plain loop, each window with one logged step; the median and the range over the rounds are
reported. Nothing else may run on the machine meanwhile.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.suite import MODELS, bench_config
from hvdtrain.bench.timing import window
from hvdtrain.config.training import DESYNC_EVERY, DesyncConfig
from hvdtrain.runtime.launchers import detect_environment

WINDOW = 10
WARM_UP = 4


def plain_loop(model: str, batch: int, windows: int) -> dict[str, Any]:
    """Return the windows of a hand-written loop at Horovod's own settings, in milliseconds a step."""
    from hvdtrain.bench.plain import PlainLoop, pin_and_start

    environment = detect_environment()
    pin_and_start(environment)
    step = PlainLoop(bench_config(model, batch=batch), environment).step()
    return {"plain_ms": [window(step, WINDOW) for _ in range(windows)][WARM_UP:]}


def with_hvdtrain(model: str, batch: int, windows: int, beside_plain: bool = False) -> dict[str, Any]:
    """Return the windows of `hvdtrain.Trainer`, and those of the plain loop if it takes turns with it."""
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.bench.plain import PlainLoop

    config, plain_ms = bench_config(model, batch=batch), []
    if not beside_plain:
        return {"hvdtrain_ms": windows_of(config, windows)[0][WARM_UP:]}
    step = PlainLoop(config, detect_environment()).step()
    windows_ms, _ = windows_of(config, windows, lambda: plain_ms.append(window(step, WINDOW)))
    return {"plain_ms": plain_ms[WARM_UP:], "hvdtrain_ms": windows_ms[WARM_UP:]}


def windows_of(config: Any, windows: int, beside: Any = None) -> tuple[list[float], Any]:
    """Train, and return the windows in milliseconds a step and the trainer; `beside` runs untimed between them."""
    from hvdtrain.backends.select import current_exchange
    from hvdtrain.bench.trained import Stopwatch, built_trainer
    from hvdtrain.training.plan import Plan

    trainer, data = built_trainer(config, current_exchange())
    watch = Stopwatch(WINDOW, beside)
    trainer.train(data, Plan(windows * WINDOW, log_every=WINDOW), observers=watch)
    return watch.windows_ms, trainer


def with_face(model: str, batch: int, windows: int) -> dict[str, Any]:
    """Return the windows of `fit` through the face of Horovod, and those of the plain loop in turn with it."""
    import keras

    import hvdtrain.horovod.keras as hvd
    from hvdtrain.bench.plain import PlainLoop, pin
    from hvdtrain.models.registry import model_family

    environment, config = detect_environment(), bench_config(model, batch=batch)
    pin(environment)
    hvd.init()
    plain, face = PlainLoop(config, environment).step(), PlainLoop(config, environment)
    times: dict[str, list[float]] = {"plain_ms": [], "hvdtrain_ms": []}

    class TakingTurns(keras.callbacks.Callback):
        """Times each window of `fit`, and then lets the plain loop take one."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch % WINDOW == 0:
                self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (batch + 1) % WINDOW == 0:
                times["hvdtrain_ms"].append(1000.0 * (time.perf_counter() - self.begin) / WINDOW)
                times["plain_ms"].append(window(plain, WINDOW))

    face.model.compile(hvd.DistributedOptimizer(face.optimizer), model_family(config.model).loss())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), TakingTurns()]
    face.model.fit(face.batches(), steps_per_epoch=windows * WINDOW, verbose=0, callbacks=callbacks)
    return {name: values[WARM_UP:] for name, values in times.items()}


def desync(model: str, batch: int, windows: int) -> dict[str, Any]:
    """Return windows without the desync check, and of its looks, in milliseconds a step and a look."""
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.training.callbacks.desync_check import DesyncCheck

    config = replace(bench_config(model, batch=batch), desync=DesyncConfig(desync_every=0))
    windows_ms, trainer = windows_of(config, windows)
    check = DesyncCheck(trainer.backend, trainer.state, trainer.rule, 0, 1)
    looks = []
    for _ in range(windows):
        begin = time.perf_counter()
        for _ in range(WINDOW):
            check.look("the last step")
        looks.append((time.perf_counter() - begin) * 1e3 / WINDOW)
    return {"step_ms": windows_ms[WARM_UP:], "look_ms": looks[WARM_UP:]}


def main() -> int:
    script = Script(__doc__, plain_loop, with_hvdtrain, with_face, desync, rounds=5)
    script.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["digits", "resnet20"])
    controllers = ("mpirun", "gloo", "none")
    script.add_argument("--controllers", nargs="+", choices=controllers, default=list(controllers))
    script.add_argument("--ranks", type=int, default=2)
    script.add_argument("--batch", type=int, default=64)
    script.add_argument("--windows", type=int, default=24, help="windows of ten steps, the first four not counted")
    script.add_argument("--face", action="store_true", help="measure `fit` through the face of Horovod")
    script.add_argument("--desync", action="store_true", help="measure the desync check alone")
    options = script.parsed()
    for model, controller in product(options.models, options.controllers):
        ranks = 1 if controller == "none" else options.ranks
        title = f"{model:9} {controller:6} {ranks} rank(s)"
        given = {"model": model, "batch": options.batch, "windows": options.windows}
        job = partial(script.job, controller=controller, ranks=ranks, **given)
        measure = partial(script.measure, rounds=options.rounds, limit_s=300)
        if options.desync:
            for run in measure([job("desync", desync)] if ranks > 1 else []):
                print_desync(title, np.array(run.medians("look_ms")), np.array(run.medians("step_ms")))
            continue
        if controller != "none" and not options.face:
            runs = measure([job("plain", plain_loop), job("hvdtrain", with_hvdtrain)])
            print_times(f"{title}  defaults", {run.name: run.medians(f"{run.name}_ms") for run in runs}, "plain")
        in_turn = job("face", with_face) if options.face else job("settings", with_hvdtrain, beside_plain=True)
        for run in measure([in_turn]):
            times = {name: run.medians(f"{name}_ms") for name in ("plain", "hvdtrain")}
            print_times(f"{title}  {'without Horovod' if controller == 'none' else run.name}", times, "plain")
    return script.exit_code()


def print_desync(title: str, looks: Any, steps: Any) -> None:
    """Print what a look takes, and which share that is of the steps between two."""
    shares = looks / (DESYNC_EVERY * steps)
    print(
        f"{title}  step {np.median(steps):8.2f} ms  look {np.median(looks):8.2f} ms  every {DESYNC_EVERY} steps: "
        f"{np.median(shares):.3%} ({shares.min():.3%} .. {shares.max():.3%})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
