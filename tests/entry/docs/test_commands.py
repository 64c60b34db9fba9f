"""The commands of the documentation, as printed."""

import os
import re

import pytest

from tests.entry.docs.pages import PAGES, blocks_of, commands_of, text_of
from tests.launching import has_launcher, hvdtrain, run

NOT_RUN = {
    "launch/setup.sh --gpu": "tests/entry/test_setup.py, and launch/test.sh --gpu-build",
    "launch/setup.sh": "tests/entry/test_setup.py",
    "launch/train.sh": "tests/entry/test_launch.py, and what it starts in test_train.py",
    "launch/test.sh": "this is it",
    "launch/train.sh -np 4 digits --epochs 3": "tests/entry/test_launch.py",
    "source .venv/bin/activate": "launch/test.sh does it",
    "module load gcc openmpi": "needs a cluster",
    "python -m hvdtrain setup --mpi system": "needs a cluster",
    "python3 -m venv venv && source venv/bin/activate": "tests/entry/test_wheel.py",
    "horovodrun -np 2 python -m hvdtrain.horovod.data.compute_worker service.json --dispatchers 1 "
    "--dispatcher-side compute": "tests/entry/test_tf_data_service.py",
    "pip install hvdtrain": "tests/entry/test_wheel.py, from a wheel",
    "python -m hvdtrain setup": "tests/entry/test_wheel.py",
    "source venv/bin/activate": "tests/entry/test_wheel.py",
    "horovodrun -np 2 python -m hvdtrain digits": "tests/entry/test_train.py, with fewer steps",
    "horovodrun -np 2 python -m hvdtrain digits --epochs 3": "tests/entry/test_train.py, with fewer steps",
    "mpirun -np 2 python -m hvdtrain digits": "tests/entry/test_train.py, with fewer steps",
    "horovodrun --gloo -np 2 python script.py": "as with MPI; tests/distributed has Gloo",
    "mpirun -np 2 python script.py": "test_snippets.py runs the pages under mpirun",
    "pip install 'tf_keras>=2.21,<2.22'": "it is among the test packages",
    "pip install 'hvdtrain[migrate]'": "it is among the test packages",
    "python -m hvdtrain doctor --script train.py": "tests/entry/test_migration.py",
    "python -m hvdtrain doctor --script train.py --write": "tests/entry/test_migration.py",
    "python -m hvdtrain doctor --script . --all": "tests/entry/test_migration.py",
    "python -m hvdtrain cifar10 --data-args path photos.tar.gz validation 500": "tests/entry/test_data.py",
    "python -m hvdtrain data pack photos.tar.gz packed --validation 500": "tests/entry/test_data_pack.py",
    "python -m hvdtrain cifar10 --data tfrecord --data-args path packed --cache file": "tests/entry/test_data_pack.py",
    "python -m hvdtrain bench --models resnet20 lm --rounds 5": "takes minutes; tests/entry/test_bench.py, small",
    "python -m hvdtrain bench collectives --sizes 1KB 1MB 100MB": "tests/entry/test_bench.py, small",
    "python -m hvdtrain bench compare bench/2026-11-21-2-cores bench/2026-11-22-2-cores": "tests/entry/test_bench.py",
    "python -m hvdtrain bench --autotune": "tests/entry/test_bench.py, small",
    "python -m hvdtrain bench --parallel --ranks 2 4": "takes minutes; tests/entry/test_bench.py, small",
    "python -m hvdtrain checkpoint list run": "tests/entry/test_checkpoint.py",
    "python -m hvdtrain checkpoint verify run": "tests/entry/test_checkpoint.py",
    "python -m hvdtrain checkpoint export run --checkpoint best --to best.keras": "tests/entry/test_checkpoint.py",
    "python -m hvdtrain evaluate runs/flowers --data-args path more_flowers": "tests/entry/test_after_training.py",
    "python -m hvdtrain evaluate runs/flowers --data tfrecord --data-args path packed --checkpoint best": (
        "tests/entry/test_after_training.py"
    ),
    "python -m hvdtrain predict runs/flowers photos/ --top 3 > predictions.csv": "tests/entry/test_after_training.py",
    "cat new.csv | python -m hvdtrain predict runs/prices - --format jsonl": "tests/entry/test_after_training.py",
    'python -m hvdtrain generate runs/shakespeare --prompt "ROMEO:" --length 500 --temperature 0.8 --top-k 20': (
        "tests/entry/test_after_training.py"
    ),
    "mpirun -np 4 python -m hvdtrain predict runs/flowers photos.tar --out predictions.csv": (
        "tests/entry/test_after_training.py, 2 ranks"
    ),
    "python -m hvdtrain digits --backend mirrored --replicas 2": "tests/entry/test_backends.py",
    "horovodrun -np 2 python -m hvdtrain digits --backend multi_worker_mirrored --communication ring": (
        "tests/entry/test_backends.py"
    ),
    "mpirun -np 4 python -m hvdtrain digits --backend parameter_server": "tests/entry/test_backends.py, 3 ranks",
    "horovodrun -np 6 python -m hvdtrain digits --backend parameter_server --parameter-servers 2": (
        "too many ranks for 2 cores; tests/distributed has several servers"
    ),
    "horovodrun -np 4 python -m hvdtrain digits --zero 1": "tests/entry/test_update_rules.py, 2 ranks",
    "horovodrun -np 4 python -m hvdtrain gpt_char --zero 3 --zero-prefetch 1": (
        "tests/entry/test_update_rules.py, 2 ranks"
    ),
    "horovodrun -np 4 python -m hvdtrain digits --local-steps 8": "tests/entry/test_update_rules.py, 2 ranks",
}
"""Commands that no test of this folder runs, and where they are run instead."""
RUN = {"horovodrun -np 2 python script.py", "python -m hvdtrain doctor", "python -m hvdtrain env"}
FOLLOWED = ("docs/options.md", "docs/after_training.md")
"""Pages whose commands are run from the top to the bottom, but for those of NOT_RUN."""


