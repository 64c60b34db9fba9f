"""The face has every public name of Horovod 0.28.1, with the same arguments and defaults."""

import functools
import importlib
import inspect
import types

import horovod.keras
import horovod.tensorflow.keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.flavour import IS_LEGACY, keras

OF_KERAS_3 = pytest.mark.skipif(IS_LEGACY, reason="tf_keras has it, or has not got it")
NOT_HOROVODS = {
    *("is_version_greater_equal_than", "ops", "contextmanager"),
    *("Any", "Mapping", "NamedTemporaryFile", "Optional", "Path", "Sequence", "Tuple"),
}
"""What Horovod's modules imported for themselves, besides modules."""

SAME = [
    ("horovod.tensorflow", "hvdtrain.horovod", {"BroadcastGlobalVariablesHook"}),
    ("horovod.tensorflow.elastic", "hvdtrain.horovod.elastic", set()),
    ("horovod.tensorflow.mpi_ops", "hvdtrain.horovod.mpi_ops", set()),
    ("horovod.tensorflow.compression", "hvdtrain.horovod.compression", set()),
    ("horovod.tensorflow.functions", "hvdtrain.horovod.functions", set()),
    ("horovod.tensorflow.util", "hvdtrain.horovod.util", set()),
    ("horovod.tensorflow.sync_batch_norm", "hvdtrain.horovod.sync_batch_norm", set()),
    ("horovod.tensorflow.gradient_aggregation", "hvdtrain.horovod.gradient_aggregation", set()),
    ("horovod.tensorflow.gradient_aggregation_eager", "hvdtrain.horovod.gradient_aggregation_eager", set()),
    ("horovod.tensorflow.keras", "hvdtrain.horovod.keras", {"Adasum", "PartialDistributedOptimizer"}),
    ("horovod.tensorflow.keras.callbacks", "hvdtrain.horovod.keras.callbacks", set()),
    ("horovod.tensorflow.keras.elastic", "hvdtrain.horovod.keras.elastic", set()),
]
"""Horovod's module, the face's, and what the face has besides: of `horovod.keras`, and of TensorFlow 1."""

MODULES_OF_A_MODULE = {
    *("elastic", "callbacks", "mpi_ops", "compression", "functions", "util", "gradient_aggregation", "sync_batch_norm")
}


def public_names(module):
    """Names that a script may use: what is Horovod's, and the modules that are part of its documentation."""
    names = set()
    for name in dir(module):
        value = getattr(module, name)
        is_module = isinstance(value, types.ModuleType) and name not in MODULES_OF_A_MODULE
        if not (name.startswith("_") or is_module or name in NOT_HOROVODS):
            names.add(name)
    return names


