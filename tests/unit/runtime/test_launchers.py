import pytest

from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.failures import show_alone
from hvdtrain.runtime.launchers import UNKNOWN, Environment, detect_environment, expand_hosts
from hvdtrain.runtime.world import refuse_lone_ranks
from tests.unit import launcher_environments as started_by

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


def test_srun_without_an_mpi_plugin_and_without_a_secret_is_refused_with_both_cures():
    with pytest.raises(LaunchError, match=r"srun --mpi=pmix.*export HVDTRAIN_JOB_SECRET=\$\(od .*urandom"):
        detect_environment(STEP)


NODES = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURMD_NODENAME": "n2"}


@pytest.mark.parametrize("secret", ["HVDTRAIN_JOB_SECRET", "HVDTRAIN_JOB_SECRET_FILE"])
def test_srun_without_an_mpi_plugin_and_with_a_secret_is_gloo(secret):
    found = detect_environment(STEP | NODES | {secret: "x"})
    assert (found.launcher, found.controller, found.job_id, found.hostname) == ("srun", "gloo", "77.3", "n2")
    assert ranks(found) == (3, 5, 1, 2, 1, 2)
    assert found.hosts == ("n1", "n2", "n3")
    assert found.store_on_rank_0
    again = detect_environment(STEP | NODES | {secret: "x", "SLURM_RESTART_COUNT": "2"})
    assert again.job_id == "77.3.2", "a job that was requeued is another one"


def test_srun_with_an_mpi_plugin_is_mpi_whatever_secret_there_is():
    found = detect_environment(STEP | NODES | {"PMIX_RANK": "3", "HVDTRAIN_JOB_SECRET": "x"})
    assert found.controller == "mpi"
    assert not found.store_on_rank_0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"SLURM_PROCID": "0"}, r"Rank 0 must run on the first node of the step.*SLURM_NODEID=1"),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, r"NODELIST must name the 3 nodes of the step\. Received: 'n\[1-2\]'"),
        ({"SLURM_STEP_NODELIST": ""}, "must name the 3 nodes"),
        ({"SLURM_STEP_NODELIST": "n[a-b]"}, r"numbers between brackets\. Received: \[a-b\]"),
    ],
)
def test_a_step_in_which_rank_0_cannot_be_found_is_refused(more, words):
    with pytest.raises(LaunchError, match=words):
        detect_environment(STEP | NODES | {"HVDTRAIN_JOB_SECRET": "x"} | more)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", "node7"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11,20],gpu", "n08 n09 n10 n11 n20 gpu"),
        ("r[1-2]n[01-02]-ib", "r1n01-ib r1n02-ib r2n01-ib r2n02-ib"),
        ("a1,b[2],c-3.site", "a1 b2 c-3.site"),
        ("", ""),
    ],
)
def test_lists_of_hosts_of_slurm(text, hosts):
    assert list(expand_hosts(text)) == hosts.split()


POD = {"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "4", "HOSTNAME": "train-2", "HVDTRAIN_JOB_SECRET": "x"}


def test_a_pod_of_an_indexed_job():
    found = detect_environment(POD)
    assert (found.launcher, found.controller, found.hostname, found.job_id) == (
        "kubernetes",
        "gloo",
        "train-2",
        "train",
    )
    assert ranks(found) == (2, 4, 0, 1, 2, 4)
    assert found.hosts == ("train-0", "train-1", "train-2", "train-3")
    assert found.store_on_rank_0


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("JOB_COMPLETIONS", r"Received: JOB_COMPLETION_INDEX=2, and no JOB_COMPLETIONS\. Set JOB_COMPLETIONS in the"),
        ("HVDTRAIN_JOB_SECRET", r"The 4 pods of an Indexed Job need a secret.*indexed-job-gloo\.yaml"),
    ],
)
def test_a_pod_that_could_not_find_the_others_is_refused(missing, words):
    with pytest.raises(LaunchError, match=words):
        detect_environment({name: value for name, value in POD.items() if name != missing})


def test_ranks_that_have_met_know_who_started_them():
    found = detect_environment(GLOO | {"HVDTRAIN_STARTED_BY": "srun"})
    assert (found.launcher, found.controller) == ("srun", "gloo")
    assert found.store_on_rank_0
    assert not detect_environment(GLOO).store_on_rank_0


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


# --- launchers, as they were recorded or are described ---

