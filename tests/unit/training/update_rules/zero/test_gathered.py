"""ZeRO stages 2 and 3 in one process: when parameters are gathered, what is whole at a time, which layers they fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.inputs import training_data
from hvdtrain.training.trainer import Trainer
from hvdtrain.training.update_rules.zero.gathered import GatheringPass
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")
WIDTH = 160
RNG = np.random.default_rng(0)
layers = keras.layers


@pytest.fixture(autouse=True)
def _chosen_rule_for_one_replica(monkeypatch):
    """One replica has the default rule; here the others are tried on one."""
    monkeypatch.setattr("hvdtrain.training.update_rules.select.is_alone", lambda backend: False)


def vectors():
    return RNG.standard_normal((24, WIDTH))


def dense():
    return keras.Sequential([keras.Input((WIDTH,)), *(layers.Dense(WIDTH, "tanh") for _ in range(4)), layers.Dense(3)])


def shared():
    inputs, layer = keras.Input((WIDTH,)), layers.Dense(WIDTH, "tanh")
    return keras.Model(inputs, layers.Dense(3)(layer(layer(layer(inputs)))))


def convolutions():
    inputs = keras.Input((6, 6, 3))
    x = layers.BatchNormalization()(layers.Conv2D(96, 3)(inputs))
    x = layers.SeparableConv2D(220, 3, padding="same", depth_multiplier=9)(layers.Conv2D(96, 3)(x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def recurrent():
    return keras.Sequential([keras.Input((4, WIDTH)), layers.LSTM(150), layers.Dense(3)])


class Branches(keras.layers.Layer):
    """Each of its branches has a graph of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(WIDTH), layers.Dense(WIDTH)

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)

    def call(self, inputs):
        return tf.cond(tf.reduce_sum(inputs) > 0, lambda: self.one(inputs), lambda: 2.0 * self.other(inputs))


def branches():
    return keras.Sequential([keras.Input((WIDTH,)), Branches(), layers.Dense(WIDTH, "tanh"), layers.Dense(3)])


def recomputed():
    inner = [layers.Dense(WIDTH, "tanh"), layers.Dropout(0.3), layers.Dense(WIDTH, "tanh"), layers.Dense(WIDTH)]
    block = hvdtrain.Recompute(keras.Sequential([keras.Input((WIDTH,)), *inner]))
    return keras.Sequential([keras.Input((WIDTH,)), block, layers.Dense(WIDTH, "tanh"), layers.Dense(3)])


def frozen():
    model = dense()
    model.layers[0].trainable = False
    return model


MODELS = {
    "shared": (shared, vectors),
    "convolutions": (convolutions, lambda: RNG.standard_normal((24, 6, 6, 3))),
    "recurrent": (recurrent, lambda: RNG.standard_normal((24, 4, WIDTH))),
    "branches": (branches, vectors),
    "recomputed": (recomputed, vectors),
    "frozen": (frozen, vectors),
}
"""Attention, embeddings and tied weights are in tests/distributed/checks/zero.py."""


def trainer_of(make, **options):
    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Trainer(make(), keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)


@pytest.mark.parametrize(
    "name",
    mostly_extended(
        MODELS,
        lambda name: name in ("shared", "branches"),
        why="graphs within the graph are among the branches' too",
    ),
)
def test_kinds_of_layers_train_as_with_whole_parameters(name):
    make, inputs = MODELS[name]
    x, y = inputs().astype("float32"), RNG.integers(0, 3, 24)
    weights = []
    for stage in (0, 3):
        trainer = trainer_of(make, zero=stage)
        trainer.fit((x, y), batch=12, epochs=2, shuffle=False, verbose=False)
        weights.append(trainer.model.get_weights())
    assert trainer.rule._by_path, "nothing was cut"
    for whole, sharded in zip(*weights, strict=True):
        np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-6)


def begun(make, **options):
    """Return a trainer whose next step on `vectors` is the first, and its data."""
    trainer = trainer_of(make, **options)
    data = training_data(
        (vectors(), RNG.integers(0, 3, 24)), trainer.backend, batch=24, seed=0, shuffle=False, steps_per_epoch=None
    )
    trainer.build(data)
    trainer.broadcast_state()
    return trainer, data


