"""Runs that begin with another run: pruned, with adapters, with a teacher; on ranks, interrupted, used and refused."""

import json

import keras
import numpy as np
import pytest

from tests.launching import errors_of, hvdtrain, summary_of

pytestmark = pytest.mark.xdist_group("tuning")  # one process makes the run that these tests begin with

QUIET = ("--plots", "False", "--tensorboard", "False")
SMALL = ("--model-args", "width", "4", "hidden", "16")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the run `first` of two epochs, of 23 steps each."""
    folder = tmp_path_factory.mktemp("home")
    hvdtrain("mpirun", 2, "digits", "--epochs", "2", "--ema", "0.9", "--run-dir", "first", *QUIET, cwd=folder)
    return folder


def trained(home, *words, ranks=2, launcher="mpirun"):
    return hvdtrain(launcher, ranks, *map(str, words), *QUIET, cwd=home)


def kernels(home, run):
    model = keras.saving.load_model(home / run / "model.keras")
    return {layer.name: layer.kernel.numpy() for layer in model.layers if hasattr(layer, "kernel")}


def evaluated(home, run):
    hvdtrain("none", 1, "evaluate", run, cwd=home)
    return json.loads((home / run / "evaluation.json").read_text())["val_accuracy"]


def test_a_run_is_pruned_in_a_run_of_its_own(home):
    before = sorted(home.joinpath("first").rglob("*"))
    words = (
        "--resume",
        "first",
        "--ema",
        "0",
        "--prune",
        "0.8",
        "--prune-pattern",
        "2:4",
        "--prune-layers",
        "conv2|hidden",
    )
    trained(home, *words, "--epochs", "3", "--run-dir", "pruned")
    found = kernels(home, "pruned")
    assert {name: round(float((kernel == 0).mean()), 3) for name, kernel in found.items()} == {
        "conv1": 0.0,
        "conv2": 0.8,
        "hidden": 0.8,
        "logits": 0.0,
    }
    groups = found["hidden"].reshape(-1, 4, found["hidden"].shape[-1])
    assert (groups != 0).sum(1).max() == 2
    first, pruned = (summary_of(home / run) for run in ("first", "pruned"))
    assert (pruned["steps"], pruned["resumed_from"]) == (69, 0)
    assert pruned["parameters"] == first["parameters"]  # masks are none
    assert pruned["val_accuracy"] > first["val_accuracy"]
    assert evaluated(home, "pruned") == pytest.approx(pruned["val_accuracy"], abs=1e-6)
    assert sorted(home.joinpath("first").rglob("*")) == before


@pytest.mark.extended
@pytest.mark.parametrize(
    "words",
    [
        ("--prune", "0.6", "--prune-epochs", "2", "--ema", "0"),
        ("--lora", "4", "--lora-layers", "hidden|logits"),
        ("--lora", "2", "--lora-layers", "hidden", "--zero", "3", "--ema", "0", "--precision", "mixed_bfloat16"),
        (*SMALL, "--teacher", "first", "--distill-temperature", "2"),
        ("--fake-quantize", "int4", "--precision", "mixed_bfloat16", "--zero", "1"),
    ],
    ids=["pruned", "adapters", "adapters in parts", "taught", "rounded"],
)
def test_what_was_interrupted_is_resumed_exactly(home, tmp_path, words):
    taught = "--teacher" in words
    start = ("digits", *words, "--epochs", "2") if taught else ("--resume", "first", *words)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(home, *start, "--run-dir", whole)
    trained(home, *start, "--run-dir", parts, "--max-steps", "30")
    if not taught:  # the weights are in its checkpoint by now
        (home / "first").rename(home / "moved")
    try:
        trained(home, "--resume", parts, "--max-steps", "None")
    finally:
        if not taught:
            (home / "moved").rename(home / "first")
    ends = [summary_of(run) for run in (whole, parts)]
    assert ends[1]["resumed_from"] == 30
    assert ends[0]["parameter_hash"] == ends[1]["parameter_hash"]
    arrays = [keras.saving.load_model(run / "model.keras").get_weights() for run in (whole, parts)]
    for one, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_channels_are_taken_out_of_what_is_written_and_used(home):
    words = ("--ema", "0", "--prune", "0.75", "--prune-pattern", "channels", "--epochs", "3", "--run-dir", "narrow")
    trained(home, "--resume", "first", *words)
    found, before = kernels(home, "narrow"), kernels(home, "first")
    assert {name: found[name].shape[-1] / before[name].shape[-1] for name in found} == {
        "conv1": 0.25,
        "conv2": 0.25,
        "hidden": 0.25,
        "logits": 1.0,
    }
    loaded = keras.saving.load_model(home / "narrow" / "model.keras")
    size = sum(weight.size for weight in np.load(exported(home, "narrow")).values())
    assert size == loaded.count_params()
    hvdtrain("none", 1, "export", "narrow", "--format", "safetensors", cwd=home)
    (row,) = (
        each
        for each in json.loads((home / "narrow" / "export" / "export.json").read_text())["models"]
        if each["name"] == "safetensors"
    )
    assert row["bytes"] < 6 * size
    assert row["accuracy"] == pytest.approx(summary_of(home / "narrow")["val_accuracy"], abs=0.05)
    assert evaluated(home, "narrow") == pytest.approx(summary_of(home / "narrow")["val_accuracy"], abs=1e-6)
    # Another run begins with it, whose channels are those of the recipe.
    words = (
        "--prune",
        "None",
        "--prune-pattern",
        "None",
        "--max-steps",
        "2",
        "--run-dir",
        "wide",
        "--learning-rate",
        "1e-9",
    )
    trained(home, "--resume", "narrow", *words)
    assert summary_of(home / "wide")["val_accuracy"] == pytest.approx(summary_of(home / "narrow")["val_accuracy"])


LAZY = """
import keras


