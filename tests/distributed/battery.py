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
# Two ranks under MPI run everything. Parity, the tape and the collectives are checked under both controllers, and on
# one, two and four ranks. What lies above the exchange does not depend on who carries it, and four ranks take turns on
# two cores: four run it under one controller, and never what takes long to compile. One rank exchanges nothing: it runs
# each file under one controller. Horovod's face trains on two ranks under both, and on four under Gloo.
FACE = {"face_training", "face_traps"}
LONG_TO_COMPILE = {
    "bad_steps",
    "callbacks",
    "combinations",
    "drift",
    "face_variants",
    "jit",
    "keras_models",
    "own_steps",
    "precision",
    "resuming",
    "zero",
}
TIMED = {"slow_ranks"}
"""What measures time is not for more ranks than cores."""
ABOVE_THE_EXCHANGE = {"placeholders", "state", "sync_batch_norm", "training", "update"}
RANKS_THAT_DIFFER = {
    "calls",
    "data_service",
    "face_errors",
    "face_gradients",
    "face_matrix",
    "face_sessions",
    "rank_parts",
    "streams",
}
"""Two ranks can differ in all ways that matter, under either controller: over its channel they notice."""
SPLIT_MODELS = {
    "alike",
    "context_parallel",
    "embedding",
    "experts",
    "fused_heads",
    "held_parts",
    "mesh",
    "pipelines",
    "tensor_parallel",
}
"""Nothing is split on one rank; four ranks under Gloo have what two axes take."""
SEVERAL_ON_A_HOST = {"context_pairs", "expert_pipelines", "hierarchy", "hybrids", "long_pipelines", "split_local_steps"}
"""Four ranks are the fewest of which two hosts, or two axes, can have two each, and a pipeline a middle."""
FILES_LEFT_OUT: dict[tuple[str, int], set[str]] = {
    ("gloo", 1): TIMED
    | LONG_TO_COMPILE
    | FACE
    | SEVERAL_ON_A_HOST
    | SPLIT_MODELS
    | RANKS_THAT_DIFFER
    | {"update_rules"},
    ("mpirun", 1): TIMED
    | SPLIT_MODELS
    | (LONG_TO_COMPILE - {"own_steps"})
    | ABOVE_THE_EXCHANGE
    | FACE
    | RANKS_THAT_DIFFER
    | SEVERAL_ON_A_HOST
    | {"accumulation", "compression", "exchange", "face_collectives", "parity", "update_rules"},
    ("gloo", 2): TIMED
    | LONG_TO_COMPILE
    | ABOVE_THE_EXCHANGE
    | SEVERAL_ON_A_HOST
    | {
        "alike",
        "context_parallel",
        "data_service",
        "embedding",
        "experts",
        "fused_heads",
        "held_parts",
        "pipelines",
        "rank_parts",
        "streams",
        "tensor_parallel",
    },
    ("mpirun", 2): SEVERAL_ON_A_HOST,
    ("gloo", 4): TIMED | LONG_TO_COMPILE | RANKS_THAT_DIFFER | {"pipelines", "update", "update_rules"},
    # Adasum exists on MPI alone, and four ranks combine what two ranks made.
    ("mpirun", 4): TIMED
    | SPLIT_MODELS
    | {"context_pairs", "expert_pipelines", "hybrids", "long_pipelines", "split_local_steps"}
    | LONG_TO_COMPILE
    | RANKS_THAT_DIFFER
    | FACE
    | {"accumulation", "compression", "exchange"}
    | ABOVE_THE_EXCHANGE - {"update"},
}
OTHERS = {
    "mirrored": "strategies",
    "multi_worker_mirrored": "strategies",
    "parameter_server": "servers",
    "tf_keras": "legacy_keras",
}
"""Other backends, and Horovod's face over tf_keras (TF_USE_LEGACY_KERAS=1), and the files with their checks."""
TWO_RANKS_UNDER_MPI_ONLY = {
    # Of models with their own step, one rank trains those with one optimizer and several, a network that follows
    # another, validation, and two streams of data.
    "own_steps.check_a_conditional_gan",
    "own_steps.check_a_custom_loop_with_two_networks",
    "own_steps.check_a_cycle_gan_with_four_optimizers",
    "own_steps.check_a_siamese_network_of_triplets",
    "own_steps.check_a_wasserstein_gan_with_gradient_penalty",
    "own_steps.check_knowledge_distillation",
    "own_steps.check_sample_weights_in_a_step_of_its_own",
    # Four ranks train ours, and what is around them on a mesh of two axes; `hybrids` does so for experts and by tp.
    "experts.check_capacity_is_that_of_each_ranks_tokens",
    "experts.check_experts_train_as_in_one_process",
    "mesh.check_clipping_is_by_the_norm_of_the_whole_gradient",
    "mesh.check_a_model_split_by_hand_trains_as_one_process_does",
    "context_parallel.check_a_collective_that_is_missing_is_noticed",
    "context_parallel.check_masks_weights_and_regularizers_in_float64",
    "context_parallel.check_what_does_not_fit_is_refused",
    "context_parallel.check_what_is_around_split_sequences",
    "fused_heads.check_a_collective_of_fused_heads_that_is_missing_is_noticed",
    "tensor_parallel.check_models_of_users_train_split_as_in_one_process",
    "tensor_parallel.check_slices_of_the_sequence_train_as_in_one_process",
    "tensor_parallel.check_a_collective_that_is_missing_is_noticed",
    # These go once more over an exchange that another check has made.
    "accumulation.check_a_large_table_with_few_rows_touched",
    "accumulation.check_a_large_table_with_most_rows_touched",
    "accumulation.check_batch_norm_sees_microbatches",
    "accumulation.check_k_microbatches_are_exchanged_once",
    "accumulation.check_own_loop_eager",
    "accumulation.check_own_loop_in_fp16_skips_groups_that_overflow",
    "accumulation.check_sparse_gradients_either_way",
    "accumulation.check_trainer_sgd_and_adam_the_other_way_round",
    "compression.check_groups_and_predivide_change_no_more_than_rounding",
    "compression.check_tape_in_16_bits",
    "exchange.check_a_dataset_trains_like_arrays",
    "exchange.check_images_in_files_are_read_once_in_either_order_and_from_the_cache",
    "parity.check_dense_adam_float64",
    "parity.check_dense_sgd_float32",
    "parity.check_embedding_adam_float64",
    "parity.check_embedding_sgd_float32",
    "state.check_an_epoch_that_is_resumed_reports_all_of_it",
    "state.check_layers_that_are_unfrozen_between_two_fits",
    "state.check_own_loops_match_variables_whatever_keras_calls_them",
    "state.check_ranks_that_built_other_models_before_train_together",
    "sync_batch_norm.check_layer_in_two_branches",
    "sync_batch_norm.check_microbatches_in_a_loop",
    "update.check_groups_and_predivision",
    "update_rules.check_exclusions_by_variable_hold_for_slices",
    "update_rules.check_sharded_slots_with_everything_else",
    "update_rules.check_slots_go_on_from_a_checkpoint_sharded_or_not",
    "update_rules.check_local_steps_exchange_nothing_between_averages",
    "update_rules.check_what_does_not_fit_is_refused",
    # Two ranks have all that belongs to divided experts and tables, but for several axes and ranks without samples.
    "embedding.check_dlrm_with_divided_tables_is_dlrm",
    "embedding.check_the_comparison_notices_gradients_that_stay",
    "experts.check_experts_that_ranks_do_not_divide_are_refused",
    "experts.check_the_comparison_notices_what_is_missing",
    "held_parts.check_a_callback_of_any_rank_stops_all",
    "held_parts.check_no_file_is_written_of_slices",
    # One rank that differs is enough, and that draws differ.
    "placeholders.check_a_placeholder_that_overflows_counts_for_nothing",
    "placeholders.check_synchronized_statistics_move_on_every_rank",
    "training.check_a_diverging_loss_is_named_with_its_step",
    "training.check_a_metric_that_is_no_sum_is_refused_by_name",
    "training.check_a_nan_is_named_with_its_step",
    "training.check_dropout_differs_by_rank_and_is_reproducible",
    "training.check_metrics_with_counts_are_added_up",
    "training.check_parameters_that_an_activation_hides_are_noticed",
    # These show that others can fail.
    "accumulation.check_the_comparison_notices",
    "parity.check_parity_fails_when_a_sample_is_dropped",
    "parity.check_parity_fails_with_doubled_reduction",
    "parity.check_parity_fails_without_reduction",
    "sync_batch_norm.check_passes_of_each_rank_alone_are_not_equal",
    "sync_batch_norm.check_training_with_plain_layers_does_not",
    "update.check_bounds_are_on_the_gradient_of_the_whole_batch",
}
EVERYWHERE_UNDER_MPI = {
    # Ten epochs, on any number of ranks: that Gloo trains the same model is seen in two of them
    # (tests/entry/test_train.py).
    "training.check_digits_reaches_its_accuracy",
}
ON_EIGHT_ALONE = {"three_axes"}
"""Three axes of two ranks each."""
ON_EIGHT = {"hybrids.check_hybrids_train_as_one_process_does"}
"""These have three axes there, and two on fewer ranks."""
ON_EIGHT_UNDER_GLOO = {
    # Where four addends lie in a buffer decides in which order Gloo adds them up; MPI has one order.
    "three_axes.check_tied_weights_of_stages_stay_equal_with_many_replicas",
    "three_axes.check_what_ranks_along_tp_hold_whole_stays_equal_with_many_replicas",
}
ALSO_ON_FOUR_UNDER_GLOO = {
    # Slices of four ranks, and the other controller.
    "zero.check_stages_2_and_3_train_like_one_process",
    "zero.check_a_model_that_a_function_builds_is_slices_from_the_start",
    # Ranks along dp hold the same experts, and one of them writes them.
    "experts.check_experts_are_saved_and_restored_in_any_layout",
    # One rank in four sees the sample that makes all of them skip.
    "bad_steps.check_skipping_is_what_one_process_does_without_the_batch",
}
NOT_ON_FOUR_UNDER_MPI = {
    # On four under Gloo, and on two under both: the embedding and the dense model stay, each in one precision.
    "parity.check_batches_with_fewer_samples_than_ranks",
    "parity.check_dense_adam_float32",
    "parity.check_embedding_sgd_float64",
    "parity.check_sample_weights_and_masks",
    "tape.check_a_loop_of_ones_own",
    "tape.check_a_loop_on_a_sharded_dataset_trains_as_one_process_does",
}
UNDER_MPI_ONLY = {
    # Local steps are exchanged by nothing but the all-reduce.
    "update_rules.check_local_steps_follow_their_definition",
    "update_rules.check_one_local_step_of_sgd_is_a_step_of_data_parallelism",
}

