"""Step time of hvdtrain against a plain hand-written loop, the sides in turn in fresh processes.

    python benchmarks/step_time.py --controllers mpirun gloo --models digits resnet20 --rounds 5

A round runs every side once, in turn; a side's figure for a round is the median over windows of ten steps (each
with one logged step) after the warm-up. Ratios are formed within a round; their median and range are reported.
Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIDES = HERE / "sides.py"
WARM_UP, WINDOW = 20, 10
LIMIT_S = 300


def launcher(controller: str, size: int) -> list[str]:
    if controller == "none":
        return []
    if controller == "mpirun":
        return ["mpirun", "--bind-to", "none", "--oversubscribe", "-np", str(size)]
    return ["horovodrun", "--gloo", "-np", str(size)]


def run_side(side: str, model: str, controller: str, size: int, batch: int, steps: int) -> float:
    """Return the side's median time of a step in milliseconds."""
    command = [*launcher(controller, size), sys.executable, str(SIDES), side, model]
    command += ["--batch", str(batch), "--steps", str(steps)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if os.geteuid() == 0:
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r"ENDS (\[.*\])", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    ends = np.array(json.loads(found[1]))[WARM_UP:]
    windows = ends[: len(ends) // WINDOW * WINDOW : WINDOW]
    return float(1000.0 * np.median(np.diff(windows)) / WINDOW)


def compare(model: str, controller: str, sides: list[str], arguments: argparse.Namespace) -> dict[str, object]:
    """Run all rounds of one comparison and print its table."""
    size = 1 if controller == "none" else arguments.ranks
    rounds: list[dict[str, float]] = []
    for number in range(arguments.rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        rounds.append({s: run_side(s, model, controller, size, arguments.batch, arguments.steps) for s in order})
    print(f"\n{model}, {size} rank(s), {controller}, global batch {arguments.batch}, {arguments.rounds} rounds")
    result: dict[str, object] = {"model": model, "controller": controller, "ranks": size, "rounds_ms": rounds}
    for side in sides:
        times = [r[side] for r in rounds]
        ratios = [r["hvdtrain"] / r[side] for r in rounds]
        low, middle, high = (float(v) for v in (min(ratios), np.median(ratios), max(ratios)))
        result[f"hvdtrain/{side}"] = {"median": middle, "min": low, "max": high}
        print(
            f"  {side:9} {np.median(times):8.2f} ms   hvdtrain / {side}: {middle:.3f} ({low:.3f} .. {high:.3f})",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "resnet20"])
    parser.add_argument("--controllers", nargs="+", default=["mpirun", "gloo", "none"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    results = [
        compare(
            model,
            controller,
            ["bare", "hvdtrain"] if controller == "none" else ["plain", "tuned", "hvdtrain"],
            arguments,
        )
        for model in arguments.models
        for controller in arguments.controllers
    ]
    if arguments.out:
        settings = {key: value for key, value in vars(arguments).items() if key != "out"}
        host = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        report = {"date": time.strftime("%Y-%m-%d"), "host": host, "settings": settings, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