ON_ONE_HOST, ON_TWO = (1, 2, 1, 2, 0, 1), (5, 8, 1, 4, UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "job"),
    [
        (started_by.OPEN_MPI_4, "mpirun", ON_ONE_HOST, "1203830785"),
        (started_by.OPEN_MPI_5, "mpirun", ON_ONE_HOST, "prterun-node1-4920@1"),
        (started_by.MPICH_5, "mpiexec", ON_ONE_HOST, "mpiexec"),
        (started_by.INTEL_MPI_2021, "mpiexec", ON_ONE_HOST, "mpiexec"),
        (started_by.CRAY_PALS, "mpiexec", ON_TWO, "0f9e4a3e-7d1c-4b8a-9a0e-6f2f7c1f0c55"),
        (started_by.MVAPICH2, "mpirun_rsh", ON_TWO, "23811"),
        (started_by.MVAPICH2_HYDRA, "mpiexec", ON_TWO, "mpirun_rsh"),
        (started_by.JSRUN, "jsrun", ON_TWO, "3"),
        (started_by.PBS_MPIEXEC, "mpirun", ON_TWO, "2053963777"),
        (started_by.CRAY_SLURM, "srun", (3, 5, 1, 2, 1, 2), "77.3"),
    ],
)
def test_each_launcher_is_known_by_its_variables(environ, launcher, place, job):
    found = detect_environment(environ)
    assert (found.launcher, found.controller, ranks(found), found.job_id) == (launcher, "mpi", place, job)


def test_pals_without_the_number_of_ranks_is_refused():
    bare = {name: value for name, value in started_by.CRAY_PALS.items() if not name.startswith("PMI_")}
    with pytest.raises(LaunchError, match="did not set PMI_SIZE"):
        detect_environment(bare)


@pytest.mark.parametrize(
    ("environ", "rank", "words"),
    [
        (started_by.TORCHRUN, 5, "torchrun.*RANK=5, WORLD_SIZE=8.*horovodrun -np 8"),
        (started_by.PYTORCH_JOB, 5, "each process would train a model of its own.*horovodrun -np 8"),
        (started_by.PRTERUN, 1, "prterun.*PMIX_RANK=1.*mpirun or mpiexec of the same MPI"),
        (started_by.FLUX, 5, "flux run.*FLUX_TASK_RANK=5"),
        (STEP, 3, "srun started 5 tasks without MPI"),
    ],
)
def test_processes_that_could_not_find_one_another_are_refused(environ, rank, words):
    with pytest.raises(LoneRanksError, match=words) as raised:
        detect_environment(environ)
    assert raised.value.rank == rank


@pytest.mark.parametrize(
    ("environ", "launcher", "controller"),
    [
        (STEP | GLOO, "horovodrun", "gloo"),  # by hand, under srun
        (STEP | OPEN_MPI, "mpirun", "mpi"),
        (POD | OPEN_MPI, "mpirun", "mpi"),
        (started_by.OPEN_MPI_5 | started_by.TORCHRUN, "mpirun", "mpi"),
        (started_by.TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "none", "none"),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "none", "none"),  # which no launcher sets alone
        ({"MASTER_ADDR": "h1", "WORLD_SIZE": "8"}, "none", "none"),
        ({"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "1"}, "none", "none"),
    ],
)
def test_of_several_launchers_the_innermost_counts(environ, launcher, controller):
    found = detect_environment(environ)
    assert (found.launcher, found.controller) == (launcher, controller)
    assert launcher != "none" or found.size == 1


@pytest.mark.parametrize(
    ("rank", "size", "counts"),
    [(0, 1, "started 2 ranks, and Horovod counts 1:"), (0, 2, "as rank 1, and Horovod counts it as rank 0:")],
)
def test_ranks_that_horovod_counts_otherwise_are_refused(rank, size, counts):
    of_mpirun = detect_environment(started_by.OPEN_MPI_4)
    refuse_lone_ranks(of_mpirun, 1, 2)
    with pytest.raises(LoneRanksError, match=f"mpirun .*{counts}.*doctor"):
        refuse_lone_ranks(of_mpirun, rank, size)


@pytest.mark.parametrize(("local_rank", "shown"), [(0, 1), (1, 0)])
def test_of_ranks_that_all_meet_an_error_the_first_of_each_host_shows_it(local_rank, shown, monkeypatch, capsys):
    """Rank 4 or 5 of 8, on a second host whose MPI is another one: the first host may know nothing of it."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    place = {
        "PMI_RANK": str(4 + local_rank),
        "PMI_SIZE": "8",
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": "4",
    }
    found = detect_environment(place)
    error = LoneRanksError("mpiexec belongs to MPICH.", rank=found.local_rank)
    assert show_alone(found, error) == 2
    text = capsys.readouterr().err
    assert text.count("hvdtrain: error: mpiexec belongs to MPICH. [rank 4 (") == shown
    assert bool(text) == bool(shown)
