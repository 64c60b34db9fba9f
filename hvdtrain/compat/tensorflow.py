"""Private names of TensorFlow, imported only where a function needs it."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from hvdtrain.compat import unlike
from hvdtrain.compat.seams import BRANCH, CAPTURE, GET_SHAPE, OPERATION, SHAPE

# Graphs and functions


def mark_stateful(op: Any, uid: int) -> None:
    """Protect a stateless graph op from common-subexpression elimination and constant folding.

    Assumes `Operation._set_attr`; Grappler merges no ops with different attributes, whatever their names; the runtime
    folds no op with a `_scoped_allocator` (`IsConstantFoldable` in constant_folding.cc).
    """
    from tensorflow.core.framework import attr_value_pb2

    op._set_attr("_hvd_uid", attr_value_pb2.AttrValue(i=uid))
    none = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue())
    op._set_attr("_scoped_allocator", none)


def add_control_inputs(op: Any, before: Sequence[Any]) -> None:
    """Add control dependencies to an op of a graph under construction. Assumes `Operation._add_control_inputs`."""
    op._add_control_inputs(before)


def replace_input(op: Any, place: int, tensor: Any) -> None:
    """Replace input number `place` of an op in a graph under construction. Assumes `Operation._update_input`."""
    op._update_input(place, tensor)


def copy_op(op: Any, inputs: Sequence[Any]) -> Any:
    """Copy an op of a graph with other inputs.

    Assumes `Graph._create_op_internal` takes a node's attributes unchanged.
    """
    attributes = {name: op.node_def.attr[name] for name in op.node_def.attr}
    with op.graph.as_default():
        return op.graph._create_op_internal(
            op.type, inputs, [output.dtype for output in op.outputs], attrs=attributes, op_def=op.op_def
        )


def unique_id(variable: Any) -> str:
    """Return a tf.Variable's process-wide unique id. Assumes `Variable._unique_id`."""
    return str(variable._unique_id)


def is_resource_variable(variable: Any) -> bool:
    """Return whether a variable is a resource, not a TF 1 reference.

    Assumes tensorflow.python.ops.resource_variable_ops.
    """
    from tensorflow.python.ops import resource_variable_ops

    return bool(resource_variable_ops.is_resource_variable(variable))


def is_compiled_by_xla(graph: Any) -> bool:
    """Return whether a graph or an outer one is traced for XLA.

    Assumes tensorflow.python.ops.control_flow_util.
    """
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def release(function: Any) -> None:
    """Allow an unused concrete function's graph to be freed with it.

    TensorFlow registers a gradient for each call of a `tf.custom_gradient` function, which keeps its graph alive. Every
    step of a Keras optimizer has such a call. Assumes the registry is `gradient_registry._registry`, keyed by the
    attribute `_gradient_op_type` of an IdentityN, and a graph lists its callees in `_functions`.
    """
    import tensorflow as tf
    from tensorflow.python.framework import ops

    known = ops.gradient_registry._registry
    graphs = [function.graph]
    for graph in graphs:
        called = (getattr(inner, "graph", None) for inner in graph._functions.values())  # a Defun's has none
        graphs += [inner for inner in called if isinstance(inner, tf.__internal__.FuncGraph)]
        for op in graph.get_operations():
            if op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr:
                known.pop(op.get_attr("_gradient_op_type").decode(), None)


@contextmanager
def outside_of_strategy() -> Iterator[None]:
    """Leave a tf.distribute strategy inside the context, as if its scope had not been entered.

    Assumes `_push_per_thread_mode`, `_pop_per_thread_mode` and `_get_default_replica_mode` of distribute_lib.
    """
    from tensorflow.python.distribute import distribute_lib

    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextmanager
def eager_variables() -> Iterator[None]:
    """Make variables eagerly inside the context, also while a function is traced; the caller must keep them.

    TensorFlow traces a function once more that makes variables in its first trace, also within `tf.init_scope`. A
    function that did so may make none in later traces, here neither.
    Assumes that a creator of variables is asked before that of a traced function, which passes over such variables.
    """
    import tensorflow as tf

    def make(next_creator: Callable[..., Any], **options: Any) -> Any:
        return next_creator(**{**options, "experimental_enable_variable_lifting": False})

    with tf.init_scope(), tf.variable_creator_scope(make):
        yield


