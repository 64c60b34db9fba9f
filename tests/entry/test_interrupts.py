"""Ctrl-C in a terminal, which sends SIGINT to the launcher's whole process group."""

import re
import signal

import pytest

from hvdtrain.checkpoint.naming import complete
from tests.launching import Job, launched

pytestmark = pytest.mark.extended

CHATTER = re.compile(r"oneDNN custom|cpu_feature_guard|cudart_stub|cuInit|absl::InitializeLog|To enable the following")


def interrupt(command, cwd, ready, patience=120.0):
    """Start a job, press Ctrl-C once it is `ready`, and return exit code and standard error."""
    with Job(command, cwd=cwd) as job:
        job.wait(ready, seconds=patience)
        job.signal(signal.SIGINT)
        return job.wait(seconds=patience), job.err


def of_ranks(text):
    """What the ranks wrote, without what horovodrun says of itself."""
    tagged = [line.partition(">:")[2] for line in text.splitlines() if re.match(r"\[[\d,]+\]<std", line)]
    return "\n".join(tagged) if tagged else text


@pytest.mark.parametrize(
    ("controller", "size", "resume"),
    [("none", 1, ""), ("mpirun", 2, "mpirun -np 2 "), ("gloo", 2, "horovodrun --gloo -np 2 ")],
)
def test_a_run_says_how_to_go_on(tmp_path, controller, size, resume, monkeypatch):
    # mpirun kills the ranks a second after it has passed a signal on, which is short on a busy machine.
    monkeypatch.setenv("OMPI_MCA_odls_base_sigkill_timeout", "5")
    words = ["--epochs", "1000", "--checkpoint-every", "2", "--run-dir", "run", "--plots", "False"]
    command = launched(controller, size, "-m", "hvdtrain", *words)
    checkpoints = tmp_path / "run" / "checkpoints"
    code, text = interrupt(command, tmp_path, lambda: checkpoints.is_dir() and complete(checkpoints))
    # horovodrun sends the ranks SIGTERM and hands on their code; interrupted before it has seen it, it ends with 0.
    assert code in {"none": (130,), "mpirun": (1,), "gloo": (75, 0)}[controller], text
    said = of_ranks(text)
    place = r"hvdtrain: interrupted at step \d+ of 23000\. Resume from step \d+ with:"
    assert len(re.findall(rf"{place}\n  {resume}python -m hvdtrain --resume run", said)) == 1, text
    assert "Traceback" not in said, text
    assert not CHATTER.search(said), text
    assert "MPI_ABORT" not in text
