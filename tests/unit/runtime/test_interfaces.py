"""Interfaces that Open MPI must not take for the network between hosts; tests/clusters/ trains beside them."""

import pytest

from hvdtrain.runtime.interfaces import leave_out_bridges

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
