"""Interfaces that Open MPI must leave out, and hosts that are unreachable: tests/clusters/ cuts real cables."""

import socket

import pytest

from hvdtrain.config.errors import on_command_line
from hvdtrain.runtime import broken_links
from hvdtrain.runtime.broken_links import BrokenLinkWatch, probe_when_idle, remote_address, silent_for, sockets
from hvdtrain.runtime.interfaces import hosts_by_address, leave_out_bridges, own_addresses

RANKS = {"b": [2, 3], "c": [4]}


class Connections:
    """Stands in for the connections of this process: seconds since something came, by host."""

    def __init__(self, monkeypatch):
        self.last = {}
        monkeypatch.setattr(BrokenLinkWatch, "_find_connections", lambda watch: None)
        monkeypatch.setattr(BrokenLinkWatch, "_silence", lambda watch: dict(self.last))


@pytest.fixture
def connections(monkeypatch):
    return Connections(monkeypatch)


def watch(said):
    return BrokenLinkWatch({}, RANKS, 15.0, said.append, now=0.0)


def looked_at(looking, connections, until, silent):
    for second in range(until + 1):
        connections.last = {host: min(seconds, second) for host, seconds in silent.items()}
        looking.look(float(second))


def test_a_host_from_which_nothing_comes_is_named_once_with_its_ranks(connections):
    said = []
    looked_at(watch(said), connections, 14, {"b": 99, "c": 99})
    assert said == []
    looked_at(watch(said), connections, 20, {"b": 99, "c": 1})
    (text,) = said
    assert text.startswith("The link to b (ranks 2-3) is broken: no packet has come from there for 15 s.")
    assert "--link-timeout" in on_command_line(text)


def test_several_hosts_are_named_together(connections):
    said = []
    looked_at(watch(said), connections, 15, {"b": 99, "c": 99})
    assert said[0].startswith("The link to b (ranks 2-3), c (rank 4) is broken")


def test_a_process_that_stood_still_itself_blames_nobody(connections):
    said = []
    looking = watch(said)
    looking.look(1.0)
    connections.last = {"b": 600.0}
    looking.look(600.0)
    assert said == []
    for second in range(601, 616):
        looking.look(float(second))
    assert len(said) == 1


def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def test_the_system_tells_when_something_last_came():
    client, other = pair()
    with client, other:
        other.send(b"x")
        client.recv(1)
        assert silent_for(client) < 1
        probe_when_idle(client, 3)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
    with socket.socket() as unconnected:
        assert silent_for(unconnected) is None


def test_data_that_the_other_end_has_no_room_for_say_nothing_of_the_link():
    client, other = pair()
    with client, other:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(2**26))
        assert silent_for(client) is None


def test_connections_of_this_host_lead_nowhere_else(monkeypatch):
    client, other = pair()
    with client, other:
        assert remote_address(client) is None
        assert any(descriptor == client.fileno() for descriptor in sockets().values())


def test_a_host_is_silent_only_as_long_as_all_connections_to_it_are(monkeypatch):
    client, other = pair()
    with client, other:
        ages = iter([20.0, 3.0])
        monkeypatch.setattr(broken_links, "silent_for", lambda connection: next(ages))
        looking = watch([])
        names = {descriptor: name for name, descriptor in sockets().items()}
        looking._connections = {names[each.fileno()]: (each.fileno(), "b") for each in (client, other)}
        assert looking._silence() == {"b": 3.0}


def test_an_address_that_several_hosts_have_names_none_of_them():
    addresses = {"a": ["10.0.0.1", "172.17.0.1"], "b": ["10.0.0.2", "172.17.0.1"]}
    assert hosts_by_address(addresses) == {"10.0.0.1": "a", "10.0.0.2": "b"}
    assert not any(address.startswith("127.") for address in own_addresses())


EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"


@pytest.mark.parametrize("bridge", ["docker0", "br-3f2a9c", "virbr0", "cni0", "podman1"])
def test_bridges_of_containers_are_left_out(bridge):
    environ = {}
    leave_out_bridges(environ, ["lo", "eth0", bridge, "ib0"], [])
    assert environ == {EXCLUDE: f"127.0.0.1/8,sppp,{bridge}"}


@pytest.mark.parametrize("names", [["lo", "eth0"], ["br0", "bond0"]])
def test_other_interfaces_are_left_to_open_mpi(names):
    environ = {}
    leave_out_bridges(environ, names, [])
    assert environ == {}


@pytest.mark.parametrize("which", ["include", "exclude"])
def test_what_the_user_has_chosen_stays(which, tmp_path):
    environ = {f"OMPI_MCA_btl_tcp_if_{which}": "docker0"}
    leave_out_bridges(environ, ["docker0"], [])
    assert environ == {f"OMPI_MCA_btl_tcp_if_{which}": "docker0"}
    file = tmp_path / "mca-params.conf"
    for line, left_out in ((f"btl_tcp_if_{which} = eth0\n", False), ("# btl_tcp_if_include = eth0\n", True)):
        file.write_text(line)
        environ = {}
        leave_out_bridges(environ, ["docker0"], [tmp_path / "none", file])
        assert (EXCLUDE in environ) == left_out
