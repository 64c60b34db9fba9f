"""The scripts of examples/: the commands of their headers, and on one rank and on two, with small arguments."""

import ast
import difflib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launching import Job, job_environment, launched

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
SMALL = {
    # sizes alone, after what a header's command says
    "mnist.py": "--data mnist.npz --epochs 1",
    "gan.py": "--epochs 2",
    "image_folder.py": "--epochs 2",
    "language_model.py": "--epochs 1 --width 32",
    "zero.py": "--width 64 --epochs 2",
    "experts.py": "--epochs 2",
    "recommender.py": "--users 500 --films 200 --ratings 4000 --epochs 2",
}
EVERY_DAY = "own_loop.py"
"""Its command takes few seconds; those of the others are sixteen more launches, one of them of eight ranks."""


def commands() -> list[tuple[str, str]]:
    """Return (example, command) for each command that a header prints; of a Slurm job what it starts, on its ranks."""
    found = []
    for name in TRAINED:
        said = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
        found += [(name, line.strip()) for line in re.findall(rf"^    .*examples/{name}.*", said, re.MULTILINE)]
    header = (EXAMPLES / "slurm.sbatch").read_text(encoding="utf-8")
    nodes, tasks, script = re.findall(r"--nodes=(\d+) --ntasks-per-node=(\d+) .*slurm\.sbatch (.*)", header)[0]
    name = script.split()[0].removeprefix("examples/")
    return [*found, (name, f"mpirun -np {int(nodes) * int(tasks)} python {script}")]


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
    of_epochs = re.findall(r"^(?:\[1,\d\]<stdout>:)?epoch.*?loss (\S+)", text, re.MULTILINE)
    return [float(word) for word in of_epochs or re.findall(r"\bloss:? (\d\S*)", text)]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        pytest.param(name, command, id=command, marks=() if name == EVERY_DAY else pytest.mark.extended)
        for name, command in commands()
    ],
)
def test_a_command_of_a_header_trains_on_its_ranks(place, name, command):
    """As printed, with as many ranks, which may be more than this machine has cores for."""
    words = shlex.split(command.replace("examples/", f"{EXAMPLES}/"))
    launched({"python": "none"}.get(words[0], words[0]), 1)  # skips the test without it
    (place / "book.txt").write_text(Path(ast.__file__).read_text(encoding="utf-8")[:20_000])
    more = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    job = Job([*words, *SMALL.get(name, "").split()], cwd=place, **more).expect(timeout=900)
    found = losses(job.out)
    assert found, job.text
    assert np.isfinite(found).all()


@pytest.mark.extended
@pytest.mark.parametrize("name", TRAINED)
def test_an_example_trains_on_one_rank_and_on_two(place, name):
    arguments, on_two, alike = TRAINED[name]
    last = []
    for ranks, more in ((1, ""), (2, on_two)):
        folder = place / str(ranks)
        folder.mkdir()
        (folder / "mnist.npz").symlink_to(place / "mnist.npz")
        words = [str(EXAMPLES / name), *arguments.split(), *more.split()]
        job = Job(launched("mpirun", ranks, *words), cwd=folder).expect(timeout=200)
        found = losses(job.out)
        assert found, job.text
        assert np.isfinite(found).all()
        if len(found) > 1:
            assert found[-1] < found[0], found
        last.append(found[-1])
    if alike:
        assert last[0] == pytest.approx(last[1], rel=2e-3), last


@pytest.mark.extended
def test_the_script_after_differs_from_the_one_before_by_an_import(tmp_path):
    before, after = (
        (EXAMPLES / f"horovod_{when}.py").read_text(encoding="utf-8").partition('"""\n\n')[2].splitlines()
        for when in ("before", "after")
    )
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert changed == ["- import horovod.tensorflow.keras as hvd", "+ import hvdtrain.horovod.keras as hvd"]
    command = [sys.executable, "-m", "hvdtrain", "doctor", "--script", str(EXAMPLES / "horovod_before.py")]
    Job(command, cwd=tmp_path).expect("hvdtrain.horovod", code=None)


@pytest.mark.extended
def test_the_elastic_example_trains(tmp_path):
    text = ast.get_docstring(ast.parse((EXAMPLES / "elastic.py").read_text(encoding="utf-8")))
    lines = "\n".join(line.strip() for line in re.findall(r"^    .*", text, re.MULTILINE)).replace("\\\n", "")
    shell = lines.replace("examples/", f"{EXAMPLES}/") + " --epochs 3"
    job = Job(["bash", "-ec", shell], cwd=tmp_path).expect("training on 2 ranks", timeout=200)
    assert losses(job.out)[-1] < losses(job.out)[0]


@pytest.mark.extended
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
