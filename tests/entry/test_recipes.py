"""Every recipe takes two steps, in one process and on two ranks, made small by its own arguments.

Digits is trained by commands of its own in other files. Here all recipes go in turn through the same processes: what
a command line means, without a new TensorFlow for each.
"""

import gzip

import numpy as np
import pytest

from hvdtrain.recipes import RECIPES
from tests.launching import hvdtrain, summary_of, use_all
from tests.unit.images import write_folders

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("recipes")]  # one process makes the runs, in two launches
TRIED_ELSEWHERE = {"digits"}
TINY_IMAGES = "--data-args samples 16 size 16"
WORDS = {
    "resnet_synthetic": f"--batch 8 --model-args depth 8 width 4 {TINY_IMAGES}",
    "lm_synthetic": "--batch 8 --warmup-steps 0 --model-args depth 1 width 16 heads 2",
    "mlp_synthetic": f"--batch 8 --model-args width 16 {TINY_IMAGES}",
    "wide_mlp": f"--batch 8 --model-args width 16 depth 4 {TINY_IMAGES}",
    "mnist": "--batch 8 --data-args name fashion_mnist --model-args width 4",
    "cifar10": "--batch 8 --model-args depth 8 width 4 --data-args path photos validation 4",
    "resnet50": "--batch 8 --eval-batch 8 --model-args depth 26 width 4 --data-args samples 16 size 64",
    "gpt_char": "--batch 8 --warmup-steps 0 --model-args depth 1 width 16 heads 2 --data-args length 64",
    "moe_char": "--batch 8 --warmup-steps 0 --model-args depth 1 width 16 heads 2 every 1 experts 4 capacity_factor 0 "
    "--data-args length 64",
    "bert_mini": "--batch 8 --warmup-steps 0 --model-args depth 1 width 16 heads 2 --data-args length 64 copies 1",
    "dlrm": "--batch 8 --data-args samples 64 rows 20 --model-args rows 20 dim 4 width 8",
}
STATISTICS_OF_A_RANK = {"resnet_synthetic", "cifar10", "resnet50"}
"""BatchNormalization sees one rank's part of a batch: these train to another loss on two ranks."""


def test_every_recipe_is_tried():
    assert RECIPES.keys() - TRIED_ELSEWHERE == WORDS.keys()


def words_of(name, size):
    here = ["--run-dir", f"{name}-{size}", "--plots", "False", "--tensorboard", "False"]
    # With every step measured there is one graph of the step to compile, and no second one that measures nothing.
    return [name, "--max-steps", "2", "--log-every", "1", *WORDS[name].split(), *here]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with Fashion-MNIST in Keras' cache, other images in class folders, and the runs of all recipes."""
    made = tmp_path_factory.mktemp("recipes")
    write_folders(made / "photos", each=12, kind="jpeg", size=16)
    rng, files = np.random.default_rng(0), made / "keras/datasets/fashion-mnist"
    files.mkdir(parents=True)
    for name, count in (("train", 32), ("t10k", 9)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.permutation(np.arange(count, dtype=np.uint8) % 10)
        # Keras skips the headers.
        (files / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images.tobytes()))
        (files / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))
    places = {"KERAS_HOME": str(made / "keras"), "HVDTRAIN_CACHE": str(made / "cache")}
    for controller, size in (("none", 1), ("mpirun", 2)):
        trainings = [["train", *words_of(name, size)] for name in WORDS]
        use_all(controller, size, trainings, cwd=made, timeout=300, **places)
    return made


@pytest.mark.parametrize("name", WORDS)
def test_a_recipe_takes_two_steps_alone_and_on_two_ranks(folder, name):
    one, two = (summary_of(folder / f"{name}-{size}") for size in (1, 2))
    assert [(one["world_size"], one["steps"]), (two["world_size"], two["steps"])] == [(1, 2), (2, 2)]
    assert np.isfinite([one["train_loss"], one["val_loss"]]).all()
    if name not in STATISTICS_OF_A_RANK:
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
        assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-5)


def test_dlrm_takes_a_file_of_numbers_and_categories(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{rng.random():.3f},{rng.choice(['red', 'blue', 'green'])},{n % 7},s{n % 5},{n % 2}" for n in range(200)]
    (tmp_path / "clicks.csv").write_text("\n".join(["price,colour,age,shop,clicked", *rows]))
    words = "dlrm --data csv --data-args path clicks.csv target clicked --model-args rows 8 dim 4 width 8 --batch 16"
    hvdtrain("none", 1, *words.split(), "--epochs", "1", "--run-dir", "run", cwd=tmp_path)
    summary = summary_of(tmp_path / "run")
    assert summary["parameters"] == 2 * 8 * 4 + (2 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4) + (7 * 8 + 8 + 8 * 8 + 8 + 8 + 1)
    assert 0 < summary["val_auc"] < 1