def traced(make, **options):
    """Return the graph of a training step on `vectors`."""
    trainer, data = begun(make, **options)
    step = trainer.compiled_step(data)
    step(next(iter(data.batches(0))), measure=False)
    return next(iter(step._special._graphs.values())).graph


@pytest.fixture
def gathers(monkeypatch):
    """The operations that make whole parameters, in the order in which they come into the graph."""
    made = []
    gathered = GatheringPass._gathered

    def noted(self, *arguments):
        whole = gathered(self, *arguments)
        made.append(whole.op)
        return whole

    monkeypatch.setattr(GatheringPass, "_gathered", noted)
    return made


def readers_of(operation):
    """Return the operations that compute with what `operation` makes."""
    readers = (reader for output in following(operation) for reader in output.consumers())
    return [reader for reader in readers if reader.type == "MatMul"]


def following(operation):
    """Yield the output of `operation`, and what only passes it on."""
    for output in operation.outputs[:1]:
        yield output
        for reader in output.consumers():
            if reader.type in ("Identity", "IdentityN", "Cast"):
                yield from following(reader)


def ancestors(operation):
    """Return the names of the operations that have run before `operation` does."""
    found, pending = set(), [operation]
    while pending:
        each = pending.pop()
        for before in [*(source.op for source in each.inputs), *each.control_inputs]:
            if before.name not in found:
                found.add(before.name)
                pending.append(before)
    return found


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_layer_is_gathered_when_the_one_before_it_has_computed(gathers, prefetch):
    traced(dense, zero=3, zero_prefetch=prefetch)
    # Four in the forward pass; backward the first layer needs no gradient with respect to its inputs.
    assert len(gathers) == 7
    readers = [readers_of(operation) for operation in gathers]
    assert all(len(each) == 1 for each in readers), "a parameter stays whole from the forward to the backward pass"
    for passes in (slice(0, 4), slice(4, 7)):
        for [reader], later in zip(readers[passes], gathers[passes][1 + prefetch :], strict=False):
            assert reader.name in ancestors(later), "a parameter is gathered too early"
        for [reader], later in zip(readers[passes], gathers[passes][prefetch:][:prefetch], strict=False):
            assert reader.name not in ancestors(later), "nothing is gathered ahead"
    assert readers[3][0].name in ancestors(gathers[4]), "the backward pass gathers before the forward pass ends"


def test_mixed_precision_gathers_in_float32(gathers):
    """What a layer converts to 16 bits, forward and backward, is the whole; gradients are summed in 32."""
    graph = traced(dense, zero=3, precision="mixed_bfloat16")
    assert len(gathers) == 7
    assert {operation.outputs[0].dtype for operation in gathers} == {tf.float32}
    summed = [op for op in graph.get_operations() if op.type == "Unpack" and op.outputs[0].shape == (WIDTH * WIDTH,)]
    assert [op.outputs[0].dtype for op in summed] == [tf.float32] * 4


def test_no_slice_is_updated_before_it_has_been_read_even_in_the_graph_that_runs():
    """TensorFlow's optimizer of graphs loses the order of a read and an update that an IdentityN hides."""
    context.context().enable_graph_collection()
    try:
        traced(dense, zero=3)
        graphs = [each.post_optimization_graph for each in context.context().export_run_metadata().function_graphs]
    finally:
        context.context().disable_graph_collection()
    [graph] = [each for each in graphs if any("ApplyKerasMomentum" in node.op for node in each.node)]
    nodes = {node.name: node for node in graph.node}
    updates = [node for node in graph.node if node.op == "ResourceApplyKerasMomentum"]
    assert len(updates) == 10
    for update in updates:
        done, pending = set(), [update]
        while pending:
            for name in (source.lstrip("^").split(":")[0] for source in pending.pop().input):
                if name not in done and name in nodes:
                    done.add(name)
                    pending.append(nodes[name])
        reads = [n for n in graph.node if n.op == "ReadVariableOp" and n.input[0] == update.input[0]]
        later = [node.name for node in reads if node.name not in done and f"^{update.name}" not in node.input]
        assert not later, f"{later} of {update.input[0]}"