def build(classes):
    layers = [keras.layers.Flatten(), keras.layers.Dense(32, "relu", name="hidden"), keras.layers.Dense(classes)]
    return keras.Sequential(layers)  # built by its first batch


build.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
build.metrics = ["accuracy"]
"""


@pytest.mark.extended
def test_models_that_are_built_by_their_first_batch_are_pruned_resumed_and_used(home):
    (home / "lazy.py").write_text(LAZY)
    words = ("digits", "--model", "lazy:build", "--prune", "0.5", "--run-dir", "lazy_run")
    trained(home, *words, "--epochs", "2", "--max-steps", "30")
    trained(home, "--resume", "lazy_run", "--max-steps", "None")
    assert evaluated(home, "lazy_run") == pytest.approx(summary_of(home / "lazy_run")["val_accuracy"], abs=1e-6)
    hvdtrain("none", 1, "export", "lazy_run", "--format", "safetensors", cwd=home)
    trained(
        home, "--resume", "lazy_run", "--prune", "None", "--lora", "2", "--lora-layers", "hidden", "--run-dir", "lazy_2"
    )


@pytest.mark.extended
def test_adapters_are_a_file_and_a_part_of_what_is_used(home):
    trained(home, "--resume", "first", "--lora", "4", "--lora-layers", "hidden|logits", "--run-dir", "adapted")
    first, adapted = kernels(home, "first"), kernels(home, "adapted")
    assert [name for name in first if not np.array_equal(first[name], adapted[name])] == ["hidden", "logits"]
    assert np.linalg.matrix_rank(adapted["hidden"] - first["hidden"], tol=1e-4) == 4
    assert (home / "adapted" / "adapters.safetensors").stat().st_size < 0.1 * (
        home / "first" / "model.keras"
    ).stat().st_size
    assert evaluated(home, "adapted") == pytest.approx(summary_of(home / "adapted")["val_accuracy"], abs=1e-6)
    hvdtrain("none", 1, "export", "adapted", "--format", "safetensors", cwd=home)
    hvdtrain("none", 1, "checkpoint", "export", "adapted", "--to", "adapted.npz", cwd=home)
    assert not [name for name in np.load(home / "adapted.npz") if "lora" in name]


@pytest.mark.extended
def test_a_student_is_used_without_its_teacher(home):
    (home / "teacher").mkdir()
    trained(home, "digits", "--epochs", "1", "--run-dir", "teacher/run", ranks=1, launcher="none")
    trained(home, "digits", *SMALL, "--epochs", "4", "--teacher", "teacher/run", "--run-dir", "student")
    (home / "teacher").rename(home / "gone")
    said = summary_of(home / "student")
    assert said["parameters"] == sum(weight.size for weight in np.load(exported(home, "student")).values())
    assert evaluated(home, "student") == pytest.approx(said["val_accuracy"], abs=1e-6)
    assert "step 92" in hvdtrain("none", 1, "evaluate", "student", cwd=home).out
    # With its teacher elsewhere it goes on, and another run begins with it.
    trained(home, "--resume", "student", "--teacher", "gone/run", "--epochs", "5")
    trained(home, "digits", *SMALL, "--epochs", "1", "--weights", "student", "--run-dir", "alone")
    assert summary_of(home / "alone")["val_accuracy"] > 0.9 * said["val_accuracy"]


def exported(home, run):
    hvdtrain("none", 1, "checkpoint", "export", run, "--to", f"{run}.npz", cwd=home)
    return home / f"{run}.npz"


MISTAKES = {
    "digits --weights nowhere": "nowhere: there is no run (no config.yaml in it).",
    "digits --teacher nowhere": "nowhere: there is no run (no config.yaml in it).",
    "--resume first --prune 0.5": "averages of the weights",
    "--resume first --lora 4": "lora finds no layer whose path has 'query|value'. Layers that can have an adapter: ",
    "--resume first --prune 0.5 --ema 0 --prune-layers x": "prune finds no trainable Dense, EinsumDense or",
    "digits --model-args width 4 --weights first": "first is of another model: ",
    "--resume first --lora 4 --prune 0.5": "--prune 0.5 does not go with --lora 4",
    "--resume first --run-dir other": "--resume goes on with a run as it was, in its folder: it takes no --run-dir.",
    "resnet_synthetic --teacher first": "first was trained on samples of another kind: their shape",
}


@pytest.mark.extended
def test_what_a_run_cannot_begin_with_is_one_line(home):
    commands = [["train", *words.split()] for words in MISTAKES]
    for words, said in zip(MISTAKES, errors_of(commands, cwd=home), strict=True):
        assert MISTAKES[words] in said, (words, said)
        assert len(said.splitlines()) == 1, (words, said)
    assert not (home / "runs").exists()