# `launch/test.sh` leaves to `launch/test.sh --all`, on four ranks, all but what takes four, and on two what takes long.
EVERY_DAY_ON_FOUR_UNDER_GLOO = {
    "context_pairs",
    "expert_pipelines",
    "hierarchy",
    "hybrids",
    "long_pipelines",
    "mesh",
    "parity",
    "zero",
}
EXTENDED_ON_FOUR_UNDER_GLOO = {
    "context_pairs.check_a_message_that_is_missing_is_noticed",
    "context_pairs.check_capacity_is_that_of_a_slice",
    "expert_pipelines.check_training_goes_wrong_without_the_losses_of_earlier_stages",
    "hybrids.check_a_hybrid_with_a_collective_left_out_is_another_model",
}
EXTENDED_ON_EIGHT = {
    "three_axes.check_experts_that_stages_share_train_as_one_process_does",
    "three_axes.check_what_ranks_along_tp_hold_whole_stays_equal_with_many_replicas",
    "three_axes.check_slices_of_sequences_and_experts_of_stages_train_as_one_process_does",
    "three_axes.check_slices_of_sequences_in_split_layers_train_as_one_process_does",
}
EXTENDED_ON_TWO_UNDER_MPI = {
    "combinations",
    "context_parallel.check_what_is_around_split_sequences",
    "data_service",
    "face_variants",
    "jit",
    "own_steps.check_a_custom_loop_with_two_networks",
    "own_steps.check_a_cycle_gan_with_four_optimizers",
    "own_steps.check_a_diffusion_model_with_averaged_weights",
    "own_steps.check_a_siamese_network_of_triplets",
    "own_steps.check_a_wasserstein_gan_with_gradient_penalty",
    "own_steps.check_knowledge_distillation",
    "resuming.check_a_backup_on_rank_0_alone_takes_all_ranks_with_it",
    "resuming.check_a_full_disk_leaves_the_last_good_checkpoint",
    "resuming.check_a_training_goes_on_where_only_rank_0_sees_its_checkpoints",
    "resuming.check_a_training_on_each_ranks_own_samples_goes_on",
    "slow_ranks",
    "state.check_an_epoch_that_is_resumed_reports_all_of_it",
    "state.check_layers_that_are_unfrozen_between_two_fits",
    "tensor_parallel.check_models_of_users_train_split_as_in_one_process",
}


