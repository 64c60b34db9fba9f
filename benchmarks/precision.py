"""Speed and final accuracy of the three precisions, on runs that end in an accuracy: a CNN, an MLP, a transformer.

    python benchmarks/precision.py --ranks 2 --rounds 3 --out results.json

Each run is `mpirun -np RANKS python -m hvdtrain …`, as a user types it; the precisions take turns, and each seed is one
round. Reported are medians over the seeds of the step's time, its ratio to float32 with the same seed, and of the
validation accuracy and loss at the end. Nothing else may run on the machine meanwhile.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times
from hvdtrain.runtime.launchers import detect_environment

RUNS = {
    "digits cnn": ("digits",),
    "digits mlp": ("digits", "--model", "mlp", "--model-args", "width", "256"),
    "transformer": ("lm_synthetic", "--model-args", "depth", "2", "width", "64", "heads", "4", "--epochs", "2"),
}
NOTED = ("val_accuracy", "val_loss")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


def train(run: str, precision: str, seed: int, folder: str) -> dict[str, Any]:
    """Train as the command line does, and return the figures of the run's summary on rank 0."""
    from hvdtrain.cli.main import main as hvdtrain

    place = Path(folder) / f"{run}-{precision}-{seed}"
    words = [*RUNS[run], "--precision", precision, "--seed", str(seed), "--run-dir", str(place)]
    code = hvdtrain([*words, "--tensorboard", "False", "--plots", "False"])
    if code or detect_environment().rank:
        sys.exit(code)
    summary = json.loads((place / "summary.json").read_text())
    return {"ms": summary["step_ms"]["median"], **{name: summary[name] for name in NOTED}}


def main() -> int:
    script = Script(__doc__, train, rounds=3)
    script.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    script.add_argument("--ranks", type=int, default=2)
    options = script.parsed()
    for name in options.runs:
        found: dict[str, list[Any]] = {precision: [] for precision in PRECISIONS}
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.rounds):
                given = {"run": name, "seed": seed, "folder": folder}
                order = PRECISIONS if seed % 2 == 0 else PRECISIONS[::-1]
                jobs = [
                    script.job(kind, train, controller="mpirun", ranks=options.ranks, precision=kind, **given)
                    for kind in order
                ]
                for run in script.measure(jobs, limit_s=600):
                    found[run.name].append(run.rounds[0].figures)
        complete = {kind: figures for kind, figures in found.items() if len(figures) == options.rounds}
        notes = {
            kind: "   ".join(f"{name} {np.median([each[name] for each in figures]):.4f}" for name in NOTED)
            for kind, figures in complete.items()
        }
        times = {kind: [each["ms"] for each in figures] for kind, figures in complete.items()}
        print_times(f"{name:12}", times, "float32", notes)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
