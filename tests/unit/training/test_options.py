"""Options of the training step: each wrong one is refused before anything is trained."""

import re
import subprocess
import sys
from typing import get_type_hints

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError, DataError, NonFiniteError, on_command_line
from hvdtrain.config.training import ExchangeConfig, TrainingConfig
from hvdtrain.gradients.accumulator import GradientAccumulator
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.observability.events import RunInfo
from hvdtrain.optim.clipping import Clipping, clip_by_norm, clip_by_value, global_norm
from hvdtrain.optim.precision import (
    LossScaleOptimizer,
    loss_scale_of,
    precision,
    with_loss_scaling,
)
from hvdtrain.training.advice import advice, crowded
from hvdtrain.training.callbacks.loss_monitor import LossMonitor
from hvdtrain.training.options import StepOptions, TrainerOptions, step_options
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.trainer import Trainer
from tests.builders import samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(32, 4, 4)


def model(**options):
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, **options)])


def trainer(**options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Trainer(options.pop("model", model)(), options.pop("optimizer", "sgd"), loss, **options)


def synchronized():
    norm = hvdtrain.SyncBatchNormalization(name="norm")
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), norm])


def recomputing():
    return keras.Sequential([keras.Input((4,)), hvdtrain.Recompute(keras.layers.Dense(4))])


class Subclassed(keras.Model):
    def call(self, inputs):
        return inputs


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)

    def gradients(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data[0])))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        _, gradients = self.gradients(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"accuracy": 1.0}


class OwnStepTwice(OwnStep):
    def train_step(self, data):
        self.optimizer.apply(self.gradients(data)[1], self.trainable_variables)
        return super().train_step(data)


class OwnStepByHand(OwnStep):
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


