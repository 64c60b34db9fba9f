import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.training.objective.losses import summed_loss

SAMPLES, LENGTH, CLASSES = 6, 5, 3
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((SAMPLES, LENGTH, CLASSES)).astype("float32")
LABELS = RNG.integers(0, CLASSES, (SAMPLES, LENGTH))
MASK = RNG.random((SAMPLES, LENGTH)) < 0.6
WEIGHTS = {
    "none": None,
    "one per sample": RNG.random((SAMPLES, 1)).astype("float32"),
    "one per element": RNG.random((SAMPLES, LENGTH)).astype("float32"),
    "zeros": np.zeros((SAMPLES, 1), "float32"),
}


def masked(outputs, mask):
    tensor = tf.constant(outputs)
    if mask is not None:
        tensor._keras_mask = tf.constant(mask)
    return tensor


def mean_of(parts):
    total, weight = (sum(float(getattr(part, name)) for part in parts) for name in ("total", "weight"))
    return total / weight if weight else 0.0


def part(loss, rows, mask=None, weights=None):
    """The loss over some of the samples."""
    outputs = masked(LOGITS[rows], None if mask is None else mask[rows])
    return summed_loss(loss)(LABELS[rows], outputs, None if weights is None else weights[rows])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("mask", [None, MASK, np.zeros_like(MASK)], ids=["no mask", "mask", "all masked"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_the_parts_add_up_to_what_keras_says_of_the_whole(reduction, mask, weights):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    # Where one weight stands for a whole sequence, Keras counts it once if there is no mask and for every element
    # if there is one; here it is always the second.
    spread = None if WEIGHTS[weights] is None else np.broadcast_to(WEIGHTS[weights], LABELS.shape)
    expected = float(loss(LABELS, masked(LOGITS, mask), sample_weight=spread))
    cuts = [slice(0, 1), slice(1, 4), slice(4, SAMPLES)]
    for cut in ([slice(0, SAMPLES)], cuts):
        parts = [part(loss, rows, mask, WEIGHTS[weights]) for rows in cut]
        np.testing.assert_allclose(mean_of(parts), expected, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
def test_classes_that_the_loss_ignores_do_not_count(reduction, mask):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction)
    expected = float(loss(LABELS, masked(LOGITS, mask)))
    parts = [part(loss, rows, mask) for rows in (slice(0, 2), slice(2, SAMPLES))]
    np.testing.assert_allclose(mean_of(parts), expected, rtol=1e-5)
    assert not parts[0].uniform


def test_a_weight_for_each_sample_holds_for_all_its_elements():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    flat, column = (
        part(loss, slice(None), weights=w) for w in (WEIGHTS["one per sample"][:, 0], WEIGHTS["one per sample"])
    )
    assert float(flat.total) == float(column.total)


@pytest.mark.parametrize(
    ("reduction", "mask", "weights", "uniform"),
    [
        ("sum_over_batch_size", None, "none", True),
        ("sum_over_batch_size", None, "one per sample", True),  # the divisor is the number of elements
        ("sum_over_batch_size", MASK, "none", False),
        ("mean_with_sample_weight", None, "none", True),
        ("mean_with_sample_weight", None, "one per sample", False),
        ("mean_with_sample_weight", MASK, "none", False),
    ],
)
def test_the_weight_is_known_beforehand_only_where_every_element_counts_once(reduction, mask, weights, uniform):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    rows = slice(1, 4)
    got = part(loss, rows, mask, WEIGHTS[weights])
    assert got.uniform is uniform
    assert float(got.elements_per_sample) == LENGTH
    if uniform:
        assert float(got.weight) == 3 * LENGTH


def test_masked_elements_may_hold_anything():
    logits = LOGITS.copy()
    logits[~MASK] = np.nan
    got = summed_loss("mse")(LOGITS, masked(logits, MASK), None)
    assert np.isfinite(float(got.total))
    assert float(got.weight) == MASK.sum()


@pytest.mark.parametrize(
    ("loss", "keras_loss"),
    [
        ("mse", keras.losses.MeanSquaredError()),
        ("mean_absolute_error", keras.losses.MeanAbsoluteError()),
        (keras.losses.huber, keras.losses.Huber()),
        (keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError()),
        (lambda targets, outputs: tf.reduce_mean(abs(targets - outputs), -1), keras.losses.MeanAbsoluteError()),
    ],
    ids=["name", "long name", "function", "object", "own function"],
)
def test_a_loss_may_be_given_in_every_way_keras_takes(loss, keras_loss):
    x, y = RNG.standard_normal((2, 7, 4)).astype("float32")
    got = summed_loss(loss)(tf.constant(y), tf.constant(x), None)
    np.testing.assert_allclose(float(got.total / got.weight), float(keras_loss(y, x)), rtol=1e-5)
    assert float(got.weight) == 7


@pytest.mark.parametrize("reduction", ["sum", "none", None])
def test_a_reduction_that_is_no_mean_is_refused(reduction):
    with pytest.raises(ConfigError, match=rf'reduces by {reduction!r}.*Use reduction="sum_over_batch_size"'):
        summed_loss(keras.losses.MeanSquaredError(reduction=reduction))


@pytest.mark.parametrize("compiled", [False, True])
def test_one_number_for_the_whole_batch_is_refused(compiled):
    loss = summed_loss(lambda targets, outputs: tf.reduce_mean(tf.square(targets - outputs)))
    call = tf.function(loss, autograph=False) if compiled else loss
    with pytest.raises(ConfigError, match="one value for each sample is needed"):
        call(tf.zeros([3, 2]), tf.ones([3, 2]), None)


def test_the_gradient_is_that_of_kerass_mean():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = tf.Variable(LOGITS)
    with tf.GradientTape(persistent=True) as tape:
        got = summed_loss(loss)(LABELS, logits, WEIGHTS["one per sample"])
        ours, theirs = got.total / got.weight, loss(LABELS, logits, sample_weight=WEIGHTS["one per sample"])
    np.testing.assert_allclose(tape.gradient(ours, logits), tape.gradient(theirs, logits), rtol=1e-5, atol=1e-8)


RANKS = [([8], [8, 1]), ([8, 1], [8]), ([8, 1], [8, 1]), ([8, 5], [8, 5]), ([8, 5, 1], [8, 5])]


LOSSES = ["hinge", "squared_hinge", "poisson", "kl_divergence", "binary_crossentropy", "mse", lambda a, b: (a - b) ** 2]
DTYPES = ["float32", "int64", "float64"]


@pytest.mark.parametrize(  # each loss with each rank, and each of these with each type
    ("loss", "targets", "outputs", "dtype"),
    [(loss, *ranks, DTYPES[(i + j) % 3]) for i, loss in enumerate(LOSSES) for j, ranks in enumerate(RANKS)],
)
def test_targets_of_another_rank_and_type_are_taken_as_keras_takes_them(loss, targets, outputs, dtype):
    rng = np.random.default_rng(4)
    y = (rng.random(targets) > 0.5).astype(dtype)
    x = tf.constant(rng.random(outputs), tf.float32)
    model = keras.Sequential([keras.Input(outputs[1:]), keras.layers.Identity()])
    model.compile("sgd", loss, auto_scale_loss=False)
    expected = float(model.evaluate(x, y, batch_size=8, verbose=0))
    part = summed_loss(loss)(tf.constant(y), x, None)
    assert float(part.total / part.weight) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_sample_weights_may_have_a_last_dim_of_one_and_must_fit():
    x, y = tf.constant([[1.0], [2.0]]), tf.constant([[0.0], [0.0]])
    part = summed_loss("mse")(y, x, tf.constant([[2.0], [1.0]]))
    assert float(part.total) == 2.0 * 1.0 + 1.0 * 4.0
    with pytest.raises(ConfigError, match=r"of shape \(2, 3\) do not fit losses of shape \(2,\)"):
        summed_loss("mse")(y, x, tf.ones([2, 3]))


@pytest.mark.parametrize("loss", [["mse"], {"out": "mse"}])
def test_the_loss_of_one_output_may_stand_in_a_list_or_dict(loss):
    x, y = tf.constant([[1.0], [2.0]]), tf.constant([[0.0], [0.0]])
    part = summed_loss(loss, [2.0])(y, x, None)
    assert float(part.total / part.weight) == 5.0
    with pytest.raises(ConfigError, match="loss has 2 entries, and the model has one output"):
        summed_loss(["mse", "mae"])(y, x, None)
