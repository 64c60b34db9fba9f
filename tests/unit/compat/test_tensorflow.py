"""What hvdtrain takes for granted about TensorFlow's graphs, functions, frames, threads and datasets."""

import sys
import unittest.mock

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_dataset_ops

from hvdtrain.compat import tensorflow as compat
from hvdtrain.config.errors import CompatibilityError
from tests.distributed.world import grappler
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "tensorflow")


def numbers():
    return tf.data.Dataset.range(6)


@CONTRACTS.of(compat.outside_of_strategy)
def leaves_a_strategy_and_comes_back():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        with compat.outside_of_strategy():
            assert not tf.distribute.has_strategy()
            assert not tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_strategy() is strategy


@CONTRACTS.of(compat.mark_stateful)
@grappler()
def keeps_marked_ops():
    """Two equal ops of constants are one constant once Grappler is through; marked ones stay two."""

    @tf.function(autograph=False)
    def twice(marked):
        made = [tf.raw_ops.Add(x=tf.constant(1.0), y=tf.constant(2.0)) for _ in range(2)]
        for place, one in enumerate(made if marked else []):
            compat.mark_stateful(one.op, place)
        return made

    def node_of(function):
        return [node for node in function.graph.as_graph_def().node if node.op == "Add"]

    one, other = node_of(twice.get_concrete_function(True))
    assert one.attr["_hvd_uid"].i != other.attr["_hvd_uid"].i
    assert "_scoped_allocator" in one.attr
    assert [float(x) for x in twice(True)] == [3.0, 3.0]


def body(function):
    return tf.function(function, autograph=False).get_concrete_function()


@CONTRACTS.of(compat.add_control_inputs)
def waits():
    def trace():
        one, other = tf.constant(1.0), tf.constant(2.0)
        compat.add_control_inputs(one.op, [other.op])
        assert one.op.control_inputs == [other.op]

    body(trace)


@CONTRACTS.of(compat.replace_input)
def takes_another_input():
    def trace():
        total = tf.constant(1.0) + tf.constant(2.0)
        compat.replace_input(total.op, 1, tf.constant(5.0))
        return total

    assert float(body(trace)()) == 6.0


@CONTRACTS.of(compat.copy_op)
def copies_an_op():
    def trace():
        cast = tf.cast(tf.constant(1.5), tf.int32)
        copy = compat.copy_op(cast.op, [tf.constant(7.5)])
        assert (copy.type, copy.graph) == ("Cast", cast.graph)
        return copy.outputs[0]

    assert int(body(trace)()) == 7


@CONTRACTS.of(compat.compiled)
def compiles_the_same_code_often_without_a_warning():
    warned = []

    def traced(compile_function, number):
        return compile_function(lambda x: x + number)(tf.constant(1))

    with unittest.mock.patch.object(tf.get_logger(), "warning", lambda *words: warned.append(words)):
        assert [int(traced(compat.compiled, number)) for number in range(8)] == list(range(1, 9))
        assert not warned
        for number in range(8):
            traced(tf.function, number)
    assert warned, "TensorFlow warns of others"


@CONTRACTS.of(compat.copied_function)
def copies_a_function_without_its_graphs():
    traces = []

    class Thing:
        @tf.function(autograph=True)
        def positive(self, x):
            traces.append(self)
            if x > 0:
                return x
            return -x

    thing = Thing()
    copy = compat.copied_function(thing.positive)
    assert float(thing.positive(tf.constant(-2.0))) == float(copy(tf.constant(-2.0))) == 2.0
    assert traces == [thing, thing]


@CONTRACTS.of(compat.converted_function)
def converts_what_a_function_calls():
    class Thing:
        @tf.function
        def positive(self, x):
            if x > 0:
                return x
            return -x

    plain = tf.function(lambda x: x + 1.0, autograph=False)
    assert float(compat.converted_function(plain)(1.0)) == 2.0
    traced = tf.function(lambda x: compat.converted_function(Thing().positive)(x), autograph=False)
    assert float(traced(tf.constant(-2.0))) == 2.0


@CONTRACTS.of(compat.graph_of, compat.in_graph_of)
def makes_operations_in_a_graph_around():
    def trace():
        outer = tf.constant(1.0)

        def branch():
            with compat.in_graph_of(outer):
                made = outer + 1.0
            assert compat.graph_of(made) is compat.graph_of(outer)
            assert tf.compat.v1.get_default_graph() is not made.graph
            return made * 1.0

        return tf.cond(tf.random.uniform([]) < 2.0, branch, lambda: outer)

    assert float(body(trace)()) == 2.0


