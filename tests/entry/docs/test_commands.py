"""The commands of the documentation, as printed."""

import os
import re

import pytest

from tests.entry.docs.pages import blocks_of, text_of
from tests.launching import Job, has_launcher

ELSEWHERE = re.compile(
    r"runs/(flowers|prices|shakespeare)|hvdtrain checkpoint|-np 2 python -m hvdtrain digits --epochs 3$"
)
"""Commands of the pages below whose data are not here; tests beside this folder run their like."""

FOLLOWED = ("docs/options.md", "docs/after_training.md", "docs/export.md")
"""Pages whose commands are run from the top to the bottom, but for those of ELSEWHERE."""


def shell(command, cwd, timeout=150):
    """Run a command as a user types it."""
    name = command.split()[0]
    if name in ("horovodrun", "mpirun") and not has_launcher(name):
        pytest.skip(f"{name} is not installed")
    return Job(["bash", "-c", command], cwd=cwd).expect(timeout=timeout)


def follow(page, folder):
    """Do what a page says from its top to its bottom, each Python block as a script; return what was printed."""
    blocks = blocks_of(page)
    for block in blocks:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
    printed = {}
    for block in blocks:
        if block.language == "python" and not block.file:
            (folder / "snippet.py").write_text(block.text)
            printed[block.place] = shell("python snippet.py", folder).out
        for command in block.commands if block.language == "bash" else ():
            if not ELSEWHERE.search(command):
                printed[command] = shell(command, folder).out
    return printed


def test_the_readmes_script_trains(tmp_path):
    (script,) = (block for block in blocks_of("README.md", "python") if "Trainer" in block.text)
    assert len([line for line in script.text.splitlines() if line.strip()]) <= 20
    (tmp_path / "script.py").write_text(script.text)
    job = shell("horovodrun -np 2 python script.py", tmp_path)
    accuracies = re.findall(r"epoch 5/5  .*val_accuracy (\d\.\d+)", job.out)
    assert len(accuracies) == 1, job.out
    assert float(accuracies[0]) > 0.85


@pytest.mark.extended
@pytest.mark.parametrize(("package", "alike"), [("horovod.tensorflow.keras", False), ("hvdtrain.horovod.keras", True)])
def test_ranks_of_the_readmes_script_agree_here_and_not_with_plain_horovod(package, alike, tmp_path):
    (script,) = (block for block in blocks_of("README.md", "python") if "hvd.rank()" in block.text)
    imports = f"import keras\nimport numpy as np\nimport {package} as hvd\n"
    (tmp_path / "script.py").write_text(imports + script.text)
    job = shell("horovodrun -np 2 python script.py", tmp_path)
    weights = re.findall(r"rank \d (\[.*\])", job.out)
    assert len(weights) == 2, job.out
    assert (weights[0] == weights[1]) is alike


@pytest.mark.extended
def test_the_options_page_from_its_top_to_its_bottom(tmp_path):
    printed = follow(FOLLOWED[0], tmp_path)
    (own,) = (out for command, out in printed.items() if "mypkg" in command)
    assert float(re.search(r"^validation +accuracy (\d\.\d+)", own, re.MULTILINE)[1]) > 0.5
    assert re.search(r"^digits  +\S", printed["python -m hvdtrain recipes"], re.MULTILINE)


@pytest.mark.extended
def test_after_training_from_its_top_to_its_bottom(tmp_path):
    printed = follow(FOLLOWED[1], tmp_path)
    assert "val_accuracy" in printed["horovodrun -np 2 python -m hvdtrain evaluate run"]
    assert "epoch 3/3" in printed["python -m hvdtrain --resume run --epochs 3"]
    read, used, loaded = (out for place, out in printed.items() if place.startswith("docs/"))
    assert read == "(3, 3, 32, 64) float32\n"
    accuracy = float(loaded.split()[-1])
    assert accuracy > 0.8
    assert used.endswith(f"accuracy {accuracy:.3f} of 10 classes, 0 to 9\n")


@pytest.mark.extended
def test_the_export_page_from_its_top_to_its_bottom(tmp_path):
    printed = follow(FOLLOWED[2], tmp_path)
    served, pruned = (out for place, out in printed.items() if place.startswith("docs/"))
    assert float(served.split()[-1]) > 0.8
    assert "zeros: 0.800" in pruned.splitlines()
    assert float(re.findall(r"val_accuracy (\S+)", pruned)[-1]) > 0.9


@pytest.mark.extended
def test_the_backends_page_trains(tmp_path):
    (snippet,) = blocks_of("docs/backends.md", "python")
    (tmp_path / "snippet.py").write_text(snippet.text)
    losses = re.findall(r"val_loss (\d+\.\d+)", shell("python snippet.py", tmp_path).out)
    assert float(losses[-1]) < float(losses[0])


@pytest.mark.extended
def test_env_and_doctor(tmp_path):
    env = shell("python -m hvdtrain env", tmp_path)
    for word in ("hvdtrain", "Python", "TensorFlow", "Horovod"):
        assert word.lower() in env.out.lower()
    doctor = shell("python -m hvdtrain doctor", tmp_path, timeout=300)
    assert "failed" not in doctor.out.splitlines()[-1] or "0 failed" in doctor.out
    for word in ("gloo", "mpi"):
        assert word in doctor.out.lower()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("env -i /bin/bash -c 'horovodrun -np 2 true'", "horovodrun: command not found"),
        (
            "OMPI_MCA_rmaps_base_oversubscribe=0 mpirun -np 999 true",
            "There are not enough slots available in the system",
        ),
        (
            "env -u OMPI_ALLOW_RUN_AS_ROOT -u OMPI_ALLOW_RUN_AS_ROOT_CONFIRM mpirun -np 2 true",
            "mpirun has detected an attempt to run as root.",
        ),
    ],
)
def test_launchers_say_what_troubleshooting_lists(tmp_path, command, message):
    if "as root" in message and os.geteuid() != 0:
        pytest.skip("is said to root only")
    if "mpirun" in message + command and not has_launcher("mpirun"):
        pytest.skip("mpirun is not installed")
    job = Job(["bash", "-c", command], cwd=tmp_path).expect(code=None, timeout=30)
    assert job.code != 0
    assert " ".join(message.split()) in " ".join(job.text.split())
    assert f"`{message}`" in text_of("docs/troubleshooting.md")
