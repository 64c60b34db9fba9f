"""The command that `launch` chooses, with stubs of the programs that a place has."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.cli.launch import Host, Machine, count_gpus, find_mpi, launch_command, parse, parse_hosts, read_hostfile
from hvdtrain.cli.main import main
from hvdtrain.config.errors import ConfigError, UserError, on_command_line
from tests.unit import launcher_environments

OPEN_MPI_4 = "mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/"
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n    Release Date: ..."
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260626 (id: b44796a)\nCopyright"
PLUGINS = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugin versions available: pmix_v4"
WITHOUT_PMIX = "MPI plugin types are...\n\tnone\n\tpmi2"
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "8"}
LSF = {"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42"}


class Place:
    """A machine that has the programs it is given, and this Python."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {"PATH": str(folder)}
        self.python = folder / "python"
        self.has("python", "")

    def has(self, program, output):
        """Put a program on PATH that prints `output`, whatever it is asked."""
        path = self.folder / program
        path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(output)}\n")
        path.chmod(0o755)

    def machine(self, environ=None, **facts):
        return Machine(self.environ | (environ or {}), str(self.python), **({"cores": 8} | facts))

    def words(self, line="", environ=None, *, arguments="digits", **facts):
        """The command as a line, with this Python written `PYTHON`."""
        command = launch_command(parse(shlex.split(f"{line} {arguments}")), self.machine(environ, **facts))
        return str(command).replace(str(self.python), "PYTHON")


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    return Place(folder)


RUN = "python -m hvdtrain digits"
FAR = "PYTHON -m hvdtrain digits"
HOSTS = "--hosts h1:2,h2:1"
KEEPALIVE = "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3"


# --- machines of one's own ---


def test_on_one_machine_it_is_horovodrun(place):
    place.has("horovodrun", "")
    place.has("mpirun", OPEN_MPI_4)
    assert place.words() == f"horovodrun -np 2 {RUN}"
    assert place.words("-np 4") == f"horovodrun -np 4 {RUN}"
    assert place.words(gpus=4) == f"horovodrun -np 4 {RUN}"
    assert place.words("--gloo") == f"horovodrun --gloo -np 2 {RUN}"
    assert place.words(HOSTS) == f"horovodrun -np 3 -H h1:2,h2:1 {FAR}"
    assert place.words(f"{HOSTS} -np 2 --launcher-args=--verbose") == f"horovodrun -np 2 -H h1:2 --verbose {FAR}"


@pytest.mark.parametrize(
    ("version", "here", "hosts", "more_than_cores"),
    [
        (
            OPEN_MPI_4,
            f"mpirun -np 2 --bind-to none --map-by slot {RUN}",
            f"mpirun -np 3 --bind-to none --map-by slot -H h1:2,h2:1 -x HVDTRAIN_DATA -x PATH {KEEPALIVE} {FAR}",
            f"mpirun -np 9 --bind-to none --map-by slot --oversubscribe {RUN}",
        ),
        (
            OPEN_MPI_5,
            f"mpirun -np 2 --bind-to none --map-by slot {RUN}",
            f"mpirun -np 3 --bind-to none --map-by slot -H h1:2,h2:1 -x HVDTRAIN_DATA -x PATH {FAR}",
            f"mpirun -np 9 --bind-to none --map-by slot:OVERSUBSCRIBE {RUN}",
        ),
        (
            MPICH,
            f"mpirun -genvall -bind-to none -n 2 {RUN}",
            f"mpirun -genvall -bind-to none -hosts h1:2,h2:1 -n 3 {FAR}",
            f"mpirun -genvall -bind-to none -n 9 {RUN}",
        ),
        (
            INTEL,
            f"mpirun -genvall -genv I_MPI_PIN=0 -n 2 {RUN}",
            f"mpirun -genvall -genv I_MPI_PIN=0 -host h1 -n 2 {FAR} : -host h2 -n 1 {FAR}",
            f"mpirun -genvall -genv I_MPI_PIN=0 -n 9 {RUN}",
        ),
    ],
)
def test_each_mpi_gets_its_own_flags(place, version, here, hosts, more_than_cores):
    place.has("mpirun", version)
    data = {"HVDTRAIN_DATA": "/data"}
    assert place.words("--mpi") == here
    assert place.words(f"--mpi {HOSTS}", data) == hosts
    assert place.words("--mpi -np 9") == more_than_cores


def test_root_is_told_to_open_mpi_unless_the_environment_says_so(place):
    place.has("mpirun", OPEN_MPI_4)
    told = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert place.words("--mpi", root=True).startswith("mpirun --allow-run-as-root -np 2")
    assert "as-root" not in place.words("--mpi", told, root=True)
    place.has("mpirun", MPICH)
    assert "as-root" not in place.words("--mpi", root=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{HOSTS} -np 4", "-np must not be more than the 3 slots of the hosts. Received: 4"),
        ("--mpi", "mpirun is not on PATH.*hvdtrain setup"),
        ("", "horovodrun is not on PATH.*hvdtrain setup"),
    ],
)
def test_mistakes_are_named(place, line, message):
    with pytest.raises(UserError) as raised:
        place.words(line)
    assert re.search(message, on_command_line(raised.value.message)), on_command_line(raised.value.message)