class OwnStepCompiled(OwnStep):
    @tf.function
    def train_step(self, data):
        loss, gradients = self.gradients(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class OwnStepOfNorms(OwnStepTwice):
    def __init__(self):
        super().__init__()
        self.norm = hvdtrain.SyncBatchNormalization()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deterministic": True}, "Trainer takes no option 'deterministic'. It is one of hvdtrain.init()."),
        ({"acumulate": 2}, "Trainer takes no option 'acumulate'. Perhaps you meant: accumulate."),
        ({"jit": True, "sync_batch_norm": True}, "jit does not go with sync_batch_norm: XLA cannot compile"),
        ({"model": synchronized, "jit": True}, "jit does not go with SyncBatchNormalization 'norm'"),
        ({"model": synchronized, "reduce_op": "adasum"}, "reduce_op='adasum' does not go with SyncBatchNormalization"),
        ({"sync_batch_norm": True}, "has no effect: the model has no BatchNormalization layer"),
        ({"recompute": True}, "recompute saves nothing on Sequential"),
        ({"model": Subclassed, "recompute": True}, "recompute cuts Functional and Sequential models into segments"),
        ({"optimizer": keras.optimizers.Lamb(), "zero": 1}, "zero=1 does not go with Lamb, which looks at whole"),
        ({"optimizer": keras.optimizers.SGD(clipnorm=1.0), "zero": 1}, "zero=1 does not go with SGD(clipnorm=…)"),
        ({"precision": "mixed_float16", "local_steps": 2}, "LossScaleOptimizer, which scales .* with local_steps=2"),
        ({"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2)}, "accumulate=K"),
        ({"optimizer": LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))}, "accumulate=K"),
        ({"optimizer": DistributedOptimizer(keras.optimizers.SGD())}, "Trainer exchanges gradients, and Distributed"),
        ({"model": recomputing, "jit": True}, "jit does not go with Recompute 'recompute.*': XLA merges the second"),
        ({"precision": "float16"}, "precision should be 'float32', 'mixed_float16' or 'mixed_bfloat16'"),
        ({"jit": "perhaps"}, "jit should be a valid boolean"),
        ({"sparse_gradients": "x"}, "sparse_gradients should be 'auto', 'gather' or 'dense'. Received: 'x'."),
        ({"accumulate": 2.5}, "accumulate should be a valid integer"),
        ({"clip_norm": "much"}, "clip_norm should be a valid number"),
        ({"reduce_op": "mean"}, "reduce_op should be 'average', 'sum' or 'adasum'. Received: 'mean'."),
        ({"outer_optimizer": "slowmo"}, "outer_optimizer='slowmo' has no effect without local_steps"),
        ({"local_steps": 2, "outer_momentum": 0.5}, "outer_momentum=0.5 has no effect without outer_optimizer"),
        ({"local_after": 2}, "local_after=2 has no effect without local_steps"),
        ({"update": "local"}, "update='local' needs local_steps"),
        ({"update": "async", "local_steps": 2}, "does not go with"),
        ({"update": "async", "zero": 1}, "update='async' does not go with zero=1: it is an update rule of its own"),
        ({"update": "async", "desync_every": 5}, "does not go with desync_every=5: workers differ until they meet"),
        ({"update": "async", "on_bad_step": "skip"}, "workers cannot agree on skipped steps"),
        ({"update": "async", "compression": "bf16"}, "does not go with compression='bf16': gradients are not reduced"),
        ({"update": "async", "sync_batch_norm": True}, "workers go on at their own pace"),
        ({"update": "async", "precision": "mixed_float16"}, "each worker would have a scale of its own"),
        (
            {"update": "async", "optimizer": keras.optimizers.SGD(global_clipnorm=1.0)},
            "each server would clip by the norm of its own variables",
        ),
        ({"max_staleness": 2}, "max_staleness=2 has no effect without update"),
        ({"pull_ahead": True}, "pull_ahead has no effect without update"),
        ({"compensation": "rate"}, "compensation='rate' has no effect without update"),
        ({"update": "async", "dc_strength": 0.1}, "has no effect without compensation"),
        ({"update": "async", "max_staleness": 0, "pull_ahead": True}, "nothing may be stale"),
        ({"update": "async", "max_staleness": 0, "compensation": "rate"}, "nothing is stale"),
        ({"update": "async", "max_staleness": -1}, "max_staleness"),
        (
            {"update": "gossip", "outer_optimizer": "diloco", "local_steps": 2},
            "nothing is averaged over all ranks",
        ),
        ({"gossip_graph": "exponential"}, "gossip_graph='exponential' has no effect without update='gossip'"),
        ({"elasticity": 0.1}, "elasticity=0.1 has no effect without update='easgd'"),
        ({"update": "easgd", "elasticity": 1.5}, "elasticity"),
        ({"record": "order.json"}, "record='order.json' has no effect without update"),
        ({"replay": "order.json"}, "replay='order.json' has no effect without update"),
        ({"compression": "int8"}, "compression should be 'none', 'fp16' or 'bf16'. Received: 'int8'."),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        trainer(**options)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
@pytest.mark.parametrize(
    ("options", "said"),
    [({"update": rule}, f"does not go with update='{rule}'") for rule in ("async", "gossip", "easgd", "hybrid")]
    + [
        (
            {"local_steps": 2, "outer_optimizer": "slowmo"},
            "it divides by one learning rate. Use outer_optimizer='diloco'",
        )
    ],
)
def test_an_optimizer_of_several_is_refused_on_servers_and_by_slowmo(options, said):
    optimizers = keras.optimizers
    several = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(), {".*/bias": optimizers.SGD()}))
    with pytest.raises(
        ConfigError, match=f"MultiOptimizer, which takes the gradients of all variables at once, .*{said}"
    ):
        trainer(**options, optimizer=several)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            OwnStepTwice,
            {"accumulate": 2},
            "accumulate=2 does not .* OwnStepTwice, .*[.] Leave it out, or use hvdtrain.GradientAccumulator",
        ),
        (OwnStepTwice, {"jit": True}, "jit does not go with the train_step of OwnStepTwice"),
        (OwnStepTwice, {"zero": 1}, "zero=1 does not go with the train_step of OwnStepTwice, which applies gradients"),
        (
            OwnStepOfNorms,
            {"whole_batch": False},
            "the train_step of OwnStepOfNorms.* does not go with SyncBatchNormalization",
        ),
    ],
)
def test_a_step_that_applies_gradients_several_times_takes_few_options(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        trainer(model=kind, **options).fit((X, Y), batch=8, verbose=0)


@pytest.mark.parametrize(
    "options",
    mostly_extended(
        [{"zero": 1}, {"zero": 3}, {"accumulate": 2}, {"local_steps": 1}, {"on_bad_step": "skip"}, {"jit": True}],
        lambda options: "accumulate" in options or options.get("zero") == 3,
        why="one takes the step in parts, one other weights; the rest act on gradients",
    ),
)
def test_a_step_of_the_models_own_that_applies_gradients_once_takes_them(options):
    def trained(**options):
        keras.utils.set_random_seed(0)
        mine = trainer(model=OwnStep, **options)
        mine.fit((X, Y), batch=8, epochs=2, shuffle=False, verbose=0)
        return mine.model.get_weights()

    for ours, plain in zip(trained(**options), trained(), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("section", [TrainingConfig, ExchangeConfig])
def test_flags_and_options_have_the_same_names_and_defaults(section):
    options = StepOptions()
    shared = {name: value for name, value in vars(section()).items() if hasattr(options, name)}
    assert shared
    shared.pop("precision", None)  # a builder's precision is Keras' own unless it is asked for
    assert step_options(shared) == options


@pytest.mark.parametrize(("batch", "replicas", "accumulate", "samples"), [(64, 2, 4, 8), (64, 1, 1, 64), (6, 3, 2, 1)])
def test_a_microbatch_is_the_batch_by_ranks_and_pieces(batch, replicas, accumulate, samples):
    assert per_microbatch(batch, replicas, accumulate) == samples


def test_a_microbatch_must_divide(capsys):
    with pytest.raises(ConfigError, match="do not divide into 3 microbatches"):
        trainer(accumulate=3).fit((X, Y), batch=16)
    shown = capsys.readouterr()
    assert shown.out == shown.err == "", "a run that does not begin is not announced"
    with pytest.raises(ConfigError, match=r"The 32 samples .* 64 do not divide into 3 .*batch=60 or batch=66"):
        per_microbatch(64, 2, 3)


# -- clipping --


def gradients():
    rows = tf.IndexedSlices(tf.constant([[3.0, 0.0]]), tf.constant([1]), tf.constant([4, 2]))
    return [tf.constant([0.0, -4.0]), None, rows]


def test_the_norm_is_over_all_gradients_dense_and_sparse():
    assert float(global_norm(gradients())) == 5.0


NORMS = """
import sys
import tensorflow as tf
from hvdtrain.optim.clipping import global_norm
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
for seed, elements in enumerate((4095, 4096, 4097, *(3_000_001,) * 4)):
    values = tf.random.stateless_normal([elements], (seed, 2))
    exact = tf.sqrt(tf.reduce_sum(tf.square(tf.cast(values, tf.float64))))
    compiled = tf.function(lambda v: global_norm([v]), input_signature=[tf.TensorSpec([None])])
    norms = [float(global_norm([values])), float(compiled(values))]
    print(*(norm.hex() for norm in norms), all(abs(norm - float(exact)) < 1e-7 * norm for norm in norms))
"""


@pytest.mark.extended  # TensorFlow starts twice
def test_the_norm_may_be_beyond_the_range_of_the_gradient():
    gradients = [tf.fill([2000], tf.constant(200.0, tf.float16)), tf.constant([3e4], tf.float16)]
    norm = global_norm(gradients)
    assert float(norm) == pytest.approx((2000 * 200.0**2 + float(np.float16(3e4)) ** 2) ** 0.5, rel=1e-6)
    clipped = Clipping(norm=100.0).apply(gradients, norm)
    assert float(clipped[0][0]) == pytest.approx(200.0 * 100.0 / float(norm), rel=2e-3)


@pytest.mark.extended
def test_the_norm_is_the_same_with_any_number_of_threads():
    """Ranks on hosts with other numbers of cores would clip the same gradient differently."""
    said = []
    for threads in (1, 16):
        job = subprocess.run([sys.executable, "-c", NORMS, str(threads)], capture_output=True, text=True, timeout=120)
        assert job.returncode == 0, job.stderr
        said.append(job.stdout)
    assert said[0] == said[1]
    lines = [line.split() for line in said[0].splitlines()]
    assert len(lines) == 7
    assert all(one == other and close == "True" for one, other, close in lines), said[0]


@pytest.mark.parametrize(("bound", "norm"), [(1.0, 1.0), (5.0, 5.0), (9.0, 5.0)])
def test_clipping_by_norm_keeps_the_direction(bound, norm):
    clipped = clip_by_norm(gradients(), global_norm(gradients()), bound)
    np.testing.assert_allclose(float(global_norm(clipped)), norm, rtol=1e-6)
    np.testing.assert_allclose(clipped[0], np.array([0.0, -4.0]) * norm / 5, rtol=1e-6)
    assert clipped[1] is None
    assert clipped[2].indices.numpy().tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_hides_nothing_that_is_not_finite(bad):
    broken = [tf.constant([bad, 1.0])]
    assert not np.isfinite(clip_by_norm(broken, global_norm(broken), 1.0)[0].numpy()).all()


def test_clipping_by_value_bounds_each_element():
    dense, _, rows = clip_by_value(gradients(), 2.0)
    assert dense.numpy().tolist() == [0.0, -2.0]
    assert rows.values.numpy().tolist() == [[2.0, 0.0]]
    assert Clipping().apply(gradients(), None)[0].numpy().tolist() == [0.0, -4.0]


@pytest.mark.parametrize(
    ("option", "reference", "scaled"),
    [("clip_norm", "global_clipnorm", True), ("clip_value", "clipvalue", False)],
)
def test_clipping_is_what_keras_does_with_dense_gradients(option, reference, scaled):
    def run(**options):
        keras.utils.set_random_seed(0)
        inner = keras.optimizers.SGD(0.5, **{k: v for k, v in options.items() if k == reference})
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0) if scaled else inner
        mine = trainer(optimizer=optimizer, **{k: v for k, v in options.items() if k == option})
        mine.fit((X, Y), batch=8, epochs=1, shuffle=False, verbose=False)
        return mine.model.get_weights()

    for ours, keras_own, free in zip(run(**{option: 0.05}), run(**{reference: 0.05}), run(), strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-5, atol=1e-7)
        assert not np.allclose(ours, free, rtol=1e-3)


# -- precision --


@pytest.mark.parametrize(
    ("policy", "layer", "given", "scaled"),
    [
        ("mixed_float16", None, {}, True),
        ("mixed_float16", None, {"auto_scale_loss": False}, False),
        ("float16", None, {}, False),
        ("float32", "mixed_float16", {}, False),
        ("mixed_bfloat16", None, {}, False),
    ],
)
def test_losses_are_scaled_where_compile_of_keras_scales_them(policy, layer, given, scaled):
    with precision(policy):
        compiled, plain = model(dtype=layer), model(dtype=layer)
    compiled.compile(keras.optimizers.SGD(), "mse", **given)
    assert isinstance(compiled.optimizer, keras.optimizers.LossScaleOptimizer) is scaled
    trainer = Trainer(compiled)
    assert trainer.optimizer is compiled.optimizer
    if not given:
        assert isinstance(Trainer(plain, "sgd", "mse").optimizer, keras.optimizers.LossScaleOptimizer) is scaled


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("jit_compile", "Perhaps you meant: jit."),
        ("lr", r"It is the optimizer's: Trainer\(model, keras.optimizers.SGD\(0.1\), loss\)"),
        ("epochs", r"It is an argument of fit\(\)"),
        ("hang_timeout", r"It is one of hvdtrain.init\(\)"),
        ("acumulate", "Perhaps you meant: accumulate"),
        ("metric", "Perhaps you meant: metrics"),
    ],
)
def test_options_of_something_else_are_told_where_they_belong(name, advice):
    with pytest.raises(ConfigError, match=rf"Trainer takes no option '{name}'. {advice}"):
        trainer(**{name: 1})


