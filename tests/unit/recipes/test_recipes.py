"""The recipes' models and data: sizes, formulas, and whether there is something to learn."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.data import registry as sources
from hvdtrain.data.registry import load_splits
from hvdtrain.data.sources.synthetic import BASE, drawn_rows, log_odds
from hvdtrain.models.bert import IGNORED
from hvdtrain.models.registry import build_model, model_family
from hvdtrain.recipes import RECIPES, describe, recipe, run_name
from tests.extended import mostly_extended


def drawn():
    """Numbers that are the same in whatever order tests run."""
    return np.random.default_rng(0)


# -- recipes --


@pytest.mark.parametrize(
    ("recipe_name", "data", "name"),
    [("digits", "table", "table"), ("digits", "pets.data:load", "data"), ("mnist", "class_folders", "mnist")],
)
def test_a_run_of_the_default_recipe_is_called_by_its_own_data(recipe_name, data, name):
    assert run_name(replace(recipe(recipe_name), data=DataConfig(data))) == name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_names_what_there_is(name):
    config = recipe(name)
    assert config.recipe == name
    assert run_name(config) == name
    model_family(config.model)
    if config.data.data in sources.SOURCES:
        load = resolve("dataset", config.data.data, sources.SOURCES)
        check_arguments("dataset", config.data.data, load, config.data.data_args)
    assert 20 < len(describe(name)) < 120


def test_listing_recipes_imports_no_tensorflow():
    code = (
        "import sys\n"
        "from hvdtrain.cli.main import main\n"
        "main(['recipes'])\n"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == RECIPES.keys()


def test_the_wide_mlp_has_38_million_parameters():
    config = recipe("wide_mlp")
    assert build_model(config.model, (32, 32, 3), 10, 0).count_params() == 4 * (3072**2 + 3072) + 10 * 3072 + 10


# -- ResNet for large images --


@pytest.mark.parametrize(
    ("depth", "parameters"),
    mostly_extended(
        [(50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
        lambda depth, parameters: depth == 50,
        why="they are built by the same loop",
    ),
)
def test_a_large_resnet_has_the_published_number_of_parameters(depth, parameters):
    model = build_model(ModelConfig("resnet_imagenet", {"depth": depth}), (224, 224, 3), 1000, 0)
    assert sum(int(np.prod(variable.shape)) for variable in model.trainable_variables) == parameters
    convolutions = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert len([layer for layer in convolutions if "skip" not in layer.name]) + 1 == depth
    sizes = [model.get_layer(f"stage{stage}_block0_relu").output.shape[1:] for stage in range(4)]
    assert sizes == [(56, 56, 256), (28, 28, 512), (14, 14, 1024), (7, 7, 2048)]
    assert model.get_layer("stem_relu").output.shape[1:] == (112, 112, 64)


def test_blocks_begin_as_the_identity_if_gamma_is_zero():
    images = drawn().standard_normal((2, 32, 32, 3)).astype("float32")
    for zero_gamma in (True, False):
        model = build_model(ModelConfig("resnet_imagenet", {"width": 4, "zero_gamma": zero_gamma}), (32, 32, 3), 5, 0)
        gammas = [v.numpy() for v in model.trainable_variables if re.search(r"block\d+_c_norm/gamma", v.path)]
        assert len(gammas) == 16
        assert all((gamma == (0 if zero_gamma else 1)).all() for gamma in gammas)
        before, after = (model.get_layer(f"stage0_block{block}_relu").output for block in (0, 1))
        a, b = keras.Model(model.input, [before, after])(images)
        assert bool((np.array(a) == np.array(b)).all()) == zero_gamma


# -- BERT --


def masked_batch(length=12, vocabulary=9, samples=5):
    rng = drawn()
    tokens = rng.integers(0, vocabulary, (samples, length)).astype("int32")
    picked = rng.random((samples, length)) < 0.3
    picked[0], picked[1, 0] = False, True
    return tokens, np.where(picked, rng.integers(0, vocabulary, picked.shape), IGNORED).astype("int32")


def bert(**arguments):
    return build_model(ModelConfig("bert", {"depth": 2, "width": 16, "heads": 2, **arguments}), (12,), 9, 0)


def test_bert_sees_tokens_on_both_sides():
    tokens, _ = masked_batch()
    model = bert()
    for place in (0, 5, 11):
        other = tokens.copy()
        other[:, place] = (other[:, place] + 1) % 9
        moved = np.abs(np.array(model(other)) - np.array(model(tokens))).max(axis=(0, 2))
        assert (moved > 0).all()
    causal = build_model(ModelConfig("transformer", {"depth": 2, "width": 16, "heads": 2}), (12,), 9, 0)
    assert causal.count_params() == model.count_params()
    assert np.abs(np.array(causal(tokens)) - np.array(model(tokens))).max() > 1e-4


def test_bert_mini_has_the_size_of_its_name():
    # Blocks, norms and positions as in the transformer: 12 width^2 + 13 width for each of 4 blocks.
    config = recipe("bert_mini")
    assert (config.model.model_args["depth"], config.model.model_args["width"]) == (4, 256)
    model = build_model(config.model, (128,), 100, 0)
    assert model.count_params() == 2 * 100 * 256 + 100 + 128 * 256 + 2 * 256 + 4 * (12 * 256**2 + 13 * 256)


def test_only_masked_places_count():
    tokens, targets = masked_batch()
    model, family = bert(), model_family(ModelConfig("bert"))
    logits = np.array(model(tokens))
    picked = targets != IGNORED
    likelihood = np.take_along_axis(np.array(keras.ops.softmax(logits)), np.maximum(targets, 0)[..., None], 2)[..., 0]
    expected = -np.log(likelihood[picked]).mean()
    assert float(family.loss()(targets, logits)) == pytest.approx(expected, rel=1e-5)
    (accuracy,) = family.metrics()
    for rows in (slice(0, 1), slice(1, 5)):
        accuracy.update_state(targets[rows], logits[rows])
    assert accuracy.name == "accuracy"
    assert float(accuracy.result()) == pytest.approx((logits.argmax(2) == targets)[picked].mean())


@pytest.mark.parametrize("dims", [1, 2])
def test_the_accuracy_of_masked_places_takes_weights(dims):
    tokens, targets = masked_batch()
    logits = np.array(bert()(tokens))
    weights = drawn().random(targets.shape[:dims]).astype("float32")
    (accuracy,) = model_family(ModelConfig("bert")).metrics()
    accuracy.update_state(targets, logits, sample_weight=weights)
    scale = (weights if dims == 2 else weights[:, None]) * (targets != IGNORED)
    expected = ((logits.argmax(2) == targets) * scale).sum() / scale.sum()
    assert float(accuracy.result()) == pytest.approx(expected, rel=1e-5)


# -- DLRM --

SHAPE = {"numeric": (5,), "categorical": (3,)}


def dlrm(shape=SHAPE, **arguments):
    return build_model(ModelConfig("dlrm", {"rows": 11, "dim": 4, "width": 6, "depth": 1, **arguments}), shape, 2, 0)


def rows_of(count=7, highest=11):
    rng = drawn()
    return {
        "numeric": rng.standard_normal((count, 5)).astype("float32"),
        "categorical": rng.integers(0, highest, (count, 3)).astype("int32"),
    }


def test_dlrm_computes_what_its_paper_says():
    model, rows = dlrm(), rows_of()
    kept = {weight.path: weight.numpy() for weight in model.weights}

    def dense(x, name, *, relu=True):
        y = x @ kept[f"{name}/kernel"] + kept[f"{name}/bias"]
        return np.maximum(y, 0) if relu else y

    vectors = [dense(dense(rows["numeric"], "numbers_hidden0"), "numbers_out")]
    vectors += [kept[f"table{field}/embeddings"][rows["categorical"][:, field]] for field in range(3)]
    dots = [(vectors[a] * vectors[b]).sum(axis=1) for a in range(4) for b in range(a)]
    features = np.concatenate([vectors[0], np.stack(dots, axis=1)], axis=1)
    expected = dense(dense(features, "features_hidden0"), "log_odds", relu=False)
    odds = np.array(model(rows))
    assert odds.shape == (7, 1)
    assert np.abs(odds - expected).max() < 1e-5
    assert odds.std() > 1e-3


def test_dlrm_has_its_tables_and_two_mlps():
    n, dim, width = 26, 16, 128
    model = build_model(recipe("dlrm").model, {"numeric": (13,), "categorical": (n,)}, 2, 0)
    numbers = 13 * width + width + width * width + width + width * dim + dim
    products = (n + 1) * n // 2
    features = (dim + products) * width + width + width * width + width + width + 1
    assert model.count_params() == n * 1000 * dim + numbers + features


def test_categories_beyond_the_table_share_its_rows():
    model, rows = dlrm(), rows_of()
    beyond = rows | {"categorical": rows["categorical"] + 11 * np.array([1, 0, 5])}
    assert (np.array(model(beyond)) == np.array(model(rows))).all()


def test_the_loss_and_metrics_of_dlrm_take_log_odds():
    rows, labels = rows_of(200), drawn().integers(0, 2, 200).astype("int32")
    odds = np.array(dlrm()(rows))
    odds /= odds.std()
    family = model_family(ModelConfig("dlrm"))
    loss = float(family.loss()(labels, odds))
    expected = np.logaddexp(0, np.where(labels == 1, -1, 1) * odds[:, 0].astype(np.float64)).mean()
    assert loss == pytest.approx(expected, rel=1e-5)
    accuracy, auc = family.metrics()
    for metric in (accuracy, auc):
        metric.update_state(labels, odds)
    assert float(accuracy.result()) == pytest.approx(((odds[:, 0] > 0) == labels).mean())
    assert float(auc.result()) == pytest.approx(area_under_curve(labels, odds[:, 0]), abs=0.01)  # 200 thresholds


@pytest.mark.parametrize(
    ("shape", "classes", "arguments", "cause"),
    [
        (SHAPE, 2, {"rows": 0}, "dlrm needs positive sizes. Received: rows=0, dim=16, width=128, depth=2."),
        (SHAPE, 3, {}, "its labels are 0 and 1. The data have 3 classes."),
        ((8, 8, 1), 2, {}, "takes samples numeric [numbers], categorical [fields]; the data's are of shape (8, 8, 1)."),
        ({"numeric": (5,)}, 2, {}, "takes samples numeric [numbers], categorical [fields]; the data's are of shape {"),
        (SHAPE | {"numeric": (5, 2)}, 2, {}, "the data's are of shape {'numeric': (5, 2), 'categorical': (3,)}."),
    ],
)
def test_what_makes_no_dlrm_is_refused(shape, classes, arguments, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        build_model(ModelConfig("dlrm", arguments), shape, classes, 0)


@pytest.mark.parametrize("arguments", [{"depth": 18}, {"width": 0}])
def test_what_makes_no_large_resnet_is_refused(arguments):
    with pytest.raises(
        ConfigError, match=r"26, 50, 101 or 152 layers, and a positive width. Received: depth=\d+, width="
    ):
        build_model(ModelConfig("resnet_imagenet", arguments), (32, 32, 3), 5, 0)


# -- synthetic clicks --


def clicks(**arguments):
    return load_splits(DataConfig("synthetic_clicks", arguments))


def test_clicks_are_rows_of_numbers_and_categories():
    splits = clicks(samples=800, rows=50, numbers=4, fields=3)
    assert (splits.train.size, splits.validation.size, splits.classes) == (800, 100, 2)
    inputs, labels = splits.train.gather(tf.range(800))
    assert splits.sample_shape == {"numeric": (4,), "categorical": (3,)}
    assert (inputs["numeric"].dtype, inputs["categorical"].dtype, labels.dtype) == (tf.float32, tf.int32, tf.int32)
    assert (int(tf.reduce_min(inputs["categorical"])), int(tf.reduce_max(inputs["categorical"]))) == (0, 49)
    assert set(labels.numpy()) == {0, 1}
    assert clicks(samples=800).train.fingerprint() == clicks(samples=800).train.fingerprint()


def test_few_categories_are_frequent():
    categorical = drawn_rows(drawn(), 20_000, 1000, 1, 2)["categorical"]
    for field in range(2):
        counts = np.sort(np.bincount(categorical[:, field], minlength=1000))[::-1]
        # 1 / sum of r^-1.1 over a thousand ranks is 0.18, and the tenth is 10^-1.1 of it.
        assert counts[0] / 20_000 == pytest.approx(0.18, abs=0.01)
        assert counts[9] / counts[0] == pytest.approx(10**-1.1, rel=0.15)
    first, second = (np.bincount(categorical[:, field]).argmax() for field in range(2))
    assert first != second


def area_under_curve(labels, scores):
    """The share of pairs of a 1 and a 0 of which the 1 has the higher score."""
    ranks, ones = scores.argsort().argsort() + 1, int(labels.sum())
    return (ranks[labels == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))


def logistic_regression(columns, labels):
    """The weights by Newton's method, with the square of the weights added to the loss."""
    weights = np.zeros(columns.shape[1])
    for _ in range(8):
        odds = 1 / (1 + np.exp(-columns @ weights))
        curvature = columns.T @ (columns * (odds * (1 - odds))[:, np.newaxis]) + np.eye(len(weights))
        weights -= np.linalg.solve(curvature, columns.T @ (odds - labels) + weights)
    return weights


