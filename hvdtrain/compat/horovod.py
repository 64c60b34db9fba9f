"""Private names of Horovod and mpi4py. Each function imports only the library that it needs."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def all_reduce(tensor: Any, **options: Any) -> Any:
    """Reduce a tensor by Horovod's bare op: no gradient, compression or division.

    Assumes `mpi_ops._allreduce` with `name`, `op`, `prescale_factor`, `postscale_factor` and `process_set`.
    """
    from horovod.tensorflow import mpi_ops

    return mpi_ops._allreduce(tensor, **options)


def grouped_all_reduce(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """Reduce tensors of one dtype in one message. Assumes `mpi_ops._grouped_allreduce`."""
    from horovod.tensorflow import mpi_ops

    return list(mpi_ops._grouped_allreduce(tensors, **options))


def reduce_scatter(tensor: Any, **options: Any) -> Any:
    """Reduce a tensor and return this rank's rows. Assumes `mpi_ops._reducescatter`."""
    from horovod.tensorflow import mpi_ops

    return mpi_ops._reducescatter(tensor, **options)


def grouped_reduce_scatter(tensors: Sequence[Any], **options: Any) -> list[Any]:
    """Reduce-scatter tensors of one dtype in one message. Assumes `mpi_ops._grouped_reducescatter`."""
    from horovod.tensorflow import mpi_ops

    return list(mpi_ops._grouped_reducescatter(tensors, **options))


def bare_reductions() -> tuple[Callable[..., Any], ...]:
    """Return Horovod's bare ops: all-reduce, grouped all-reduce, reduce-scatter and grouped reduce-scatter."""
    from horovod.tensorflow import mpi_ops

    return mpi_ops._allreduce, mpi_ops._grouped_allreduce, mpi_ops._reducescatter, mpi_ops._grouped_reducescatter


def keras_callbacks() -> ModuleType:
    """Return the shared base of Horovod's Keras callbacks. Assumes `horovod._keras.callbacks`."""
    from horovod._keras import callbacks

    return callbacks


def keras_elastic_callbacks() -> ModuleType:
    """Return the shared base of Horovod's elastic Keras callbacks. Assumes `horovod._keras.elastic`."""
    from horovod._keras import elastic

    return elastic


def learning_rate_schedule() -> type:
    """Return Horovod's schedule callback with an overridable `set_rate(epoch)`.

    Assumes `LearningRateScheduleCallbackImpl` calls `_adjust_learning_rate` with the epoch, possibly a fraction, and
    `_restore_momentum_if_needed` after it changed a momentum.
    """

    class LearningRateSchedule(keras_callbacks().LearningRateScheduleCallbackImpl):  # type: ignore[misc]
        def set_rate(self, epoch: float) -> None:
            raise NotImplementedError

        def _adjust_learning_rate(self, epoch: float) -> None:
            self.set_rate(epoch)

        def _restore_momentum_if_needed(self) -> None:
            """No-op: the momentum is not changed."""

    return LearningRateSchedule


def script_utilities() -> tuple[Any, Any, Any]:
    """Return private helpers of `horovod.tensorflow.util` that scripts import.

    Assumes `_cache`, `_executing_eagerly` and `_make_subgraph`.
    """
    from horovod.tensorflow import util

    return util._cache, util._executing_eagerly, util._make_subgraph


def aggregation_of_present() -> type:
    """Return Horovod's local gradient aggregation, fixed for gradients that are None.

    Assumes `LocalGradientAggregationHelper._allreduce_grads_helper` matches gradients that are not None with `vars` by
    position, and `not_none_indexes` holds their indices.
    """
    from horovod.tensorflow import gradient_aggregation

    class AggregationOfPresent(gradient_aggregation.LocalGradientAggregationHelper):
        def _allreduce_grads_helper(self, vars: Sequence[Any]) -> list[Any]:
            return super()._allreduce_grads_helper([v for i, v in enumerate(vars) if i in self.not_none_indexes])

    return AggregationOfPresent


def legacy_optimizer_type() -> Any:
    """Return the marker for TensorFlow 1 optimizers. Assumes `_OPTIMIZER_TYPE_LEGACY`."""
    from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

    return LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY


def replace_reduction(owner: Any, reduce: Callable[..., Any]) -> None:
    """Replace the reduction of a TensorFlow 1 optimizer or its aggregation helper. Assumes `_allreduce_grads`."""
    owner._allreduce_grads = reduce


def replace_aggregation(optimizer: Any, helper: Any) -> None:
    """Set the aggregation helper of a TensorFlow 1 optimizer. Assumes `_agg_helper`."""
    optimizer._agg_helper = helper


def aggregates_gradients(optimizer: Any) -> bool:
    """Return whether a Keras optimizer supports Horovod's local aggregation (Keras 2 only).

    Assumes `_aggregate_gradients` of `tf_keras.optimizers.legacy`.
    """
    return hasattr(optimizer, "_aggregate_gradients")


def session_optimizer_class() -> Any:
    """Return Horovod's wrapper of a TensorFlow 1 optimizer. Assumes `horovod.tensorflow._DistributedOptimizer`."""
    import horovod.tensorflow as hvd

    return hvd._DistributedOptimizer


def session_adasum_class() -> Any:
    """Return Horovod's Adasum wrapper of a TensorFlow 1 optimizer. Assumes `_DistributedAdasumOptimizer`."""
    import horovod.tensorflow as hvd

    return hvd._DistributedAdasumOptimizer


def wrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside either wrapper. Assumes `_optimizer`."""
    return optimizer._optimizer


def stored_value(handler: Any, scope: str, key: str) -> bytes | None:
    """Return a value in Horovod's rendezvous store; None if missing. Assumes `KVStoreHandler._get_value`."""
    return handler._get_value(scope, key)


def load_mpi_library() -> Any:
    """Return the MPI library (ctypes) that mpi4py loads, before MPI is initialized.

    Assumes `mpi4py._mpiabi._dlopen_libmpi`, since mpi4py 4.1.

    Raises:
        ImportError, AttributeError: another mpi4py, such as one compiled for a single MPI.
        RuntimeError, OSError: the library cannot be loaded.
    """
    from mpi4py import _mpiabi

    return _mpiabi._dlopen_libmpi()  # type: ignore[attr-defined]


def bind_mpi_at_once(mode: int) -> None:
    """Make a multi-MPI mpi4py open the library with `mode` (`os.RTLD_…`).

    Assumes `mpi4py._mpiabi.LIBMPI_MODE`. Raises ImportError if mpi4py is missing or different.
    """
    from mpi4py import _mpiabi

    if hasattr(_mpiabi, "LIBMPI_MODE"):
        _mpiabi.LIBMPI_MODE = mode
