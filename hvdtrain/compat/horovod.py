"""Private names of Horovod and mpi4py, by what hvdtrain uses them for; a function imports the library that it needs."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def all_reduce(tensor: Any, **options: Any) -> Any:
    """Reduce a tensor as Horovod's op does: without a gradient, compression, or a division of its own.

    Assumed: `mpi_ops._allreduce`, and the arguments `name`, `op`, `prescale_factor`, `postscale_factor`, `process_set`.
    """
    from horovod.tensorflow import mpi_ops

    return mpi_ops._allreduce(tensor, **options)


def grouped_all_reduce(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """Reduce tensors of one dtype in one message, as `all_reduce`.

    Assumed: `mpi_ops._grouped_allreduce`.
    """
    from horovod.tensorflow import mpi_ops

    return list(mpi_ops._grouped_allreduce(tensors, **options))


def reduce_scatter(tensor: Any, **options: Any) -> Any:
    """Reduce a tensor and return this rank's rows of it, as `all_reduce`.

    Assumed: `mpi_ops._reducescatter`.
    """
    from horovod.tensorflow import mpi_ops

    return mpi_ops._reducescatter(tensor, **options)


def grouped_reduce_scatter(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """Reduce tensors of one dtype in one message, and return this rank's rows of each.

    Assumed: `mpi_ops._grouped_reducescatter`.
    """
    from horovod.tensorflow import mpi_ops

    return list(mpi_ops._grouped_reducescatter(tensors, **options))


def keras_callbacks() -> ModuleType:
    """Return the module with the parts of Horovod's callbacks that are the same for both of its Keras packages.

    Assumed: `horovod._keras.callbacks`.
    """
    from horovod._keras import callbacks

    return callbacks


def keras_elastic_callbacks() -> ModuleType:
    """Return the same for callbacks of elastic jobs.

    Assumed: `horovod._keras.elastic`.
    """
    from horovod._keras import elastic

    return elastic


def learning_rate_schedule() -> type:
    """Return Horovod's class of callbacks that schedule the learning rate, which a method `set_rate(epoch)` sets.

    Assumed: `LearningRateScheduleCallbackImpl` asks `_adjust_learning_rate` to set the rate of an epoch, a fraction
    maybe, and `_restore_momentum_if_needed` to put back a momentum that it has changed.
    """

    class LearningRateSchedule(keras_callbacks().LearningRateScheduleCallbackImpl):  # type: ignore[misc]
        def set_rate(self, epoch: float) -> None:
            raise NotImplementedError

        def _adjust_learning_rate(self, epoch: float) -> None:
            self.set_rate(epoch)

        def _restore_momentum_if_needed(self) -> None:
            """Do nothing: the momentum itself is not changed."""

    return LearningRateSchedule


def script_utilities() -> tuple[Any, Any, Any]:
    """Return the functions that scripts take from `horovod.tensorflow.util`, besides its public ones.

    Assumed: `_cache`, `_executing_eagerly` and `_make_subgraph`.
    """
    from horovod.tensorflow import util

    return util._cache, util._executing_eagerly, util._make_subgraph


def aggregation_of_present() -> type:
    """Return Horovod's class that adds gradients of graphs up locally, but for variables whose gradient is None.

    Assumed: `LocalGradientAggregationHelper._allreduce_grads_helper` matches gradients that are not None with `vars` by
    position, and `not_none_indexes` holds their places.
    """
    from horovod.tensorflow import gradient_aggregation

    class AggregationOfPresent(gradient_aggregation.LocalGradientAggregationHelper):
        def _allreduce_grads_helper(self, vars: Sequence[Any]) -> list[Any]:
            return super()._allreduce_grads_helper([v for i, v in enumerate(vars) if i in self.not_none_indexes])

    return AggregationOfPresent


def legacy_optimizer_type() -> Any:
    """Return what tells `LocalGradientAggregationHelper` that it is for an optimizer of TensorFlow 1.

    Assumed: `_OPTIMIZER_TYPE_LEGACY`.
    """
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

    return LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY


def replace_reduction(owner: Any, reduce: Callable[..., Any]) -> None:
    """Let an optimizer of TensorFlow 1, or what aggregates for it, reduce gradients by `reduce(gradients, variables)`.

    Assumed: `_allreduce_grads` of both.
    """
    owner._allreduce_grads = reduce


def replace_aggregation(optimizer: Any, helper: Any) -> None:
    """Let an optimizer of TensorFlow 1 add gradients up by a LocalGradientAggregationHelper, from pass to pass.

    Assumed: `_agg_helper`, None where each pass reduces.
    """
    optimizer._agg_helper = helper


def aggregates_gradients(optimizer: Any) -> bool:
    """Whether an optimizer of Keras knows how Horovod adds gradients up over several passes: one of Keras 2's does.

    Assumed: `_aggregate_gradients` of those in `tf_keras.optimizers.legacy`.
    """
    return hasattr(optimizer, "_aggregate_gradients")


def session_optimizer_class() -> Any:
    """Return Horovod's class that wraps an optimizer of TensorFlow 1.

    Assumed: `horovod.tensorflow._DistributedOptimizer`.
    """
    import horovod.tensorflow as hvd

    return hvd._DistributedOptimizer


def session_adasum_class() -> Any:
    """Return Horovod's class that wraps an optimizer of TensorFlow 1 and combines its steps by Adasum.

    Assumed: `horovod.tensorflow._DistributedAdasumOptimizer`.
    """
    import horovod.tensorflow as hvd

    return hvd._DistributedAdasumOptimizer


def wrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that one of these two wraps.

    Assumed: `_optimizer`.
    """
    return optimizer._optimizer


def stored_value(handler: Any, scope: str, key: str) -> bytes | None:
    """Return what is kept in the store of Horovod's rendezvous, of which `handler` answers a request; None: nothing.

    Assumed: `KVStoreHandler._get_value`.
    """
    return handler._get_value(scope, key)


def load_mpi_library() -> Any:
    """Return the MPI library (ctypes) that mpi4py loads, before MPI starts.

    Assumed: `mpi4py._mpiabi._dlopen_libmpi`, since mpi4py 4.1.

    Raises:
        ImportError, AttributeError: mpi4py is another one, such as one that was compiled for a single MPI.
        RuntimeError, OSError: the library cannot be loaded.
    """
    from mpi4py import _mpiabi

    return _mpiabi._dlopen_libmpi()  # type: ignore[attr-defined]


def bind_mpi_at_once(mode: int) -> None:
    """Let mpi4py open the MPI library with this mode (`os.RTLD_…`); nothing where it was compiled for a single MPI.

    Assumed: `mpi4py._mpiabi.LIBMPI_MODE`.

    Raises:
        ImportError: mpi4py is missing or another one.
    """
    from mpi4py import _mpiabi

    if hasattr(_mpiabi, "LIBMPI_MODE"):
        _mpiabi.LIBMPI_MODE = mode