def test_fp16_models_get_loss_scaling_and_others_do_not():
    half = Trainer(model, "sgd", "mse", precision="mixed_float16")
    assert isinstance(half.optimizer, LossScaleOptimizer)
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    assert with_loss_scaling(own) is own
    assert not isinstance(Trainer(model, "sgd", "mse").optimizer, LossScaleOptimizer)
    assert loss_scale_of(keras.optimizers.SGD()) == 1.0
    assert loss_scale_of(keras.optimizers.SGD(loss_scale_factor=8.0)) == 8.0


def functional():
    inputs = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(9, 8)(inputs)
    hidden = keras.layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))(hidden)
    inner = keras.Sequential([keras.Input((6, 8)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    hidden = keras.layers.LayerNormalization(dtype="float32")(keras.layers.Flatten()(inner(hidden)))
    return keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(keras.layers.Dense(3)(hidden)))


class Late(keras.layers.Layer):
    """Makes its layer when it is built, under whatever policy holds then."""

    def build(self, shape):
        self.inner = keras.layers.Dense(3)
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.late, self.head = keras.layers.Dense(4), Late(), keras.layers.Dense(2, dtype="float32")

    def call(self, inputs):
        return self.head(self.late(self.first(inputs)))


@pytest.mark.parametrize("build", [pytest.param(functional, marks=pytest.mark.extended), Subclassed])
def test_a_model_that_is_there_computes_as_one_built_with_the_precision(build):
    inputs = np.random.default_rng(0).integers(0, 9, (5, 6)).astype("int32" if build is functional else "float32")
    outputs = {}
    for kind in ("function", "instance"):
        keras.utils.set_random_seed(0)
        mixed = Trainer(build if kind == "function" else build(), "sgd", "mse", precision="mixed_bfloat16")
        outputs[kind] = mixed.predict(inputs, verbose=0)
        assert {v.dtype for v in mixed.model.weights} == {"float32"}
        mixed.fit(inputs, np.ones((5, 2)), verbose=0)
        outputs[f"{kind} trained"] = mixed.predict(inputs)
    keras.utils.set_random_seed(0)
    plain = Trainer(build(), "sgd", "mse").predict(inputs)
    np.testing.assert_array_equal(outputs["instance"], outputs["function"])
    np.testing.assert_array_equal(outputs["instance trained"], outputs["function trained"])
    assert not np.array_equal(outputs["instance"], plain), "nothing was computed in 16 bits"
    if build is functional:  # the function of the subclassed one makes a layer late as well
        assert "bfloat16" in {layer.compute_dtype for layer in mixed.model._flatten_layers()}
    assert keras.config.dtype_policy().name == "float32"


def test_a_loaded_model_keeps_the_dtype_of_its_outputs(tmp_path):
    functional().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    half = Trainer(loaded, "sgd", "mse", precision="mixed_float16")
    assert isinstance(half.optimizer, LossScaleOptimizer)
    assert (half.model.layers[-1].compute_dtype, half.model.layers[-2].compute_dtype) == ("float32", "float16")
    back = Trainer(half.model, "sgd", "mse", precision="float32")
    assert {layer.compute_dtype for layer in back.model._flatten_layers()} == {"float32"}


def test_a_precision_that_a_model_cannot_have_is_refused():
    with precision("mixed_bfloat16"):
        keras.config.set_dtype_policy("float64")
        wide = model()
    with pytest.raises(ConfigError, match=r"needs float32 variables\. Received: .* float64\. Pass a function"):
        Trainer(wide, "sgd", "mse", precision="mixed_bfloat16")
    named = "The function builds a model of the dtype policy float32, and precision='mixed_bfloat16'"
    ready = model()
    with pytest.raises(ConfigError, match=named):
        Trainer(lambda: ready, "sgd", "mse", precision="mixed_bfloat16")


def test_a_fixed_loss_scale_changes_nothing():
    def run(**options):
        keras.utils.set_random_seed(0)
        mine = trainer(optimizer=keras.optimizers.SGD(0.5, **options))
        mine.fit((X, Y), batch=8, epochs=1, shuffle=False, verbose=False)
        return mine.model.get_weights()

    for scaled, plain in zip(run(loss_scale_factor=512.0), run(), strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_loss_scaling_looks_at_rows_without_making_them_dense():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    table = [tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([0, 10**9]), tf.constant([2 * 10**9, 1]))]
    assert bool(optimizer.check_finite([*table, None]))
    table[0] = tf.IndexedSlices(tf.constant([[1.0], [np.inf]]), tf.constant([0, 5]), tf.constant([9, 1]))
    assert not bool(optimizer.check_finite(table))


def settle(rows, **options):
    loss_monitor = LossMonitor(10, skips=True)
    for row in rows:
        loss_monitor.note(tf.constant(row))
    return loss_monitor.settle(finite_parameters=True, **options)


def test_a_skipped_step_counts_nothing():
    assert settle([[4.0, 2.0, 0.0], [float("inf"), 2.0, 0.0], [8.0, 2.0, 0.0]], loss_scale=512.0) == 3.0


def test_bad_data_are_named_with_loss_scaling_too():
    with pytest.raises(NonFiniteError, match="The data hold NaN or infinite values at step 2"):
        settle([[4.0, 2.0, 0.0], [float("nan"), 2.0, float("nan")]], loss_scale=512.0)


def test_a_scale_that_keeps_falling_is_an_error():
    with pytest.raises(NonFiniteError, match=r"The loss scale fell to 0\.5 by step 1"):
        settle([[float("inf"), 2.0, 0.0]], loss_scale=0.5)


# -- accumulation and the distributing optimizer --


def test_nothing_can_be_reduced_before_something_was_added():
    variable = tf.Variable([1.0])
    with pytest.raises(ConfigError, match="There is nothing to reduce: add the gradients of a microbatch first"):
        GradientAccumulator([variable], steps=2).reduce()
    with pytest.raises(ConfigError, match=r"steps must be at least 1\. Received: 0\."):
        GradientAccumulator([variable], steps=0)


def test_the_buffer_is_as_large_as_the_gradients():
    built = model()
    accumulator = GradientAccumulator(built.trainable_variables, steps=2)
    accumulator.add([tf.zeros(v.shape) for v in built.trainable_variables])
    buffers = [b for b in accumulator._sum._buffers if b is not None]
    size = sum(int(np.prod(b.read().shape)) for b in buffers)
    assert size == sum(int(np.prod(v.shape)) for v in built.trainable_variables)


@pytest.mark.parametrize("op", ["average", "sum"])
def test_weights_count(op):
    variable = tf.Variable([0.0])
    accumulator = GradientAccumulator([variable], steps=2, op=op)
    assert not bool(accumulator.add([tf.constant([1.0])], weight=1))
    assert bool(accumulator.add([tf.constant([5.0])], weight=3))
    assert float(accumulator.reduce()[0][0]) == (4.0 if op == "average" else 16.0)
    accumulator.add([tf.constant([7.0])])
    assert float(accumulator.reduce()[0][0]) == 7.0, "the next group starts anew"


def test_a_microbatch_of_weight_zero_counts_for_nothing_whatever_its_gradients():
    dense, table = tf.Variable([0.0]), tf.Variable([[0.0], [0.0]])
    accumulator = GradientAccumulator([dense, table], steps=2)
    for bad in (np.inf, np.nan):
        accumulator.add(
            [tf.constant([bad]), tf.IndexedSlices(tf.constant([[bad]]), tf.constant([1]), [2, 1])], weight=0
        )
        accumulator.add(
            [tf.constant([5.0]), tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([0]), [2, 1])], weight=2
        )
        of_dense, of_table = accumulator.reduce()
        np.testing.assert_array_equal(of_dense, [5.0])
        np.testing.assert_array_equal(tf.convert_to_tensor(of_table), [[3.0], [0.0]])


def test_the_distributing_optimizer_is_its_inner_one():
    inner = keras.optimizers.Adam(0.25)
    optimizer = DistributedOptimizer(inner, compression="bf16", gradient_predivide_factor=2.0, clip_norm=9.0)
    variable = keras.Variable([1.0, 2.0])
    optimizer.apply([tf.constant([1.0, 0.0])], [variable])
    assert optimizer.variables == inner.variables
    assert int(optimizer.iterations) == 1
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.5
    assert float(inner.learning_rate) == 0.5
    np.testing.assert_allclose(variable.numpy(), [0.75, 2.0], rtol=1e-5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert isinstance(again, DistributedOptimizer)
    assert isinstance(again.inner_optimizer, keras.optimizers.Adam)
    assert again.get_config() == optimizer.get_config()
    with pytest.raises(ConfigError, match=r"hvdtrain.GradientAccumulator, which exchange once"):
        DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))


