"""Run the checks of `checks/` on all ranks of one launch; rank 0 writes what came of each to a file.

Usage: (launcher) python battery.py RESULTS_JSON FOLDER BACKEND MODULE.CHECK ...
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

CHECKS = HERE / "checks"
# What lies above the exchange does not depend on who carries it, and four ranks take turns on two cores: what takes
# long to compile is left out of most worlds.
FACE = {"face_training", "face_traps", "face_variants"}
LONG_TO_COMPILE = {"callbacks", "combinations", "jit", "keras_models", "precision"} | FACE
FILES_LEFT_OUT: dict[tuple[str, int], set[str]] = {
    ("mpirun", 1): LONG_TO_COMPILE | {"face_collectives"},
    ("mpirun", 2): set(),
    ("gloo", 1): {"combinations"} | FACE,
    ("gloo", 4): LONG_TO_COMPILE - {"face_training"},
}
OF_TF_DISTRIBUTE = "strategies"
"""The file whose checks are for other backends than Horovod."""
# These show that others can fail, or go once more over an exchange that another check has made.
TWO_RANKS_ONLY = {
    "accumulation.check_a_large_table_with_few_rows_touched",
    "accumulation.check_a_large_table_with_most_rows_touched",
    "accumulation.check_own_loop_eager",
    "accumulation.check_sparse_gradients_either_way",
    "accumulation.check_the_comparison_notices",
    "parity.check_dense_adam_float64",
    "parity.check_dense_sgd_float32",
    "parity.check_embedding_adam_float64",
    "parity.check_embedding_sgd_float32",
    "parity.check_parity_fails_when_a_sample_is_dropped",
    "parity.check_parity_fails_with_doubled_reduction",
    "parity.check_parity_fails_without_reduction",
    "sync_batch_norm.check_passes_of_each_rank_alone_are_not_equal",
    "sync_batch_norm.check_training_with_plain_layers_does_not",
    "update.check_bounds_are_on_the_gradient_of_the_whole_batch",
}

# Ten epochs five times over: that Gloo trains the same model is seen in two of them (tests/entry/test_train.py).
MPI_ONLY = {"training.check_digits_reaches_its_accuracy_over_five_seeds"}


def checks_of(controller: str, size: int) -> list[str]:
    """Which checks a world runs."""
    left_out = FILES_LEFT_OUT.get((controller, size), LONG_TO_COMPILE)
    files = [file for file in sorted(CHECKS.glob("*.py")) if file.stem not in left_out | {OF_TF_DISTRIBUTE}]
    elsewhere = (set() if size == 2 else TWO_RANKS_ONLY) | (MPI_ONLY if controller == "gloo" else set())
    return [name for file in files for name in check_names(file) if name not in elsewhere]


def check_names(file: Path) -> list[str]:
    """`module.function` of every check in a file, found without importing it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    functions = [line.removeprefix("def ").split("(")[0] for line in lines if line.startswith("def check_")]
    return [f"{file.stem}.{function}" for function in functions]


def main(results_path: Path, folder: Path, backend: Any, names: Sequence[str]) -> None:
    # Process sets may then be made by the checks that need them.
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    import hvdtrain

    hvdtrain.init(backend=backend)
    import tensorflow as tf

    # Each check traces functions of its own; TensorFlow takes that for an accident.
    tf.get_logger().setLevel("ERROR")
    from world import World

    from hvdtrain.backends.select import backend_for
    from hvdtrain.runtime.session import current

    session = current()
    world = World(session, backend_for(session), folder)
    results: dict[str, dict[str, object]] = {}
    for name in names:
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
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