@CONTRACTS.of(compat.is_vectorized)
def tells_a_vectorized_map():
    seen = []

    def look(row):
        seen.append(compat.is_vectorized(tf.compat.v1.get_default_graph()))
        return row

    tf.function(look, autograph=False).get_concrete_function(tf.ones([2]))
    tf.function(lambda x: tf.map_fn(look, x), autograph=False)(tf.ones([2]))
    assert not any(seen)
    seen.clear()
    tf.vectorized_map(look, tf.ones([2]))
    assert all(seen)


@CONTRACTS.of(compat.recorded)
def records_a_gradient_of_its_own():
    def trace():
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compat.recorded(lambda: x * 5.0, x, lambda gradient: gradient * 7.0)
            z = y * 2.0
        return z, tape.gradient(z, x)

    assert [float(each) for each in body(trace)()] == [30.0, 14.0]


@CONTRACTS.of(compat.shapes_read_as)
def answers_what_a_frame_reads_of_a_shape():
    def look(tensor, shape, frame):
        return tf.TensorShape([7]) if frame.f_code.co_name == "trace" else shape

    @tf.function(autograph=False)
    def read(x):
        def trace():
            return x.shape[0], x.get_shape().as_list()

        with compat.shapes_read_as(look):
            assert trace() == (7, [7])
            assert x.shape.rank == x.get_shape().rank == 1
            assert x.shape[0] is None
            assert tf.ones_like(x).shape.as_list() == [None]
        return x

    read.get_concrete_function(tf.TensorSpec([None], tf.float32))


@CONTRACTS.of(compat.assertions_without_branches)
def asserts_without_a_branch():
    def trace(x):
        with compat.assertions_without_branches():
            tf.debugging.assert_positive(x)
            tf.Assert(x > 0.0, [x])
        return x

    graph = tf.function(trace).get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    kinds = [op.type for op in graph.get_operations()]
    assert kinds.count("Assert") == 2
    assert "If" not in kinds
    with pytest.raises(tf.errors.InvalidArgumentError, match="x > 0"):
        tf.function(trace)(-1.0)


@CONTRACTS.of(compat.record_gradient_of)
def records_an_operation_that_no_generated_function_made():
    def make(original, graph, op_type, inputs, *args, **options):
        if op_type != "TopKV2":
            return original(graph, op_type, inputs, *args, **options)
        op = original(graph, op_type, inputs, *args, **options)
        compat.record_gradient_of(op)
        return compat.Standing(op_type, [], list(op.outputs), options["attrs"])

    @tf.function
    def slopes(x):
        with compat.operations_made_by(make, lambda original, *args, **options: original(*args, **options)):
            with tf.GradientTape() as tape:
                tape.watch(x)
                largest, _ = tf.math.top_k(x, 2)
            return tape.gradient(largest, x)

    assert slopes(tf.constant([3.0, 1.0, 2.0])).numpy().tolist() == [1.0, 0.0, 1.0]


@CONTRACTS.of(compat.operations_made_by, compat.Standing)
def looks_at_operations_as_they_are_made():
    made, captured = [], []

    def make(original, graph, op_type, inputs, *args, **options):
        made.append(op_type)
        if op_type == "Shape":
            return compat.Standing(op_type, inputs, [tf.constant([7, 7])], options["attrs"])
        return original(graph, op_type, inputs, *args, **options)

    def capture(original, graph, tensor, *args, **options):
        captured.append(tensor.dtype)
        return original(graph, tensor, *args, **options)

    @tf.function(autograph=False)
    def trace(x):
        with compat.operations_made_by(make, capture), tf.GradientTape() as tape:
            tape.watch(x)
            shape = tf.shape(x)
            y = tf.cond(x[0] > 0, lambda: x * 2.0, lambda: x)
        return shape, tape.gradient(y, x)

    shape, slope = trace.get_concrete_function(tf.TensorSpec([None], tf.float32))(tf.constant([1.0, 2.0]))
    assert shape.numpy().tolist() == [7, 7]
    assert slope.numpy().tolist() == [2.0, 2.0]
    assert {"Shape", "Mul"} <= set(made)
    assert tf.float32 in captured