def test_a_train_step_must_use_the_optimizer_that_exchanges():
    message = "train_step of OwnStepByHand must apply its gradients with an optimizer that is an attribute of the model"
    with pytest.raises(ConfigError, match=message):
        Trainer(OwnStepByHand(), "sgd", "mse").fit((X, X), batch=16, verbose=False)


def test_a_train_step_may_be_a_tf_function():
    mine = Trainer(OwnStepCompiled(), "sgd", "mse", weighted_metrics=["mae"])
    before = mine.evaluate((X, 0 * X), return_dict=True)["loss"]
    mine.fit((X, 0 * X), batch=16, epochs=5, verbose=False)
    assert mine.evaluate((X, 0 * X), return_dict=True)["loss"] < before


def test_a_train_steps_loss_scale_is_in_the_state():
    mine = Trainer(OwnStepCompiled(), LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    mine.fit((X, X), batch=16, verbose=False)
    assert any(t.value is mine.optimizer.dynamic_scale.value for t in mine.state.named_tensors().values())


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_without_anything_to_train_is_run_as_by_keras():
    frozen = model()
    frozen.trainable = False
    result = Trainer(frozen, "sgd", "mse", metrics=["mae"]).fit(X, X, batch=16, epochs=2, verbose=False)
    frozen.compile("sgd", "mse", metrics=["mae"])
    expected = frozen.evaluate(X, X, verbose=0)
    assert result.history["loss"] == pytest.approx([expected[0]] * 2, rel=1e-5)
    assert result.history["mae"] == pytest.approx([expected[1]] * 2, rel=1e-5)
    with pytest.raises(ConfigError, match=r"has no trainable variables.*leave out clip_norm"):
        Trainer(frozen, "sgd", "mse", clip_norm=1.0).fit(X, X, batch=16, verbose=False)


@pytest.mark.parametrize("bound", [{"clip_norm": 1.0}, {"clip_value": 1.0}])
def test_bounds_do_not_hide_an_overflow(bound):
    large = 1e4 * X
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scales = []
    for options in ({}, bound):
        each = Trainer(model, "sgd", loss, precision="mixed_float16", **options)
        each.fit((large, Y), batch=16, epochs=1, verbose=False)
        scales.append((float(each.optimizer.dynamic_scale), int(each.optimizer.inner_optimizer.iterations)))
    assert scales[0] == scales[1]
    assert scales[0][0] < LossScaleOptimizer(keras.optimizers.SGD()).initial_scale, "nothing overflowed"


def test_an_accumulator_refuses_an_optimizer_that_exchanges():
    variable = keras.Variable([1.0])
    accumulator = GradientAccumulator([variable], steps=2)
    with pytest.raises(ConfigError, match="GradientAccumulator exchanges gradients, and DistributedOptimizer would"):
        accumulator.step([tf.constant([1.0])], DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps would exchange"):
        accumulator.step([tf.constant([1.0])], keras.optimizers.SGD(gradient_accumulation_steps=2))


def test_rows_are_kept_once():
    """Ten thousand look-ups in a table of a hundred rows never take more than the table."""
    table = keras.Variable(np.zeros((100, 4), "float32"))
    accumulator = GradientAccumulator([table], steps=8, sparse_as_dense=False)
    rows = np.random.default_rng(0).integers(0, 100, 10000)
    for _ in range(8):
        accumulator.add([tf.IndexedSlices(tf.ones([10000, 4]), tf.constant(rows), tf.constant([100, 4]))])
        (buffer,) = accumulator._sum._buffers
        assert (
            buffer._values.shape[0] <= 100 if buffer._values.shape[0] else buffer._values.read_value().shape[0] <= 100
        )
    (gradient,) = accumulator.reduce()
    dense = tf.convert_to_tensor(gradient)
    np.testing.assert_allclose(dense[:, 0], np.bincount(rows, minlength=100))


def averaging():
    return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9)


@pytest.mark.parametrize("swapped", [False, True])
def test_averages_take_the_place_of_the_weights_where_keras_puts_them(swapped):
    """After a training; in validation by SwapEMAWeights alone."""
    callbacks = [keras.callbacks.SwapEMAWeights()] if swapped else []
    options = {"batch_size": 8, "epochs": 2, "validation_data": (X, X), "shuffle": False, "verbose": 0}
    theirs, ours = model(), model()
    ours.set_weights(theirs.get_weights())
    theirs.compile(averaging(), "mse")
    expected = theirs.fit(X, X, callbacks=callbacks, **options).history
    one = Trainer(ours, averaging(), "mse")
    found = one.fit(X, X, callbacks=callbacks, **options).history
    np.testing.assert_allclose(found["val_loss"], expected["val_loss"], rtol=1e-5)
    for weight, their in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, their, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(one.predict(X), one.model.predict(X, verbose=0), rtol=1e-5, atol=1e-7)
    assert (one.evaluate(X, X, verbose=0) == pytest.approx(found["val_loss"][-1], rel=1e-5)) == swapped


def test_a_callback_that_saves_finds_averages_where_they_are_swapped_at_epoch_ends(tmp_path):
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), saving]
    one = Trainer(model(), averaging(), "mse")
    one.fit(X, X, batch=8, epochs=2, callbacks=callbacks, verbose=0)
    for ours, saved in zip(
        one.model.get_weights(), keras.models.load_model(tmp_path / "2.keras").get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, saved)


