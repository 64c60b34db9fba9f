"""Launchers' variables in processes that are no rank: children of ranks, and shells that outlive a job."""

import os
import socket

import pytest

from hvdtrain.config.errors import LoneRanksError
from hvdtrain.runtime.inherited import claim_rank, refuse_ended_launcher, without_launcher
from hvdtrain.runtime.launchers import detect_environment
from tests.unit import launcher_environments as started_by


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def server(request):
    """A socket that listens, in the place of a launcher's PMIx server."""
    with socket.create_server(
        ("127.0.0.1", 0) if request.param == socket.AF_INET else ("::1", 0), family=request.param
    ) as made:
        yield made


def rank_of(server):
    host, port, *_ = server.getsockname()
    uri = f"tcp6://[{host}]:{port}" if ":" in host else f"tcp4://{host}:{port}"
    return started_by.OPEN_MPI_4 | {
        "PMIX_SERVER_URI3": f"1807155200.0;{uri}",
        "PMIX_SERVER_URI21": f"1807155200.0;{uri}",
    }


def test_a_rank_is_refused_once_its_launcher_has_ended(server):
    environ = rank_of(server)
    assert detect_environment(environ).rank == 1
    server.close()
    with pytest.raises(LoneRanksError) as refused:
        detect_environment(environ)
    assert refused.value.rank == 0  # each process says so: no other is sure to
    assert "PMIX_RANK=1, PMIX_SERVER_URI3=1807155200.0;tcp" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_connection_of_another_program_to_that_port_is_no_launcher(server):
    environ = rank_of(server)
    with socket.create_connection(server.getsockname()[:2]):
        accepted, _ = server.accept()
        with accepted:
            server.close()
            with pytest.raises(LoneRanksError):
                refuse_ended_launcher(environ)


def test_where_the_system_does_not_show_who_listens_nothing_is_refused(server, tmp_path):
    environ = rank_of(server)
    server.close()
    refuse_ended_launcher(environ, proc=tmp_path)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        started_by.OPEN_MPI_4,
        started_by.MPICH_5,
        {"PMIX_SERVER_URI": "pmix-server.71:0:/tmp/openmpi-sessions/pmix-71"},
    ],
)
def test_launchers_that_name_no_port_are_not_looked_for(environ):
    refuse_ended_launcher(environ)


@pytest.fixture
def rank(tmp_path):
    """The variables of a rank whose launcher has a folder for its job."""
    return started_by.OPEN_MPI_4 | {"PMIX_SERVER_TMPDIR": str(tmp_path)}


def test_one_process_is_a_rank_and_no_child_or_successor(rank, monkeypatch):
    first = os.getpid()
    claim_rank(rank)
    claim_rank(rank)  # the control channel and Horovod each do so
    monkeypatch.setattr(os, "getpid", lambda: first + 1)
    claim_rank(rank | {"PMIX_RANK": "0"})
    with pytest.raises(LoneRanksError, match=rf"^Rank 1 of this job is process {first}, .*PMIX_@") as refused:
        claim_rank(rank)
    assert "\n" not in refused.value.message
    alone = without_launcher(rank)
    claim_rank(alone)
    assert detect_environment(alone).launcher == "none"


@pytest.mark.parametrize("change", [{"PMIX_SERVER_TMPDIR": "/nowhere/of/the/job"}, {"PMIX_RANK": "undefined"}])
def test_where_no_claim_can_be_made_nothing_is_refused(rank, change, monkeypatch):
    claim_rank(rank | change)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    claim_rank(rank | change)


def test_a_child_that_is_not_a_rank_keeps_the_users_settings():
    users = {"PATH": "/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOROVOD_LOG": "x"}
    assert without_launcher(started_by.OPEN_MPI_4 | users) == users
    assert without_launcher(started_by.MPICH_5 | users).keys() - users.keys() == {
        "HYDI_CONTROL_FD",
        "MPI_LOCALNRANKS",
        "MPI_LOCALRANKID",
    }
    of_shell = users | {"OMPI_MCA_btl": "tcp,self"}
    assert without_launcher(of_shell) == of_shell
