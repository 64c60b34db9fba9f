"""Step time of hvdtrain against a plain hand-written loop, both sides in turn.

    python benchmarks/step_time.py --controllers mpirun gloo --models digits resnet20 --rounds 5

Two ratios for every model and controller:

    defaults  the plain loop at Horovod's own settings. They are read when a process starts, so the sides take turns
              in processes of their own.
    settings  the plain loop with hvdtrain's settings of the exchange (with one process: without Horovod). Both sides
              take turns in the same processes, a window of ten steps each, so that neither placement nor the
              machine's mood tells them apart.

With --desync instead: what a look of the desync check takes, and which share that is of the steps between two.

A round's ratio is the median window of hvdtrain over that of the plain loop, each window with one logged step; the
median and the range over the rounds are reported. Nothing else may run on the machine meanwhile.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from harness import launcher, printed, write

from hvdtrain.config.training import DESYNC_EVERY

HERE = Path(__file__).parent
SIDES = HERE / "sides.py"
LIMIT_S = 300


def run(kind: str, model: str, controller: str, size: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return each side's windows in milliseconds a step."""
    command = [*launcher(controller, size), sys.executable, str(SIDES), kind, model]
    command += ["--batch", str(arguments.batch), "--windows", str(arguments.windows)]
    return dict(printed(command, "WINDOWS", limit_s=LIMIT_S))


def one_round(
    kind: str, model: str, controller: str, size: int, number: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the median window of each side."""
    if kind == "settings":
        windows = run("paired", model, controller, size, arguments)
    else:
        sides = ("plain", "hvdtrain") if number % 2 == 0 else ("hvdtrain", "plain")
        windows = {side: run(side, model, controller, size, arguments)[side] for side in sides}
    return {side: float(np.median(values)) for side, values in windows.items()}


def compare(kind: str, model: str, controller: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Run all rounds of one comparison and print its line."""
    size = 1 if controller == "none" else arguments.ranks
    rounds = [one_round(kind, model, controller, size, number, arguments) for number in range(arguments.rounds)]
    ratios = [r["hvdtrain"] / r["plain"] for r in rounds]
    low, middle, high = (float(v) for v in (min(ratios), np.median(ratios), max(ratios)))
    ours, plain = (float(np.median([r[side] for r in rounds])) for side in ("hvdtrain", "plain"))
    against = "bare loop" if size == 1 else f"plain loop, {'our settings' if kind == 'settings' else 'defaults'}"
    print(
        f"{model:9} {controller:6} {size} rank(s)  {against:26} {plain:8.2f} ms  hvdtrain {ours:8.2f} ms"
        f"  ratio {middle:.3f} ({low:.3f} .. {high:.3f})",
        flush=True,
    )
    return {
        **{"model": model, "controller": controller, "ranks": size, "against": against, "rounds_ms": rounds},
        "ratio": {"median": middle, "min": low, "max": high},
    }


def desync(model: str, controller: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure looks of the desync check and print their line."""
    rounds = [run("desync", model, controller, arguments.ranks, arguments) for _ in range(arguments.rounds)]
    looks, steps = ([float(np.median(r[what])) for r in rounds] for what in ("look", "step"))
    shares = [look / (DESYNC_EVERY * step) for look, step in zip(looks, steps, strict=True)]
    print(
        f"{model:9} {controller:6} {arguments.ranks} rank(s)  step {np.median(steps):8.2f} ms"
        f"  look {np.median(looks):8.2f} ms"
        f"  every {DESYNC_EVERY} steps: {np.median(shares):.3%} ({min(shares):.3%} .. {max(shares):.3%})",
        flush=True,
    )
    facts = {"model": model, "controller": controller, "ranks": arguments.ranks, "every": DESYNC_EVERY}
    return {**facts, "look_ms": looks, "step_ms": steps, "share": float(np.median(shares))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "resnet20"])
    parser.add_argument("--controllers", nargs="+", default=["mpirun", "gloo", "none"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24, help="windows of ten steps, the first four not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--desync", action="store_true", help="measure the desync check alone")
    arguments = parser.parse_args()
    if arguments.desync:
        worlds = [(model, name) for model in arguments.models for name in arguments.controllers if name != "none"]
        write(arguments, [desync(*world, arguments) for world in worlds])
        return
    results = [
        compare(kind, model, controller, arguments)
        for model in arguments.models
        for controller in arguments.controllers
        for kind in (("settings",) if controller == "none" else ("defaults", "settings"))
    ]
    write(arguments, results)


if __name__ == "__main__":
    main()
