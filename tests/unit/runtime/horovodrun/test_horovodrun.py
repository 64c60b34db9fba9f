"""What the environment's `horovodrun` shows besides the lines of the job."""

import os
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.installation.launcher import prepare_launcher
from hvdtrain.runtime import horovodrun

SCRIPT = """\
#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from horovod.runner.launch import run_commandline
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(run_commandline())
"""


def test_the_script_is_changed_once_and_runs_without_hvdtrain(tmp_path):
    script = tmp_path / "horovodrun"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    for _ in range(2):
        prepare_launcher(SimpleNamespace(scripts=tmp_path))
    text = script.read_text()
    assert text.count("from hvdtrain.runtime.horovodrun import run_commandline") == 1
    assert text.count("from horovod.runner.launch import run_commandline") == 1
    assert os.access(script, os.X_OK)
    assert text.startswith("#!{python}\n")
    compile(text, "horovodrun", "exec")


def test_a_script_of_another_kind_is_left_alone(tmp_path):
    prepare_launcher(SimpleNamespace(scripts=tmp_path))
    assert not list(tmp_path.iterdir())
    (tmp_path / "horovodrun").write_text("#!/bin/sh\nexec something\n")
    prepare_launcher(SimpleNamespace(scripts=tmp_path))
    assert (tmp_path / "horovodrun").read_text() == "#!/bin/sh\nexec something\n"


@pytest.fixture
def launch(monkeypatch):
    """Horovod's launcher, with what it does replaced."""
    pytest.importorskip("horovod")
    from horovod.common import util
    from horovod.runner import launch

    monkeypatch.setattr(
        util, "_check_extension_lambda", lambda *args: os.write(2, b"I0000 00:00:1.0 1 x.cc:1] on\nE1\n") and None
    )
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "true"])

    def runs(function):
        monkeypatch.setattr(launch, "_run", lambda args: function(util))
        return horovodrun.run_commandline()

    return runs


def test_the_lines_of_the_look_at_horovods_build_are_hidden(launch, capfd):
    launch(lambda util: util._check_extension_lambda("torch", None, "built", False))
    assert capfd.readouterr().err == "E1\n"


def test_what_horovod_was_built_with_is_asked_of_its_library(launch, capfd):
    answers = []
    for question in (lambda ext: ext.gloo_built(), lambda ext: ext.nccl_built(), lambda ext: ext.nothing()):
        launch(lambda util, q=question: answers.append(util._check_extension_lambda("tensorflow", q, "built", False)))
    # Horovod's own check has the last word where the library does not know.
    assert answers == [True, False, None]
    assert capfd.readouterr().err == "E1\n"


def fail(text):
    def failing(util):
        raise RuntimeError(text)

    return failing


def test_ranks_that_fail_are_named_in_a_line(launch, capfd):
    text = (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
        "terminated. The first process to do so was:\nProcess name: 1\nExit code: 143\n"
    )
    assert launch(fail(text)) == 143
    assert capfd.readouterr().err == "horovodrun: rank 1 was the first to end, with exit code 143.\n"


def test_another_error_stays(launch):
    with pytest.raises(RuntimeError, match="no such host"):
        launch(fail("no such host"))


def test_options_of_the_command_are_its_own(launch, monkeypatch):
    """`--timeline` might be short for two options of horovodrun."""
    words = ["python", "-m", "hvdtrain", "digits", "--timeline", "trace.json", "--profile=2:3", "--verb"]
    monkeypatch.setattr(sys, "argv", ["horovodrun", "-np", "2", "--timeline-filename", "own.json", *words])
    seen = []
    monkeypatch.setattr("horovod.runner.launch._run", seen.append)
    horovodrun.run_commandline()
    assert seen[0].command == words
    assert seen[0].timeline_filename == "own.json"