# --- schedulers ---


def test_slurm_with_pmix(place):
    place.has("srun", PLUGINS)
    place.has("mpirun", OPEN_MPI_4)
    assert place.words("", SLURM) == f"srun --mpi=pmix --kill-on-bad-exit=0 --wait=600 --cpu-bind=none {RUN}"
    assert place.words("-np 4", SLURM) == f"srun --mpi=pmix --kill-on-bad-exit=0 --wait=600 --cpu-bind=none -n 4 {RUN}"
    assert " --cpus-per-task=4 " in place.words("", SLURM | {"SLURM_CPUS_PER_TASK": "4"})
    shell = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}  # srun --pty bash
    assert " --overlap " in place.words("", SLURM | shell)
    assert " --overcommit " in place.words("-np 40 --oversubscribe", SLURM)


def test_slurm_without_its_commands(place):
    place.has("mpirun", OPEN_MPI_4)
    with pytest.raises(UserError, match=r"srun is not on PATH.* comes with the scheduler.*: load its module"):
        place.words("", SLURM)


@pytest.mark.parametrize(("plugins", "version"), [(WITHOUT_PMIX, OPEN_MPI_4), (PLUGINS, MPICH), (PLUGINS, INTEL)])
def test_slurm_whose_srun_has_nothing_for_this_mpi(place, plugins, version):
    place.has("srun", plugins)
    place.has("mpirun", version)
    words = place.words("", SLURM)
    assert words.startswith("mpirun ")
    assert words.endswith(f" 8 {RUN}") or words.startswith("mpirun -np 8 ")


def test_slurm_without_mpi(place):
    place.has("srun", PLUGINS)
    secret = "HVDTRAIN_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n') "
    gloo = f"srun --mpi=none --kill-on-bad-exit=0 --wait=600 --cpu-bind=none {RUN}"
    assert place.words("", SLURM) == secret + gloo
    place.has("mpirun", OPEN_MPI_4)
    assert place.words("--gloo", SLURM) == secret + gloo
    assert place.words("--gloo", SLURM | {"HVDTRAIN_JOB_SECRET": "x"}) == gloo


def test_the_shown_secret_is_drawn_by_the_shell(place):
    place.has("srun", PLUGINS)
    line = place.words("", SLURM).split(" srun")[0]
    drawn = subprocess.run(["bash", "-c", f"{line}; echo $HVDTRAIN_JOB_SECRET"], capture_output=True, text=True)
    assert len(bytes.fromhex(drawn.stdout.strip())) == 32


@pytest.fixture
def nodefile(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("h1\nh1\nh2\nh2\n")
    return {"PBS_JOBID": "4711.server", "PBS_NODEFILE": str(path)}


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (OPEN_MPI_5, f"mpiexec -np 4 --bind-to none --map-by slot -H h1:2,h2:2 -x PATH {FAR}"),
        (MPICH, f"mpiexec -genvall -bind-to none -hosts h1:2,h2:2 -n 4 {FAR}"),
        (INTEL, f"mpiexec -genvall -genv I_MPI_PIN=0 -hosts h1,h2 -ppn 2 -n 4 {FAR}"),
        ("PALS 1.3.4", f"mpiexec --cpu-bind none --ppn 2 -n 4 {FAR}"),
    ],
)
def test_pbs(place, nodefile, version, words):
    place.has("mpiexec", version)
    assert place.words("", nodefile) == words


def test_pbs_without_mpi(place, nodefile):
    place.has("horovodrun", "")
    assert place.words("-np 3", nodefile) == f"horovodrun --gloo -np 3 -H h1:2,h2:1 {FAR}"
    with pytest.raises(Exception, match="mpirun or mpiexec on PATH inside the PBS job 4711"):
        place.words("--mpi", nodefile)


def test_lsf(place):
    place.has("jsrun", "")
    sets = "jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs {} --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none"
    assert place.words("-np 12", LSF) == f"{sets.format(6)} {RUN}"
    assert place.words("", LSF) == f"{sets.format(1)} {RUN}"
    with pytest.raises(ConfigError, match=r"same number of ranks on each host\. Received: -np 3 on 2 hosts"):
        place.words("-np 3", LSF)


@pytest.mark.parametrize("site", [SLURM, LSF])
def test_hosts_are_not_named_inside_a_scheduler(place, site):
    with pytest.raises(ConfigError, match="--hosts and --hostfile are for hosts that no scheduler hands out"):
        place.words(HOSTS, site)


