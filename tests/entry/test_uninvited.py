"""A job of `horovodrun --gloo` with a client at its store that nobody has invited, from its start to its end."""

import http.client
import threading
import time

import psutil
import pytest

from tests.launching import Job, has_launcher, launched

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("uninvited")]

KEY = "key-of-another-service"
SCOPES = ("global", "local_localhost", "cross_0", "hvdtrain-lobby", "worker_addresses")
KEYS = ("0", "1", "part-0-0", "part-0-1", "answer-0", "localhost:0")


class Spy:
    """Watches the processes of a job, and asks its store for what it should not get, some 100 times a second."""

    def __init__(self, pid: int) -> None:
        self.statuses: set[int] = set()
        self.asked = 0
        self.listening: set[str] = set()
        self.command_lines = ""
        self.environments: dict[int, dict[str, str]] = {}
        self._job = psutil.Process(pid)
        self._port = 0

    def watch(self) -> None:
        """Look at the job until it has ended."""
        attacker = threading.Thread(target=self._attack, daemon=True)
        while self._job.is_running() and self._job.status() != psutil.STATUS_ZOMBIE:
            for process in [self._job, *self._job.children(recursive=True)]:
                try:
                    self._look(process)
                except psutil.Error:
                    continue
            if self._port and attacker.ident is None:
                attacker.start()
            time.sleep(0.1)
        attacker.join(timeout=10)

    def _look(self, process: psutil.Process) -> None:
        self.command_lines += " ".join(process.cmdline()) + "\n"
        sockets = [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        self.listening |= {address.ip for address in sockets}
        if process == self._job and sockets:
            self._port = sockets[0].port
        environment = process.environ()
        if "HOROVOD_RANK" in environment:
            self.environments[int(environment["HOROVOD_RANK"])] = environment

    def _attack(self) -> None:
        while True:
            for path in (f"/{scope}/{key}" for scope in SCOPES for key in KEYS):
                for method, body in (("GET", None), ("PUT", b"127.0.0.1:1"), ("DELETE", None), ("PUT", b"x" * 5000)):
                    try:
                        self._ask(method, path, body)
                    except ConnectionRefusedError:
                        return
                    except (OSError, http.client.HTTPException):  # dropped before all of it was sent
                        continue

    def _ask(self, method: str, path: str, body: bytes | None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        connection.request(method, path, body=body)
        self.statuses.add(connection.getresponse().status)
        connection.close()
        self.asked += 1
        time.sleep(0.005)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A finished job, its folder, and what the spy has seen of it."""
    folder = tmp_path_factory.mktemp("job")
    if not has_launcher("horovodrun"):
        pytest.skip("horovodrun is not installed")
    words = ["-m", "hvdtrain", "digits", "--epochs", "1", "--run-dir", "run"]
    environ = {"WANDB_API_KEY": KEY, "HVDTRAIN_JOB_SECRET": "", "XDG_CONFIG_HOME": str(folder / "config")}
    with Job(launched("gloo", 2, *words), cwd=folder, **environ) as job:
        spy = Spy(job.process.pid)
        watching = threading.Thread(target=spy.watch, daemon=True)
        watching.start()
        job.wait(seconds=150)
        watching.join(timeout=15)
    return job.code, job.text, folder, spy


def test_it_trains_as_if_nobody_were_there(job):
    code, text, folder, _ = job
    assert code == 0, text
    assert (folder / "run" / "summary.json").is_file()


def test_nobody_without_the_token_reads_or_writes(job):
    *_, spy = job
    assert spy.asked > 100
    assert spy.statuses == {http.client.FORBIDDEN}


def test_a_job_on_one_machine_listens_there_alone(job):
    *_, spy = job
    assert spy.listening == {"127.0.0.1"}


def test_ranks_have_what_is_secret_and_command_lines_and_files_have_not(job):
    _, text, folder, spy = job
    assert spy.environments.keys() == {0, 1}
    environment = spy.environments[0]
    address = environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    secrets = [KEY, environment["HOROVOD_JOB_SECRET"], address.partition("/")[2]]
    assert environment["WANDB_API_KEY"] == KEY
    assert len(secrets[1]) == 64
    assert len(secrets[2]) == 32
    assert spy.environments[1]["HOROVOD_JOB_SECRET"] == secrets[1]
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"config.yaml", "env.json", "metrics.jsonl"} <= {file.name for file in files}
    for secret in secrets:
        assert secret not in spy.command_lines
        assert secret not in text
        assert [file for file in files if secret.encode() in file.read_bytes()] == []
