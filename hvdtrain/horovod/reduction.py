"""Reduction of gradients with the options of Horovod's optimizer and tape, by `GradientReducer`."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import is_compiled_by_xla
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.training import ReduceOpName
from hvdtrain.gradients.reduction import Gradient, GradientReducer, reduction_options, scaled
from hvdtrain.horovod.basics import Adasum, Average, Compression, Sum, global_process_set, is_elastic, rocm_built
from hvdtrain.horovod.collectives import allreduce
from hvdtrain.horovod.exchange import exchange_among, is_included, one_over_size
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import unwrap

_OPS: dict[int, ReduceOpName] = {Average: "average", Sum: "sum", Adasum: "adasum"}


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How gradients are reduced; the fields are the arguments of Horovod's optimizer and tape.

    Raises:
        ConfigError: options that Horovod refuses, too.
    """

    role: str
    op: int = Average
    compression: Any = Compression.none
    groups: Any = None
    sparse_as_dense: bool = False
    predivide: float = 1.0
    process_set: Any = global_process_set
    scale_local: bool = True
    device_dense: str = ""
    local: dict[int, tf.Variable] = field(default_factory=dict)
    """Variables whose gradients stay local, by identity."""

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and rocm_built():
            raise ConfigError("gradient_predivide_factor not supported yet with ROCm")
        if self.predivide != 1.0 and self.op != Average:
            raise ConfigError("gradient_predivide_factor not supported with op != Average")
        if self.groups is not None and not (isinstance(self.groups, list) or self.groups > 0):
            raise ConfigError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def keep_local(self, variables: Iterable[Any]) -> None:
        """Keep the gradients of `variables` local."""
        for variable in variables:
            tensor = unwrap(variable)
            self.local[id(tensor)] = tensor

    def is_local(self, source: Any) -> bool:
        """Whether the gradient of `source` stays local."""
        return _is_variable(source) and id(unwrap(source)) in self.local

    def reduce(self, gradients: Sequence[Gradient], sources: Sequence[Any]) -> list[Gradient]:
        """Return the reduced gradients in order; local ones are divided by the number of ranks.

        As in Horovod, gradients are matched by position in the list: layer names may differ by rank.
        """
        _refuse_xla()
        results = list(gradients)
        shared = [i for i, source in enumerate(sources) if not self.is_local(source)]
        reduced = self._over_ranks([results[i] for i in shared], [sources[i] for i in shared])
        for i, gradient in zip(shared, reduced, strict=True):
            results[i] = gradient
        for i in set(range(len(results))) - set(shared):
            results[i] = self._dense(results[i])
            if self.scale_local and results[i] is not None:
                results[i] = scaled(results[i], one_over_size(self.process_set))
        return results

    def _over_ranks(self, gradients: list[Gradient], sources: Sequence[Any]) -> list[Gradient]:
        if not gradients or not is_included(self.process_set):
            return gradients
        role = numbered(self.role)
        places = [str(place) for place in range(len(sources))]
        groups = self._groups(sources)
        with tf.device(self.device_dense):
            if self.op not in _OPS:
                return [self._by_itself(g, f"{role}.{place}") for g, place in zip(gradients, places, strict=True)]
            if self._travels_in_halves:
                return self._reducer(groups, "fp16").reduce(gradients, places, role=role)
            return self._through_compressor(self._reducer(groups), gradients, places, role)

    @property
    def _travels_in_halves(self) -> bool:
        # Its messages are cut to the number of ranks.
        return self.compression is Compression.fp16 and self.op != Adasum and not is_elastic()

    def _reducer(self, groups: Any, wire: Any = "none") -> GradientReducer:
        op = _OPS[self.op]
        options = reduction_options(
            "sum" if self._divides_when_run else op,
            compression=wire,
            groups=groups,
            sparse_as_dense=self.sparse_as_dense,
            gradient_predivide_factor=self.predivide,
        )
        return GradientReducer(exchange_among(self.process_set), options)

    @property
    def _divides_when_run(self) -> bool:
        return self.op == Average and is_elastic()

    def _groups(self, sources: Sequence[Any]) -> Any:
        if not isinstance(self.groups, list):
            return 0 if self.groups is None else int(self.groups)
        places = {id(unwrap(source)): str(i) for i, source in enumerate(sources) if _is_variable(source)}
        return tuple(tuple(places[id(unwrap(v))] for v in group if id(unwrap(v)) in places) for group in self.groups)

    def _through_compressor(
        self, reducer: GradientReducer, gradients: list[Gradient], places: list[str], role: str
    ) -> list[Gradient]:
        """Reduce the dense gradients through `compression`, Horovod's or a custom one."""
        whole = [self._dense(gradient) for gradient in gradients]
        pairs = [(g, None) if _is_apart(g) else self.compression.compress(tf.convert_to_tensor(g)) for g in whole]
        reduced = reducer.reduce([packed for packed, _ in pairs], places, role=role)
        if self._divides_when_run:
            reduced = [scaled(gradient, one_over_size(self.process_set)) for gradient in reduced]
        return [
            gradient if _is_apart(gradient) else self.compression.decompress(gradient, context)
            for gradient, (_, context) in zip(reduced, pairs, strict=True)
        ]

    def _dense(self, gradient: Gradient) -> Gradient:
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _by_itself(self, gradient: Gradient, name: str) -> Gradient:
        """Reduce a gradient by an op that only tapes support: min, max, product."""
        if gradient is None:
            return None
        return allreduce(
            self._dense(gradient),
            op=self.op,
            compression=self.compression,
            name=name.replace("/", ".").replace("#", "."),
            process_set=self.process_set,
            ignore_name_scope=True,
        )


def groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or its deprecated form `num_groups`."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")


def _is_apart(gradient: Gradient) -> bool:
    return gradient is None or isinstance(gradient, tf.IndexedSlices)


def _refuse_xla() -> None:
    """Refuse compilation by XLA, for which Horovod has no ops; XLA's own error names no option.

    Raises:
        ConfigError: within a function with `jit_compile=True`.
    """
    if tf.executing_eagerly():
        return
    if is_compiled_by_xla(tf.compat.v1.get_default_graph()):
        raise ConfigError(
            "Horovod's operations cannot be compiled by XLA, which Keras turns on by itself where there is a GPU. Use "
            "model.compile(..., jit_compile=False), or tf.function without jit_compile around the exchange."
        )
