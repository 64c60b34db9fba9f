"""Where horovodrun puts the environment variables of its ranks."""

import json
import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

gloo_run = pytest.importorskip("horovod.runner.gloo_run", reason="Horovod is not installed")

SSH = """#!/bin/sh
for last; do :; done
exec env -i PATH=/usr/bin:/bin HOME="$HOME" sh -c "$last"
"""
SHOWN = ("KEY", "HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_JOB_SECRET", "odd.name")
SHOW = f"import json, os; print(json.dumps([os.environ[name] for name in {SHOWN}]))"
ODD = "it's \n two lines, $HOME"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Lets an `ssh` start a shell here with nothing of the environment; returns the ranks' commands as they start."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KEY", ODD)
    monkeypatch.setattr(gloo_run.network, "resolve_host_address", lambda name: {"here": "127.0.0.1"}.get(name))
    commands = []
    execute = gloo_run.safe_shell_exec.execute

    def noted(command, **options):
        commands.append(command)
        return execute(command, **options)

    monkeypatch.setattr(gloo_run.safe_shell_exec, "execute", noted)
    return commands


def run(capfd):
    """Run a rank here and one on another host; return what each printed, by rank."""
    settings = SimpleNamespace(
        output_filename=None,
        verbose=0,
        hosts="here:1,far:1",
        num_proc=2,
        elastic=False,
        ssh_port=None,
        ssh_identity_file=None,
        prefix_output_with_timestamp=False,
    )
    environ = {**os.environ, "odd.name": "seen"}
    gloo_run.gloo_run(settings, ["lo"], environ, "127.0.0.1", [sys.executable, "-c", SHOW])
    out = capfd.readouterr().out.replace("[0]<stdout>:", "").replace("[1]<stdout>:", "")
    shown = [dict(zip(SHOWN, json.loads(line), strict=True)) for line in out.splitlines()]
    return {values.pop("HOROVOD_RANK"): values for values in shown}


@pytest.fixture(autouse=True)
def keep_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_ranks_get_it_here_and_elsewhere_and_no_command_line_shows_it(started, capfd):
    shown = run(capfd)
    assert shown["0"] == shown["1"]
    address, secret = shown["0"]["HOROVOD_GLOO_RENDEZVOUS_ADDR"], shown["0"]["HOROVOD_JOB_SECRET"]
    assert (shown["0"]["KEY"], shown["0"]["odd.name"]) == (ODD, "seen")
    token = address.rpartition("/")[2]
    assert (len(token), len(secret)) == (32, 64)
    for command in started:
        assert not [word for word in ("two lines", token, secret) if word in command]
    # The file that the other host's shell is fed from was this user's alone, and is gone.
    remote = next(command for command in started if command.startswith("ssh "))
    assert not os.path.exists(os.path.dirname(shlex.split(remote)[-1]))


def test_the_file_for_other_hosts_is_this_users_alone():
    from horovod.runner.util.private_env import private_env

    with private_env() as rank_env:
        assert rank_env.set({"KEY": "value", "odd.name": "seen"}) == {"odd.name": "seen"}
        file = shlex.split(rank_env.fed("ssh far"))[-1]
        assert os.stat(os.path.dirname(file)).st_mode & 0o077 == 0
        script = rank_env.fed(f"sh -c {shlex.quote(rank_env.reading('echo $KEY'))}")
        assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == "value\n"


def test_kubeflow_passes_no_input_on_and_gets_it_as_horovod_gives_it(monkeypatch):
    from horovod.runner.util.private_env import private_env

    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    with private_env() as rank_env:
        words, environ = gloo_run._get_private_run_command(
            rank_env, {"KEY": "value", "HOROVOD_JOB_SECRET": "of another job"}, ["true"], "127.0.0.1", ["lo"], 4711
        )
        assert words == "true"
        assert (environ["KEY"], environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("value", "4711")
        assert len(environ["HOROVOD_JOB_SECRET"]) == 64
        assert rank_env.fed(rank_env.reading("true")) == "true"
