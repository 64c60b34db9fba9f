import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers import UNKNOWN, Environment, detect_environment

GLOO = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "2",
    "HOROVOD_CROSS_SIZE": "3",
    "HOROVOD_HOSTNAME": "node7",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "2053963777",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# What Slurm leaves in a batch script, where nothing was started by srun.
BATCH = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "8",
}


def ranks(found: Environment) -> tuple[int, ...]:
    return (found.rank, found.size, found.local_rank, found.local_size, found.cross_rank, found.cross_size)


def test_nobody_started_it():
    found = detect_environment({})
    assert (found.launcher, found.controller, ranks(found)) == ("none", "none", (0, 1, 0, 1, 0, 1))


def test_horovodrun_over_gloo():
    assert detect_environment(GLOO) == Environment("horovodrun", "gloo", 5, 6, 1, 2, 2, 3, "node7", "10.0.0.1:4711")


def test_gloo_by_hand_under_srun_wins_over_the_step():
    assert detect_environment(STEP | GLOO).controller == "gloo"


def test_mpirun_on_one_host():
    found = detect_environment(OPEN_MPI)
    assert (found.launcher, found.controller, found.job_id) == ("mpirun", "mpi", "2053963777")
    assert ranks(found) == (1, 3, 1, 3, 0, 1)


def test_horovodrun_over_mpi_is_told_by_the_network_cards():
    cards = {"OMPI_MCA_btl_tcp_if_include": "lo", "NCCL_SOCKET_IFNAME": "lo", "OMPI_MCA_pml": "ob1"}
    found = detect_environment(OPEN_MPI | cards)
    assert (found.launcher, found.controller) == ("horovodrun", "mpi")


def test_cross_rank_is_not_guessed_over_several_hosts():
    found = detect_environment(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert (found.cross_rank, found.cross_size) == (UNKNOWN, UNKNOWN)


def test_mpirun_inside_a_slurm_step_wins_over_the_step():
    assert detect_environment(STEP | OPEN_MPI).launcher == "mpirun"


@pytest.mark.parametrize("around", [{}, BATCH, STEP])
def test_hydra(around):
    found = detect_environment(around | HYDRA)
    assert (found.launcher, found.controller) == ("mpiexec", "mpi")
    assert ranks(found) == (2, 4, 0, 2, UNKNOWN, UNKNOWN)


@pytest.mark.parametrize("plugin", [{"PMIX_RANK": "3"}, {"PMI_RANK": "3", "PMI_SIZE": "5"}])
def test_srun_with_an_mpi_plugin(plugin):
    found = detect_environment(STEP | plugin)
    assert (found.launcher, found.controller, found.job_id) == ("srun", "mpi", "77.3")
    assert ranks(found) == (3, 5, 1, 2, 1, 2)


def test_srun_counts_only_the_hosts_that_have_this_local_rank():
    last = {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "PMIX_RANK": "4"}
    assert ranks(detect_environment(STEP | last)) == (4, 5, 0, 1, 2, 3)


def test_srun_without_an_mpi_plugin_is_refused():
    with pytest.raises(LaunchError, match="srun --mpi=pmix"):
        detect_environment(STEP)


@pytest.mark.parametrize(
    "script",
    [
        BATCH,
        BATCH | {"SLURM_STEP_ID": "4294967291"},  # the batch step
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's interactive step
    ],
)
def test_a_plain_python_in_a_slurm_script_is_alone(script):
    found = detect_environment(script)
    assert (found.launcher, found.size) == ("none", 1)


def test_srun_of_one_task_is_alone():
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    found = detect_environment(STEP | one | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (found.launcher, found.controller, found.size) == ("srun", "none", 1)


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5", "٣"])
def test_a_malformed_number_is_named_with_its_value(value):
    with pytest.raises(LaunchError, match=r"HOROVOD_LOCAL_SIZE must be a whole number") as raised:
        detect_environment(GLOO | {"HOROVOD_LOCAL_SIZE": value})
    assert repr(value) in str(raised.value)


def test_a_missing_variable_is_named():
    with pytest.raises(LaunchError, match="MPI_LOCALRANKID or PMI_LOCAL_RANK"):
        detect_environment({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_a_rank_outside_the_job_is_refused():
    with pytest.raises(LaunchError, match="rank 6 of 6"):
        detect_environment(GLOO | {"HOROVOD_RANK": "6"})


def test_tasks_per_node_that_do_not_add_up_are_refused():
    with pytest.raises(LaunchError, match=r"SLURM_STEP_TASKS_PER_NODE must add up to the 5.*'2\(x9\)'"):
        detect_environment(STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x9)", "PMIX_RANK": "0"})