@pytest.mark.extended
def test_there_is_something_to_learn_from_clicks_and_a_bound_on_it():
    splits = clicks(samples=16_384)
    inputs, labels = splits.train.gather(tf.range(splits.train.size))
    held, answers = splits.validation.gather(tf.range(splits.validation.size))
    labels, answers = labels.numpy(), answers.numpy()
    assert 0.25 < labels.mean() < 0.4

    def columns(part):
        frequent = [part["categorical"].numpy()[:, [field]] == favourites[field] for field in range(26)]
        return np.concatenate([np.ones((len(frequent[0]), 1)), part["numeric"].numpy(), *frequent], axis=1)

    favourites = [np.bincount(column).argsort()[::-1][:20] for column in inputs["categorical"].numpy().T]
    linear = area_under_curve(answers, columns(held) @ logistic_regression(columns(inputs), labels))
    # The same draws again, to see the log odds behind the labels: nobody can do better than these.
    rng = np.random.default_rng(0)
    rows = drawn_rows(rng, len(labels) + len(answers), 1000, 13, 26)
    rng.random(len(labels) + len(answers))
    best = area_under_curve(answers, log_odds(rng, rows, 1000)[len(labels) :])
    assert 0.65 < linear < best - 0.02
    assert best == pytest.approx(0.85, abs=0.05)


def test_the_log_odds_have_the_stated_mean_and_spread():
    odds = log_odds(np.random.default_rng(1), drawn_rows(drawn(), 5000, 100, 13, 26), 100)
    assert odds.mean() == pytest.approx(BASE)
    assert odds.std() == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["samples", "rows", "numbers", "fields"])
def test_clicks_of_no_size_are_refused(name):
    with pytest.raises(ConfigError, match=f"synthetic_clicks needs positive sizes. Received: .*{name}=0"):
        clicks(**{name: 0})


def test_json_of_a_recipe_is_plain():
    # Arguments are scalars: they are typed on the command line and kept in config.yaml.
    for name in RECIPES:
        config = recipe(name)
        json.dumps([config.model.model_args, config.data.data_args, config.optim.optimizer_args])