def test_what_is_restored_is_what_a_training_leaves(tmp_path):
    one = Trainer(model(), averaging(), "mse")
    one.fit(X, X, batch=8, epochs=2, checkpoint=tmp_path, verbose=0)
    other = Trainer(model(), averaging(), "mse")
    other.restore(tmp_path)
    np.testing.assert_array_equal(other.predict(X), one.predict(X))


def test_metrics_are_called_what_they_were_asked_for_as():
    """As Model.fit does, so that callbacks find them."""
    one = Trainer(model(), "sgd", "mse", metrics=["mae", "MeanSquaredError"])
    stop = keras.callbacks.EarlyStopping("val_mae", patience=0, min_delta=100.0, mode="min")
    result = one.fit((X, X), batch=16, epochs=5, validation_data=(X, X), callbacks=[stop], verbose=False)
    assert result.steps == 4
    assert {"mae", "val_mae", "MeanSquaredError", "val_loss"} <= set(result.history)


def test_callbacks_hear_of_evaluations_and_of_the_end():
    heard = []
    note = keras.callbacks.LambdaCallback(on_train_end=lambda logs: heard.append(("end", set(logs))))
    note.on_test_begin = lambda logs=None: heard.append("test begins")
    note.on_test_end = lambda logs=None: heard.append(("test ends", set(logs)))
    trainer(metrics=["accuracy"]).fit((X, Y), batch=16, validation_data=(X, Y), callbacks=[note], verbose=False)
    names = {"loss", "accuracy"}
    assert heard == ["test begins", ("test ends", names), ("end", names | {"val_loss", "val_accuracy"})]
    with pytest.raises(ConfigError, match="SwapEMAWeights must be used when `use_ema=True` is set"):
        trainer().fit((X, Y), batch=16, callbacks=[keras.callbacks.SwapEMAWeights()], verbose=False)


