"""Worlds of the ranks that are left, over MPI: how they learn of losses, and agree on who is left."""

import contextlib
import json
import subprocess
import sys
import threading
from collections import deque

import psutil
import pytest

from hvdtrain.config.errors import LaunchError, MissingRankError
from hvdtrain.runtime import survivors
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.survivors import SILENCE_S, Survivors
from tests.unit.launcher_environments import OPEN_MPI_4
from tests.unit.threaded_ranks import on_threads


class Lobby:
    """One rank's messages to others on threads."""

    def __init__(self, rank, boxes):
        self._rank = rank
        self._boxes = boxes

    def publish(self, tag, message, ranks):
        for rank in ranks:
            self._boxes[rank].append((self._rank, message))

    def arrived(self, tag):
        while self._boxes[self._rank]:
            yield self._boxes[self._rank].popleft()


class Board(ControlChannel):
    """Rank 0 of two, the other of which may have posted something."""

    def __init__(self, **posted):
        super().__init__(0, 2)
        self.others = {key: {1: json.dumps(value).encode()} for key, value in posted.items()}

    def read(self, key):
        return {**super().read(key), **self.others.get(key, {})}


def worlds_of(rank, hosts, *, lobby=None, control=None, environ=None):
    """A rank of a job whose ranks are on `hosts`, in its first world."""
    worlds = Survivors({} if environ is None else environ)
    worlds.entered, worlds.training = 1, True
    worlds._me, worlds._members, worlds._hosts, worlds._places = rank, list(range(len(hosts))), hosts, hosts
    worlds._lobby, worlds._control = lobby, control or ControlChannel()
    return worlds


@contextlib.contextmanager
def process():
    """Yield a process that lives until its standard input ends."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        yield child
        child.kill()


def test_mpirun_that_leaves_others_alone_is_an_elastic_launcher():
    assert not detect_environment(OPEN_MPI_4).elastic
    assert detect_environment({**OPEN_MPI_4, "OMPI_MCA_orte_enable_recovery": "1"}).elastic


def test_a_rank_whose_process_has_ended_is_lost_once_horovod_is_stopped():
    board = Board()
    worlds = worlds_of(0, ["here", "here"], control=board)
    with process() as child:
        worlds._processes = {1: psutil.Process(child.pid)}
        worlds.look(0.0)
        assert not worlds.lost
        child.kill()
        child.poll()  # it is a zombie, or gone
        psutil.wait_procs([psutil.Process(child.pid)] if psutil.pid_exists(child.pid) else [], timeout=10)
    worlds.look(1.0)
    assert worlds.lost == {1}
    assert json.loads(board.read("lost")[0]) == [1]
    worlds.check()  # Horovod's engine runs, and waits for the lost rank: there is nothing to go on with
    assert not worlds.can_leave
    worlds._engine_runs = False
    with pytest.raises(MissingRankError, match=r"rank 1 \(here\) is lost: the process has ended"):
        worlds.check()
    worlds.training = False
    worlds.check()


def test_what_other_hosts_tell_is_known_here():
    worlds = worlds_of(0, ["here", "there", "there"], control=Board(lost=[2]))
    worlds.look(0.0)
    assert worlds.lost == {2}


def test_a_rank_alone_on_its_host_is_lost_when_it_falls_silent():
    board = Board(alive=1)
    worlds = worlds_of(0, ["here", "there"], control=board)
    for now in (0.0, 5.0, 60.0):
        worlds.look(now)
        assert not worlds.lost, "this process stood still, and knows nothing"
    assert board.read("alive")[0] == b"3"
    board.others["alive"] = {1: b"2"}
    worlds._engine_runs = False
    for now in range(61, 125, 4):
        worlds.look(float(now))
        assert worlds.lost == ({1} if now > 61 + SILENCE_S else set())


def test_a_rank_that_others_went_on_without_ends_alone(monkeypatch, caplog):
    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(survivors, "end_process", end)
    worlds = worlds_of(0, ["here", "there"], control=Board(lost=[0]))
    worlds._end = pytest.fail
    with pytest.raises(SystemExit, match="1"):
        worlds.look(0.0)
    assert "rank 0 gave no sign of life for 60 s, and the others went on without it" in caplog.text


@pytest.mark.parametrize(
    ("training", "why"),
    [(True, "while all ranks waited for one another"), (False, "and the job needs all of its ranks")],
)
def test_a_job_that_cannot_go_on_ends_after_a_grace(training, why):
    ended = []
    worlds = worlds_of(0, ["here", "there"], control=Board(lost=[1]))
    worlds.training, worlds._end = training, ended.append
    for now in (10.0, 11.0, 12.0):
        worlds.look(now)
        assert not ended, "another rank may be about to leave this world"
    worlds.look(12.5)
    assert ended == [f"rank 1 (there) is lost, {why}. Started again, a run goes on with --resume auto."]


def test_ranks_that_are_done_may_end():
    worlds = worlds_of(0, ["here", "there"], control=Board(lost=[1]))
    worlds.over, worlds._end = True, lambda text: pytest.fail(text)
    for now in (0.0, 10.0):
        worlds.look(now)


def test_those_that_are_left_agree_though_each_knows_of_another_loss():
    """Ranks 1 and 4 of five are lost; each is seen on its own host."""
    boxes = [deque() for _ in range(5)]
    hosts = ["a", "a", "b", "b", "b"]
    both = threading.Barrier(3, timeout=10)

    def agree(place):
        rank = (0, 2, 3)[place]
        worlds = worlds_of(rank, hosts, lobby=Lobby(rank, boxes))
        worlds.lost = {0: {1}, 2: {4}, 3: set()}[rank]
        both.wait()
        return worlds._agreed(10.0), worlds.lost

    assert on_threads(3, agree) == [([0, 2, 3], {1, 4})] * 3


def test_a_rank_that_is_left_and_says_nothing_is_named():
    worlds = worlds_of(0, ["a", "a", "b"], lobby=Lobby(0, [deque() for _ in range(3)]))
    worlds.lost = {1}
    with pytest.raises(LaunchError, match=r"No message from rank 2 within 0\.1 s, after a rank was lost"):
        worlds._agreed(0.1)


def test_the_place_in_a_world_is_where_launchers_write_it():
    environ = {**OPEN_MPI_4}
    worlds = worlds_of(3, ["a", "a", "b", "b"], environ=environ)
    worlds._members = [1, 2, 3]
    worlds._write_place()
    found = detect_environment(environ)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 3, 1, 2)


def test_other_jobs_part_and_meet_without_horovod():
    worlds = Survivors()
    worlds.part()
    worlds.gather_again()
    worlds.check()
    assert worlds.communicator is None