def is_extended(name: str, controller: str, size: int) -> bool:
    """Whether `launch/test.sh --all` alone runs a check in a world: it takes long, or others are near it."""
    of_file = name.split(".")[0]
    if (controller, size) == ("gloo", 4):
        every_day = of_file in EVERY_DAY_ON_FOUR_UNDER_GLOO or name in ALSO_ON_FOUR_UNDER_GLOO
        return not every_day or name in EXTENDED_ON_FOUR_UNDER_GLOO
    if size == 8:
        return name in EXTENDED_ON_EIGHT
    return (controller, size) == ("mpirun", 2) and not EXTENDED_ON_TWO_UNDER_MPI.isdisjoint({name, of_file})


def checks_of(controller: str, size: int) -> list[str]:
    """Which checks a world runs."""
    if (controller, size) == ("gloo", 8):
        return sorted(ON_EIGHT_UNDER_GLOO)
    if size == 8:
        on_eight = ON_EIGHT.union(*(check_names(CHECKS / f"{file}.py") for file in ON_EIGHT_ALONE))
        return sorted(on_eight - ON_EIGHT_UNDER_GLOO)
    left_out = FILES_LEFT_OUT[controller, size] | set(OTHERS.values()) | ON_EIGHT_ALONE
    everything = [name for file in sorted(CHECKS.glob("*.py")) for name in check_names(file)]
    return [name for name in everything if _runs(name, controller, size, left_out)]


def _runs(name: str, controller: str, size: int, left_out: set[str]) -> bool:
    if name in EVERYWHERE_UNDER_MPI:
        return controller == "mpirun"
    if name in ALSO_ON_FOUR_UNDER_GLOO and (controller, size) == ("gloo", 4):
        return True
    if name in TWO_RANKS_UNDER_MPI_ONLY and (controller, size) != ("mpirun", 2):
        return False
    if name in NOT_ON_FOUR_UNDER_MPI and (controller, size) == ("mpirun", 4):
        return False
    if name in UNDER_MPI_ONLY and controller != "mpirun":
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
