"""Kills runs of the command line at random steps, resumes them, and compares every bit with runs left alone.

    python -m tests.exact_resume --worlds none:1 gloo:4 mpirun:4 --seed 1

For each set-up and world: one run to its end, one in which a random rank is killed by SIGKILL at a random step, and the
same command again, which resumes it. Equal have to be the loss of each step, and the last checkpoint: parameters,
optimizer, averages, residuals. All with `--deterministic`; `--without` shows what happens without it.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.awake import awake_seconds
from tests.chaos.jobs import Job
from tests.launching import launched

STEPS, EVERY = 120, 20
LIMIT_S = 240
MODEL = """\
import keras
from keras import layers


def build(sample_shape, classes):
    convolution = [keras.Input(sample_shape), layers.Conv2D(16, 3, activation="relu"), layers.Dropout(0.3)]
    last = layers.Dense(classes, "softmax", dtype="float32")
    hidden = [layers.Flatten(), layers.Dense(64, "relu")]
    return keras.Sequential([*convolution, *hidden, layers.Dropout(0.5), last])


build.loss = "sparse_categorical_crossentropy"
"""
DROPOUT = "--model models:build"
SETUPS = {
    "fp32": "",
    "fp16 with scaling": "--precision mixed_float16",
    "accumulation": "--accumulate 2",
    "EMA, clipping": "--ema 0.99 --clip-norm 1.0",
    "augmentation": "--augment crop flip",
    "dropout": DROPOUT,
    "schedule": "--optimizer sgd --schedule polynomial --warmup-steps 30",
    "ZeRO": "--zero 1",
    "local steps": "--local-steps 3 --schedule constant",
    "all that goes together": (
        f"{DROPOUT} --accumulate 2 --ema 0.9 --augment crop flip --precision mixed_float16 --clip-norm 1 --zero 1"
    ),
}
"""Options of the command line by what they try."""
ONE_PROCESS = ("ZeRO", "local steps", "all that goes together")
"""Set-ups that mean nothing to one process."""


@dataclass(frozen=True)
class Place:
    """Where a set-up is tried: the launcher's words and the folder of its runs."""

    controller: str
    ranks: int
    folder: Path

    def start(self, setup: str, run: str, *, deterministic: bool) -> Job:
        """Start a run, or go on with it."""
        options = [*SETUPS[setup].split(), "--max-steps", str(STEPS), "--checkpoint-every", str(EVERY)]
        options += ["--log-every", "1", "--plots", "False", "--tensorboard", "False", "--run-dir", run]
        options += ["--resume", "auto", *(["--deterministic"] if deterministic else [])]
        words = launched(self.controller, self.ranks, "-m", "hvdtrain", "digits", *options)
        return Job(words, self.folder, {"PYTHONPATH": os.pathsep.join(sys.path)})

    def losses(self, run: str) -> dict[int, float]:
        """Return the loss of each step by its number, those taken again by their last record."""
        try:
            lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return {}
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}

    def state(self, run: str) -> tuple[str, str]:
        """Return the name of the last checkpoint, and the hash of all its tensors."""
        last = max((self.folder / run / "checkpoints").glob("step-*"))
        tensors = b"".join(file.read_bytes() for file in sorted(last.glob("tensors-*.safetensors")))
        return last.name, hashlib.sha256(tensors).hexdigest()


def finish(job: Job) -> None:
    """Wait for a job that has to end well.

    Raises:
        RuntimeError: what it printed, if it does not.
    """
    with job:
        if job.wait(LIMIT_S) != 0:
            raise RuntimeError(job.text[-3000:])


def kill(job: Job, rank: int, reached: Callable[[], bool]) -> None:
    """Kill a rank as soon as a step is reached."""
    with job:
        limit = awake_seconds() + LIMIT_S
        while not reached() and job.running and awake_seconds() < limit:
            time.sleep(0.005)
        os.kill(job.rank(rank), signal.SIGKILL)
        if job.wait(LIMIT_S) == 0:
            raise RuntimeError(f"rank {rank} was killed too late:\n{job.text[-3000:]}")


def play(place: Place, setup: str, chance: random.Random, *, deterministic: bool) -> str:
    """Return what a kill and resuming changed; "" for nothing."""
    at, rank = chance.randrange(EVERY + 5, STEPS - 20), chance.randrange(place.ranks)
    whole, cut = (f"{kind}-{'-'.join(setup.split())}" for kind in ("whole", "cut"))
    finish(place.start(setup, whole, deterministic=deterministic))
    kill(place.start(setup, cut, deterministic=deterministic), rank, lambda: max(place.losses(cut), default=0) >= at)
    killed_at = max(place.losses(cut))
    finish(place.start(setup, cut, deterministic=deterministic))
    expected, found = place.losses(whole), place.losses(cut)
    different = [step for step in expected if found.get(step) != expected[step]]
    where = f"rank {rank} was killed at step {killed_at}"
    if different:
        return f"{where}: losses differ from step {different[0]}"
    return "" if place.state(whole) == place.state(cut) else f"{where}: same losses, but another last checkpoint"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exact_resume", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--worlds", nargs="+", default=["gloo:4", "mpirun:4"], metavar="CONTROLLER:RANKS", help="in")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), metavar="SETUP", help="of these")
    parser.add_argument("--seed", type=int, default=1, help="of the steps and ranks")
    parser.add_argument("--without", action="store_true", help="without --deterministic")
    options = parser.parse_args()
    rows, failures = [], 0
    with tempfile.TemporaryDirectory() as home:
        for world in options.worlds:
            controller, ranks = world.split(":")
            place = Place(controller, int(ranks), Path(home) / world.replace(":", "-"))
            place.folder.mkdir()
            (place.folder / "models.py").write_text(MODEL)
            for setup in options.setups:
                if place.ranks == 1 and setup in ONE_PROCESS:
                    continue
                chance = random.Random(f"{options.seed} {world} {setup}")
                problem = play(place, setup, chance, deterministic=not options.without)
                failures += bool(problem)
                rows.append(f"| {setup} | {world} | {problem or 'the same bits'} |")
                print(rows[-1], flush=True)
    print(f"{len(rows) - failures} of {len(rows)} resumed runs have the same bits.")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
