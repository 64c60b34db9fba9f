"""What smaller models lose: fewer bits, pruned, with adapters, distilled. Prints the tables of docs/export.md.

    python benchmarks/smaller.py --on digits cifar10 gpt_char --ranks 2 --seeds 0 --data FOLDER --runs FOLDER

By the command line, as a user would: a recipe is trained on all ranks, `export` rounds its weights, and further runs
begin with them: one or three epochs as they are, pruned, and with adapters. A student is trained from nothing, by
itself and with the first run as its teacher. Reported are the accuracies on the recipe's validation data, the
milliseconds of one sample on one thread in TensorFlow, and the sizes of safetensors files, also packed by gzip; of
adapters, the size of their own file. What is in `--runs` is not trained or exported again.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.engine import launcher
from hvdtrain.bench.script import Script

FIGURES = ("accuracy", "ms", "bytes", "packed")
MODES = ("float32", "float16", "int8", "int4")


@dataclass(frozen=True)
class Task:
    """A recipe, and what becomes of its model."""

    epochs: int
    student: tuple[str, ...]
    """Words that make it, and train it."""
    pruned: str
    """Layers that are pruned."""
    adapted: str
    """Layers that have adapters."""
    file: str = ""
    """Of the data, in --data."""
    more: int = 3
    """Epochs of what begins with the first run."""
    samples: int = 5000
    """Of the validation data, to count the accuracy of."""


TASKS = {
    "digits": Task(
        6, ("--model-args", "width", "4", "hidden", "16", "--epochs", "24"), "conv2|hidden", "hidden|logits"
    ),
    "cifar10": Task(6, ("--model-args", "depth", "8"), "block", "conv", "cifar10-train.tar.gz"),
    "gpt_char": Task(
        epochs=2,
        student=("--model-args", "depth", "2", "width", "64", "heads", "4"),
        pruned="",
        adapted="query|value",
        file="tinyshakespeare.txt",
        more=1,
        samples=1000,
    ),
}
PRUNED = {
    "50 % zeros": ("--prune", "0.5"),
    "80 % zeros": ("--prune", "0.8"),
    "90 % zeros": ("--prune", "0.9"),
    "2 of 4 zeros": ("--prune-pattern", "2:4"),
    "half of the channels": ("--prune", "0.5", "--prune-pattern", "channels"),
}


def models(task: Task, train: list[str], seed: int) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield the name of each model, the words that train it, the run's folder, and a precision of its file."""
    first, more = [*train, "--seed", str(seed), "--epochs", str(task.epochs)], ["--epochs", str(task.more)]
    again = ["--resume", "first", *more]
    for mode in MODES:
        yield mode, first, "first", mode
    # The weights alone, as all runs that begin with others.
    yield "more epochs", [*train, "--weights", "first", "--seed", str(seed), *more], "more", "float32"
    for name, options in PRUNED.items():
        layers = ["--prune-layers", task.pruned] if task.pruned else []
        yield name, [*again, *options, *layers, "--prune-epochs", str(task.more - 1)], name, "float32"
    yield "int4, trained for it", [*again, "--fake-quantize", "int4"], "rounded", "int4"
    yield "adapters", [*again, "--lora", "4", "--lora-layers", task.adapted], "adapted", "float32"
    yield "student", [*first, *task.student], "student", "float32"
    yield "student, distilled", [*first, *task.student, "--teacher", "first"], "taught", "float32"


def measured(
    task: Task, train: list[str], seed: int, ranks: int, folder: Path
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train and export each model in a folder, and yield its figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words, run, mode in models(task, train, seed):
        if not (folder / run / "summary.json").exists():
            shutil.rmtree(folder / run, ignore_errors=True)
            quiet = ["--plots", "False", "--tensorboard", "False", "--run-dir", run]
            _hvdtrain(folder, [*launcher("mpirun", ranks)], [*words, *quiet])
        exported = folder / run / "export"
        if not (row := _exported(exported, mode)):
            given = ["--format", "safetensors", "--quantize", mode, "--samples", str(task.samples), "--points", "1"]
            _hvdtrain(folder, [], ["export", run, *given])
            row = _exported(exported, mode)
        file = folder / run / "adapters.safetensors" if name == "adapters" else exported / row["path"]
        packed = len(gzip.compress(file.read_bytes()))
        yield name, {"accuracy": row["accuracy"], "ms": row["ms"], "bytes": file.stat().st_size, "packed": packed}


def _exported(folder: Path, mode: str) -> dict[str, Any]:
    file = folder / "export.json"
    rows = json.loads(file.read_text())["models"] if file.exists() else []
    return next((row for row in rows if (row["name"], row["precision"]) == ("safetensors", mode)), {})


def _hvdtrain(folder: Path, launched: list[str], words: list[str]) -> None:
    command = [*launched, sys.executable, "-m", "hvdtrain", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """Return the means over the seeds as a Markdown table; of several seeds, with the accuracies of each."""
    lines = ["| | accuracy | ms | kB | packed |", "|---|---|---|---|---|"]
    for name, found in figures.items():
        each = ", ".join(f"{one:.3f}" for one in found["accuracy"])
        accuracy = f"{np.mean(found['accuracy']):.4f}" + (f" ({each})" if len(found["accuracy"]) > 1 else "")
        kilobytes, packed = np.mean(found["bytes"]) / 1e3, np.mean(found["packed"]) / 1e3
        lines.append(f"| {name} | {accuracy} | {np.median(found['ms']):.2f} | {kilobytes:.0f} | {packed:.0f} |")
    return "\n".join(lines)


def main() -> int:
    script = Script(__doc__)
    script.add_argument("--on", nargs="+", choices=list(TASKS), default=["digits"])
    script.add_argument("--ranks", type=int, default=2)
    script.add_argument("--seeds", nargs="+", type=int, default=[0])
    script.add_argument("--data", type=Path, help="folder with cifar10-train.tar.gz and tinyshakespeare.txt")
    script.add_argument("--runs", type=Path, help="keeps the runs (default: none are kept)")
    options = script.parsed()
    with tempfile.TemporaryDirectory() as place:
        _measure_all(script, options, options.runs or Path(place))
    return script.exit_code()


def _measure_all(script: Script, options: argparse.Namespace, runs: Path) -> None:
    for recipe in options.on:
        task, train = TASKS[recipe], [recipe]
        if task.file and options.data is not None:
            train += ["--data-args", "path", str((options.data / task.file).absolute())]
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for seed in options.seeds:
            for name, figures in measured(task, train, seed, options.ranks, runs / f"{recipe}-{seed}"):
                print(f"{recipe}, seed {seed}, {name}: accuracy {figures['accuracy']:.4f}", flush=True)
                for key, value in figures.items():
                    found[name][key].append(value)
        for key in FIGURES:
            script.record(f"{recipe}: {key}", {"ranks": options.ranks}, {name: found[name][key] for name in found})
        print(table(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