# -- several outputs --


def two_heads():
    inputs = keras.Input((4,))
    return keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in ("a", "b")})


def test_what_fits_no_output_is_refused_as_by_keras():
    data = (X, {"a": X[:, :2], "b": X[:, 2:]})
    with pytest.raises((ValueError, KeyError), match=r"Expected keys|can't be found"):
        Trainer(two_heads(), "sgd", {"a": "mse", "z": "mse"}).fit(data, batch=8, verbose=False)
    with pytest.raises(ValueError, match="metrics"):
        Trainer(two_heads(), "sgd", "mse", ["mae"]).evaluate(data)


def test_class_weights_need_labels():
    with pytest.raises(ConfigError, match="class_weight is for models with one output"):
        Trainer(two_heads(), "sgd", "mse").fit((X, {"a": Y, "b": Y}), batch=8, class_weight={0: 1.0}, verbose=False)
    with pytest.raises(ConfigError, match=r"class_weight counts labels from 0\. Received: -1\."):
        trainer().fit((X, Y), batch=8, class_weight={-1: 2.0}, verbose=False)
    for unusable in ("balanced", {"cat": 2.0}, {0: "much"}, [1.0, 4.5]):
        with pytest.raises(ConfigError, match=rf"{{0: 1\.0, 1: 4\.5}} does\. Received: {re.escape(repr(unusable))}"):
            trainer().fit((X, Y), batch=8, class_weight=unusable, verbose=False)
    with pytest.raises(ConfigError, match="class_weight needs labels or one-hot targets"):
        trainer().fit((X, X[:, 0]), batch=8, class_weight={0: 1.0}, verbose=False)


