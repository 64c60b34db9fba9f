"""What a checkpoint costs a training: the time that its steps take longer while one is copied and written.

    python benchmarks/checkpoint_time.py --megabytes 50 200 --rounds 5
    python benchmarks/checkpoint_time.py --megabytes 50 --ranks 2

Windows of as many steps take turns: in every other one a checkpoint is saved at the first step, and the window is long
enough for it to be written. Reported are the seconds for which a step waited (the copy to the host's memory), those by
which the whole window was longer, and what that is of a minute. `--wait` writes it in the step, for comparison. Nothing
else may run on the machine meanwhile.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, started

WARM_UP = 3


def trainer_of(megabytes: float) -> tuple[Any, Any]:
    """Return a trainer whose state has about so many megabytes, two thirds of them Adam's, and its data."""
    import keras

    import hvdtrain
    from hvdtrain.training.inputs import training_data

    width = max(8, int(np.sqrt(megabytes * 1e6 / 4 / 3 / 4)))
    hidden = [keras.layers.Dense(width, "relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    trainer = hvdtrain.Trainer(model, "adam", "mse")
    x = np.random.default_rng(0).standard_normal((64, width)).astype("float32")
    data = training_data((x, x), trainer.backend, batch=64, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    trainer.broadcast_state()
    return trainer, data


def measure(megabytes: float, rounds: int, window_s: float, wait: bool, folder: str) -> dict[str, Any]:
    """Return the seconds of windows with and without a save, and those for which a step waited."""
    *_, gather = started()
    from hvdtrain.checkpoint.background import BackgroundSaver
    from hvdtrain.checkpoint.checkpointer import Checkpointer
    from hvdtrain.runtime.session import current

    trainer, data = trainer_of(megabytes)
    saver = BackgroundSaver(Checkpointer(Path(folder), keep=1, backend=trainer.backend), current().control)
    step, batch, state = trainer.compiled_step(data), next(iter(data.batches(0))), trainer.state

    def window(steps: int, *, saves: bool) -> tuple[float, float]:
        begin = time.perf_counter()
        if saves:
            state.scalars.step += 1
            saver(state)
            if wait:
                saver.finish()
        waited = time.perf_counter() - begin
        for number in range(steps):
            totals = step(batch, measure=number == steps - 1).totals
        totals.numpy()
        return waited, time.perf_counter() - begin

    window(WARM_UP, saves=True)
    saver.finish()
    begin = time.perf_counter()
    window(WARM_UP, saves=False)
    steps = max(WARM_UP, int(window_s * WARM_UP / (time.perf_counter() - begin)))
    steps = max(gather(steps))
    found: dict[str, list[float]] = {"plain_s": [], "saving_s": [], "waited_s": []}
    for _ in range(rounds):
        found["plain_s"].append(window(steps, saves=False)[1])
        waited, seconds = window(steps, saves=True)
        saver.finish()
        found["waited_s"].append(waited)
        found["saving_s"].append(seconds)
    return found


def main() -> int:
    script = Script(__doc__, measure, rounds=5)
    script.add_argument("--megabytes", nargs="+", type=float, default=[50.0], help="size of the training state")
    script.add_argument("--controller", choices=("mpirun", "gloo"), default="mpirun")
    script.add_argument("--ranks", type=int, default=1)
    script.add_argument("--window", type=float, default=5.0, help="seconds of a window; longer than a save takes")
    script.add_argument("--wait", action="store_true", help="write in the step")
    script.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    options = script.parsed()
    controller = options.controller if options.ranks > 1 else "none"
    given = {"rounds": options.rounds, "window_s": options.window, "wait": options.wait}
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            given |= {"megabytes": megabytes, "folder": folder}
            job = script.job(f"{megabytes:.0f} MB", measure, controller=controller, ranks=options.ranks, **given)
            for run in script.measure([job]):
                plain, saving, waited = (run.medians(f"{name}_s")[0] for name in ("plain", "saving", "waited"))
                cost = saving - plain
                print(f"{run.name:>8}  the step waited {waited:.3f} s  a save costs {cost:.3f} s", end="")
                print(f"  {cost / 60:.2%} at one a minute", flush=True)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