def shell(command, cwd, timeout=150):
    """Run a command as a user types it."""
    name = command.split()[0]
    if name in ("horovodrun", "mpirun") and not has_launcher(name):
        pytest.skip(f"{name} is not installed")
    job = run(["bash", "-c", command], cwd=cwd, timeout=timeout)
    assert job.code == 0, job.text[-4000:]
    return job


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
            if command not in NOT_RUN:
                printed[command] = shell(command, folder).out
    return printed


def test_every_command_is_run_or_says_where():
    printed = {command for page in PAGES for command in commands_of(page)}
    followed = {command for page in FOLLOWED for command in commands_of(page)}
    assert printed - followed - RUN - NOT_RUN.keys() == set(), "add it to RUN and a test, or to NOT_RUN"
    assert (RUN | NOT_RUN.keys()) - printed == set(), "no page prints it any more"


def test_the_readmes_script_trains(tmp_path):
    (script,) = (block for block in blocks_of("README.md", "python") if "Trainer" in block.text)
    assert len([line for line in script.text.splitlines() if line.strip()]) <= 20
    (tmp_path / "script.py").write_text(script.text)
    job = shell("horovodrun -np 2 python script.py", tmp_path)
    accuracies = re.findall(r"epoch 5/5  .*val_accuracy (\d\.\d+)", job.out)
    assert len(accuracies) == 1, job.out
    assert float(accuracies[0]) > 0.85


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
def test_help_comes_once_from_many_ranks(tmp_path):
    job = hvdtrain("mpirun", 2, "--help", cwd=tmp_path)
    assert job.code == 0
    assert job.out.count("usage:") == 1


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
    job = run(["bash", "-c", command], cwd=tmp_path, timeout=30)
    assert job.code != 0
    assert " ".join(message.split()) in " ".join(job.text.split())
    assert f"`{message}`" in text_of("docs/troubleshooting.md")