@CONTRACTS.of(compat.unique_id)
def tells_variables_apart():
    ids = {compat.unique_id(tf.Variable(1.0, name="same")) for _ in range(2)}
    assert len(ids) == 2


@CONTRACTS.of(compat.is_resource_variable)
def knows_resource_variables():
    assert compat.is_resource_variable(tf.Variable(1.0))
    with tf.Graph().as_default():
        assert not compat.is_resource_variable(tf.compat.v1.Variable(1.0, use_resource=False))


@CONTRACTS.of(compat.is_compiled_by_xla)
def knows_xla():
    def trace():
        return compat.is_compiled_by_xla(tf.compat.v1.get_default_graph())

    seen = []
    for jit in (True, False):
        function = tf.function(lambda: seen.append(trace()) or 1.0, autograph=False, jit_compile=jit)
        function.get_concrete_function()
    assert seen == [True, False]


@CONTRACTS.of(compat.release)
def releases_graphs():
    @tf.custom_gradient
    def identity(x):
        return x, lambda upstream: upstream

    before = len(ops.gradient_registry._registry)
    inner = tf.function(lambda x: identity(x) * 2.0, autograph=False)
    outer = tf.function(lambda x: inner(x) + identity(x), autograph=False)
    function = outer.get_concrete_function(tf.TensorSpec([]))
    assert len(ops.gradient_registry._registry) > before
    compat.release(function)
    assert len(ops.gradient_registry._registry) == before


@CONTRACTS.of(compat.is_branch)
def knows_branches():
    found = []

    def note(value):
        found.append(compat.is_branch(tf.compat.v1.get_default_graph()))
        return value

    @tf.function(autograph=False)
    def function(x):
        tf.while_loop(lambda x: x < 3.0, note, [x])
        tf.switch_case(tf.cast(x, tf.int32), [lambda: note(x), lambda: x])
        return note(tf.cond(x > 0.0, lambda: note(x), lambda: x))

    function.get_concrete_function(tf.constant(1.0))
    assert found == [False, True, True, False]
    assert not compat.is_branch(tf.Graph())


@CONTRACTS.of(compat.writes_resource)
def knows_what_writes_a_variable():
    variable = tf.Variable(1.0)
    read, write = tf.function(lambda: variable + 1.0), tf.function(lambda: variable.assign(2.0))

    @tf.function(autograph=False)
    def function(x):
        tf.cond(x > 0.0, lambda: variable.read_value(), lambda: x)
        tf.cond(x > 0.0, lambda: variable.assign(x), lambda: x)
        variable.assign_add(x)
        return variable.read_value() + read() + write()

    graph = function.get_concrete_function(tf.TensorSpec([])).graph
    handle = graph.capture(variable.handle)
    ops_of = [op for op in graph.get_operations() if any(each is handle for each in op.inputs)]
    found = [(op.type, compat.writes_resource(op, handle)) for op in ops_of]
    assert [each for each in found if each[0] == "If"] == [("If", False), ("If", True)]
    assert [writes for kind, writes in found if kind == "StatefulPartitionedCall"] == [False, True]
    assert {each for each in found if each[0].endswith("VariableOp")} == {
        ("ReadVariableOp", False),
        ("AssignAddVariableOp", True),
    }


@CONTRACTS.of(compat.tape_options)
def knows_its_options():
    for options in ((True, False), (False, True)):
        assert compat.tape_options(tf.GradientTape(*options)) == options


@CONTRACTS.of(compat.share_recording)
def goes_on_with_a_recording():
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
    other = tf.GradientTape()
    compat.share_recording(other, tape)
    assert float(other.gradient(y, x)) == 6.0


def frames_of(call):
    """Return the frames of Python functions that `call` enters."""
    frames, profile = [], sys.getprofile()
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(profile)
    return frames


@CONTRACTS.of(compat.session_slot)
def makes_slots():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("x", [2])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        slot = compat.session_slot(optimizer, variable, "start")
        assert slot.shape == (2,)
        assert compat.session_slot(optimizer, variable, "start") is slot


@CONTRACTS.of(compat.session_counter)
def makes_counters():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        counter = compat.session_counter(optimizer, "steps", tf.compat.v1.get_variable("x", [2]))
        session.run(tf.compat.v1.global_variables_initializer())
        assert counter.graph is graph
        assert int(session.run(counter)) == 0


