"""Pruning by Keras' own `fit` in one process: how many weights go, which, when, and that they stay away."""

import keras
import numpy as np
import pytest
from keras import layers

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.export.pruning import Pruned


def model(**options):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            layers.Conv2D(8, 3, activation="relu", name="conv"),
            layers.Flatten(),
            layers.Dense(16, "relu", name="hidden", **options),
            layers.Dense(3, name="last"),
        ]
    )


def trained(net, steps, optimizer="adam"):
    draws = np.random.default_rng(0)
    x, y = draws.standard_normal((8 * steps, 8, 8, 4)), draws.integers(0, 3, 8 * steps)
    net.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return net


def zeros(net, name):
    return float((net.get_layer(name).kernel.numpy() == 0).mean())


def test_the_smallest_weights_go_and_stay_away():
    net = model()
    before = net.get_layer("hidden").kernel.numpy()
    pruned = hvdtrain.prune(net, 0.75, layers="hidden|last")
    assert [path.rpartition("/")[2] for path in pruned] == ["hidden", "last"]
    assert zeros(trained(net, 1, keras.optimizers.SGD(0.0)), "hidden") == 0.75
    kept = net.get_layer("hidden").kernel.numpy() != 0
    assert np.abs(before[kept]).min() >= np.abs(before[~kept]).max()
    trained(net, 5)
    assert (zeros(net, "hidden"), zeros(net, "last"), zeros(net, "conv")) == (0.75, 36 / 48, 0.0)
    np.testing.assert_array_equal(net.get_layer("hidden").kernel.numpy() != 0, kept)
    changed = net.get_layer("hidden").kernel.numpy() != before
    assert changed[kept].mean() > 0.4  # but for units without a gradient


def test_sparsity_grows_by_its_schedule():
    net, seen = model(), []
    hvdtrain.prune(net, 0.8, layers="hidden", begin=2, steps=6, every=3)
    for _ in range(11):
        seen.append(zeros(trained(net, 1), "hidden"))
    shares = [0.8 * (1 - (1 - done) ** 3) for done in (0, 0.5, 1)]
    size = net.get_layer("hidden").kernel.numpy().size
    expected = [round(share * size) / size for share in np.repeat([0, shares[1], shares[2]], [5, 3, 3])]
    assert seen == expected


@pytest.mark.parametrize("name", ["hidden", "conv"])
def test_a_pattern_keeps_two_of_four(name):
    net = model()
    before = net.get_layer(name).kernel.numpy()
    hvdtrain.prune(net, layers=name, pattern="2:4")
    trained(net, 1, keras.optimizers.SGD(0.0))
    groups = before.reshape(-1, before.shape[-2] // 4, 4, before.shape[-1])
    places = np.abs(groups).argsort(2).argsort(2)
    np.testing.assert_array_equal(
        net.get_layer(name).kernel.numpy(), np.where(places < 2, 0, groups).reshape(before.shape)
    )


def test_a_pattern_has_more_zeros_where_they_are_asked_for():
    net = model()
    hvdtrain.prune(net, 0.75, layers="hidden", pattern="2:4")
    trained(net, 1)
    kernel = net.get_layer("hidden").kernel.numpy()
    assert (kernel == 0).mean() == 0.75
    assert ((kernel.reshape(-1, 4, kernel.shape[-1]) != 0).sum(1)).max() == 2


def test_a_pattern_goes_along_what_attention_sums_over():
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(4, 4, name="attention")
    net = keras.Model(x, attention(x, x))
    kernels = [attention.query_dense, attention.output_dense]
    before = [layer.kernel.numpy() for layer in kernels]
    hvdtrain.prune(net, pattern="2:4")
    net.compile(keras.optimizers.SGD(0.0), "mse")
    net.fit(np.ones((2, 6, 8)), np.ones((2, 6, 8)), verbose=0)
    groups = before[0].reshape(2, 4, 4, 4)  # [features, heads, key] by four features
    expected = np.where(np.abs(groups).argsort(1).argsort(1) < 2, 0, groups).reshape(8, 4, 4)
    np.testing.assert_array_equal(kernels[0].kernel, expected)
    groups = before[1]  # [heads, key, features] by the four values of a head
    np.testing.assert_array_equal(kernels[1].kernel, np.where(np.abs(groups).argsort(1).argsort(1) < 2, 0, groups))


def test_constraints_that_were_there_go_first():
    net = model(kernel_constraint=keras.constraints.UnitNorm())
    hvdtrain.prune(net, 0.5, layers="hidden")
    trained(net, 3)
    kernel = net.get_layer("hidden").kernel.numpy()
    assert (kernel == 0).mean() == 0.5
    assert np.all(np.linalg.norm(kernel, axis=0) < 1)


def test_what_is_finished_is_a_plain_model(tmp_path):
    net, plain = model(kernel_constraint=keras.constraints.MaxNorm(9)), model()
    hvdtrain.prune(net, 0.5)
    trained(net, 2)
    expected = net.predict(np.ones((2, 8, 8, 4)), verbose=0)
    with pytest.raises(ConfigError, match=r"call hvdtrain.finish_pruning\(model\) before"):
        net.get_layer("hidden").kernel.constraint.get_config()
    assert hvdtrain.finish_pruning(net) == pytest.approx(0.5, abs=0.01)
    assert isinstance(net.get_layer("hidden").kernel.constraint, keras.constraints.MaxNorm)
    assert [weight.path.split("/", 1)[1] for weight in net.weights] == [w.path.split("/", 1)[1] for w in plain.weights]
    np.testing.assert_array_equal(net.predict(np.ones((2, 8, 8, 4)), verbose=0), expected)
    net.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(np.ones((2, 8, 8, 4)), verbose=0), expected)
    assert hvdtrain.finish_pruning(net) == 0.0  # nothing is pruned any more
    assert hvdtrain.prune(net, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, "prune takes a sparsity between 0 and 1"),
        ({"sparsity": 0.3, "pattern": "2:4"}, "and with the pattern 2:4 from 0.5. Received: 0.3"),
        ({"pattern": "4:8"}, "prune takes pattern='2:4', 'channels' or None. Received: '4:8'"),
        ({"layers": "nowhere"}, "prune finds no trainable Dense, EinsumDense or convolution whose path has 'nowhere'"),
        ({"every": 0}, "Received: begin=0, steps=0, every=0."),
    ],
)
def test_what_cannot_be_pruned_is_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        hvdtrain.prune(model(), **options)
    assert message in str(refused.value)


def test_models_that_are_not_built_pruned_already_or_not_divided_are_refused():
    with pytest.raises(ConfigError, match="Is the model built"):
        hvdtrain.prune(keras.Sequential([layers.Dense(3)]))
    net = model()
    hvdtrain.prune(net, layers="hidden")
    with pytest.raises(ConfigError, match=r"The layer 'sequential.*hidden' is pruned already"):
        hvdtrain.prune(net)
    odd = keras.Sequential([keras.Input((6,)), layers.Dense(3, name="odd")])
    with pytest.raises(ConfigError, match=r"takes inputs in groups of 4. The layer 'sequential.*odd' has 6"):
        hvdtrain.prune(odd, pattern="2:4")
    assert not isinstance(odd.get_layer("odd").kernel.constraint, Pruned)
