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
# Parity, accumulation, embeddings and the collectives are checked in every world. What lies above the exchange does not
# depend on who carries it, and four ranks take turns on two cores: it is left out of some worlds, and what takes long
# to compile of most. Two ranks under MPI run everything; Horovod's face trains in every world of two ranks and four.
FACE = {"face_training", "face_traps"}
LONG_TO_COMPILE = {
    "callbacks",
    "combinations",
    "drift",
    "face_variants",
    "jit",
    "keras_models",
    "own_steps",
    "precision",
    "resuming",
}
ABOVE_THE_EXCHANGE = {"placeholders", "state", "streams", "sync_batch_norm", "training", "update"}
RANKS_THAT_DIFFER = {"calls", "data_service", "rank_parts"}
"""Two ranks can differ in all ways that matter, under either controller: over its channel they notice."""
FILES_LEFT_OUT: dict[tuple[str, int], set[str]] = {
    ("gloo", 1): LONG_TO_COMPILE | FACE | RANKS_THAT_DIFFER | {"update_rules"},
    ("mpirun", 1): (LONG_TO_COMPILE - {"own_steps"})
    | ABOVE_THE_EXCHANGE
    | FACE
    | RANKS_THAT_DIFFER
    | {"face_collectives", "update_rules"},
    ("gloo", 2): LONG_TO_COMPILE | ABOVE_THE_EXCHANGE | {"data_service", "rank_parts"},
    ("mpirun", 2): set(),
    ("gloo", 4): LONG_TO_COMPILE | RANKS_THAT_DIFFER | {"streams", "update"},
    # Adasum exists on MPI alone, and four ranks combine what two ranks made.
    ("mpirun", 4): LONG_TO_COMPILE | RANKS_THAT_DIFFER | ABOVE_THE_EXCHANGE - {"update"},
}
OTHERS = {
    "mirrored": "strategies",
    "multi_worker_mirrored": "strategies",
    "parameter_server": "servers",
    "tf_keras": "legacy_keras",
}
"""Other backends, and Horovod's face over tf_keras (TF_USE_LEGACY_KERAS=1), and the files with their checks."""
TWO_RANKS_UNDER_MPI_ONLY = {
    # These go once more over an exchange that another check has made.
    "accumulation.check_a_large_table_with_few_rows_touched",
    "accumulation.check_a_large_table_with_most_rows_touched",
    "accumulation.check_k_microbatches_are_exchanged_once",
    "accumulation.check_own_loop_eager",
    "accumulation.check_sparse_gradients_either_way",
    "accumulation.check_trainer_sgd_and_adam_the_other_way_round",
    "exchange.check_a_dataset_trains_like_arrays",
    "parity.check_dense_adam_float64",
    "parity.check_dense_sgd_float32",
    "parity.check_embedding_adam_float64",
    "parity.check_embedding_sgd_float32",
    "state.check_an_epoch_that_is_resumed_reports_all_of_it",
    "state.check_layers_that_are_unfrozen_between_two_fits",
    "update.check_groups_and_predivision",
    "update_rules.check_exclusions_by_variable_hold_for_slices",
    "update_rules.check_sharded_slots_with_everything_else",
    "update_rules.check_slots_go_on_from_a_checkpoint_sharded_or_not",
    "update_rules.check_local_steps_exchange_nothing_between_averages",
    "update_rules.check_what_does_not_fit_is_refused",
    # These show that others can fail.
    "accumulation.check_the_comparison_notices",
    "parity.check_parity_fails_when_a_sample_is_dropped",
    "parity.check_parity_fails_with_doubled_reduction",
    "parity.check_parity_fails_without_reduction",
    "sync_batch_norm.check_passes_of_each_rank_alone_are_not_equal",
    "sync_batch_norm.check_training_with_plain_layers_does_not",
    "update.check_bounds_are_on_the_gradient_of_the_whole_batch",
}
# Ten epochs five times over, on any number of ranks: that Gloo trains the same model is seen in two of them
# (tests/entry/test_train.py).
EVERYWHERE_UNDER_MPI = {"training.check_digits_reaches_its_accuracy_over_five_seeds"}


def checks_of(controller: str, size: int) -> list[str]:
    """Which checks a world runs."""
    left_out = FILES_LEFT_OUT[controller, size] | set(OTHERS.values())
    everything = [name for file in sorted(CHECKS.glob("*.py")) for name in check_names(file)]
    return [name for name in everything if _runs(name, controller, size, left_out)]


def _runs(name: str, controller: str, size: int, left_out: set[str]) -> bool:
    if name in EVERYWHERE_UNDER_MPI:
        return controller == "mpirun"
    if name in TWO_RANKS_UNDER_MPI_ONLY and (controller, size) != ("mpirun", 2):
        return False
    return name.split(".")[0] not in left_out


def check_names(file: Path) -> list[str]:
    """`module.function` of every check in a file, found without importing it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    functions = [line.removeprefix("def ").split("(")[0] for line in lines if line.startswith("def check_")]
    return [f"{file.stem}.{function}" for function in functions]


def main(results_path: Path, folder: Path, backend: Any, names: Sequence[str]) -> None:
    # Process sets may then be made by the checks that need them.
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    import hvdtrain

    # One worker, so that it is known what comes out. Those who serve go no further.
    hvdtrain.init(backend=backend, parameter_servers=2 if backend == "parameter_server" else None)
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