def arguments(function):
    """Names, kinds and defaults of a function's parameters; annotations do not count."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("theirs", "ours", "more"), SAME)
def test_names_are_horovods(theirs, ours, more):
    theirs, ours = importlib.import_module(theirs), importlib.import_module(ours)
    declared = set(getattr(ours, "__all__", [n for n in public_names(ours) if defined_in(ours, n)]))
    assert declared == public_names(theirs) | more


def defined_in(module, name):
    return getattr(getattr(module, name), "__module__", None) == module.__name__


CALLABLES = [
    pytest.param(theirs, ours, name, id=f"{theirs}-{name}")
    for theirs, ours, _ in SAME
    for name in sorted(public_names(importlib.import_module(theirs)))
    if callable(getattr(importlib.import_module(theirs), name))
]


@pytest.mark.parametrize(("theirs", "ours", "name"), CALLABLES)
def test_arguments_and_defaults_are_horovods(theirs, ours, name):
    theirs, ours = (getattr(importlib.import_module(module), name) for module in (theirs, ours))
    assert ours is theirs or arguments(ours) == arguments(theirs)


@pytest.mark.parametrize("name", sorted(public_names(horovod.keras)))
def test_what_keras_scripts_pass_by_name_is_accepted(name):
    """`horovod.keras` orders a few arguments otherwise, and averages by the older word."""
    theirs, ours = getattr(horovod.keras, name), getattr(hvd_keras, name)
    if callable(theirs):
        accepted = {p.name for p in inspect.signature(ours).parameters.values()}
        assert {p.name for p in inspect.signature(theirs).parameters.values()} <= accepted


@pytest.mark.parametrize("module", [ours for _, ours, _ in SAME if "keras" not in ours])
def test_modules_hand_out_the_functions_of_the_face(module):
    """Never another version of what the face has: `mpi_ops.broadcast` is `hvd.broadcast`."""
    module = importlib.import_module(module)
    face = {name: value for name, value in vars(hvd).items() if callable(value)}
    for name in face.keys() & set(dir(module)):
        assert getattr(module, name) is face[name], name


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("", "_allreduce_cond _grouped_allreduce_cond _make_allreduce_grads_fn _DistributedOptimizer _LegacyOptimizer"),
        ("", "_DistributedGradientTape _DistributedAdasumOptimizer _IS_TF2 _global_variables _get_default_graph"),
        (".mpi_ops", "_allreduce _grouped_allreduce _reducescatter _grouped_reducescatter _normalize_name _basics"),
        (".mpi_ops", "_alltoall_grad MPI_LIB"),
        (".util", "_executing_eagerly _make_subgraph _cache"),
        (".functions", "_make_broadcast_group_fn"),
        (".gradient_aggregation", "_IS_TF2"),
        (".gradient_aggregation_eager", "_IS_TF2"),
    ],
)
def test_names_with_an_underscore_that_scripts_use(module, names):
    theirs, ours = (importlib.import_module(package + module) for package in ("horovod.tensorflow", "hvdtrain.horovod"))
    for name in names.split():
        mine, original = getattr(ours, name), getattr(theirs, name)
        assert mine is original or arguments(mine) == arguments(original) or issubclass(mine, tf.GradientTape)
    assert hvd.mpi_ops._allreduce is hvd._allreduce
    assert not hasattr(ours, "_no_such_name")


V1 = functools.partial(tf.compat.v1.train.GradientDescentOptimizer, 0.1)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: hvd.broadcast_global_variables(0), "hvd.broadcast_variables"),
        (lambda: hvd_keras.broadcast_global_variables(0), "hvd.broadcast_variables"),
        (lambda: hvd.elastic.TensorFlowState(), "variables=model.variables"),
        (lambda: hvd.elastic.TensorFlowState([tf.Variable(0)], session=1), "Leave session out"),
        (lambda: tf.function(lambda: hvd.broadcast_object(1))(), "outside of tf.function"),
        (lambda: hvd_keras.DistributedOptimizer(V1()), "Wrap it with hvdtrain.horovod.DistributedOptimizer"),
        (lambda: hvd.DistributedOptimizer(V1(), backward_passes_per_step=2), "with eager execution. Received: 2"),
        (lambda: hvd.DistributedOptimizer(V1(), op=hvd.Adasum, backward_passes_per_step=0), "> 0. Received: 0"),
        (lambda: hvd.DistributedOptimizer(V1(), op=hvd.Adasum, gradient_predivide_factor=2), "op != Average"),
        (lambda: hvd.DistributedOptimizer(V1(), op=hvd.Adasum, average_aggregated_gradients=True), "Adasum does not"),
        pytest.param(
            lambda: hvd_keras.load_model("model.keras", legacy_opts=True), "Leave legacy_opts out", marks=OF_KERAS_3
        ),
    ],
)
def test_what_belongs_to_tensorflow_1_says_where_it_works_or_what_to_use_instead(call, instead):
    with pytest.raises(ConfigError, match=instead):
        call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": hvd.Adasum}, "op == Adasum is not supported yet with Keras"),
        ({"op": hvd.Max}, "op currently only supports Average and Sum"),
        ({"groups": 0}, "groups should be"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"backward_passes_per_step": 0}, "at least 1. Received: 0"),
    ],
)
def test_options_that_an_optimizer_refuses(options, said):
    with pytest.raises(ConfigError, match=said):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)


def test_only_keras_optimizers_are_wrapped_and_only_once():
    with pytest.raises(ConfigError, match="Received: builtins"):
        hvd.DistributedOptimizer("sgd")
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    scaling = keras.mixed_precision.LossScaleOptimizer
    with pytest.raises(ConfigError, match="reduces gradients already"):
        hvd_keras.DistributedOptimizer(scaling(wrapped))


@OF_KERAS_3
def test_a_wrapped_optimizer_is_one_of_its_kind_with_its_state():
    plain = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10), beta_1=0.8)
    plain.build([variable := keras.Variable(np.ones(3, "float32"))])
    plain.apply([tf.ones(3)], [variable])
    wrapped = hvd.DistributedOptimizer(plain)
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert wrapped.get_config() == plain.get_config()
    assert [np.array(v).tolist() for v in wrapped.variables()] == [np.array(v).tolist() for v in plain.variables]


@OF_KERAS_3
def test_a_model_that_is_saved_with_a_registered_optimizer_loads_without_horovod(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    for plain in (hvdtrain.LARS(0.1), hvdtrain.LossScaleOptimizer(keras.optimizers.SGD(0.1))):
        wrapped = hvd.DistributedOptimizer(plain)
        wrapped.build(model.trainable_variables)
        model.compile(wrapped, keras.losses.MeanSquaredError())
        model.save(tmp_path / "model.keras")
        assert type(keras.models.load_model(tmp_path / "model.keras").optimizer) is type(plain)


@OF_KERAS_3
def test_what_is_of_tf_keras_is_refused():
    """By where it comes from; tests/unit/horovod/legacy_keras_cases.py shows the same of real objects."""
    optimizer, layer, model = (type(n, (), {"__module__": "tf_keras.src"})() for n in ("SGD", "Dense", "Model"))
    said = r"is of tf_keras, but tf\.keras is Keras 3: set TF_USE_LEGACY_KERAS=1"
    with pytest.raises(ConfigError, match=rf"^tf_keras\.src\.SGD {said}"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match=f"Dense {said}"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[layer])
    with pytest.raises(ConfigError, match=f"Model {said}"):
        hvd.elastic.TensorFlowKerasState(model)
    with pytest.raises(ConfigError, match=f"Model {said}"):
        hvd_keras.callbacks.MetricAverageCallback().set_model(model)


def test_groups_by_their_older_name():
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=2)
    assert wrapped.distribution.exchange.groups == 2


def test_local_layers_must_be_layers():
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    optimizer = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=layer)
    assert len(optimizer.distribution.exchange.local) == 2
    with pytest.raises(ConfigError, match="All local layers must be"):
        hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[3])
    with pytest.raises(ConfigError, match="All local layers must be"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


def test_what_callbacks_and_layers_refuse():
    with pytest.raises(ConfigError, match="All local variables must be"):
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])
    with pytest.raises(ConfigError, match=r"set callback\.filepath"):
        hvd_keras.callbacks.BestModelCheckpoint().on_train_begin()
    for fused in (True, None):
        with pytest.raises(ConfigError, match="does not support fused=True"):
            hvd.SyncBatchNormalization(fused=fused)
    assert hvd.SyncBatchNormalization(fused=False, axis=1).fused is False
    with pytest.raises(ConfigError, match="Model must be built first"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_process_sets_that_are_given_twice():
    with pytest.raises(ValueError, match=r"Duplicate process sets are not allowed\. Received: the ranks \[0, 1\]"):
        hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])])


@pytest.mark.parametrize("theirs", [theirs for theirs, _, _ in SAME])
def test_modules_have_horovods_names_after_a_prefix_too(theirs):
    """A script writes `hvdtrain.` before its imports, and gets the very same modules."""
    face = "hvdtrain.horovod" + theirs.removeprefix("horovod.tensorflow")
    ours, by_prefix = importlib.import_module(face), importlib.import_module(f"hvdtrain.{theirs}")
    assert by_prefix.__all__ == ours.__all__
    assert all(getattr(by_prefix, name) is getattr(ours, name) for name in ours.__all__)
    assert ours.__spec__.name == face
    if theirs != "horovod.tensorflow":
        assert by_prefix is ours


def test_a_module_that_horovod_does_not_have_is_not_there_by_its_prefix_either():
    with pytest.raises(ModuleNotFoundError, match=r"hvdtrain\.horovod\.nothing"):
        importlib.import_module("hvdtrain.horovod.tensorflow.nothing")
    with pytest.raises(AttributeError, match="nothing"):
        importlib.import_module("hvdtrain.horovod.tensorflow").nothing  # noqa: B018
