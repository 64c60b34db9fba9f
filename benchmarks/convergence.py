"""Update rules: the loss and accuracy that a recipe comes to, from several seeds.

    python benchmarks/convergence.py digits --seeds 5
    python benchmarks/convergence.py language --data tinyshakespeare.txt
    python benchmarks/convergence.py cifar10 --data cifar10-train.tar.gz

One launch for each rule and seed; all see as many samples. Their speed says nothing where ranks share cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hvdtrain.bench.engine import launcher
from hvdtrain.bench.script import Script

RECIPES = {
    "digits": "digits --epochs 15",
    "language": "gpt_char --data-args path {} length 64 --model-args depth 6 width 128 heads 4 dropout 0.0",
    "cifar10": "cifar10 --data-args path {} validation 5000 --cache memory",
}
RULES = {
    "all_reduce": "",
    "async": "--update async",
    "async, at most 2 ahead": "--update async --max-staleness 2",
    "async, rate": "--update async --compensation rate",
    "async, dc_asgd": "--update async --compensation dc_asgd",
    "async, adaptive": "--update async --compensation adaptive",
    "async, pull_ahead": "--update async --pull-ahead True",
    "local, 8 steps": "--local-steps 8",
    "local, after 100": "--local-steps 8 --local-after 100",
    "local, slowmo": "--local-steps 8 --outer-optimizer slowmo",
    "local, streamed": "--local-steps 8 --average-fragments 4 --average-delay 2 --average-bits 8",
    "diloco, 8 steps": "--local-steps 8 --outer-optimizer diloco",
    "diloco, 50 steps": "--local-steps 50 --outer-optimizer diloco",
    "diloco, 50 steps, after 500": "--local-steps 50 --outer-optimizer diloco --local-after 500",
    "easgd, 2 steps": "--update easgd --local-steps 2",
    "gossip": "--update gossip",
    "gossip, exponential": "--update gossip --gossip-graph exponential",
    "gossip, pushing": "--update gossip --push-sum True",
}
FIGURES = ("val_accuracy", "val_loss", "train_loss", "wall_seconds")
QUIET = [
    "--log-every",
    "100000",
    "--plots",
    "False",
    "--tensorboard",
    "False",
    "--rank-logs",
    "False",
    "--pin",
    "False",
]


def trained(words: list[str], ranks: int, seed: int) -> dict[str, float]:
    """Return what a training of these words came to; {} if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [*launcher("mpirun", ranks), sys.executable, "-m", "hvdtrain", *words, *QUIET, "--seed", str(seed)]
        subprocess.run([*command, "--run-dir", str(run)], stdout=subprocess.DEVNULL, check=False)
        summary = run / "summary.json"
        found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
        return {name: found[name] for name in FIGURES if name in found}


def main() -> int:
    script = Script(__doc__)
    script.add_argument("recipe", choices=tuple(RECIPES))
    script.add_argument("--data", default="", help="file of the recipe's samples")
    script.add_argument("--ranks", type=int, default=4, help="(4)")
    script.add_argument("--seeds", type=int, default=1, help="(1)")
    script.add_argument("--rules", nargs="+", choices=tuple(RULES), default=list(RULES))
    script.add_argument("--options", default="", help="more options of all trainings, in one word")
    options = script.parsed()
    words = [*RECIPES[options.recipe].format(options.data).split(), *options.options.split()]
    base, failed = 0.0, False
    for rule in options.rules:
        runs = [trained([*words, *RULES[rule].split()], options.ranks, seed) for seed in range(options.seeds)]
        failed |= not all(runs)
        figures = {name: [run[name] for run in runs if name in run] for name in FIGURES}
        script.record(rule, {"ranks": options.ranks}, figures)
        loss = float(np.mean(figures["val_loss"])) if figures["val_loss"] else float("nan")
        base = base or loss
        accuracy, seconds = (np.mean(figures[name] or [np.nan]) for name in ("val_accuracy", "wall_seconds"))
        print(f"{rule:28} loss {loss:.4f} ({loss - base:+.4f})   accuracy {accuracy:.4f}   {seconds:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
