"""Ranks that meet at a store on rank 0: how they find it, who else may, and what they are told if they cannot."""

import http.client
import os
import secrets
import socket
import threading
import time

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import open_control
from hvdtrain.runtime.rendezvous import (
    PORTS,
    StoreProcess,
    address_towards,
    find_store,
    interface_of,
    meet,
    read_settings,
    resolve,
)
from hvdtrain.runtime.store_server import answer, path_of, start
from tests.unit.threaded_ranks import ask, on_threads

SECRET = secrets.token_hex(16)
"""Another one, and so other ports, in each of several runs on one machine."""
NONCE = "0123456789abcdef" * 2


def pod(rank, size=2, **more):
    """The variables of a pod of an Indexed Job, on this machine."""
    place = {"JOB_COMPLETION_INDEX": str(rank), "JOB_COMPLETIONS": str(size), "HOSTNAME": f"train-{rank}"}
    return place | {"HVDTRAIN_JOB_SECRET": SECRET, "HVDTRAIN_RENDEZVOUS_HOST": "127.0.0.1"} | more


def task(rank, **more):
    """The variables of a task of srun without MPI: three tasks on two nodes."""
    node = rank // 2
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[08-09]"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{8 + node:02}"}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}
    return step | place | {"HVDTRAIN_JOB_SECRET": SECRET} | more


def settings(environ=None, timeout=10.0):
    environ = environ or pod(0)
    return read_settings(detect_environment(environ), environ, timeout)


@pytest.fixture
def ended():
    """A list of meetings and stores that end with the test."""
    opened = []
    yield opened
    for each in opened:
        (each.served_by or each).end() if hasattr(each, "served_by") else each.end()


def join(environ, ended, timeout=10.0):
    meeting = meet(environ, timeout)
    if meeting.served_by is not None:
        ended.append(meeting.served_by)
    return meeting


# -- what the environment says --


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HVDTRAIN_JOB_SECRET": "short"}, r"at least 16 characters\. Received: 5\..*export HVDTRAIN_JOB_SECRET="),
        ({"HVDTRAIN_RENDEZVOUS_PORT": "80"}, r"a port from 1024 to 65535, or FIRST-LAST\. Received: '80'"),
        ({"HVDTRAIN_RENDEZVOUS_PORT": "3000-2000"}, "FIRST-LAST"),
        ({"HVDTRAIN_RENDEZVOUS_PORT": "http"}, "'http'"),
        ({"HVDTRAIN_RENDEZVOUS_TIMEOUT": "0"}, r"positive number of seconds\. Received: '0'"),
        ({"HVDTRAIN_RENDEZVOUS_TIMEOUT": "soon"}, "'soon'"),
    ],
)
def test_malformed_settings_are_refused_with_their_value(variables, words):
    with pytest.raises(LaunchError, match=words):
        settings(pod(0, **variables))


def test_ports_are_in_range_the_same_on_every_rank_and_unlike_those_of_other_jobs():
    ports = settings(pod(0)).ports
    assert len(ports) == 4
    assert all(PORTS[0] <= port <= PORTS[1] for port in ports)
    assert settings(pod(1)).ports == ports
    others = (
        pod(0, HVDTRAIN_JOB_SECRET=SECRET + "x"),
        pod(0, HOSTNAME="other-0"),
        task(0),
        task(0, SLURM_STEP_ID="4"),
        task(0, SLURM_RESTART_COUNT="1"),
    )
    seen = {settings(other).ports for other in others}
    assert len(seen) == 5
    assert ports not in seen


@pytest.mark.parametrize(("given", "expected"), [("5000", {5000}), ("5000-5001", {5000, 5001})])
def test_ports_can_be_given(given, expected):
    assert set(settings(pod(0, HVDTRAIN_RENDEZVOUS_PORT=given)).ports) == expected


def test_the_time_can_be_given():
    assert settings(pod(0, HVDTRAIN_RENDEZVOUS_TIMEOUT="900")).timeout == 900
    assert settings(pod(0), timeout=7).timeout == 7


