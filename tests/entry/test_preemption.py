"""A scheduler that takes the machine away: all ranks save the same step, and the same command goes on from it."""

import os
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from hvdtrain.checkpoint.naming import complete
from tests.launching import Job, hvdtrain, launched, summary_of

WORDS = ["digits", "--run-dir", "run", "--resume", "auto", "--plots", "False", "--tensorboard", "False"]
WORDS += ["--checkpoint-every", "100000"]

SCRIPT = """\
    import time
    import keras
    import numpy as np
    import hvdtrain

    hvdtrain.init()
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((64, 5)).astype("float32")
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
    trainer = hvdtrain.Trainer(model, "adam", "mse")
    print("resumed", trainer.resume("saved"), flush=True)

    def note(epoch, logs):
        print("epoch", epoch, flush=True)
        time.sleep(0.1)

    saves, callbacks = hvdtrain.Checkpoint("saved", every=10**6), [keras.callbacks.LambdaCallback(on_epoch_end=note)]
    trainer.fit(x, x[:, :4], batch=16, epochs=100_000, checkpoint=saves, callbacks=callbacks)
    print("not reached")
"""


def ranks_below(pid):
    """The processes of the ranks that `pid` has started, by rank."""
    found = {}
    children = {pid}
    for _ in range(6):
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except (OSError, ValueError):
                continue
            if parent in children:
                children.add(int(entry.name))
                given = dict(variable.partition(b"=")[::2] for variable in variables)
                rank = given.get(b"OMPI_COMM_WORLD_RANK", given.get(b"HOROVOD_RANK", b"0"))
                if words[1:2] in ([b"-m"], [b"script.py"]) and b"horovodrun" not in b" ".join(words):
                    found[int(rank)] = int(entry.name)
    return found


def job_of(controller, size, words, cwd):
    return Job(launched(controller, size, *words), cwd=cwd)


def saved_step(text):
    """The step of which all ranks say that they stop there; it is the one that is saved, and named at the end."""
    step = int(re.search(r"all ranks stop after step (\d+), to save it", text)[1])
    assert len(re.findall(rf"hvdtrain: interrupted at step {step} of \d+\.", text)) == 1, text[-3000:]
    assert "Traceback" not in text, text[-3000:]
    return step


@pytest.mark.extended
def test_a_run_that_is_preempted_twice_and_damaged_ends_as_one_at_a_stretch(tmp_path):
    hvdtrain("mpirun", 2, "digits", "--epochs", "20", "--run-dir", "whole", "--plots", "False", cwd=tmp_path)
    words, steps = ["-m", "hvdtrain", *WORDS, "--epochs", "20"], []
    # One rank alone, under each controller. Nothing has been saved before: all steps would be lost.
    for controller, number, rank in (("mpirun", signal.SIGUSR1, 1), ("gloo", signal.SIGTERM, 0)):
        with job_of(controller, 2, words, tmp_path) as job:
            job.wait_for(f"epoch {(steps[-1] // 23 if steps else 0) + 1:2}/20")
            os.kill(ranks_below(job.process.pid)[rank], number)
            code, text = job.wait(), job.text
        assert code == 75, text[-3000:]
        steps.append(saved_step(text))
        assert complete(tmp_path / "run" / "checkpoints")[-1].name == f"step-{steps[-1]:08d}"
        assert f"{signal.Signals(number).name}: all ranks stop" in text
    assert steps[1] > steps[0]
    newest = tmp_path / "run" / "checkpoints" / f"step-{steps[1]:08d}" / "tensors-00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    last = hvdtrain("mpirun", 2, *WORDS, "--epochs", "20", cwd=tmp_path)
    assert f"step-{steps[1]:08d} is damaged: tensors-00000.safetensors does not have its recorded size" in last.err
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "whole"), "the same to the last bit"


def hash_of(run):
    return summary_of(run)["parameter_hash"]


@pytest.mark.parametrize(
    ("controller", "number", "rank", "stall_s"),
    [
        ("gloo", signal.SIGTERM, 1, 0.0),
        pytest.param("gloo", signal.SIGTERM, 1, 5.0, marks=pytest.mark.extended),
        pytest.param("gloo", signal.SIGUSR1, None, 0.0, marks=pytest.mark.extended),
        pytest.param("mpirun", signal.SIGUSR1, None, 0.0, marks=pytest.mark.extended),
    ],
    ids=["gloo, rank 1", "gloo, rank 1, while the store stalls", "gloo, launcher", "mpirun, launcher"],
)
def test_a_script_that_saves_stops_where_a_rank_or_its_launcher_is_warned(tmp_path, controller, number, rank, stall_s):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    with job_of(controller, 2, ["script.py"], tmp_path) as job:
        job.wait_for("epoch 1")
        warned = job.process.pid if rank is None else ranks_below(job.process.pid)[rank]
        if stall_s:
            os.kill(job.process.pid, signal.SIGSTOP)  # horovodrun keeps the store
        os.kill(warned, number)
        if stall_s:
            time.sleep(stall_s)
            os.kill(job.process.pid, signal.SIGCONT)
        code, text = job.wait(), job.text
    if stall_s:  # the ranks' own lines: the store tells of each request that was given up
        text = "".join(re.findall(r"^\[\d\]<.*\n", text, re.MULTILINE))
    assert code == 75, text[-3000:]
    assert "not reached" not in text
    assert "The script resumes from the newest checkpoint in 'saved' when it is run again." in text
    step = saved_step(text)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [f"step-{step:08d}"]
