"""The exchange of gradients with the options of Horovod's tape and optimizer, behind every tape and optimizer here."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.backends.select import current_exchange
from hvdtrain.compat.tensorflow import is_compiled_by_xla
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.collectives import LINEAR, all_reduce, op_name
from hvdtrain.gradients.reduction import (
    Gradient,
    GradientReducer,
    ReductionOptions,
    reduction_options,
    scaled,
    weighted,
)
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import path_of, unique_paths, unwrap

_HOROVODS_COMPRESSORS = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
_OF_TAPES = ("min", "max", "product")
"""Reductions of tapes alone, each gradient by itself."""


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """Reduces a list of gradients, but those of local variables, over the replicas.

    Raises:
        ConfigError: options that exclude one another.
    """

    role: str = "gradient"
    """Prefix of the names on the wire; distinguishes exchanges of the same variables."""
    op: Any = "average"
    """Name of the reduction, or one of Horovod's constants."""
    compression: Any = "none"
    """`none`, `fp16`, `bf16`, one of Horovod's compressors, or a class with `compress` and `decompress`."""
    groups: Any = None
    """Number of groups of gradients that leave together, or lists of their variables."""
    sparse_as_dense: bool | None = None
    gradient_predivide_factor: float = 1.0
    process_set: Any = None
    """Some of Horovod's ranks; None: `collectives`."""
    collectives: Collectives | None = None
    """The replicas; None: those of the current session when gradients are reduced."""
    scale_local_gradients: bool = True
    """Divide the gradients of local variables by the number of replicas."""
    device: str = ""
    by_position: bool = False
    """Match gradients by their position in the list, as Horovod does, and not by the paths of their variables."""
    local: dict[int, tf.Variable] = field(default_factory=dict)
    """Variables whose gradients stay local, by identity."""

    def __post_init__(self) -> None:
        grouped = [v for group in self._lists for v in group]
        known = [id(unwrap(v)) for v in grouped]
        twice = next((v for v in grouped if known.count(id(unwrap(v))) > 1), None)
        if twice is not None:  # its gradient would be summed twice
            raise ConfigError(f"groups must not share a variable. Received: {path_of(twice)!r} more than once.")
        if _known_wire(self.compression) is None and not hasattr(self.compression, "decompress"):
            raise ConfigError(
                "compression must be none, fp16, bf16, or a class with compress and decompress. Received: "
                f"{self.compression!r}."
            )
        self._options(tuple((str(i),) for i in range(len(self._lists))))

    @property
    def op_name(self) -> str:
        """The reduction's name."""
        return op_name(self.op)

    def keep_local(self, variables: Iterable[Any]) -> None:
        """Keep the gradients of `variables` local."""
        for variable in variables:
            tensor = unwrap(variable)
            self.local[id(tensor)] = tensor

    def is_local(self, source: Any) -> bool:
        """Return whether the gradient of `source` stays local."""
        return is_variable(source) and id(unwrap(source)) in self.local

    def reduce(
        self,
        gradients: Sequence[Gradient],
        sources: Sequence[Any],
        *,
        role: str = "",
        weight: Any = None,
        is_weighted: bool = False,
    ) -> list[Gradient]:
        """Return the reduced gradients in order; None stays None. Collective.

        Args:
            gradients: this replica's, dense tensors or tf.IndexedSlices; the same structure on every replica.
            sources: the variable or tensor of each.
            role: replaces the exchange's own.
            weight: scalar weight of this replica's gradients, such as its number of samples; None: all are equal.
            is_weighted: the gradients were multiplied by it.
        """
        results = list(gradients)
        shared = [i for i, source in enumerate(sources) if not self.is_local(source)]
        replicas = self._replicas()
        if replicas is not None and shared:
            own = [results[i] for i in shared]
            if weight is not None:
                weight = tf.cast(weight, tf.float32)
                own = own if is_weighted else [weighted(gradient, weight) for gradient in own]
            reduced = self._over_replicas(
                replicas, own, [sources[i] for i in shared], role=role or self.role, weight=weight
            )
            for i, gradient in zip(shared, reduced, strict=True):
                results[i] = gradient
        for i in set(range(len(results))) - set(shared):
            results[i] = self._dense(results[i])
            if self.scale_local_gradients:
                results[i] = scaled(results[i], self._one_over_size(replicas))
        return results

    def _replicas(self) -> Collectives | None:
        """Return the replicas; None on a rank that is not part of the process set."""
        replicas: Collectives | None
        if self.process_set is None:
            replicas = self.collectives or current_exchange()
        else:
            from hvdtrain.runtime.process_sets import collectives_among, is_included

            replicas = collectives_among(self.process_set) if is_included(self.process_set) else None
        is_horovods = self.process_set is not None or hasattr(replicas, "group")
        if is_horovods and not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            raise ConfigError(  # XLA's own error names no option
                "Horovod's operations cannot be compiled by XLA, which Keras turns on by itself where there is a GPU. "
                "Use model.compile(..., jit_compile=False), or tf.function without jit_compile around the exchange."
            )
        return replicas

    def _over_replicas(
        self, replicas: Collectives, gradients: list[Gradient], sources: Sequence[Any], *, role: str, weight: Any
    ) -> list[Gradient]:
        names = [str(i) for i in range(len(sources))] if self.by_position else unique_paths(sources)
        is_global = self.process_set is None or not self.process_set.process_set_id
        role = numbered(role if is_global else f"set{self.process_set.process_set_id}/{role}")
        with tf.device(self.device):
            options = self._options(self._named_groups(sources, names))
            pairs = [self._compressed(gradient) for gradient in gradients]
            packed = [gradient for gradient, _ in pairs]
            if self.op_name in _OF_TAPES:
                reduced = [self._by_itself(g, replicas, f"{role}/{n}") for g, n in zip(packed, names, strict=True)]
            elif weight is None:
                reduced = GradientReducer(replicas, options).reduce(packed, names, role=role)
            else:
                totals = tf.expand_dims(weight, 0)
                reduced = WeightedReducer(replicas, options).reduce(packed, totals, names, role=role)[0]
            if self._divides_when_run:
                reduced = [scaled(gradient, self._one_over_size(replicas)) for gradient in reduced]
            return [restore(gradient) for gradient, (_, restore) in zip(reduced, pairs, strict=True)]

    def _options(self, named: tuple[tuple[str, ...], ...]) -> ReductionOptions:
        """Return how gradients travel; `named` are the groups of variables, by the names of the latter."""
        op: Any = self.op_name
        if op in _OF_TAPES:
            return ReductionOptions()
        sparse = None if op == "adasum" and self.by_position and not self.sparse_as_dense else self.sparse_as_dense
        return reduction_options(
            "sum" if self._divides_when_run else op,
            compression="none" if self._compressor is not None else _known_wire(self.compression),
            groups=named or (0 if self._lists else int(self.groups or 0)),
            sparse_as_dense=sparse,
            gradient_predivide_factor=self.gradient_predivide_factor,
        )

    @property
    def _lists(self) -> Sequence[Sequence[Any]]:
        return () if self.groups is None or isinstance(self.groups, int) else self.groups

    def _named_groups(self, sources: Sequence[Any], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        if not self._lists:
            return ()
        known = {id(unwrap(s)): name for s, name in zip(sources, names, strict=True) if is_variable(s)}
        return tuple(tuple(known[id(unwrap(v))] for v in group if id(unwrap(v)) in known) for group in self._lists)

    @property
    def _compressor(self) -> Any:
        """A class that compresses gradients, where they do not travel in a wire format; None where they do."""
        if isinstance(self.compression, str):
            return None
        known = _known_wire(self.compression)
        # Sums in a wire format are cut to the number of ranks, which changes in elastic jobs.
        uncut = known == "fp16" and (self.op_name == "adasum" or self._is_elastic)
        return self.compression if known is None or uncut else None

    def _compressed(self, gradient: Gradient) -> tuple[Gradient, Callable[[Gradient], Gradient]]:
        """Return a gradient as it travels, and a function that decompresses its sum."""
        whole = self._dense(gradient)
        if self._compressor is None or whole is None or isinstance(whole, tf.IndexedSlices):
            return whole, lambda total: total
        packed, context = self._compressor.compress(tf.convert_to_tensor(whole))
        return packed, lambda total: self._compressor.decompress(total, context)

    @property
    def _is_elastic(self) -> bool:
        """Whether compiled functions survive a change of the ranks; those of a session are traced again."""
        if self.process_set is None:
            return False
        from hvdtrain.runtime.process_sets import is_elastic

        return is_elastic()

    @property
    def _divides_when_run(self) -> bool:
        return self._is_elastic and self.op_name == "average"

    def _one_over_size(self, replicas: Collectives | None) -> Any:
        if replicas is not None and self.process_set is None:
            return 1.0 / replicas.size
        from hvdtrain.runtime.process_sets import one_over_size

        return one_over_size(self.process_set)

    def _dense(self, gradient: Gradient) -> Gradient:
        if self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _by_itself(self, gradient: Gradient, replicas: Collectives, name: str) -> Gradient:
        if isinstance(gradient, tf.IndexedSlices):
            raise NotImplementedError(
                f"Sparse gradients have op {' and '.join(LINEAR)} only. Received: {self.op_name!r}. Use "
                "sparse_as_dense=True."
            )
        return None if gradient is None else all_reduce([gradient], replicas, name=name, op=self.op_name)[0]


def _known_wire(compression: Any) -> Any:
    """Return the name of a compression: as given, or that of one of Horovod's compressors; None for another class."""
    if isinstance(compression, str):
        return compression
    if getattr(compression, "__module__", "") != "horovod.tensorflow.compression":
        return None
    return _HOROVODS_COMPRESSORS.get(getattr(compression, "__name__", ""))


def op_of_updates(op: Any) -> str:
    """Return the name of a reduction of gradients that an optimizer applies.

    Raises:
        ConfigError: an unknown one, or one of tapes alone.
    """
    name = op_name(op)
    if name in _OF_TAPES:
        raise ConfigError(f"Updates have op='average', 'sum' or 'adasum'; {name!r} is for DistributedGradientTape.")
    return name


def wire_name(compression: Any) -> str:
    """Return the name of a compression, which a configuration can hold.

    Raises:
        ConfigError: a compressor of the user's own.
    """
    name = _known_wire(compression)
    if name is None:
        raise ConfigError(
            "DistributedOptimizer takes compression none, fp16 or bf16, which a saved model can hold. Received: "
            f"{compression!r}. Use it with hvdtrain.DistributedGradientTape."
        )
    return name


def groups_of(num_groups: int, groups: Any) -> Any:
    """Return `groups`, or its deprecated form `num_groups`."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups


def is_variable(source: Any) -> bool:
    """Return whether a source of gradients is a variable of Keras or TensorFlow, and no tensor."""
    return hasattr(source, "assign")