def test_the_secret_can_be_in_a_file_that_nobody_else_reads(tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    environ = pod(0, HVDTRAIN_JOB_SECRET="", HVDTRAIN_JOB_SECRET_FILE=str(file))
    file.chmod(0o644)
    with pytest.raises(LaunchError, match="mode 0644"):
        settings(environ)
    file.chmod(0o600)
    assert settings(environ).secret == SECRET.encode()
    file.write_text("\n")
    with pytest.raises(LaunchError, match=r"Received: .*, empty"):
        settings(environ)
    file.unlink()
    with pytest.raises(LaunchError, match=r"cannot be read \(No such file"):
        settings(environ)


# -- the network --


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.1.1") == "lo", "Debian's address of a host's own name"
    assert interface_of("192.0.2.1") is None
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert resolve("localhost") == "127.0.0.1"


def test_a_name_is_searched_in_the_domain_of_this_machine(monkeypatch):
    """A pod's name resolves with the name of its service behind it."""
    known = {"train-0.service.space": "10.1.1.1"}

    def lookup(name, *args):
        if name not in known:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-3.service.space")
    assert resolve("train-0") == "10.1.1.1"
    with pytest.raises(OSError, match="unknown"):
        resolve("train-9")


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(ended):
    with pytest.raises(LaunchError, match=r"HOROVOD_GLOO_IFACE must be .* Received: 'eth77'.* lo \(127\.0\.0\.1\)"):
        join(pod(0, HOROVOD_GLOO_IFACE="eth77"), ended)


# -- the meeting --


def test_ranks_meet_and_talk(ended):
    environs = [pod(rank, 3) for rank in range(3)]

    def body(rank):
        time.sleep(0.2 * (2 - rank))  # rank 0 comes last
        environ = environs[rank]
        meeting = join(environ, ended)
        channel = open_control(detect_environment(environ), timeout=10, environ=environ)
        meeting.complete()
        return channel.exchange(b"of %d" % rank, timeout=10)

    assert on_threads(3, body) == [[b"of 0", b"of 1", b"of 2"]] * 3
    for rank, environ in enumerate(environs):
        found = detect_environment(environ)
        assert (found.launcher, found.controller, found.rank, found.size) == ("kubernetes", "gloo", rank, 3)
        assert (found.local_size, found.cross_rank, found.hostname) == (1, rank, f"train-{rank}")
        assert found.store_on_rank_0
        assert environ["HOROVOD_GLOO_IFACE"] == "lo"
        assert environ["HOROVOD_CONTROLLER"] == environ["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert meet(environ, 1.0) is None, "they have met"
        assert SECRET not in environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]


def test_rank_0_leaves_last(ended):
    def body(rank):
        meeting = join(pod(rank), ended)
        if rank == 1:
            time.sleep(1.0)
        begin = time.monotonic()
        meeting.leave()
        return time.monotonic() - begin

    first, second = on_threads(2, body)
    assert first > 0.5
    assert second < 0.5


def test_there_is_no_meeting_where_it_is_not_needed():
    assert meet({}, 1.0) is None
    assert meet({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                 "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1.0) is None  # fmt: skip
    assert meet(pod(0, 1), 1.0) is None


def test_tasks_of_one_node_meet_at_the_loopback_interface(ended):
    one = {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_STEP_NODELIST": "nowhere7", "SLURM_NODEID": "0"}
    environs = [task(rank, **one, SLURMD_NODENAME="nowhere7") | {"SLURM_LOCALID": str(rank)} for rank in range(3)]
    on_threads(3, lambda rank: join(environs[rank], ended))
    assert [environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0] for environ in environs] == ["127.0.0.1"] * 3
    assert [environ["HOROVOD_HOSTNAME"] for environ in environs] == ["nowhere7"] * 3
    assert detect_environment(environs[1]).launcher == "srun"


@pytest.mark.extended
def test_a_port_that_is_taken_is_passed_over(ended):
    """By a job with another secret, and by a program that says nothing."""
    ports = settings().ports
    foreign = start("127.0.0.1", [ports[0]], "token", b"another key")
    with socket.create_server(("127.0.0.1", ports[1])):
        environs = [pod(rank) for rank in range(2)]
        on_threads(2, lambda rank: join(environs[rank], ended))
    assert [int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]) for environ in environs] == [ports[2]] * 2
    foreign.shutdown()
    foreign.server_close()


def test_rank_0_says_where_it_cannot_listen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(
            LaunchError, match=rf"on 127\.0\.0\.1, port {port}: Address already in use.*RENDEZVOUS_PORT"
        ):
            meet(pod(0, HVDTRAIN_RENDEZVOUS_PORT=port), 5.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, r"Rank 0 was not found on 127\.0\.0\.1 within 0\.5 s, at port .*Connection refused"),
        ({"HVDTRAIN_RENDEZVOUS_HOST": "nowhere.invalid"}, "the name nowhere.invalid has no IPv4 address"),
    ],
)
def test_who_does_not_find_rank_0_says_where_it_was_searched(more, words):
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=words):
        meet(pod(1, **more), 0.5)
    assert time.monotonic() - begin < 10