def bare_variable(value: Any) -> Any:
    """Return an eager variable on the CPU in which neither a function that is being traced nor a strategy takes part.

    Assumes that `ResourceVariable` asks no creator of variables.
    """
    import tensorflow as tf
    from tensorflow.python.ops import resource_variable_ops

    with tf.init_scope(), tf.device("/cpu:0"):
        return resource_variable_ops.ResourceVariable(value, trainable=False)


def compiled(body: Any, *, reduce_retracing: bool = False) -> Any:
    """Compile `body` without autograph, and without TensorFlow's warning where every trainer compiles its own.

    Assumes `Function._omit_frequent_tracing_warning`: calls are counted by the place of the code, not by function.
    """
    import tensorflow as tf

    function = tf.function(body, autograph=False, reduce_retracing=reduce_retracing)
    function._omit_frequent_tracing_warning = True
    return function


def converted_function(function: Any) -> Callable[..., Any]:
    """Return what a `tf.function` calls, converted by autograph where it does so.

    Assumes `Function.python_function` and `_autograph`, and `tf_convert` with a context that enables it.
    """
    import tensorflow as tf

    if not function._autograph:
        return function.python_function
    from tensorflow.python.autograph.core import ag_ctx

    enabled = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    return tf.__internal__.autograph.tf_convert(function.python_function, enabled, user_requested=True)


def copied_function(function: Any) -> Any:
    """Return a `tf.function` like this one that has no graphs yet. Assumes `Function._clone`."""
    return function._clone(None)


def is_branch(graph: Any) -> bool:
    """Return whether a FuncGraph is a branch of tf.cond or tf.switch_case. Assumes control_flow_v2_func_graphs."""
    from tensorflow.python.ops import control_flow_v2_func_graphs

    return isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def writes_resource(op: Any, handle: Any) -> bool:
    """Return whether an op of a graph, or a function that it calls, may write a resource, one of its inputs.

    Assumes auto_control_deps_utils, by which tf.function orders the ops that use a resource.
    """
    from tensorflow.python.framework import auto_control_deps_utils

    return any(each is handle for each in auto_control_deps_utils.get_read_write_resource_inputs(op)[1])


def tape_options(tape: Any) -> tuple[bool, bool]:
    """Return a `tf.GradientTape`'s `persistent` and `watch_accessed_variables`.

    Assumes `GradientTape._persistent` and `_watch_accessed_variables`.
    """
    return bool(tape._persistent), bool(tape._watch_accessed_variables)


def share_recording(tape: Any, recorded: Any) -> None:
    """Make a `tf.GradientTape` continue the recording of another one.

    Assumes `GradientTape._tape`, None before recording.
    """
    tape._tape = recorded._tape


def session_slot(optimizer: Any, variable: Any, name: str) -> Any:
    """Return or create a TensorFlow 1 optimizer's zero slot for `variable`. Assumes `Optimizer._zeros_slot`."""
    return optimizer._zeros_slot(variable, name, optimizer.get_name())


def session_counter(optimizer: Any, name: str, beside: Any) -> Any:
    """Create a TF 1 optimizer's zero counter in the graph of `beside`.

    Assumes `Optimizer._create_non_slot_variable`.
    """
    import tensorflow as tf

    return optimizer._create_non_slot_variable(tf.constant(0, tf.int64), name, beside)


# Frames and threads; usable without TensorFlow


def is_compiled_call(frame: FrameType) -> bool:
    """Return whether a Python stack frame runs a compiled function.

    Assumes all run in `AtomicFunction.call_flat`, whose `self` is the function.
    """
    module = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_name == "call_flat" and module.endswith(".atomic_function")


def is_data_read(frame: FrameType) -> bool:
    """Return whether a Python stack frame waits for a tf.data.Dataset.

    Assumes the ops `iterator_get_next…` of gen_dataset_ops.
    """
    return frame.f_code.co_name.startswith("iterator_get_next")


def is_compute_thread(name: str) -> bool:
    """Return whether a thread, by /proc name, computes or reads for TensorFlow.

    Assumes its thread pools' names begin with `tf_`.
    """
    return name.startswith("tf_")