@CONTRACTS.of(compat.is_compiled_call)
def sees_compiled_calls():
    function = tf.function(lambda x: x + 1.0, autograph=False)
    function(tf.constant(1.0))
    assert sum(map(compat.is_compiled_call, frames_of(lambda: function(tf.constant(1.0))))) == 1


@CONTRACTS.of(compat.is_data_read)
def sees_reads():
    iterator = iter(numbers())
    assert any(map(compat.is_data_read, frames_of(lambda: next(iterator))))


@CONTRACTS.of(compat.is_compute_thread)
def names_its_threads():
    tf.config.list_logical_devices()
    compat.check_frames_and_threads()
    assert not compat.is_compute_thread("python")


@CONTRACTS.of(compat.function_definitions)
def finds_definitions():
    inner = tf.function(lambda x: tf.raw_ops.Square(x=x), autograph=False)
    outer = tf.function(lambda x: inner(x) + 1.0, autograph=False)
    outer(tf.constant(2.0))
    definitions = []
    profile = sys.getprofile()

    def look(frame, event, _):
        if event == "call" and compat.is_compiled_call(frame):
            definitions.extend(compat.function_definitions(frame.f_locals["self"], 10))

    sys.setprofile(look)
    try:
        outer(tf.constant(2.0))
    finally:
        sys.setprofile(profile)
    assert any(node.op == "Square" for each in definitions for node in each.node_def)


@CONTRACTS.of(compat.check_frames_and_threads)
def is_as_the_hang_watch_knows_it():
    tf.config.list_logical_devices()
    compat.check_frames_and_threads()


@CONTRACTS.of(compat.is_kind)
def knows_kinds_of_datasets():
    made = numbers()
    for kinds, datasets in {
        compat.MAPS: [made.map(lambda x: x), made.map(lambda x: x, num_parallel_calls=2)],
        compat.PREFETCHES: [made.prefetch(1)],
        compat.OPTIONS: [made.with_options(tf.data.Options())],
        compat.ORDERS: [made.shuffle(2), made.repeat(2), made.take(1), made.skip(1)],
        compat.BATCHES: [made.batch(2), made.batch(2, num_parallel_calls=2)],
        compat.ZIPS: [tf.data.Dataset.zip(made, made)],
    }.items():
        assert all(compat.is_kind(dataset, kinds) for dataset in datasets), kinds
    assert not compat.is_kind(made, compat.MAPS | compat.ORDERS | compat.PASSING | compat.BATCHES | compat.ZIPS)


@CONTRACTS.of(compat.order_depends_on_timing)
def knows_an_order_that_depends_on_timing():
    for deterministic in (True, False, None):
        how = {"num_parallel_calls": 2, "deterministic": deterministic}
        for made in (
            numbers().map(lambda x: x, **how),
            numbers().batch(2, **how),
            numbers().interleave(lambda x: tf.data.Dataset.range(x), **how),
        ):
            assert compat.order_depends_on_timing(made) == (deterministic is False), made
    assert not compat.order_depends_on_timing(numbers().interleave(lambda x: tf.data.Dataset.range(x)))


@CONTRACTS.of(compat.cache_file)
def knows_the_file_of_a_cache():
    assert compat.cache_file(numbers().cache("folder/file")) == "folder/file"
    assert [compat.cache_file(made) for made in (numbers().cache(), numbers())] == ["", ""]


@CONTRACTS.of(compat.input_of, compat.inputs_of, compat.zipped_nest, compat.batch_of, compat.batches_in)
def knows_what_a_dataset_is_made_of():
    one, other = numbers(), numbers()
    for dataset in (one.batch(2), one.map(lambda x: x), one.shuffle(2), one.prefetch(1), one.repeat()):
        assert compat.input_of(dataset) is one
    assert compat.inputs_of(tf.data.Dataset.zip(one, other)) == [one, other]
    assert compat.inputs_of(one) == []
    assert compat.zipped_nest(tf.data.Dataset.zip({"a": one})) == {"a": one}
    assert compat.batch_of(one.batch(4, drop_remainder=True)) == (4, True)
    assert compat.batch_of(one.batch(3)) == (3, False)
    for made in (one.batch(3), one.batch(3, num_parallel_calls=2, deterministic=True)):
        assert compat.batches_in(made.map(lambda x: x + 1).shuffle(2).prefetch(1)) is made
    assert compat.batches_in(one.batch(3).unbatch()) is None


