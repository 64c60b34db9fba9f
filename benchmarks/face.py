"""Step time of `fit` with DistributedOptimizer, through the face of Horovod, against the plain loop with a tape.

    python benchmarks/face.py --controllers mpirun gloo --rounds 5

Both sides take turns in the same processes, a window of ten steps each, pinned alike and with the same settings of the
exchange. A round's ratio is the median window of `fit` over that of the loop; the median and the range over the rounds
are reported. Nothing else may run on the machine meanwhile.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from harness import launcher, printed, write

SIDES = Path(__file__).parent / "face_sides.py"
LIMIT_S = 300


def one_round(controller: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median window of each side in milliseconds a step."""
    command = [*launcher(controller, arguments.ranks), sys.executable, str(SIDES), arguments.model]
    command += ["--batch", str(arguments.batch), "--windows", str(arguments.windows)]
    windows = printed(command, "WINDOWS", limit_s=LIMIT_S)
    return {side: float(np.median(values)) for side, values in windows.items()}


def compare(controller: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Run all rounds under a controller and print their line."""
    rounds = [one_round(controller, arguments) for _ in range(arguments.rounds)]
    ratios = [each["face"] / each["plain"] for each in rounds]
    low, middle, high = (float(v) for v in (min(ratios), np.median(ratios), max(ratios)))
    face, plain = (float(np.median([each[side] for each in rounds])) for side in ("face", "plain"))
    print(
        f"{arguments.model:9} {controller:6} {arguments.ranks} rank(s)  plain loop {plain:8.2f} ms  fit {face:8.2f} ms"
        f"  ratio {middle:.3f} ({low:.3f} .. {high:.3f})",
        flush=True,
    )
    return {"controller": controller, "rounds_ms": rounds, "ratio": {"median": middle, "min": low, "max": high}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--controllers", nargs="+", default=["mpirun", "gloo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24, help="windows of ten steps, the first four not counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    write(arguments, [compare(controller, arguments) for controller in arguments.controllers])


if __name__ == "__main__":
    main()