def function_definitions(function: Any, most: int) -> Iterator[Any]:
    """Yield the FunctionDefs of a compiled function and its callees.

    `function` is the `self` of a frame for which `is_compiled_call` holds. Assumes `AtomicFunction._bound_context`
    finds them by name, and `cached_definition` is the function's own.
    """
    context, left, seen = function._bound_context, [function.cached_definition], set[str]()
    while left and len(seen) < most:
        definition = left.pop()
        yield definition
        attributes = (value for node in definition.node_def for value in node.attr.values())
        called = {value.func.name for value in attributes if value.func.name} - seen
        seen |= called
        left += [context.get_function_def(name) for name in called if context.has_function(name)]


def check_frames_and_threads() -> None:
    """Check the hang watchdog's assumptions, once TensorFlow has devices.

    Raises CompatibilityError if violated: busy ranks would look hung, or hung ranks busy.
    """
    from tensorflow.python.eager.polymorphic_function import atomic_function
    from tensorflow.python.ops import gen_dataset_ops

    function = getattr(atomic_function, "AtomicFunction", None)
    known = {*getattr(function, "__slots__", ()), *vars(function or object)}
    if not {"call_flat", "_bound_context", "cached_definition"} <= known:
        raise unlike("tensorflow", is_compiled_call, "Compiled functions run in AtomicFunction.call_flat")
    if not hasattr(gen_dataset_ops, "iterator_get_next"):
        raise unlike("tensorflow", is_data_read, "Datasets are read by gen_dataset_ops.iterator_get_next")
    names = [name for name in map(_thread_name, Path("/proc/self/task").glob("*/comm")) if name]
    if names and not any(map(is_compute_thread, names)):
        raise unlike("tensorflow", is_compute_thread, "TensorFlow's threads are called tf_…")


def _thread_name(comm: Path) -> str:
    try:
        return comm.read_text()
    except OSError:  # it has just ended
        return ""


# tf.data


MAPS = frozenset({"_MapDataset", "_ParallelMapDataset"})
PREFETCHES = frozenset({"_PrefetchDataset"})
OPTIONS = frozenset({"_OptionsDataset"})
PASSING = PREFETCHES | OPTIONS
"""Datasets that change neither elements nor their order."""
ORDERS = frozenset({"_ShuffleDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset"})
"""Datasets whose order does not depend on the elements."""
BATCHES = frozenset({"_BatchDataset", "_ParallelBatchDataset"})
ZIPS = frozenset({"_ZipDataset"})


def is_kind(dataset: Any, kinds: frozenset[str]) -> bool:
    """Return whether a Dataset is one of `MAPS`, `PASSING`, `ORDERS`, `BATCHES`, `ZIPS` ….

    Assumes class names in tensorflow.python.data.ops; with others, maps are left in place.
    """
    return type(dataset).__name__ in kinds


def input_of(dataset: Any) -> Any:
    """Return the input of a single-input dataset, such as a map. Assumes `_input_dataset`."""
    return dataset._input_dataset


def inputs_of(dataset: Any) -> list[Any]:
    """Return a dataset's inputs. Assumes `Dataset._inputs()`."""
    return list(dataset._inputs())


def order_depends_on_timing(dataset: Any) -> bool:
    """Return whether a dataset's last transformation was made with `deterministic=False`.

    Assumes `_deterministic` of parallel maps and batches, and the attribute `deterministic` of the node of a parallel
    interleave, which keeps it nowhere else.
    """
    import tensorflow as tf

    if type(dataset).__name__ != "_ParallelInterleaveDataset":
        return bool(getattr(dataset, "_deterministic", None) == "false")
    try:
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=tf.data.experimental.to_variant(dataset))
    except tf.errors.OpError:  # what it reads does not fit into a graph
        return False
    nodes = tf.compat.v1.GraphDef.FromString(graph.numpy()).node
    return any(n.op.startswith("ParallelInterleave") and n.attr["deterministic"].s == b"false" for n in nodes)


def cache_file(dataset: Any) -> str:
    """Return the file in which a dataset caches its elements; "" without one. Assumes `CacheDataset._filename`."""
    return dataset._filename.numpy().decode() if type(dataset).__name__ == "CacheDataset" else ""


