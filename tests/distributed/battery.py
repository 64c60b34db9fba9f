"""Run the checks of `checks/` on all ranks of one launch; rank 0 writes what came of each to a file.

Usage: (launcher) python battery.py RESULTS_JSON FOLDER [FILE ...]
"""

import importlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

CHECKS = HERE / "checks"
# What lies above the exchange does not depend on who carries it, and four ranks take turns on two cores: what takes
# long to compile is left out of most worlds. What exchanges numbers in a way of its own (parity, accumulation,
# normalization …) runs in every one.
MOST_LEAVE_OUT = {"callbacks", "combinations", "jit", "keras_models", "precision"}
LEFT_OUT: dict[tuple[str, int], set[str]] = {("mpirun", 2): set(), ("gloo", 1): {"combinations"}}


def check_files(controller: str, size: int) -> list[str]:
    """Which files of `checks/` a world runs."""
    left_out = LEFT_OUT.get((controller, size), MOST_LEAVE_OUT)
    return sorted(file.name for file in CHECKS.glob("*.py") if file.stem not in left_out)


def check_names(files: Sequence[str]) -> list[str]:
    """`module.function` of every check in files of `checks/`, found without importing anything."""
    names = []
    for file in (CHECKS / name for name in files):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("def check_"):
                names.append(f"{file.stem}.{line.removeprefix('def ').split('(')[0]}")
    return names


def main(results_path: Path, folder: Path, files: Sequence[str]) -> None:
    import hvdtrain

    hvdtrain.init()
    import tensorflow as tf

    # Each check traces functions of its own; TensorFlow takes that for an accident.
    tf.get_logger().setLevel("ERROR")
    from world import World

    from hvdtrain.backends.select import backend_for
    from hvdtrain.runtime.session import current

    session = current()
    world = World(session, backend_for(session), folder)
    results: dict[str, dict[str, object]] = {}
    for name in check_names(files):
        module, function = name.split(".")
        begin = time.perf_counter()
        try:
            getattr(importlib.import_module(f"checks.{module}"), function)(world)
            failure = ""
        except BaseException:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        # A check that failed on one rank before it exchanged something leaves the others' bytes here.
        failures = [text.decode(errors="replace") for text in world.gather(failure.encode())]
        seconds = time.perf_counter() - begin
        results[name] = {"failure": "\n".join(filter(None, failures)), "seconds": round(seconds, 2)}
        if world.rank == 0:
            results_path.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or sorted(file.name for file in CHECKS.glob("*.py")))
