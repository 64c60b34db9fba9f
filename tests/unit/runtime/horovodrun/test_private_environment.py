"""Where horovodrun puts the environment variables of its ranks."""

import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.runtime.horovodrun.private_environment import private_environment

SSH = """#!/bin/sh
for last; do :; done
exec env -i PATH=/usr/bin:/bin HOME="$HOME" sh -c "$last"
"""
SLOT = SimpleNamespace(hostname="far", rank=1, size=2, local_rank=0, local_size=1, cross_rank=1, cross_size=2)
SHOW = "import os; print(os.environ['KEY'], os.environ['TOKEN'], os.environ['HOROVOD_RANK'], os.environ['odd.name'])"
ODD = "it's \n two lines, $HOME"


@pytest.fixture
def gloo_run(monkeypatch, tmp_path):
    """Horovod's module, in an environment with a key, and an `ssh` that starts a shell here with nothing of it."""
    module = pytest.importorskip("horovod.runner.gloo_run", reason="Horovod is not installed")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KEY", ODD)
    return module


def commands(gloo_run):
    """The command that starts a rank here, and that for another host, as `gloo_run` makes them."""
    variables = gloo_run.create_run_env_vars("127.0.0.1", ["lo"], 4711)
    assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == 4711
    run_command = shlex.join([sys.executable, "-c", SHOW])
    here = gloo_run._slot_info_to_command_fn(run_command, {**os.environ, "odd.name": "seen"})(SLOT)
    return here, gloo_run.get_remote_command(shlex.quote(f"cd / ; {here}"), host="far", port=22)


def output_of(command):
    environ = {name: value for name, value in os.environ.items() if name != "odd.name"}
    return subprocess.run(["/bin/sh", "-c", command], env=environ, capture_output=True, text=True, check=True).stdout


def test_ranks_get_it_here_and_elsewhere_and_no_command_line_shows_it(gloo_run):
    with private_environment(gloo_run, lambda host, port: {"TOKEN": f"of {host}:{port}"}):
        both = commands(gloo_run)
        for command in both:
            assert "two lines" not in command
            assert "TOKEN=" not in command
            assert output_of(command) == f"{ODD} of 127.0.0.1:4711 1 seen\n"
        file = shlex.split(both[1])[-1]
        assert os.stat(os.path.dirname(file)).st_mode & 0o077 == 0
    assert not os.path.exists(file)


def test_kubeflow_passes_no_input_on_and_gets_it_as_horovod_gives_it(gloo_run, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    with private_environment(gloo_run, lambda host, port: {"TOKEN": "t0k3n"}):
        gloo_run.create_run_env_vars("127.0.0.1", ["lo"], 4711)
        command = gloo_run._slot_info_to_command_fn("TOKEN=t0k3n true", {"KEY": "value", "TOKEN": "of another job"})(
            SLOT
        )
        assert "KEY=value" in command
        assert "another" not in command
        assert gloo_run.get_remote_command("true", host="far") == "/etc/mpi/kubexec.sh far true"


def test_horovods_module_is_as_before_afterwards(gloo_run):
    before = vars(gloo_run).copy()
    with private_environment(gloo_run, lambda host, port: {}):
        assert gloo_run.create_run_env_vars is not before["create_run_env_vars"]
    assert vars(gloo_run) == before