def zipped_nest(dataset: Any) -> Any:
    """Return the nest of datasets in a zip. Assumes `_datasets` of `_ZipDataset`."""
    return dataset._datasets


def batch_of(dataset: Any) -> tuple[int, bool]:
    """Return batch size and `drop_remainder` of one of `BATCHES`. Assumes `_batch_size` and `_drop_remainder`."""
    return int(dataset._batch_size), bool(dataset._drop_remainder)


def batches_in(dataset: Any) -> Any:
    """Return the Dataset, of `BATCHES`, that makes another's batches, below maps and orders; None if none."""
    while is_kind(dataset, PASSING | ORDERS | MAPS):
        dataset = input_of(dataset)
    return dataset if is_kind(dataset, BATCHES) else None


def ops_of_map(dataset: Any) -> set[str]:
    """Return the op types, nested calls included, of a map's function. Assumes `_map_func`."""
    graph = dataset._map_func.function.graph.as_graph_def()
    return {node.op for part in (graph.node, *(inner.node_def for inner in graph.library.function)) for node in part}


def is_stateful_op(kind: str) -> bool:
    """Return whether an op type is stateful: random numbers, Python functions.

    Assumes tensorflow.python.framework.op_def_registry.
    """
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(kind)
    return definition is not None and definition.is_stateful


def function_of_map(dataset: Any) -> Callable[[Any], Any]:
    """Return a map's traced function, which takes an element as one nest.

    Assumes `_map_func` holds the function and its `output_structure`, and `structure` in tensorflow.python.data.util
    converts between nests and flat tensors as it does.
    """
    import tensorflow as tf
    from tensorflow.python.data.util import structure

    traced, spec = dataset._map_func, input_of(dataset).element_spec

    def call(element: Any) -> Any:
        made = traced.function(*structure.to_tensor_list(spec, element))
        made = tf.nest.flatten(made) if made is not None else []
        return structure.from_compatible_tensor_list(traced.output_structure, made)

    return call


def reordered(like: Any, elements: Any) -> Any:
    """Apply `like`'s reordering (of `ORDERS` or `PASSING`) to other elements.

    A shuffle keeps its seeds; `Dataset.shuffle` would generate new ones. Assumes `_count`; of shuffles `_buffer_size`,
    `_seed`, `_seed2` and `_reshuffle_each_iteration`; of any dataset `_variant_tensor` and `_flat_structure`.
    """
    import tensorflow as tf

    kind = type(like).__name__
    if kind == "_RepeatDataset":
        return elements.repeat(like._count)
    if kind == "_TakeDataset":
        return elements.take(like._count)
    if kind == "_SkipDataset":
        return elements.skip(like._count)
    if kind != "_ShuffleDataset":
        return elements
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=elements._variant_tensor,
        buffer_size=like._buffer_size,
        seed=like._seed,
        seed2=like._seed2,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=like._reshuffle_each_iteration,
        **elements._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, elements.element_spec)


# Operations as they are traced


def graph_of(tensor: Any) -> Any:
    """Return a tensor's graph; of an eager tensor, the one that is being traced."""
    import tensorflow as tf

    return getattr(tensor, "graph", None) or tf.compat.v1.get_default_graph()


@contextmanager
def in_graph_of(tensor: Any) -> Iterator[None]:
    """Make operations in the graph of a tensor, which may be one around the graph that is being traced."""
    import tensorflow as tf

    graph = graph_of(tensor)
    if graph is tf.compat.v1.get_default_graph():
        yield
        return
    with graph.as_default(), graph.control_dependencies(None):
        yield


def is_vectorized(graph: Any) -> bool:
    """Return whether `graph` is traced inside `tf.vectorized_map`. Assumes the name scope that it has there."""
    import tensorflow as tf

    scopes = graph.get_name_scope().split("/") if tf.compat.v1.get_default_graph() is graph else []
    return any(re.fullmatch(r"loop_body(_\d+)?", scope) for scope in scopes)


