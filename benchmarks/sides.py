"""One run of the step-time comparison; rank 0 prints the times of its windows of steps as JSON.

Runs:
    plain     a hand-written loop as Horovod's documentation has it, at Horovod's own settings
    hvdtrain  `hvdtrain.Trainer` on the same model, data, batch and optimizer
    paired    both in the same processes, a window of one after a window of the other: the plain loop has hvdtrain's
              settings of the exchange then, and where there is one process it has no Horovod at all
    desync    `hvdtrain.Trainer` without its desync check, and then looks of the check, a window of ten after another

All of them are pinned alike: one block of cores and as many threads for each rank. Every window has one logged step.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace

from hvdtrain.bench.catalog import MODELS, bench_config
from hvdtrain.config.run import Config
from hvdtrain.config.training import DesyncConfig
from hvdtrain.runtime.launchers import detect_environment

WINDOW = 10
WARM_UP = 4


def with_hvdtrain(config: Config, windows: int, beside: Callable[[], None] | None = None) -> list[float]:
    """Train with `hvdtrain.Trainer`; `beside` is called between two windows and is not timed."""
    from hvdtrain.backends.select import current_exchange
    from hvdtrain.bench.trained import Stopwatch
    from hvdtrain.runs.run_data import run_data
    from hvdtrain.runs.trainers import run_trainer
    from hvdtrain.training.loop.loop import Plan

    backend = current_exchange()
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build(source.training)
    watch = Stopwatch(WINDOW, beside)
    trainer.train(source.training, Plan(windows * WINDOW, log_every=WINDOW), observers=watch)
    return watch.windows_ms


def looks(config: Config, windows: int) -> dict[str, list[float]]:
    """Return windows in milliseconds a step, and in milliseconds a look at whether the ranks hold the same state."""
    from time import perf_counter

    from hvdtrain.backends.select import current_exchange
    from hvdtrain.bench.trained import Stopwatch
    from hvdtrain.runs.run_data import run_data
    from hvdtrain.runs.trainers import run_trainer
    from hvdtrain.training.loop.desync_check import DesyncCheck
    from hvdtrain.training.loop.loop import Plan

    backend = current_exchange()
    source = run_data(config, backend)
    trainer = run_trainer(replace(config, desync=DesyncConfig(desync_every=0)), source, backend)
    trainer.build(source.training)
    watch = Stopwatch(WINDOW, None)
    trainer.train(source.training, Plan(windows * WINDOW, log_every=WINDOW), observers=watch)
    check = DesyncCheck(backend, trainer.state, trainer.rule, 0, 1)
    took = []
    for _ in range(windows):
        begin = perf_counter()
        for _ in range(WINDOW):
            check.look("the last step")
        took.append((perf_counter() - begin) * 1e3 / WINDOW)
    return {"step": watch.windows_ms, "look": took}


def measure(run: str, config: Config, windows: int) -> dict[str, list[float]]:
    """Return each side's windows in milliseconds a step, without those in which something is traced."""
    times: dict[str, list[float]] = {"plain": [], "hvdtrain": []}
    environment = detect_environment()
    if run != "plain":
        import hvdtrain

        hvdtrain.init()
    if run == "desync":
        return {side: values[WARM_UP:] for side, values in looks(config, windows).items()}
    from hvdtrain.bench.plain import PlainLoop, pin_and_start, window_of

    if run == "plain":
        pin_and_start(environment)
        steps = PlainLoop(config, environment).steps(WINDOW)
        times["plain"] = [window_of(steps, WINDOW) for _ in range(windows)]
    else:
        steps = PlainLoop(config, environment).steps(WINDOW)
        beside = (lambda: times["plain"].append(window_of(steps, WINDOW))) if run == "paired" else None
        times["hvdtrain"] = with_hvdtrain(config, windows, beside)
    return {side: values[WARM_UP:] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=("plain", "hvdtrain", "paired", "desync"))
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=12)
    arguments = parser.parse_args()
    times = measure(arguments.run, bench_config(arguments.model, batch=arguments.batch), arguments.windows)
    if detect_environment().rank == 0:
        print("WINDOWS " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
