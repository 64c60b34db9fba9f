"""Speed and final accuracy of the three precisions, on runs that end in an accuracy: a CNN, an MLP, a transformer.

    python benchmarks/precision.py --ranks 2 --rounds 3 --out results.json

Each run is `mpirun -np RANKS python -m hvdtrain …`, as a user types it; the precisions take turns, and each round
takes another seed. Reported are medians over the rounds of the step's time, its ratio to float32 in the same round, and
of the validation accuracy and loss at the end. Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import launcher, printed, write

RUNS = {
    "digits cnn": ("digits",),
    "digits mlp": ("digits", "--model", "mlp", "--model-args", "width", "256"),
    "transformer": ("lm_synthetic", "--model-args", "depth", "2", "width", "64", "heads", "4", "--epochs", "2"),
}
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
LIMIT_S = 600


def run(words: tuple[str, ...], precision: str, seed: int, ranks: int, folder: Path) -> dict[str, float]:
    """Return the run's summary."""
    place = folder / f"{len(list(folder.iterdir()))}"
    command = [*launcher("mpirun", ranks), sys.executable, "-m", "hvdtrain"]
    command += [*words, "--precision", precision, "--seed", str(seed), "--run-dir", str(place)]
    command += ["--tensorboard", "False", "--plots", "False"]
    printed(command, "", limit_s=LIMIT_S)
    summary = json.loads((place / "summary.json").read_text())
    return {"step_ms": summary["step_ms"]["median"], **{k: summary[k] for k in ("val_accuracy", "val_loss")}}


def compare(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Run all rounds of one model and print a line for each precision."""
    rounds = [
        {precision: run(RUNS[name], precision, seed, arguments.ranks, folder) for precision in PRECISIONS}
        for seed in range(arguments.rounds)
    ]
    rows: list[dict[str, object]] = []
    for precision in PRECISIONS:
        found = {key: [r[precision][key] for r in rounds] for key in ("step_ms", "val_accuracy", "val_loss")}
        ratio = float(np.median([r[precision]["step_ms"] / r["float32"]["step_ms"] for r in rounds]))
        medians = {key: float(np.median(values)) for key, values in found.items()}
        print(
            f"{name:12} {precision:15} {medians['step_ms']:8.2f} ms ({ratio:.2f} of float32)   "
            f"val_accuracy {medians['val_accuracy']:.4f}   val_loss {medians['val_loss']:.4f}",
            flush=True,
        )
        rows.append({"run": name, "precision": precision, "ratio": ratio, "medians": medians, "rounds": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [row for name in arguments.runs for row in compare(name, arguments, Path(folder))]
    write(arguments, results)


if __name__ == "__main__":
    main()