def recorded(forward: Callable[[], Any], tensor: Any, back: Callable[[Any], Any]) -> Any:
    """Return `forward()`, which tapes record as one operation on `tensor` whose gradient is `back` of its own.

    Assumes tensorflow.python.eager.record, by which TensorFlow records the operations that it makes.
    """
    import tensorflow as tf
    from tensorflow.python.eager import record

    with record.stop_recording():
        value = forward()
    if value.dtype.is_floating or value.dtype.is_complex:
        # Of rows that were looked up, gradients are IndexedSlices.
        record.record_operation("Conversion", [value], [tensor], lambda slope: [back(tf.convert_to_tensor(slope))])
    return value


@contextmanager
def shapes_read_as(look: Callable[[Any, Any, FrameType], Any]) -> Iterator[None]:
    """Let `look(tensor, shape, frame)` stand for the shapes that frames read of a graph's tensors, in this thread.

    Assumes that `Tensor.shape` is a property of Python.
    """
    import tensorflow as tf

    shape: Any = SHAPE.active(tf.Tensor)
    read: Any = property(lambda tensor: look(tensor, shape.__get__(tensor), sys._getframe(2)))
    with (
        SHAPE.replaced(tf.Tensor, read),
        GET_SHAPE.replaced(tf.Tensor, lambda tensor: look(tensor, shape.__get__(tensor), sys._getframe(1))),
    ):
        yield


@contextmanager
def assertions_without_branches() -> Iterator[None]:
    """Let `tf.Assert` check without a branch inside the context, in this thread.

    Assumes the module whose `cond` it calls by the name `AssertGuard`, with the check as the second branch.
    """
    from tensorflow.python.ops import cond as module

    branch = BRANCH.active(module)

    def take(pred: Any, true_fn: Any = None, false_fn: Any = None, *args: Any, name: Any = None, **options: Any) -> Any:
        if name == "AssertGuard":
            return SimpleNamespace(op=false_fn())
        return branch(pred, true_fn, false_fn, *args, name=name, **options)

    with BRANCH.replaced(module, take):
        yield


def record_gradient_of(op: Any) -> Any:
    """Return an operation that tapes record here, rather than in the generated function of its kind.

    Assumes `record.record_operation`, and `ops.get_gradient_function`, which knows what gradients are registered.
    """
    from tensorflow.python.eager import record
    from tensorflow.python.framework import ops

    def back(*slopes: Any) -> Any:
        gradient = ops.get_gradient_function(op)
        found = [None] * len(op.inputs) if gradient is None else gradient(op, *slopes)
        return list(found) if isinstance(found, list | tuple) else [found]

    record.record_operation(op.type, list(op.outputs), list(op.inputs), back)
    return op


@contextmanager
def operations_made_by(make: Callable[..., Any], capture: Callable[..., Any]) -> Iterator[None]:
    """Let `make` and `capture` stand for how a function's graph makes operations and captures tensors, in this thread.

    `make(original, graph, op_type, inputs, …)` returns the operation, `capture(original, graph, tensor, …)` what stands
    for an outer tensor. Assumes `FuncGraph._create_op_internal`, through which all operations of functions, branches
    and loops are made, and `FuncGraph.capture`.
    """
    import tensorflow as tf

    kind = tf.__internal__.FuncGraph
    made, captured = OPERATION.active(kind), CAPTURE.active(kind)

    def create(graph: Any, *args: Any, **options: Any) -> Any:
        return make(made, graph, *args, **options)

    def take(graph: Any, *args: Any, **options: Any) -> Any:
        return capture(captured, graph, *args, **options)

    with OPERATION.replaced(kind, create), CAPTURE.replaced(kind, take):
        yield


class Standing:
    """Stands for an operation that was not made, of which other operations gave the outputs.

    Assumes which methods of `Operation` generated code calls once it has made one: those that read attributes.
    """

    def __init__(self, op_type: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Any) -> None:
        self.type = op_type
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self._attrs = attrs

    def get_attr(self, name: str) -> Any:
        """Return an attribute, of which only integers, truth values and types are used."""
        value = self._attrs[name]
        return getattr(value, value.WhichOneof("value"))

    def _get_attr_type(self, name: str) -> Any:
        return self._attrs[name].type

    def _get_attr_int(self, name: str) -> int:
        return int(self._attrs[name].i)

    def _get_attr_bool(self, name: str) -> bool:
        return bool(self._attrs[name].b)
