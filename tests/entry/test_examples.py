"""The scripts of examples/, as their docstrings say, on one rank and on two, with small arguments."""

import ast
import difflib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launching import job_environment, launcher, run

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAINED = {
    # its arguments, those on two ranks, and whether two ranks train as one does
    "mnist.py": ("--data mnist.npz --epochs 2 --batch 32", "", False),  # dropout draws by rank
    "horovod_after.py": ("", "", False),  # the rate grows with the ranks
    "own_loop.py": ("--epochs 2", "", True),
    "image_folder.py": ("--epochs 2", "", True),
    "gan.py": ("--epochs 2", "", False),  # noise of each rank's own
    "language_model.py": ("--epochs 1 --width 32", "--tp 2", True),
    "zero.py": ("--width 64 --epochs 2", "", True),
    "experts.py": ("--epochs 2", "--ep 2", False),  # tokens are dropped by rank
    "recommender.py": ("--users 500 --films 200 --ratings 4000 --epochs 2", "", True),
    "strategies.py": ("--epochs 2", "", True),
}
ELSEWHERE = {
    "horovod_before.py": "what it is compared with",
    "keras_hub_lora.py": "tests/keras_hub",
    "elastic.py": "below",
    "slurm.sbatch": "tests/clusters",
    "notebook.ipynb": "below",
}


def test_every_example_is_run_and_stands_in_the_table():
    names = {path.name for path in EXAMPLES.iterdir() if path.name != "README.md" and path.is_file()}
    assert names == TRAINED.keys() | ELSEWHERE.keys()
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+\.\w+)\)", table)) == names


@pytest.mark.parametrize("name", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_it_is_run(name):
    text = name.read_text(encoding="utf-8")
    assert text.count("\n") <= 80
    said = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{name.name}" in said or name.name == "horovod_before.py"


@pytest.fixture
def place(tmp_path):
    """An empty folder with a file that looks like MNIST."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, 255, (count, 28, 28), dtype="uint8")
        if kind == "x"
        else rng.integers(0, 10, count)
        for (part, count), kind in itertools.product((("train", 128), ("test", 32)), "xy")
    }
    np.savez(tmp_path / "mnist.npz", **arrays)
    return tmp_path


def losses(text: str) -> list[float]:
    """Return the losses that were printed, those of epochs if there are any."""
    of_epochs = re.findall(r"^epoch.*?loss (\S+)", text, re.MULTILINE)
    return [float(word) for word in of_epochs or re.findall(r"\bloss:? (\d\S*)", text)]


@pytest.mark.parametrize("name", TRAINED)
def test_an_example_trains_on_one_rank_and_on_two(place, name):
    arguments, on_two, alike = TRAINED[name]
    last = []
    for ranks, more in ((1, ""), (2, on_two)):
        folder = place / str(ranks)
        folder.mkdir()
        (folder / "mnist.npz").symlink_to(place / "mnist.npz")
        script = [sys.executable, str(EXAMPLES / name), *arguments.split(), *more.split()]
        job = run([*launcher("mpirun", ranks), *script], cwd=folder, timeout=200)
        found = losses(job.out)
        assert found, job.text
        assert np.isfinite(found).all()
        if len(found) > 1:
            assert found[-1] < found[0], found
        last.append(found[-1])
    if alike:
        assert last[0] == pytest.approx(last[1], rel=2e-3), last


def test_the_script_after_differs_from_the_one_before_by_an_import(tmp_path):
    before, after = (
        (EXAMPLES / f"horovod_{when}.py").read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for when in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed == ["- import horovod.tensorflow.keras as hvd", "+ import hvdtrain.horovod.keras as hvd"]
    command = [sys.executable, "-m", "hvdtrain", "doctor", "--script", str(EXAMPLES / "horovod_before.py")]
    said = run(command, cwd=tmp_path, timeout=100, code=None)
    assert "hvdtrain.horovod" in said.text


def test_the_elastic_example_trains(tmp_path):
    text = ast.get_docstring(ast.parse((EXAMPLES / "elastic.py").read_text(encoding="utf-8")))
    lines = "\n".join(line.strip() for line in re.findall(r"^    .*", text, re.MULTILINE)).replace("\\\n", "")
    shell = lines.replace("examples/", f"{EXAMPLES}/") + " --epochs 3"
    job = run(["bash", "-ec", shell], cwd=tmp_path, timeout=200)
    assert "training on 2 ranks" in job.out
    assert losses(job.out)[-1] < losses(job.out)[0]


def test_the_notebook_trains(tmp_path):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # As a kernel does: the cells of one module, which no file holds.
    feed = "\n".join(f"exec({cell!r})" for cell in code)
    done = subprocess.run(
        [sys.executable, "-"],
        input=feed,
        cwd=tmp_path,
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "equal weights True" in done.stdout, done.stdout
    assert "epoch 3/3" in done.stdout, done.stdout