def test_ranks_with_another_secret_are_told_so(ended):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = {"HVDTRAIN_RENDEZVOUS_PORT": str(free.getsockname()[1])}
    join(pod(0, **port), ended)
    with pytest.raises(LaunchError, match="another program answers, or a job with another secret"):
        meet(pod(1, **port, HVDTRAIN_JOB_SECRET=SECRET[::-1]), 0.5)


def test_one_rank_more_is_refused_once_all_have_come(ended):
    """A pod that was started again while the others of its job still end."""
    join(pod(0), ended).complete()
    with pytest.raises(LaunchError, match="all ranks have come already, and this is one more, or of a later start"):
        meet(pod(1), 0.5)


def test_a_rank_that_never_comes_is_named(ended):
    environ = pod(0, 3)
    join(environ, ended)
    with pytest.raises(LaunchError, match=r"No message from ranks 1-2 of 3 within 0\.5 s"):
        open_control(detect_environment(environ), timeout=0.5, environ=environ)


# -- who else is at the port --


@pytest.fixture
def served():
    """The port of a store as it serves, with the token `token` and the key `key`."""
    server = start("127.0.0.1", [0], "token", b"key")
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "POST"])
def test_a_client_without_the_token_gets_nothing(served, method):
    for path in (
        "/rendezvous/state",
        "/left/1",
        "/global/0",
        "/",
        "/hello/short",
        "/x/hello/" + NONCE,
        f"/hello/{NONCE}/x",
        "/setup.cfg",
    ):
        assert ask(served, method, path, b"forged" if method == "PUT" else None) == (http.client.FORBIDDEN, b"")


def test_all_that_anybody_gets_is_a_signature(served):
    status, body = ask(served, "GET", path_of(NONCE))
    assert status == http.client.OK
    assert body == answer(b"key", served, NONCE)
    assert ask(served, "PUT", path_of(NONCE), b"x")[0] == http.client.FORBIDDEN


def test_a_signature_is_of_one_number_one_port_and_one_job():
    signed = answer(b"key", 5000, NONCE)
    assert signed != answer(b"key", 5001, NONCE), "it was fetched from another port"
    assert signed != answer(b"other", 5000, NONCE)
    assert signed != answer(b"key", 5000, NONCE[::-1])


def test_a_false_store_never_sees_the_token():
    """It answers each call, with what it likes."""
    wanted, heard = settings(), []

    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            heard.append(connection.recv(10_000))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n" + b"0" * 64)
            connection.close()

    with socket.create_server(("127.0.0.1", wanted.ports[0])) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(LaunchError, match="another program answers"):
            find_store("127.0.0.1", settings(timeout=0.5))
        listener.shutdown(socket.SHUT_RDWR)
    assert heard
    assert not [request for request in heard if wanted.token.encode() in request]


# -- the process that serves --


def test_the_store_ends_with_rank_0_and_outlives_its_signals():
    store = StoreProcess("127.0.0.1", settings())
    process = store._process
    for number in (1, 2, 10, 15):
        os.kill(process.pid, number)
    time.sleep(0.2)
    assert ask(store.port, "GET", path_of(NONCE))[0] == http.client.OK
    process.stdin.close()
    assert process.wait(10) == 0
    store.end()


def test_the_store_shows_no_secret_on_its_command_line(ended):
    wanted = settings()
    store = StoreProcess("127.0.0.1", wanted)
    ended.append(store)
    with open(f"/proc/{store._process.pid}/cmdline", "rb") as file:
        words = file.read()
    assert b"store_server" in words
    for secret in (SECRET, wanted.token, wanted.key.hex()):
        assert secret.encode() not in words