@pytest.mark.parametrize("shape", [(32,), (32, 1)])
def test_class_weights_count_labels_that_are_floats(shape):
    """Those of a binary cross-entropy, which Keras' own fit takes."""
    binary = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])  # noqa: E731
    labels, weights = (X[:, 0] > 0).astype("float32").reshape(shape), {0: 0.5, 1: 4.0}
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    ours, plain = binary(), binary()
    Trainer(ours, keras.optimizers.SGD(0.1), loss).fit(
        (X, labels), batch=8, class_weight=weights, shuffle=False, verbose=False
    )
    plain.compile(keras.optimizers.SGD(0.1), loss)
    plain.fit(X, labels, batch_size=8, class_weight=weights, shuffle=False, verbose=0)
    for mine, theirs in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.extended  # XLA compiles three models
def test_what_xla_draws_at_random_can_be_repeated():
    """Its numbers are not those of TensorFlow's own kernels, but the same ones each time."""

    def weights(rate):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8), keras.layers.Dropout(rate, seed=1), keras.layers.Dense(4)]
        one = trainer(model=lambda: keras.Sequential([keras.Input((4,)), *layers]), jit=True, accumulate=2)
        one.fit((X, Y), batch=16, epochs=2, verbose=False, log_every=100)
        return np.concatenate([w.ravel() for w in one.model.get_weights()])

    first = weights(0.5)
    np.testing.assert_array_equal(weights(0.5), first)
    assert np.abs(weights(0.0) - first).max() > 1e-3, "nothing was dropped"


