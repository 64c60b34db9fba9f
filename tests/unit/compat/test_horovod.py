"""What hvdtrain takes for granted about Horovod and mpi4py, as far as one process shows."""

import ctypes
import inspect
import os
import sys
from types import ModuleType

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.runner.http.http_server import KVStoreHandler

from hvdtrain.compat import horovod as compat
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "horovod")
SCALES = {"prescale_factor": 2.0, "postscale_factor": 0.5}
OPTIONS = {"name": "x", "op": hvd.Sum, "process_set": hvd.global_process_set, **SCALES}


class Pair:
    """A process set of two ranks, as far as graphs ask for it."""

    process_set_id = 0

    def size(self):
        return 2

    def included(self):
        return True


def op_of(call, given):
    """Return the only op of Horovod's that `call` adds to a graph, and its outputs."""
    with tf.Graph().as_default() as graph:
        made = call(given(tf.compat.v1.placeholder(tf.float32, [2, 3])), **OPTIONS)
        (op,) = (each for each in graph.get_operations() if each.type.startswith("Horovod"))
    assert (op.get_attr("prescale_factor"), op.get_attr("postscale_factor")) == (2.0, 0.5)
    return op, made


@CONTRACTS.of(compat.all_reduce, compat.grouped_all_reduce, compat.reduce_scatter, compat.grouped_reduce_scatter)
def adds_an_op():
    op, made = op_of(compat.all_reduce, lambda x: x)
    assert (op.type, op.name) == ("HorovodAllreduce", "x")
    assert made.op is op
    op, made = op_of(compat.grouped_all_reduce, lambda x: [x, x])
    assert (op.type, len(made)) == ("HorovodGroupedAllreduce", 2)
    op, made = op_of(compat.reduce_scatter, lambda x: x)
    assert (op.type, made.shape[1]) == ("HorovodReducescatter", 3)
    op, made = op_of(compat.grouped_reduce_scatter, lambda x: [x, x])
    assert (op.type, len(made)) == ("HorovodGroupedReducescatter", 2)


@CONTRACTS.of(compat.bare_reductions)
def has_bare_reductions():
    for op in compat.bare_reductions():
        assert {"name", "op", "prescale_factor", "postscale_factor"} <= set(inspect.signature(op).parameters)


@CONTRACTS.of(compat.keras_callbacks)
def has_callbacks():
    assert isinstance(compat.keras_callbacks(), ModuleType)


@CONTRACTS.of(compat.keras_elastic_callbacks)
def has_elastic_callbacks():
    elastic = compat.keras_elastic_callbacks()
    kinds = {f"{what}StateCallbackImpl" for what in ("Commit", "UpdateBatch", "UpdateEpoch")}
    assert kinds <= set(vars(elastic))


@CONTRACTS.of(compat.learning_rate_schedule)
def schedules_by_our_function():
    class Schedule(compat.learning_rate_schedule()):
        rates = ()

        def set_rate(self, epoch):
            self.rates += (epoch,)

    made = Schedule(None, 0.1, lambda epoch: 1.0, staircase=False, steps_per_epoch=4)
    made.restore_momentum = 0.5  # without a model, putting it back would fail
    made.on_epoch_begin(1)
    made.on_batch_begin(2)
    made.on_batch_end(2)
    assert made.rates == (1.5,)


@CONTRACTS.of(compat.script_utilities)
def has_utilities():
    cache, executing_eagerly, make_subgraph = compat.script_utilities()
    assert executing_eagerly()
    assert int(make_subgraph(lambda x: x + 1)(tf.constant(1))) == 2
    assert cache(lambda x: [x])(1) is not None


@CONTRACTS.of(compat.aggregation_of_present)
def aggregates_what_is_present():
    seen = []

    def reduce(gradients, variables):
        seen.append(variables)
        return gradients

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kind = compat.aggregation_of_present()
        helper = kind(2, reduce, False, False, 0, compat.legacy_optimizer_type(), Pair())
        variables = [tf.compat.v1.get_variable(name, []) for name in "abc"]
        helper.compute_gradients([tf.constant(1.0), None, tf.constant(3.0)], variables)
        session.run(tf.compat.v1.global_variables_initializer())
    assert seen == [[variables[0], variables[2]]]


@CONTRACTS.of(compat.legacy_optimizer_type)
def knows_legacy_optimizers():
    compat.legacy_optimizer_type()


def wrapped(kind):
    inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    return kind(inner), inner


@CONTRACTS.of(compat.replace_reduction)
def reduces_by_our_function():
    with tf.Graph().as_default():
        inner = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        optimizer = compat.session_optimizer_class()(inner, process_set=Pair())
        compat.replace_reduction(optimizer, lambda gradients, variables: [gradient * 3 for gradient in gradients])
        x = tf.compat.v1.get_variable("x", [], initializer=tf.compat.v1.ones_initializer())
        ((gradient, _),) = optimizer.compute_gradients(x * 2.0, [x])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert float(session.run(gradient)) == 6.0


@CONTRACTS.of(compat.replace_aggregation)
def aggregates_by_our_helper():
    class Helper:
        def apply_gradients(self, apply, optimizer, pairs, *arguments, **options):
            return pairs

    with tf.Graph().as_default():
        optimizer, _ = wrapped(compat.session_optimizer_class())
        compat.replace_aggregation(optimizer, Helper())
        assert optimizer.apply_gradients([]) == ([],) or optimizer.apply_gradients([]) == []


@CONTRACTS.of(compat.aggregates_gradients)
def tells_optimizers_of_keras_2():
    class Legacy:
        def _aggregate_gradients(self, pairs):
            return pairs

    assert compat.aggregates_gradients(Legacy())
    assert not compat.aggregates_gradients(tf.keras.optimizers.SGD())


@CONTRACTS.of(compat.session_optimizer_class)
def wraps_session_optimizers():
    assert issubclass(compat.session_optimizer_class(), tf.compat.v1.train.Optimizer)


@CONTRACTS.of(compat.session_adasum_class)
def wraps_session_optimizers_for_adasum():
    assert issubclass(compat.session_adasum_class(), tf.compat.v1.train.Optimizer)


@CONTRACTS.of(compat.wrapped_optimizer)
def knows_what_it_wraps():
    for kind in (compat.session_optimizer_class(), compat.session_adasum_class()):
        with tf.Graph().as_default():
            optimizer, inner = wrapped(kind)
            assert compat.wrapped_optimizer(optimizer) is inner


@CONTRACTS.of(compat.stored_value)
def reads_the_store():
    assert callable(KVStoreHandler._get_value)


@CONTRACTS.of(compat.load_mpi_library)
def loads_the_mpi_library():
    assert isinstance(compat.load_mpi_library(), ctypes.CDLL)


@CONTRACTS.of(compat.bind_mpi_at_once)
def sets_the_mode():
    from mpi4py import _mpiabi

    before = _mpiabi.LIBMPI_MODE
    compat.bind_mpi_at_once(os.RTLD_NOW)
    assert _mpiabi.LIBMPI_MODE == os.RTLD_NOW
    compat.bind_mpi_at_once(before)


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


def test_nothing_is_imported_before_it_is_needed():
    assert not {"horovod", "mpi4py", "mpi_ops"} & set(vars(compat))
    assert sys.modules["horovod"] is not None