@CONTRACTS.of(compat.ops_of_map)
def lists_ops_of_a_map():
    called = tf.function(lambda x: tf.numpy_function(lambda y: y, [x], tf.int64), autograph=False)
    assert {"PyFunc"} <= compat.ops_of_map(numbers().map(called))


@CONTRACTS.of(compat.eager_variables)
def makes_variables_in_a_trace():
    """In a function of TensorFlow's, in another one that it calls, and in a branch, each of which is traced once."""
    made, traces = [], []

    def make():
        if len(made) < 3:
            with compat.eager_variables():
                made.append(tf.Variable(tf.ones([2])))
                made.append(keras.Variable(2.0))
                made.append(keras.metrics.Mean())
        made[2].update_state(made[1].value)
        return made[0].assign_add(tf.fill([2], made[1].value))

    def function(inner):
        def outer(x):
            traces.append(1)
            return x + inner()

        return outer

    for inner in (make, tf.function(make), lambda: tf.cond(tf.constant(True), make, lambda: tf.ones([2]))):
        made.clear()
        traces.clear()
        outer = tf.function(function(inner))
        assert [outer(tf.zeros([2])).numpy()[0] for _ in range(2)] == [3.0, 5.0]
        assert float(made[2].result()) == 2.0
        assert len(traces) == 1


@CONTRACTS.of(compat.bare_variable)
def makes_a_variable_in_any_trace():
    """Also in a later one of a function that has made variables of its own, and inside a strategy's scope."""
    own, made = [], []

    @tf.function(autograph=False)
    def function(asks):
        if not own:
            own.append(tf.Variable(1.0))
        if asks and not made:
            made.append(compat.bare_variable(2))
        return own[0] + (tf.cast(made[0].assign_add(1), tf.float32) if asks else 0.0)

    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        assert [float(function(asks)) for asks in (False, True, True)] == [1.0, 4.0, 5.0]
    assert compat.is_resource_variable(made[0])


@CONTRACTS.of(compat.is_stateful_op)
def knows_state():
    assert compat.is_stateful_op("RandomUniform")
    assert not compat.is_stateful_op("AddV2")
    assert not compat.is_stateful_op("NoSuchOp")


@CONTRACTS.of(compat.function_of_map)
def calls_the_function_of_a_map():
    nested = numbers().map(lambda x: {"a": x, "b": (x + 1, x + 2)}).map(lambda each: {"sum": each["a"] + each["b"][1]})
    made = compat.function_of_map(nested)({"a": tf.constant(1, tf.int64), "b": (tf.constant(2, tf.int64),) * 2})
    assert int(made["sum"]) == 3


@CONTRACTS.of(compat.reordered)
def is_in_another_order():
    plain = numbers()
    for like in (
        plain.shuffle(6, seed=3, reshuffle_each_iteration=True),
        plain.shuffle(6),
        plain.repeat(2),
        plain.take(3),
        plain.skip(2),
        plain.prefetch(1),
    ):
        again = compat.reordered(like, plain.map(lambda x: x * 10))
        if not compat.is_kind(like, compat.ORDERS) or "Shuffle" not in type(like).__name__:
            assert [int(x) for x in again] == [int(x) * 10 for x in like]
        else:
            assert sorted(int(x) for x in again) == [0, 10, 20, 30, 40, 50]
    seeded = plain.shuffle(6, seed=3)
    assert [int(x) for x in compat.reordered(seeded, plain)] == [int(x) for x in plain.shuffle(6, seed=3)]


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


@pytest.mark.parametrize(
    ("library", "attribute", "message"),
    [
        (atomic_function.AtomicFunction, "call_flat", r"AtomicFunction\.call_flat"),
        (gen_dataset_ops, "iterator_get_next", "iterator_get_next"),
    ],
)
def test_frames_of_another_name_are_refused(library, attribute, message, monkeypatch):
    """A rank that waits would be taken for one that works."""
    monkeypatch.delattr(library, attribute)
    with pytest.raises(CompatibilityError, match=message):
        compat.check_frames_and_threads()


def test_threads_of_another_name_are_refused(monkeypatch):
    """A rank that computes would be taken for one that hangs."""
    monkeypatch.setattr(compat, "is_compute_thread", lambda name: name.startswith("eigen_"))
    with pytest.raises(CompatibilityError, match="threads are called tf_"):
        compat.check_frames_and_threads()