# -- what is said before the first step --


def said_of(options, outputs=False, cost=1.0, **run):
    given = {"recipe": "r", "backend": "b", "world_size": 2, "launcher": "l", "controller": None, "parameters": 1}
    given |= {"global_batch": 64, "per_replica_batch": 32, "total_steps": 9, "steps_per_epoch": 3}
    info = RunInfo(**{**given, **run})
    lines = advice(info, StepOptions(**options), compression_cost=cost, narrow_outputs=outputs)
    return on_command_line("\n".join(lines))


def test_what_is_slow_or_does_nothing_is_said():
    assert said_of({}) == ""
    assert said_of({}, per_replica_batch=4) == "", "of a run of seconds nothing is to be gained"
    long = {"total_steps": 3000}
    assert said_of({}, per_replica_batch=4, **long).startswith("warning: 4 samples at a time on each rank are too few")
    assert "What helps: a smaller --accumulate, a larger --batch" in said_of({}, accumulate=8, **long)
    assert "--compression bf16 makes the exchange 2.5x as slow" in said_of({"compression": "bf16"}, cost=2.5)
    assert "outputs have 16 bits" in said_of({}, outputs=True)
    assert "Use --precision mixed_bfloat16." in said_of({"precision": "mixed_float16"})
    assert said_of({"precision": "mixed_bfloat16"}) == ""


def test_more_ranks_than_cores_are_said():
    assert crowded(2, 2) == []
    (line,) = crowded(8, 2)
    assert line.startswith("note: 8 ranks take turns on 2 cores of this machine: use at most as many ranks as cores")


def test_16_bits_are_advised_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["/GPU:0"])
    assert said_of({"precision": "float32"}).endswith("several times as fast: --precision mixed_float16.")
    assert said_of({"precision": "mixed_float16"}) == ""


def test_the_start_of_a_fit_tells_rate_and_options(capsys):
    def narrow():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])

    schedule = keras.optimizers.schedules.CosineDecay(0.5, 100)
    one = Trainer(narrow, keras.optimizers.SGD(schedule), "mse", precision="mixed_bfloat16", accumulate=2)
    one.fit((X, X), batch=8)
    out = capsys.readouterr().out
    assert "batch       8 samples, in 2 microbatches of 4, learning rate 0.5 now, by CosineDecay" in out
    assert "options     accumulate 2, precision mixed_bfloat16" in out
    assert "outputs have 16 bits" in out
    one.fit((X, X), batch=8)
    assert "outputs have 16 bits" not in capsys.readouterr().out, "advice is given once"
    Trainer(model, keras.optimizers.SGD(0.125), "mse").fit((X, X), batch=16)
    assert "batch       16 samples, learning rate 0.125\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optimizer", "trained", "said"), [("adam", True, True), ("adam", False, False), ("sgd", True, False)]
)
def test_rows_that_keras_squares_one_by_one_are_named(optimizer, trained, said, capsys):
    table = keras.layers.Embedding(4, 2, name="words", trainable=trained)
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)])
    Trainer(model, optimizer, "mse").fit((np.ones([16, 3], "int32"), np.ones([16, 1], "float32")), batch=16)
    line = "note: the gradients of a row that a batch names several times (words) are added before Adam squares them"
    assert (line in " ".join(capsys.readouterr().out.split())) is said


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="reach 4, the model has 4 outputs"):
        trainer().fit((X, Y + 1), batch=16, verbose=False)
    with pytest.raises(DataError, match=r"gives outputs of shape \(None, 4\); the targets of .* are \(None, 3\)"):
        Trainer(model(), "sgd", "mse").fit((X, X[:, :3]), batch=16, verbose=False)
    with pytest.raises(ValueError, match=r"Expected shape|incompatible"):  # Keras' own
        trainer().fit((X[:, :3], Y), batch=16, verbose=False)


def test_an_editor_completes_the_options_that_there_are():
    declared = {name: kind for name, kind in get_type_hints(StepOptions).items() if name != "_"}
    assert get_type_hints(TrainerOptions) == declared


def test_a_batch_of_more_samples_than_there_are_is_named(capsys):
    trainer().fit((X[:8], Y[:8]), batch=12, epochs=1, verbose=True)
    assert "note: a batch of 12 has more samples than there are, 8: the rest is padding" in capsys.readouterr().out
    trainer().fit((X[:8], Y[:8]), batch=8, epochs=1, verbose=True)
    assert "the rest is padding" not in capsys.readouterr().out