def test_between_two_steps_the_whole_parameters_take_no_memory():
    trainer, data = begun(dense, zero=3)
    before = trainer.model.get_weights()
    trainer.compiled_step(data)(next(iter(data.batches(0))), measure=False)
    kernels = [layer.kernel._value for layer in trainer.model.layers[:4]]
    assert [kernel.numpy().size for kernel in kernels] == [0] * 4
    assert {path for path, t in trainer.state.named_tensors().items() if not t.replicated} >= {
        f"model/layers/{number}/kernel" for number in range(4)
    }
    trainer.consolidate()
    after = trainer.model.get_weights()
    assert [weight.shape for weight in after] == [weight.shape for weight in before]
    assert max(np.abs(a - b).max() for a, b in zip(after, before, strict=True)) > 0


def test_slices_do_not_keep_the_memory_of_the_whole_parameters():
    """TensorFlow lets a slice, and a variable that is given it, share the buffer that it is cut from."""
    trainer, _ = begun(dense, zero=3)
    for path, shard in trainer.rule._by_path.items():
        whole, mine = (buffer_of(variable.value) for variable in (shard.whole, shard.master))
        assert not np.shares_memory(whole, mine), path
        np.testing.assert_array_equal(whole.reshape(-1)[shard.begin : shard.end], mine)


def buffer_of(variable):
    """Return an array in the memory of a variable."""
    return variable.read_value()._numpy()


def test_whole_weights_are_out_of_reach_after_an_error(tmp_path):
    """A file of the model would hold empty arrays, and what is set would be lost."""
    trainer, data = begun(dense, zero=3)
    start = trainer.model.get_weights()
    trainer.compiled_step(data)(next(iter(data.batches(0))), measure=False)  # an error in a hook would come here
    for use in (
        trainer.model.get_weights,
        lambda: trainer.model.save(tmp_path / "model.keras"),
        lambda: trainer.model.set_weights(start),
    ):
        with pytest.raises(ConfigError, match=r"zero=3 keeps slices .* Call trainer\.consolidate\(\) on every rank"):
            use()
    trainer.consolidate()
    trainer.model.set_weights(start)
    trainer.model.save(tmp_path / "model.keras")


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 2])
def test_copies_of_slices_are_given_back_after_each_update(stage):
    trainer = trainer_of(dense, zero=stage)
    trainer.fit((vectors(), RNG.integers(0, 3, 24)), batch=24, epochs=1, verbose=False)
    assert [shard.master.value.numpy().size for shard in trainer.rule._by_path.values()] == [0] * 4


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_of_stage_2_waits_until_the_one_before_the_last_is_exchanged(microbatches):
    """Of the first microbatch, which may be this rank's only one: all are zeros where it has no samples."""
    graph = traced(dense, zero=2, accumulate=microbatches)
    operations = graph.get_operations()
    exchanged = [op for op in operations if op.type == "Unpack" and op.outputs[0].shape == (WIDTH * WIDTH,)][::-1]
    computed = [op for op in operations if op.type == "MatMul" and op.outputs[0].shape == (WIDTH, WIDTH)]
    assert len(exchanged) == len(computed) == 4, "the last layer's comes first"
    for earlier, later in zip(exchanged, computed[2:], strict=False):
        assert earlier.name in ancestors(later)
    for earlier, later in zip(exchanged, computed[1:], strict=False):
        assert earlier.name not in ancestors(later), "exchange and computation take turns"


def test_a_layer_that_assigns_to_its_weights_is_refused():
    model = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((WIDTH,)), layers.SpectralNormalization(layers.Dense(WIDTH)), layers.Dense(3)]
    )
    data = (vectors(), RNG.integers(0, 3, 24))
    with pytest.raises(ConfigError, match=r"layers can read but not assign to\. Received: an assignment to \S*dense"):
        trainer_of(model, zero=3).fit(data, batch=24, verbose=False)
    weights = []
    for stage in (0, 2):  # there the slices are cut from the weights as the layer leaves them
        trainer = trainer_of(model, zero=stage)
        trainer.fit(data, batch=12, epochs=2, shuffle=False, verbose=False)
        weights.append(trainer.model.get_weights())
    for whole, *others in zip(*weights, strict=True):
        for other in others:
            np.testing.assert_allclose(other, whole, rtol=0, atol=1e-6)


def test_compiled_functions_are_needed():
    trainer = trainer_of(dense, zero=3)
    parameters = trainer.rule.parameters(trainer.state)
    with (
        pytest.raises(ConfigError, match="zero=3 gathers parameters within compiled functions"),
        parameters.passes(1.0),
    ):
        raise AssertionError("a pass begins")