def test_a_pod_names_the_manifests(place):
    place.has("horovodrun", "")
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    with pytest.raises(Exception, match=r"launch/kubernetes/mpijob\.yaml.*launch/kubernetes/indexed-job-gloo\.yaml"):
        place.words("", pod)
    assert place.words("-np 2", pod) == f"horovodrun -np 2 {RUN}"


# --- hosts, programs, GPUs ---


@pytest.mark.parametrize(
    "text", ["h1 slots=2\n\nh2 slots=1 # a comment\n", "h1:2\nh2:1\n", "h1\nh2\nh1\n", "h1 : 2\nh2"]
)
def test_files_of_hosts_of_every_kind(tmp_path, text):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert set(read_hostfile(str(path))) == {Host("h1", 2), Host("h2", 1)}


@pytest.mark.parametrize("text", ["", "h1:0", "h1:x", "h1 2", "h1:2 h2:2", ":2"])
def test_hosts_written_otherwise_are_refused(text):
    with pytest.raises(ConfigError, match="Hosts are written NAME:RANKS"):
        parse_hosts(text.split(","))


def test_a_file_of_hosts_without_any_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(str(tmp_path / "missing"))


def test_versions_of_other_mpis(place):
    place.has("mpirun", "my own mpirun 1.0")
    assert find_mpi(place.machine()) is None
    place.has("mpirun", "mpirun (IBM Spectrum MPI) 10.4.0.3rtm4")
    assert str(find_mpi(place.machine())) == "Open MPI 4"


@pytest.mark.parametrize(
    ("there", "visible", "number"), [(0, None, 0), (4, None, 4), (4, "1", 1), (4, "", 0), (4, "0,2", 2), (4, "-1", 0)]
)
def test_gpus_are_counted_without_a_library(tmp_path, there, visible, number):
    for gpu in range(there):
        (tmp_path / "gpus" / f"0000:0{gpu}:00.0").mkdir(parents=True)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, tmp_path / "gpus") == number


# --- the verb ---


@pytest.fixture
def here(place, monkeypatch):
    """This process on that machine, started by nobody."""
    place.has("horovodrun", "")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(place.folder))
    monkeypatch.setattr(sys, "executable", str(place.python))
    return place


def test_only_the_command_goes_to_standard_output(here, capsys):
    assert main(["launch", "-np", "4", "digits", "--epochs", "3", "--run-dir", "a b"]) == 0
    out, err = capsys.readouterr()
    assert out == "horovodrun -np 4 python -m hvdtrain digits --epochs 3 --run-dir 'a b'\n"
    assert err == "hvdtrain: horovodrun\n"


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        ("--gloo --epochs 3", "--gloo -np 2 python -m hvdtrain --epochs 3"),
        ("-n 3 x.py", "-np 3 python x.py"),
        ("-np=3 -- --run-dir x", "-np 3 python -m hvdtrain --run-dir x"),
        ("--hosts=h1:2 digits -np 9", "-np 2 -H h1:2 PYTHON -m hvdtrain digits -np 9"),
        ("--launcher-args '--verbose --disable-cache' x.py", "-np 2 --verbose --disable-cache python x.py"),
    ],
)
def test_what_follows_the_options_is_the_trainings(here, capsys, words, rest):
    assert main(["launch", *shlex.split(words)]) == 0
    assert capsys.readouterr().out.replace(str(here.python), "PYTHON") == f"horovodrun {rest}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-np 0 digits", "argument -np/-n: must be a whole number of at least 1. Received: '0'"),
        ("--hosts h1 --hostfile {hosts} digits", "not allowed with argument"),
        ("--gloo --mpi digits", "not allowed with argument"),
        ("--hostfile missing digits", "The file of hosts cannot be read. Received: missing"),
        ("-np", "expected one argument"),
        ("-np 2 --glou train.py", "launch has no option '--glou'. Perhaps you meant: --gloo."),
    ],
)
def test_mistakes_in_its_options(here, capsys, words, message):
    (here.folder / "hosts").write_text("h1\n")
    assert main(["launch", *words.format(hosts=here.folder / "hosts").split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_under_a_launcher_it_is_refused(here, capsys, monkeypatch):
    for name, value in (
        launcher_environments.OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    ).items():
        monkeypatch.setenv(name, value)
    assert main(["launch", "digits"]) == 2
    assert "launch starts the launcher itself. Received: a start by mpirun." in capsys.readouterr().err


def test_it_becomes_the_command_with_run(here, tmp_path):
    here.has("horovodrun", "")
    (here.folder / "horovodrun").write_text('#!/bin/sh\nprintf "<%s>" "$@"\nexit 7\n')
    code = "import sys; sys.executable = sys.argv[1]; from hvdtrain.cli.main import main; sys.exit(main(sys.argv[2:]))"
    words = [sys._base_executable, "-c", code, str(here.python), "launch", "--run", "-np", "2", "a b.py"]
    environ = here.environ | {"PYTHONPATH": ":".join([str(Path(hvdtrain.__file__).parents[1]), *sys.path])}
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "<-np><2><python><a b.py>"), done.stderr
