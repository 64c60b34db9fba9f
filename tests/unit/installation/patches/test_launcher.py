"""What `horovodrun` shows besides the lines of the job, and with which code it ends."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

launch = pytest.importorskip("horovod.runner.launch", reason="Horovod is not installed")


@pytest.fixture
def run(monkeypatch):
    """Run the launcher with `function` in place of all that follows its command line."""
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "true"])
    before = signal.getsignal(signal.SIGUSR1)

    def run(function):
        monkeypatch.setattr(launch, "_run", function)
        return launch.run_commandline()

    yield run
    signal.signal(signal.SIGUSR1, before)


def test_what_horovod_was_built_with_is_asked_of_its_library(capfd, monkeypatch):
    """TensorFlow is imported only where the library does not know."""
    from horovod.common import util

    monkeypatch.setattr(util.importlib, "import_module", lambda name, package: SimpleNamespace(knows=lambda: name))
    questions = (lambda ext: ext.gloo_built(), lambda ext: ext.nccl_built(), lambda ext: ext is not None)
    answers = [util._check_extension_lambda("tensorflow", question, "built", False) for question in questions]
    assert answers == [True, False, True]
    assert util._check_extension_lambda("tensorflow", lambda ext: ext.knows(), "built", False) == ".tensorflow"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("code", "passed_on"), [(143, 143), (75, 75), (256, 1), (-9, 1)])
def test_ranks_that_fail_are_named_in_a_line(run, capfd, code, passed_on):
    def fails(args):
        raise launch.ProcessFailedError("1", code)

    assert run(fails) == passed_on
    assert capfd.readouterr().err == f"horovodrun: rank 1 was the first to end, with exit code {code}.\n"


def test_an_interface_that_is_not_there_is_named_with_those_that_are(run, capfd):
    assert run(lambda args: launch.network.get_driver_ip(["nothing"])) == 2
    error = capfd.readouterr().err
    assert error.startswith("horovodrun: error: --network-interfaces must name interfaces that every host has")
    assert "Received: nothing. This host has " in error


def test_sigusr1_is_taken_for_sigterm(run):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        run(lambda args: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_options_of_the_command_are_its_own(run, monkeypatch):
    """`--timeline` might be short for two options of horovodrun, whose own may still be shortened."""
    words = ["python", "-m", "hvdtrain", "digits", "--timeline", "trace.json", "--profile=2:3", "--verb"]
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "--timeline-file", "own.json", *words])
    seen = []
    run(seen.append)
    assert seen[0].command == words
    assert seen[0].timeline_filename == "own.json"


def test_output_that_nobody_reads_is_dropped(run, monkeypatch):
    reader, writer = os.pipe()

    def prints(args):
        print("read")
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(2):
            print("unread", flush=True)

    with os.fdopen(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(prints) is None
        assert sys.stdout is pipe
