"""Scripts of Horovod's users on 2 ranks, with their imports rewritten: on both Kerases, under both controllers.

They are written here after the structure of Horovod's examples and of other people's scripts, as for Keras 2.
"""

import functools
import json
import math
import re
from collections import defaultdict

import numpy as np
import pytest
from PIL import Image

from tests.entry.horovod_scripts.rewriting import HERE, environment_of, write_scripts
from tests.launching import Job, launched

pytestmark = pytest.mark.extended

EXAMPLES = {
    "tensorflow2_keras_mnist": "--steps 20 --epochs 4",
    "tensorflow2_mnist": "--batches 30",
    "keras_mnist": "--epochs 6",
    "keras_imagenet_resnet50": "--epochs 3 --batch-size 4 --fp16-allreduce",
    "keras_imagenet_resnet50 goes on": "--epochs 5 --batch-size 4 --fp16-allreduce",
    # These show that the comparison can fail.
    "tensorflow2_keras_mnist without an exchange": "--steps 20 --epochs 1",
    "tensorflow2_keras_mnist without a broadcast": "--steps 20 --epochs 1",
}
"""Horovod's examples and their arguments, in the order in which they run."""
OTHERS = {
    "bert": "--steps 20 --use-fp16",
    "cosmoflow": "--epochs 5",
    "dlrm": "--steps 10",
    "own_train_step": "--epochs 3",
    "transfer_learning": "--epochs 3",
    "unet": "--steps 20",
    "unet goes on": "--steps 20",
}
"""Other people's scripts."""
FAULTS = {
    "without an exchange": r"    opt = hvd\.DistributedOptimizer\(.*\n",
    "without a broadcast": r"        hvd\.callbacks\.BroadcastGlobalVariablesCallback\(0\),\n",
}
WORLDS = {("keras_3", "mpirun"): EXAMPLES | OTHERS, ("tf_keras", "gloo"): EXAMPLES | OTHERS}
"""Each script meets both Kerases and both controllers; the exchange itself does not know which Keras calls it."""


def cases(faulty):
    """Return the commands of each world; one process of pytest launches all of a world."""
    return [
        pytest.param(
            *world, name, marks=pytest.mark.xdist_group("scripts-" + "-".join(world)), id="-".join((*world, name))
        )
        for world, commands in WORLDS.items()
        for name in commands
        if ("without" in name) == faulty
    ]


@pytest.fixture(scope="module")
def reports_of(tmp_path_factory):
    """Return what both ranks of a world say of each of its commands, from one launch."""

    @functools.cache
    def reports(flavour, controller):
        return ran(flavour, controller, tmp_path_factory.mktemp(f"{flavour}-{controller}"))

    return reports


def ran(flavour, controller, folder):
    for kind in ("examples", "others"):
        write_scripts(kind, flavour, folder)
    write_faulty(folder)
    write_images(folder / "imagenet")
    lines = json.dumps(list(command_lines(WORLDS[flavour, controller], folder)))
    command = launched(controller, 2, str(HERE / "run_scripts.py"), lines)
    job = Job(command, cwd=folder, **environment_of(flavour)).expect(timeout=600)
    found = defaultdict(list)
    for line in re.findall(r"SCRIPT (\{.*\})", job.out):
        report = json.loads(line)
        found[report["name"]].append(report)
    return found


def write_faulty(folder):
    """Take out of the first example what makes ranks agree."""
    text = (folder / "tensorflow2_keras_mnist.py").read_text()
    for fault, line in FAULTS.items():
        faulty, count = re.subn(line, "", text)
        assert count == 1, fault
        (folder / f"tensorflow2_keras_mnist {fault}.py").write_text(faulty)


def write_images(folder):
    """Write a folder of images for each of two classes, which differ in their brightness."""
    rng = np.random.default_rng(0)
    for part in ("train", "validation"):
        for label, brightness in (("n01", 60), ("n02", 190)):
            (folder / part / label).mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(brightness - 60, brightness + 60, (8, 8, 3)).astype("uint8")
                Image.fromarray(pixels).save(folder / part / label / f"{number}.png")


def command_lines(commands, folder):
    images = f"--train-dir {folder}/imagenet/train --val-dir {folder}/imagenet/validation"
    for name, arguments in commands.items():
        script = name.removesuffix(" goes on")
        words = arguments.split() + (images.split() if "imagenet" in name else [])
        yield [name, str(folder / f"{script}.py"), *words]


@pytest.mark.parametrize(("flavour", "controller", "name"), cases(faulty=False))
def test_the_ranks_train_one_model(reports_of, flavour, controller, name):
    reports = reports_of(flavour, controller)
    first, second = reports[name]
    if name == "keras_imagenet_resnet50 goes on":
        assert len(first["losses"]) == 2  # the fourth and the fifth epoch
    assert first["models"], "no model is left to compare"
    assert all(first["models"].values()), "a model has no weights"
    assert first["models"] == second["models"], "the ranks drifted apart"
    # What goes on has learned already: it is compared with where the training began.
    begun = reports[name.removesuffix(" goes on")]
    for report, beginning in zip((first, second), begun, strict=True):
        assert all(math.isfinite(loss) for loss in report["losses"])
        assert report["losses"][-1] < beginning["losses"][0]


@pytest.mark.parametrize(("flavour", "controller", "name"), cases(faulty=True))
def test_the_comparison_notices_ranks_that_drift_apart(reports_of, flavour, controller, name):
    first, second = reports_of(flavour, controller)[name]
    assert first["models"] != second["models"]
