"""What a checkpoint costs a training: the time that its steps take longer while one is copied and written.

    python benchmarks/checkpoint_time.py --megabytes 50 200 --rounds 5
    mpirun -np 2 python benchmarks/checkpoint_time.py --megabytes 50

Windows of as many steps take turns: in every other one a checkpoint is saved at the first step, and the window is long
enough for it to be written. Reported are the seconds for which a step waited (the copy to the host's memory), those by
which the whole window was longer, and what that is of a minute. `--wait` writes it in the step, for comparison. Nothing
else may run on the machine meanwhile.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

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


def measure(megabytes: float, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures for a state of so many megabytes."""
    from hvdtrain.checkpoint.background import BackgroundSaver
    from hvdtrain.checkpoint.checkpointer import Checkpointer
    from hvdtrain.runtime.session import current

    trainer, data = trainer_of(megabytes)
    saver = BackgroundSaver(Checkpointer(folder, keep=1, backend=trainer.backend), current().control)
    step, batch, state = trainer.compiled_step(data), next(iter(data.batches(0))), trainer.state

    def window(steps: int, *, saves: bool) -> tuple[float, float]:
        begin = time.perf_counter()
        if saves:
            state.scalars.step += 1
            saver(state)
            if arguments.wait:
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
    steps = max(WARM_UP, int(arguments.window * WARM_UP / (time.perf_counter() - begin)))
    steps = max(int(text) for text in trainer.backend.gather_bytes(str(steps).encode(), timeout=60.0))
    plain, saving, waits = [], [], []
    for _ in range(arguments.rounds):
        plain.append(window(steps, saves=False)[1])
        waited, seconds = window(steps, saves=True)
        saver.finish()
        waits.append(waited)
        saving.append(seconds)
    cost = float(np.median(saving) - np.median(plain))
    return {"waited_s": float(np.median(waits)), "cost_s": cost, "share_of_a_minute": cost / 60, "steps": steps}


def main() -> None:
    """Measure all sizes, and print a line for each."""
    parser = argparse.ArgumentParser(description="Measure what a checkpoint costs a training.")
    parser.add_argument("--megabytes", nargs="+", type=float, default=[50.0], help="size of the training state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=5.0, help="seconds of a window; longer than a save takes")
    parser.add_argument("--wait", action="store_true", help="write in the step")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: a temporary folder)")
    arguments = parser.parse_args()
    import hvdtrain

    hvdtrain.init()
    for megabytes in arguments.megabytes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            figures = measure(megabytes, arguments, Path(folder))
        if hvdtrain.rank() == 0:
            waited, cost, share = figures["waited_s"], figures["cost_s"], figures["share_of_a_minute"]
            print(f"{megabytes:8.0f} MB  the step waited {waited:.3f} s  a save costs {cost:.3f} s", end="")
            print(f"  {share:.2%} at one a minute", flush=True)


if __name__ == "__main__":
    main()
